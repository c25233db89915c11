"""What the simulated accelerator does, as a program of one process says it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.ranks import say
from headrace.modules import copy_module, move
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
    changed = raised(torch.fake.synchronize)
    return {"early": early, "asked": asked, "late": host.tolist(), "changed": changed, "again": raised(read_and_filled)}


def read_and_filled() -> None:
    """Copies pinned memory to the device, and by a stream that waits for that to it again."""
    block, side = torch.ones(3).pin_memory(), torch.fake.Stream(FIRST)
    there = block.to(FIRST, non_blocking=True)
    side.wait_stream(torch.fake.current_stream(FIRST))
    with torch.fake.stream(side):
        block.copy_(there, non_blocking=True)
    side.synchronize()
    torch.fake.synchronize()
    assert block.tolist() == [1.0] * 3


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


class Tied(nn.Module):
    """A parameter in two places, with hooks of both sorts, and one with none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.weight.register_hook(lambda gradient: gradient * 2)
        self.first.weight.register_hook(lambda gradient: gradient + 1)
        self.first.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x).tanh())
        return made


def moved() -> list[float]:
    """Returns how far the gradients of a model that was moved are from those of its copy here."""
    torch.manual_seed(0)
    here, x = Tied().double(), torch.randn(4, 3, dtype=torch.float64)
    there = copy_module(here)
    move(there, str(FIRST))
    assert there.first.weight is there.second.weight
    for model, inputs in ((here, x), (there, x.to(FIRST))):
        model(inputs).square().sum().backward()
    pairs = zip(here.parameters(), there.parameters(), strict=True)
    return [float((own.grad - other.grad.cpu()).abs().max()) for own, other in pairs]


def alone() -> None:
    torch.set_num_threads(1)
    say(waits=waits(), order=order(), pinned=pinned(), memory=memory(), moved=moved())
