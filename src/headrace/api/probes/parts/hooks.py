"""Does a hook make the same of a gradient that comes in parts?

A hook on a parameter sees, on one device, the gradient of the whole batch. Each of several workers calls it with the
gradient of its own share, so that the mean of what it makes is the same where it is affine: a factor, a mask, something
that is added. A hook that clamps, looks at a norm, draws random numbers or makes the update itself is not.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from headrace.api.probes.finding import Finding, Scope, names_of
from headrace.api.probes.parts.sample import Sample
from headrace.hooks import hooks_of, owners_of
from headrace.training.user_code.trial import drawn, trial
from headrace.training.user_code.untouched import untouched

_SCALES = (1.0, 1e6, 1e-6)
"""Of the gradients that are tried: what clamps large ones, or drops small ones, shows at one of them."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.05
_REMEDY = (
    "use one_device, pipeline or tensor_parallel, whose hooks see whole gradients, or Options(clip_norm=..., "
    "clip_value=...)"
)


def probe_parameter_hooks(sample: Sample) -> Sequence[Finding]:
    """Returns what `problems_of_hooks` does, as findings."""
    return [
        Finding(f"a hook of this parameter {problem}", names_of(names), _REMEDY, Scope.WORKERS, refused=True)
        for problem, names in problems_of_hooks(sample.module).items()
    ]


def problems_of_hooks(module: nn.Module) -> dict[str, list[str]]:
    """Calls the hooks of parameters with random gradients, and looks at what they make of a mean of two.

    Returns what they do that is not the same over parts, with the names of the parameters.
    """
    found: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and any(hooks_of(parameter)):
            with contextlib.redirect_stdout(io.StringIO()):
                problem = _problem(module, parameter)
            if problem:
                found.setdefault(problem, []).append(name)
    return found


def _problem(module: nn.Module, parameter: nn.Parameter) -> str:
    """Returns what the hooks of a parameter do that is not the same over parts; "" for nothing."""
    generator = torch.Generator().manual_seed(0)
    value, held = parameter.detach().clone(), parameter.grad

    def make(scale: float) -> Tensor:
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        return (numbers * scale).to(parameter.dtype).to(parameter.device)

    def made(*gradients: Tensor) -> Tensor | None:
        """Returns what they make of the last of some gradients, beginning as they are now."""
        with trial(module), untouched(*owners_of(chain(*hooks_of(parameter))), but=(parameter,)):
            for gradient in gradients:
                result = _called(parameter, gradient)
            return result

    try:
        before = drawn()
        with torch.random.fork_rng(devices=[]):
            # As a hook that draws would leave them.
            with untouched(module, *owners_of(chain(*hooks_of(parameter))), but=(parameter,)), torch.no_grad():
                _called(parameter, make(1.0))
            draws = drawn() != before
        if draws:
            return "draws random numbers, others on each worker"
        for scale in _SCALES:
            one, other = make(scale), make(scale)
            of_one, of_other, of_mean = made(one), made(other), made((one + other) / 2)
            if not torch.equal(parameter, value):
                return "changes the parameter itself, by the gradient of a part of the batch"
            if of_one is None or of_other is None or of_mean is None:
                if of_one is of_other is of_mean:
                    continue
                return "takes gradients away, or not, by what it sees, which is a part of the batch on each worker"
            if _apart(of_mean, (of_one + of_other) / 2):
                return "is not linear (it clamps, or looks at a norm), and each worker's sees a part of the batch"
            third = make(scale)
            after_one, after_other = made(one, third), made(other, third)
            if after_one is None or after_other is None or _apart(after_one, after_other):
                return "remembers gradients, and each worker's sees other ones"
        return ""
    finally:
        with torch.no_grad():
            parameter.copy_(value)
        parameter.grad = held


def _called(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Returns what the hooks of a parameter make of a gradient."""
    gradients, sums = hooks_of(parameter)
    gradient = gradient.clone()
    for hook in gradients:
        made = hook(gradient)
        gradient = gradient if made is None else made
    parameter.grad = gradient
    for hook in sums:
        hook(parameter)
    return None if parameter.grad is None else parameter.grad.detach().clone()


def _apart(one: Tensor, other: Tensor) -> bool:
    size = max(float(one.abs().max()), float(other.abs().max())) if one.numel() else 0.0
    tolerance = _TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    return bool(size) and not float((one - other).abs().max()) <= tolerance * size
