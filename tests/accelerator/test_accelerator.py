"""An Accelerator in one process, and what it does not carry."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from headrace.accelerate import Accelerator, get_logger
from headrace.accelerate.batches import Groups
from headrace.accelerate.loaders import PreparedLoader
from headrace.accelerate.progress import LoopProgress
from headrace.api.plain_script.meeting import Meeting
from headrace.api.plain_script.processes import ScriptProcesses
from headrace.errors import UnknownName, UsageError


class DistributedDataParallelKwargs:
    """Named as Accelerate's."""

    def __init__(self, comm_hook: str = "no") -> None:
        self.comm_hook = comm_hook

    def __repr__(self) -> str:
        return f"DistributedDataParallelKwargs({self.comm_hook})"


def test_a_handler_that_changes_no_numbers_is_taken() -> None:
    assert Accelerator(kwargs_handlers=[DistributedDataParallelKwargs()]).sync_gradients


def test_a_script_in_one_process_trains_as_without_it() -> None:
    def train(accelerated: bool) -> list[list[float]]:
        torch.manual_seed(3)
        accelerator = Accelerator(gradient_accumulation_steps=3)
        data = DataLoader(TensorDataset(torch.rand(20, 4)), batch_size=4, shuffle=True)
        model = nn.Linear(4, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader: Any = data
        if accelerated:
            schedule, loader, model, optimizer = accelerator.prepare(schedule, data, model, optimizer)
        for _ in range(2):
            for place, (inputs,) in enumerate(loader):
                loss = model(inputs).square().mean()
                if accelerated:
                    with accelerator.accumulate(model):
                        accelerator.backward(loss)
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                    assert accelerator.gather_for_metrics(inputs) is inputs
                else:
                    (loss / 3).backward()
                    if place in (2, 4):
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
        return [each.tolist() for each in model.parameters()]

    assert train(accelerated=True) == train(accelerated=False)


@pytest.mark.parametrize(
    ("examples", "multiple", "drops", "joined", "real"),
    [
        (8, 4, False, [[0, 1, 2, 3], [4, 5, 6, 7]], 4),
        (7, 4, False, [[0, 1, 2, 3], [4, 5, 6, 0]], 3),
        (7, 4, True, [[0, 1, 2, 3]], 4),
        (7, 2, False, [[0, 1, 2, 3], [4, 5, 6, 0]], 3),
        (6, 2, False, [[0, 1, 2, 3], [4, 5]], 2),
        (3, 4, False, [[0, 1, 2, 0]], 3),
        (1, 4, False, [[0, 0, 0, 0]], 1),
        (3, 4, True, [], 0),
        (0, 4, False, [], 0),
    ],
)
def test_batches_are_joined_and_the_last_is_completed(
    examples: int, multiple: int, drops: bool, joined: list[list[int]], real: int
) -> None:
    groups = Groups(4, multiple, drops)
    parts = [list(range(start, min(start + 2, examples))) for start in range(0, examples, 2)]
    known = [(batch, groups.count) for batch in groups.join(parts)]
    assert [batch for batch, _ in known] == joined
    assert [count for _, count in known] == [None] * (len(joined) - 1) + [len(joined)] * bool(joined)
    assert groups.real == real


def test_a_short_batch_between_others_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 1 examples between others of 2"):
        list(Groups(4, 4, False).join([[0, 1], [2], [3, 4]]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp_plugin": object()}, r"Accelerator\(fsdp_plugin=...\) is not carried"),
        ({"kwargs_handlers": [1]}, "the handler 1 is not carried"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs("fp16")]}, "the handler .*fp16.* is not carried"),
        ({"gradient_accumulation_steps": 0}, "is 0, and at least 1"),
        ({"dataloader_config": SimpleNamespace(use_seedable_sampler=True)}, "use_seedable_sampler"),
        (
            {
                "gradient_accumulation_plugin": SimpleNamespace(
                    num_steps=2, adjust_scheduler=True, sync_with_dataloader=False
                )
            },
            "sync_with_dataloader=False",
        ),
    ],
)
def test_what_is_not_carried_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Accelerator(**options)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="fp16"):
        Accelerator(mixed_precision="fp16")
    with pytest.raises(UnknownName, match="comet_ml"):
        Accelerator(log_with="comet_ml")
    with pytest.raises(AttributeError, match="has no maybe_context_parallel"):
        _ = Accelerator().maybe_context_parallel
    with pytest.raises(UnknownName, match="median"):
        Accelerator().reduce(torch.ones(1), "median")


def test_bf16_computes_in_it_and_returns_float32() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(3, 2))
    inputs = torch.rand(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.linear(inputs, model.weight, model.bias)
    assert model(inputs).dtype == torch.float32
    assert model(inputs).tolist() == expected.float().tolist()
    with accelerator.autocast():
        assert (inputs @ inputs.T).dtype == torch.bfloat16


def two_processes() -> ScriptProcesses:
    def meet() -> Meeting:
        raise AssertionError

    return ScriptProcesses(0, 2, meet)


def test_loaders_that_cannot_be_divided_are_refused() -> None:
    data = TensorDataset(torch.zeros(6, 1))

    class Batches(BatchSampler):
        def __init__(self) -> None:
            super().__init__(range(6), 2, False)
            del self.batch_size

    for loader, split, said in (
        (DataLoader(data, batch_size=3), True, "a batch of 3 examples is divided among 2"),
        (DataLoader(data, batch_sampler=Batches()), False, "Batches has no batch_size"),
        (DataLoader(data, batch_size=None), False, "has no batch_size"),
    ):
        with pytest.raises(UsageError, match=said):
            PreparedLoader(loader, LoopProgress(1), two_processes(), split=split)


def test_numbers_and_lines_are_written(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Kept:
        name, writer = "kept", "its own"

        def __init__(self) -> None:
            self.values: list[Any] = []

        def log(self, values: Any, step: int | None = None) -> None:
            self.values.append((dict(values), step))

        def finish(self) -> None:
            self.values.append("finished")

    kept = Kept()
    accelerator = Accelerator(log_with=["tensorboard", kept], project_dir=tmp_path)
    accelerator.init_trackers("run", {"rate": 0.1})
    accelerator.log({"loss": 1.5}, step=3)
    accelerator.end_training()
    assert kept.values == [({"loss": 1.5}, 3), "finished"]
    assert list((tmp_path / "run").glob("events.*"))
    assert accelerator.get_tracker("kept") is kept
    assert accelerator.get_tracker("kept", unwrap=True) == "its own"
    with pytest.raises(UnknownName, match="wandb"):
        accelerator.get_tracker("wandb")
    with pytest.raises(UsageError, match="needs a folder"):
        Accelerator(log_with="tensorboard").init_trackers("run")
    with caplog.at_level(logging.INFO):
        get_logger("script").info("a line %d", 3, main_process_only=False)
        get_logger("script").info("in order", in_order=True)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] a line 3", "[RANK 0] in order"]


def test_what_accelerate_tells_is_told() -> None:
    accelerator = Accelerator()
    assert json.dumps([accelerator.distributed_type, accelerator.num_processes, accelerator.state.mixed_precision])
    assert accelerator.is_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    assert accelerator.on_main_process(lambda: 3)() == 3
    assert accelerator.reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert accelerator.gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert accelerator.pad_across_processes(torch.ones(2)).tolist() == [1.0, 1.0]
    model, optimizer = nn.Linear(1, 1), object()
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert accelerator.free_memory(model, optimizer) == [None, None]
