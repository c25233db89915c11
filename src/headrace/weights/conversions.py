"""Files that have other tensors than a model of the transformers library, as its `from_pretrained` converts them.

Such as the experts of a mixture, each by itself in the files of the hub, and stacked in the model:

    experts.0.w1.weight, experts.0.w3.weight, experts.1.w1.weight, ...  ->  experts.gate_up_proj, (experts, 2 * f, d)

The library's own conversion runs on the numbers of rows in the place of the rows, so that what it does with them tells
which bytes of the files each tensor of the model has. Nothing is read for that.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.weights.files import Extent, StoredTensor, names_of


@dataclass(frozen=True)
class Converted:
    """A tensor of a model.

    Attributes:
        name: in the model.
        sources: the names, in the files, of what it is made of.
        tensor: where it is.
    """

    name: str
    sources: Sequence[str]
    tensor: StoredTensor


def convert(module: nn.Module, names: Mapping[str, str], stored: Mapping[str, StoredTensor]) -> list[Converted]:
    """Returns the tensors of files as a model has them.

    `names` are the model's names by those in the files; those of a model of the transformers library, or of one in the
    model, are converted, unless each is one of the model's already.

    Raises:
        UsageError: a conversion does more than to place rows.
    """
    left = dict(names)
    found: list[Converted] = []
    for prefix, model in _models(module):
        known = {name: name for name in model.state_dict()}
        own = {name: given.removeprefix(prefix) for name, given in names.items() if given.startswith(prefix)}
        if known.keys() != {*own.values()}:
            found += (Converted(prefix + each.name, each.sources, each.tensor) for each in _of(model, own, stored))
            left = {name: given for name, given in left.items() if name not in own}
    return [*(Converted(given, (name,), stored[name]) for name, given in left.items()), *found]


def revert(converted: Sequence[Converted], trained: Mapping[str, StoredTensor], was: StoredTensor) -> StoredTensor:
    """Returns where a tensor of the files is in a trained model's, which has the names of `converted`."""
    extents: list[tuple[int, Extent]] = []
    (place,) = was.extents
    for each in converted:
        at, own = 0, trained[each.name]
        for extent in each.tensor.extents:
            start = (extent.begin - place.begin) // _size(was)
            if extent.file == place.file and 0 <= start < was.elements:
                extents += ((start, part) for part in own.parts(at, extent.elements))
            at += extent.elements
    extents.sort(key=lambda item: item[0])
    return StoredTensor(trained[converted[0].name].dtype, was.shape, tuple(extent for _, extent in extents))


def _models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the outermost models of the transformers library in a module, with what their names begin with."""
    library, peft = map(sys.modules.get, ("transformers.modeling_utils", "peft"))
    if library is None:
        return
    if peft is not None and isinstance(module, peft.PeftModel):
        module = module.get_base_model()
    prefixes: list[str] = []
    for name, each in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(each, library.PreTrainedModel) and not any(prefix.startswith(outer) for outer in prefixes):
            prefixes.append(prefix)
            yield prefix, each


def _of(model: Any, names: Mapping[str, str], stored: Mapping[str, StoredTensor]) -> Iterator[Converted]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    every = get_model_conversion_mapping(model)
    renamings = [each for each in every if isinstance(each, WeightRenaming)]
    converters = [each for each in every if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = {name: name for name in model.state_dict()}
    groups: dict[str, dict[str, tuple[str, str]]] = {}
    for name, given in sorted(names.items(), key=lambda item: dot_natural_key(item[1])):
        rules = (model.base_model_prefix, known)
        new, pattern = rename_source_key(given, renamings, converters, *rules)
        if new not in known and given in known:
            new, pattern = given, None
        if pattern is None or new not in known:
            yield Converted(new, (name,), stored[name])
        else:
            groups.setdefault(new, {})[name] = given, pattern
    for new, group in groups.items():
        converter = copy.deepcopy(by_pattern[next(iter(group.values()))[1]])
        yield from _assembled(model, converter, new, group, stored)


def _assembled(
    model: Any,
    converter: Any,
    new: str,
    group: Mapping[str, tuple[str, str]],
    stored: Mapping[str, StoredTensor],
) -> Iterator[Converted]:
    """Yields what a conversion makes of some tensors, by the numbers of their rows."""
    first, numbers = 0, dict[str, int]()
    for name, (given, pattern) in group.items():
        shape = stored[name].shape[:1]
        numbers[name], count = first, math.prod(shape)
        rows = torch.arange(first, first + count).view(*shape, *(1 for _ in stored[name].shape[1:]))
        converter.add_tensor(new, given, pattern, rows)
        # A number is left out between two, so that the rows of two tensors are no run.
        first += count + 1
    try:
        made = converter.convert(new, model=model, config=model.config)
    except Exception as error:  # what the library's conversions raise is theirs
        raise _refusal(new, [*group], str(error) or repr(error)) from error
    used = 0
    for name, value in made.items():
        rows = value[0] if isinstance(value, list) else value
        runs = list(_runs(rows, numbers))
        sources = [source for source in group if any(source == each for each, _, _ in runs)]
        used += rows.numel()
        inner = {(stored[source].dtype, stored[source].shape[1:]) for source in sources}
        outer = rows.dim() - max((len(shape) for _, shape in inner), default=0)
        if len(inner) != 1 or math.prod(rows.shape[outer:]) != 1:
            raise _refusal(name, [*group], "it moves values between rows, or joins rows of different kinds")
        ((dtype, shape),) = inner
        extents = tuple(
            part
            for source, start, count in runs
            for part in stored[source].parts(start * math.prod(shape), count * math.prod(shape))
        )
        yield Converted(name, sources, StoredTensor(dtype, (*rows.shape[:outer], *shape), extents))
    if used != first - len(group):
        raise _refusal(new, [*group], f"{first - len(group):,} rows are there, and {used:,} in the model")


def _runs(rows: Tensor, numbers: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yields the tensor, the first of its rows, and how many rows follow each other, for each run of numbers."""
    every = rows.flatten()
    ends = [*((every.diff() != 1).nonzero().flatten() + 1).tolist(), len(every)]
    names, firsts = [*numbers], torch.tensor([*numbers.values()])
    for begin, end in zip([0, *ends], ends, strict=False):
        number = int(every[begin])
        source = names[int(torch.searchsorted(firsts, number, right=True)) - 1]
        yield source, number - numbers[source], end - begin


def _refusal(new: str, sources: Sequence[str], why: str) -> UsageError:
    return UsageError(
        f"transformers makes {new!r} of {names_of(sources)}, and not by placing whole rows: {why}; load the model by "
        "from_pretrained in the function that builds it, without weights="
    )


def _size(stored: StoredTensor) -> int:
    size: int = getattr(torch, stored.dtype).itemsize
    return size
