"""Private names of other libraries: all that headrace uses stand here, and in no other module.

`NAMES` are found by an import when they are asked for first, `ATTRIBUTES` are read from objects. Each says what it is
for, and what headrace does `without` it: it takes a `substitute`, which gives the same results, or the feature is
refused by name when it is used. Nothing fails at import. `tests/test_internals.py` takes each of them away.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from headrace.internals.guards import PrivateAttribute, PrivateName, one_by_one

if TYPE_CHECKING:
    import torch
    from torch._C import _distributed_c10d
    from torch.nn import modules
    from torch.utils import _python_dispatch, _pytree
    from uvicorn.protocols.http import httptools_impl

    foreach_add = torch._foreach_add
    foreach_add_ = torch._foreach_add_
    foreach_clamp_max = torch._foreach_clamp_max
    foreach_clamp_min = torch._foreach_clamp_min
    foreach_copy_ = torch._foreach_copy_
    foreach_div_ = torch._foreach_div_
    foreach_lerp_ = torch._foreach_lerp_
    foreach_mul = torch._foreach_mul
    foreach_mul_ = torch._foreach_mul_
    foreach_norm = torch._foreach_norm
    foreach_sub = torch._foreach_sub
    foreach_sub_ = torch._foreach_sub_
    foreach_zero_ = torch._foreach_zero_
    BatchNorm = modules.batchnorm._BatchNorm
    ConvNd = modules.conv._ConvNd
    DropoutNd = modules.dropout._DropoutNd
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
    HttpToolsProtocol = httptools_impl.HttpToolsProtocol
    Store = _distributed_c10d.Store
    at_end_of_backward: Any
    backend_options: Any
    backend_plugins: Any
    compiler_backend: Any
    current_backward: Any
    dispatch_mode_at: Any
    dispatch_modes: Any
    function_mode_at: Any
    function_modes: Any
    functorch_active: Any
    global_post_hooks: Any
    global_pre_hooks: Any
    register_process_group: Any
    registered_operators: Any
    saved_tensors_hooks: Any
    strong_wolfe: Any
    unregister_process_group: Any

COMPILER, INDUCTOR = "torch._dynamo", "torch._inductor.compile_fx"
"""torch's compiler, which is imported late (see `machine/dynamo.py`), and its default backend."""
COMPILER_DISABLED = "__dynamo_disable"
"""Where `torch._compile` keeps what it calls in the place of a function that is not to be compiled."""
COMPILED_CALL = "_compiled_call_impl"
"""What `nn.Module.__call__` calls, where a module has it, instead of hooks and forward."""
COMPILED_FORWARD = "_torchdynamo_orig_callable"
"""The attribute of a compiled function that holds the function itself."""
COMPILED_MODULE = "_orig_mod"  # the submodule of a compiled module
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of hooks of an `nn.Module`."""
SPARSE_ARGUMENTS = {"aten::embedding": 4, "aten::_embedding_bag": 5, "aten::_embedding_bag_forward_only": 5}
"""The operations of embeddings: where `sparse` is among the arguments."""
TP_PLAN = "_tp_plan"  # where a model of the transformers library keeps its plan of tensor parallelism
SAVED = "_saved_"  # how an attribute is called that holds what a node of autograd's graph has saved
ABC_STATE = "_abc_impl"  # what Python keeps in an abstract class about its subclasses


def _foreach(*methods: str) -> Iterator[tuple[str, PrivateName]]:
    for method in methods:
        substitute = functools.partial(one_by_one, method)
        path = f"torch:_foreach_{method}"
        yield f"foreach_{method}", PrivateName(path, "one call for many tensors", "one by one, slower", substitute)


def _layers(*names: str) -> Callable[[], tuple[type, ...]]:
    return lambda: tuple(getattr(importlib.import_module("torch.nn"), name) for name in names)


_HOOKS_UNKNOWN = "an optimizer counts as one with hooks, whose steps are slower"
_FOLLOWS = "follows which values a model's forward looks at"
_STAGED = "refused: a pipeline of this model"

NAMES: Mapping[str, PrivateName] = {
    **dict(_foreach("add", "add_", "sub", "sub_", "mul", "mul_", "div_", "lerp_", "clamp_max", "clamp_min")),
    **dict(_foreach("copy_", "zero_", "norm")),
    "BatchNorm": PrivateName(
        "torch.nn.modules.batchnorm:_BatchNorm",
        "the base of layers with running statistics",
        "torch's own subclasses of it are known, those of users are not",
        _layers("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"),
    ),
    "ConvNd": PrivateName(
        "torch.nn.modules.conv:_ConvNd",
        "the base of convolutions",
        "torch's own subclasses of it are known",
        _layers(*(f"Conv{transpose}{dims}d" for transpose in ("", "Transpose") for dims in (1, 2, 3))),
    ),
    "DropoutNd": PrivateName(
        "torch.nn.modules.dropout:_DropoutNd",
        "the base of layers that draw random numbers",
        "torch's own subclasses of it are known",
        _layers("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"),
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "sees each operation on tensors",
        "refused: hr.fit, which looks at a model's operations before it starts,",
    ),
    **{
        f"tree_{verb}": PrivateName(
            f"torch.utils._pytree:tree_{verb}", "leaves of what users return", "refused: hr.TPU"
        )
        for verb in ("flatten", "unflatten")
    },
    "function_modes": PrivateName("torch._C:_len_torch_function_stack", _FOLLOWS, _STAGED),
    "function_mode_at": PrivateName("torch._C:_get_function_stack_at", _FOLLOWS, _STAGED),
    "dispatch_modes": PrivateName("torch._C:_len_torch_dispatch_stack", _FOLLOWS, _STAGED),
    "dispatch_mode_at": PrivateName("torch._C:_get_dispatch_stack_at", _FOLLOWS, _STAGED),
    "saved_tensors_hooks": PrivateName(
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "notices a call within such hooks",
        "they are not noticed",
        lambda: lambda _: None,
    ),
    "functorch_active": PrivateName(
        "torch._C:_are_functorch_transforms_active",
        "the faster sum of a layer's gradient does without transforms of functions",
        "they count as active: the slower sum",
        lambda: lambda: True,
    ),
    "current_backward": PrivateName(
        "torch._C:_current_graph_task_id", "tells one backward pass from the next", "refused: hr.setup"
    ),
    "at_end_of_backward": PrivateName(
        "torch.autograd.variable:Variable._execution_engine.queue_callback",
        "calls back at the end of a backward pass",
        "refused: hr.setup",
    ),
    "global_pre_hooks": PrivateName(
        "torch.optim.optimizer:_global_optimizer_pre_hooks",
        "an optimizer with hooks does more than its rule",
        _HOOKS_UNKNOWN,
        lambda: {0: None},
    ),
    "global_post_hooks": PrivateName(
        "torch.optim.optimizer:_global_optimizer_post_hooks",
        "an optimizer with hooks does more than its rule",
        _HOOKS_UNKNOWN,
        lambda: {0: None},
    ),
    "strong_wolfe": PrivateName(
        "torch.optim.lbfgs:_strong_wolfe",
        "the line search of torch.optim.LBFGS, number for number",
        "refused: hr.Sandblaster with line_search_fn='strong_wolfe'",
    ),
    **{
        f"{verb}_process_group": PrivateName(
            f"torch._C._distributed_c10d:_{verb}_process_group", "names the ranks of a mesh", "refused: hr.FullySharded"
        )
        for verb in ("register", "unregister")
    },
    "backend_plugins": PrivateName(
        "torch.distributed:Backend._plugins",
        "collectives of packages, such as torch_tpu",
        "there are those of torch itself alone",
        dict,
    ),
    "backend_options": PrivateName(
        "torch._C._distributed_c10d:_DistributedBackendOptions",
        "what the collectives of a package connect by",
        "refused: workers on devices of such a package",
    ),
    "compiler_backend": PrivateName(
        "torch._dynamo.backends.registry:lookup_backend", "compiles a whole step", "refused: hr.TPU"
    ),
    "registered_operators": PrivateName(
        "torch._C:_dispatch_get_all_op_names",
        "declares torchvision's operators once",
        "refused: models of a torchvision whose library cannot be loaded",
    ),
    "HttpToolsProtocol": PrivateName(
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol",
        "limits connections, and how long a request may take to come",
        "refused: the server of `headrace serve` and `headrace watch`",
    ),
}
"""By the name under which this module has it."""

_TENSOR, _MODULE, _OPERATOR = "torch:Tensor", "torch.nn:Module", "torch._ops:OpOverload"
_BACKEND = "torch._C._distributed_c10d:Backend"

version = PrivateAttribute("_version", _TENSOR, "counts what is written to a tensor", "following writes to tensors")
base = PrivateAttribute("_base", _TENSOR, "the tensor that a view is of", "hr.FullySharded")
gradient_hooks = PrivateAttribute("_backward_hooks", _TENSOR, "hooks see gradients", "hr.Pipeline")
accumulation_hooks = PrivateAttribute("_post_accumulate_grad_hooks", _TENSOR, "hooks see gradients", "hr.Pipeline")
sparse_values = PrivateAttribute("_values", _TENSOR, "the bytes of a sparse tensor", "hr.Pipeline with sparse tensors")
storage_address = PrivateAttribute(
    "_cdata", "torch:UntypedStorage", "tells whether tensors share memory, also memory of no bytes", "hr.Pipeline"
)
local_part = PrivateAttribute(
    "_local_tensor", "torch.distributed.tensor:DTensor", "this rank's part, without a graph", "hr.FullySharded"
)
parameters = PrivateAttribute("_parameters", _MODULE, "a module's parameters, by name", "models of modules")
buffers = PrivateAttribute("_buffers", _MODULE, "a module's buffers, by name", "models of modules")
children = PrivateAttribute("_modules", _MODULE, "a module's submodules, by name", "models of modules")
call_of = PrivateAttribute("_call_impl", _MODULE, "what a module's call does", "hr.Pipeline")
checkpointed = PrivateAttribute(
    "_checkpoint_without_reentrant_generator",
    "torch.utils:checkpoint",
    "a pipeline recomputes by itself",
    "hr.Pipeline of a model that recomputes",
    newer="_checkpoint_without_reentrant_generator_impl",
)
truncated_normal = PrivateAttribute("_no_grad_trunc_normal_", "torch.nn:init", "how a weight begins", "trunc_normal_")
convolution = PrivateAttribute("_conv_forward", "torch.nn:Conv2d", "a part of a convolution", "hr.TensorParallel")
one_projection = PrivateAttribute(
    "_qkv_same_embed_dim", "torch.nn:MultiheadAttention", "one weight", "hr.TensorParallel"
)
step_pre_hooks = PrivateAttribute("_optimizer_step_pre_hooks", "torch.optim:Optimizer", "see steps", "this optimizer")
step_post_hooks = PrivateAttribute("_optimizer_step_post_hooks", "torch.optim:Optimizer", "see steps", "this optimizer")
schema = PrivateAttribute("_schema", _OPERATOR, "whether an operation writes", "following writes to tensors")
kernels_found = PrivateAttribute("_dispatch_cache", _OPERATOR, "forgets a kernel", "exporting recurrent layers")
forward_level = PrivateAttribute(
    "_current_level", "torch.autograd:forward_ad", "derivatives in the forward direction", "gradients of a layer"
)
gather_into = PrivateAttribute("_allgather_base", _BACKEND, "gathers into one tensor", "an exchange of accelerators")
begin_batch, end_batch = (
    PrivateAttribute(f"_{verb}_coalescing", _BACKEND, "makes calls one operation", "hr.Pipeline on accelerators")
    for verb in ("start", "end")
)
scatter_sums = PrivateAttribute("_reduce_scatter_base", _BACKEND, "sums the parts of one tensor", "hr.FullySharded")
group_timeout = PrivateAttribute(
    "_timeout", f"{_BACKEND}.Options", "how long a call may take", "an exchange of accelerators"
)
fingerprint = PrivateAttribute("_fingerprint", "datasets:Dataset", "tells data sets apart", "a Hugging Face data set")

_HOOKS = tuple(PrivateAttribute(name, _MODULE, "hooks see whole values", "models of modules") for name in MODULE_HOOKS)
forward_hooks, forward_pre_hooks, backward_hooks, backward_pre_hooks = _HOOKS

ATTRIBUTES = tuple(value for value in globals().values() if isinstance(value, PrivateAttribute))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = NAMES[name].find()
        return found


def module_hooks(module: Any) -> bool:
    """Returns whether an `nn.Module` has hooks that run around its forward or backward."""
    return any(hooks(module) for hooks in _HOOKS)


def hooks_of_all_modules() -> bool:
    """Returns whether there are hooks that run around each `nn.Module`."""
    shared = vars(importlib.import_module("torch.nn.modules.module"))
    return any(shared.get(f"_global{name}", True) for name in MODULE_HOOKS)


def compiler_errors() -> tuple[tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """Returns those of torch's compiler that say it cannot compile, and that of the model's own code; known ones."""
    dynamo, inductor = (importlib.import_module(f"torch.{name}.exc") for name in ("_dynamo", "_inductor"))

    def present(module: Any, *names: str) -> tuple[type[Exception], ...]:
        return tuple(getattr(module, name) for name in names if name in vars(module))

    cannot = present(dynamo, "TorchDynamoException")
    cannot += present(inductor, "CppCompileError", "InvalidCxxCompiler", "OperatorIssue")
    return cannot, present(dynamo, "ObservedException")


def inductor() -> Any:
    """Returns the configuration of torch's code generator."""
    return importlib.import_module("torch._inductor.compile_fx").config


