"""Reading safetensors into shards: the bytes that all ranks read, and the speed beside a plain read of the files.

python benchmarks/weights/main.py [--gigabytes 6] [--workers 8] [--strategy fully_sharded|tensor_parallel] [--cold]

Ranks are threads of this process, one at a time, so that their reads are counted and timed without a run around them.
`--cold` drops the files from the page cache before each way (needs no root).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.data.sources.storage import SourceFile
from headrace.weights.files import find_tensors
from headrace.weights.reading import StoredValues

WIDTH, FILES = 4096, 6
read, lock = [0], threading.Lock()


def write(folder: Path, gigabytes: float) -> int:
    """Writes files of matrices as a language model has them, and an index; returns their bytes."""
    rows = int(gigabytes * 1e9 / FILES / 4 / 4 / WIDTH) // 64 * 64
    listed = {}
    for file in range(FILES):
        name = f"model-{file + 1:05}-of-{FILES:05}.safetensors"
        tensors = {f"layers.{file}.{each}.weight": torch.full((rows, WIDTH), float(each)) for each in range(4)}
        save_file(tensors, folder / name)
        listed |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": listed})
    (folder / "model.safetensors.index.json").write_text(text)
    return sum(each.stat().st_size for each in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain(folder: Path) -> float:
    """Returns the seconds of reading all files from end to end, 8 MiB at once, into memory that is used again."""
    begun, buffer = time.perf_counter(), bytearray(8 << 20)
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - begun


def parts(values: StoredValues, rank: int, world: int) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields a rank's rows of each tensor."""
    for name, each in values.tensors.items():
        begin, end = (each.elements * at // world for at in (rank, rank + 1))
        yield name, begin, torch.empty(end - begin)


def sharded(folder: Path, world: int) -> None:
    for rank in range(world):
        values = StoredValues(find_tensors(folder))
        values.read_parts(parts(values, rank, world))


def sliced(folder: Path, world: int) -> None:
    """Half of the matrices by rows, half by columns, as pairs of layers are divided."""
    for rank in range(world):
        values = StoredValues(find_tensors(folder))
        runs = {
            name: (each.elements if int(name.split(".")[2]) % 2 else WIDTH) // world
            for name, each in values.tensors.items()
        }
        own = values.sliced(runs, rank, world)
        own.read_parts((name, 0, torch.empty(each.elements // world)) for name, each in own.tensors.items())


def counted(self: SourceFile, start: int, buffer: memoryview, into: object = SourceFile.read_into) -> None:
    with lock:
        read[0] += len(buffer)
    into(self, start, buffer)  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--strategy", choices=("fully_sharded", "tensor_parallel"), default="fully_sharded")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    SourceFile.read_into = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        size = write(folder, given.gigabytes)
        ways = []
        for _ in range(3):
            for way in ("plain", "ours"):
                if given.cold:
                    forget(folder)
                if way == "plain":
                    ways.append(plain(folder))
                    continue
                begun, read[0] = time.perf_counter(), 0
                (sharded if given.strategy == "fully_sharded" else sliced)(folder, given.workers)
                ways.append(time.perf_counter() - begun)
        print(json.dumps({
            "strategy": given.strategy, "workers": given.workers, "file_bytes": size,
            "bytes_read": read[0], "of_file": round(read[0] / size, 4),
            "plain_gb_per_s": round(size / min(ways[::2]) / 1e9, 2),
            "ours_gb_per_s": round(size / min(ways[1::2]) / 1e9, 2),
            "of_plain": round(min(ways[::2]) / min(ways[1::2]), 2),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
