"""Parameter servers: workers push gradients, servers apply them, workers pull parameters.

    compute                    synchronize                               update
    on the last pulled         push gradients to the shards, pull        on the shard
    parameters                 parameters; the staleness bound says
                               who may proceed

    worker 0   ░compute░ push ─┐           ┌─ pull ░compute░░ push ─┐
    server     ───────────────▓▓▓─────▓▓▓──┴───────────────────────▓▓▓───
    worker 1   ░░░░compute░░░░░░ push ─┘└─ pull ░░░compute░░

With a bound of 0 all workers' gradients of a round are one step (synchronous); without a bound every gradient is a step
of its own as soon as it comes (asynchronous); in between, every gradient is a step, and who is ahead waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from headrace.comm.in_process import InProcess, Meeting
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.policies import PLACEMENTS
from headrace.policies.placement import place
from headrace.policies.roles import require_memory, worker_and_server_roles
from headrace.policies.sharding import parse_sharding
from headrace.policies.staleness import Admission, Anytime, Combination, Each, FirstOf, Within
from headrace.ps.applier import Applier, Pace, Remedies
from headrace.ps.assembly import connect, form_of, open_port, places_of
from headrace.ps.client import Client
from headrace.ps.form import Form
from headrace.ps.leases import Leases
from headrace.ps.leasing import LeasedPortions
from headrace.ps.messages import Kind, Message
from headrace.ps.server import Server
from headrace.ps.shard import Reason, Shard
from headrace.replica.conditioning import HEALTHY, Conditioner, Verdict
from headrace.replica.exchange import Exchange, Replica, StatePiece
from headrace.replica.update import PARAMETER
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Op, Plan
from headrace.strategies.strategy import Parts, ServerParts, Strategy, broadcast, check_count, describe_options

__all__ = ["ParameterServer"]


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Asynchronous, bounded-stale or synchronous SGD over parameter servers.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold shards.
        staleness_bound: how many rounds the fastest worker may be ahead of the slowest; None for any number, 0 for
            lock-step.
        backup_workers: so many of the workers are spare: a round takes the first gradients of the others' number, and
            drops those that come late.
        sharding: how parameters are cut along their first axis: "whole", "fixed_shards:4", "max_size:4MB",
            "min_size:256kB/8".
        placement: which server gets a shard: "greedy" by bytes, or "round_robin".
        scale: "share" applies a gradient with the learning rate times its share of the global batch; "full" with the
            whole learning rate, as papers do.
        remedies: for stale gradients; none by default.
    """

    workers: int | None = None
    servers: int = 1
    staleness_bound: int | None = None
    backup_workers: int = 0
    sharding: str = "whole"
    placement: str = "greedy"
    scale: str = "share"
    remedies: Remedies = field(default_factory=Remedies)

    name = "parameter_server"
    synchronous = False

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_count("servers", self.servers)
        for name, value in (("staleness_bound", self.staleness_bound), ("backup_workers", self.backup_workers)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise UsageError(f"{name} must be a whole number of at least 0, got {value!r}")
        parse_sharding(self.sharding)
        if self.placement not in PLACEMENTS:
            raise UnknownName("placement", self.placement, PLACEMENTS)
        if self.scale not in ("share", "full"):
            raise UsageError(f"scale must be 'share' or 'full', got {self.scale!r}")
        if self.backup_workers and self.staleness_bound:
            raise UsageError(
                f"backup_workers={self.backup_workers} makes rounds synchronous, and staleness_bound="
                f"{self.staleness_bound} lets workers be apart; give one of them"
            )

    def check(self, options: Options) -> None:
        if options.on_nonfinite == "rollback":
            raise UsageError(
                "on_nonfinite='rollback' brings all workers back together, and those of a parameter server are never "
                "at the same round; use 'skip', which drops the one gradient, or 'raise'"
            )
        if options.batch_norm == "sync":
            raise UsageError(
                "batch_norm='sync' makes workers meet in every layer, and those of a parameter server do not wait for "
                "each other; use batch_norm='local', or mirrored"
            )

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles = worker_and_server_roles(self.name, self.workers, self.servers, cluster)
        workers = len(roles) - self.servers
        if self.backup_workers >= workers:
            raise InfeasiblePlan(
                f"{self.backup_workers} of {workers} workers cannot be backups; a round needs at least one gradient"
            )
        # Each worker: its copy, what autograd makes, what it shares; the servers: parameters.
        require_memory(self.name, (3 * workers + 1) * model.trainable_bytes, cluster)
        if self.sharding != "whole" and not model.sliceable:
            raise InfeasiblePlan(
                f"sharding={self.sharding!r} cuts parameters, and the job's optimizer needs whole ones (as Muon does); "
                "use sharding='whole'"
            )
        pieces = parse_sharding(self.sharding)(model.parameters)
        segments = place(pieces, range(workers, len(roles)), PLACEMENTS[self.placement])
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=roles,
            shares=(1,) * (workers - self.backup_workers),
            gradient_bytes=model.trainable_bytes,
            segments=segments,
        )

    def ops(self, plan: Plan) -> tuple[Op, ...]:
        """One round of all workers: they do not wait for each other, servers take one push after the other."""
        ops: list[Op] = []
        held = {rank: 0 for rank in plan.servers}
        for segment in plan.segments:
            held[segment.owner] += segment.stop - segment.start
        total = sum(held.values())
        for role in plan.roles[: plan.workers]:
            ops.append(Op(f"compute@{role.rank}", "compute", role.rank, f"worker-{role.rank}"))
            for server, elements in held.items():
                nbytes = plan.gradient_bytes * elements // total
                push, apply = f"push@{role.rank}-{server}", f"update@{role.rank}-{server}"
                memory = f"{role.host}-memory"
                ops.append(Op(push, "exchange", role.rank, memory, nbytes, (f"compute@{role.rank}",)))
                ops.append(Op(apply, "update", server, f"server-{server}", nbytes, (push,)))
                ops.append(Op(f"pull@{role.rank}-{server}", "exchange", role.rank, memory, nbytes, (apply,)))
        return tuple(ops)

    def replica(self, plan: Plan, rank: int, parts: Parts) -> Replica:
        broadcast(parts.module, parts.host)
        forms = [form_of(plan, parts.model, server) for server in plan.servers]
        places = [places_of(form, parts.module) for form in forms]
        servers = [plan.roles[server] for server in plan.servers]
        client = connect(parts.addresses(), forms, places, rank, parts.host.check, servers)
        portions = LeasedPortions(client, len(forms), len(plan.shares))
        held = HeldGradients(forms, parts.model)
        exchange = PushPull(client, forms, portions, held, parts)
        if rank == 0:
            exchange.give(places)
        parts.host.barrier()
        return Replica(parts.whole_model(held, alone=True), exchange, portions)

    def server(self, plan: Plan, rank: int, parts: ServerParts) -> Server:
        form = form_of(plan, parts.model, rank)
        workers, first = plan.workers, rank == plan.servers[0]
        admission, combination = self._regime(workers)
        full = self.scale == "full"
        schedule = Pace(parts.options, parts.rounds_per_epoch, parts.first)
        applier = Applier(form, parts.optimizer, parts.model.parameters, schedule, full, self.remedies)
        machines = [Shard(range(workers), admission, combination) for _ in range(len(form))]
        # Whoever is bound to the others does as many rounds as they do.
        fixed = self.staleness_bound is not None and not self.backup_workers
        leases = Leases(len(plan.shares), parts.until, parts.first, fixed) if first else None
        return Server(open_port(form), form, applier, machines, leases)

    def _regime(self, workers: int) -> tuple[Admission, Combination]:
        if self.staleness_bound == 0 or self.backup_workers:
            return Anytime(), FirstOf(workers - self.backup_workers)
        return (Anytime() if self.staleness_bound is None else Within(self.staleness_bound)), Each()


