"""An optimizer whose state is in blocks: each has whole numbers and one scale, as optimizers of 8 bits have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK, LEAST = 4, 8
"""Elements of a block, and of the smallest tensor that has blocks."""
_LEVELS = 127


class Blocks(Tensor):
    """Numbers of 8 bits, `(blocks, BLOCK)`, and a scale for each block, which are seen as one tensor."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, values: Tensor) -> Blocks:
        rows = values.reshape(-1, BLOCK)
        scales = rows.abs().amax(1).clamp(min=1e-12)
        codes = (rows / scales[:, None] * _LEVELS).round().to(torch.int8)
        return cls(codes, scales, values.shape, values.dtype)

    def numbers(self) -> Tensor:
        return (self.codes.to(self.dtype) / _LEVELS * self.scales[:, None]).reshape(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], [self.shape, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, attributes: Any, shape: Any, stride: Any) -> Blocks:
        return cls(inner["codes"], inner["scales"], *attributes)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of blocks")


class Nameless(Blocks):
    """Blocks that `torch.serialization.add_safe_globals` does not name."""


torch.serialization.add_safe_globals([Blocks])


class Blockwise(torch.optim.Optimizer):
    """Momentum, of which large tensors have blocks."""

    kind = Blocks

    def __init__(self, params: Any, lr: float = 0.1, least: int = LEAST) -> None:
        super().__init__(params, {"lr": lr, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                kept = self.state[tensor].get("momentum", torch.zeros_like(tensor))
                momentum = (kept.numbers() if isinstance(kept, Blocks) else kept) * 0.9 + tensor.grad
                tensor.add_(momentum, alpha=-group["lr"])
                whole = tensor.numel() >= group["least"] and tensor.numel() % BLOCK == 0
                self.state[tensor]["momentum"] = self.kind.of(momentum) if whole else momentum


class BlockwiseNameless(Blockwise):
    """One whose blocks no checkpoint can hold."""

    kind = Nameless


class RoundsAtRandom(torch.optim.Optimizer):
    """Plain SGD that rounds parameters of bfloat16 up or down by chance."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for tensor in group["params"]:
                new = tensor.float() - group["lr"] * tensor.grad.float()
                if tensor.dtype == torch.bfloat16:
                    low = torch.randint(0, 1 << 16, tensor.shape, dtype=torch.int32)
                    new = ((new.view(torch.int32) + low) & -65536).view(torch.float32)
                tensor.copy_(new)
