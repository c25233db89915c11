"""A script for Accelerate: loops over loaders of every kind, and what they leave; `numbers` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

torch.set_default_dtype(torch.float64)


class Stream(IterableDataset[Any]):
    """Examples of which nobody knows the number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        draws = torch.Generator().manual_seed(7)
        for _ in range(self.count):
            example = torch.randn(5, generator=draws)
            yield example, example.sum()


class Sized(Stream):
    """Examples with a number."""

    def __len__(self) -> int:
        return self.count


class Epochs(Sized):
    """Examples of which each epoch has others first."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        examples = [*super().__iter__()]
        yield from examples[self.epoch :] + examples[: self.epoch]


def loader_of(kind: str, examples: int, drop_last: bool) -> DataLoader[Any]:
    inputs = torch.randn(examples, 5)
    data, options = TensorDataset(inputs, inputs.sum(1)), {"batch_size": 4, "drop_last": drop_last}
    streams = {"stream": Stream, "sized": Sized, "epochs": Epochs}
    if kind in streams:
        return DataLoader(streams[kind](examples), **options)
    if kind == "weighted":
        return DataLoader(data, sampler=WeightedRandomSampler(torch.arange(1.0, examples + 1), examples), **options)
    if kind == "batches":
        return DataLoader(data, batch_sampler=BatchSampler(range(examples - 1, -1, -1), 4, drop_last))
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    return DataLoader(data, shuffle=True, generator=generator, num_workers=kind == "readers", **options)


def run(kind: str, examples: int, passes: int, split: bool, drop_last: bool) -> list[float]:
    """Trains two models by one optimizer; returns all that it sees."""
    config = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(gradient_accumulation_steps=passes, cpu=True, dataloader_config=config)
    set_seed(11)
    first, second = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2)), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.03)
    loader = loader_of(kind, examples, drop_last)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=12 if split else 5)
    first, second, optimizer, loader, schedule = accelerator.prepare(first, second, optimizer, loader, schedule)
    seen: list[float] = []
    for _ in range(2):
        for inputs, target in loader:
            with accelerator.accumulate(first, second):
                loss = (second(first(inputs).tanh()).squeeze(1) - target).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(first.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen += [accelerator.sync_gradients, len(inputs), schedule.get_last_lr()[0]]
            seen += accelerator.gather_for_metrics(target).tolist()
            seen += accelerator.gather(loss.detach()).flatten().tolist()
    for model in (first, second):
        for parameter in accelerator.unwrap_model(model).parameters():
            seen += parameter.flatten().tolist()
    accelerator.free_memory()
    return seen


def gathered() -> list[Any]:
    """Returns what the processes have in common otherwise."""
    accelerator = Accelerator(cpu=True)
    place = accelerator.process_index
    seen: list[Any] = [accelerator.num_processes, str(accelerator.distributed_type)[-3:]]
    for values in ([0, 1, 2, 3, 4], torch.arange(7.0), {"a": [1, 2, 3], "b": torch.arange(3.0)}):
        for pads in (False, True):
            # Accelerate divides the dict that it is given.
            given = dict(values) if isinstance(values, dict) else values
            with accelerator.split_between_processes(given, apply_padding=pads) as part:
                listed = part["b"] if isinstance(part, dict) else part
                padded = accelerator.pad_across_processes(torch.as_tensor(listed), pad_index=-1)
                seen += accelerator.gather(padded).tolist()
    matrix = torch.full((2, place + 2), float(place))
    seen += accelerator.gather(accelerator.pad_across_processes(matrix, dim=1, pad_first=True)).flatten().tolist()
    for how in ("sum", "mean"):
        seen += accelerator.reduce({"x": torch.tensor([1.0, place])}, how, scale=0.5)["x"].tolist()
    seen += accelerator.gather_for_metrics([f"text {place}", "another"])
    if place:
        accelerator.set_trigger()
    seen += [accelerator.check_trigger(), accelerator.check_trigger()]
    with accelerator.main_process_first():
        seen.append(accelerator.is_main_process or accelerator.is_last_process)
    return seen


CASES = {
    "shuffled": ("shuffled", 22, 2, False, False),
    "whole batches": ("generator", 16, 1, False, False),
    "a generator, split": ("generator", 18, 2, True, False),
    "fewer than a batch": ("generator", 3, 1, False, False),
    "readers": ("readers", 13, 1, False, True),
    "weighted": ("weighted", 21, 2, False, False),
    "batches": ("batches", 19, 1, False, False),
    "stream": ("stream", 22, 1, False, False),
    "stream, dropped": ("stream", 27, 3, False, True),
    "stream, split": ("stream", 23, 1, True, False),
    "sized stream": ("sized", 16, 3, False, False),
    "epochs": ("epochs", 11, 1, False, False),
}
numbers: dict[str, list[Any]] = {name: run(*case) for name, case in CASES.items()}
numbers["gathered"] = gathered()
