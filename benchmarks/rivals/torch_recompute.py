"""torch's own checkpointing, by hand: `KIND STEPS rate|memory WIDTH TOKENS`; prints steps/s, or peak MB."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parents[1] / "recompute"))
from blocks import Stack, batch

_ATEN = torch.ops.aten
KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def policy(context: Any, operator: Any, *values: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def forward(kind: str, model: Stack, x: Tensor) -> Tensor:
    for index, block in enumerate(model.blocks):
        if kind == "none":
            x = block(x)
        elif kind == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        else:
            chosen = kind == "full" or index % 2 == 0
            x = checkpoint(block, x, use_reentrant=False) if chosen else block(x)
    return x


def most_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def main(kind: str, steps: int, figure: str, width: int, tokens: int) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, (x, y) = Stack(width), batch(width, tokens)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
    for step in range(steps):
        if step == 3:
            began = time.perf_counter()
        # A batch of the data in a new order, as headrace reads one.
        order = torch.randperm(len(x))
        examples, targets = x[order], y[order]
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(kind, model, examples), targets).backward()
        optimizer.step()
    took = time.perf_counter() - began
    return (steps - 3) / took if figure == "rate" else most_bytes() / 1e6


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
