"""Arrays that a model's inputs take: what the signature wants, and what fits it. Without torch, which takes seconds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.export.signature import TensorForm

Array = NDArray[Any]

_KINDS = {"bool", "float", "int", "uint"}
_KIND_TEXT = {"b": "true and false", "U": "text", "S": "text", "O": "objects", "c": "complex numbers"}
_TYPE_TEXT = {
    bool: "true and false",
    str: "text",
    dict: "objects",
    type(None): "null",
    int: "numbers",
    float: "numbers",
}
_MOST_DIMENSIONS = 32


def numpy_type(form: TensorForm) -> np.dtype[Any]:
    """Returns the type of a form's arrays; raises DataError where numpy has none of that name (bfloat16)."""
    if form.dtype.rstrip("0123456789") not in _KINDS:
        raise DataError(f"{form.name} has the type {form.dtype!r:.40}, which numpy does not have")
    try:
        return np.dtype(form.dtype)
    except TypeError:
        raise DataError(f"{form.name} has the type {form.dtype!r:.40}, which numpy does not have") from None


def form_text(form: TensorForm) -> str:
    """Returns "input float32 (any, 1, 28, 28)"."""
    return f"{form.name} {form.dtype} ({', '.join('any' if length < 0 else str(length) for length in form.shape)})"


def fitting(form: TensorForm, values: Any) -> Array:
    """Returns values, an array or nested lists, as an array of the form; one example gets the batch's dimension.

    Raises:
        DataError: a ragged list, what is no number, another shape, a number that the type does not hold.
    """
    return shaped(form, typed(form, values))


def shaped(form: TensorForm, array: Array) -> Array:
    """Returns an array in the shape of the form; raises DataError where it has another."""
    for candidate in (array, array[np.newaxis]):
        if fits(form, candidate.shape):
            return candidate
    raise DataError(f"expected {form_text(form)}, got the shape {array.shape}")


def fits(form: TensorForm, shape: Sequence[int]) -> bool:
    """Returns whether a shape is one of the form."""
    return len(shape) == len(form.shape) and all(
        wanted in (-1, length) for wanted, length in zip(form.shape, shape, strict=True)
    )


def typed(form: TensorForm, values: Any) -> Array:
    """Returns values as an array of the form's type, if that keeps every number; floats are rounded to the type."""
    wanted = numpy_type(form)
    array = values if isinstance(values, np.ndarray) else _from_lists(form, values)
    if array.dtype == wanted:
        return array
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "b") != (wanted.kind == "b"):
        raise DataError(f"expected {form_text(form)}, got {_KIND_TEXT.get(array.dtype.kind, str(array.dtype))}")
    # A number that is too large becomes infinite or another one, which is said below.
    with np.errstate(invalid="ignore", over="ignore"):
        converted: Array = array.astype(wanted)
    if wanted.kind == "f":
        same = bool(np.isfinite(converted).all()) or bool((np.isfinite(converted) == np.isfinite(array)).all())
    else:
        same = bool((converted == array).all()) and not (array.dtype.kind == "f" and not _exact(array, wanted))
    if not same:
        raise DataError(f"expected {form_text(form)}, got a number that {wanted} does not hold")
    return converted


def _from_lists(form: TensorForm, values: Any) -> Array:
    """Returns nested lists of numbers as an array. Strings never get to numpy, which would make each as long as any."""
    shape: list[int] = []
    level = [values]
    while level and type(level[0]) is list:
        lengths = set(map(len, level)) if set(map(type, level)) == {list} else set()
        if len(lengths) != 1:
            raise DataError(f"expected {form_text(form)}, got lists of different lengths")
        shape += lengths
        level = list(itertools.chain.from_iterable(level))
        if len(shape) > _MOST_DIMENSIONS:
            raise DataError(f"expected {form_text(form)}, got lists in lists, more than {_MOST_DIMENSIONS} deep")
    kinds = set(map(type, level))
    if not (kinds <= {int, float} or kinds == {bool}):
        if list in kinds:
            raise DataError(f"expected {form_text(form)}, got lists of different lengths")
        names = ", ".join(sorted(_TYPE_TEXT.get(kind, kind.__name__) for kind in kinds))
        raise DataError(f"expected {form_text(form)}, got {names}")
    if kinds == {int, float} and not form.dtype.startswith("float"):
        # As floats, large whole numbers would be rounded because of one float beside them.
        level = [int(value) if isinstance(value, float) and value.is_integer() else value for value in level]
        kinds = set(map(type, level))
    # A float takes any whole number that it can, not only those of 64 bits.
    kind = np.float64 if form.dtype.startswith("float") else np.uint64 if form.dtype == "uint64" else np.int64
    try:
        array: Array = np.array(level, dtype=bool if kinds == {bool} else kind if kinds == {int} else np.float64)
    except OverflowError:
        raise DataError(f"expected {form_text(form)}, got a number that {np.dtype(kind)} does not hold") from None
    return array.reshape(shape)


def _exact(array: Array, wanted: np.dtype[Any]) -> bool:
    """Whether floats are inside the range of a whole type: 2.0**63 compares equal to the largest int64, and is not."""
    limits = np.iinfo(wanted)
    return bool((array >= float(limits.min)).all() and (array < float(limits.max) + 1).all())


def check_lengths(arrays: Mapping[str, Array], forms: Sequence[TensorForm]) -> int:
    """Returns the number of examples; raises DataError where the inputs have different ones."""
    counts = {form.name: len(arrays[form.name]) for form in forms if form.shape[:1] == (-1,)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"every input has as many examples, got {listed}")
    return next(iter(counts.values()), 1)


def check_names(given: Sequence[str], forms: Sequence[TensorForm]) -> None:
    """Raises DataError where inputs are missing, unknown, or given twice."""
    wanted = [form.name for form in forms]
    if sorted(given) != sorted(wanted):
        raise DataError(
            f"expected {', '.join(map(form_text, forms))}; got {', '.join(f'{name!r:.40}' for name in given[:20])}"
            if given
            else f"expected {', '.join(map(form_text, forms))}; got no input"
        )


def not_finite(name: str, output: Array, batched: bool) -> str:
    """Returns what to say of an output with NaN or infinity; "" where it has none.

    Args:
        batched: whether the first dimension counts the examples; else it is one example.
    """
    if output.dtype.kind != "f" or np.isfinite(output).all():
        return ""
    examples = output.reshape((len(output), -1) if batched else (1, -1))
    bad = np.flatnonzero(~np.isfinite(examples).all(axis=1))
    return (
        f"the model returned NaN or infinity in {name} for {len(bad)} of {len(examples)} examples, the first at "
        f"{bad[0]}; are the inputs in the range that it was trained on?"
    )
