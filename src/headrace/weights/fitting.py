"""Whether stored tensors are those of a model: names, shapes, types; said before any process starts."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.modules import is_dense
from headrace.spec.weights import Weights
from headrace.weights.adapters import names_of_base
from headrace.weights.conversions import convert
from headrace.weights.files import StoredTensor, absolute, find_tensors, names_of
from headrace.weights.reading import StoredValues, same_content

_LISTED = 5


def find_weights(weights: Weights, module: nn.Module, without: str, tables: Sequence[str] = ()) -> StoredValues:
    """Returns where the first values of a model's tensors are.

    `without` begins the names of those that are no part of the files, as of a loss that came with the job; `tables` are
    the names of embeddings whose rows are no tensors of the model.

    Raises:
        DataError: a file is missing, cut off or malformed.
        UsageError: names, shapes or types do not fit; tensors that the model ties differ.
    """
    if tables:
        raise UsageError(
            f"weights={absolute(weights.where)!r} has tensors, and the rows of the sparse embedding {tables[0]!r} are "
            "none of the model's; use sparse=False there"
        )
    place, every = absolute(weights.where), find_tensors(weights.where)
    first, tensors = _first_names(module, without), _tensors_of(module, without)
    left_out = {*_fitting(weights.unused, list(every), "unused", f"in {place}")}
    stored = {name: each for name, each in every.items() if name not in left_out}
    if other := [name for name, each in tensors.items() if not is_dense(each)]:
        raise UsageError(f"{names_of(other)} of the model is not dense, and safetensors files have no form for that")
    found: dict[str, StoredTensor] = {}
    names: dict[str, str] = {}
    places, apart = names_of_base(module, first, stored)
    converted = convert(module, {name: weights.renamed(name) for name in stored}, stored)
    for each in converted:
        for place_of in places.get(each.name, ()):
            own = first[place_of]
            if own in found and not same_content(found[own], each.tensor):
                raise UsageError(
                    f"the model has one tensor as {names[own]!r} and {each.sources[0]!r}, and the two in {place} "
                    "differ; tie them there, or not in the model"
                )
            if own not in found:
                found[own], names[own] = each.tensor, each.sources[0]
    missing = {*_fitting(weights.missing, list(tensors), "missing", "of the model")}
    if there := [name for name in missing if name in found]:
        raise UsageError(
            f"missing has {names_of(sorted(there))}, and {place} has {names[min(there)]!r}; leave it out, or name what "
            "is there in unused, too"
        )
    missing |= {first[name] for name in apart}
    unknown = [name for each in converted if each.name not in places for name in each.sources]
    _require_names(place, stored, {*places}, [name for name in tensors if name not in {*found, *missing}], unknown)
    tensors = {name: each for name, each in tensors.items() if name in found}
    if problems := list(_misfits(tensors, found)):
        more = f"; and {len(problems) - _LISTED:,} more" if len(problems) > _LISTED else ""
        raise UsageError(f"the tensors in {place} are not the model's: {'; '.join(problems[:_LISTED])}{more}")
    return StoredValues(found)


def _fitting(patterns: Sequence[str], names: Sequence[str], argument: str, where: str) -> Iterator[str]:
    """Yields the names that patterns fit, of which each must fit one."""
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise UsageError(f"{argument} has {_nearest([pattern], list(names))}, and no tensor {where} is named so")
        yield from fitting


def _first_names(module: nn.Module, without: str) -> dict[str, str]:
    """Returns the first name of each tensor of a model's state, by every name that it has."""
    known: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        known.setdefault(id(tensor), name)
    state = module.state_dict(keep_vars=True)
    return {name: known[id(each)] for name, each in state.items() if id(each) in known and not name.startswith(without)}


def _tensors_of(module: nn.Module, without: str) -> dict[str, Tensor]:
    """Returns the tensors of a model's state by their first names."""
    state = module.state_dict(keep_vars=True)
    first = _first_names(module, without)
    return {own: state[name] for name, own in first.items()}


