"""What a model's forward does, recorded while it runs on a few examples.

`torch.fx` hands proxies through forward and writes down what is done to them. Here each proxy also knows its value for
the examples, so that more models can be recorded as they are: `if x.dim() == 3`, `len(x)`, `isinstance(x, Tensor)`,
loops over a shape. What such a question was answered with becomes a guard that every later run checks. A question about
the data itself (`if x.sum() > 0`) has no answer that holds for all batches: the module that asks is kept whole.
"""

from __future__ import annotations

import builtins
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import checkpoint

from headrace import internals
from headrace.devices import autocast_states
from headrace.errors import in_one_line
from headrace.pipeline.trace.frames import frames_cleared, functions_with_backward, running
from headrace.pipeline.trace.proxies import item_of, proxy_of, value_of
from headrace.pipeline.trace.recorded_forward import Recording, Untraceable, answer, execute
from headrace.training.user_code.trial import attribute_tables, drawn
from headrace.trees import map_leaves, tensors_of

_LOOKED_INTO = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
"""Of torch's own modules, those that only call others."""

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "zeros")
"""Functions of torch that make tensors of numbers, among which may be proxies."""

_SHAPES = {getattr, len, "dim", "is_floating_point", "ndimension", "nelement", "numel", "size", "stride"}
"""What may be asked of a tensor whatever the data is."""

_len = len
"""The builtin, not what replaces it during recording."""


def record(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], whole: tuple[type[nn.Module], ...] = ()
) -> Recording:
    """Records `module(*args, **kwargs)`.

    Buffers and random numbers change as in any forward. Modules of the types `whole` are not looked into. Raises an
    `Untraceable` with the module to keep whole.
    """
    if isinstance(module, torch.jit.ScriptModule) or internals.COMPILED_MODULE in internals.children(module):
        raise Untraceable(module, "it is a ScriptModule, or compiled as a whole")
    if internals.forward_hooks(module) or internals.forward_pre_hooks(module):
        raise Untraceable(module, "it has forward hooks, which would see no forward; register them on its layers")
    if internals.backward_hooks(module) or internals.backward_pre_hooks(module):
        raise Untraceable(module, "it has backward hooks, which would see no backward; register them on its layers")
    recorder = Recorder(module, args, kwargs, whole)
    try:
        with frames_cleared(), recorder.patched():
            recorder.trace(module)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(module, in_one_line(error)) from error
    finally:
        recorder.held.restore()
    return recorder.recording


