"""What a worker of Downpour SGD runs: local steps, and pushes and fetches in threads beside them."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.internals import foreach_add_, foreach_copy_
from headrace.machine.background import BackgroundThread
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.data_leases import BackgroundWork, LeasedStep, ServerDataLeases
from headrace.parameter_server.client.exchange import GradientAccumulator, ReplicaGroup, ServedExchange, alike
from headrace.parameter_server.client.own_steps import LocalOptimizer, OwnSteps
from headrace.parameter_server.wire import Kind, Message, ShardLayout
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.training.clipping import StepDecision
from headrace.training.optimizer import StatePiece, build
from headrace.training.update import AVERAGE, Schedule

Push = tuple[list[list[Tensor | None]], float, int]
"""What is pushed, by server and shard; the mean share of a round of its steps; their number."""


@dataclass(frozen=True)
class Background:
    """A thread, which alone uses `client`."""

    thread: BackgroundThread
    client: Client

    def close(self) -> None:
        """Waits for the task, and closes the connections; a task's error is dropped, as it follows from the end."""
        self.thread.close()
        self.client.close()


class ServerLinks(BackgroundWork):
    """A worker's clients: one for everything, or one for each of its threads.

    `main` leases the data, and is used where all workers synchronize; it also pushes and fetches if nothing does so in
    the background. `fetching` writes to the places `fetched`, which are taken over on all ranks of a replica at once.
    `versions` are those of the parameters that this worker computes with, by server and shard; `renewed` says whether
    they were taken over since a reader cleared it. With `own_steps`, those of this worker, pushes and
    fetches take turns, so that a fetch has all that was pushed before it, and nothing else.
    """

    renewed = True

    def __init__(
        self,
        main: Client,
        places: Sequence[Sequence[Tensor]],
        fetch_every: int,
        replica_group: ReplicaGroup,
        pushing: Background | None = None,
        fetching: Background | None = None,
        fetched: Sequence[Sequence[Tensor]] = (),
        own_steps: OwnSteps | None = None,
    ) -> None:
        self.main = main
        self.own_steps = own_steps
        self.pushing = pushing
        self.versions = main.versions
        self._fetch_every = fetch_every
        self._replica_group = replica_group
        self._since, self._ready = 0, False
        self._fetching = fetching
        self._places, self._into = ([*chain.from_iterable(by_server)] for by_server in (places, fetched))
        self._backgrounds = [background for background in (pushing, fetching) if background is not None]

    def pull(self) -> None:
        """Brings the parameters up to date now."""
        # Local steps have changed them since the last pull.
        self.main.forget()
        self.main.pull()
        self.versions, self.renewed = self.main.versions, True
        self._since = 0

    def step(self) -> None:
        """Takes over what the background has fetched, and starts the next fetch when it is due, or pulls instead.

        A fetch that is not done when the next one is due is waited for; otherwise a slow one would never be used.
        """
        self._since += 1
        due = self._since == self._fetch_every
        if self._fetching is None:
            if due and self.own_steps is not None:
                self.own_steps.pull(self.pull)
            elif due:
                self.pull()
            return
        self._ready |= self._fetching.thread.wait() if due else self._fetching.thread.done()
        if self._replica_group.all(self._ready):
            self._ready = False
            if self.own_steps is not None:
                self.own_steps.take_over(self._into)
            elif self._places:
                foreach_copy_(self._places, self._into)
            self.versions, self.renewed = self._fetching.client.versions, True
            self.main.pulled()
        if due:
            self._since = 0
            self._fetching.thread.start(self._fetch_of(self._fetching.client))

    def fetched(self) -> Callable[[], None]:
        """Returns a function for the thread that pushes, which waits until the fetch that runs now has what it has."""
        if self.own_steps is None or self._fetching is None:
            return lambda: None
        return self._fetching.thread.waiter()

    def _fetch_of(self, client: Client) -> Callable[[], None]:
        """Returns the task that fetches."""
        if self.own_steps is None or self.pushing is None:
            return client.pull
        self.own_steps.begin_fetch()
        pushed = self.pushing.thread.waiter()

        def fetch() -> None:
            pushed()
            client.pull()

        return fetch

    def finish(self) -> None:
        for background in self._backgrounds:
            background.thread.wait()

    def renew(self) -> None:
        self.finish()
        self._ready = False
        self.pull()
        if self.own_steps is not None:
            self.own_steps.restart()

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return sum(background.client.moved_bytes for background in self._backgrounds)

    def close(self) -> None:
        for background in self._backgrounds:
            background.close()


