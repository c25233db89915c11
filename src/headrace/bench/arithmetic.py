"""Matrix products, memory, and the way between host and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from headrace.bench.figures import Figure, Gap, figure, missing
from headrace.bench.settings import GPU, NO_GPU, Effort, Setting, gpu_settings, processor_settings, repeat

_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_SMALL, _LARGE = 64 << 10, 256 << 20
_MOVED = 64 << 20


def matrix(effort: Effort) -> Iterator[Figure | Gap]:
    """Measures products of square matrices by size and type, in GFLOP/s."""
    devices = gpu_settings()
    for kind in (*_TYPES, torch.float16):
        # Processors have no arithmetic for float16.
        for setting in (*(processor_settings() if kind is not torch.float16 else ()), *devices):
            yield from _products(kind, setting, effort)
    if not devices:
        yield from missing("matrix", [GPU], NO_GPU)


def _products(kind: torch.dtype, setting: Setting, effort: Effort) -> Iterator[Figure | Gap]:
    name = str(kind).removeprefix("torch.")
    rate = 0.0
    for size in effort.sizes:
        row, work = f"{name}, {size} x {size}", 2.0 * size**3
        if rate and work / rate > effort.longest_s:
            yield Gap("matrix", row, setting.name, f"would take {work / rate:.0f} s")
            continue
        with setting.applied():
            one, other = (torch.randn(size, size, device=setting.device).to(kind) for _ in range(2))
            into = torch.empty_like(one)
            times = repeat(partial(torch.mm, one, other, out=into), setting, effort.cell_s)
        found = figure("matrix", row, setting.name, "GFLOP/s", [work / each / 1e9 for each in times])
        rate = found.value * 1e9
        yield found


def memory(effort: Effort) -> Iterator[Figure | Gap]:
    """Measures copying and reading, in GB/s of bytes that are read or written."""
    devices = gpu_settings()
    for setting in (*processor_settings(), *devices):
        for nbytes, words in ((_SMALL, "64 kB, in a cache"), (_LARGE, "256 MB")):
            with setting.applied():
                source = torch.ones(nbytes // 4, device=setting.device)
                target = torch.empty_like(source)
                copies = repeat(partial(target.copy_, source), setting, effort.cell_s)
                sums = repeat(source.sum, setting, effort.cell_s)
            yield figure("memory", f"copy, {words}", setting.name, "GB/s", [2 * nbytes / each / 1e9 for each in copies])
            yield figure("memory", f"sum, {words}", setting.name, "GB/s", [nbytes / each / 1e9 for each in sums])
    if not devices:
        yield from missing("memory", [GPU], NO_GPU)


def transfer(effort: Effort) -> Iterator[Figure | Gap]:
    """Measures the way between the host's memory and a GPU's, and how long an operation takes to start."""
    for setting in gpu_settings():
        there = torch.empty(_MOVED // 4, device=setting.device)
        for words, here in (("pageable", torch.ones(_MOVED // 4)), ("pinned", torch.ones(_MOVED // 4).pin_memory())):
            forth = repeat(partial(there.copy_, here, non_blocking=True), setting, effort.cell_s)
            back = repeat(partial(here.copy_, there, non_blocking=True), setting, effort.cell_s)
            for row, times in ((f"host to GPU, {words}", forth), (f"GPU to host, {words}", back)):
                yield figure("transfer", row, setting.name, "GB/s", [_MOVED / each / 1e9 for each in times])
        one = torch.ones(1, device=setting.device)
        started = repeat(partial(one.add_, 1), setting, effort.cell_s)
        yield figure("transfer", "an operation on one number", setting.name, "us", [1e6 * each for each in started])
        return
    yield from missing("transfer", [GPU], NO_GPU)
