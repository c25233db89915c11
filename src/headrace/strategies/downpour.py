"""Downpour SGD: every worker goes on by itself, and tells the servers what it has gathered from time to time.

    compute                    synchronize                                 update
    local step every step      push the accrued gradient every             on the shard
                               `push_every` steps, fetch parameters
                               every `fetch_every`, in threads of
                               their own

    worker    ░step░░step░░step░░step░░step░░step░
    push              └─ sum of 3 ─►        └─ sum of 3 ─►
    fetch     ◄─ parameters ─┐       ◄─ parameters ─┐
    servers   ───────────────▓▓▓▓──────────────────▓▓▓▓───

Dean et al., "Large scale distributed deep networks", 2012, section 4.1 and algorithm 7.1.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.policies.staleness import Anytime, Each
from headrace.ps.applier import Applier, Pace
from headrace.ps.assembly import connect, form_of, open_port, places_of
from headrace.ps.client import Client
from headrace.ps.exchange import ServedExchange
from headrace.ps.form import Form
from headrace.ps.held import HeldGradients
from headrace.ps.leases import Leases
from headrace.ps.leasing import LeasedPortions, blocks
from headrace.ps.messages import Kind, Message
from headrace.ps.planning import check_seats, check_served, check_whole, seats, served_ops
from headrace.ps.server import Server
from headrace.ps.shard import Shard
from headrace.replica.conditioning import HEALTHY, Verdict
from headrace.replica.exchange import Replica, StatePiece
from headrace.replica.optimizer import build
from headrace.replica.schedule import Schedule
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Op, Plan
from headrace.strategies.strategy import Parts, ServerParts, Strategy, broadcast, check_count, describe_options

__all__ = ["Downpour"]


@dataclass(frozen=True)
class Downpour(Strategy):
    """Downpour SGD over parameter servers; the job's optimizer (Adagrad in the paper) runs on the shards.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold shards.
        fetch_every, push_every: steps between two fetches, and between two pushes.
        warmstart_steps: rounds that worker 0 trains alone before the others begin.
        overlap: push and fetch while the worker goes on computing; else it waits for both.
        sharding, placement: as of `ParameterServer`.
        scale: "share" applies gradients with the learning rate times their share of the global batch, "full" with the
            whole learning rate, as the paper does; on the shards and in the local step.
        transport: "shared_memory" on one host, or "tcp", encrypted, also on one.
        push_codec, pull_codec: how gradients and parameters travel: "plain", "bf16", or "int8" with error feedback.
    """

    workers: int | None = None
    servers: int = 1
    fetch_every: int = 5
    push_every: int = 5
    warmstart_steps: int = 0
    overlap: bool = True
    sharding: str = "whole"
    placement: str = "greedy"
    scale: str = "share"
    transport: str = "shared_memory"
    push_codec: str = "plain"
    pull_codec: str = "plain"

    name = "downpour"
    synchronous = False

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        for name in ("servers", "fetch_every", "push_every"):
            check_count(name, getattr(self, name))
        check_seats(self.sharding, self.placement, self.scale, (self.transport, self.push_codec, self.pull_codec))
        check_whole("warmstart_steps", self.warmstart_steps)

    def check(self, options: Options) -> None:
        check_served(options)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles, segments = seats(self.name, self.workers, self.servers, self.sharding, self.placement, model, cluster)
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=roles,
            shares=(1,) * (len(roles) - self.servers),
            gradient_bytes=model.trainable_bytes,
            segments=segments,
        )

    def ops(self, plan: Plan) -> tuple[Op, ...]:
        return served_ops(plan)

    def replica(self, plan: Plan, rank: int, parts: Parts) -> Replica:
        broadcast(parts.module, parts.host)
        forms = [form_of(plan, parts.model, server) for server in plan.servers]
        places = [places_of(form, parts.module) for form in forms]
        fetched = [[torch.empty_like(place, device="cpu") for place in own] for own in places]
        addresses, check = parts.addresses(), parts.host.check
        roles = [plan.roles[server] for server in plan.servers]
        # One thread a link: what pushes and what fetches meanwhile has links of its own.
        main = connect(addresses, forms, places, rank, check, roles, observes=self.overlap)
        links = Links(main, main, main)
        if self.overlap:
            pusher = connect(addresses, forms, fetched, rank, check, roles)
            links = Links(main, pusher, connect(addresses, forms, fetched, rank, check, roles, observes=True))
        exchange = Pouring(self, plan, links, forms, (places, fetched), parts)
        if rank == 0:
            exchange.give(places)
        parts.host.barrier()
        return Replica(parts.whole_model(exchange.held, portions=len(plan.shares)), exchange, exchange.portions)

    def server(self, plan: Plan, rank: int, parts: ServerParts) -> Server:
        form = form_of(plan, parts.model, rank)
        pace = Pace(parts.options, parts.rounds_per_epoch, parts.first)
        applier = Applier(form, parts.optimizer, parts.model.parameters, pace, self.scale == "full")
        machines = [Shard(range(plan.workers), Anytime(), Each()) for _ in range(len(form))]
        until = parts.first + blocks(parts.first, parts.until, self.push_every)
        alone = blocks(parts.first, max(parts.first, self.warmstart_steps), self.push_every)
        first = rank == plan.servers[0]
        leases = Leases(len(plan.shares), until, parts.first, alone=alone) if first else None
        return Server(open_port(form, self.transport), form, applier, machines, leases)


@dataclass(frozen=True)
class Links:
    """A worker's clients: one for all, or one for each of its threads.

    Attributes:
        main: asks for data, and does what is done where all workers meet.
        pusher, fetcher: push and fetch, in the background where they are others than `main`.
    """

    main: Client
    pusher: Client
    fetcher: Client

    @property
    def overlap(self) -> bool:
        """Whether pushes and fetches go on in the background."""
        return self.pusher is not self.main


class Pouring(ServedExchange):
    """Args:
    strategy: its options.
    plan: the run's.
    links: of this worker.
    forms: the servers' shards.
    places: where they lie in this worker's parameters, and where fetched ones wait.
    parts: of this worker.

    Attributes:
        portions: this worker's data; a lease is of `push_every` steps.
    """

    def __init__(
        self,
        strategy: Downpour,
        plan: Plan,
        links: Links,
        forms: Sequence[Form],
        places: tuple[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]],
        parts: Parts,
    ) -> None:
        held = HeldGradients(forms, parts.model)
        super().__init__(links.main, forms, held, parts.host, parts.options, parts.scale, parts.device)
        self.parameter_bytes = (1 + links.overlap) * sum(parameter.bytes for parameter in parts.model.parameters)
        self.portions = LeasedPortions(
            links.main, len(forms), len(plan.shares), parts.first, parts.until, strategy.push_every, self._rest,
            (links.pusher, links.fetcher) if links.overlap else (),
        )  # fmt: skip
        self._strategy = strategy
        self._links = links
        self._places, self._fetched = ([place for own in each for place in own] for each in places)
        self._local = LocalSteps(parts)
        self._empty = functools.partial(HeldGradients, forms, parts.model)
        self._sum = self._empty()
        self._summed = 0
        self._step = 0
        self._versions = links.main.versions
        self._pushing, self._fetching = Background("push"), Background("fetch")

    def begin(self, round_: int) -> None:
        self._round = round_
        if self._step == 0 or not self._links.overlap:
            if self._step % self._strategy.fetch_every == 0:
                self._renew()
        else:
            if self._fetching.done():
                torch._foreach_copy_(self._places, self._fetched)
                self._versions = self._links.fetcher.versions
            if self._step % self._strategy.fetch_every == 0:
                self._fetching.start(self._links.fetcher.pull)

    def synchronize(self, finite: bool = True) -> Verdict:
        portions = self.portions
        if portions.lease < 0:
            # It had no data before the workers meet.
            return HEALTHY
        verdict = self.judge(finite)
        self._step += 1
        if verdict.apply:
            share = portions.share if self._strategy.scale == "share" else 1.0
            self._local.step(self._round, self.held.gradients, share)
            self._sum.add(self.held)
            self._summed += 1
        if not portions.left:
            self._pour()
        return verdict

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._local.load(settings)
        self.client.forget()
        super().load(pieces, settings)

    def swap_average(self) -> None:
        self.client.forget()
        super().swap_average()

    def _pour(self) -> None:
        """Pushes what has been accrued."""
        gradients, summed, versions = self._sum.by_shard(), self._summed, self._versions
        self._sum, self._summed = self._empty(), 0
        portions, pusher = self.portions, self._links.pusher
        lease, share, finite = portions.lease, portions.share, summed > 0

        def push() -> None:
            pusher.push(gradients, lease, 1.0, share, finite, steps=max(1, summed), versions=versions)

        def push_and_commit() -> None:
            push()
            pusher.tell(Message(Kind.COMMIT, lease=lease))

        if self._links.overlap:
            self._pushing.start(push_and_commit)
            portions.lease = -1
        else:
            push()

    def _rest(self) -> None:
        """Lets what goes on in the background end, where all workers meet."""
        self._pushing.wait()
        self._fetching.wait()
        self.client.forget()

    def _renew(self) -> None:
        self.client.forget()
        self.client.pull()
        self._versions = self.client.versions


class LocalSteps:
    """Plain SGD on this worker's own parameters, with the learning rates of the job's optimizer and schedule.

    Args:
        parts: of this worker.
    """

    def __init__(self, parts: Parts) -> None:
        named = dict(parts.module.named_parameters())
        ghosts = [
            (name, nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad))
            for name, tensor in named.items()
        ]
        self._optimizer = build(parts.optimizer, ghosts)
        self._schedule = Schedule(parts.options, self._optimizer, self._optimizer, parts.rounds_per_epoch)
        index = {parameter.name: number for number, parameter in enumerate(parts.model.trainable)}
        self._groups = [
            (group, [(index[name], named[name].data) for name in group["param_names"] if name in index])
            for group in self._optimizer.param_groups
        ]
        self._round = parts.first

    @torch.no_grad()
    def step(self, round_: int, gradients: Sequence[Tensor | None], share: float) -> None:
        """Moves the parameters by one gradient."""
        while self._round < round_:
            self._schedule.advance(self._round)
            self._round += 1
        with self._schedule.warmed(round_, share):
            for group, members in self._groups:
                moved = [
                    (tensor, gradient) for number, tensor in members if (gradient := gradients[number]) is not None
                ]
                if moved:
                    tensors, present = zip(*moved, strict=True)
                    sign = 1.0 if group.get("maximize") else -1.0
                    torch._foreach_add_(list(tensors), list(present), alpha=sign * float(group["lr"]))

    def load(self, settings: Mapping[str, Any] | None) -> None:
        """Takes up where the schedule was."""
        if settings is not None:
            self._schedule.load(settings)


def _ghost(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)


class Background:
    """One thing at a time, in a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = f"headrace-{name}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Does something; waits for what was begun before."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # raised again by whoever waits
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is going on any more; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def done(self) -> bool:
        """Whether what was begun has just come to its end; it says so once."""
        if self._thread is None or self._thread.is_alive():
            return False
        self.wait()
        return True