class LocalSteps:
    """Plain SGD on this worker's own parameters, with the learning rates of the job's optimizer and schedule."""

    def __init__(
        self,
        module: nn.Module,
        model: ModelSpec,
        optimizer: Callable[..., Any],
        options: Options,
        rounds_per_epoch: int,
        first: int,
    ) -> None:
        named = dict(module.named_parameters())
        meta = [
            (name, nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad))
            for name, tensor in named.items()
        ]
        template = build(optimizer, meta)
        self._schedule = Schedule(options, template, rounds_per_epoch)
        index = {parameter.name: number for number, parameter in enumerate(model.trainable)}
        self._groups = [
            (group, [(index[name], named[name].data) for name in group["param_names"] if name in index])
            for group in template.param_groups
        ]
        self._round = first

    @torch.no_grad()
    def step(self, round_: int, gradients: Sequence[Tensor | None], share: float) -> None:
        """Updates the parameters with one gradient."""
        while self._round < round_:
            self._schedule.advance(self._round)
            self._round += 1
        with self._schedule.warmed(round_, share):
            for group, members in self._groups:
                updated = [
                    (tensor, gradient) for number, tensor in members if (gradient := gradients[number]) is not None
                ]
                if updated:
                    tensors, present = zip(*updated, strict=True)
                    sign = 1.0 if group.get("maximize") else -1.0
                    foreach_add_(list(tensors), list(present), alpha=sign * float(group["lr"]))

    def load(self, settings: Mapping[str, Any] | None) -> None:
        """Sets the schedule to where it was saved."""
        if settings is not None:
            self._schedule.load(settings)


class LeasedExchange(ServedExchange):
    """Makes steps of its own, and pushes once for each lease, when it ends.

    Attributes:
        nonfinite: whether a step since the last push was left out, because its loss or gradient was not finite.
    """

    nonfinite = False

    def __init__(
        self,
        leases: ServerDataLeases,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        links: ServerLinks,
    ) -> None:
        super().__init__(leases, layouts, model, group, replica_group)
        if links.pushing:
            # The places that the background fetches to.
            self.parameter_bytes *= 2
        self._links = links

    @abstractmethod
    def take(self) -> Push:
        """Returns what the steps since the last push come to, and forgets it."""

    def begin(self, round_: int) -> None:
        # A user's own loop calls it after forward: the parameters must not change before the gradient is there.
        self._round = round_
        if self.leases.lease >= 0:
            # Not in the empty step of a worker without data, which comes when the parameters have been renewed.
            self.pulled = alike(self._links.versions) if self._links.renewed else ()
            self._links.renewed = False

    def _exchange(self, step: LeasedStep, finite: bool) -> tuple[StepDecision, bool]:
        decision = self._step(step, finite)
        if not decision.apply:
            self.nonfinite = True
        if step.last:
            self._push(step.lease)
        # Fetches when it is time.
        self._links.step()
        return decision, False

    @abstractmethod
    def _step(self, step: LeasedStep, finite: bool) -> StepDecision:
        """Makes one step of this worker's own."""

    def swap_weights(self, averaged: bool) -> None:
        self.client.forget()
        super().swap_weights(averaged)

    def _push(self, lease: int) -> None:
        """Pushes what a lease comes to; in the background if there is one, which then commits the lease."""
        pushing = self._links.pushing
        gradients, share, steps = self.take()
        # The sum has not been checked. If every gradient of a lease was left out, the server is told whether one was
        # not finite.
        finite, self.nonfinite = None if steps else not self.nonfinite, False
        client = pushing.client if pushing else self.client
        push = functools.partial(
            client.push, gradients, lease, float(steps > 0), share, finite,
            steps=max(1, steps), versions=self._links.versions,
        )  # fmt: skip
        if pushing is None:
            push()
            # The lease is done when all ranks of the replica have pushed.
            self.replica_group.any(False)
            return

        fetched = self._links.fetched()

        def push_and_commit() -> None:
            fetched()
            push()
            # No worker passes the next sync point before the pushes of the replica's other ranks have arrived.
            if self.replica_group.leads:
                # Asked, not told: this connection is idle until the next push, and what is told could be lost.
                client.ask(0, Message(Kind.COMMIT, lease=lease))

        pushing.thread.start(push_and_commit)
        # The background says that it is done.
        self.leases.lease = -1


