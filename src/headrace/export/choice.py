"""What a user wants of an export: for what it is, in which formats, how precise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError

FORMATS = {"pt2": "model.pt2", "onnx": "model.onnx", "pte": "model.pte", "tflite": "model.tflite"}
"""The file of each format."""
PRECISIONS = ("int8", "fp16")
TARGETS = {"server": ("pt2", "onnx"), "browser": ("onnx",), "mobile": ("pte",)}
"""The formats of each target, if none is named."""
_ALONE = {"browser": ("onnx",), "mobile": ("pte", "tflite")}
"""Of these targets one format is written, and these may be named."""
_LIST = re.compile(r"""\s*\[\s*(["\]\[{\d-]|$)""")
"""How a JSON list begins; a label may be "[PAD]"."""
_WHOLE = ("pt2", "tflite")
"""Formats that are not quantized."""


@dataclass(frozen=True)
class ExportChoice:
    """What is written; see `Run.export`."""

    target: str = "server"
    formats: tuple[str, ...] = ("pt2", "onnx")
    labels: tuple[str, ...] = ()
    onnxruntime_web: Path | None = None
    quantize: str | None = None


DEFAULT = ExportChoice()
"""For a server, by torch.export and by ONNX."""


def choose(
    target: str = "server",
    formats: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    onnxruntime_web: Path | str | None = None,
    quantize: str | None = None,
) -> ExportChoice:
    """Checks what a user asks for, and adds the formats of the target.

    Raises:
        UsageError: there is no such target or format, or they do not go together.
    """
    if target not in TARGETS:
        raise UsageError(f"--target takes {', '.join(TARGETS)}, got {target}")
    if quantize is not None and quantize not in PRECISIONS:
        raise UsageError(f"--quantize takes {', '.join(PRECISIONS)}, got {quantize!r}")
    usual = tuple(name for name in TARGETS[target] if quantize is None or name not in _WHOLE)
    taken = usual if formats is None else tuple(formats)
    unknown = [name for name in taken if name not in FORMATS]
    if unknown or not taken:
        raise UsageError(f"--formats takes {', '.join(FORMATS)}, got {', '.join(unknown) or 'none'}")
    if target in _ALONE and (len(taken) > 1 or taken[0] not in _ALONE[target]):
        raise UsageError(
            f"--target {target} takes the format {' or '.join(_ALONE[target])} alone, got {', '.join(taken)}"
        )
    if phones := [name for name in taken if name in _ALONE["mobile"] and target != "mobile"]:
        raise UsageError(f"the format {phones[0]} goes with --target mobile")
    if quantize is not None and (target == "browser" or set(taken) & set(_WHOLE)):
        raise UsageError("--quantize goes with --formats onnx for a server, and with the format pte for phones")
    if onnxruntime_web is not None and target != "browser":
        raise UsageError("--onnxruntime-web goes with --target browser")
    if len(set(labels)) != len(labels):
        twice = next(label for index, label in enumerate(labels) if label in labels[:index])
        raise UsageError(f"the labels name {twice!r} twice; one name a class, in the order of the model's outputs")
    web = None if onnxruntime_web is None else Path(onnxruntime_web)
    return ExportChoice(target, taken, tuple(labels), web, quantize)


def read_labels(path: Path) -> tuple[str, ...]:
    """Returns the names of a file: one a line, or a JSON list, which may also name the end of a line.

    Raises:
        UsageError: it cannot be read, or is no such list.
    """
    import json

    try:
        # Spreadsheets put a mark before the first line.
        text = path.read_text(encoding="utf-8-sig")
        lines = text.removesuffix("\n").split("\n") if text else []
        names = json.loads(text) if _LIST.match(text) else lines
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as labels: {error}; write one a line, or a JSON list") from error
    if not names or not all(isinstance(label, str) for label in names):
        raise UsageError(f"{path} holds no labels; write one a line, or a JSON list of texts")
    return tuple(names)
