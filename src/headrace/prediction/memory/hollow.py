"""Tensors without values: code runs as it would, and its memory is counted, but none of it is touched.

A hollow tensor is one of torch's own, on the CPU, whose memory is not written to, so that the system gives it no page.
What an operation makes of it has the shape that torch's meta kernel says, and is hollow, too. What is small and no
floating-point number (tokens, masks, positions) is computed, so that code may look at it.

    counted    what lives: all memory of tensors, as long as any object holds it
    not seen   what a kernel takes for itself, and what the C library keeps
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace import internals
from headrace.errors import JobError
from headrace.modules import is_dense
from headrace.trees import Wrapper, map_tensors, tensors_of

_COMPUTED_BYTES = 1 << 20
"""Up to so many, what has no hollow tensor in it and is no floating-point number is computed."""
_CHOOSES = {"topk", "argmax", "max"}
"""By which a router chooses experts: the places that they give are computed, as if it chose all of them in turn."""
_ASKED = {"_local_scalar_dense", "item", "is_nonzero"}
"""Operations whose result is a number of Python."""


@internals.without_compiler
class HollowMemory(internals.TorchDispatchMode):
    """While it is entered, tensors are hollow, and their bytes counted.

    Attributes:
        peak_bytes, peak_step: the most that lived at once since `restart`, and after which operation.
        host_bytes: the most that lived at once in the memory of an accelerator's host, which no other count has.
        find_hosted: returns what is there, made elsewhere; asked before a peak is noted.
        assumes: whether `topk` has chosen among tensors without values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, Allocation] = {}
        self._resized: list[Allocation] = []
        self._total = self._on_host = self.host_bytes = 0
        self._hosting, self._pinning = False, True
        self.find_hosted: Callable[[], Iterable[Tensor]] = tuple
        self._shared: set[int] = set()
        self.assumes = False
        self.restart()

    def restart(self, step: int = -1, look: Callable[[], object] = lambda: None) -> None:
        """Forgets the peak, and counts operations from now on; `look` is called after the one of number `step`."""
        self.peak_bytes = self.peak_step = self._step = 0
        self._looks_at, self._looks = step, look

    def share(self, nbytes: int) -> Tensor:
        """Returns memory that other processes see: it is mapped with all of its pages, whether or not they are used."""
        region = torch.empty(nbytes, dtype=torch.uint8)
        self._note(region, True)
        self._shared.add(_key(region))
        return region

    @contextmanager
    def hosting(self, pinned: bool = False) -> Iterator[None]:
        """While it is entered, what is made lies in the memory of the host, `pinned` or not."""
        before = self._hosting, self._pinning
        self._hosting, self._pinning = True, pinned
        try:
            yield
        finally:
            self._hosting, self._pinning = before

    def take_to_host(self) -> None:
        """Counts what `find_hosted` returns in the memory of the host."""
        for each in self.find_hosted():
            known = self._living.get(_key(each))
            if known is not None and not known.hosted:
                size = known.counted
                self._count(known, 0)
                known.hosted = True
                self._count(known, size)

    def is_hosted(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of the host."""
        known = self._living.get(_key(tensor))
        return known is not None and known.hosted

    def is_shared(self, key: int) -> bool:
        """Whether a storage is one that `share` has made."""
        return key in self._shared

    def is_parameter(self, key: int) -> bool:
        """Whether a storage has been a parameter's, also one that its module does not have at the moment."""
        return self._living[key].resized

    def living(self) -> dict[int, int]:
        """Returns the storages that live, by address, with their bytes; without those in the memory of the host."""
        self._measure()
        return {key: each.counted for key, each in self._living.items() if not each.hosted}

    def at(self, addresses: Iterable[int]) -> set[Allocation]:
        """Returns what lives at addresses: each itself, because another may have its address once it is gone."""
        return {self._living[each] for each in addresses if each in self._living}

    def lend(self, tensor: Tensor) -> None:
        """Takes a tensor that was made elsewhere as one without values, which does not count."""
        self._note(tensor, True)
        self._count(self._living[_key(tensor)], 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        for each in given:
            self._note(each, False)
        if any(map(self._is_hollow, given)):
            made, hollow = self._without_values(func, args, kwargs), True
        elif given or _on_meta(kwargs) or not _takes_device(func):
            made, hollow = func(*args, **kwargs), False
        else:
            made = self._without_values(func, args, kwargs)
            hollow = any(map(_is_value, tensors_of(made)))
            if not hollow:
                made = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if hollow and name in _CHOOSES:
            made = map_tensors(lambda each: _in_turn(each, internals.schema(func), args, kwargs), made)
            self.assumes = self.assumes or name == "topk"
        for each in tensors_of(made):
            self._note(each, hollow and (name not in _CHOOSES or each.is_floating_point()))
        self._look()
        return made

    def _without_values(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = func.__name__.partition(".")[0]
        if name in _ASKED:
            return _number(tensors_of(args)[0])
        if name == "equal":
            return True
        if func.is_view or _on_meta(kwargs) or name in ("set_", "resize_", "as_strided_", "detach_", "detach"):
            return func(*args, **kwargs)
        schema = internals.schema(func)
        written = [each.alias_info is not None and each.alias_info.is_write for each in schema.returns]
        if all(written) and tensors_of((args, kwargs)):
            return _written(schema, args, kwargs)
        try:
            named = map_tensors(_meta, dict(kwargs))
            if named.get("device") is not None or not tensors_of((args, kwargs)):
                named["device"] = torch.device("meta")
            shapes = func(*map_tensors(_meta, args), **named)
        except Exception as error:  # whatever a kernel raises that has none for shapes alone
            raise JobError(f"what memory {func} takes is not known without its values: {error!s:.200}") from error
        given = tensors_of((args, kwargs))
        return map_tensors(lambda each: _like(each, given), shapes)

    def _is_hollow(self, tensor: Tensor) -> bool:
        known = self._living.get(_key(tensor))
        return known is not None and known.hollow

    def _note(self, tensor: Tensor, hollow: bool) -> None:
        # One that is divided, or made of others, tells the size of the whole, and the memory is that of its parts.
        if not is_dense(tensor) or tensor.is_meta or isinstance(tensor, DTensor | Wrapper):
            return
        storage = tensor.untyped_storage()
        key = internals.storage_address(storage)
        known = self._living.get(key)
        if known is None:
            known = self._living[key] = Allocation(storage, hollow, lambda _: self._forget(key))
            known.hosted, known.pinned = self._hosting, self._pinning
            self._count(known, known.nbytes)
        elif hollow:
            known.hollow = True
        if not known.resized and isinstance(tensor, nn.Parameter):
            # torch's fully_shard lets go of a gathered unit by making its storage empty.
            known.resized = True
            self._resized.append(known)

    def _forget(self, key: int) -> None:
        self._count(self._living.pop(key), 0)
        self._shared.discard(key)

    def _count(self, storage: Allocation, nbytes: int) -> None:
        if storage.hosted:
            self._on_host += storage.on_host(nbytes) - storage.on_host(storage.counted)
            self.host_bytes = max(self.host_bytes, self._on_host)
        else:
            self._total += nbytes - storage.counted
        storage.counted = nbytes

    def _measure(self) -> int:
        self._resized = [each for each in self._resized if each.key in self._living]
        for each in self._resized:
            self._count(each, each.nbytes)
        return self._total

    def _look(self) -> None:
        self._step += 1
        if self._measure() > self.peak_bytes:
            self.take_to_host()
        total = self._total
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_step = total, self._step
        if self._step == self._looks_at:
            self._looks()


class Allocation:
    """Memory that lives, and whether it has values."""

    __slots__ = ("_reference", "counted", "hollow", "hosted", "key", "pinned", "resized")

    def __init__(self, storage: torch.UntypedStorage, hollow: bool, gone: Any) -> None:
        self._reference = weakref.ref(storage, gone)
        self.key = internals.storage_address(storage)
        self.hollow = hollow
        self.hosted = self.pinned = self.resized = False
        self.counted = 0

    def on_host(self, nbytes: int) -> int:
        """Returns what so many bytes take there: torch takes pinned memory by powers of two."""
        return 1 << (nbytes - 1).bit_length() if nbytes and self.pinned else nbytes

    @property
    def lives(self) -> bool:
        return self._reference() is not None

    @property
    def nbytes(self) -> int:
        storage = self._reference()
        return 0 if storage is None else storage.nbytes()


def _key(tensor: Tensor) -> int:
    own = is_dense(tensor) and not tensor.is_meta and not isinstance(tensor, Wrapper)
    return internals.storage_address(tensor.untyped_storage()) if own else 0


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _like(shape: Tensor, given: list[Tensor]) -> Tensor:
    if not isinstance(shape, Tensor) or not shape.is_meta:
        return shape
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def _takes_device(operation: Any) -> bool:
    return any(each.name == "device" for each in internals.schema(operation).arguments)


def _is_value(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.nbytes > _COMPUTED_BYTES


def _written(schema: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments that an operation writes to, as it returns them."""
    named = dict(zip([each.name for each in schema.arguments], args, strict=False)) | dict(kwargs)
    out = [
        named[each.name]
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write and each.name in named
    ]
    if not schema.returns:
        return None
    return out[0] if len(schema.returns) == 1 else tuple(out)


def _in_turn(places: Tensor, schema: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Returns which places along a dim are chosen, if each is as often as another; values stay as they are."""
    named = dict(zip([each.name for each in schema.arguments], args, strict=False)) | dict(kwargs)
    among, dim = named["self"], named.get("dim", -1)
    if places.dtype != torch.int64 or dim is None or not among.dim():
        return places
    same = places.dim() == among.dim()
    chosen = torch.arange(places.numel()).remainder_(among.shape[dim])
    return chosen.view(places.movedim(dim, -1).shape).movedim(-1, dim) if same else chosen.view(places.shape)


def _number(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
