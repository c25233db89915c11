"""What forward keeps, on the host: the same gradients, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated.cluster import COMPILES, on_hosts


@pytest.mark.slow
@pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")
def test_gradients_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    program = "from training.recompute import offloaded_runs\noffloaded_runs.main()"
    ended = on_hosts(program, tmp_path, 1, 1, SIMULATED_NCCL="")
    assert ended.codes == [0], ended.errors
    # What autograd keeps of each, but parameters, what is small, and what repeats its memory.
    assert [(each["name"], each["same"], each["copies"], each["faults"]) for each in ended.said[0]] == [
        ("InPlace", True, 6, 0),
        ("Tied", True, 5, 0),
        ("LastChannels", True, 3, 0),
    ]