class HeldGradients:
    """What a backward pass brought, as the servers' shards of it.

    Args:
        forms: by server.
        model: whose trainable parameters come in this order.
    """

    def __init__(self, forms: Sequence[Form], model: ModelSpec) -> None:
        self._forms = forms
        self._index = {parameter.name: index for index, parameter in enumerate(model.trainable)}
        self._gradients: list[Tensor | None] = [None] * len(self._index)

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = list(gradients)

    def store_nothing(self) -> None:
        self._gradients = [None] * len(self._index)

    @property
    def present(self) -> list[Tensor]:
        """The gradients that there are."""
        return [gradient for gradient in self._gradients if gradient is not None]

    def clip(self, value: float | None, norm: float | None) -> None:
        """Clips elements, then the norm of all, as torch does, bit for bit; None leaves them."""
        clipped = self.present
        if not clipped or (value is None and norm is None):
            return
        # Into other memory: autograd may give one tensor as the gradient of two parameters.
        if value is not None:
            clipped = list(torch._foreach_clamp_max(torch._foreach_clamp_min(clipped, -value), value))
        if norm is not None:
            coefficient = torch.clamp(norm / (nn.utils.get_total_norm(clipped) + 1e-6), max=1.0)
            clipped = list(torch._foreach_mul(clipped, coefficient))
        left = iter(clipped)
        self._gradients = [None if gradient is None else next(left) for gradient in self._gradients]

    def by_shard(self) -> list[list[Tensor | None]]:
        """Returns the gradients by server and shard; None where the loss does not depend on the parameter."""
        flat = [None if gradient is None else gradient.reshape(-1) for gradient in self._gradients]
        return [[self._cut(flat[self._index[piece.parameter]], form, shard) for shard, piece in enumerate(form.pieces)]
                for form in self._forms]  # fmt: skip

    def _cut(self, flat: Tensor | None, form: Form, shard: int) -> Tensor | None:
        piece = form.pieces[shard]
        return None if flat is None else flat[piece.start : piece.start + piece.elements].view(piece.shape)


