"""Processor time of forward and backward by order of memory and precision, on one thread. See README.md."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report
from torch import nn
from workloads import cnn

from headrace.models import fashion_cnn

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (cnn, (32, 3, 32, 32)),
    "fashion_cnn": (fashion_cnn, (64, 1, 28, 28)),
}
STEPS = 4
PLAIN = "contiguous, fp32"


def step_ms(make: Callable[[], nn.Module], shape: tuple[int, ...], last: bool, bf16: bool) -> float:
    """Returns the milliseconds of a step, after two that are not counted."""
    order = torch.channels_last if last else torch.contiguous_format
    model = make().to(memory_format=order)  # type: ignore[call-overload]
    inputs = torch.randn(shape).contiguous(memory_format=order)
    target = torch.randint(0, 10, shape[:1])

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()

    step()
    step()
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return 1000 * (time.process_time() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contestants, ratios = {}, {}
    for name, (make, shape) in MODELS.items():
        for last in (False, True):
            for bf16 in (False, True):
                words = f"{name}: {'channels_last' if last else 'contiguous'}, {'bf16' if bf16 else 'fp32'}"
                contestants[words] = functools.partial(step_ms, make, shape, last, bf16)
    figures = alternate(contestants, arguments.rounds)
    for words in contestants:
        plain = f"{words.partition(':')[0]}: {PLAIN}"
        if words != plain:
            ratios[f"{words} / {PLAIN}"] = ratio(figures, words, plain)
    report(Path(__file__).parent, "memory-format", "ms of one thread", figures, ratios)


if __name__ == "__main__":
    main()
