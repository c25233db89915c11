"""What the machine is found to have."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest

from headrace import machine
from headrace.engine.torchrun.rendezvous import launched_ranks
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import can_paint, check_shared_memory, cores, detect, require_linux

QUOTAS = {
    "max 100000": 64,
    "100000 100000": 1,
    "50000 100000": 1,
    "250000 100000": 2,
    "350000 100000": 4,
    "9000000 100000": 64,
}


@pytest.mark.parametrize(("text", "most"), QUOTAS.items())
def test_cores_respect_a_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, most: int
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(machine, "_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores() == most


def test_cores_without_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "none")
    assert cores() == len(os.sched_getaffinity(0))


def test_detect_describes_this_host() -> None:
    cluster = detect("cpu", ranks=3)
    (host,) = cluster.hosts
    assert (host.name, host.cores, cluster.ranks, cluster.device) == (socket.gethostname(), cores(), 3, "cpu")
    assert host.memory_bytes > 0


def test_detect_refuses_other_devices() -> None:
    with pytest.raises(UsageError, match="device is 'auto', 'cpu' or 'cuda', got 'gpu'"):
        detect("gpu")


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_accelerators", lambda: ())
    with pytest.raises(UnfitMachine, match="sees no CUDA device here; use device='cpu'"):
        detect("cuda")
    assert detect("auto").device == "cpu"


def test_only_linux_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_linux()
    assert check_shared_memory() is None
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(UnfitMachine, match="this is Darwin; use Linux, or a Linux container"):
        require_linux()
    assert "Darwin" in (check_shared_memory() or "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variables", "moving"), [({}, True), ({"CI": "true"}, False), ({"CI": "false"}, True),
                                                   ({"CI": "0"}, True), ({"TERM": "dumb"}, False)])  # fmt: skip
def test_a_bar_moves_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], moving: bool
) -> None:
    for name in ("CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert can_paint(Terminal()) is moving
    assert can_paint(io.StringIO()) is False


WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_launcher_says_how_many_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_ranks() is None
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    assert launched_ranks() == 4


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_says_half(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in WHOLE.keys() - {missing}:
        monkeypatch.setenv(name, WHOLE[name])
    with pytest.raises(UsageError, match=f"but not {missing}"):
        launched_ranks()
