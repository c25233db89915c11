"""The contracts of codecs, of sources of data, and of trackers."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import headrace as hr
from headrace.data.pipeline.source import Epoch, Source
from headrace.engine.shipping import pack, unpack
from headrace.errors import in_one_line
from headrace.report.model.training import logged_curves
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import Evaluated, Event, ValuesLogged
from headrace.testing.jobs import Case, dense
from headrace.transport.codec import Codec
from headrace.trees import map_tensors

_CANARY = 0xAB
_ROUNDS, _READS, _READERS = 30, 8, 4
T = TypeVar("T")


def check_codec(codec: Codec) -> None:
    """Checks a codec with float32 and float64 of several lengths.

    It writes all of its bytes and none behind them, always the same for the same tensor, of any shape and strides, and
    leaves the tensor as it is; decoded elements are finite where the tensor's are, and NaN or infinity arrives as
    something that is not finite, or is a ValueError; so are wrong lengths. After an error the residual is as before.
    With `feedback` the residual is the error: what was decoded and what is left add up to what was encoded.

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
        for bad in (math.nan, math.inf):
            _check_nonfinite(codec, torch.ones(300, dtype=dtype).index_fill(0, torch.tensor([7]), bad))


def _check_bytes(codec: Codec, tensor: Tensor) -> None:
    what = f"{type(codec).__name__} with {tensor.numel()} elements of {tensor.dtype}"
    before, nbytes = tensor.clone(), codec.nbytes(tensor.numel(), tensor.dtype)
    _require(type(nbytes) is int and nbytes >= 0, f"{what}: nbytes is {nbytes!r}, and must be a number of bytes")
    sent = []
    for canary in (_CANARY, 255 - _CANARY):
        room = torch.full((nbytes + 64,), canary, dtype=torch.uint8)
        _attempt(lambda: codec.encode(tensor, room[:nbytes]), f"{what}: encode into nbytes() = {nbytes} bytes")  # noqa: B023
        _require(bool((room[nbytes:] == canary).all()), f"{what} writes behind its {nbytes} bytes")
        sent.append(room[:nbytes].clone())
    _require(torch.equal(*sent), f"{what} gives other bytes for the same tensor, or leaves some unwritten")
    _require(torch.equal(tensor, before), f"{what} changes the tensor that it encodes")
    if tensor.numel() % 2 == 0:
        # With its strides, as gradients of transposed weights have them.
        across, out = tensor.view(2, -1).t().contiguous().t(), torch.empty(nbytes, dtype=torch.uint8)
        _attempt(lambda: codec.encode(across, out), f"{what}: encode of a tensor that is not contiguous")
        _require(torch.equal(out, sent[0]), f"{what} reads a tensor that is not contiguous in another order")
    decoded = [torch.full_like(tensor, fill) for fill in (math.nan, 77.0)]
    for each in decoded:
        _attempt(lambda: codec.decode(sent[0], each), f"{what}: decode of its own bytes")  # noqa: B023
        _require(bool(each.isfinite().all()), f"{what} decodes what is not finite, or leaves elements unwritten")
    _require(torch.equal(*decoded), f"{what} decodes other numbers from the same bytes")


def _check_nonfinite(codec: Codec, tensor: Tensor) -> None:
    residual = torch.full_like(tensor, 0.25)
    out, into = torch.empty(codec.nbytes(tensor.numel(), tensor.dtype), dtype=torch.uint8), torch.zeros_like(tensor)
    try:
        codec.encode(tensor, out, residual)
    except ValueError:
        _require(bool((residual == 0.25).all()), f"{type(codec).__name__}.encode changes the residual where it raises")
        return
    codec.decode(out, into)
    name, value = type(codec).__name__, float(tensor[7])
    lost = f"{name} loses {value} of a gradient without a word, and the run would train on"
    _require(not bool(into.isfinite().all()), f"{lost}; raise a ValueError in encode, or let it arrive")
    _require(bool(residual.isfinite().all()), f"{name} keeps {value} in the residual for ever")


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
    """Checks a source: its examples are the same each time, in any order, alone, in a batch, in threads, in a worker.

    Raises:
        AssertionError: a rule that it does not keep.
    """
    count, name, epoch = len(source), type(source).__name__, Epoch(seed=0, number=0)
    _require(count > 0, f"{name} has no examples")
    remedy = "open files in example(), not before, so that workers can have copies"
    copied = _attempt(lambda: unpack(*pack(source)), f"sending {name} to a worker ({remedy})")
    _require(len(copied) == count, f"a copy of {name} in a worker has {len(copied)} examples, and here are {count}")
    indices = torch.tensor([count - 1, 0, count // 2, 0])

    def read(of: Source, wanted: Tensor) -> list[Tensor]:
        what = f"{name} says that it has {count} examples, and reading {wanted.tolist()}"
        return _attempt(lambda: _leaves(of.gather(wanted, epoch)), what)

    given = read(source, indices)
    whole = [each.clone() for each in given]
    for what, other in (("a second time", source), ("in a worker's copy", copied)):
        _require(_same(whole, read(other, indices)), f"{name}.gather gives other examples {what}")
    alone = {index: read(source, torch.tensor([index])) for index in dict.fromkeys(indices.tolist())}
    for place, index in enumerate(indices.tolist()):
        there = [each[place : place + 1] for each in whole]
        _require(_same(alone[index], there), f"{name}.gather gives another example {index} alone than in a batch")
    _require(_same(whole, given), f"{name}.gather changes a batch that it has given when the next is read")
    empty = read(source, torch.tensor([], dtype=torch.int64))
    shapes = [each.shape[1:] for each in empty] == [each.shape[1:] for each in whole]
    _require(shapes and not any(map(len, empty)), f"{name}.gather of no indices is no batch of 0 such examples")
    many = list(alone) * _READS
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda index: read(source, torch.tensor([index])), many))
    together = all(_same(alone[index], each) for index, each in zip(many, found, strict=True))
    said = f"{name} gives other examples where {_READERS} threads read it: they share a position or a buffer"
    _require(together, said)


