"""torch's own checkpointing, by hand, one thread: `KIND STEPS rate|memory`; prints steps/s, or MB that it grew by."""

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
from blocks import WIDTH, Stack, batch

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


def resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def main(kind: str, steps: int, figure: str) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A first step imports a part of torch that headrace does without.
    small = Stack()
    forward(kind, small, torch.ones(1, 2, WIDTH)).sum().backward()
    torch.optim.Adam([nn.Parameter(torch.ones(1))]).step()
    del small
    began_with = resident("VmRSS")
    model, (x, y) = Stack(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
    for step in range(steps):
        if step == 3:
            began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(kind, model, x), y).backward()
        optimizer.step()
    took = time.perf_counter() - began
    return (steps - 3) / took if figure == "rate" else (resident("VmHWM") - began_with) / 1e6


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
