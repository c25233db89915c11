"""A Llama-shaped model of 10 million to 1.5 billion parameters, trained on the bytes of the standard library's source.

headrace train examples/large_lm/job.py --strategy fully_sharded --workers 4 --set size=10m
python examples/large_lm/job.py --layout 2x2x2 --size 10m
"""

from __future__ import annotations

import argparse
import functools
import sys
import sysconfig
from pathlib import Path

import torch
from llama import SIZES, LanguageModel, count, generate
from torch import Tensor

import headrace as hr
from headrace.errors import UsageError

LAYOUTS: dict[str, hr.Strategy] = {
    "1": hr.OneDevice(),
    "4": hr.FullySharded(4),
    "c2": hr.ContextParallel(2),
    "2x2": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "2x2x2": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.TensorParallel(2)),
}


def library_bytes(megabytes: float) -> Tensor:
    """Returns the first bytes of the sources of the standard library, by name."""
    wanted, found = int(megabytes * 1e6), bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += file.read_bytes()
        if len(found) >= wanted:
            break
    return torch.frombuffer(found[:wanted], dtype=torch.uint8)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def job(
    size: str = "10m", steps: int = 20, batch: int = 8, length: int = 128, lr: float = 1e-3, megabytes: float = 8.0,
    held: int = 32, recompute: bool = False,
) -> hr.Job:  # fmt: skip
    """Returns the job; `held` sequences are for evaluation, and the others for training."""
    content = library_bytes(megabytes)
    rows = content[: (len(content) - 1) // length * length + 1].long()
    inputs, targets = rows[:-1].view(-1, length), rows[1:].view(-1, length)
    if held >= len(inputs):
        raise UsageError(
            f"held={held} of {len(inputs)} sequences leaves none to train on; hold out fewer, or read more megabytes"
        )
    sys.stderr.write(f"{size}: {count(SIZES[size]):,} parameters; {len(inputs):,} sequences of {length} bytes\n")
    return hr.Job(
        model=functools.partial(LanguageModel, SIZES[size], length),
        loss=loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=lr, weight_decay=0.1),
        data=(inputs[held:], targets[held:]),
        eval_data=(inputs[:held], targets[:held]),
        global_batch_size=batch,
        steps=steps,
        options=hr.Options(clip_norm=1.0, recompute="full" if recompute else None),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="4")
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--prompt", default="def __init__(self, ", help="what a sample begins with")
    given = parser.parse_args()
    run = hr.fit(job(given.size, given.steps, given.batch, given.length), LAYOUTS[given.layout])
    print(f"loss {run.metrics['loss']:.3f} of held-out bytes")
    print(f"sample: {generate(run.model, given.prompt, given.length)!r}")