def check_tracker(
    make: Callable[[], Tracker],
    folder: Path,
    read: Callable[[], Collection[tuple[str, int]]] | None = None,
    patience_s: float = 10.0,
) -> None:
    """Trains a small job with a tracker: it takes the run, its resumption, and numbers of one's own, and does not fail.

    Nothing is opened before the run begins, since every process of a launcher makes a tracker and one of them writes.

    Args:
        make: the tracker; what it writes to files is below `folder`.
        read: returns what has been written, as names of curves and steps, so that none is lost at the end.
        patience_s: how long the end of a run may take.

    Raises:
        AssertionError: it has given up, with what it said, or another rule that it does not keep.
    """
    job, given = Case(dense).job(8), list[tuple[str, int]]()
    for resume in (False, True):
        said: list[str] = []
        before, others = {*folder.rglob("*")}, {*multiprocessing.active_children()}
        tracker = make()
        name = type(tracker).__name__
        opened = sorted(str(each.relative_to(folder)) for each in {*folder.rglob("*")} - before)
        _require(not opened, f"{name} writes {', '.join(opened)} when it is made; open it in begin()")
        own = type(tracker).__call__ is Tracker.__call__
        _require(own, f"{name} takes events itself, in the time of the training; write() is called in a thread")
        tracker.say = said.append
        with tracker:
            tracker.patience_s = patience_s
            hr.fit(
                job,
                hr.OneDevice(),
                device="cpu",
                engine=hr.ThreadEngine(),
                run_dir=folder / "run",
                # Not the tracker itself: the run's listeners say where it gives up.
                on_event=[partial(type(tracker).__call__, tracker), _note_in(given)],
                callbacks=[_Steps()],
                resume=resume,
            )
        _require(not tracker.failed, f"{name} has given up: {'; '.join(said)}")
        children = [each.name for each in multiprocessing.active_children() if each not in others]
        _require(not children, f"{name} leaves processes behind: {', '.join(children)}; end them in end()")
        if read is not None:
            lost = sorted({*given} - {*read()})
            _require(
                not lost,
                f"{name} has lost {len(lost)} of {len(given)} numbers, the last {lost[-1:]}; end() writes what is left",
            )


class _Steps(hr.Callback):
    """Logs a number of its own."""

    def on_end(self, moment: hr.Moment) -> None:
        moment.log({"steps": moment.step})


def _note_in(given: list[tuple[str, int]]) -> Callable[[Event], None]:
    """Returns what notes the curves and steps of numbers of one's own, and of evaluations."""

    def note(event: Event) -> None:
        if isinstance(event, ValuesLogged):
            given.extend((name, event.step) for name in logged_curves(event))
        elif isinstance(event, Evaluated):
            given.extend((f"evaluation/{name}", event.step) for name in event.metrics)

    return note


def _leaves(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, batch)
    return found


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _require(holds: bool, said: str) -> None:
    if not holds:
        raise AssertionError(said)


def _attempt(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except Exception as error:
        raise AssertionError(f"{what} raises {in_one_line(error)}") from error


def _require_refusal(call: Callable[[], object], said: str) -> None:
    try:
        call()
    except ValueError:
        return
    except Exception as error:
        raise AssertionError(f"{said}, and raises {in_one_line(error)}; raise a ValueError") from error
    raise AssertionError(f"{said}; raise a ValueError")
