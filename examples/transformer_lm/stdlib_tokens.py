"""Python's standard library as tokens of a byte-level BPE, which is trained on the spot, once."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Modules that are one file in every Python from 3.11 on.
_MODULES = (
    "argparse ast calendar configparser csv dataclasses difflib doctest enum functools heapq inspect ipaddress mailbox "
    "optparse pdb pickle pprint random shutil smtplib statistics subprocess tarfile threading tokenize traceback typing"
)
PAD = "<pad>"


def stdlib_text(modules: int = 28) -> str:
    """Returns the source of so many modules, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES.split()[:modules])


def bpe(text: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer trained on a text; the file of one that was trained before is read."""
    digest = hashlib.sha256(f"{vocabulary} {text}".encode()).hexdigest()[:16]
    cache = Path.home() / ".cache" / "headrace"
    file = cache / f"stdlib-bpe-{digest}.json"
    if not file.is_file():
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        trained.train_from_iterator(
            text.splitlines(keepends=True),
            trainers.BpeTrainer(
                vocab_size=vocabulary,
                special_tokens=[PAD],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        cache.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: another process may read it.
        partial = file.with_suffix(f".{os.getpid()}")
        trained.save(str(partial))
        partial.rename(file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token=PAD)


def windows(text: str, tokenizer: PreTrainedTokenizerFast, length: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Returns windows of so many tokens to train on, and every 20th to evaluate on; the last window may be shorter."""
    ids = [token for line in tokenizer(text.splitlines(keepends=True))["input_ids"] for token in line]
    rows = [ids[start : start + length] for start in range(0, len(ids), length)]
    sys.stderr.write(f"text: {len(text) / 1e6:.2f} MB, {len(ids):,} tokens of {len(tokenizer):,}\n")
    train = [row for index, row in enumerate(rows) if index % 20]
    return datasets.Dataset.from_dict({"input_ids": train}), datasets.Dataset.from_dict({"input_ids": rows[::20]})
