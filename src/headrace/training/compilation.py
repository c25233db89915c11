"""A model's forward and backward in graph mode (`torch.compile`), where it can pay."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.errors import JobError


class CompiledModule:
    """A module and its compiled form, which takes over for batches of full size.

    Compiled kernels differ by a last bit from eager ones, so what runs in which form depends on the round alone.

    Args:
        module: whose parameters lie where they will stay.
        full: examples of a round, but for an epoch's last one; of a portion of it, the smallest of them, where rounds
            are cut into portions.
    """

    def __init__(self, module: nn.Module, full: int) -> None:
        with warnings.catch_warnings():
            # It imports what torch itself has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            inductor = importlib.import_module("torch._inductor.compile_fx").config
        # By default it keeps a pool of processes, which would outlive a worker that is killed.
        inductor.compile_threads = 1
        self._module = module
        self._compiled: Callable[..., Any] = torch.compile(module)
        self._full = full

    def forward(self, examples: int) -> Callable[..., Any]:
        """Returns what is called for a part of a global batch, or a portion, of so many examples."""
        # The last batch of an epoch is short: to compile for its shapes too takes longer than to run it.
        return self._compiled if examples >= self._full else self._module

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Names the remedy where compilation fails, in forward or in backward.

        Raises:
            JobError: what the compiler said.
        """
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import CppCompileError, InvalidCxxCompiler, OperatorIssue

        try:
            yield
        except (TorchDynamoException, CppCompileError, InvalidCxxCompiler, OperatorIssue) as error:
            said = " ".join(str(error).partition("\n\n")[0].split())
            raise JobError(
                f"the model cannot be compiled: {type(error).__name__}: {said:.400}; use compile=False"
            ) from error
