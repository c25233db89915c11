"""Python's standard library as text to learn: a fixed list of files, so that everyone has some."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch

# Sorted, and only modules that are one file in every Python from 3.11 on.
_MODULES = (
    "argparse ast bdb calendar codecs configparser copy csv dataclasses difflib dis doctest enum "
    "fractions ftplib functools gettext heapq imaplib inspect ipaddress locale mailbox optparse pdb "
    "pickle pickletools platform posixpath pprint pydoc random selectors shutil smtplib socket ssl "
    "statistics subprocess tarfile tempfile textwrap threading tokenize traceback turtle typing uuid"
)
FILES = tuple(f"{name}.py" for name in _MODULES.split())

VOCAB = 97
"""Printable ASCII, the end of a line, and one for all others."""

Pair = tuple[torch.Tensor, torch.Tensor]


def texts(time: int = 64) -> tuple[Pair, Pair]:
    """Returns (inputs, target) to train on, and every 20th window of the text to evaluate on.

    Inputs and target are character indices `(windows, time)`; the target is one character ahead.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join((folder / name).read_bytes() for name in FILES)
    digest = hashlib.sha256(text).hexdigest()
    sys.stderr.write(f"text: {len(FILES)} files, {len(text) / 1e6:.1f} MB, sha256 {digest}\n")

    codes = np.frombuffer(text, dtype=np.uint8)
    printable = (codes >= 32) & (codes < 127)
    characters = np.where(printable, codes - 32, np.where(codes == ord("\n"), 95, 96)).astype(np.int64)

    windows = (len(characters) - 1) // time
    inputs = torch.from_numpy(characters[: windows * time].reshape(windows, time))
    target = torch.from_numpy(characters[1 : windows * time + 1].reshape(windows, time))
    held_out = torch.arange(windows) % 20 == 0
    return (inputs[~held_out], target[~held_out]), (inputs[held_out], target[held_out])
