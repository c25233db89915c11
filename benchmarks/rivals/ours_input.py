"""Our input: `ours_input.py images|python|text|arrays|bytes WAY SECONDS`; prints examples/s.

WAY is "auto", "inline", "threads" or "processes", the last two with a number behind: "threads2".
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace as hr

sys.path.insert(0, str(Path(__file__).parents[1]))
from input_workloads import BATCH, SIDE, Text, clothes, in_python, photographs, tokenizer

WARM_UP_S = 0.5


def pipeline(workload: str) -> hr.data.Pipeline:
    """Returns what is read."""
    if workload == "images":
        return hr.data.from_files(photographs()).map(hr.data.DecodeImage(SIDE, SIDE))
    if workload == "python":
        return hr.data.from_arrays(torch.rand(5000, 100)).map(lambda example: in_python(example[0]))
    if workload in ("arrays", "bytes"):
        return hr.data.from_arrays(*clothes(workload))
    encoder = tokenizer(Text())

    def encode(pieces: list[str]) -> Any:
        # Without the places in the text that each token stands for.
        return np.array([each.ids for each in encoder.encode_batch_fast(pieces)])

    return hr.data.Pipeline(Pieces()).map(encode, batched=True)


class Pieces(hr.data.Source):
    """Pieces of text in memory, which any number of threads may read."""

    def __init__(self) -> None:
        self.text = Text()

    def __len__(self) -> int:
        return len(self.text)

    def example(self, index: int, epoch: Any) -> str:
        return self.text[index]

    @property
    def identity(self) -> str:
        return ""


def told(data: hr.data.Pipeline, way: str) -> hr.data.Pipeline:
    """Returns the pipeline, read that way."""
    kind = way.rstrip("0123456789")
    count = int(way.removeprefix(kind) or 0) or None
    return dataclasses.replace(data.shuffle(), reading=dataclasses.replace(data.reading, parallel=kind, count=count))


def rate(data: hr.data.Pipeline, batch: int, seconds: float) -> float:
    """Returns examples/s, when it has warmed up."""
    cpu_budget = hr.data.CpuBudget(say=lambda line: print(line, file=sys.stderr))
    shares = hr.data.Loader(data, 0, batch, (1,), 0, cpu_budget=cpu_budget).rounds()
    next(shares)
    began = time.perf_counter()
    while time.perf_counter() < began + WARM_UP_S:
        next(shares)
    began = time.perf_counter()
    examples = 0
    while time.perf_counter() < began + seconds:
        examples += next(shares).examples
    passed = time.perf_counter() - began
    shares.close()
    return examples / passed


if __name__ == "__main__":
    workload, way, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    print(rate(told(pipeline(workload), way), BATCH[workload], seconds))
