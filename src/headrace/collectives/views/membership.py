"""One process's part in the decision who the members of a run on several hosts are: a thread beside the training.

    training thread    hold ─ barrier ─ all hold ─► committed        MemberLost ─► next_view ─► goes on
                        │                │                             ▲
    this thread        ViewAgreement, under a lock ────────────────────┘ frozen, or a new view
                        ▲ │
                       MemberMail: messages of the agreement, signs of life, marks of the control page

That all members hold a step comes by a barrier of the training's own connections, because it is faster.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from headrace.collectives.views.mail import MemberMail
from headrace.errors import LeftBehind
from headrace.policies.membership import (
    Accept,
    Accepted,
    Action,
    AskToJoin,
    At,
    Decided,
    Depart,
    End,
    Enter,
    HoldsStep,
    Message,
    Prepare,
    Promise,
    Send,
    ViewAgreement,
)
from headrace.policies.views import Member, MemberView
from headrace.shared_memory.barrier import MemberLost
from headrace.spec.plain import from_plain, to_plain

_TICK_S = 0.1
_PATIENCE_S = 2.0
"""How long a member that seems to live may take to answer, at most."""

_SLICE_S = 0.05
_STOOD_STILL_S = 1.0
_ASKS_S = 1.0
"""A process that has asked to join asks again within this time, if it lives."""

_MESSAGES: dict[str, type[Message]] = {
    each.__name__: each for each in (HoldsStep, Prepare, Promise, Accept, Accepted, Decided, At, AskToJoin)
}
_TEXT, _MARKS, _BYE, _LEAVE, _GOING = "Text", "Marks", "Bye", "Leave", "Going"


@dataclass(frozen=True)
class Marks:
    """How the marks of a process come to the control pages of others: their bytes, and what takes another rank's."""

    own: Callable[[], bytes]
    take: Callable[[int, bytes], None]


