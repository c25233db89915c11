"""Which process handles messages, and when: a server and its backup as state machines without sockets and clocks.

A *primary* numbers its messages: the log. It handles an entry when its backup *holds* it, so that nothing that a worker
has seen is lost with the primary. The backup handles the same log in the same order.

    worker    message ─►┐                           ┌──► answer
    primary          Received ─ Forward(7) ─┐  Held(7) ─ Deal(7)
    backup                               Entry(7) ─ Deal(7), Hold(7)

One `Authority` assigns the roles, in numbered views: their *epochs*. Anything of an older epoch than a process has
heard of is refused. A backup begins empty, and is filled with the primary's state. From the call of the backup on the
primary handles nothing that the backup does not hold, so that it has nothing to catch up with when it is filled: then
it can be promoted, which `Ready` says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """The roles from now on; `epoch` counts views from 1.

    Primary and backup are numbers of processes, which no other process ever has; backup is None if there is none.
    """

    epoch: int
    primary: int
    backup: int | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A primary has received a message."""


@dataclass(frozen=True, slots=True)
class Called:
    """A backup has connected to the primary in this epoch."""

    epoch: int
    process: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection of a process that has called in this epoch has ended."""

    epoch: int
    process: int


@dataclass(frozen=True, slots=True)
class Held:
    """The backup holds the log up to and including `number`."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Filled:
    """The backup has loaded the state after the log up to and including `number`."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class LogEntryReceived:
    """The backup has received a log entry."""

    epoch: int
    number: int


Event = View | Received | Called | Gone | Held | Filled | LogEntryReceived


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the message that was received last to the backup, as this entry."""

    number: int


@dataclass(frozen=True, slots=True)
class Deal:
    """Handle this log entry."""

    number: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Send the backup the state after the log up to and including `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The backup holds all that was handled: from now on it can be promoted."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Connect to the primary, and drop what was held before."""

    epoch: int
    primary: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Tell the primary that the log is held up to and including `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Become the primary: receive messages."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Another process has this role: handle nothing more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RefuseOldEpoch:
    """The event is of an older epoch: end its connection."""

    epoch: int


Action = Forward | Deal | Fill | Ready | Follow | Hold | Lead | Stop | RefuseOldEpoch


