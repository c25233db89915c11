"""Matrix products, memory, and the way between host and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from headrace.bench.figures import Figure, Gap, MachineFigures, figure, missing
from headrace.bench.settings import GPU, NO_GPU, Effort, Setting, gpu_settings, processor_settings, repeat

_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_SMALL, _LARGE = 64 << 10, 256 << 20
_MOVED = 64 << 20


def matrix(effort: Effort, saved: MachineFigures) -> Iterator[Figure | Gap]:
    """Measures products of square matrices by size and type, in GFLOP/s; what is kept is not measured again."""
    devices = gpu_settings()
    for kind in (*_TYPES, torch.float16):
        # Processors have no arithmetic for float16.
        for setting in (*(processor_settings() if kind is not torch.float16 else ()), *devices):
            yield from _products(kind, setting, effort, saved)
    if not devices:
        yield from missing("matrix", [GPU], NO_GPU)


def _products(kind: torch.dtype, setting: Setting, effort: Effort, saved: MachineFigures) -> Iterator[Figure | Gap]:
    name = str(kind).removeprefix("torch.")
    rate = 0.0
    for size in effort.sizes:
        row, work = f"{name}, {size} x {size}", 2.0 * size**3
        if rate and work / rate > effort.longest_s:
            yield Gap("matrix", row, setting.name, f"would take {work / rate:.0f} s")
            continue
        result = saved.at("matrix", row, setting.name)
        if result is None:
            with setting.applied():
                one, other = (torch.randn(size, size, device=setting.device).to(kind) for _ in range(2))
                into = torch.empty_like(one)
                times = repeat(partial(torch.mm, one, other, out=into), setting, effort.cell_s)
            result = figure("matrix", row, setting.name, "GFLOP/s", [work / seconds / 1e9 for seconds in times])
        rate = result.value * 1e9
        yield result


def memory(effort: Effort, saved: MachineFigures) -> Iterator[Figure | Gap]:
    """Measures copying and reading, in GB/s of bytes that are read or written."""
    devices = gpu_settings()
    for setting in (*processor_settings(), *devices):
        for nbytes, words in ((_SMALL, "64 kB, in a cache"), (_LARGE, "256 MB")):
            with setting.applied():
                source = torch.ones(nbytes // 4, device=setting.device)
                target = torch.empty_like(source)
                for name, act, moved in (
                    ("copy", partial(target.copy_, source), 2 * nbytes),
                    ("sum", source.sum, nbytes),
                ):
                    place = ("memory", f"{name}, {words}", setting.name)
                    yield saved.at(*place) or figure(
                        *place, "GB/s", [moved / seconds / 1e9 for seconds in repeat(act, setting, effort.cell_s)]
                    )
    if not devices:
        yield from missing("memory", [GPU], NO_GPU)


def transfer(effort: Effort, saved: MachineFigures) -> Iterator[Figure | Gap]:
    """Measures the way between the host's memory and a GPU's, and how long an operation takes to start."""
    for setting in gpu_settings():
        there = torch.empty(_MOVED // 4, device=setting.device)
        for words, here in (("pageable", torch.ones(_MOVED // 4)), ("pinned", torch.ones(_MOVED // 4).pin_memory())):
            for row, target, source in ((f"host to GPU, {words}", there, here), (f"GPU to host, {words}", here, there)):
                place = ("transfer", row, setting.name)
                act = partial(target.copy_, source, non_blocking=True)
                yield saved.at(*place) or figure(
                    *place, "GB/s", [_MOVED / seconds / 1e9 for seconds in repeat(act, setting, effort.cell_s)]
                )
        one = torch.ones(1, device=setting.device)
        place = ("transfer", "an operation on one number", setting.name)
        yield saved.at(*place) or figure(
            *place, "us", [1e6 * seconds for seconds in repeat(partial(one.add_, 1), setting, effort.cell_s)]
        )
        return
    yield from missing("transfer", [GPU], NO_GPU)
