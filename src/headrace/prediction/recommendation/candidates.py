"""What is tried: every strategy with its main options, on one device up to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields

from headrace.devices import HOST
from headrace.policies.behaviour import GradientSum
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.strategies import (
    CentralStorage,
    Downpour,
    FullySharded,
    Gossip,
    Hybrid,
    Mirrored,
    OneDevice,
    ParameterAveraging,
    ParameterServer,
    Pipeline,
    Strategy,
    TensorParallel,
)

_MOST_STAGES = 64
_PERIODS = (4, 16, 64)
_ORDERS = (
    ("gpipe", "never"),
    ("gpipe", "except_last"),
    ("1f1b", "never"),
    ("1f1b", "always"),
    ("zb_h1", "never"),
    ("zb_h2", "never"),
)
"""Schedules of a pipeline, and what is run again for backward: the more, the less is kept."""
_MOST_SLICED_STAGES = 8
_MOST_SERVED = 512
"""Workers with servers; each of their messages is simulated."""


@dataclass(frozen=True)
class Candidate:
    """A strategy on so many devices."""

    strategy: Strategy
    devices: int

    @property
    def family(self) -> str:
        """The strategy's name."""
        return self.strategy.name

    @property
    def as_one_device(self) -> bool:
        """Whether its updates are those of one device, but for the order of sums."""
        exchange = self.strategy.behave(self.devices).exchange
        return self.strategy.equals_one_device and not (isinstance(exchange, GradientSum) and exchange.sent < 1)

    @property
    def text(self) -> str:
        """As the command line takes it."""
        return call_text(self.strategy)


def call_text(strategy: Strategy) -> str:
    """Returns a strategy with those of its options that are not the default: "mirrored(workers=2)"."""
    said = []
    for each in fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, each.name)
        default = each.default if each.default is not MISSING else None
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if value != default:
            said.append(f"{each.name}={call_text(value) if isinstance(value, Strategy) else repr(value)}")
    return f"{strategy.name}({', '.join(said)})" if said else strategy.name


def counts(total: int) -> list[int]:
    """Returns the powers of two up to a number, and the number itself.

    >>> counts(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({*(1 << power for power in range(total.bit_length())), total})


def candidates(model: ModelSpec, cluster: Cluster, examples: int) -> Iterator[Candidate]:
    """Yields what is tried; a global batch has `examples`, so that no more replicas can have one each."""
    total = cluster.accelerators if cluster.device != HOST else sum(host.cores for host in cluster.hosts)
    yield Candidate(OneDevice(), 1)
    for count in counts(total):
        if count < 2:
            continue
        if count <= examples:
            yield from (Candidate(strategy, count) for strategy in _whole_models(count, cluster))
            yield from (Candidate(strategy, count) for strategy in _with_servers(count, cluster))
        yield from (Candidate(strategy, count) for strategy in _in_parts(count, model, examples))
        yield from (Candidate(strategy, count) for strategy in _nested(count, model, cluster, examples))


def _whole_models(count: int, cluster: Cluster) -> Iterator[Strategy]:
    several = len(cluster.hosts) > 1
    yield Mirrored(count)
    if several:
        yield from (Mirrored(count, codec=codec) for codec in ("bf16", "int8"))
    if len({host.speed for host in cluster.hosts}) > 1:
        yield Mirrored(count, balance="speed")
    yield CentralStorage(count)
    yield FullySharded(count)
    yield from (ParameterAveraging(count, period) for period in _PERIODS)
    # DiLoCo's, in the words of the command line.
    yield ParameterAveraging(count, 100, "nesterov")
    yield Gossip(count)


def _with_servers(count: int, cluster: Cluster) -> Iterator[Strategy]:
    if count > _MOST_SERVED:
        return
    for servers in counts(min(count, 4 * len(cluster.hosts)))[:5]:
        yield ParameterServer(count, servers)
        yield ParameterServer(count, servers, staleness_bound=0)
        yield ParameterServer(count, servers, staleness_bound=2)
        yield Downpour(count, servers)
        yield Downpour(count, servers, fetch_every=20, push_every=20)


def _in_parts(count: int, model: ModelSpec, examples: int) -> Iterator[Strategy]:
    layers = len(model.layers)
    if layers:
        yield TensorParallel(count)
    most = min(_MOST_STAGES, layers) if layers else 0
    for stages in counts(count):
        replicas = count // stages
        if stages < 2 or stages > most or replicas * stages != count:
            continue
        for micro_batches in (stages, 4 * stages):
            if micro_batches * replicas > examples:
                continue
            for schedule, recompute in _ORDERS:
                pipeline = Pipeline(stages, micro_batches, schedule, recompute)
                yield pipeline if replicas == 1 else Hybrid(Mirrored(replicas), pipeline)
            if replicas > 1:
                yield Hybrid(ParameterAveraging(replicas, _PERIODS[1]), Pipeline(stages, micro_batches, "1f1b"))
        if replicas > 1:
            yield Hybrid(Mirrored(replicas), TensorParallel(stages))


def _nested(count: int, model: ModelSpec, cluster: Cluster, examples: int) -> Iterator[Strategy]:
    """Yields mirrors of shards, and slices of shards, of stages and of mirrors of stages.

    The inner parts, which exchange more, stay inside a host.
    """
    total = cluster.accelerators if cluster.device != HOST else sum(host.cores for host in cluster.hosts)
    for inner in counts(min(count // 2, max(1, total // len(cluster.hosts)))):
        outer = count // inner
        if inner < 2 or outer * inner != count:
            continue
        if count <= examples:
            yield Hybrid(Mirrored(outer), FullySharded(inner))
        if not model.layers:
            continue
        if outer <= examples:
            yield Hybrid(FullySharded(outer), TensorParallel(inner))
        for stages in counts(min(outer, _MOST_SLICED_STAGES, len(model.layers))):
            replicas, micro_batches = outer // stages, 4 * stages
            if stages < 2 or replicas * stages != outer or micro_batches * replicas > examples:
                continue
            sliced = Hybrid(Pipeline(stages, micro_batches, "1f1b"), TensorParallel(inner))
            yield sliced if replicas == 1 else Hybrid(Mirrored(replicas), sliced)
