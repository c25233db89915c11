"""A server: holds shards, applies what is pushed to them, answers pulls.

It drives one `Shard` machine a shard, and is the only one who writes to the parameters:

    port ──► message ──► machines ──► actions ──► applier ──► answer ──► port

A request is about a range of shards and gets one answer, when all of them have answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

from torch import Tensor

from headrace.comm.port import Mail, Port
from headrace.ps.applier import Applier
from headrace.ps.coordinator import Coordinator
from headrace.ps.form import Form
from headrace.ps.leases import Leases
from headrace.ps.messages import Kind, Message, decode, encode
from headrace.ps.request import Request
from headrace.ps.shard import (
    Accumulate,
    Ack,
    Action,
    Join,
    Leave,
    Pull,
    Push,
    Reason,
    Refuse,
    Renew,
    Reply,
    Settle,
    Shard,
    Step,
)
from headrace.ps.tally import Tally
from headrace.replica.conditioning import all_finite

__all__ = ["Server"]

_WAIT_S = 0.1

_Actions = list[tuple[int, list[Action]]]
"""What shards want done."""


class _StepFailed(Exception):
    """The job's optimizer has raised, which is no worker's fault.

    Args:
        error: what it has raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Server:
    """Its parameters are zeros until a worker has loaded others.

    Args:
    port: its end of the links.
    form: of its shards.
    applier: moves them.
    machines: one a shard.
    coordinates: leases of the run's data, and the first fence in rounds, on the one server that gives them out.

    Attributes:
        tally: what has been done so far.
    """

    def __init__(
        self,
        port: Port,
        form: Form,
        applier: Applier,
        machines: Sequence[Shard],
        coordinates: tuple[Leases, int] | None = None,
    ) -> None:
        self.tally = Tally(form)
        self._port = port
        self._form = form
        self._applier = applier
        self._machines = list(machines)
        self._coordinator = None
        if coordinates:
            leases, until = coordinates
            self._coordinator = Coordinator(leases, port.send, until)
        self._tensors = [form.view(shard, port.parameters(shard)) for shard in range(len(form))]
        applier.seat(self._tensors)
        self._members: dict[int, tuple[int, int]] = {}
        self._peers: dict[int, int] = {}
        self._observers: dict[int, int] = {}
        self._open: dict[tuple[int, int], Request] = {}
        self._settled = -1
        self._ended = False

    @property
    def address(self) -> str:
        """Where clients find it."""
        return self._port.address

    @property
    def moved_bytes(self) -> int:
        """Payload that was pushed to it and pulled from it."""
        return self.tally.moved_bytes

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters, and of the optimizer's state."""
        return self._applier.memory()

    def lost(self, worker: int, incarnation: int) -> None:
        """Is told that a worker has gone, in this incarnation and all before, whether it ever came here or not."""
        peer = self._peers.get(worker)
        if peer is not None:
            if self._members[peer][1] > incarnation:
                return
            self._forget(peer)
            self._port.drop(peer)
        else:
            self._leave(worker)

    def close(self) -> None:
        """Ends all links."""
        self._port.close()

    def serve(self, check: Callable[[], None]) -> None:
        """Serves until a worker says that the run has ended; `check` is called about ten times a second."""
        while not self._ended:
            self.turn(_WAIT_S)
            check()

    def turn(self, timeout_s: float) -> None:
        """Deals with all mail that is there; waits for some, but not longer than `timeout_s`."""
        mail = self._port.receive(timeout_s)
        began = perf_counter()
        self.tally.queued(len(mail))
        try:
            self._deal_with(mail)
        except _StepFailed as failed:
            raise failed.error from None
        self.tally.busy_s += perf_counter() - began

    def _deal_with(self, mail: Sequence[Mail]) -> None:
        for each in mail:
            try:
                self._deal(each)
            except ValueError as error:
                # Whoever cannot speak properly harms itself alone.
                self._port.send(each.peer, encode(Message(Kind.ERROR)), blob=str(error).encode())
                self._forget(each.peer)
                self._port.drop(each.peer)

    def _deal(self, mail: Mail) -> None:
        if not mail.message:
            self._forget(mail.peer)
            return
        message = decode(mail.message)
        if message.kind == Kind.JOIN:
            self._join(mail.peer, message, mail.blob)
        elif mail.peer not in self._members and mail.peer not in self._observers:
            raise ValueError(f"{message.kind.name} from a link that has not joined")
        elif message.kind == Kind.PULL and mail.peer in self._observers:
            self._show(mail.peer, message)
        elif message.kind in (Kind.PUSH, Kind.PULL, Kind.PUSH_PULL):
            self._take(mail.peer, message)
        elif message.kind in (Kind.ASK, Kind.COMMIT, Kind.HALT, Kind.ADVANCE, Kind.BEGIN):
            if self._coordinator is None:
                raise ValueError("this server gives out no data")
            self._coordinator.handle(self._worker_at(mail.peer), mail.peer, message)
        else:
            self._administer(mail, message)

    def _join(self, peer: int, message: Message, blob: memoryview) -> None:
        difference = self._form.difference(bytes(blob))
        if difference:
            raise ValueError(difference)
        if len(message.numbers) != 2:
            raise ValueError("a worker joins with its number and its incarnation")
        worker, incarnation = message.numbers
        if message.flag:
            self._observers[peer] = worker
            self._port.send(peer, encode(Message(Kind.DONE)))
            return
        older = self._peers.get(worker)
        if older is not None:
            self._forget(older)
            self._port.drop(older)
        self._members[peer] = (worker, incarnation)
        self._peers[worker] = peer
        self._tell_all(Join(worker, incarnation))
        for shard, machine in enumerate(self._machines):
            self._port.show(shard, machine.version)
        self._port.send(peer, encode(Message(Kind.DONE)))

    def _forget(self, peer: int) -> None:
        """Ends the membership of whoever was at the other end of a link."""
        self._observers.pop(peer, None)
        worker, _ = self._members.pop(peer, (None, None))
        if worker is None:
            return
        del self._peers[worker]
        self._open = {key: request for key, request in self._open.items() if key[0] != worker}
        self._leave(worker)

    def _leave(self, worker: int) -> None:
        self._tell_all(Leave(worker))
        if self._coordinator is not None:
            self._coordinator.lost(worker)

    def _worker_at(self, peer: int) -> int:
        return self._observers[peer] if peer in self._observers else self._members[peer][0]

    def _show(self, peer: int, message: Message) -> None:
        """Answers who only looks: it waits for nobody."""
        shards = self._named(message)
        versions = tuple(self._machines[shard].version for shard in shards)
        changed = [shard for shard, new, had in zip(shards, versions, message.numbers, strict=True) if new != had]
        for shard, version in zip(shards, versions, strict=True):
            self._port.show(shard, version)
        worker = self._observers[peer]
        if changed:
            self._applier.sent(worker, changed)
        self.tally.answered(worker, (), changed, 0.0)
        self._reply(worker, peer, Message(Kind.ANSWER, message.first, numbers=versions), changed)

    def _reply(self, worker: int, peer: int, message: Message, pulled: Sequence[int]) -> None:
        if self._form.reply_slots is not None:
            for shard in pulled:
                self._form.encode_reply(worker, shard, self._tensors[shard], self._port.reply_slot(peer, shard))
        self._port.send(peer, encode(message), pulled)

    def _named(self, message: Message) -> range:
        shards = range(message.first, message.first + len(message.numbers))
        if not shards or shards.stop > len(self._machines):
            raise ValueError(f"shards {shards.start} to {shards.stop} of the {len(self._machines)} that are here")
        return shards

    def _tell_all(self, event: Join | Leave | Settle | Renew) -> None:
        self._carry_out([(shard, machine.handle(event)) for shard, machine in enumerate(self._machines)])

    def _take(self, peer: int, message: Message) -> None:
        """Gives a push, a pull or both to the shards that they are about."""
        if peer not in self._members:
            raise ValueError(f"{message.kind.name} from a link that only observes")
        worker, incarnation = self._members[peer]
        shards = self._named(message)
        if not (
            math.isfinite(message.weight) and math.isfinite(message.share) and min(message.weight, message.share) >= 0
        ):
            raise ValueError(f"a push of weight {message.weight} and share {message.share}")
        if any((worker, shard) in self._open for shard in shards):
            raise ValueError(f"worker {worker} asks again before it is answered")
        pushes, pulls = message.kind != Kind.PULL, message.kind != Kind.PUSH
        gradients = self._gradients(peer, message, shards) if pushes else {}
        request = Request(peer, message, shards, (pushes + pulls) * len(shards), gradients)
        for shard in shards:
            self._open[worker, shard] = request
        finite = bool(message.flag) and (self._port.vouched or all_finite(list(gradients.values())))
        actions: _Actions = []
        for shard, version in zip(shards, message.numbers, strict=True):
            machine, made_with = self._machines[shard], max(version, ~version)
            wanted: list[Action] = []
            if pushes:
                push = Push(worker, incarnation, message.lease, made_with, message.weight, message.share, finite)
                wanted += machine.handle(push)
            if pulls:
                wanted += machine.handle(Pull(worker, incarnation))
            actions.append((shard, wanted))
        self._carry_out(actions)

    def _gradients(self, peer: int, message: Message, shards: range) -> dict[int, Tensor]:
        """Returns what a worker has pushed, by shard, without those on which its loss does not depend."""
        if not message.weight or not message.flag:
            return {}
        unpack, pushed = self._form.decode, self._port.pushed
        versions = zip(shards, message.numbers, strict=True)
        return {shard: unpack(shard, pushed(peer, shard)) for shard, version in versions if version >= 0}

    def _carry_out(self, actions: _Actions) -> None:
        alone: dict[tuple[int, float, int], list[int]] = {}
        words: list[tuple[int, Ack | Refuse | Reply]] = []
        for shard, wanted in actions:
            for action in wanted:
                if isinstance(action, Step):
                    if len(action.workers) == 1:
                        # One push's steps are made together.
                        alone.setdefault((action.workers[0], action.share, action.staleness), []).append(shard)
                    else:
                        self._step_mean(shard, action)
                elif not isinstance(action, Accumulate):
                    words.append((shard, action))
        for (worker, share, staleness), shards in alone.items():
            request = self._open[worker, shards[0]]
            present = [(shard, request.gradients[shard]) for shard in shards if shard in request.gradients]
            self._step(shards, present, worker, share, staleness, request.message.steps)
        for shard, word in words:
            self._tell(shard, word)

    def _step_mean(self, shard: int, step: Step) -> None:
        """Applies the mean of a round, added up in the order of the workers, so that every run adds alike."""
        requests = [self._open[worker, shard] for worker in step.workers]
        weight = sum(request.message.weight for request in requests)
        mean: Tensor | None = None
        for request in requests:
            gradient = request.gradients.get(shard)
            if gradient is not None:
                part = request.message.weight / weight
                mean = gradient * part if mean is None else mean.add_(gradient, alpha=part)
        self._step([shard], [] if mean is None else [(shard, mean)], -1, step.share, step.staleness)

    def _step(
        self,
        shards: Sequence[int],
        gradients: Sequence[tuple[int, Tensor]],
        worker: int,
        share: float,
        staleness: int,
        steps: int = 1,
    ) -> None:
        began = perf_counter()
        with self._port.changing(shards):
            try:
                self._applier.apply(gradients, shards, worker, share, staleness, steps)
            except Exception as error:
                raise _StepFailed(error) from error
            for shard in shards:
                self._port.show(shard, self._machines[shard].version)
        self.tally.stepped(shards, worker, staleness, perf_counter() - began)

    def _tell(self, shard: int, action: Ack | Refuse | Reply) -> None:
        """Notes what a shard says to a worker; sends the answer when it is complete."""
        request = self._open.get((action.worker, shard))
        if request is None:
            return
        if isinstance(action, Refuse):
            # What comes too late anywhere comes again everywhere; a shard that has it already says so then.
            if request.refused is None or action.reason == Reason.LATE:
                request.refused = action.reason
            if action.lease >= 0:
                self.tally.refused(action.reason.name.lower())
        request.unsaid -= 1
        if not request.unsaid:
            self._answer(action.worker, request)

    def _answer(self, worker: int, request: Request) -> None:
        asked, shards = request.message, request.shards
        show, pulls = self._port.show, asked.kind != Kind.PUSH
        versions, pulled = [], []
        for shard, had in zip(shards, asked.numbers, strict=True):
            del self._open[worker, shard]
            version = self._machines[shard].version
            versions.append(version)
            show(shard, version)
            if pulls and version != had:
                pulled.append(shard)
        if pulled:
            self._applier.sent(worker, pulled)
        flag = request.refused.value if request.refused else 0
        message = Message(Kind.ANSWER, asked.first, flag, asked.lease, numbers=tuple(versions))
        self._port.release(request.peer, shards)
        # Before it is counted, because somebody waits for it.
        self._reply(worker, request.peer, message, pulled)
        pushed = shards if asked.kind != Kind.PULL else ()
        self.tally.answered(worker, pushed, pulled, perf_counter() - request.came)

    def _administer(self, mail: Mail, message: Message) -> None:
        """Does what is asked for between rounds, when nobody pushes."""
        blob = b""
        if message.kind == Kind.STATE:
            blob = self._applier.state(message.first) if message.flag else self._applier.settings().encode()
        elif message.kind == Kind.LOAD:
            self._load(message, bytes(mail.blob))
        elif message.kind == Kind.AVERAGE:
            with self._port.changing(range(len(self._machines))):
                self._applier.show_average(bool(message.flag))
            self._tell_all(Renew())
        elif message.kind == Kind.SETTLE:
            self._settle(message.lease)
        elif message.kind == Kind.LEAVE:
            self._forget(self._peers.get(self._worker_at(mail.peer), mail.peer))
        elif message.kind == Kind.END:
            self._ended = True
        else:
            raise ValueError(f"{message.kind.name} is nothing that a worker asks")
        self._port.send(mail.peer, encode(Message(Kind.DONE)), blob=blob)

    def _settle(self, done: int) -> None:
        """Is told how many rounds are done, by all who have met: by some of them when new pushes have come since."""
        if done > self._settled:
            self._settled = done
            self._applier.settle(done)
            self._tell_all(Settle())

    def _load(self, message: Message, blob: bytes) -> None:
        if not message.flag:
            self._applier.configure(blob.decode())
            return
        self._named(message._replace(numbers=(0,)))
        with self._port.changing([message.first]):
            self._applier.load(message.first, blob)
        self._carry_out([(message.first, self._machines[message.first].handle(Renew()))])
