"""What a model does with its values, as far as it matters to splitting its layers: read from a traced graph."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from headrace import internals
from headrace.hooks import hooked_parameters
from headrace.internals import ConvNd
from headrace.modules import TRACING, without_data
from headrace.tensor_parallel.layers import is_transposed
from headrace.tensor_parallel.rules import Splittable, ValueStep

_ELEMENTWISE = frozenset(
    (
        *("relu", "relu6", "leakyrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid", "identity"),
        *("softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "exp", "log", "square"),
        *("sqrt", "rsqrt", "abs", "neg", "negative", "positive", "erf", "pow", "reciprocal", "clamp", "clip"),
        *("add", "mul", "multiply", "sub", "subtract", "div", "divide", "truedivide", "radd", "rmul", "rsub"),
        *("truediv", "contiguous", "clone", "to", "type", "float", "double", "half", "bfloat16"),
    )
)
_POOLS = frozenset(
    f"{adaptive}{kind}pool{dims}d" for adaptive in ("", "adaptive") for kind in ("max", "avg") for dims in (1, 2, 3)
)
_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def step_of(name: str) -> str:
    """Returns what a function of torch or `operator`, a method of tensors or a layer of torch does, by its name.

    That is "elementwise", "pool" or "other". The layer LeakyReLU does what leaky_relu does, and so does leaky_relu_,
    which works in place.
    """
    plain = name.replace("_", "").lower()
    return "elementwise" if plain in _ELEMENTWISE else "pool" if plain in _POOLS else "other"


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module's forward is a program of `torch.compile`."""
    own = vars(module)
    # By names alone, because importing the compiler takes a second.
    compiled_forward = getattr(own.get("forward"), internals.COMPILED_FORWARD, None) is not None
    return (
        type(module).__name__ == "OptimizedModule" or own.get(internals.COMPILED_CALL) is not None or compiled_forward
    )


def has_hooks(module: nn.Module) -> bool:
    """Returns whether hooks of the user's see values or gradients of a module, or its forward is its own."""
    hooked = internals.module_hooks(module) or hooked_parameters(dict(module.named_parameters()))
    return bool(hooked) or "forward" in vars(module)


def splittable(module: nn.Module) -> dict[str, tuple[nn.Module, Splittable]]:
    """Returns the layers of a model whose form can be split, by name, in its order."""
    found = {}
    inside = {id(layer.out_proj) for layer in module.modules() if isinstance(layer, nn.MultiheadAttention)}
    for name, layer in module.named_modules():
        if id(layer) not in inside and (form := _form(layer)):
            found[name] = (layer, form)
    return found


def obstacles(module: nn.Module, found: Mapping[str, tuple[nn.Module, Splittable]]) -> dict[str, str]:
    """Returns why those of the layers that must stay as they are cannot be split, by name."""
    compiled = [f"{name}." * bool(name) for name, part in module.named_modules() if is_compiled(part)]
    reasons = {}
    for name, (layer, form) in found.items():
        parts = list(layer.modules())
        if any(name.startswith(prefix) for prefix in compiled):
            # The compiler would trace into the collectives of split layers.
            reasons[name] = "is inside a compiled module"
        elif form.sort != "attention" and not {"weight"} <= internals.parameters(layer).keys() <= {"weight", "bias"}:
            others = [each for each in internals.parameters(layer) if each not in ("weight", "bias")]
            reasons[name] = f"computes its weight of {' and '.join(others)} (weight_norm, spectral_norm or the like)"
        elif any(has_hooks(part) for part in parts):
            reasons[name] = "has hooks, or a forward of its own, which would see a part of its values"
        elif any(len(internals.buffers(part)) for part in parts):
            reasons[name] = "has buffers of its own"
    return reasons


