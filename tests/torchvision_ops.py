"""Lets torchvision be imported where it is built for another device than torch is.

The models of the transformers library import it where it is installed. Built for CUDA it does not load its operators
beside a torch for the CPU, and then fails to be imported; no test uses them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_OPERATORS = ("nms", "qnms")
_kept: list[object] = []


def declare() -> None:
    """Declares torchvision's operators, if it is installed and cannot load them itself."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _kept:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # The declarations end with the library.
        _kept.append(library)