class Recorder(fx.Tracer):
    """Makes nodes of the operations on its proxies, and runs them; see `record`."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], whole: tuple[type[nn.Module], ...]
    ) -> None:
        super().__init__(autowrap_functions=(len, *(getattr(torch, name) for name in _FACTORIES)))
        self._autowrap_search += [builtins, torch]
        self._bound = inspect.signature(module.forward).bind(*args, **kwargs)
        self._whole = whole
        self._owners = [module]
        self._busy = False
        self._functions = functions_with_backward()
        self._thread = threading.get_ident()
        self._placed: Tensor | None = None
        self._autocast = autocast_states()
        self._drawn = drawn()
        self._names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._buffers = [(name, buffer) for name, buffer in module.named_buffers()]
        self._versions: list[tuple[fx.Node | str, Tensor, int]] = [
            (n, b, internals.version(b)) for n, b in self._buffers
        ]
        self._attributes: dict[int, fx.Proxy] = {}
        self.held = _Attributes(module)
        self._data: set[fx.Node] = set()
        self.recording = Recording(module)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Lets proxies into `training` and functions with their own backward: torch has no hooks for these."""
        apply = vars(torch.autograd.Function)["apply"]
        keep = internals.checkpointed(checkpoint)

        def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
            if function is checkpoint.CheckpointFunction and self._listens():
                self.recording.recomputes = True
                return args[0](*args[2:])
            if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
                return self.create_proxy("call_function", function.apply, args, kwargs)
            return apply.__get__(None, function)(*args, **kwargs)

        def training(module: nn.Module) -> Any:
            return self._training(module) if self._listens() else module.__dict__["training"]

        def flag(module: nn.Module, mode: bool) -> None:
            module.__dict__["training"] = mode

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not self._listens():
                return keep(*args, **kwargs)
            self.recording.recomputes = True
            return (None for _ in range(1))

        with ExitStack() as stack:
            stack.enter_context(_replaced(nn.Module, "training", property(training, flag)))
            stack.enter_context(_replaced(torch.autograd.Function, "apply", classmethod(applied)))
            # Its own forward is recorded as if it were not there: a pipeline recomputes by itself.
            stack.enter_context(_replaced(checkpoint, internals.checkpointed.name_in(checkpoint), checkpointed))
            stack.enter_context(torch.enable_grad())
            yield

    def _listens(self) -> bool:
        """Returns whether what is called now is recorded: not by other threads, nor for a value of what is."""
        return not self._busy and threading.get_ident() == self._thread

    def refuse(self, reason: str) -> NoReturn:
        """Raises `Untraceable` for the module whose forward runs."""
        raise Untraceable(self._owners[-1], reason)

    def settle(self, proxy: fx.Proxy) -> Any:
        """Returns a proxy's value, and makes a guard of it: every later run must have the same."""
        value = value_of(proxy)
        if isinstance(value, Tensor) or proxy.node in self._data:
            self.refuse("what it does depends on the data: it asks for the value of a tensor")
        self.recording.guards[proxy.node] = value
        return value

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        self.recording.graph = self.graph

        def place(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                self.recording.settled[name] = leaf
                return leaf
            self._placed = leaf
            proxy = self.create_proxy("placeholder", name, (), {})
            self.recording.inputs[name] = proxy.node.name
            return proxy

        self._bound.arguments.update(
            {name: map_leaves(place, value, name) for name, value in self._bound.arguments.items()}
        )
        leaves: list[Any] = []

        def number(name: str, leaf: Any) -> int:
            leaves.append(leaf)
            return _len(leaves) - 1

        def run() -> list[Any]:
            output = root_fn(self.root, *self._bound.args, **self._bound.kwargs)
            self._check(self.root)
            self.recording.output = map_leaves(number, output)
            return leaves

        return run, []

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._listens():
            return forward(*args, **kwargs)
        self._check()
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            self._check(m)
            output = self.create_proxy("call_module", path, args, kwargs)
            self.held.keep(m)
            return output
        self._owners.append(m)
        try:
            output = forward(*args, **kwargs)
            self._check(m)
            return output
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(m, in_one_line(error)) from error
        finally:
            self._owners.pop()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if (
            isinstance(m, (*self._whole, torch.jit.ScriptModule))
            or internals.forward_hooks(m)
            or internals.forward_pre_hooks(m)
        ):
            return True
        return type(m) not in _LOOKED_INTO and super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        read = isinstance(attr_val, Tensor) and not isinstance(attr_val, fx.Proxy) and self._listens()
        return self._attribute(attr_val) if read else attr_val

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            return self._attribute(a).node
        if is_dataclass(a) and not isinstance(a, type):
            parts = {part.name: getattr(a, part.name) for part in fields(a)}
            return self.create_proxy("call_function", type(a), (), parts).node
        return super().create_arg(a)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a proxy, or a tuple, list or dict of them."""
        return self._unpacked(super().create_proxy(*args, **kwargs))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        recording = self.recording
        self._check()
        if running(self._functions):
            # Where its `apply` was bound before it was patched: what forward does would be differentiated in its place.
            self.refuse("it calls a function that has its own backward by a name of its `apply`")
        recording.owners[node] = self._owners[-1]
        if not torch.is_grad_enabled():
            recording.gradless.add(node)
        if node.op == "placeholder":
            value: Any = self._placed
        else:
            args, kwargs = map_arg((node.args, node.kwargs), recording.values.__getitem__)
            self._busy = True
            try:
                with torch.no_grad():
                    value = execute(recording, node, args, kwargs)
            finally:
                self._busy = False
        recording.values[node] = value
        self._drawn = drawn()
        self._follow(node, value)
        return proxy_of(node, self, value)

    def _follow(self, node: fx.Node, value: Any) -> None:
        """Notes what a node has written to, and whether it tells the data."""
        for index, (what, tensor, version) in enumerate(self._versions):
            if internals.version(tensor) != version:
                self._versions[index] = (what, tensor, internals.version(tensor))
                if isinstance(what, str):
                    self.recording.written.append((node, what))
                else:
                    self.recording.writes.append((node, what))
        self._versions += [(node, tensor, internals.version(tensor)) for tensor in tensors_of(value)]
        if not isinstance(value, Tensor):
            told = node.target not in _SHAPES and node.op != "get_attr"
            values = self.recording.values
            if any(
                other in self._data or (told and isinstance(values[other], Tensor)) for other in node.all_input_nodes
            ):
                self._data.add(node)

    def _unpacked(self, proxy: fx.Proxy) -> Any:
        value = value_of(proxy)
        if value is None:
            self.recording.guards[proxy.node] = None
            return None
        if type(value) is dict:
            keys: Any = value
        elif isinstance(value, tuple | list) and not isinstance(value, torch.Size):
            keys = range(len(value))
        else:
            return proxy
        self.recording.guards[proxy.node] = answer(value)
        items = [item_of(proxy, key) for key in keys]
        if type(value) is dict:
            return dict(zip(keys, items, strict=True))
        make: Callable[[Any], Any] = getattr(type(value), "_make", type(value))
        return make(items)

    def _attribute(self, tensor: Tensor) -> fx.Proxy:
        if id(tensor) not in self._attributes:
            name = self._names.get(id(tensor))
            if name is None:
                if tensor.requires_grad:
                    self.refuse("it computes with parameters that it has not read as self.name")
                name = f"constant {len(self.recording.constants)}"
                self.recording.constants[name] = tensor
            self._attributes[id(tensor)] = super().create_proxy("get_attr", name, (), {}, name=name.replace(".", "_"))
        return self._attributes[id(tensor)]

    def _training(self, module: nn.Module) -> Any:
        path = (self.submodule_paths or {}).get(module)
        if path is None or isinstance(self._owners[-1], _LOOKED_INTO):
            # torch's own modules ask in order to choose between kernels with the same result.
            return module.__dict__["training"]
        return self.create_proxy("get_attr", f"{path}.training" if path else "training", (), {})

    def _check(self, module: nn.Module | None = None) -> None:
        if autocast_states() != self._autocast:
            self.refuse("it switches autocast")
        if drawn() != self._drawn:
            self.refuse("it draws random numbers that decide what it does, or that no input has a part in")
        if module is not None and (name := self.held.changed(module)) is not None:
            self.refuse(f"it sets {name} in its attributes")


class _Attributes:
    """What attributes of a module hold, and of those in it: recorded code must not change it, as a graph has none.

    A tensor that is added to a table (a cache) is a constant, which is compared with that of other examples.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.keep(module)

    def keep(self, module: nn.Module) -> None:
        """Notes what they hold now."""
        self._tables |= {id(table): (table, held) for table, held in attribute_tables(module)}

    def changed(self, module: nn.Module) -> str | None:
        """Returns the name of an attribute, or the key of a table's item, that is another one; None where none is."""
        for table, held in attribute_tables(module):
            _, before = self._tables.get(id(table), (table, held))
            for name in held.keys() | before.keys():
                now, then = (each.get(name, self) for each in (held, before))
                is_proxy = isinstance(now, fx.Proxy)
                if is_proxy and value_of(now) is then:
                    table[name] = then  # what is written in place is assigned, too: self.calls += 1
                    continue
                cached = then is self and isinstance(now, Tensor) and not is_proxy and "training" not in table
                if now is not then and not cached:
                    return str(name)
        return None

    def restore(self) -> None:
        """Takes proxies out of them."""
        for table, held in self._tables.values():
            table.clear()
            table.update(held)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts something in the place of an attribute of a class or a module, for all threads of the process."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
