"""Which buffers, frozen parameters or extra state does forward change, beside the running statistics of BatchNorm?

Each worker's forward sees its own share. What depends on the data then differs between workers; what does not (the
vectors of spectral norm, a target network that follows the weights) moves once a forward, so once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headrace.api.probes.finding import Finding, Scope, names_of, trial
from headrace.checkpoint.forms import extra_states
from headrace.modules import restore, stateful_modules
from headrace.training.whole_model import Objective, call, cut, examples_of

_NUDGE = 1e-2
"""Relative change of the weights, so that a copy of them that follows them in forward has to move."""


def probe_changing_buffers(module: nn.Module, batch: Any, objective: Objective) -> Sequence[Finding]:
    """Runs the halves of a batch in the model's own mode, and compares what forward has left."""
    count = examples_of(batch)
    if count < 2:
        return ()
    watched = _watched(module)
    findings = _stateful_findings(module, batch, objective)
    if not watched:
        return findings
    start = {name: tensor.detach().clone() for name, tensor in watched.items()}
    results = []
    with torch.no_grad(), _nudged(module):
        for low, high in ((0, count // 2), (count // 2, count)):
            # Both begin with the same buffers and the same random numbers.
            with trial(module):
                versions = {name: tensor._version for name, tensor in watched.items()}
                call(module, cut(batch, low, high, count, "a probe"), objective.inputs)
                results.append(_changed(module, watched, versions, start))
    first, second = results
    names = [name for name in watched if name in first or name in second]
    differing = [name for name in names if not _same(first.get(name, start[name]), second.get(name, start[name]))]
    return (*_findings(module, differing, [name for name in names if name not in differing]), *findings)


def _stateful_findings(module: nn.Module, batch: Any, objective: Objective) -> Sequence[Finding]:
    """Tells of which modules a forward changes the extra state."""
    if not stateful_modules(module):
        return ()
    with trial(module):
        before = extra_states(module)
        call(module, batch, objective.inputs)
        after = extra_states(module)
    changed = [
        entry
        for entry in before.keys() | after.keys()
        if entry not in before or entry not in after or not _same(before[entry], after[entry])
    ]
    names = [
        name for name, _ in stateful_modules(module) if any(entry.startswith(f"extra/{name}|") for entry in changed)
    ]
    if not names:
        return ()
    return (
        Finding(
            "each forward changes what get_extra_state returns, and a micro-batch is a forward of its own",
            names_of(names),
            "with one micro-batch a share (accumulate=1, Pipeline(micro_batches=1)) it changes as on one device",
            Scope.PIECES,
        ),
    )


def _findings(module: nn.Module, differing: list[str], alike: list[str]) -> Sequence[Finding]:
    parameters = dict(module.named_parameters())
    frozen = [name for name in (*differing, *alike) if name in parameters]
    differing, alike = ([name for name in names if name not in parameters] for names in (differing, alike))
    findings = []
    if differing:
        findings.append(
            Finding(
                "forward changes these buffers by what it sees, which is its own share on each worker",
                names_of(differing),
                "Options(sync_buffers='mean') or 'first' (rank 0's, as DDP) makes them one on all workers",
                Scope.SHARES,
            )
        )
    if alike:
        findings.append(
            Finding(
                "each forward moves these buffers, and a micro-batch is a forward of its own",
                names_of(alike),
                "with one micro-batch a share (accumulate=1, Pipeline(micro_batches=1)) they move as on one device",
                Scope.PIECES,
            )
        )
    if frozen:
        findings.append(
            Finding(
                "forward changes these parameters, which are frozen; workers do not exchange those",
                names_of(frozen),
                "keep them as buffers (register_buffer) and use Options(sync_buffers='first')",
                Scope.SHARES,
            )
        )
    return findings


def _watched(module: nn.Module) -> dict[str, Tensor]:
    """Returns the saved buffers that are not BatchNorm's running statistics, and the frozen parameters."""
    statistics = {
        id(buffer) for layer in module.modules() if isinstance(layer, _BatchNorm) for buffer in layer.buffers(False)
    }
    # A buffer that is not saved is a cache, which forward makes again from what it gets.
    kept = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept and id(buffer) not in statistics}
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    return buffers | frozen


@contextmanager
def _nudged(module: nn.Module) -> Iterator[None]:
    trained = [each for each in module.parameters() if each.requires_grad]
    values = [parameter.detach().clone() for parameter in trained]
    try:
        for parameter in trained:
            parameter.mul_(1 + _NUDGE)
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
        written = present is not tensor or present._version != versions[name]
        if written or not _same(present, start[name]):
            changed[name] = present.detach().clone()
    return changed


def _same(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return one.shape == other.shape and torch.equal(one, other)