def without_compiler(mode: type) -> type:
    """Keeps torch from importing its compiler, for seconds, by what it has put around a dispatch mode's method."""
    dispatch: Any = mode.__dict__["__torch_dispatch__"]
    setattr(mode, "__torch_dispatch__", getattr(dispatch, "__wrapped__", dispatch))  # noqa: B010
    return mode


def frames_of_threads() -> Mapping[int, FrameType]:
    """Returns the innermost frame of each thread of this process, by its ident; of none where Python does not tell."""
    frames: Callable[[], Mapping[int, FrameType]] = getattr(sys, "_current_frames", dict)
    return frames()


def flight_record(backend: str) -> bytes:
    """Returns what torch's flight recorder holds of a backend's collectives in this process, pickled; b"" for none."""
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump: Any = getattr(c10d, f"_dump_{backend}_trace", None) or getattr(c10d, "_dump_fr_trace", bytes)
    return bytes(dump())


def name_ranks(mesh: Any, name: str, ranks: Any) -> None:
    """Lets a mesh of one dim know its ranks, a process group, by a name."""
    register: Any = NAMES["register_process_group"].find()
    register(name, ranks)
    mesh._dim_group_names = [name]
    # torch's table of names does not keep it.
    mesh._pg_registry[name] = ranks


def replace_gathered(part: Any, made: Mapping[int, Any]) -> None:
    """Puts others in the places of what a unit of `fully_shard` has gathered, by their ids, from its next gathering."""
    for group in part._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            each._unsharded_param = made.get(id(each._unsharded_param), each._unsharded_param)


def register_outputs(model: Any) -> None:
    """Tells the transformers library what it may record of a model's forward, as constructors do in their process."""
    table: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if table is not None:
        table[model] = model._can_record_outputs


def set_parameters(module: Any, named: dict[str, Any]) -> None:
    """Gives an `nn.Module` other parameters, or none, without a check."""
    vars(module)["_parameters"] = named


def share_state(module: Any, other: Any) -> None:
    """Lets an `nn.Module` have the parameters, buffers and submodules of another."""
    vars(module).update({name: vars(other)[name] for name in ("_parameters", "_buffers", "_modules")})


def compiler_place(module: Any) -> None:
    """Makes a module the attribute of torch that is its compiler; None for no such attribute."""
    torch: Any = importlib.import_module("torch")
    if module is None:
        del torch._dynamo
    else:
        torch._dynamo = module


def end_interpreter() -> None:
    """Does what the interpreter does at its end, which a fork of the fork server does not reach."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
