"""Refuses what user code does to parameters where it would be lost, or be done by one worker alone."""

from __future__ import annotations

from torch import Tensor, nn

from headrace import internals
from headrace.collectives.digest import digests
from headrace.errors import UsageError
from headrace.modules import held_part
from headrace.spec.events.run import Notice
from headrace.worker.session import WorkerSession

_EVERY = 4
"""The first looks that compare all elements; later it does at powers of two, and versions always."""


class WriteGuard:
    """Compares parameters before and after user code runs.

    A write through `.data` leaves a parameter's version as it is, so that elements are compared, too: at first and then
    now and then, since reading them all takes time.

    Args:
        module: whose parameters they are.
        what, remedy: for the message: who must not write, why, and what to do.
    """

    def __init__(self, module: nn.Module, what: str, remedy: str) -> None:
        self._named = {name: each for name, each in module.named_parameters() if not each.is_meta}
        self._what, self._remedy = what, remedy
        self._looks = 0
        self._versions: list[int] = []
        self._flags: list[bool] = []
        self._digests: list[int] | None = None

    def look(self) -> None:
        """Notes how the parameters are, before user code runs."""
        parameters = list(self._named.values())
        self._versions = [internals.version(each) for each in parameters]
        self._flags = [each.requires_grad for each in parameters]
        self._looks += 1
        reads = self._looks <= _EVERY or self._looks & (self._looks - 1) == 0
        self._digests = digests(map(held_part, parameters)) if reads else None

    def require_unchanged(self, flags: bool = False) -> None:
        """Raises UsageError if one was written to since the last look; `flags`: or its `requires_grad` was changed."""
        parameters = list(self._named.values())
        now = [internals.version(each) for each in parameters]
        apart = [one != other for one, other in zip(now, self._versions, strict=True)]
        if self._digests is not None and not any(apart):
            apart = [
                one != other for one, other in zip(digests(map(held_part, parameters)), self._digests, strict=True)
            ]
        if flags:
            pairs = zip(parameters, self._flags, strict=True)
            apart = [bad or each.requires_grad != flag for bad, (each, flag) in zip(apart, pairs, strict=True)]
        if any(apart):
            names = [repr(name) for name, bad in zip(self._named, apart, strict=True) if bad]
            raise UsageError(f"{self._what} has changed {', '.join(names):.200}; {self._remedy}")


class GradientWrites:
    """Watches what a loop of the user's own does to gradients, which are those of this worker's share."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._named = {
            name: each for name, each in session.replica.compute.module.named_parameters() if not each.is_meta
        }
        self._says = session.rank == 0 and session.group.world > 1
        self._held: dict[str, tuple[Tensor | None, int]] = {}

    def look(self) -> None:
        """Notes the gradients, before user code sees them."""
        grads = ((name, each.grad) for name, each in self._named.items())
        self._held = {name: (own, 0 if own is None else internals.version(own)) for name, own in grads}

    def require_none_yet(self) -> None:
        """Raises UsageError if the loop has computed gradients before the first backward, which would be lost."""
        found = [name for name, own in self._changed() if own is not None and bool(held_part(own).any())]
        if found:
            raise UsageError(
                f"{', '.join(map(repr, found)):.200}: .grad was there before worker.backward(loss), which begins anew, "
                "so that it would not be sent; give worker.backward each loss, or do loss.backward() after it"
            )

    def tell(self) -> None:
        """Says once that the loop writes to gradients."""
        if self._says and any(self._changed()):
            self._says = False
            events = self._session.events
            events.write(Notice(self._session.rank, events.now(), _WRITES))

    def _changed(self) -> list[tuple[str, Tensor | None]]:
        held = self._held
        grads = ((name, self._named[name].grad) for name in held)
        return [
            (name, own)
            for name, own in grads
            if own is not held[name][0] or (own is not None and internals.version(own) != held[name][1])
        ]


_WRITES = (
    "the loop writes to gradients between worker.backward and worker.update: each worker to those of its own share, "
    "before they are summed; what is not linear in them (a norm, a clamp, a sign) is another update than that of one "
    "device: use Options(clip_norm=...) or Options(clip_value=...) for limits"
)


def guard_of_loop(module: nn.Module, strategy: str) -> WriteGuard:
    """Returns the guard of a loop of the user's own, under a strategy that keeps no writes."""
    return WriteGuard(
        module,
        "the loop, between two rounds,",
        f"{strategy} has the parameters elsewhere, and what a loop writes to a worker's copy is lost: use one_device, "
        "mirrored or central_storage (without min_workers), where it stays, or let the optimizer do it",
    )


def guard_of_callbacks(module: nn.Module) -> WriteGuard:
    """Returns the guard of callbacks, which run on rank 0 alone."""
    return WriteGuard(
        module,
        "a callback",
        "callbacks run on rank 0, and the other workers would go on without the change: change parameters in a loop of "
        "your own (hr.launch), which every worker runs, or freeze them by hr.frozen(model, pattern, until_epoch=...)",
    )
