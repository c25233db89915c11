"""Records what a constructor does to its large tensors, which get no memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace import internals
from headrace.machine.allocator import give_back
from headrace.training.deferred.record import Entry, Region, Tape
from headrace.trees import map_leaves, map_tensors, tensors_of

_IN_PLACE = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")
_DRAWING = (*_IN_PLACE, "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
"""Operations whose count of random numbers follows from form and type alone; `bernoulli_` does with a number."""
_OVERWRITING = (*_IN_PLACE, "zero_", "fill_", "copy_")
"""Operations whose result has nothing of what was there."""
_WITH_GENERATOR = {"default": "generator", "low": "low_generator"}
"""The overload of an operation that takes a generator, by that which takes none."""
_ESCAPES = (
    "numpy",
    "__array__",
    "data_ptr",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "share_memory_",
    "__reduce_ex__",
)
"""Methods that give memory away, to which code may write where no operation is seen."""
_HOST, _META = torch.device("cpu"), torch.device("meta")
_CONSTANT_BYTES = 1 << 20
"""Of a tensor with memory that goes into one without: more is not copied."""


class Unrecordable(Exception):
    """A constructor does what cannot be recorded; says what."""


class Log:
    """What is known of an earlier recording of the same constructor: generators after draws, numbers that were read."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []

    def reader(self) -> Iterator[tuple[str, Any]]:
        return iter(self.items)


