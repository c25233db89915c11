"""Checkpoints of what lies on accelerators: simulated ones, on which an operation that does not wait is an error."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import host_copies
from headrace.checkpoint.host_copies import HostCopies
from headrace.errors import UnfitMachine
from simulated.cluster import on_hosts

STRATEGIES = (
    "mirrored", "fully_sharded", "tensor_parallel", "parameter_averaging", "gossip", "central_storage",
    "parameter_server", "pipeline",
)  # fmt: skip
PROGRAM = """
from simulated import nccl
from checkpoint import device_runs
device_runs.main({names})
"""
simulated = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here, which the simulated accelerator needs"),
]


def ran(names: Sequence[str], folder: Path) -> Mapping[str, Any]:
    program = PROGRAM.format(names=", ".join(map(repr, names)))
    ended = on_hosts(program, folder, hosts=1, devices=2)
    assert ended.codes == [0], ended.errors
    return {each["case"]: each for each in ended.said[0]}


class Stream:
    """Notes what waits for what; copies are done at once."""

    def __init__(self, *_: object) -> None:
        self.done: list[str] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, other: object) -> None:
        self.done.append("wait for the other stream")

    def wait_event(self, event: object) -> None:
        self.done.append("wait for the event")

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.done.append("synchronize")


class Runtime:
    """A device's module, for tensors that the host has."""

    def __init__(self) -> None:
        self.computing = Stream()

    Stream = Stream

    def stream(self, stream: Stream) -> Stream:
        return stream

    def current_stream(self, device: object) -> Stream:
        return self.computing


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(host_copies, "runtime_of", lambda name: made)
    monkeypatch.setattr(host_copies, "_pinned", lambda count, held: torch.empty(count, dtype=torch.uint8))
    monkeypatch.setattr(host_copies, "CHUNK", 64)
    return made


def copies_of(late: bool = True) -> HostCopies:
    return HostCopies(torch.device("cuda"), late)


def odd_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    cut = torch.randn(6, 8)
    return [
        torch.randn(3, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(4, 3).t(),
        cut[:, 2:5], cut[::2, ::3], torch.tensor(3), torch.empty(0, 4), torch.randn(5).expand(3, 5),
        torch.randn(7, dtype=torch.complex64), torch.arange(9).bool(),
        torch.randn(3, 4, dtype=torch.bfloat16), torch.eye(3).to_sparse(), torch.randn(77),
        torch.randn(1, 4, 1).as_strided((1, 4, 1), (99, 1, 7)),
    ]  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
def test_every_form_of_a_tensor_is_copied_as_it_is(runtime: Runtime, flat: bool) -> None:
    copies = copies_of()
    for _ in range(3):
        copies.begin()
        pairs = [(each, copies.copy(each, lasting=True, flat=flat and not each.is_sparse)) for each in odd_tensors()]
        assert copies.end().wait()
        for each, copy in pairs:
            there, here = (one.to_dense() if one.is_sparse else one for one in (each, copy))
            assert torch.equal(there.flatten() if flat and not each.is_sparse else there, here)
            assert each.is_sparse or not each.numel() or copy.data_ptr() != each.data_ptr()
        copies.hold()


def test_memory_is_used_again(runtime: Runtime) -> None:
    copies, tensor = copies_of(), torch.arange(1000.0)
    places = []
    for _ in range(3):
        copies.begin()
        places.append([copies.copy(tensor, lasting=True).data_ptr() for _ in range(5)])
        copies.end()
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == 5


def test_the_first_state_is_copied_before_forward_and_the_next_beside_it(runtime: Runtime) -> None:
    copies, tensor = copies_of(), torch.ones(4)
    for waits in (0, 1, 2):
        copies.begin()
        copies.copy(tensor, lasting=True)
        copied = copies.end()
        copies.hold()
        assert runtime.computing.done.count("wait for the event") == waits
        tensor.add_(1)
        assert copied.wait()


def test_where_others_may_write_nothing_is_copied_beside_them(runtime: Runtime) -> None:
    copies, tensor = copies_of(late=False), torch.ones(4)
    for _ in range(3):
        copies.begin()
        copies.copy(tensor, lasting=True)
        copied = copies.end()
        tensor.add_(1)
        assert copied.wait()
        copies.hold()
    assert "wait for the event" not in runtime.computing.done


@pytest.mark.parametrize("held", [False, True])
def test_a_forward_that_begins_to_write_spoils_one_checkpoint_and_no_more(runtime: Runtime, held: bool) -> None:
    copies, tensor = copies_of(), torch.ones(4)
    found = []
    for number in range(4):
        copies.begin()
        copies.copy(tensor, lasting=True)
        copied = copies.end()
        if number >= 1:
            # In forward, when the copies may still be on their way.
            tensor.mul_(2)
        if held:
            copies.hold()
            tensor.add_(1)
            found.append(copied.wait())
        else:
            found.append(copied.wait())
            copies.hold()
            tensor.add_(1)
    assert found == [True, False, True, True]


def test_without_room_for_pinned_memory_it_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host_copies, "runtime_of", lambda name: Runtime())
    copies = copies_of()
    copies.begin()
    tensor = torch.ones(4)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UnfitMachine, match=r"after 0 bytes of it there are no 16,777,216 more .* checkpoints=False"):
        copies.copy(tensor, lasting=True)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=simulated)])
def test_a_device_saves_what_a_cpu_does_while_updates_go_on(mark: None, tmp_path: Path) -> None:
    names = ("usual", "averages", "channels last", "forward writes", "own loop")
    found = ran([*names, "waits", "missing wait", "peak", "peak with averages"], tmp_path)
    for name in names:
        assert found[name]["apart"] == 0.0
        assert found[name]["steps"] == [1, 2, 3, 4, 5, 6]
        assert found[name]["notices"] == []
    # Five more checkpoints: the saver waits once for each, and the losses until then are read.
    waits = found["waits"]
    assert (waits["event_syncs"], waits["reads"], waits["waits"]) == (5, 5, 10)
    assert waits["blocking_writes"] == waits["pins_beside_kernels"] == waits["faults"] == 0
    assert "that a copy to the host on" in found["missing wait"]["error"]
    for name in ("peak", "peak with averages"):
        assert found[name]["often"] <= 1.05 * found[name]["never"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=simulated) for name in STRATEGIES])
def test_every_strategy_saves_what_it_does_on_cpus_without_more_memory(name: str, tmp_path: Path) -> None:
    found = ran([f"content of {name}", f"added by {name}"], tmp_path)
    content, added = found[f"content of {name}"], found[f"added by {name}"]
    assert content["apart"] <= 1e-9
    assert content["steps"][-1] == 6
    assert added["saves"]
    # Slices of layers are joined one at a time: the largest of 256 x 256 numbers, its pieces, and what gathers them.
    assert added["added"] <= (4 * 4 * 256 * 256 if name == "tensor_parallel" else 0)