class MembershipThread:
    """The thread.

    Args:
        known: the members that run, and where they listen.
        view: the first one; None for a process that joins.
        timeout_s: a member that is silent for so long is lost.
        marks: None where the processes have one control page.
        check_run: raises where the run has failed.

    Attributes:
        suspects: the members that seem to be lost; whether they are, the agreement decides.
        closed: those that have ended in order, and need the others no more.
        is_to_leave: whether this process was asked to leave the others.
    """

    def __init__(
        self,
        me: Member,
        mail: MemberMail,
        known: Mapping[Member, str],
        view: MemberView | None,
        timeout_s: float,
        marks: Marks | None,
        check_run: Callable[[], None],
    ) -> None:
        self._check_run = check_run
        self._me = me
        self._mail = mail
        self._timeout_s = timeout_s
        self._marks = marks
        self._agreement = ViewAgreement(me, view, int(min(_PATIENCE_S, timeout_s) / _TICK_S))
        self._changed = threading.Condition()
        self.suspects: set[Member] = set()
        self.closed: set[Member] = set()
        self.is_to_leave = self._is_going = False
        self._asking: dict[Member, float] = {}
        self._heard: dict[Member, float] = dict.fromkeys(view.members if view else (), monotonic())
        self._texts: dict[int, dict[Member, str]] = {}
        self._outgoing: list[tuple[Member, str, object]] = []
        self._why = ""
        self._failure: BaseException | None = None
        self._closing = False
        mail.learn(known)
        self._thread = threading.Thread(target=self._run, name="headrace-membership", daemon=True)
        self._thread.start()

    def check(self, number: int | None = None) -> None:
        """Raises where the run has failed, or goes on without this process.

        Of a view's number, also a MemberLost where its members are about to change, or have changed.
        """
        with self._changed:
            self._raise_end()
            if number is not None:
                self._raise_change(number)

    def hold(self, number: int, silently: bool = False) -> int:
        """Notes that this process has done its part of a step, and will not repeat it; returns the step.

        If `silently`, it may still `release` it. Raises MemberLost where the view's members change, so that it may be
        repeated.
        """
        with self._changed:
            self._raise_end()
            self._raise_change(number)
            step = self._agreement.done
            # The others learn it by a barrier.
            actions = self._agreement.hold(silently)
            self._act(action for action in actions if not isinstance(action, Send))
            return step

    def commit(self, number: int, step: int, passed: bool, refused: bool = False) -> bool | None:
        """Returns whether a step that this process holds is done, for all members or for none.

        None where a step that it held silently was `refused`, and the members' next view cannot count it.
        If the barrier after `hold` was not `passed`, it blocks until the members have changed, and know it.
        """
        with self._changed:
            if refused and self._number == number and self._agreement.release():
                return None
            if self._number == number and self._agreement.done == step:
                # From now on the others are told where the barrier has not.
                held = self._agreement.hold()
                self._act(held if not passed else (each for each in held if not isinstance(each, Send)))
            for member in self._others() if passed and self._number == number else ():
                self._act(self._agreement.receive(member, HoldsStep(number, step)))
            while self._agreement.done <= step and self._number == number:
                self._raise_end()
                self._changed.wait(_SLICE_S)
            return self._agreement.done > step

    def next_view(self, after: int, leaves: bool = False) -> MemberView:
        """Blocks until there is a view after one of that number; returns the newest.

        If this process `leaves`, the others make one without it.
        """
        with self._changed:
            self._is_going |= leaves
            self._say_going()
            self._mail.wake()
            while self._agreement.view is None or self._number <= after:
                self._raise_end()
                self._changed.wait(_SLICE_S)
            return self._agreement.view

    def receive_state(self) -> None:
        """Notes that this process has the state of the view's beginning."""
        with self._changed:
            self._act(self._agreement.receive_state())

    def take_in(self) -> None:
        """Begins to make members of the processes that ask to join."""
        with self._changed:
            asked = [member for member, when in self._asking.items() if monotonic() - when < _ASKS_S]
            self._asking.clear()
            for member in asked:
                self._act(self._agreement.receive(member, AskToJoin()))
        if asked:
            self._mail.wake()

    def ask_to_leave(self, members: Iterable[Member]) -> None:
        """Asks members to leave the others between two rounds."""
        with self._changed:
            self.is_to_leave |= self._me in members
            self._outgoing += [(member, _LEAVE, None) for member in members]
        self._mail.wake()

    def suspect(self, member: Member) -> None:
        """Notes that a connection to a member has ended."""
        with self._changed:
            self._suspect({member})
        self._mail.wake()

    def tell(self, number: int, text: str) -> list[str]:
        """Returns the texts of all members of a view, in order; each calls it once.

        Raises MemberLost where the members change meanwhile.
        """
        with self._changed:
            self._texts.setdefault(number, {})[self._me] = text
            self._say_text()
            self._mail.wake()
            while True:
                self._raise_end()
                self._raise_change(number)
                view, texts = self._agreement.view, self._texts[number]
                assert view is not None
                if texts.keys() >= set(view.members):
                    return [texts[member] for member in view.members]
                self._changed.wait(_SLICE_S)

    def close(self, in_order: bool, after: Member | None = None) -> None:
        """Ends the thread and its connections; the others do not take this for a loss if it is `in_order`.

        Where `after` is given, it first waits until that member has closed, or is lost.
        """
        with self._changed:
            while after and after not in self.closed | self.suspects and not (self._failure or self._why):
                self._changed.wait(_SLICE_S)
            self._closing = True
            self._say_marks()
            if in_order:
                self._outgoing += [(member, _BYE, None) for member in self._others()]
        self._mail.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            tick_at = looked = monotonic()
            while not self._closing:
                self._mail.poll(max(0.0, tick_at - monotonic()))
                now = monotonic()
                with self._changed:
                    for sender, kind, content in self._mail.receive():
                        self._heard[sender] = now
                        self._take(sender, kind, content)
                    if now - looked > _STOOD_STILL_S:
                        # This process itself stood still; what others have sent meanwhile is still on its way.
                        self._heard = dict.fromkeys(self._heard, now)
                    looked = now
                    self._look(now)
                    if now >= tick_at:
                        tick_at = now + _TICK_S
                        self._tick()
                    outgoing, self._outgoing = self._outgoing, []
                    self._changed.notify_all()
                for message in outgoing:
                    self._mail.send(*message)
            for message in self._outgoing:
                self._mail.send(*message)
        except BaseException as failure:  # raised again by the training thread
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
        finally:
            self._mail.close()

    def _tick(self) -> None:
        self._act(self._agreement.tick())
        if self._agreement.view is None:
            self._outgoing += [(member, AskToJoin.__name__, {}) for member in self._mail.others]
            return
        self._say_text()
        self._say_marks()
        self._say_going()

    def _look(self, now: float) -> None:
        """Suspects the members that cannot be reached."""
        gone = {member for member in self._others() if member in self._mail.gone}
        silent = {member for member in self._others() if now - self._heard.setdefault(member, now) > self._timeout_s}
        self._suspect((gone | silent) - self.closed)

    def _suspect(self, suspects: set[Member]) -> None:
        if not suspects <= self.suspects:
            # One that is suspected once stays so.
            self.suspects |= suspects
            self._act(self._agreement.suspect(self.suspects))

    def _take(self, sender: Member, kind: str, content: Any) -> None:
        view = self._agreement.view
        if kind == _BYE:
            self.closed.add(sender)
        elif kind == _LEAVE:
            self.is_to_leave = True
        elif kind == _GOING:
            if view is not None and view.members[0] == self._me:
                self._act(self._agreement.let_leave([sender]))
        elif kind == _TEXT:
            number, text = content
            if view is None or number >= view.number:
                self._texts.setdefault(int(number), {})[sender] = str(text)
        elif kind == _MARKS:
            # Also those of one that has just ended, which may say why.
            replaced = any(rank == sender[0] and sender != (rank, now) for rank, now in self._others())
            if self._marks and sender in self._heard and not replaced:
                self._marks.take(sender[0], base64.b64decode(content))
        elif kind == AskToJoin.__name__ and view is not None and sender not in view.members:
            # Until the members are between two rounds.
            self._asking[sender] = monotonic()
        else:
            self._act(self._agreement.receive(sender, from_plain(_MESSAGES[kind], content)))

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._outgoing.append((action.to, type(action.message).__name__, to_plain(action.message)))
            elif isinstance(action, Enter):
                number = action.view.number
                self._texts = {each: texts for each, texts in self._texts.items() if each >= number}
                self._heard |= dict.fromkeys(action.view.members, monotonic())
            elif isinstance(action, End):
                self._why = action.why
            # One that has left sees it in the view.
            elif isinstance(action, Depart):
                self._texts.clear()

    def _say_text(self) -> None:
        view = self._agreement.view
        own = self._texts.get(view.number, {}).get(self._me) if view else None
        if view and own is not None:
            self._outgoing += [(member, _TEXT, [view.number, own]) for member in self._others()]

    def _say_marks(self) -> None:
        if self._marks:
            marks = base64.b64encode(self._marks.own()).decode()
            self._outgoing += [(member, _MARKS, marks) for member in self._others()]

    def _say_going(self) -> None:
        view = self._agreement.view
        if self._is_going and view is not None and self._me in view.members:
            self._outgoing.append((view.members[0], _GOING, None))
            if view.members[0] == self._me:
                self._act(self._agreement.let_leave([self._me]))

    def _others(self) -> list[Member]:
        view = self._agreement.view
        return [member for member in view.members if member != self._me] if view else []

    @property
    def _number(self) -> int:
        return self._agreement.view.number if self._agreement.view else -1

    def _raise_change(self, number: int) -> None:
        # A suspect lets the members change, sooner or later.
        if self._agreement.frozen or self._number != number or self.suspects.intersection(self._others()):
            raise MemberLost(next((rank for rank, _ in sorted(self.suspects)), self._me[0]))

    def _raise_end(self) -> None:
        if self._failure:
            raise self._failure
        self._check_run()
        if self._why:
            raise LeftBehind(self._me[0], self._why)
