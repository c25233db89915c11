"""A guard against a callback that calls a part of a model, where all ranks would have to call theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from headrace.errors import UsageError


@contextmanager
def no_calls(model: nn.Module, strategy: str) -> Iterator[None]:
    """Refuses calls of a model whose parts all ranks would have to call."""
    own = {id(part) for part in model.modules()}

    def refuse(called: nn.Module, _: object) -> None:
        if id(called) in own:
            raise UsageError(
                f"a callback calls the model, of which rank 0 has a part under {strategy}, and no other rank calls "
                "its own; use eval_data and metrics, or call run.model after the run"
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