@internals.without_compiler
class Deferring(internals.TorchDispatchMode):
    """Sees each operation: gives large new tensors no memory, and records what is done to them.

    Attributes:
        least: bytes of a tensor that gets no memory.
        problem: why the recording cannot be used; "" if it can.
    """

    def __init__(self, record: Tape, least: int, log: Log, known: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.least = least
        self.problem = ""
        self.inside = False
        self._log = log
        self._known = log.reader() if known else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records what this thread does in the body, of which another thread that it starts would show nothing."""
        owner, start = threading.get_ident(), threading.Thread.start

        def noted(thread: threading.Thread) -> None:
            if threading.get_ident() == owner:
                self.fail("it starts a thread")
            start(thread)

        threading.Thread.start = noted  # type: ignore[assignment,method-assign]
        try:
            with AsWithMemory(self.record, self.fail, lambda: self.inside), self:
                yield
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]

    def fail(self, problem: str) -> Unrecordable:
        self.problem = self.problem or problem
        return Unrecordable(problem)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.inside = self.inside, True
        try:
            return self._seen(func, args, kwargs or {})
        finally:
            self.inside = before

    def _seen(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of((args, kwargs))
        if any(map(self.record.has, tensors)):
            return self._deferred(func, args, kwargs)
        if not tensors and (made := self._made(func, args, kwargs)) is not None:
            return made
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns a new tensor without memory; None where it is small, or no operation makes it by itself."""
        names = {each.name for each in internals.schema(func).arguments}
        device, layout = kwargs.get("device"), kwargs.get("layout")
        usual = layout in (None, torch.strided) and not kwargs.get("pin_memory")
        # That of the meta device is asked for by an operation on one without memory.
        if "device" not in names or device not in (None, _HOST, _META) or not usual:
            return None
        try:
            result = func(*args, **{**kwargs, "device": _META, **_no_generator(kwargs)})
        except (NotImplementedError, RuntimeError, TypeError):
            return None
        if not isinstance(result, Tensor) or (device != _META and result.untyped_storage().nbytes() < self.least):
            return None
        draws = _draws(func)
        if draws is None:
            return None
        self._note(func, args, kwargs, result, (), draws)
        return result

    def _deferred(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        written = written_to(func, args, kwargs)
        name = internals.schema(func).name.removeprefix("aten::")
        for each in tensors_of((args, kwargs)):
            if each.layout is not torch.strided or each.is_conj() or each.is_neg() or each.is_quantized:
                raise self.fail(f"{name} of a tensor that is not dense and real")
            if each.is_meta and not self.record.has(each):
                raise self.fail(f"{name} of a tensor of the meta device")
        draws = _draws(func)
        known = list(map(self.record.has, written))
        if any(known) and (draws is None or not all(known)):
            raise self.fail(f"{name}, of which the random numbers or the tensors that it writes to are not all known")
        if draws is None or not all(known):
            return self._read(func, args, kwargs)
        if name in ("resize_", "set_", "_resize_output_"):
            raise self.fail(f"{name} of a large tensor")
        try:
            result = func(*map_tensors(_without_memory, args), **_forms(kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if written:
                raise self.fail(f"{name}, which does not run without memory ({type(error).__name__})") from error
            return self._read(func, args, kwargs)
        made = tensors_of(result)
        if not made and not written:
            return self._read(func, args, kwargs)
        if any(not each.is_meta for each in made):
            return self._read(func, args, kwargs)
        if written or not all(map(self.record.has, made)):
            self._note(func, args, kwargs, result, written, draws)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, written: Any, draws: bool) -> None:
        """Adds an entry; generators are drawn from as if the tensors had memory."""
        name = internals.schema(func).name.removeprefix("aten::")
        state = self._drawn(func, args, kwargs) if draws else None
        made = tensors_of(result)
        fresh = frozenset(Region.of(each).storage for each in made if not self.record.has(each))
        places = [Region.of(each) for each in written]
        taken = [Region.of(each).storage for each in tensors_of((args, kwargs)) if self.record.has(each)]
        overwrites = None
        if name in _OVERWRITING and len(places) == 1 and places[0].dense:
            (place,) = places
            nbytes = torch.Size(place.size).numel() * place.dtype.itemsize
            if nbytes == self.record.bytes_of(place.storage) and taken.count(place.storage) == 1:
                overwrites = place.storage
        reads = frozenset(taken) - {overwrites}
        # A copy is asked for where the tensor is, and has memory then.
        there = {"device": _HOST} if kwargs.get("device") is not None else {}
        plain = {key: value for key, value in kwargs.items() if key != "generator"} | there
        entry = Entry(
            _with_generator(func) if draws else func,
            map_tensors(self._held, args),
            {key: map_tensors(self._held, value) for key, value in plain.items()},
            tuple(map(Region.of, made)),
            fresh,
            reads,
            overwrites,
            state,
        )
        self.record.add(entry, written, made)

    def _held(self, tensor: Tensor) -> Any:
        if self.record.has(tensor):
            return Region.of(tensor)
        if tensor.nbytes > _CONSTANT_BYTES:
            raise self.fail(f"{tensor.nbytes:,} bytes that it reads or computes go into a parameter")
        return tensor.detach().clone()

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Draws what the operation draws; returns the generator's state before it."""
        generator = kwargs.get("generator") or torch.default_generator
        if generator.device.type != "cpu":
            raise self.fail("a generator of another device")
        before = generator.get_state()
        if self._known is not None:
            generator.set_state(torch.frombuffer(bytearray(self._next("state")), dtype=torch.uint8))
        else:
            give_back()
            func(*map_tensors(_scratch, args), **kwargs)
            self._log.items.append(("state", generator.get_state().numpy().tobytes()))
        return before

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation with memory, of which a tensor with memory, a number or nothing comes."""
        if func.is_view or internals.schema(func).name == "aten::_to_copy":
            # Of what has memory it might be the same memory.
            raise self.fail(f"{func} of a large tensor")
        plain = not written_to(func, args, kwargs) and torch.Tag.nondeterministic_seeded not in func.tags
        if plain and self._known is not None and internals.schema(func).returns[0].type.kind() != "TensorType":
            return self._next("number")
        result = func(
            *map_tensors(self._real, args), **{key: map_leaves(self._leaf, each) for key, each in kwargs.items()}
        )
        if plain and not tensors_of(result):
            self._log.items.append(("number", result))
        return result

    def _next(self, kind: str) -> Any:
        found, value = next(self._known or iter(()), ("nothing", None))
        if found != kind:
            raise self.fail(f"this process asks for a {kind} where the launcher's recording has {found}")
        return value

    def _real(self, tensor: Tensor) -> Tensor:
        return self.record.value(Region.of(tensor)) if self.record.has(tensor) else tensor

    def _leaf(self, _: str, leaf: Any) -> Any:
        return self._real(leaf) if isinstance(leaf, Tensor) else leaf


class AsWithMemory(TorchFunctionMode):
    """Lets tensors without memory say that they are in host memory, as they are in a process that has all.

    `fail` makes the error of what cannot be followed; `inside` tells that a recorder asks.
    """

    def __init__(self, record: Tape, fail: Callable[[str], Exception], inside: Callable[[], bool]) -> None:
        super().__init__()
        self._record, self._fail, self._inside = record, fail, inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside():
            return func(*args, **(kwargs or {}))
        if kwargs and str(kwargs.get("device", "")).startswith("meta"):
            raise self._fail("it makes tensors on the meta device itself")
        if not args or not isinstance(args[0], Tensor) or not self._record.has(args[0]):
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu"):
            # It has no memory to be copied to the host, and is there already.
            return args[0] if name == "cpu" else func(*map(_elsewhere, args), **{**(kwargs or {}), **_place(kwargs)})
        if name == "__get__":
            owner = getattr(func, "__self__", None)
            if owner in _ANSWERS:
                return _ANSWERS[owner]
        elif name in _ESCAPES:
            raise self._fail(f"Tensor.{name}() of a large tensor")
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Any, Any] = {
    Tensor.is_meta: False,
    Tensor.is_cpu: True,
    Tensor.device: _HOST,
}


def written_to(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the arguments that an operation writes to."""
    arguments = internals.schema(func).arguments
    given = [
        *zip(arguments, args, strict=False),
        *((each, kwargs[each.name]) for each in arguments if each.name in kwargs),
    ]
    return [
        tensor
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_of(value)
    ]


def _draws(func: Any) -> bool | None:
    """Tells whether an operation draws random numbers; None where it cannot be told how many, or it takes no state."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = internals.schema(func)
    name = schema.name.removeprefix("aten::")
    fixed = name in _DRAWING or (name == "bernoulli_" and schema.overload_name == "float")
    return True if fixed and _with_generator(func) is not None else None


def _with_generator(func: Any) -> Any:
    if any(each.name == "generator" for each in internals.schema(func).arguments):
        return func
    other = _WITH_GENERATOR.get(internals.schema(func).overload_name or "default", "")
    packet = func.overloadpacket
    return getattr(packet, other) if other in packet.overloads() else None


def _no_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"generator": None} if kwargs.get("generator") is not None else {}


def _elsewhere(value: Any) -> Any:
    return _META if value in ("cpu", _HOST) else value


def _place(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    return {"device": _elsewhere(kwargs["device"])} if kwargs and "device" in kwargs else {}


def _forms(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: map_tensors(_without_memory, value) for key, value in kwargs.items()} | _no_generator(kwargs)


def _without_memory(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _scratch(tensor: Tensor) -> Tensor:
    """Returns memory of the same form, whose content does not matter."""
    if not tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