def _form(layer: nn.Module) -> Splittable | None:
    # The forward of a subclass may do more.
    if type(layer) is nn.Linear:
        return Splittable("linear", layer.in_features, layer.out_features)
    if is_transposed(layer):
        inputs, outputs = internals.parameters(layer)["weight"].shape
        return Splittable("linear", inputs, outputs)
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert isinstance(layer, ConvNd)
        if layer.groups > 1:
            return Splittable("grouped", 0, layer.groups)
        return Splittable("convolution", layer.in_channels, layer.out_channels)
    if type(layer) is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq:
        return Splittable("embedding", layer.num_embeddings, layer.embedding_dim)
    if type(layer) is nn.MultiheadAttention:
        plain = internals.one_projection(layer) and layer.bias_k is None and not layer.add_zero_attn
        return Splittable("attention", 0, layer.num_heads) if plain else None
    return None


def analyze_graph(module: nn.Module, layers: Collection[str], parts: Collection[str]) -> list[ValueStep]:
    """Returns the steps of a model; of one that cannot be traced, those of its children.

    `layers` may be split; `parts` are modules that compute a part of the batch on every device.
    """
    tensors = (*module.parameters(), *module.buffers())
    # A copy without data, because to trace is to run: what forward changes would be changed.
    try:
        empty = copy.deepcopy(module, {id(tensor): without_data(tensor) for tensor in tensors})
    except Exception:  # a user's module may not be copyable
        return []
    names = {
        empty.get_submodule(name): (does, name) for does, each in (("layer", layers), ("part", parts)) for name in each
    }
    steps: list[ValueStep] = []
    with TRACING:
        _look_into(empty, "", names, steps)
    for name, block in module.named_modules():
        if isinstance(block, _BLOCKS):
            _look_at_block(name, block, steps)
    return steps


_Names = Mapping[nn.Module, tuple[str, str]]
"""What a module does as one step, and its name."""


def _look_into(module: nn.Module, path: str, names: _Names, steps: list[ValueStep]) -> None:
    try:
        graph = _Tracer(names).trace(module)
    except Exception:  # a user's forward may not accept proxies
        for name, child in module.named_children():
            if child not in names and any(layer in names for layer in child.modules()):
                _look_into(child, f"{path}{name}.", names, steps)
        return
    index: dict[fx.Node, int] = {}
    for node in graph.nodes:
        layer = module.get_submodule(node.target) if node.op == "call_module" else None
        does, name = _reads(node, layer, names)
        inputs = tuple(index[each] for each in node.all_input_nodes)
        index[node] = len(steps)
        steps.append(ValueStep(does, f"{path}{node.target}" if does == "dropout" else name, inputs))


def _reads(node: fx.Node, layer: nn.Module | None, names: _Names) -> tuple[str, str]:
    """Returns what a node does, and the name of the layer that does it."""
    if layer is not None:
        if layer in names:
            return names[layer]
        if type(layer) is nn.Dropout:
            return "dropout", ""
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            return "flatten", ""
        return _step_of_layer(layer), ""
    if node.target in (torch.flatten, "flatten") and node.args[1:] == (1,) and not node.kwargs:
        return "flatten", ""
    if node.op not in ("call_function", "call_method"):
        return "other", ""
    return step_of(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")), ""


def _step_of_layer(layer: nn.Module) -> str:
    kind = type(layer)
    return step_of(kind.__name__) if kind.__module__.startswith("torch.nn.modules.") else "other"


def _look_at_block(name: str, block: nn.Module, steps: list[ValueStep]) -> None:
    """Adds what torch's transformer layers do between their dense layers, which cannot be traced."""
    path, start = f"{name}." * bool(name), len(steps)
    activation: Any = block.activation
    layer = isinstance(activation, nn.Module)
    does = _step_of_layer(activation) if layer else step_of(getattr(activation, "__name__", ""))
    steps += [
        ValueStep("other"),
        ValueStep("layer", f"{path}linear1", (start,)),
        ValueStep(does, inputs=(start + 1,)),
        ValueStep("dropout", f"{path}dropout", (start + 2,)),
        ValueStep("layer", f"{path}linear2", (start + 3,)),
        ValueStep("other", inputs=(start + 4,)),
    ]


class _Tracer(fx.Tracer):
    """Traces into all modules but `leaves`."""

    def __init__(self, leaves: _Names) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._leaves or super().is_leaf_module(m, module_qualified_name)