class DownpourExchange(LeasedExchange):
    """Steps locally by plain SGD, and pushes the sum of a lease's gradients; `weighted` by shares of a round."""

    def __init__(
        self,
        leases: ServerDataLeases,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        links: ServerLinks,
        local: LocalSteps,
        weighted: bool,
    ) -> None:
        super().__init__(leases, layouts, model, group, replica_group, links)
        self._weighted = weighted
        self._local = local
        self._accumulated = GradientAccumulator(layouts, model, weighted)

    def _step(self, step: LeasedStep, finite: bool) -> StepDecision:
        decision = self._judge(finite)
        if decision.apply:
            self._local.step(self._round, self.buffer.gradients, step.share if self._weighted else 1.0)
            self._accumulated.add(self.buffer, step.share)
        # Else they would be there beside those of the next pass.
        self.buffer.store_nothing()
        return decision

    def take(self) -> Push:
        return self._accumulated.take()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._local.load(settings)
        super().load(pieces, settings)


class OwnStepsExchange(LeasedExchange):
    """Steps with the job's optimizer, and pushes how far a lease's steps have moved the parameters when it ends.

    A checkpoint holds the optimizer state of the leader, and all go on with it; that of a lost worker is lost with it,
    and its replacement begins with none.
    """

    keeps_writes = True

    def __init__(
        self,
        leases: ServerDataLeases,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        links: ServerLinks,
        local: LocalOptimizer,
    ) -> None:
        super().__init__(leases, layouts, model, group, replica_group, links)
        assert links.own_steps is not None, "links that keep this worker's steps"
        self._local, self._own = local, links.own_steps
        self._shares: list[float] = []

    def begin(self, round_: int) -> None:
        super().begin(round_)
        self._local.exchange.begin(round_)

    def _step(self, step: LeasedStep, finite: bool) -> StepDecision:
        decision = self._local.exchange.synchronize(finite)
        if decision.apply and step.weight:
            self._local.step(self._round)
            self._shares.append(step.share)
        return replace(decision, bad_losses=(self._group.rank,)) if decision.bad_losses else decision

    def take(self) -> Push:
        shares, self._shares = self._shares, []
        return self._own.push(), sum(shares) / len(shares) if shares else 0.0, len(shares)

    def swap_weights(self, averaged: bool) -> None:
        super().swap_weights(averaged)
        self._own.restart()

    def state(self) -> Iterable[StatePiece]:
        return chain(super().state(), self._local.exchange.state() if self._group.rank == 0 else ())

    def settings(self) -> dict[str, Any]:
        return self._local.settings(self.leases.synced_round)

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = list(pieces)
        super().load(piece for piece in every if piece.key == AVERAGE)
        self._local.exchange.load([piece for piece in every if piece.key != AVERAGE], settings)

    def memory(self) -> tuple[int, int]:
        # The parameters at the last push, and what is on its way.
        return super().memory()[0] + 2 * self._local.exchange.parameter_bytes, self._local.exchange.memory()[1]
