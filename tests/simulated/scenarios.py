"""What the simulated accelerator does, as a program of one process says it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.ranks import say
from simulated.accelerator import NAME, counted, live_blocks, no_waits

FIRST = torch.device(NAME, 0)


def raised(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def waits() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(FIRST)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 4)
    with counted() as plain:
        loss = step(model, optimizer, x.pin_memory().to(FIRST, non_blocking=True))
    with counted() as waiting:
        (loss.item(), loss.cpu(), bool(loss > 0), torch.nonzero(loss), x.to(FIRST), torch.fake.synchronize())
    return {
        "plain": plain,
        "waiting": waiting,
        "forbidden": raised(lambda: _forbid(loss)),
    }


def _forbid(loss: Tensor) -> None:
    with no_waits():
        loss.item()


def order() -> dict[str, Any]:
    side, main = torch.fake.Stream(FIRST), torch.fake.current_stream(FIRST)
    with torch.fake.stream(side):
        made = torch.ones(3, device=FIRST) * 2
    early = raised(lambda: made + 1)
    main.wait_event(side.record_event())
    late = (made + 1).tolist()
    used = torch.ones(3, device=FIRST)
    side.wait_stream(main)
    with torch.fake.stream(side):
        kept = used * 2
    over = raised(partial(used.add_, 1))
    del used
    freed = raised(lambda: torch.empty(3, device=FIRST))
    main.wait_stream(side)
    return {"early": early, "late": late, "over": over, "freed": freed, "kept": kept.tolist()}


def pinned() -> dict[str, Any]:
    there, host = torch.full((3,), 5.0, device=FIRST), torch.zeros(3).pin_memory()
    host.copy_(there, non_blocking=True)
    event = torch.fake.current_stream(FIRST).record_event()
    early, asked = host.isnan().all().item(), event.query()
    event.synchronize()
    source = torch.ones(3).pin_memory()
    source.to(FIRST, non_blocking=True)
    source.fill_(7)
    return {"early": early, "asked": asked, "late": host.tolist(), "changed": raised(torch.fake.synchronize)}


def memory() -> dict[str, Any]:
    before, blocks = torch.fake.memory_allocated(FIRST), live_blocks()
    torch.fake.reset_peak_memory_stats(FIRST)
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=FIRST)
    rise = torch.fake.memory_allocated(FIRST) - before
    torch.fake.set_memory_limit(before + (2 << 20), FIRST)
    full = raised(lambda: torch.empty(2 << 20, dtype=torch.uint8, device=FIRST))
    other = raised(lambda: torch.empty(2 << 20, dtype=torch.uint8, device="fake:1"))
    torch.fake.set_memory_limit(1 << 40, FIRST)
    del kept
    peak = torch.fake.max_memory_allocated(FIRST) - before
    left = torch.fake.memory_allocated(FIRST) - before, live_blocks() - blocks
    return {"rise": rise, "peak": peak, "full": full, "other": other, "left": left}


def alone() -> None:
    torch.set_num_threads(1)
    say(waits=waits(), order=order(), pinned=pinned(), memory=memory())
