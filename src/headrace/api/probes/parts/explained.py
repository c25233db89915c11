"""What of a job fails in its trial, in words that name the layer, the memory, or what a function is called with."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from headrace.errors import HeadraceError, JobError
from headrace.machine.limits import out_of_memory
from headrace.machine.resources import spare_memory_bytes
from headrace.report.format import byte_count

T = TypeVar("T")

_BYTES = re.compile(r"allocate (\d+) bytes")
_MOST_TEXT = 100


def guarded(what: str, function: Callable[[], T], more: Callable[[Exception], str] = lambda _: "") -> T:
    """Returns what a function of the user's returns; its errors become a JobError, `more` says what else is known."""
    try:
        return function()
    except HeadraceError:
        raise
    except Exception as error:
        # torch's words do not say which table, or that it may be one of positions.
        beyond = (
            "; an embedding has no such row: a token or class is not in the vocabulary, or a sequence is longer than "
            "the model's positions"
        )
        remedy = beyond if str(error) == "index out of range in self" else more(error)
        said = _memory(error) or f"{type(error).__name__}: {error}{remedy}"
        raise JobError(f"{what}: {said}") from error


def _memory(error: Exception) -> str:
    """Returns how much memory was asked for, and how much there is; "" where that is not why it fails."""
    asked = _BYTES.search(str(error)) if out_of_memory(error) else None
    if not asked:
        return ""
    return (
        f"it asks for {byte_count(int(asked[1]))} at once, and {byte_count(spare_memory_bytes())} are free; make the "
        'layer smaller, or divide it: "fully_sharded(deferred=True)"'
    )


def called_with(error: Exception) -> str:
    """Returns what a loss is called with, where it has failed because it expects something else."""
    told = "; the loss is called with the model's output and the target: loss(output, target)"
    return told if isinstance(error, TypeError | AttributeError) else ""


def _shapes(inputs: tuple[Any, ...]) -> str:
    return ", ".join(str(tuple(each.shape)) for each in inputs if isinstance(each, Tensor)) or "no tensor"


def failing_layer(module: nn.Module, run: Callable[[], object], _: Exception) -> str:
    """Returns the layer in which a forward fails, with the shapes that it gets; "" where it does not fail again."""
    inside: list[tuple[str, nn.Module, tuple[Any, ...]]] = []

    def enter(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        inside.append((name, layer, inputs))

    def leave(*_: object) -> None:
        inside.pop()

    hooks = []
    for name, layer in module.named_modules():
        hooks += [layer.register_forward_pre_hook(partial(enter, name)), layer.register_forward_hook(leave)]
    try:
        run()
    except Exception:
        named = [each for each in inside if each[0]]
        if not named:
            return ""
        name, layer, inputs = named[-1]
        text = repr(layer) if not list(layer.children()) else type(layer).__name__
        whole = f"; the batch is {_shapes(inside[0][2])}" if not inside[0][0] else ""
        return f"; layer {name}: {text:.{_MOST_TEXT}} got {_shapes(inputs)}{whole}"
    finally:
        for hook in hooks:
            hook.remove()
    return ""
