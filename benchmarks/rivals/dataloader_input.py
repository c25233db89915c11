"""torch's DataLoader: `dataloader_input.py images|decoder|text|arrays|bytes WORKERS SECONDS`; prints examples/s.

"images" is decoded by simplejpeg and resized by Pillow, as most do; "decoder" by the same code as ours.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from input_workloads import BATCH, SIDE, Text, clothes, photographs, tokenizer

WARM_UP_S = 0.5


class Photographs(Dataset[Any]):
    """As a user would write it."""

    def __init__(self, ours: bool) -> None:
        import headrace as hr

        self.files = photographs()
        self.decode = hr.data.DecodeImage(SIDE, SIDE) if ours else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        content = Path(self.files[index]).read_bytes()
        return torch.from_numpy(self.decode(content) if self.decode else decoded(content))


def decoded(content: bytes) -> np.ndarray[Any, Any]:
    """Returns the middle of a photograph."""
    import simplejpeg
    from PIL import Image

    image = Image.fromarray(simplejpeg.decode_jpeg(content, fastdct=True, fastupsample=True))
    width, height = image.size
    side = min(width, height)
    x, y = (width - side) // 2, (height - side) // 2
    return np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(x, y, x + side, y + side)))


class Tokens(Dataset[Any]):
    """Pieces of text, encoded one by one."""

    def __init__(self) -> None:
        self.text = Text()
        self.encoder = tokenizer(self.text)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.encoder.encode(self.text[index]).ids)


def dataset(workload: str) -> Dataset[Any]:
    """Returns what is read."""
    if workload in ("arrays", "bytes"):
        return TensorDataset(*clothes(workload))
    return Tokens() if workload == "text" else Photographs(workload == "decoder")


if __name__ == "__main__":
    workload, workers, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    batch = BATCH.get(workload, BATCH["images"])
    loader = DataLoader(dataset(workload), batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    examples, began = 0, None
    end = float("inf")
    while time.perf_counter() < end:
        for found in loader:
            now = time.perf_counter()
            if began is None:
                warm = now + WARM_UP_S
                began, end = warm, warm + seconds
            if now > began:
                examples += len(found[0] if workload in ("arrays", "bytes") else found)
            if now > end:
                break
    print(examples / seconds)
