"""torchvision, which has the known networks, also in a build for another device than torch's."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

from headrace import internals

_OPERATORS = ("nms", "qnms")
"""Of torchvision, those that importing it needs; networks that classify images use none."""
_FIRST_PAIR = (1, 16)
"""torchvision 0.16 is of torch 2.1, and each minor version after it of the next one of torch."""

_declared: list[torch.library.Library] = []


class Unusable(Exception):
    """torchvision is not installed, or cannot be imported; the message says what to install."""


def import_models() -> Any:
    """Returns the module `torchvision.models`; raises Unusable."""
    try:
        declare_operators()
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        if error.name == "torchvision" or importlib.util.find_spec("torchvision") is None:
            raise Unusable(f"needs torchvision: {advice()}") from None
        raise Unusable(f"torchvision cannot be imported: {error}; {advice()}") from error
    except (RuntimeError, OSError) as error:
        raise Unusable(f"torchvision does not load beside torch {torch.__version__}: {error}; {advice()}") from error


def declare_operators() -> None:
    """Declares torchvision's operators if it is installed and cannot load them, as when it is built for CUDA.

    Without them importing it fails ("operator torchvision::nms does not exist"). They are declared without an
    implementation: a call of one raises NotImplementedError.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        # The declarations end with the library.
        _declared.append(library)
        present = internals.registered_operators()
        for name in _OPERATORS:
            if f"torchvision::{name}" not in present:
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def advice() -> str:
    """Returns the command that installs the torchvision of this torch, and leaves torch as it is."""
    version = re.match(r"2\.(\d+)", torch.__version__)
    first_torch, first = _FIRST_PAIR
    pair = f"'torchvision==0.{int(version[1]) - first_torch + first}.*'" if version else "torchvision"
    return f"pip install --no-deps {pair} pillow"
