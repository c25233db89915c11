"""Which process does what of a script, and when."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor

from headrace.accelerate.base import Prepared
from headrace.errors import UsageError

_Call = TypeVar("_Call", bound=Callable[..., Any])


class Ordering(Prepared):
    """What some of the processes do, or all in an order."""

    _triggered = False

    def wait_for_everyone(self) -> None:
        """Returns when all processes have called it."""
        self._here.barrier()

    def print(self, *values: Any, **named: Any) -> None:
        """Prints on the first process of each host."""
        if self.is_local_main_process:
            print(*values, **named)  # noqa: T201

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Lets the first process run what is inside before the others, as where it writes what all read."""
        if not self.is_main_process:
            self._here.barrier()
        yield
        if self.is_main_process:
            self._here.barrier()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """As `main_process_first`: what the first process of all has written, those of other hosts may not see.

        Raises:
            UsageError: the processes are on several hosts.
        """
        if self._here.gather(self.local_process_index) != list(range(self.num_processes)):
            raise UsageError(
                "local_main_process_first orders the processes of each host, and these are on several; use "
                "main_process_first, and write where every host can read"
            )
        return self.main_process_first()

    def on_main_process(self, call: _Call) -> _Call:
        """Decorates what the first process alone does; in the others it returns None."""
        return self._only(call, self.is_main_process)

    def on_local_main_process(self, call: _Call) -> _Call:
        """Decorates what the first process of each host alone does."""
        return self._only(call, self.is_local_main_process)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yields this process's part of a list, a tuple, a tensor, or a dict of them; the first have one more.

        Args:
            inputs: what all processes have.
            apply_padding: repeats the last one, so that all parts are equally long.
        """
        if not isinstance(inputs, Mapping):
            yield self._part(inputs, apply_padding)
            return
        if len({len(each) for each in inputs.values()}) > 1:
            raise UsageError(
                "the values of a dict are divided alike, and these differ in length; divide each by itself"
            )
        yield {name: self._part(each, apply_padding) for name, each in inputs.items()}

    def set_trigger(self) -> None:
        """Lets `check_trigger` be true, in all processes."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Returns whether a process has called `set_trigger` since the last check; all processes call it."""
        found = self._here.sum(float(self._triggered)) > 0
        self._triggered = self._triggered and not found
        return found

    def _part(self, values: Any, pads: bool) -> Any:
        each, more = divmod(len(values), self.num_processes)
        start = self.process_index * each + min(self.process_index, more)
        stop = start + each + (self.process_index < more)
        padding = [len(values) - 1] * (each + (more > 0) - (stop - start)) if pads and len(values) else []
        select: Any = getattr(values, "select", None)
        if isinstance(values, Tensor):
            return values[[*range(start, stop), *padding]]
        if select is not None:
            # A data set of the datasets library.
            return select([*range(start, stop), *padding])
        return values[start:stop] + values[-1:] * len(padding) if padding else values[start:stop]

    @staticmethod
    def _only(call: _Call, is_it: bool) -> _Call:
        @functools.wraps(call)
        def alone(*arguments: Any, **named: Any) -> Any:
            return call(*arguments, **named) if is_it else None

        return alone  # type: ignore[return-value]
