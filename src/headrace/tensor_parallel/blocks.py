"""Blocks of a model whose inside can be split: attention by heads, and what the model's own plan says.

Attention is recognised by what it is made of, not by its class: a module that knows how long a head is, with linear
layers whose outputs all go to one linear layer, its output projection. The inside then computes with fewer heads on
every device, if the numbers that it keeps in attributes are those of this device's part.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from headrace import internals
from headrace.tensor_parallel.recording import open_modules
from headrace.tensor_parallel.rules import Splittable, ValueStep

_LENGTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_per_head", "d_kv", "kv_channels")
"""Attributes that hold how long a head is."""

_HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads"),
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
)
_WIDTHS = ("all_head_size", "inner_dim", "embed_dim", "split_size", "dim", "hidden_size", "inner_size")
"""Attributes that hold how many heads there are, and how long all of them are together."""

_PLANNED = {"colwise": "column", "rowwise": "row"}
"""Words of the transformers library's `tp_plan`, and the rules that they mean."""


@dataclass(frozen=True)
class Block:
    """Layers that are split together, with whatever is between them.

    Attributes:
        columns: layers split by their outputs, with how many matrices lie one behind the other in each (3 for queries,
            keys and values in one).
        row: the layer split by its inputs, which takes what the inside makes of them.
        numbers: attributes of the module, and their values on every device.
        partial: modules of the inside with parameters, which every device has whole and gives its own heads.
        beside: a further layer split by its inputs, the first of an adapter of `row`.
        drops: dropout of its input, which is a slice.
    """

    name: str
    columns: Mapping[str, int]
    row: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """The layers split by their inputs."""
        return (self.row, *self.beside)

    @property
    def kinds(self) -> dict[str, str]:
        """The rule of each layer."""
        return {**dict.fromkeys(self.columns, "column"), **dict.fromkeys(self.rows, "row")}


@dataclass(frozen=True)
class _Adapted:
    """A linear layer with adapters of the peft library, `base(x) + scale * up(down(dropout(x)))`, by names."""

    base: str
    downs: tuple[str, ...]
    ups: tuple[str, ...]
    drops: tuple[str, ...]


def find_blocks(
    module: nn.Module, steps: Sequence[ValueStep], layers: Mapping[str, Splittable], world: int
) -> tuple[tuple[Block, ...], dict[str, str]]:
    """Returns the blocks of a model that so many devices can split, and why others cannot be, by name.

    `layers` are those that may be split.
    """
    goals = _goals(steps, layers)
    adapted = _adapted(module, layers, goals)
    goals, layers = _as_one(adapted, goals, layers)
    plan = _own_plan(module)
    found: dict[str, Block] = {}
    undivided: dict[str, str] = {}
    taken: set[str] = set()
    for name, part in open_modules(module):
        prefix = f"{name}." * bool(name)
        inside = {each: f"{prefix}{each}" for each, _ in part.named_children()}
        linear = [path for path in inside.values() if path in goals and layers[path].sort == "linear"]
        block = _planned(name, part, linear, layers, plan, world)
        block = _attention(name, part, linear, layers, goals, world) if block is None else block
        if isinstance(block, str):
            undivided[name] = block
        elif block is not None and not taken & block.kinds.keys():
            biases = _biases(part, [path for path in inside.values() if path in goals], layers)
            others = tuple(
                inside[each]
                for each, child in part.named_children()
                if inside[each] not in goals and any(True for _ in child.parameters())
            )
            found[name] = replace(block, columns={**block.columns, **biases}, partial=others)
            taken |= found[name].kinds.keys()
    return tuple(_with_adapters(block, adapted) for block in found.values()), undivided


def _adapted(
    module: nn.Module, layers: Mapping[str, Splittable], goals: Mapping[str, frozenset[str]]
) -> dict[str, _Adapted]:
    """Returns the linear layers with adapters, by name, of which every layer that runs may be split."""
    found = {}
    for name, part in open_modules(module):
        children = dict(part.named_children())
        if not {"base_layer", "lora_A", "lora_B"} <= children.keys():
            continue

        def inside(sort: str, of: type[nn.Module], name: str = name, part: nn.Module = part) -> tuple[str, ...]:
            inner = part.get_submodule(sort).named_children()
            return tuple(f"{name}.{sort}.{each}" for each, layer in inner if isinstance(layer, of))

        base = f"{name}.base_layer"
        downs, ups = ([each for each in inside(sort, nn.Linear) if each in goals] for sort in ("lora_A", "lora_B"))
        ends = {up for down in downs for up in goals[down]}
        if base in goals and layers[base].sort == "linear" and ends == {*ups}:
            found[name] = _Adapted(base, tuple(downs), tuple(ups), inside("lora_dropout", nn.Dropout))
    return found


def _as_one(
    adapted: Mapping[str, _Adapted], goals: Mapping[str, frozenset[str]], layers: Mapping[str, Splittable]
) -> tuple[dict[str, frozenset[str]], dict[str, Splittable]]:
    """Returns goals and layers in which a layer with its adapters is one, by the name of the module that has them."""
    owner = {each: name for name, own in adapted.items() for each in (own.base, *own.downs, *own.ups)}
    found: dict[str, set[str]] = {}
    for name, reached in goals.items():
        if name not in owner or name not in adapted[owner[name]].downs:
            found.setdefault(owner.get(name, name), set()).update(owner.get(each, each) for each in reached)
    forms = {name: layers[own.base] for name, own in adapted.items()}
    return {name: frozenset(reached) for name, reached in found.items()}, {**layers, **forms}