class PushPull(Exchange):
    """Args:
    client: of this worker.
    forms: the servers' shards.
    portions: says from which lease a gradient is.
    held: the gradients.
    parts: of this worker.
    """

    def __init__(
        self, client: Client, forms: Sequence[Form], portions: LeasedPortions, held: HeldGradients, parts: Parts
    ) -> None:
        self._client = client
        self._forms = forms
        self._portions = portions
        self._held = held
        self._host = parts.host
        self._fresh = False
        self._options = parts.options
        # It alone sees what it has computed. Only to look: clipping is that of one device.
        looking = replace(parts.options, clip_norm=None, clip_value=None)
        alone = InProcess(Meeting(1), 0)
        self._conditioner = Conditioner(looking, alone, parts.scale, immediate=parts.device.type == "cpu")
        self._bytes = sum(parameter.bytes for parameter in parts.model.parameters)

    def begin(self, round_: int) -> None:
        if not self._fresh:
            self._client.pull()
        self._fresh = False

    def synchronize(self, finite: bool = True) -> Verdict:
        portions = self._portions
        if portions.lease < 0:
            # It had no data before the workers meet, and nobody waits for it.
            return HEALTHY
        present = self._held.present
        verdict = self._conditioner.condition(present, present, finite)
        if verdict.apply:
            self._held.clip(self._options.clip_value, self._options.clip_norm)
        reason = self._client.push(
            self._held.by_shard(), portions.lease, portions.weight, portions.share, verdict.apply, pull=True
        )
        self._fresh = True
        portions.late = reason == Reason.LATE
        return verdict

    def update(self, round_: int) -> None:
        """The servers have, when they answered the push."""

    def skip(self, round_: int) -> None:
        """The servers have left it out."""

    def swap_average(self) -> None:
        self._host.barrier()
        if self._host.rank == 0:
            for server in range(len(self._forms)):
                self._client.ask(server, Message(Kind.SWAP))
        self._host.barrier()
        self._client.pull()

    def state(self) -> tuple[StatePiece, ...]:
        pieces: list[StatePiece] = []
        for server in self._own():
            for shard in range(len(self._forms[server])):
                blob = self._client.ask(server, Message(Kind.STATE, shard, 1))
                pieces += [StatePiece.parse(name, value) for name, value in load(blob).items()]
        return tuple(pieces)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self._client.ask(0, Message(Kind.STATE)))
        return settings

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        by_parameter: dict[str, list[StatePiece]] = {}
        for state in pieces:
            by_parameter.setdefault(state.parameter, []).append(state)
        self._host.barrier()
        for server in self._own():
            said = "" if settings is None else json.dumps(settings)
            # First, because it forgets what state there was.
            self._client.ask(server, Message(Kind.LOAD), said.encode())
            for shard, piece in enumerate(self._forms[server].pieces):
                own = by_parameter.get(piece.parameter, ())
                blob = save({each.name: each.value.contiguous() for each in own})
                self._client.ask(server, Message(Kind.LOAD, shard, 1), blob)
        self._host.barrier()
        self._client.pull()

    def give(self, places: Sequence[Sequence[Tensor]]) -> None:
        """Gives the servers this worker's parameters to begin with."""
        for server, (form, own) in enumerate(zip(self._forms, places, strict=True)):
            for shard, (piece, value) in enumerate(zip(form.pieces, own, strict=True)):
                state = StatePiece(piece.parameter, PARAMETER, piece.start, value)
                self._client.ask(server, Message(Kind.LOAD, shard, 1), save({state.name: value.cpu()}))

    def memory(self) -> tuple[int, int]:
        return self._bytes, 0

    def _own(self) -> range:
        """The servers whose state this worker brings into a checkpoint and back."""
        return range(self._host.rank, len(self._forms), self._host.world)
