"""Context parallelism: every sequence is divided over the workers, and attention goes around a ring.

    compute                                synchronize                       update
    each on its tokens; keys and values    sum of the gradients, as of       optimizer on each mirror
    of all go around in every attention    mirrored variables

Each worker has the whole model, and some tokens of every example. What a layer does to each token alone it does as on
one device; attention sees the keys and values of all workers, block by block (Liu et al., "Ring attention", 2023):

    worker 0   tokens 0 1 . . . . 6 7 ─┐ keys, values      ┌─► attention of tokens 0 1 6 7
                                       ├─ around a ring ───┤
    worker 1   tokens . . 2 3 4 5 . . ─┘                   └─► attention of tokens 2 3 4 5
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.context_parallel.replica import ContextModel, DividedForward, DividedLoss
from headrace.context_parallel.ring import ring_of
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.hooks import hooked_parameters
from headrace.policies.behaviour import Behaviour, GradientSum, RingOfTokens
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.compute import TokenUse
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.checks import check_count, refuse_parts, refuse_random
from headrace.strategies.context import ModelProbe, WorkerContext
from headrace.strategies.mirrored import summed_by_all
from headrace.strategies.refusals import Refusal, one_program
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.compute import Compute
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class ContextParallel(Strategy):
    """One sequence on several devices: for sequences whose activations are too large for one.

    What the model is given is divided in its second dim, `(examples, tokens, ...)`: tokens, positions, masks. Attention
    through `torch.nn.functional.scaled_dot_product_attention` sees all tokens; every other layer must compute each
    token alone, which is tried before the start. A length that does not divide is filled with tokens that no other
    attends to, and that weigh nothing.

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> hr.ContextParallel(workers=4).equals_one_device
        True
    """

    workers: int | None = None

    name = "context_parallel"
    equals_one_device = True
    begins_alike = True
    whole_model = False
    divided = True
    collectives = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    def refusals(self) -> tuple[Refusal, ...]:
        return (
            one_program("attention exchanges keys and values in the middle of it"),
            Refusal(
                "recompute",
                None,
                "recompute={value!r} runs blocks again or moves what they keep, and in these attention exchanges keys",
                "leave it out, and use torch.utils.checkpoint(..., use_reentrant=False) in forward",
            ),
            Refusal(
                "batch_norm",
                "sync",
                "batch_norm='sync' normalises over all examples, of which each worker has some tokens",
                "use LayerNorm, or mirrored",
            ),
        )

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        from headrace.context_parallel.verification import verify

        if self.workers == 1:
            return model
        if hooked := hooked_parameters(dict(probe.module.named_parameters())):
            raise UsageError(
                f"{', '.join(map(repr, hooked)):.200}: hooks of a parameter (register_hook, "
                "register_post_accumulate_grad_hook) would see the gradient of some tokens, of which each worker of "
                "context_parallel has others; use tensor_parallel, or Options(clip_norm=..., clip_value=...)"
            )
        return replace(model, tokens=verify(probe.module, probe.sample(), probe.inputs))

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        plan = data_parallel_plan(
            self.name, describe_options(self), self.workers, model, cluster, copies=(3, 1), spread=True
        )
        refuse_random(self.name, model, plan)
        return with_rings(plan, plan.workers)

    def behave(self, workers: int) -> Behaviour:
        return Behaviour(GradientSum(), RingOfTokens(workers), not_rehearsed=refuse_parts(self.equals_one_device))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        # Gradients leave after backward, in which attention exchanges keys and values.
        sink, exchange = summed_by_all(plan, context, overlap=False)
        divided, own = divide(context, context.group, context.device_group())
        # As of one replica: the weight of a loss is that of whole sequences, on every worker.
        own = replace(own, group=ThreadCollective(ThreadGroup(1), 0), device_group=lambda: None)
        return Replica(in_ring(own.whole_model(sink), divided, own, not rank), exchange)


def with_rings(plan: Plan, ranks: int) -> Plan:
    """Returns the plan of workers of which so many each compute some tokens of the same examples."""
    roles = tuple(replace(role, data_rank=role.rank // ranks) for role in plan.roles)
    return replace(plan, roles=roles, shares=(1,) * (plan.workers // ranks))


def divide(
    context: WorkerContext, ring: ProcessGroup, devices: Collective | None
) -> tuple[DividedForward, WorkerContext]:
    """Lets a model take some tokens of what it is given; returns that, and a context whose loss is that of all tokens.

    `devices` carries the tensors of a ring's ranks; None for memory that they share.
    """
    if context.device.type != HOST and isinstance(ring, ThreadCollective) and ring.world > 1:
        raise UsageError(
            f"{ring.world} workers of ThreadEngine share the thread in which torch runs backward on "
            f"{context.device}, and each would wait for the others in it; leave out engine=, and they are processes"
        )
    use = context.model.tokens or TokenUse()
    divided = DividedForward(context.module, ring_of(ring, devices), devices or ring, use)
    objective = replace(context.objective, loss=DividedLoss(context.objective.loss, divided))
    return divided, replace(context, objective=objective)


def in_ring(whole: Compute, divided: DividedForward, context: WorkerContext, leads: bool) -> ContextModel:
    """Returns what computes a rank's tokens, and says how where it `leads`; `context` is what `divide` has returned."""
    compute, loss = ContextModel(whole, divided), context.objective.loss
    if leads:
        assert isinstance(loss, DividedLoss)
        outputs = "stay divided" if loss.by_tokens else "are joined for the loss, on every worker"
        evaluated = "" if divided.use.evaluated is not None else "; evaluation runs whole sequences on every worker"
        said = f"sequences are divided over {divided.ring.world} workers; outputs {outputs}{evaluated}"
        compute.notes = (*whole.notes, said)
    return compute
