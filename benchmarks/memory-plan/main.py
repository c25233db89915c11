"""What `hr.summary(job, strategy)` says that the fullest worker will hold, beside what worker processes held.

export MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 MALLOC_TOP_PAD_=65536
python main.py [CONFIGURATION ...]

With these, memory that is free goes back to the system at once, so that a process's size is what it holds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.memory.planning import plan_memory
from headrace.spec.events import ServerEnded, WorkerEnded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from transformer_block import Block

HEADS, TOKENS, BATCH, BYTES = 10, 96, 4, 256
SIZE, TINY = (640, 5), (40, 1)
"""Width and layers of the transformer, and of one whose worker shows what Python, torch and its kernels take."""


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.last(x))
        return made


def convolutional(width: int, _: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width // 10), (width // 10, width // 5), (width // 5, width // 5)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    flat = 16 * (width // 5)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(flat, 6 * width), nn.Linear(6 * width, 10)
    )


def next_byte(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def text(optimizer: object = torch.optim.AdamW, batch: int = BATCH, steps: int = 2, **options: object) -> hr.Job:
    data = torch.randint(0, BYTES, (4 * batch, TOKENS), generator=torch.Generator().manual_seed(0))
    made = functools.partial(optimizer, lr=1e-4)  # type: ignore[arg-type]
    return hr.Job(
        model=functools.partial(Transformer, *SIZE),
        loss=next_byte,
        optimizer=made,
        data=(data, data),
        global_batch_size=batch,
        steps=steps,
        options=hr.Options(**options),  # type: ignore[arg-type]
    )


def images(**options: object) -> hr.Job:
    data = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(32, dtype=torch.int64)
    return hr.Job(
        model=functools.partial(convolutional, *SIZE),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        data=data,
        global_batch_size=16,
        steps=2,
        options=hr.Options(**options),  # type: ignore[arg-type]
    )


CONFIGURATIONS = {
    "one_device": (text(), hr.OneDevice()),
    "one_device, 3 x the batch": (text(batch=12), hr.OneDevice()),
    "one_device, recompute full": (text(batch=12, recompute="full"), hr.OneDevice()),
    "one_device, recompute selective": (text(batch=12, recompute="selective"), hr.OneDevice()),
    "one_device, accumulate 3": (text(batch=12, accumulate=3), hr.OneDevice()),
    "one_device, bf16": (text(batch=12, precision="bf16"), hr.OneDevice()),
    "one_device, SGD, clipped": (text(torch.optim.SGD, clip_norm=1.0), hr.OneDevice()),
    "one_device, images": (images(), hr.OneDevice()),
    "mirrored, 2": (text(), hr.Mirrored(2)),
    "central_storage, 2": (text(), hr.CentralStorage(2)),
    "fully_sharded, 2": (text(), hr.FullySharded(2)),
    "fully_sharded, 4, deferred": (text(), hr.FullySharded(4, deferred=True)),
    "tensor_parallel, 2": (text(), hr.TensorParallel(2)),
    "context_parallel, 2": (text(), hr.ContextParallel(2)),
    "parameter_averaging, 2": (text(), hr.ParameterAveraging(2, period=2)),
    "gossip, 2": (text(), hr.Gossip(2)),
    "pipeline, 2": (text(), hr.Pipeline(2, 4)),
    "pipeline, 2, 1f1b, 3 x the batch": (text(batch=12), hr.Pipeline(2, 4, "1f1b")),
    "pipeline, 2, 12 x the batch": (text(batch=48), hr.Pipeline(2, 4)),
    "fully_sharded, 2 x pipeline, 2": (text(batch=8), hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2, 4))),
    "mirrored, 2 x pipeline, 2": (text(batch=8), hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 4))),
    "averaging, 2 x pipeline, 2": (text(batch=8), hr.Hybrid(hr.ParameterAveraging(2, 2), hr.Pipeline(2, 4))),
    "averaging, nesterov, 2 x pipeline, 2": (
        text(batch=8),
        hr.Hybrid(hr.ParameterAveraging(2, 2, "nesterov"), hr.Pipeline(2, 4)),
    ),
    "mirrored, 2 x fully_sharded, 2 x pipeline, 2": (
        text(batch=16),
        hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.Pipeline(2, 4)),
    ),
    "pipeline, 2 x tensor_parallel, 2": (text(), hr.Hybrid(hr.Pipeline(2, 4), hr.TensorParallel(2))),
    "pipeline, 2, recompute": (text(batch=12), hr.Pipeline(2, 4, recompute="always")),
    "parameter_server, 2 + 1": (text(steps=4), hr.ParameterServer(2, 1)),
    "parameter_server, 2 + 2": (text(steps=4), hr.ParameterServer(2, 2)),
    "parameter_server, 2 + 1, in rounds": (text(steps=4), hr.ParameterServer(2, 1, staleness_bound=0)),
    "parameter_server, 2 + 1, bf16": (text(steps=4), hr.ParameterServer(2, 1, push_codec="bf16", pull_codec="bf16")),
    "parameter_server, 2 + 1, tcp": (text(steps=4), hr.ParameterServer(2, 1, transport="tcp")),
    "parameter_server, 2 + 2, tcp": (text(steps=4), hr.ParameterServer(2, 2, transport="tcp")),
    "parameter_server, 2 + 1, backups": (text(steps=4), hr.ParameterServer(2, 1, backups=1)),
    "downpour, 2 + 1, tcp": (text(steps=4), hr.Downpour(2, 1, push_every=2, fetch_every=2, transport="tcp")),
    "downpour, 2 + 1": (text(steps=4), hr.Downpour(2, 1, push_every=2, fetch_every=2)),
    "downpour, 2 + 2, every step": (text(steps=4), hr.Downpour(2, 2, push_every=1, fetch_every=1)),
    "downpour, 2 + 1, waits": (text(steps=4), hr.Downpour(2, 1, push_every=2, fetch_every=2, overlap=False)),
    "downpour, 2 + 1, own optimizer": (
        text(steps=4),
        hr.Downpour(2, 1, push_every=1, fetch_every=1, local="optimizer"),
    ),
    "mirrored, 2 x tensor_parallel, 2": (text(), hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2))),
    "mirrored, 2 x fully_sharded, 2": (text(), hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2))),
}


def held(job: hr.Job, strategy: hr.Strategy) -> dict[str, int]:
    """Returns the most that a process held (VmHWM) until it ended, of workers and of servers."""
    run = hr.fit(job, strategy, device="cpu", checkpoints=False, check=False)
    found = {
        name: [each.peak_memory_bytes for each in run.events if isinstance(each, kind)]
        for name, kind in (("worker", WorkerEnded), ("server", ServerEnded))
    }
    return {name: max(peaks) for name, peaks in found.items() if peaks}


def planned(job: hr.Job, strategy: hr.Strategy) -> dict[str, int]:
    """Returns what the fullest is said to hold, of workers and of servers."""
    plan = plan_memory(job, strategy, choices=False)
    roles = plan.roles or {"worker": plan.memory}
    found: dict[str, int] = {}
    for role, memory in roles.items():
        name = "server" if role.startswith(("server", "backup")) else "worker"
        found[name] = max(found.get(name, 0), memory.peak)
    return found


def tiny(job: hr.Job) -> hr.Job:
    """The same job with a model of a hundredth of the size."""
    assert isinstance(job.model, functools.partial)
    return replace(job, model=functools.partial(job.model.func, *TINY))


def rows(chosen: list[str]) -> Iterator[tuple[str, int, int]]:
    for name, (job, strategy) in CONFIGURATIONS.items():
        if not chosen or name in chosen:
            said, least, there, little = (find(each, strategy) for find in (planned, held) for each in (job, tiny(job)))
            for kind, bytes_ in said.items():
                yield f"{name}: {kind}" if len(said) > 1 else name, bytes_, there[kind] - little[kind] + least[kind]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if unknown := [name for name in sys.argv[1:] if name not in CONFIGURATIONS]:
        raise SystemExit(f"no configuration {unknown[0]!r}; there are {', '.join(map(repr, CONFIGURATIONS))}")
    ratios = []
    print("| configuration | planned, MB | held, MB | planned / held |\n|---|--:|--:|--:|", flush=True)
    for name, said, there in rows(sys.argv[1:]):
        ratios.append(said / there)
        print(f"| {name} | {said / 1e6:.1f} | {there / 1e6:.1f} | {ratios[-1]:.3f} |", flush=True)
    print(f"\nmedian {median(abs(each - 1) for each in ratios):.1%} apart; lowest {min(ratios):.3f} of what was held")