class Replication:
    """One process: a primary, a backup, or neither; `dealt` is the last entry that is handled or is about to be."""

    def __init__(self, process: int) -> None:
        self.view, self.epoch = View(0, -1), 0
        self.last = self.dealt = 0
        self._process = process
        self._stage = _IDLE
        self._callers: set[Called] = set()

    @property
    def leads(self) -> bool:
        """Whether this process is the primary."""
        return self._stage in (_ALONE, _FILLING, _GUARDED)

    def handle(self, event: Event) -> list[Action]:
        """Returns the actions to carry out, in order; raises ValueError if another process has broken the protocol."""
        if isinstance(event, View):
            return self._look(event)
        if isinstance(event, Received):
            return self._receive()
        if isinstance(event, Gone):
            self._callers.discard(Called(event.epoch, event.process))
            return []
        if event.epoch < self.epoch:
            return [RefuseOldEpoch(self.epoch)]
        if isinstance(event, Called):
            self._callers.add(event)
            return self._begin_to_fill()
        if event.epoch > self.epoch:
            raise ValueError(f"epoch {event.epoch} has begun, and process {self._process} was not told so")
        if isinstance(event, Held):
            return self._advance(event)
        return self._follow(event)

    def _look(self, view: View) -> list[Action]:
        if view.epoch <= self.epoch:
            return [] if view == self.view else [RefuseOldEpoch(self.epoch)]
        led, followed, first = self.leads, self._stage == _FOLLOWING, not self.epoch
        self.epoch, self.view = view.epoch, view
        self._callers = {caller for caller in self._callers if caller.epoch >= view.epoch}
        if view.primary != self._process:
            if view.backup == self._process:
                self._stage, self.last, self.dealt = _EMPTY, 0, 0
                return [Follow(view.epoch, view.primary)]
            self._stage = _IDLE
            return [Stop(view.epoch)]
        # A process whose first view is not the first of all was its primary: backups have had a view before.
        if not (led or followed or first):
            raise ValueError(f"process {self._process} holds nothing, and is to be the primary of epoch {view.epoch}")
        self._stage = _ALONE
        # The old backup has no role any more, so what was forwarded to it need not be held.
        actions: list[Action] = [] if led else [Lead(view.epoch)]
        return [*actions, *self._deal(self.last), *self._begin_to_fill()]

    def _receive(self) -> list[Action]:
        if not self.leads:
            return []
        self.last += 1
        return self._deal(self.last) if self._stage == _ALONE else [Forward(self.last)]

    def _begin_to_fill(self) -> list[Action]:
        backup = self.view.backup
        if self._stage != _ALONE or backup is None or Called(self.epoch, backup) not in self._callers:
            return []
        self._stage = _FILLING
        return [Fill(self.dealt)]

    def _advance(self, held: Held) -> list[Action]:
        if self._stage not in (_FILLING, _GUARDED) or not self.dealt <= held.number <= self.last:
            raise ValueError(f"piece {held.number} is held, of a log of {self.last}, of which {self.dealt} are handled")
        ready: list[Action] = [Ready(self.epoch)] if self._stage == _FILLING else []
        self._stage = _GUARDED
        return [*self._deal(held.number), *ready]

    def _follow(self, event: Filled | LogEntryReceived) -> list[Action]:
        if isinstance(event, Filled):
            if self._stage != _EMPTY:
                raise ValueError("what a backup is filled with comes once, and first")
            self._stage, self.last, self.dealt = _FOLLOWING, event.number, event.number
            return [Hold(event.number)]
        if self._stage != _FOLLOWING or event.number != self.last + 1:
            raise ValueError(f"piece {event.number} comes after {self.last}")
        self.last = event.number
        return [*self._deal(event.number), Hold(event.number)]

    def _deal(self, until: int) -> list[Action]:
        deals: list[Action] = [Deal(number) for number in range(self.dealt + 1, until + 1)]
        self.dealt = max(self.dealt, until)
        return deals


_IDLE, _ALONE, _FILLING, _GUARDED, _EMPTY, _FOLLOWING = range(6)
"""Neither; a primary without a backup, with one that is being filled, that holds all; a backup that is empty, and one
that is not."""


@dataclass(frozen=True, slots=True)
class Up:
    """A process has started, and takes any role."""

    process: int


@dataclass(frozen=True, slots=True)
class Down:
    """A process has certainly ended: it has exited, or was killed and waited for."""

    process: int


News = Up | Down | Ready


class PrimaryLost(Exception):
    """The primary is lost, and no backup holds its state."""


class Authority:
    """Decides the views of one server; the launcher has the only one.

    `view` is the newest, None before a process has started; `ready` says whether its backup can be promoted.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self.ready = False
        self._spare: list[int] = []

    def handle(self, news: News) -> View | None:
        """Returns the next view, if there is one; raises PrimaryLost if the primary is down without a ready backup."""
        view = self.view
        if isinstance(news, Ready):
            self.ready = self.ready or (view is not None and news.epoch == view.epoch)
            return None
        if isinstance(news, Up):
            self._spare.append(news.process)
        elif news.process in self._spare:
            self._spare.remove(news.process)
        if view is None:
            return self._next(self._spare.pop(0)) if self._spare else None
        down = news.process if isinstance(news, Down) else None
        if down == view.primary:
            if view.backup is None or not self.ready:
                raise PrimaryLost(f"process {down} is gone, and no other process holds what it held")
            return self._next(view.backup)
        if down is not None and down == view.backup:
            return self._next(view.primary)
        return self._next(view.primary) if view.backup is None and self._spare else None

    def _next(self, primary: int) -> View:
        backup = self._spare.pop(0) if self._spare else None
        self.view = View(self.view.epoch + 1 if self.view else 1, primary, backup)
        self.ready = False
        return self.view
