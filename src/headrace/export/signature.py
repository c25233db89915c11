"""`signature.json`: what an exported model takes and returns, where it comes from, and the digests of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import DataError, UnfitMachine
from headrace.machine import disk
from headrace.spec.plain import finite, from_plain, to_plain

if TYPE_CHECKING:
    # A server reads signatures, and does without torch, which takes seconds to import.
    from torch import Tensor

NAME = "signature.json"
FORMAT = "headrace model"
VERSION = 1
MOST_BYTES = 1 << 20
"""Longest signature that is read."""

_CHUNK = 1 << 20
_MOST_CHANNELS = 4


@dataclass(frozen=True)
class TensorForm:
    """One input or output: its name, its type ("float32"), and its shape, -1 where any length will do.

    Attributes:
        low, high: of an input, the smallest and the largest value in the examples that the files were checked with;
            for each channel of an image `(batch, channels, height, width)`, for the whole of others. None where it was
            not finite, which JSON cannot say.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this type and shape."""
        return (
            str(tensor.dtype).removeprefix("torch.") == self.dtype
            and tensor.dim() == len(self.shape)
            and all(wanted in (-1, length) for wanted, length in zip(self.shape, tensor.shape, strict=True))
        )


@dataclass(frozen=True)
class Artefact:
    """One file of the model.

    Attributes:
        bytes: its size.
        sha256: of its content, in hexadecimal.
        difference: the largest from the trained model, relative to the largest value of that output; None for a file
            that does not compute.
        metrics: on the evaluation set, where they were computed with this file; None for one that was not finite.
    """

    bytes: int
    sha256: str
    difference: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantization:
    """How an exported model was made smaller.

    Attributes:
        kind: "int8" or "fp16".
        how: in words.
        before: the metrics of the trained model on the evaluation set; those of each file stand with the file.
    """

    kind: str
    how: str
    before: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Signature:
    """What an exported model is.

    Attributes:
        name: of the model, as a server calls it.
        inputs, outputs: in the order of the program's arguments and results.
        task: of the job, "multiclass(10)"; "" for one with a loss of its own.
        labels: names of the classes, by index; () where they are not known.
        preprocessing: what the job's data went through before the model, one line each.
        strategy, step: of the training.
        metrics: the last evaluation of the run; None for one that was not finite.
        versions: of what exported it.
        files: by name, relative to the folder.
        notes: what a user should know of this export.
        quantized: how the numbers were made smaller; None where they are as trained.
    """

    name: str
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    task: str = ""
    labels: tuple[str, ...] = ()
    preprocessing: tuple[str, ...] = ()
    strategy: str = ""
    step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Artefact] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantized: Quantization | None = None

    @property
    def batched(self) -> bool:
        """Whether all inputs and outputs have an entry for each example, of any number."""
        return all(form.shape[:1] == (-1,) for form in (*self.inputs, *self.outputs))


def write(folder: Path, signature: Signature) -> Path:
    """Writes `signature.json`; returns its path."""
    path = folder / NAME
    document = {"format": FORMAT, "version": VERSION, **finite(to_plain(signature))}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read(folder: Path) -> Signature:
    """Reads the signature of a folder, which may come from a stranger.

    Raises:
        DataError: there is none, or it is not one.
    """
    path = folder / NAME
    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        if disk.exists(path) and not disk.is_file(path):
            raise ValueError("it is no plain file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        document: dict[str, Any] = json.loads(content)
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ValueError(f"it is not the signature of a {FORMAT}")
        version = document.pop("version", None)
        if version != VERSION:
            raise ValueError(f"it is of version {str(version)[:20]}, this headrace reads version {VERSION}")
        return from_plain(Signature, document)
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no {NAME}; name a folder that `headrace export RUN -o {folder}` has written"
        ) from None
    except RecursionError:
        raise DataError(f"{path} cannot be used: it is nested too deep") from None
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be used: {error!s:.300}") from None
    except OSError as error:
        raise UnfitMachine(f"{path} cannot be read: {error.strerror}") from error


def open_file(folder: Path, signature: Signature, name: str) -> Path:
    """Returns the path of a file that the signature lists, after a look at its size and digest.

    Raises:
        DataError: the signature does not list it, it is no plain file of this folder, or its content differs.
    """
    listed = signature.files.get(name)
    if listed is None:
        raise DataError(f"{folder / NAME} lists no {name}; it lists {', '.join(sorted(signature.files)) or 'no file'}")
    check_inside(folder, name)
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise DataError(f"{path} is a link, or lies behind one; a model's files are plain files of its folder")
    if not disk.is_file(path):
        raise DataError(f"{path} is missing, and {NAME} lists it; export the model again")
    size = path.stat().st_size
    if size != listed.bytes or digest(path) != listed.sha256:
        raise DataError(
            f"{path} is not the file that was exported: {size:,} bytes, {NAME} says {listed.bytes:,}, or the digest "
            "differs; export the model again"
        )
    return path


def check_inside(folder: Path, name: str) -> None:
    """Raises DataError where the name of a file leads out of its folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{folder / NAME} lists {name!r:.100}, which is not a path inside the folder")


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def form_of(name: str, tensor: Tensor, free: tuple[int, ...] = (0,)) -> TensorForm:
    """Returns the form of a tensor whose dimensions `free` may have any length."""
    shape = tuple(-1 if dim in free else length for dim, length in enumerate(tensor.shape))
    return TensorForm(name, str(tensor.dtype).removeprefix("torch."), shape)


def values_of(forms: Sequence[TensorForm], batches: Sequence[Mapping[str, Tensor]]) -> tuple[TensorForm, ...]:
    """Returns the inputs' forms with the range of their values in some batches."""
    import torch

    ranged = []
    for form in forms:
        tensors = [batch[form.name] for batch in batches]
        image = len(form.shape) == 4 and form.shape[1] <= _MOST_CHANNELS
        rows = [tensor.transpose(0, 1).flatten(1) if image else tensor.reshape(1, -1) for tensor in tensors]
        low, high = (torch.stack([pick(row.double(), dim=1) for row in rows]) for pick in (torch.amin, torch.amax))
        ranged.append(replace(form, low=tuple(low.amin(0).tolist()), high=tuple(high.amax(0).tolist())))
    return tuple(ranged)
