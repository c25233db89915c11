"""Records of `tf.train.Example`: `ParseExample` beside protobuf alone, which gives no tensors."""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report

import headrace as hr
from headrace.data.transforms import example_class

OURS, ALONE = "ParseExample", "protobuf alone"
FEATURES = {"image": bytes, "label": int, "box": (float, (4,)), "text": str, "tokens": (int, (256,))}
OTHERS = 5
"""Features that are in the records, and not asked for."""


def record() -> bytes:
    draws = np.random.default_rng(0)
    example = example_class()[0]()
    feature = example.features.feature
    feature["image"].bytes_list.value.append(draws.bytes(20_000))
    feature["label"].int64_list.value.append(7)
    feature["box"].float_list.value.extend(draws.random(4))
    feature["text"].bytes_list.value.append(b"a picture of a boat")
    feature["tokens"].int64_list.value.extend(draws.integers(0, 50_000, 256))
    for number in range(OTHERS):
        feature[f"other/{number}"].int64_list.value.append(number)
    content: bytes = example.SerializeToString()
    return content


def microseconds(read: Callable[[bytes], object], content: bytes, number: int = 2_000) -> float:
    return 1e6 * timeit.timeit(lambda: read(content), number=number) / number


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    content = record()
    contestants = {
        OURS: partial(microseconds, hr.data.ParseExample(FEATURES), content),
        ALONE: partial(microseconds, example_class()[0].FromString, content),
    }
    figures = alternate(contestants, parser.parse_args().rounds)
    ratios = {f"{OURS} / {ALONE}": ratio(figures, OURS, ALONE)}
    report(Path(__file__).parent, "examples", "µs a record", figures, ratios)
