"""What a block keeps if it is run again selectively: results that take long to compute."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from headrace import internals

_KEPT = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm",
        "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    }
)  # fmt: skip
"""Operators of aten: products of matrices, convolutions, attention."""


def contexts() -> Any:
    """Returns the contexts of a forward, and of the one in backward."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *values: Any, **named: Any) -> CheckpointPolicy:
    kept = operator.namespace == "aten" and operator.__name__.partition(".")[0] in _KEPT
    if kept and not _draws(operator, values, named):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, values: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Tells whether an attention drops: one that is not run again draws no numbers, and those after it get others."""
    arguments = [each.name for each in internals.schema(operator).arguments]
    given = {**dict(zip(arguments, values, strict=False)), **named}
    return bool(given.get("dropout_p", 0.0))
