"""A model's file that several ranks write: its bytes are those of one writer, and a failure leaves the old one."""

from __future__ import annotations

import errno
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import model_file
from headrace.checkpoint.model_file import save_in_parts
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import RunFailed
from headrace.modules import describe, parameters_and_buffers

RANKS = 3


class Tied(nn.Module):
    """With a tensor of two names, of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight


Dealt = Callable[[int, nn.Module], Iterator[tuple[str, Tensor]]]


def dealt(rank: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for index, (name, tensor) in enumerate(parameters_and_buffers(module)):
        if index % RANKS == rank:
            yield name, tensor.clone()


def saved(
    module: nn.Module,
    path: Path,
    tensors: Dealt = dealt,
    extra: dict[str, Tensor] | None = None,
    firsts: tuple[int, ...] = (0, 0, 0),
    kind: type[ThreadCollective] = ThreadCollective,
) -> list[bool]:
    """Saves with a folder for each host beside that of the first, whose first rank it is named by."""
    shared = ThreadGroup(RANKS)

    def save(rank: int) -> bool:
        group, first = kind(shared, rank), firsts[rank]
        there = path.parent / str(first) / path.name if first else path
        own = (extra or {}) if rank == 0 else {}
        return save_in_parts(module, describe(module), tensors(rank, module), own, there, group, first)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(save, range(RANKS)))


def test_the_bytes_are_those_of_one_writer(tmp_path: Path) -> None:
    module, extra = Tied(), {"extra/norm|json": torch.arange(5, dtype=torch.uint8)}
    assert saved(module, tmp_path / "model.safetensors", extra=extra) == [True] * RANKS
    state = {name: each.clone() for name, each in module.state_dict().items()} | extra
    save_file(state, tmp_path / "one.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_an_expanded_tensor_of_one_element_is_written(tmp_path: Path) -> None:
    module, path = nn.Linear(3, 1), tmp_path / "model.safetensors"

    def expanded(rank: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, each[0].expand(1) if each.dim() == 1 else each) for name, each in dealt(rank, module))

    assert saved(module, path, expanded) == [True] * RANKS
    save_file(module.state_dict(), tmp_path / "one.safetensors")
    assert path.read_bytes() == (tmp_path / "one.safetensors").read_bytes()


class Counting(ThreadCollective):
    """Notes the bytes that ranks exchange at once."""

    exchanged: ClassVar[list[int]] = []

    def all_reduce(self, tensor: Tensor) -> None:
        self.exchanged.append(tensor.nbytes)
        super().all_reduce(tensor)


@pytest.mark.parametrize("firsts", [(0, 0, 2), (0, 1, 2), (0, 1, 0)])
def test_each_host_has_the_bytes_of_one_writer(
    firsts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "_PIECE", 16)
    monkeypatch.setattr(Counting, "exchanged", [])
    module, extra = Tied(), {"extra/norm|json": torch.arange(5, dtype=torch.uint8)}
    path = tmp_path / "model.safetensors"
    assert saved(module, path, extra=extra, firsts=firsts, kind=Counting) == [True] * RANKS
    save_file({name: each.clone() for name, each in module.state_dict().items()} | extra, tmp_path / "one.safetensors")
    right = (tmp_path / "one.safetensors").read_bytes()
    files = [path, *(tmp_path / str(first) / path.name for first in {*firsts} - {0})]
    assert [each.read_bytes() for each in files] == [right] * len(files)
    assert not [*tmp_path.rglob("*.part*")]
    pieces = [each for each in Counting.exchanged if each <= 16]
    assert sum(pieces) >= RANKS * sum(each.nbytes for each in module.state_dict().values())


def test_a_host_whose_disk_is_full_leaves_all_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = model_file._moved

    def full(part: Path, start: int, content: memoryview, reads: bool) -> bool:
        return (reads or part.parent.name != "2") and moved(part, start, content, reads)

    path = tmp_path / "model.safetensors"
    path.write_text("the old one")
    monkeypatch.setattr(model_file, "_moved", full)
    assert saved(Tied(), path, firsts=(0, 0, 2)) == [False] * RANKS
    assert path.read_text() == "the old one"
    assert [each.name for each in tmp_path.rglob("*.safetensors*")] == [path.name]


def test_one_tensor_at_a_time_is_held(tmp_path: Path) -> None:
    held: list[weakref.ref[Tensor]] = []

    def watched(rank: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for index, (name, _) in enumerate(parameters_and_buffers(module)):
            assert all(each() is None for each in held if rank == 0)
            if index % RANKS == rank:
                made = dict(parameters_and_buffers(module))[name].clone()
                held.extend([weakref.ref(made)] if rank == 0 else [])
                yield name, made
                del made

    assert saved(Tied(), tmp_path / "model.safetensors", watched) == [True] * RANKS
    assert held


def lost(rank: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """One tensor is no rank's."""
    yield from list(dealt(rank, module))[rank == 0 :]


def other_shape(rank: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, each[:1] if each.dim() else each) for name, each in dealt(rank, module))


@pytest.mark.parametrize("tensors", [lost, other_shape])
def test_a_file_that_is_not_whole_takes_no_place(tensors: Dealt, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("the old one")
    assert saved(Tied(), path, tensors) == [False] * RANKS
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "the old one"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "model.safetensors"
    path.write_text("the old one")
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert saved(Tied(), path) == [False] * RANKS
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "the old one"


def test_what_has_no_form_is_left_to_others(tmp_path: Path) -> None:
    module = Tied()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    assert saved(module, tmp_path / "model.safetensors") == [False] * RANKS
    assert not [*tmp_path.iterdir()]


class Killed(nn.Module):
    """The first rank that looks at its state while the file is written dies."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.layer(batch)
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if (self.folder / "model.safetensors.part").exists():
            try:
                (self.folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict(*args, **kwargs)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_saves_leaves_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.safetensors").write_text("the old one")
    job = hr.Job(
        model=partial(Killed, folder),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.ones(8, 4), torch.ones(8, 2)),
        global_batch_size=8,
        steps=1,
    )
    with pytest.raises(RunFailed):
        hr.fit(job, hr.FullySharded(2), device="cpu", run_dir=folder)
    assert (folder / "killed").exists()
    assert (folder / "model.safetensors").read_text() == "the old one"
