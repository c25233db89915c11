"""The contracts of codecs, sources, trackers and schedules find planted faults, and say which rule is not kept."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace as hr
from headrace.errors import UsageError
from headrace.pipeline.schedules.gpipe import GPipe
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule
from headrace.report.trackers.curves import Tracked, TrackedValue
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import Event, RunStarted
from headrace.testing import check_codec, check_pipeline_schedule, check_source, check_tracker
from headrace.transport.codec import CODECS, Codec
from strategies.test_contract_faults import FAULTS as STRATEGY_FAULTS


class Halves(Codec):
    """Half of the bytes, with the error kept, but for one fault."""

    feedback = True

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls = itertools.count()

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        wrong = {"nbytes is a float": 2.0, "nbytes is too small": 1, "nbytes is too large": 3}
        return elements * wrong.get(self.fault, 2)  # type: ignore[return-value]

    def encode(self, tensor: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        if self.fault != "takes any length" and len(out) != self.nbytes(tensor.numel(), tensor.dtype):
            raise ValueError(f"{len(out)} bytes")
        if residual is not None and residual.numel() != tensor.numel():
            raise ValueError("another residual") if self.fault != "raises IndexError" else IndexError("residual")
        if self.fault == "changes the tensor":
            tensor.mul_(0.5)
        flat = tensor.t().flatten() if self.fault == "wrong order" and tensor.dim() == 2 else tensor.flatten()
        if self.fault == "views the tensor":
            flat = tensor.view(-1)
        wanted = flat if residual is None else flat + residual.flatten()
        if self.fault == "loses NaN":
            wanted = wanted.nan_to_num(0.0, 0.0, 0.0)
        elif self.fault == "residual changed on error" and residual is not None:
            residual.zero_()
        if self.fault != "keeps NaN" and not wanted.isfinite().all():
            raise ValueError("not finite")
        sent = wanted.to(torch.float16)
        room = out.view(torch.float16) if self.fault != "takes any length" else out[: 2 * len(sent)].view(torch.float16)
        if self.fault == "writes past out":
            room = torch.as_strided(room, (len(sent) + 1,), (1,), room.storage_offset())
            room[-1:] = 1.0
        if self.fault == "not deterministic":
            sent = sent + next(self.calls) % 2 / 64
        count = len(sent) - (self.fault == "leaves the last byte")
        room[:count] = sent[:count]
        if residual is not None:
            left = wanted - sent.to(wanted.dtype)
            residual.copy_((left + 0.01 if self.fault == "residual is another" else left).view(residual.shape))

    def decode(self, data: Tensor, into: Tensor) -> None:
        if len(data) != self.nbytes(into.numel(), into.dtype):
            raise ValueError(f"{len(data)} bytes")
        values = data.view(torch.float16).to(into.dtype)
        if self.fault == "decode adds":
            values = values + into.view(-1)
        into.view(-1).copy_(values[: into.numel()])


CODEC_FAULTS = {
    "nbytes is a float": "nbytes is 0.0, and must be a number of bytes",
    "nbytes is too small": r"encode into nbytes\(\) = 1 bytes raises RuntimeError",
    "nbytes is too large": "raises RuntimeError|gives other bytes for the same tensor, or leaves some unwritten",
    "takes any length": "takes 8 bytes too many for out; raise a ValueError",
    "raises IndexError": "takes a residual of another size, and raises IndexError: residual; raise a ValueError",
    "changes the tensor": "changes the tensor that it encodes|gives other bytes for the same tensor",
    "views the tensor": "encode of a tensor that is not contiguous raises RuntimeError",
    "wrong order": "reads a tensor that is not contiguous in another order",
    "loses NaN": "loses nan of a gradient without a word, and the run would train on; raise a ValueError",
    "keeps NaN": "keeps nan in the residual for ever",
    "residual changed on error": "encode changes the residual where it raises",
    "writes past out": "writes behind its 0 bytes",
    "not deterministic": "gives other bytes for the same tensor, or leaves some unwritten",
    "leaves the last byte": "gives other bytes for the same tensor, or leaves some unwritten",
    "residual is another": "has feedback, and after 30 rounds what was decoded and the residual are",
    "decode adds": "decodes what is not finite, or leaves elements unwritten|decodes other numbers from the same bytes",
}


class Numbers(hr.data.Source):
    """Ten examples, but for one fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.reads, self.place = fault, itertools.count(), 0
        self.buffer = torch.zeros(4)
        if fault == "holds a lock":
            self.file = threading.Lock()

    def __len__(self) -> int:
        return {"too long": 11, "empty": 0}.get(self.fault, 10)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        return state | {"fault": "elsewhere"} if self.fault == "another copy" else state

    def example(self, index: int, epoch: hr.data.Epoch) -> Tensor:
        if index >= 10:
            raise IndexError(index)
        match self.fault:
            case "not deterministic":
                return torch.rand(4)
            case "changes when read twice":
                return torch.full((4,), float(index + next(self.reads) // 8))
            case "elsewhere":
                return torch.full((4,), float(index + 1))
            case "shares a position":
                self.place = index
                time.sleep(0.001)
                return torch.full((4,), float(self.place))
        return torch.full((4,), float(index))

    def gather(self, indices: Tensor, epoch: hr.data.Epoch) -> Any:
        if self.fault == "no empty batch" and not len(indices):
            return torch.zeros(0)
        if self.fault == "reuses its batch" and len(indices) == 4:
            return self.buffer[: len(indices)].copy_(indices.float())
        if self.fault == "reuses its batch" and len(indices) == 1:
            return self.buffer[:1].copy_(indices.float()).clone()
        if self.fault == "by place in the batch":
            return super().gather(indices, epoch) + torch.arange(len(indices))[:, None]
        return super().gather(indices, epoch)


SOURCE_FAULTS = {
    "empty": "has no examples",
    "too long": r"says that it has 11 examples, and reading \[10, 0, 5, 0\] raises .*IndexError",
    "holds a lock": r"sending Numbers to a worker \(open files in example\(\), not before.*cannot pickle",
    "another copy": "gives other examples in a worker's copy",
    "not deterministic": "gives other examples a second time",
    "changes when read twice": "gives other examples|gives another example",
    "shares a position": "gives other examples where 4 threads read it: they share a position or a buffer",
    "no empty batch": "of no indices is no batch of 0 such examples",
    "reuses its batch": "changes a batch that it has given when the next is read",
    "by place in the batch": "gives another example 0 alone than in a batch",
}


class Lines(Tracker):
    """Writes lines in a file, but for one fault."""

    def __init__(self, file: Path, fault: str = "") -> None:
        super().__init__("Lines", every_s=0)
        self.path, self.fault, self.kept = file, fault, list[str]()
        if fault == "opens at once":
            file.write_text("")

    def begin(self, started: RunStarted) -> None:
        if self.fault == "raises in begin":
            raise ConnectionError("no route")
        if self.fault == "a second process":
            multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True).start()

    def write(self, entries: Sequence[Tracked]) -> None:
        if self.fault == "blocks":
            time.sleep(3)
        if self.fault == "raises":
            raise ValueError("no such curve")
        self.kept += [f"{each.tag} {each.step}" for each in entries if isinstance(each, TrackedValue)]
        if self.fault == "loses the last":
            self._save(self.kept[:-1])
        elif self.fault == "forgets the run before":
            self.path.write_text("\n".join(self.kept))

    def end(self, status: str) -> None:
        if self.fault == "raises in end":
            raise OSError("disk full")
        if self.fault not in ("loses the last", "forgets the run before"):
            self._save(self.kept)

    def _save(self, lines: list[str]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        self.kept = self.kept[len(lines) :]

    def found(self) -> set[tuple[str, int]]:
        lines = (line.rpartition(" ") for line in self.path.read_text().splitlines())
        return {(name, int(step)) for name, _, step in lines}


class Immediate(Lines):
    """Takes events in the time of the training."""

    def __call__(self, event: Event) -> None:
        time.sleep(0.001)


TRACKER_FAULTS = {
    "raises in begin": "has given up: Lines gets nothing more: ConnectionError: no route",
    "raises": "has given up: Lines gets nothing more: ValueError: no such curve",
    "raises in end": "has given up: Lines gets nothing more: OSError: disk full",
    "blocks": r"has given up: Lines gets nothing more: it has not answered for 0\.5 s",
    "opens at once": r"writes lines\.txt when it is made; open it in begin\(\)",
    "a second process": r"leaves processes behind: .*; end them in end\(\)",
    "loses the last": r"has lost \d of \d numbers, the last .*; end\(\) writes what is left",
    "forgets the run before": r"has lost \d of \d numbers",
    "in the training's time": r"takes events itself, in the time of the training; write\(\) is called in a thread",
}


@dataclass(frozen=True)
class Faulty(PipelineSchedule):
    """GPipe's order but for one fault."""

    fault: str = ""

    def actions(self, rank: int) -> Iterator[Action]:
        order = list(GPipe(self.ranks, self.micro_batches).actions(rank))
        back = len(order) // 2
        match self.fault:
            case "incomplete":
                del order[-1]
            case "doubled":
                order.append(order[-1])
            case "backward first":
                order = order[back:] + order[:back]
            case "cyclic":
                order = order[::-1] if rank == 1 else order
            case "another order":
                order[:back] = order[:back][::-1] if rank == 1 else order[:back]
            case "wrong rank":
                order = [Action((each.stage + 1) % self.ranks, each.micro_batch, each.kind) for each in order]
            case "no such stage":
                order = [Action(each.stage + 1, each.micro_batch, each.kind) for each in order]
            case "no such micro-batch":
                order = [Action(each.stage, each.micro_batch + 1, each.kind) for each in order]
            case "half a backward":
                order[-1] = Action(order[-1].stage, order[-1].micro_batch, PassKind.BACKWARD_INPUT)
            case "another each time":
                order = order if next(CALLS) % 3 else order[::-1]
        return iter(order)

    def held(self, stage: int) -> int:
        return super().held(stage) - (self.fault == "deeper than it says")


class Drawn(GPipe):
    """Drawn otherwise than it is.

    rank 0   0  .  .  0'
    rank 1   .  0  0' .
    rank 2   .  .  .  .
    """


CALLS = itertools.count()
SCHEDULE_FAULTS = {
    "incomplete": "does forward with micro-batch .* and that must be a forward pass and a backward pass",
    "doubled": "does the backward of micro-batch . in stage . twice",
    "backward first": "lets its ranks wait for each other for ever: .* passes are never done: rank 0 for the backward",
    "cyclic": "lets its ranks wait for each other|does forward of micro-batches",
    "another order": r"does forward of micro-batches \[0, 1\] in stage 0, and of \[1, 0\] in stage 1",
    "wrong rank": "on rank 0, and rank_of says 1",
    "no such stage": "and there are 1 stages and 1 micro-batches",
    "no such micro-batch": "and there are 1 stages and 1 micro-batches",
    "half a backward": "does .* with micro-batch .* and that must be a forward pass and a backward pass, or its two",
    "another each time": "gives another order each time that it is asked",
    "deeper than it says": r"held\(0\) of .* is 0, and the stage keeps something of 1 micro-batches at a time",
}


def faulty(fault: str) -> type[PipelineSchedule]:
    return type("Mine", (Faulty,), {"__init__": lambda self, *shape: Faulty.__init__(self, *shape, fault=fault)})


def refused(said: str, check: Callable[[], object]) -> None:
    with pytest.raises((AssertionError, UsageError), match=f"(?s){said}"):
        check()


@pytest.mark.every
@pytest.mark.parametrize("fault", CODEC_FAULTS)
def test_a_fault_of_a_codec_is_found(fault: str) -> None:
    refused(CODEC_FAULTS[fault], lambda: check_codec(Halves(fault)))


@pytest.mark.every
@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_a_fault_of_a_source_is_found(fault: str) -> None:
    refused(SOURCE_FAULTS[fault], lambda: check_source(Numbers(fault)))


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("fault", TRACKER_FAULTS)
def test_a_fault_of_a_tracker_is_found(fault: str, tmp_path: Path) -> None:
    kind, file = Immediate if fault == "in the training's time" else Lines, tmp_path / "lines.txt"
    patience_s = 0.5 if fault == "blocks" else 10.0
    try:
        refused(
            TRACKER_FAULTS[fault],
            lambda: check_tracker(lambda: kind(file, fault), tmp_path, lambda: Lines(file).found(), patience_s),
        )
    finally:
        for child in multiprocessing.active_children():
            child.kill()


@pytest.mark.every
@pytest.mark.parametrize("fault", SCHEDULE_FAULTS)
def test_a_fault_of_a_schedule_is_found(fault: str) -> None:
    refused(SCHEDULE_FAULTS[fault], lambda: check_pipeline_schedule(faulty(fault), trains=False))


def test_a_wrong_drawing_is_found() -> None:
    refused("the drawing of Drawn is not what it does", lambda: check_pipeline_schedule(Drawn, trains=False))


def test_without_a_fault_they_keep_their_contracts(tmp_path: Path) -> None:
    check_codec(Halves())
    for name in CODECS:
        check_codec(CODECS[name])
    check_source(Numbers())
    check_pipeline_schedule(faulty(""), trains=False)
    file = tmp_path / "lines.txt"
    check_tracker(lambda: Lines(file), tmp_path, lambda: Lines(file).found())


def test_so_many_planted_faults_are_found() -> None:
    kinds = (STRATEGY_FAULTS, CODEC_FAULTS, SOURCE_FAULTS, TRACKER_FAULTS, SCHEDULE_FAULTS)
    assert min(map(len, kinds)) >= 9
    assert sum(map(len, kinds)) >= 60
