"""Which layers of a model can be split, and which must stay as they are; what functions do to slices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from headrace import internals
from headrace.hooks import hooked_parameters
from headrace.internals import ConvNd
from headrace.tensor_parallel.layers import is_transposed
from headrace.tensor_parallel.rules import Splittable

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