def _with_adapters(block: Block, adapted: Mapping[str, _Adapted]) -> Block:
    """Returns a block in terms of the layers themselves: what adapters add is split as what it is added to."""
    columns: dict[str, int] = {}
    for name, matrices in block.columns.items():
        own = adapted.get(name)
        columns |= dict.fromkeys((name,) if own is None else (own.base, *own.ups), matrices)
    row = adapted.get(block.row)
    if row is None:
        return replace(block, columns=columns)
    return replace(block, columns=columns, row=row.base, beside=row.downs, drops=row.drops)


def _goals(steps: Sequence[ValueStep], layers: Mapping[str, Splittable]) -> dict[str, frozenset[str]]:
    """Returns by layer to which linear layers its outputs go, before any other one."""
    goals: dict[str, set[str]] = {}
    # From behind, each step's is the union of those of the steps that take its value.
    ahead: list[set[str]] = [set() for _ in steps]
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        reached = ahead[index]
        if step.does == "layer":
            goals.setdefault(step.name, set()).update(reached)
            if layers[step.name].sort == "linear":
                reached = {step.name}
        for given in step.inputs:
            ahead[given] |= reached
    return {name: frozenset(reached) for name, reached in goals.items()}


def _attention(
    name: str,
    part: nn.Module,
    linear: Sequence[str],
    layers: Mapping[str, Splittable],
    goals: Mapping[str, frozenset[str]],
    world: int,
) -> Block | str | None:
    held = {key: value for key, value in vars(part).items() if type(value) is int}
    heads = next((held[key] for key in _HEADS if held.get(key, 0) > 0), None)
    ends = [path for path in linear if any(goals[other] == {path} for other in linear if other != path)]
    columns = [path for path in linear if path not in ends]
    rows = set(ends) or set[str]().union(*(goals[path] for path in columns))
    if len(rows) != 1 or not columns or any(goals[path] != rows for path in columns):
        return None
    (row,) = rows
    width = layers[row].inputs
    length = next((held[key] for key in _LENGTHS if held.get(key, 0) > 0), None)
    if length is None and heads is not None and width % heads == 0:
        length = width // heads
    if length is None or width % length:
        return None
    outputs = {path: layers[path].outputs for path in columns}
    matrices = {path: count // width if count % width == 0 else 1 for path, count in outputs.items()}
    counts = [outputs[path] // count for path, count in matrices.items()]
    if wrong := _undivided([width, *counts], length, world):
        return wrong
    return Block(name, matrices, row, _numbers(held, list(outputs.values()), width, length, world))


def _undivided(widths: Sequence[int], length: int, world: int) -> str:
    """Says which number of heads, or of features where there are none, devices cannot share; "" if there is none."""
    count = next((each / length for each in widths if each % (length * world)), None)
    what = "features" if length == 1 else "heads"
    return "" if count is None else f"has {count:g} {what}, which {world} devices cannot share evenly"


def _numbers(held: Mapping[str, int], outputs: Sequence[int], width: int, length: int, world: int) -> dict[str, int]:
    counts = {width // length, *(each // length for each in outputs)}
    numbers = {key: held[key] // world for key in _HEADS if held.get(key) in counts}
    return numbers | {key: held[key] // world for key in _WIDTHS if held.get(key) == width}


def _biases(part: nn.Module, paths: Sequence[str], layers: Mapping[str, Splittable]) -> dict[str, int]:
    """Returns tables with a number for each head, such as of relative positions."""
    heads = {value for key, value in vars(part).items() if key in _HEADS}
    return {path: 1 for path in paths if layers[path].sort == "embedding" and layers[path].outputs in heads}


def _own_plan(module: nn.Module) -> dict[str, str]:
    """Returns the rules of the `tp_plan` of a model of the transformers library, or of such a part, by pattern."""
    found: dict[str, str] = {}
    for name, part in open_modules(module):
        plan = vars(part).get(internals.TP_PLAN)
        if isinstance(plan, Mapping):
            prefix = f"{name}." * bool(name)
            found |= {f"{prefix}{pattern}": _PLANNED[word] for pattern, word in plan.items() if word in _PLANNED}
    return found


def _planned(
    name: str,
    part: nn.Module,
    linear: Sequence[str],
    layers: Mapping[str, Splittable],
    plan: Mapping[str, str],
    world: int,
) -> Block | str | None:
    """Returns the block that the model's own plan makes of a module's layers: columns, and one row."""
    said = {
        path: next((rule for pattern, rule in plan.items() if fnmatch.fnmatchcase(path, pattern)), "")
        for path in linear
    }
    columns = [path for path, rule in said.items() if rule == "column"]
    rows = [path for path, rule in said.items() if rule == "row"]
    if not columns or len(rows) != 1:
        return None
    held = {key: value for key, value in vars(part).items() if type(value) is int}
    length = next((held[key] for key in _LENGTHS if held.get(key, 0) > 0), 1)
    width = layers[rows[0]].inputs
    outputs = [layers[path].outputs for path in columns]
    if wrong := _undivided([width, *outputs], length, world):
        return wrong
    numbers = _numbers(held, outputs, width, length, world) if length > 1 else {}
    return Block(name, dict.fromkeys(columns, 1), rows[0], numbers)
