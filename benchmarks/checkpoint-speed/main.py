"""Saving and loading a checkpoint beside writing and reading as many plain bytes, on the same disk."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report

from headrace.checkpoint import CheckpointFolder

CHUNK = 4 << 20
TENSORS = 40

MEMORY = """
import sys
from pathlib import Path
from headrace.checkpoint import CheckpointFolder, tensors

def peak():
    # Not getrusage, whose peak a process inherits from the one that started it.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

checkpoint = CheckpointFolder(Path(sys.argv[1])).open(1)
before = peak()
state = checkpoint.read(0)
print((peak() - before) / sum(tensor.nbytes for tensor in state.values()))
"""
"""Importing torch has its peak below what it holds in the end by less than a percent of a state."""


class Contest:
    """One disk, one state, four ways to move it; every method returns GB/s.

    Args:
        folder: on the disk.
        gigabytes: of the state, 10**9 bytes each.
    """

    def __init__(self, folder: Path, gigabytes: float) -> None:
        count = int(gigabytes * 1e9) // TENSORS // 4
        self._state = {f"layer.{number}": torch.rand(count) for number in range(TENSORS)}
        self._bytes = TENSORS * count * 4
        self._plain = folder / "plain"
        self.path = folder / "checkpoints"

    def plain_write(self) -> float:
        """Writes the tensors' bytes to a new file and syncs it."""
        self._plain.unlink(missing_ok=True)
        return self._timed(self._write)

    def save(self) -> float:
        """Saves a checkpoint in a new folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        return self._timed(self._save)

    def plain_read(self, cold: bool) -> float:
        """Reads the plain file into new memory."""
        return self._timed(self._read, self._plain if cold else None)

    def load(self, cold: bool) -> float:
        """Reads the checkpoint's tensors."""
        file = self.path / "step-00000001" / "rank-0.safetensors"
        return self._timed(lambda: CheckpointFolder(self.path).open(1).read(0), file if cold else None)

    def memory(self) -> float:
        """Returns by how much a process grew that loads the checkpoint, in sizes of the state."""
        command = [sys.executable, "-c", MEMORY, str(self.path)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def _timed(self, act: Callable[[], object], forget: Path | None = None) -> float:
        os.sync()
        if forget is not None:
            with forget.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        kept = act()
        seconds = time.perf_counter() - began
        del kept
        return self._bytes / seconds / 1e9

    def _write(self) -> None:
        with self._plain.open("wb", buffering=0) as file:
            for tensor in self._state.values():
                rest = tensor.view(torch.uint8).numpy().data
                while rest:
                    rest = rest[file.write(rest[:CHUNK]) :]
            os.fsync(file.fileno())

    def _save(self) -> None:
        folder = CheckpointFolder(self.path)
        folder.begin(1)
        folder.commit(1, [folder.write(1, 0, self._state)], {}, keep=1)

    def _read(self) -> torch.Tensor:
        buffer = torch.empty(self._bytes, dtype=torch.uint8)
        rest = buffer.numpy().data
        with self._plain.open("rb", buffering=0) as file:
            while rest:
                rest = rest[file.readinto(rest[:CHUNK]) :]
        return buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the temporary folder, if not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        contest = Contest(Path(folder), arguments.gigabytes)
        figures = alternate(
            {
                "plain write + fsync": contest.plain_write,
                "save": contest.save,
                "plain read, from the disk": lambda: contest.plain_read(cold=True),
                "load, from the disk": lambda: contest.load(cold=True),
                "plain read, from the cache": lambda: contest.plain_read(cold=False),
                "load, from the cache": lambda: contest.load(cold=False),
            },
            arguments.rounds,
        )
        ratios = {
            "save / plain write + fsync": ratio(figures, "save", "plain write + fsync"),
            "load / plain read, from the disk": ratio(figures, "load, from the disk", "plain read, from the disk"),
            "load / plain read, from the cache": ratio(figures, "load, from the cache", "plain read, from the cache"),
            "memory to load / the state": contest.memory(),
        }
    report(Path(__file__).parent, "speed", "GB/s", figures, ratios)


if __name__ == "__main__":
    main()
