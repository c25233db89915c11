"""Reads the inputs of a model from files: .npy, .npz, .csv, .json, or one image."""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError, UsageError
from headrace.export.signature import TensorForm
from headrace.export.tensors import Array, check_lengths, check_names, fitting, form_text, numpy_type
from headrace.machine import disk

Forms = Sequence[TensorForm]
IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


def read_inputs(path: Path, forms: Forms) -> dict[str, Array]:
    """Returns the examples of a file as the model takes them, by name.

    Raises:
        UsageError: the file is of no kind that is read, or does not exist.
        DataError: its content does not fit the model, with what was expected.
    """
    suffix = path.suffix.lower()
    reader = _READERS.get(suffix)
    if reader is None:
        raise UsageError(f"{path}: expected a file that ends in {', '.join(sorted(_READERS))}")
    if not disk.is_file(path):
        raise UsageError(f"{path} {'is no file' if disk.exists(path) else 'does not exist'}; name a file of examples")
    try:
        values = reader(path, forms)
        check_names(list(values), forms)
        arrays = {form.name: fitting(form, values[form.name]) for form in forms}
        check_lengths(arrays, forms)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    return arrays


def _array(path: Path, forms: Forms) -> dict[str, Any]:
    try:
        return {_only(forms, "a .npz file with an array for each"): np.load(path, allow_pickle=False)}
    except (ValueError, EOFError) as error:
        raise DataError(f"it is not an array of numbers ({error!s:.100})") from None


def _arrays(path: Path, forms: Forms) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"it is not an archive of arrays ({error!s:.100})") from None
    # What `np.savez(path, array)` calls an array without a name.
    return {forms[0].name: arrays["arr_0"]} if len(forms) == 1 and list(arrays) == ["arr_0"] else arrays


def _json(path: Path, forms: Forms) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON ({error!s:.100})") from None
    if isinstance(content, dict):
        return content
    if isinstance(content, list) and content and all(isinstance(example, dict) for example in content):
        names = list(content[0])
        if any(list(example) != names for example in content):
            raise DataError(f"every example has the same names in the same order, the first has {', '.join(names)}")
        return {name: [example[name] for example in content] for name in names}
    return {_only(forms, "an object with a list for each"): content}


def _table(path: Path, forms: Forms) -> dict[str, Any]:
    """Reads columns by the inputs' names, or rows of numbers for one input, with or without a header."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise DataError(f"it has no row; expected {', '.join(map(form_text, forms))}")
    header = [name.strip() for name in rows[0]]
    if {form.name for form in forms} <= set(header):
        columns = {form.name: header.index(form.name) for form in forms}
        _check_rows(rows, 1)
        return {
            form.name: _numbers([[row[columns[form.name]]] for row in rows[1:]], 2).reshape((-1, *form.shape[1:]))
            for form in forms
            if _one_number(form)
        }
    name = _only(forms, f"columns named {', '.join(form.name for form in forms)}")
    first = 0 if all(map(_is_number, rows[0])) else 1
    _check_rows(rows, first)
    table = _numbers(rows[first:], first + 1)
    inner = forms[0].shape[1:]
    if -1 not in inner and table.shape[1] != math.prod(inner):
        raise DataError(f"expected {math.prod(inner)} numbers a row for {form_text(forms[0])}, got {table.shape[1]}")
    return {name: table.reshape((-1, *inner))}


def _one_number(form: TensorForm) -> bool:
    if math.prod(form.shape[1:]) != 1 or -1 in form.shape[1:]:
        raise DataError(f"a column holds one number an example, the model takes {form_text(form)}; use .npz or .json")
    return True


def _check_rows(rows: Sequence[Sequence[str]], first: int) -> None:
    if len(rows) == first:
        raise DataError("it has a header and no row")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise DataError(f"row {number} has {len(row)} fields, the first has {len(rows[0])}")


def _numbers(rows: Sequence[Sequence[str]], first: int) -> Array:
    try:
        return np.asarray([[float(field) for field in row] for row in rows])
    except ValueError:
        for number, row in enumerate(rows, first):
            for field in row:
                if not _is_number(field):
                    raise DataError(f"row {number}: {field!r:.40} is not a number") from None
        raise


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _image(path: Path, forms: Forms) -> dict[str, Any]:
    """Reads one image: cropped to the middle, resized, and scaled to the range of the model's examples."""
    name = _only(forms, "a .npz file with an array for each")
    form = forms[0]
    channels, *sides = form.shape[1:] if len(form.shape) == 4 else (0,)
    if channels not in (1, 3) or -1 in sides:
        raise DataError(f"an image is for an input (any, 1 or 3, height, width); the model takes {form_text(form)}")
    # Lazily: it imports torch, which the other files do not need.
    from headrace.data.transforms import DecodeImage

    pixels = DecodeImage(*sides, fast=False)(path.read_bytes()).astype(np.float32)
    if channels == 1:
        # ITU-R BT.601, as Pillow and OpenCV.
        pixels = (pixels @ np.asarray([0.299, 0.587, 0.114], np.float32))[..., np.newaxis]
    example = pixels.transpose(2, 0, 1)[np.newaxis]
    if numpy_type(form).kind != "f":
        return {name: example.round()}
    low, high = (
        np.asarray([otherwise if bound is None else bound for bound in values or [None]], np.float32).reshape(-1, 1, 1)
        for values, otherwise in ((form.low, 0), (form.high, 1))
    )
    return {name: low + example / 255 * (high - low)}


def _only(forms: Forms, otherwise: str) -> str:
    if len(forms) != 1:
        raise DataError(f"the model takes {', '.join(map(form_text, forms))}: give {otherwise}")
    return forms[0].name


_READERS: Mapping[str, Callable[[Path, Forms], dict[str, Any]]] = {
    ".npy": _array,
    ".npz": _arrays,
    ".json": _json,
    ".csv": _table,
    **dict.fromkeys(IMAGES, _image),
}
