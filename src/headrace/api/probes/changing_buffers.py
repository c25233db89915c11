"""Which buffers, frozen parameters or extra state does forward change, beside the running statistics of BatchNorm?

Each worker's forward sees its own share. What depends on the data then differs between workers; what does not (the
vectors of spectral norm, a target network that follows the weights) moves once a forward, so once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.probes.finding import Finding, Scope, names_of
from headrace.api.probes.parts.sample import Sample
from headrace.checkpoint.forms import extra_states
from headrace.internals import BatchNorm
from headrace.modules import restore, same_values, stateful_modules
from headrace.training.user_code.trial import loss_of, run_forward, trial

_LARGE = 7.0
"""Relative change of the weights, so that forward clamps them or makes them shorter, where it ever does."""
_NUDGE = 1e-2
"""Relative change of the weights, so that a copy of them that follows them in forward has to move."""


def probe_changing_buffers(sample: Sample) -> Sequence[Finding]:
    """Runs two parts of a batch in the model's own mode, and compares what forward has left."""
    module, count = sample.module, sample.count
    watched = _watched(module)
    states = [name for name, _ in stateful_modules(module)]
    if not watched and not states:
        return ()
    start = {name: tensor.detach().clone() for name, tensor in watched.items()}
    before = extra_states(module)
    results, after = [], []
    with torch.no_grad(), _nudged(module):
        # Of other lengths, because a buffer may count examples.
        for low, high in ((0, count // 2), (count // 2 - 1, count)):
            # Both begin with the same buffers and the same random numbers.
            with trial(module):
                versions = {name: internals.version(tensor) for name, tensor in watched.items()}
                run_forward(module, sample.part(low, high), sample.objective)
                results.append(_changed(module, watched, versions, start))
                after.append(extra_states(module))
    first, second = results
    names = [name for name in watched if name in first or name in second]
    differing = {name for name in names if not same_values(first.get(name, start[name]), second.get(name, start[name]))}
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    changed = [name for name in states if any(_differ(name, before, each) for each in after)]
    by_what_it_sees = {name for name in changed if _differ(name, *after)}
    found = (
        (_BUFFERS_BY_SHARE, [name for name in names if name in differing - frozen]),
        (_BUFFERS_BY_FORWARD, [name for name in names if name not in differing | frozen]),
        (_FROZEN, [name for name in names if name in frozen]),
        (_STATE_BY_SHARE, [name for name in changed if name in by_what_it_sees]),
        (_STATE_BY_FORWARD, [name for name in changed if name not in by_what_it_sees]),
    )
    return [Finding(what, names_of(names), remedy, scope) for (what, remedy, scope), names in found if names]


_BUFFERS_BY_SHARE = (
    "forward changes these buffers by what it sees, which is its own share on each worker, and each micro-batch by "
    "itself",
    "Options(sync_buffers='mean') or 'first' (rank 0's, as DDP) makes them one on all workers that have a share; "
    "against micro-batches (accumulate, pipeline) helps one a share alone: accumulate=1, Pipeline(micro_batches=1)",
    Scope.SHARES,
)
_BUFFERS_BY_FORWARD = (
    "each forward moves these buffers, and a micro-batch is a forward of its own",
    "with one micro-batch a share (accumulate=1, Pipeline(micro_batches=1)) they move as on one device",
    Scope.PIECES,
)
_FROZEN = (
    "forward changes these parameters, which are frozen; workers do not exchange those",
    "keep them as buffers (register_buffer) and use Options(sync_buffers='first')",
    Scope.SHARES,
)
_STATE_BY_SHARE = (
    "forward changes what get_extra_state returns by what it sees, which is its own share on each worker",
    "rank 0's is saved; what all workers must agree on can be a buffer, with Options(sync_buffers='mean')",
    Scope.SHARES,
)
_STATE_BY_FORWARD = (
    "each forward changes what get_extra_state returns, and a micro-batch is a forward of its own",
    "with one micro-batch a share (accumulate=1, Pipeline(micro_batches=1)) it changes as on one device",
    Scope.PIECES,
)


def probe_written_parameters(sample: Sample) -> Sequence[Finding]:
    """Runs forward and loss, and looks which parameters that are trained they have written to."""
    module, count = sample.module, sample.count
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if any(each.is_meta for each in trained.values()):
        return ()

    def run(*pieces: tuple[int, int]) -> dict[str, Tensor]:
        """Returns what they have left of the parameters that they have written to."""
        before = {name: (internals.version(each), each.detach().clone()) for name, each in trained.items()}
        for bounds in pieces:
            loss_of(module, sample.part(*bounds), sample.objective)
        now = dict(module.named_parameters())
        pairs = ((name, now.get(name, each), before[name]) for name, each in trained.items())
        return {
            name: each.detach().clone()
            for name, each, (version, value) in pairs
            if each is not trained[name] or internals.version(each) != version or not same_values(each, value)
        }

    half = count // 2
    with trial(module):
        try:
            with _nudged(module, _LARGE):
                whole, by = run((0, count)), _LARGE
        except Exception:  # whatever a user's model raises, of values that it would not have
            with _nudged(module):
                whole, by = run((0, count)), _NUDGE
        if not whole:
            return ()
        with _nudged(module, by):
            pieces = run((0, half), (half, count))
    names = names_of(list(whole))
    what = "forward (or the loss) writes to this parameter, which is trained"
    remedy = (
        "compute what it makes in forward, without writing: torch.nn.utils.parametrize (weight norm, unit norm), or do "
        "it after the update, in a loop of your own (hr.launch)"
    )
    findings = [Finding(f"{what}, and each process to its own copy", names, remedy, Scope.PROCESSES, refused=True)]
    # Where a second forward changes nothing more, micro-batches are as one batch.
    if whole.keys() != pieces.keys() or not all(_close(whole[name], pieces[name]) for name in whole):
        findings.append(Finding(f"{what}, once for each micro-batch", names, remedy, Scope.PIECES, refused=True))
    return findings


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-5, atol=1e-7 * float(one.abs().max()) if one.numel() else 0.0))


def _differ(module: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Tells whether two extra states of a module differ."""
    entries = {entry for entry in (*one, *other) if entry.startswith(f"extra/{module}|")}
    return any(entry not in one or entry not in other or not same_values(one[entry], other[entry]) for entry in entries)


def _watched(module: nn.Module) -> dict[str, Tensor]:
    """Returns the saved buffers that are not BatchNorm's running statistics, and the frozen parameters."""
    statistics = {
        id(buffer) for layer in module.modules() if isinstance(layer, BatchNorm) for buffer in layer.buffers(False)
    }
    # A buffer that is not saved is a cache, which forward makes again from what it gets.
    kept = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept and id(buffer) not in statistics}
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    return buffers | frozen


@contextmanager
def _nudged(module: nn.Module, by: float = _NUDGE) -> Iterator[None]:
    trained = [each for each in module.parameters() if each.requires_grad]
    values = [parameter.detach().clone() for parameter in trained]
    try:
        for parameter in trained:
            parameter.mul_(1 + by)
        yield
    finally:
        for parameter, value in zip(trained, values, strict=True):
            restore(parameter, value)


def _changed(
    module: nn.Module, watched: Mapping[str, Tensor], versions: Mapping[str, int], start: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns copies of what one forward has written to or replaced."""
    now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    changed = {}
    for name, tensor in watched.items():
        present = now.get(name, tensor)
        written = present is not tensor or internals.version(present) != versions[name]
        if written or not same_values(present, start[name]):
            changed[name] = present.detach().clone()
    return changed
