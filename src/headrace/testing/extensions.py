"""The contracts of codecs, of sources of data, and of trackers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headrace as hr
from headrace.data.pipeline.source import Epoch, Source
from headrace.engine.shipping import pack, unpack
from headrace.report.trackers.tracker import Tracker
from headrace.testing.jobs import Case, dense
from headrace.transport.codec import Codec
from headrace.trees import map_tensors

_CANARY = 0xAB
_ROUNDS = 30


def check_codec(codec: Codec) -> None:
    """Checks a codec with float32 and float64 of several lengths.

    It writes all of its bytes and none behind them, always the same for the same tensor, and leaves the tensor as it
    is; decoded elements are finite; wrong lengths are a ValueError, after which the residual is as before. With
    `feedback` the residual is the error: what was decoded and what is left add up to what was encoded.

    Raises:
        AssertionError: a rule that it does not keep.
    """
    for dtype in (torch.float32, torch.float64):
        for elements in (0, 1, 2, 255, 256, 257, 1000):
            generator = torch.Generator().manual_seed(elements)
            tensor = torch.randn(elements, generator=generator, dtype=dtype)
            _check_bytes(codec, tensor)
            if codec.feedback:
                _check_feedback(codec, tensor, generator)
        _check_lengths(codec, torch.ones(300, dtype=dtype))


def _check_bytes(codec: Codec, tensor: Tensor) -> None:
    what = f"{type(codec).__name__} with {tensor.numel()} elements of {tensor.dtype}"
    before, nbytes = tensor.clone(), codec.nbytes(tensor.numel(), tensor.dtype)
    sent = []
    for canary in (_CANARY, 255 - _CANARY):
        room = torch.full((nbytes + 64,), canary, dtype=torch.uint8)
        codec.encode(tensor, room[:nbytes])
        _require(bool((room[nbytes:] == canary).all()), f"{what} writes behind its {nbytes} bytes")
        sent.append(room[:nbytes].clone())
    _require(torch.equal(*sent), f"{what} gives other bytes for the same tensor, or leaves some unwritten")
    _require(torch.equal(tensor, before), f"{what} changes the tensor that it encodes")
    decoded = [torch.full_like(tensor, fill) for fill in (math.nan, 77.0)]
    for each in decoded:
        codec.decode(sent[0], each)
        _require(bool(each.isfinite().all()), f"{what} decodes what is not finite, or leaves elements unwritten")
    _require(torch.equal(*decoded), f"{what} decodes other numbers from the same bytes")


def _check_feedback(codec: Codec, tensor: Tensor, generator: torch.Generator) -> None:
    residual, total, received = torch.zeros_like(tensor), torch.zeros_like(tensor), torch.zeros_like(tensor)
    for _ in range(_ROUNDS):
        gradient = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        out = torch.empty(codec.nbytes(tensor.numel(), tensor.dtype), dtype=torch.uint8)
        codec.encode(gradient, out, residual)
        part = torch.empty_like(tensor)
        codec.decode(out, part)
        total += gradient
        received += part
    apart = float((received + residual - total).abs().max()) if tensor.numel() else 0.0
    _require(
        apart <= 1e-4 * _ROUNDS,
        f"{type(codec).__name__} has feedback, and after {_ROUNDS} rounds what was decoded and the residual are "
        f"{apart:.2g} from what was encoded, with {tensor.numel()} elements; the residual becomes tensor + residual - "
        "decoded",
    )


def _check_lengths(codec: Codec, tensor: Tensor) -> None:
    nbytes, name = codec.nbytes(tensor.numel(), tensor.dtype), type(codec).__name__
    residual = torch.full_like(tensor, 0.5)
    out, short = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes + 8, dtype=torch.uint8)
    _require_refusal(lambda: codec.encode(tensor, short, residual), f"{name}.encode takes 8 bytes too many for out")
    _require_refusal(lambda: codec.encode(tensor, out, residual[1:]), f"{name}.encode takes a residual of another size")
    _require(bool((residual == 0.5).all()), f"{name}.encode changes the residual where it raises")
    _require_refusal(lambda: codec.decode(short, tensor.clone()), f"{name}.decode takes 8 bytes too many")


def check_source(source: Source) -> None:
    """Checks a source: its examples are the same each time, in any order, alone and in a batch, here and in a worker.

    Raises:
        AssertionError: a rule that it does not keep.
    """
    count, name, epoch = len(source), type(source).__name__, Epoch(seed=0, number=0)
    _require(count > 0, f"{name} has no examples")
    copied = unpack(*pack(source))
    _require(len(copied) == count, f"a copy of {name} in a worker has {len(copied)} examples, and here are {count}")
    indices = torch.tensor([count - 1, 0, count // 2, 0])
    whole = _leaves(source.gather(indices, epoch))
    for what, other in (("a second time", source), ("in a worker's copy", copied)):
        _require(_same(whole, _leaves(other.gather(indices, epoch))), f"{name}.gather gives other examples {what}")
    for place, index in enumerate(indices.tolist()):
        alone = _leaves(source.gather(torch.tensor([index]), epoch))
        there = [each[place : place + 1] for each in whole]
        _require(_same(alone, there), f"{name}.gather gives another example {index} alone than in a batch")
    empty = _leaves(source.gather(torch.tensor([], dtype=torch.int64), epoch))
    shapes = [each.shape[1:] for each in empty] == [each.shape[1:] for each in whole]
    _require(shapes and not any(map(len, empty)), f"{name}.gather of no indices is no batch of 0 such examples")


def check_tracker(make: Callable[[], Tracker], folder: Path) -> None:
    """Trains a small job with a tracker: it takes the run, its resumption, and numbers of one's own, and does not fail.

    Raises:
        AssertionError: it has given up, with what it said.
    """
    job = Case(dense).job(8)
    for resume in (False, True):
        said: list[str] = []
        tracker = make()
        tracker.say = said.append
        with tracker:
            hr.fit(
                job,
                hr.OneDevice(),
                device="cpu",
                engine=hr.ThreadEngine(),
                run_dir=folder / "run",
                on_event=tracker,
                resume=resume,
            )
        _require(not tracker.failed, f"{type(tracker).__name__} has given up: {'; '.join(said)}")


def _leaves(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _require(holds: bool, said: str) -> None:
    if not holds:
        raise AssertionError(said)


def _require_refusal(call: Callable[[], object], said: str) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError(f"{said}; raise a ValueError")
