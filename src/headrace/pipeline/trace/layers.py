"""The layers of a recorded model: what a partition counts and names.

Every call of a module that is not looked into is a layer, and so is every function of a parameter; other functions
belong to the layer before them. What only reads the inputs' shapes or the model's own tensors belongs to no layer:
every stage does it for itself.

    recorded     x ─ conv1 ─ relu ─ add ─ conv2 ─ view ─ head          y = F.relu(conv1(x)) + 1; ...
    layers          └────── conv1 ─────┘ └── conv2 ──┘  └ head
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from headrace.modules import is_dense, memory_of, stateful_modules
from headrace.pipeline.trace.recorded_forward import Recording
from headrace.trees import tensors_of

_SENDABLE = (Tensor, torch.Size, int, float)
"""What may cross a cut."""


@dataclass(frozen=True)
class Layer:
    """One piece of the model that is not cut.

    Attributes:
        name: path of its module, "blocks.0.conv"; ":2" is added where it is called for the second time.
        joined: why no cut may stand behind it; "" where one may.
        modules: paths of the modules that it calls.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    joined: str = ""
    modules: tuple[str, ...] = ()


def lay_out(recording: Recording, whole: bool = True) -> tuple[tuple[Layer, ...], dict[fx.Node, int]]:
    """Returns the layers, with where there can be no cut, and the index of the one that each node belongs to."""
    names, layer = _assign(recording)
    used = _used(recording, layer, len(names))
    called: list[list[str]] = [[] for _ in names]
    for node, index in layer.items():
        if node.op == "call_module":
            called[index].append(str(node.target))
    joined = _joined(recording, layer, names, used)
    return layers_of(recording.module, names, used, called, joined, whole), layer


def layers_of(
    module: nn.Module,
    names: Sequence[str],
    used: Sequence[set[str]],
    called: Sequence[Sequence[str]],
    joined: Sequence[str],
    whole: bool,
) -> tuple[Layer, ...]:
    """Returns layers; `used` are the names of the tensors that each uses, `called` the paths of what it calls.

    With `whole`, unused tensors belong to the first layer. There is no cut between those that share extra state.
    """
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    rest = {*parameters, *buffers} - set().union(*used) if whole else set()
    reasons = list(joined)
    for first, last, why in _shared_states(module, called):
        reasons[first:last] = [each or why for each in reasons[first:last]]
    return tuple(
        Layer(
            name,
            tuple(parameter for parameter in parameters if parameter in held),
            tuple(buffer for buffer in buffers if buffer in held),
            reason,
            tuple(paths),
        )
        for name, held, reason, paths in zip(names, [used[0] | rest, *used[1:]], reasons, called, strict=True)
    )


def joined_by(layers: Sequence[Layer], joined: Sequence[str]) -> tuple[Layer, ...]:
    """Returns layers with other reasons why no cut may stand behind them."""
    return tuple(replace(layer, joined=why) for layer, why in zip(layers, joined, strict=True))


def _assign(recording: Recording) -> tuple[list[str], dict[fx.Node, int]]:
    """Returns the layers' names, and to which each node belongs."""
    parameters = {name for name, _ in recording.module.named_parameters()}
    names: list[str] = []
    calls: dict[str, int] = {}
    layer: dict[fx.Node, int] = {}
    for node in recording.graph.nodes:
        if node.op == "output" or _is_free(node, recording, layer):
            continue
        reads = any(other.op == "get_attr" and other.target in parameters for other in node.all_input_nodes)
        if node.op == "call_module" or reads:
            name = str(node.target) if node.op == "call_module" else node.name
            calls[name] = calls.get(name, 0) + 1
            names.append(name if calls[name] == 1 else f"{name}:{calls[name]}")
        # What comes before the first layer is done by it.
        layer[node] = max(0, len(names) - 1)
    return names or [type(recording.module).__name__], layer


