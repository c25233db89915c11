"""What a worker saves of a run, where its disk takes too little of it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import Checkpoint, CheckpointFolder
from headrace.checkpoint.forms import extra_states
from headrace.checkpoint.spool import Spool
from headrace.spec.events import Notice, Saved
from headrace.worker.state import LoadedCheckpoint
from strategies.test_sparse import OPTIMIZERS, SYNCHRONOUS, job, one_device, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank", "lasting"), [("mirrored", 0, False), ("servers", 0, True), ("servers", 1, False)]
)
def test_a_disk_without_room_for_rows_that_wait_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, rank: int, lasting: bool
) -> None:
    place, fails = Spool._place, 0

    def crowded(spool: Spool, count: int) -> int:
        nonlocal fails
        if threading.current_thread().name == f"rank-{rank}" and (lasting or not fails):
            fails += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return place(spool, count)

    monkeypatch.setattr(Spool.__init__, "__defaults__", (0,))
    monkeypatch.setattr(Spool, "_place", crowded)
    often = hr.Checkpoints(every_steps=6, every_s=None)
    run = hr.fit(job(OPTIMIZERS["sgd"]), SYNCHRONOUS[strategy], device="cpu", run_dir=tmp_path, checkpoints=often,
                 engine=hr.ThreadEngine())  # fmt: skip
    told = [event.text for event in run.events if isinstance(event, Notice) and "no checkpoint" in event.text]
    saved = [event.step for event in run.events if isinstance(event, Saved)]
    # The last one is that of the run's end; with servers there is one of its beginning.
    every = [0, 6, 12, 16] if strategy == "servers" else [6, 12, 16]
    unsaved, expected = (every, []) if lasting else (every[:1], every[1:])
    assert (run.status, fails, saved) == ("ok", len(unsaved), expected)
    for step, text in zip(unsaved, told, strict=True):
        assert f"step {step}: No space left on device (saving needs room for the rows of sparse" in text
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == tuple(expected[-3:])
    torch.testing.assert_close(weights(run), one_device("sgd")[0], rtol=1e-9, atol=1e-9)


class Kept(nn.Module):
    """A module with a state of its own."""

    state: Tensor

    def get_extra_state(self) -> Tensor:
        return self.state

    def set_extra_state(self, state: Tensor) -> None:
        self.state = state


def test_what_several_ranks_have_of_their_own_is_the_first_ones_elsewhere() -> None:
    saved = {}
    for rank in range(3):
        kept = Kept()
        kept.state = torch.tensor([float(rank)])
        saved[rank] = extra_states(kept, lambda _: True)
    checkpoint = SimpleNamespace(path=Path("a"), step=1, description={}, ranks=tuple(saved), read=saved.__getitem__)
    loaded = LoadedCheckpoint(cast("Checkpoint", checkpoint))
    for rank, world, expected in ((1, 3, 1.0), (1, 2, 0.0)):
        module = Kept()
        loaded.load_buffers(module, rank, world)
        assert module.state.tolist() == [expected]
