"""Refuses what user code does to parameters where it would be lost, or be done by one worker alone."""

from __future__ import annotations

from torch import Tensor, nn

from headrace import internals
from headrace.collectives.digest import digests
from headrace.errors import UsageError
from headrace.modules import held_part, memory_of
from headrace.spec.events.run import Notice
from headrace.training.synchronization import PeriodicSync
from headrace.worker.session import WorkerSession

_EVERY = 4
"""The first looks that compare all elements; later it does at powers of two."""
_SAMPLE = 1024
"""Elements of a parameter that are compared at the other looks, where parameters are in this host's memory."""


class WriteGuard:
    """Compares parameters before and after user code runs.

    A write through `.data` leaves a parameter's version as it is, so that elements are compared, too: all at first and
    then now and then, since reading them all takes time, else a sample.

    Args:
        module: whose parameters they are.
        what, remedy: for the message: who must not write, why, and what to do.
        flags: whether `requires_grad` must stay, too.
    """

    def __init__(self, module: nn.Module, what: str, remedy: str, flags: bool = False) -> None:
        self._module = module
        self._what, self._remedy = what, remedy
        self._with_flags = flags
        self._looks = 0
        self._before: dict[str, tuple[int, ...]] = {}

    def look(self) -> None:
        """Notes how the parameters are, before user code runs."""
        self._looks += 1
        self._before = self._now()

    def require_unchanged(self) -> None:
        """Raises UsageError if one was written to or replaced since the last look."""
        before, now = self._before, self._now()
        names = [repr(name) for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            raise UsageError(f"{self._what} has changed {', '.join(names):.200}; {self._remedy}")

    def _now(self) -> dict[str, tuple[int, ...]]:
        named = {name: each for name, each in self._module.named_parameters() if not each.is_meta}
        flags = self._with_flags
        parts = [held_part(each).detach() for each in named.values()]
        if self._looks > _EVERY and self._looks & (self._looks - 1):
            # Others would be waited for.
            parts = [each.flatten()[:: 1 + each.numel() // _SAMPLE] for each in parts if each.device.type == "cpu"]
        read = digests(parts) if len(parts) == len(named) else [0] * len(named)
        return {
            name: (id(each), memory_of(each), internals.version(each), flags and each.requires_grad, digest)
            for (name, each), digest in zip(named.items(), read, strict=True)
        }


class Places:
    """Takes what a loop puts in the place of a parameter's memory (`parameter.data = ...`) to where that was.

    There other workers read it, or what updates the parameters has it.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._module = session.replica.compute.module
        looks = session.run.train is not None and session.run.plan.workers > 1
        self._strategy = session.run.strategy.name
        # Elsewhere it is what it is in one process: what no optimizer has is trained by none.
        self._keeps = looks and isinstance(session.replica.sync, PeriodicSync)
        self._looks = looks
        self._held: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def look(self) -> None:
        """Notes where the parameters are, before user code runs."""
        if self._looks:
            # What is divided is another tensor while it is gathered, and looked at there.
            named = ((name, each) for name, each in self._module.named_parameters() if held_part(each) is each)
            self._held = {name: (each, each.data) for name, each in named}

    def regain(self) -> None:
        """Brings values to these places, after it."""
        for name, (parameter, place) in self._held.items():
            now = parameter.data
            if (now.shape, now.dtype, now.device) != (place.shape, place.dtype, place.device):
                raise UsageError(
                    f"a tensor of another form was put in the place of {name!r} (parameter.data = ...): "
                    f"{list(now.shape)}, {now.dtype}, {now.device} for {list(place.shape)}, {place.dtype}, "
                    f"{place.device}, which {self._strategy} has divided or shares; build the model so"
                )
            if memory_of(now) != memory_of(place) or now.data_ptr() != place.data_ptr():
                place.copy_(now)
                parameter.data = place
        if self._keeps:
            named = dict(self._module.named_parameters())
            for name, (parameter, _) in self._held.items():
                if named.get(name) is not parameter:
                    raise UsageError(
                        f"another parameter was put in the place of {name!r} (nn.Parameter(...), assign=True), and "
                        f"{self._strategy} would average the old one; write into it: parameter.data.copy_(...), or "
                        "load_state_dict without assign"
                    )


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
        flags=True,
    )
