"""What headrace has itself keeps the contracts that others use: schedules, codecs, sources and trackers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.pipeline.schedules import SCHEDULES
from headrace.testing import check_codec, check_pipeline_schedule, check_source, check_tracker
from headrace.transport.codec import CODECS
from pipeline.shapes import chunks_of


@pytest.mark.every
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_keeps_its_contract(name: str) -> None:
    check_pipeline_schedule(SCHEDULES[name], chunks_of(name))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_codec_keeps_its_contract(name: str) -> None:
    check_codec(CODECS[name])


class Pairs(torch.utils.data.Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2


def pipelines(folder: Path) -> dict[str, InputPipeline]:
    numbers = torch.arange(40.0).view(10, 4)
    (folder / "a.csv").write_text("x,y\n" + "".join(f"{each},{each**2}\n" for each in range(12)))
    (folder / "a.txt").write_text("".join(f"line {each}\n" for each in range(12)))
    np.save(folder / "a.npy", numbers.numpy())
    return {
        "arrays": hr.data.from_arrays(numbers, numbers.long()),
        "csv": hr.data.from_csv(folder / "a.csv"),
        "torch": hr.data.from_torch(Pairs()),
    }


@pytest.mark.parametrize("name", ["arrays", "csv", "torch"])
def test_a_source_keeps_its_contract(name: str, tmp_path: Path) -> None:
    check_source(pipelines(tmp_path)[name].source)


@pytest.mark.slow
def test_a_tracker_keeps_its_contract(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> set[tuple[str, int]]:
        written = EventAccumulator(str(tmp_path / "logs"))
        written.Reload()
        return {(tag, each.step) for tag in written.Tags()["scalars"] for each in written.Scalars(tag)}

    check_tracker(lambda: hr.TensorBoard(tmp_path / "logs", every_s=0), tmp_path, read)
    assert json.dumps(sorted(read()))
