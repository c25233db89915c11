"""What of a model is split, and how: chosen, or by given rules."""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from headrace import internals
from headrace.errors import UnknownName, UsageError, in_one_line
from headrace.tensor_parallel.analysis import obstacles, splittable
from headrace.tensor_parallel.blocks import Block, find_blocks
from headrace.tensor_parallel.recording import Atoms, ForwardRecord, Trial, record, tried
from headrace.tensor_parallel.rules import AXES, KINDS, Flow, Splittable, ValueStep, any_number, choose, follow

RULES = ("column", "row", "channels", "heads", "batch", "replicate")
"""What may be said of a layer: see `TensorParallel`."""

Rules = str | Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """The rule of each layer that is split, and what follows for values.

    Attributes:
        layers: all that could be split.
        batches: modules that compute a part of the batch on every device.
        obstacles: why layers that could be split are left whole, by name.
    """

    kinds: Mapping[str, str]
    layers: Mapping[str, Splittable]
    steps: tuple[ValueStep, ...]
    blocks: tuple[Block, ...]
    batches: Mapping[nn.Module, str]
    obstacles: Mapping[str, str]

    @cached_property
    def flow(self) -> Flow:
        """Where values stay split."""
        inner = {name: frozenset[str]() for block in self.blocks for name in block.columns}
        inner |= {row: frozenset(block.columns) for block in self.blocks for row in block.rows}
        flow = follow(self.steps, self.layers, self.kinds, inner)
        seen = {step.name for step in self.steps if step.does == "part"}
        # What takes the value of a part that was not called is not known.
        flow.gathers |= {name for name in self.batches.values() if name not in seen}
        flow.drops |= {name: AXES["linear"] for block in self.blocks for name in block.drops}
        return flow

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of groups of layers that are split together, with those of layers that repeat as one."""
        return tuple(dict.fromkeys(self._key_of.values()))

    @cached_property
    def _key_of(self) -> dict[str, str]:
        owner = {maker: row for row, makers in self.flow.makers.items() for maker in makers}
        block = {name: each.name for each in self.blocks for name in each.kinds}
        names = {name: block.get(name) or owner.get(name, name) for name in self.kinds}
        return {name: any_number(each) for name, each in names.items()}

    def only(self, keys: Collection[str]) -> Layout:
        """Returns the layout with those groups alone."""
        kinds = {name: kind for name, kind in self.kinds.items() if self._key_of[name] in keys}
        return replace(self, kinds=kinds, blocks=tuple(block for block in self.blocks if block.row in kinds))

    @property
    def digest(self) -> int:
        """A number of 48 bits that differs between layouts."""
        flow = self.flow
        text = repr((sorted(self.kinds.items()), sorted(flow.gathers), sorted(flow.takes.items()), self.blocks))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def lay_out(module: nn.Module, rules: Rules, world: int, trial: Trial) -> Layout:
    """Returns the layout of a model for so many devices; the model stays as it is.

    The model is run on a small batch, to see what it does. Raises a `UsageError` if a rule fits no layer, or cannot be
    followed.
    """
    found = splittable(module)
    layers = {name: form for name, (_, form) in found.items()}
    batches = _parts(module, rules)
    blocked = obstacles(module, found)
    atoms: Atoms = {
        **{part: ("dropout", name) for name, part in module.named_modules() if type(part) is nn.Dropout},
        **{layer: ("layer", name) for name, (layer, _) in found.items() if name not in blocked},
        **{part: ("part", name) for part, name in batches.items()},
    }
    recording = _recorded(module, trial, atoms)
    if isinstance(recording, str):
        if isinstance(rules, str):
            return Layout({}, layers, (), (), {}, {**blocked, "the model": recording})
        recording = ForwardRecord()
    for name, (layer, _) in found.items():
        readers = [recording.readers[id(each)] for each in layer.parameters() if id(each) in recording.readers]
        if readers and name not in blocked:
            blocked[name] = f"has a parameter that {repr(readers[0]) if readers[0] else 'the model'} reads itself"
    if isinstance(rules, str):
        return _automatic(module, found, layers, blocked, recording, world)
    kinds = _given(rules, module, layers, batches, blocked, world)
    return Layout(kinds, layers, _steps(recording, kinds), (), batches, {})


def _recorded(module: nn.Module, trial: Trial, atoms: Atoms) -> ForwardRecord | str:
    """Returns what the model does in training, or in evaluation if two examples are too few, or why that is unknown."""
    wrong = ""
    for training in (True, False):
        try:
            with tried(module, seed=True):
                return record(module.train(training), trial, atoms)
        except Exception as error:  # BatchNorm wants more values, or whatever a user's forward raises
            wrong = f"cannot be run to see what it does: {in_one_line(error)}"
    return wrong


def _automatic(
    module: nn.Module,
    found: Mapping[str, tuple[nn.Module, Splittable]],
    layers: Mapping[str, Splittable],
    blocked: Mapping[str, str],
    recording: ForwardRecord,
    world: int,
) -> Layout:
    users = Counter(id(each) for layer in module.modules() for each in internals.parameters(layer).values())
    free = {
        name: form
        for name, form in layers.items()
        # A parameter that several layers have would be cut by the rules of each.
        if name not in blocked and all(users[id(each)] == 1 for each in found[name][0].parameters())
    }
    steps = _steps(recording, free)
    blocks, undivided = find_blocks(module, steps, free, world)
    known = {name: kind for block in blocks for name, kind in block.kinds.items()}
    return Layout(choose(steps, free, world, known), layers, steps, blocks, {}, {**blocked, **undivided})


def _steps(recording: ForwardRecord, layers: Collection[str]) -> tuple[ValueStep, ...]:
    """Returns what was recorded; what is not one of the layers is something else."""
    return tuple(
        ValueStep("other", inputs=step.inputs) if step.does == "layer" and step.name not in layers else step
        for step in recording.steps
    )


def _parts(module: nn.Module, rules: Rules) -> dict[nn.Module, str]:
    if isinstance(rules, str):
        return {}
    found: dict[nn.Module, str] = {}
    for pattern, kind in rules.items():
        if kind == "batch":
            chosen = [name for name in dict(module.named_modules()) if name and fnmatch.fnmatchcase(name, pattern)]
            if not chosen:
                raise UnknownName("module", pattern, [name for name, _ in module.named_modules() if name])
            # Not its children too, which are in it.
            outer = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
            found |= {module.get_submodule(name): name for name in outer}
    return found


def _given(
    rules: Mapping[str, str],
    module: nn.Module,
    layers: Mapping[str, Splittable],
    batches: Mapping[nn.Module, str],
    obstacles: Mapping[str, str],
    world: int,
) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for pattern, kind in rules.items():
        if kind not in RULES:
            raise UnknownName("rule", kind, RULES)
        chosen = [name for name in layers if fnmatch.fnmatchcase(name, pattern)]
        if kind != "batch" and not chosen:
            _refuse_pattern(pattern, kind, module, layers)
        if kind == "batch":
            chosen = [name for name in layers if any(name == b or name.startswith(f"{b}.") for b in batches.values())]
        for name in chosen:
            kinds.setdefault(name, kind)
    for name, kind in kinds.items():
        if kind not in ("batch", "replicate"):
            _check(name, kind, layers[name], world)
            if name in obstacles:
                raise UsageError(
                    f"{name!r} cannot be split by {kind!r}: it {obstacles[name]}; leave it out of rules, or give it "
                    "'replicate' before the patterns that fit it"
                )
    return {name: kind for name, kind in kinds.items() if kind not in ("batch", "replicate")}


def _refuse_pattern(pattern: str, kind: str, module: nn.Module, layers: Mapping[str, Splittable]) -> None:
    others = [name for name, _ in module.named_modules() if fnmatch.fnmatchcase(name, pattern)]
    if not others:
        raise UnknownName("layer", pattern, layers)
    form = type(module.get_submodule(others[0])).__name__
    raise UsageError(
        f"{others[0]!r} is a {form}, which cannot be split; rules={{{pattern!r}: {kind!r}}} is for linear layers, "
        "convolutions, embeddings and nn.MultiheadAttention; leave it out, or use 'batch', which computes some of the "
        "examples on every device"
    )


def _check(name: str, kind: str, layer: Splittable, world: int) -> None:
    if kind not in KINDS[layer.sort]:
        known = " or ".join(repr(each) for each in KINDS[layer.sort])
        sort = {"grouped": "a convolution in groups", "convolution": "a convolution"}.get(layer.sort)
        sort = sort or f"{'an' if layer.sort[0] in 'ae' else 'a'} {layer.sort} layer"
        raise UsageError(f"{name!r} is {sort}, which cannot be split by {kind!r}; use {known}")
    if not layer.divisible(kind, world):
        count = layer.count(kind)
        what = {"heads": "heads", "row": "inputs"}.get(kind, "groups" if layer.sort == "grouped" else "outputs")
        fits = [str(number) for number in range(2, count + 1) if count % number == 0][:5]
        raise UsageError(
            f"{name!r} has {count} {what}, which {world} devices cannot share evenly; use "
            f"{' or '.join(fits) or 1} devices, or rules={{{name!r}: 'replicate', ...}}"
        )