def _require_names(
    place: str, stored: Mapping[str, StoredTensor], known: Collection[str], missing: list[str], unknown: list[str]
) -> None:
    said = []
    if missing:
        near = _nearest(missing, unknown or list(stored))
        said.append(f"{len(missing):,} tensors of the model are not there, {near}")
    if unknown:
        said.append(f"{len(unknown):,} there are not the model's, {_nearest(unknown, missing or list(known))}")
    if said:
        rename = _renaming(missing, unknown, len(unknown) == len(stored))
        arguments = f"rename={rename}" if rename else "rename={...}, missing=[...], unused=[...]"
        raise UsageError(
            f"the {len(stored):,} tensors in {place} have other names than the model's {len(known):,}: "
            f"{'; '.join(said)}; give a model of which state_dict() has the names in the files, or "
            f"weights=hr.Weights({place!r}, {arguments})"
        )


def _renaming(missing: Sequence[str], unknown: Sequence[str], every: bool) -> dict[str, str]:
    """Returns what to rename where half of the missing names, or more, differ from those there by some beginnings.

    `every` tells whether no name there is the model's: only then may all of them get a beginning.
    """
    found: dict[str, str] = {}
    left, others = dict.fromkeys(missing), dict.fromkeys(unknown)
    while counts := Counter(_beginnings(left, others, every and not found)):
        (old, new), _ = counts.most_common(1)[0]
        found[old] = new
        for name in [name for name in others if name.startswith(old) and new + name[len(old) :] in left]:
            del others[name], left[new + name[len(old) :]]
    # Of two beginnings the longer one counts.
    renamed = {*map(Weights("there", found).renamed, unknown)}
    return found if 2 * len(renamed.intersection(missing)) >= len(missing) else {}


def _beginnings(missing: Collection[str], unknown: Collection[str], adds: bool) -> Iterator[tuple[str, str]]:
    """Yields for each two names that differ by a beginning what would make the one the other."""
    for names, others, takes in ((unknown, missing, True), (missing, unknown if adds else (), False)):
        for name in names:
            for begin in (name[: at + 1] for at, letter in enumerate(name) if letter == "."):
                if name[len(begin) :] in others:
                    yield (begin, "") if takes else ("", begin)


def _nearest(names: list[str], known: list[str]) -> str:
    """Returns some names, the first with the nearest one that there is."""
    near = difflib.get_close_matches(names[0], known, 1, 0.5)
    return names_of(names) + (f" (the nearest to the first is {near[0]!r})" if near else "")


def _misfits(tensors: Mapping[str, Tensor], found: Mapping[str, StoredTensor]) -> Iterator[str]:
    lossy: dict[tuple[str, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        each = found[name]
        if each.shape != tuple(tensor.shape):
            yield f"{name!r} has shape {list(each.shape)} there and {list(tensor.shape)} in the model"
        elif not _widens(getattr(torch, each.dtype), tensor.dtype):
            lossy.setdefault((each.dtype, tensor.dtype), []).append(name)
    for (there, dtype), names in lossy.items():
        own = str(dtype).removeprefix("torch.")
        quantized = dtype.is_floating_point and not getattr(torch, there).is_floating_point
        remedy = (
            "which have no such values: give files that are not quantized"
            if quantized
            else f"which would lose bits; make the model of {there}, or a wider type"
        )
        yield f"{names_of(names)} {'is' if len(names) == 1 else 'are'} {there} there and {own} in the model, {remedy}"


def _widens(stored: torch.dtype, own: torch.dtype) -> bool:
    """Tells whether a type has all values of another one of its kind."""
    if stored == own:
        return True
    kinds = [(each.is_floating_point, each.is_complex, each == torch.bool) for each in (stored, own)]
    if kinds[0] != kinds[1]:
        return False
    if stored.is_floating_point:
        # Of types of eight bits torch knows no common one.
        one, other = torch.finfo(stored), torch.finfo(own)
        finer = other.smallest_normal * other.eps <= one.smallest_normal * one.eps
        return finer and other.eps <= one.eps and other.max >= one.max
    try:
        return torch.promote_types(stored, own) == own
    except RuntimeError:
        # So of whole numbers without signs.
        return False
