"""What the benchmarks of the input read: photographs, a transform in Python, text, arrays."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

JPEGS = Path(__file__).parents[1] / ".cache" / "jpeg"
PHOTOGRAPHS = 2000
SIDE = 224
BATCH = {"images": 32, "python": 32, "text": 64, "arrays": 256, "bytes": 256}
TEXT_BYTES = 30_000_000
_PIECE = 1000
LENGTH = 256
"""Tokens of a piece of text: cut or filled up."""


def photographs() -> list[str]:
    """Returns the files of 2,000 photographs, 375x500: crops of scikit-learn's two sample images; made if need be."""
    files = [JPEGS / f"{number:05d}.jpg" for number in range(PHOTOGRAPHS)]
    if not all(file.exists() for file in files):
        from PIL import Image
        from sklearn.datasets import load_sample_images

        JPEGS.mkdir(parents=True, exist_ok=True)
        photos = [Image.fromarray(image) for image in load_sample_images().images]
        rng = np.random.default_rng(0)
        for number, file in enumerate(files):
            photo = photos[number % 2]
            width, height = photo.size
            side = int(rng.integers(200, 400))
            x, y = int(rng.integers(0, width - side)), int(rng.integers(0, height - side))
            piece = photo.crop((x, y, x + side, y + side))
            piece.resize((375, 500) if number % 3 else (500, 375)).save(file, quality=90)
    return [str(file) for file in files]


class Text:
    """Pieces of the standard library's source, 30 MB in all, as a data set."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        whole = "".join(source.read_text(errors="replace") for source in sources)
        whole = (whole * (1 + TEXT_BYTES // len(whole)))[:TEXT_BYTES]
        self.pieces = [whole[start : start + _PIECE] for start in range(0, len(whole), _PIECE)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> str:
        return self.pieces[index]


def tokenizer(text: Text) -> Any:
    """Returns a byte-pair encoding of 8,000 tokens, trained on a tenth of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["?"], show_progress=False)
    made.train_from_iterator(text.pieces[::10], trainer)
    made.enable_truncation(LENGTH)
    made.enable_padding(length=LENGTH)
    return made


def in_python(value: Any) -> Any:
    """A transform that is written in Python alone, about a fifth of a millisecond."""
    total = 0
    for number in range(3000):
        total += number & 7
    return value + total


def clothes(workload: str) -> tuple[Any, Any]:
    """Returns Fashion-MNIST: "arrays" as numbers between 0 and 1, "bytes" as they come, 0 to 255."""
    import headrace as hr

    images, labels = hr.data.fashion_mnist().train
    return (images.mul(255).round().byte() if workload == "bytes" else images), labels


def cores() -> int:
    """Returns how many this process may use."""
    return len(os.sched_getaffinity(0))
