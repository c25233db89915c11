"""The stand-in for NCCL carries what NCCL carries, and refuses what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from simulated.cluster import COMPILES, on_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")]


def test_collectives_are_those_of_nccl(tmp_path: Path) -> None:
    program = f"from simulated import nccl_scenarios\nnccl_scenarios.pair({str(tmp_path / 'store')!r})"
    ended = on_hosts(program, tmp_path, launched=True)
    assert ended.codes == [0, 0], ended.errors
    for rank, lines in enumerate(ended.said):
        said = {key: value for line in lines for key, value in line.items()}
        require_sums(said["sums"], rank)
        host, strided, short = said["refused"]
        assert "Tensors must be CUDA and dense" in host
        assert "Tensors must be contiguous" in strided
        assert "torch.int16" in short
        assert f"rank {rank} calls {CALLED[rank]}" in said["apart"]
        assert f"rank {1 - rank} calls {CALLED[1 - rank]}" in said["apart"]
        assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device" in said["shared"]
        assert (said["faults"]["at once"], said["faults"]["late"]) == (False, [2.0, 2.0])
        assert (
            "broadcast(sizes=[2], dtype=torch.float32, root=1) among ranks [0, 1] ran for 1." in said["faults"]["never"]
        )
        assert "the communicator was aborted" in said["faults"]["aborted"]


CALLED = ("all_reduce(sizes=[4]", "all_gather_into(sizes=[4]")


def require_sums(said: Mapping[str, Any], rank: int) -> None:
    total = [1.0, 3.0, 5.0, 7.0]
    assert (said["all"], said["every"]) == (total, [total, total])
    assert said["part"] == [[2.0, 6.0], [10.0, 14.0]][rank]
    assert said["turned"] == [0.0, 0.0, 1.0, 1.0]
    assert said["other"] == [1.0 - rank]
    assert said["waits"] == 0
    assert "that nccl:all_reduce on stream" in said["early"]


def test_it_has_what_torchs_backends_have(tmp_path: Path) -> None:
    program = "from simulated import nccl_scenarios\nnccl_scenarios.surface()"
    ended = on_hosts(program, tmp_path)
    assert ended.said == [[{"at": ended.said[0][0]["at"], "more": ["getBackendName"]}]]
