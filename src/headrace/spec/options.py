"""How training is done beside the strategy: the same under every one of them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Attributes:
    clip_norm: largest norm of the gradient of the whole model (2-norm, as `clip_grad_norm_`); None for none.
    batch_norm: "local" normalises by a worker's own share of the batch; "sync" by the global batch, and then
        N workers equal one device.
    eval_batch_size: examples of one evaluation batch a worker; None for its share of the global batch.
    """

    clip_norm: float | None = None
    batch_norm: str = "local"
    eval_batch_size: int | None = None

    def __post_init__(self) -> None:
        clip_norm = self.clip_norm
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
            raise UsageError(f"clip_norm must be a number above 0, got {clip_norm!r}; None switches it off")
        if self.batch_norm not in ("local", "sync"):
            raise UsageError(f"batch_norm is 'local' or 'sync', got {self.batch_norm!r}")
        size = self.eval_batch_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise UsageError(f"eval_batch_size must be a whole number of at least 1, got {size!r}")
