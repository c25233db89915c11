"""What a model does with its values and parameters, recorded while it runs on a small batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace import internals
from headrace.batches import call
from headrace.tensor_parallel.analysis import has_hooks, is_compiled, step_of
from headrace.tensor_parallel.rules import ValueStep
from headrace.training.user_code.trial import unchanged, without_compilers
from headrace.training.user_code.watching import Functions
from headrace.trees import as_bytes, tensors_of

Atoms = Mapping[nn.Module, tuple[str, str]]
"""What a module does as one step, and its name."""

_READ_BY_GETTERS = frozenset(("T", "mT", "H", "mH", "data", "grad", "real", "imag"))
_SHAPES = frozenset(
    (
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "is_complex"),
        *("is_contiguous", "element_size", "get_device", "requires_grad_", "register_hook", "retain_grad"),
        *("is_tensor", "result_type", "__len__", "__hash__"),
    )
)


@dataclass(frozen=True)
class Trial:
    """A small batch of the training data, and what of it the model is given, as in `Job.inputs`."""

    batch: Any
    inputs: Any = None

    @property
    def digest(self) -> int:
        """A number of 48 bits that differs between batches."""
        found = hashlib.sha256()
        for tensor in tensors_of(self.batch):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.layout == torch.strided and not tensor.is_quantized:
                found.update(as_bytes(tensor.detach().cpu().contiguous()).numpy().tobytes())
        return int.from_bytes(found.digest()[:6])

    def run(self, module: nn.Module) -> Any:
        """Returns the model's output."""
        return call(module, self.batch, self.inputs)


@dataclass
class ForwardRecord:
    """What a model has done.

    Attributes:
        readers: by the id of a parameter, the module other than its own layer that has read it.
    """

    steps: list[ValueStep] = field(default_factory=list)
    readers: dict[int, str] = field(default_factory=dict)


def record(module: nn.Module, trial: Trial, atoms: Atoms) -> ForwardRecord:
    """Runs a model in the mode that it is in; what it changes is the caller's to restore."""
    recorder = _Recorder(module, atoms)
    with ExitStack() as stack:
        for name, part in open_modules(module):
            recorder.follow(name, part, stack)
        with torch.enable_grad(), Functions(recorder.see):
            output = trial.run(module)
    recorder.end(output)
    return recorder.recording


def open_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules whose forward is Python, by name; not what is inside TorchScript."""
    closed: list[str] = []
    for name, part in module.named_modules():
        if any(name.startswith(f"{prefix}." * bool(prefix)) for prefix in closed):
            continue
        if isinstance(part, torch.jit.ScriptModule):
            closed.append(name)
        else:
            yield name, part


@contextmanager
def tried(module: nn.Module, seed: bool) -> Iterator[None]:
    """Runs a model to see what it does, eagerly, and gives it back as it was.

    `seed` makes random numbers the same in every process meanwhile, and gives them back; without it generators are left
    alone.
    """
    compiled = any(is_compiled(part) for part in module.modules())
    # Only there: what keeps torch from compiling is one for all threads, which may try their models at the same time.
    with without_compilers() if compiled else nullcontext(), unchanged(module, generators=seed):
        if seed:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
        yield


class _Recorder:
    """Notes every call of a function of torch, with the module that makes it."""

    def __init__(self, module: nn.Module, atoms: Atoms) -> None:
        self.recording = ForwardRecord()
        self._atoms = atoms
        self._owners: dict[int, set[int]] = {}
        for part in module.modules():
            for parameter in part.parameters() if part in atoms else internals.parameters(part).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), set()).add(id(part))
        self._stack: list[tuple[str, nn.Module]] = []
        self._atom: nn.Module | None = None
        self._made: dict[int, int] = {}
        # Ids are of use only while the tensors live.
        self._kept: list[Tensor] = []

    def follow(self, name: str, part: nn.Module, stack: ExitStack) -> None:
        """Registers hooks that note when a module runs, until the stack is closed."""
        hooked = has_hooks(part)

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append((name, part))
            if self._atom is None and part in self._atoms:
                self._atom = part
            elif hooked:
                self._look_at((args, kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._atom is part:
                self._atom = None
                self._add(*self._atoms[part], tensors_of((args, kwargs)), output)
            elif hooked:
                self._look_at(output)
            self._stack.pop()

        first = part.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        last = part.register_forward_hook(after, with_kwargs=True)
        stack.callback(first.remove)
        stack.callback(last.remove)

    def see(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Notes a function of torch."""
        name: str = getattr(func, "__name__", "")
        getter = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else None
        if name in _SHAPES or (getter is not None and getter not in _READ_BY_GETTERS):
            return
        given = tensors_of((args, kwargs))
        self._read(given)
        if self._atom is None:
            self._add(_does(name, args, kwargs, output), "", given, output)

    def end(self, output: Any) -> None:
        """Notes that the caller takes the output, and code that was not seen takes what no step has taken."""
        self._add("other", "", tensors_of(output), None)
        steps = self.recording.steps
        taken = {index for step in steps for index in step.inputs}
        for index in [index for index, step in enumerate(steps) if step.does == "layer" and index not in taken]:
            self._step("other", "", (index,))

    def _look_at(self, tree: Any) -> None:
        for tensor in [tensor for tensor in tensors_of(tree) if id(tensor) in self._made]:
            self._add("other", "", [tensor], tensor)

    def _read(self, tensors: list[Tensor]) -> None:
        name, reader = self._stack[-1] if self._stack else ("", None)
        readers = {id(reader), id(self._atom)}
        for tensor in tensors:
            owners = self._owners.get(id(tensor))
            if owners is not None and not owners & readers:
                self.recording.readers.setdefault(id(tensor), name)

    def _add(self, does: str, name: str, given: list[Tensor], output: Any) -> None:
        made = tensors_of(output)
        if not made and output is not None:
            return
        known = tuple(dict.fromkeys(self._source(tensor) for tensor in given if tensor.dim() or tensor.requires_grad))
        index = self._step(does, name, known)
        for tensor in made:
            self._made[id(tensor)] = index
            self._kept.append(tensor)

    def _source(self, tensor: Tensor) -> int:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._step("other", "", ())
            self._kept.append(tensor)
        return self._made[id(tensor)]

    def _step(self, does: str, name: str, inputs: tuple[int, ...]) -> int:
        self.recording.steps.append(ValueStep(does, name, inputs))
        return len(self.recording.steps) - 1


def _does(name: str, args: Any, kwargs: Any, output: Any) -> str:
    if name == "dropout":
        # A number for each element, of which each device would draw another part.
        settings = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
        return "elementwise" if not settings.get("p", 0.5) or not settings.get("training", True) else "other"
    if name == "reshape" or name == "view" or name == "flatten":
        x = args[0]
        joined = isinstance(output, Tensor) and output.dim() == 2 and x.dim() > 2 and len(output) == len(x)
        return "flatten" if joined else "other"
    return step_of(name)
