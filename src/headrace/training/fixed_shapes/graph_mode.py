"""How a model runs as compiled programs."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.batches import call
from headrace.errors import JobError, UnfitMachine
from headrace.machine.versions import minor_of
from headrace.metrics import Mean
from headrace.spec.job import Share
from headrace.spec.options import CUDAGRAPHS, OVERWRITING
from headrace.training.user_code.objective import Objective


class GraphMode(ABC):
    """How a model runs as compiled programs.

    Attributes:
        pads: whether it makes all batches one length, and so takes them from the host.
    """

    pads: ClassVar[bool] = False

    @abstractmethod
    def loss(self, objective: Objective, batch: Any, share: Share) -> Tensor | Mean:
        """Runs forward and loss."""

    def predict(self, module: nn.Module, batch: Any, inputs: Any) -> Any:
        """Runs forward for other batches than those of training: eager, since each would be compiled for few."""
        return call(module, batch, inputs)

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Makes a `JobError` with the remedy of what the compiler raises, in forward or in backward."""


def one_compiling_process() -> None:
    """Keeps inductor from starting a pool of processes, which would outlive a worker that is killed.

    Raises:
        UnfitMachine: in a thread of its own where torch cannot compile there.
    """
    if threading.current_thread() is not threading.main_thread() and minor_of(torch.__version__) < (2, 12):
        raise UnfitMachine(
            f"torch {torch.__version__} ends the process when a thread compiles, and ThreadEngine has threads: "
            "leave out engine=, or pip install 'torch>=2.12'"
        )
    with warnings.catch_warnings():
        # torch imports modules here that it has deprecated itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        inductor = internals.inductor()
    inductor.compile_threads = 1


@contextmanager
def compiler_errors(remedy: str) -> Iterator[None]:
    """Makes a `JobError` of what the compiler raises."""
    cannot, of_the_model = internals.compiler_errors()
    try:
        yield
    except cannot as error:
        # Of an exception that the model itself raises, the compiler's words hide what it says.
        own = isinstance(error.__cause__, of_the_model)
        said = " ".join(str(error.__cause__ if own else error).partition("\n\n")[0].split())
        raise JobError(f"the model cannot be compiled: {type(error).__name__}: {said:.400}; {remedy}") from error


class CompiledModule(GraphMode):
    """A module and its compiled form, which runs batches of at least `full` examples.

    Compiled kernels differ by a last bit from eager ones, so which form runs depends on the round alone. The parameters
    must lie where they will stay. `how` is `Options.compile`.
    """

    def __init__(self, module: nn.Module, full: int, how: bool | str = True) -> None:
        one_compiling_process()
        self._module = module
        self._overwrites = how in OVERWRITING
        chosen: Any = {} if how is True else {"backend" if how == CUDAGRAPHS else "mode": how}
        self._compiled: Callable[..., Any] = torch.compile(module, **chosen)
        self._full = full

    def forward(self, examples: int) -> Callable[..., Any]:
        """Returns the form that runs so many examples."""
        # The last batch of an epoch is short: compiling for its shapes takes longer than running it.
        return self._compiled if examples >= self._full else self._module

    def loss(self, objective: Objective, batch: Any, share: Share) -> Tensor | Mean:
        if not self._overwrites:
            return objective.of(self.forward(share.of), batch)
        # What the last step has returned is done with, and this one may write to the same memory.
        torch.compiler.cudagraph_mark_step_begin()
        loss = objective.of(self.forward(share.of), batch)
        # A loss that is the model's own output would be overwritten before it is read.
        if isinstance(loss, Mean):
            weight = loss.weight.clone() if isinstance(loss.weight, Tensor) else loss.weight
            return Mean(loss.total.clone(), weight)
        return loss.clone()

    def errors(self) -> AbstractContextManager[None]:
        return compiler_errors("use compile=False")
