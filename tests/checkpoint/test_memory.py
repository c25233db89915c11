"""How much memory saving and loading take, seen by the operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from pathlib import Path
from headrace.checkpoint import CheckpointFolder

def peak():
    # Not getrusage, whose peak a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

state = {"contiguous": torch.ones(25_000_000), "transposed": torch.ones(5_000, 5_000).t()}
folder = CheckpointFolder(Path(sys.argv[1]))
# Once with little, so that what the first use imports and allocates for good has been.
folder.begin(1)
folder.commit(1, [folder.write(1, 0, {"a": torch.ones(2_000_000), "b": torch.ones(2_000, 2_000).t()})], {}, 1)
folder.open(1).read(0)
size = sum(tensor.nbytes for tensor in state.values())
before = peak()
folder.begin(2)
folder.commit(2, [folder.write(2, 0, state)], {}, 1)
written = peak()
del state
state = {"as before": torch.ones(size // 4)}
before_read = peak()
del state
checkpoint = folder.open(2)
checkpoint.verify()
found = checkpoint.read(0)
print((written - before) / size, (peak() - before_read) / size, len(found))
"""

FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Allocations of more bytes than this go back to the system when they are freed."""


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_saving_copies_pieces_and_loading_takes_the_state_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    # With an engine's settings, which this process may have, the allocator keeps what the checkpoint frees.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment |= FREED_AT_ONCE
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    to_save, to_load, count = map(float, done.stdout.split())
    assert count == 2
    # Some chunks of 4 MB, which differ from run to run by how many the allocator keeps; one copied tensor is 0.5.
    assert to_save < 0.35
    assert to_load < 0.1, "more than a state of the same size had taken"