def _is_free(node: fx.Node, recording: Recording, layer: dict[fx.Node, int]) -> bool:
    """Returns whether every stage does a node for itself."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op == "call_module" or tensors_of(recording.values[node]):
        return False
    return not any(
        other in layer or (other.op == "get_attr" and isinstance(recording.values[other], Tensor))
        for other in node.all_input_nodes
    )


def _used(recording: Recording, layer: dict[fx.Node, int], count: int) -> list[set[str]]:
    """Returns the names of the parameters and buffers that each layer uses; of tied ones the first."""
    module = recording.module
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    used: list[set[str]] = [set() for _ in range(count)]
    for node, index in layer.items():
        if node.op == "call_module":
            part = module.get_submodule(str(node.target))
            used[index].update(names[id(tensor)] for tensor in (*part.parameters(), *part.buffers()))
        for other in node.all_input_nodes:
            if other.op == "get_attr" and str(other.target) in names.values():
                used[index].add(str(other.target))
    return used


def _shared_states(module: nn.Module, called: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, str]]:
    """Yields the first and last of the layers that call a module with extra state, if several do, and why they stay.

    `called` are the paths of the modules that each layer calls. Two stages would each have a part of what it counts.
    """
    parts = [{id(part) for path in paths for part in module.get_submodule(path).modules()} for paths in called]
    for name, owner in stateful_modules(module):
        users = [index for index, part in enumerate(parts) if id(owner) in part]
        if len(users) > 1:
            yield users[0], users[-1], f"both call {name}, whose get_extra_state is one for all calls"


def _joined(recording: Recording, layer: dict[fx.Node, int], names: list[str], used: list[set[str]]) -> list[str]:
    """Returns for each layer why no cut may stand behind it, or ""."""
    joined = [""] * len(names)

    def join(indices: Iterable[int], why: str) -> None:
        together = sorted(indices)
        for index in range(together[0], together[-1]):
            joined[index] = joined[index] or why.format(first=names[together[0]], last=names[together[-1]])

    for _, written in recording.written:
        holders = [index for index, tensors_used in enumerate(used) if written in tensors_used]
        join(holders or [0], f"{{first}} and {{last}} share the buffer {written}, which changes")
    for node, index in layer.items():
        if not isinstance(recording.values[node], _SENDABLE):
            kind = type(recording.values[node]).__name__
            readers = [layer.get(user, len(names) - 1) for user in node.users]
            join([index, *readers], f"{{first}} hands {{last}} a {kind}, which cannot be sent")
    for writer, target in recording.writes:
        if target.op != "get_attr":
            together = [layer[node] for node in _bound(recording, writer, target) if node in layer]
            join([layer[writer], *together], "{last} needs what is written into a value of {first}")
    return joined


def _bound(recording: Recording, writer: fx.Node, target: fx.Node) -> set[fx.Node]:
    """Returns the nodes that must be where one writes into the value of another.

    A node that reads the written value later must be there too; where others share its memory, all of them.
    """
    order = {node: index for index, node in enumerate(recording.graph.nodes)}
    own = {memory_of(tensor) for tensor in tensors_of(recording.values[target]) if is_dense(tensor)}
    family = {
        node
        for node, value in recording.values.items()
        if order[node] < order[writer] and own & {memory_of(tensor) for tensor in tensors_of(value) if is_dense(tensor)}
    }
    readers = {user for node in family for user in node.users if order[user] > order[writer]}
    alone = all(set(user.all_input_nodes) & family == {target} for user in readers)
    return readers if alone else readers | family


def align(trained: Sequence[Layer], evaluated: Sequence[Layer]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """Finds for each layer of evaluation the layer of training that it stays with.

    What computes with a parameter is where the parameter is; what has none stays with the layer before it, unless it is
    a module that training has, too.

        training      stem │ blocks ─┬─ head          output, auxiliary
                           │         └─ auxiliary
        evaluation    stem │ blocks ─── head          output

    Returns the layers of training, between which there is no cut that evaluation cannot have, too; and the index of one
    of them for each of evaluation.
    """
    joined = [layer.joined for layer in trained]

    def join(first: int, last: int, why: str) -> None:
        for index in range(first, last):
            joined[index] = joined[index] or why

    places: list[int] = []
    for layer in evaluated:
        before = places[-1] if places else 0
        holders = _holders(trained, layer)
        join(min(holders, default=0), max(holders, default=0), f"{layer.name} needs all of it in evaluation")
        places.append(max(holders, default=before))
    furthest = 0
    for place, layer in zip(places, evaluated, strict=True):
        join(place, furthest, f"evaluation does {layer.name} after {trained[furthest].name}")
        furthest = max(furthest, place)
    for index, layer in enumerate(evaluated[:-1]):
        if layer.joined:
            first, last = sorted(places[index : index + 2])
            join(first, last, f"in evaluation, {layer.joined}")
    return joined_by(trained, joined), tuple(places)


def _holders(trained: Sequence[Layer], layer: Layer) -> list[int]:
    """Returns the indices of the layers of training that have what a layer of evaluation needs."""
    needed = {*layer.parameters, *layer.buffers}
    for index, other in enumerate(trained):
        if other.name == layer.name and needed <= {*other.parameters, *other.buffers}:
            return [index]
    # Of what several layers share any of them will do.
    firsts = (
        next(index for index, other in enumerate(trained) if name in (*other.parameters, *other.buffers))
        for name in needed
    )
    return sorted(set(firsts))
