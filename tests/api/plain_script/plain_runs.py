"""Plain scripts whose processes are threads, and the same alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from headrace.api.plain_script.gradients import Synchronizer
from headrace.api.plain_script.meeting import Meeting
from headrace.api.plain_script.shares import ShareLoader
from headrace.api.plain_script.steps import CentralParameters, SynchronizedSteps
from headrace.collectives.threads import ThreadCollective, ThreadGroup

Result = TypeVar("Result")
Script = Callable[[nn.Module, torch.optim.Optimizer, Any, Meeting | None], None]


def on_ranks(act: Callable[[Meeting], Result], world: int = 2) -> list[Result | Exception]:
    """Returns what each rank's thread returns or raises."""
    group = ThreadGroup(world)

    def run(rank: int) -> Result | Exception:
        try:
            return act(Meeting(ThreadCollective(group, rank)))
        except Exception as error:
            group.abort(rank)
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


def said(results: list[Any]) -> str:
    """Returns what the ranks raise, of which there must be something."""
    errors = [str(result) for result in results if isinstance(result, Exception)]
    assert errors, results
    return "\n".join(errors)


def examples(count: int = 22) -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 4, generator=drawn).double(), torch.randn(count, 1, generator=drawn).double()
    )


def network() -> nn.Sequential:
    drawn = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 2)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader_of(batch_size: int = 7) -> DataLoader[Any]:
    return DataLoader(examples(), batch_size, shuffle=True, generator=torch.Generator().manual_seed(5))


def trained(
    script: Script,
    meeting: Meeting | None,
    *,
    build: Callable[[], nn.Module] = network,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    central: bool = False,
    reduction: str | None = None,
    loader: Callable[[], DataLoader[Any]] = loader_of,
) -> list[Tensor]:
    """Returns the parameters and buffers after a script, alone or as one rank."""
    model = build()
    optimizer = optimizer_of(model)
    batches: Any = loader()
    if meeting is not None:
        placed = CentralParameters(model, meeting) if central else None
        synchronizer = Synchronizer(model, meeting, 0, reduction)
        if placed:
            synchronizer.check_values = placed.check
        SynchronizedSteps(optimizer, synchronizer, meeting, placed)
        batches = ShareLoader(batches, meeting)
    script(model, optimizer, batches, meeting)
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def alike(script: Any, world: int = 3, **options: Any) -> None:
    expected = trained(
        script, None, **{name: value for name, value in options.items() if name not in ("central", "reduction")}
    )
    for result in on_ranks(lambda meeting: trained(script, meeting, **options), world):
        assert not isinstance(result, Exception), result
        for got, wanted in zip(result, expected, strict=True):
            assert torch.allclose(got, wanted, rtol=0, atol=1e-12)
