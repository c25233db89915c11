"""A model's first forward: does it keep values in attributes, or combine the examples of its share?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.plain_script.meeting import Meeting
from headrace.api.probes.finding import names_of
from headrace.errors import DataError
from headrace.hooks import OwnHook
from headrace.modules import evaluating
from headrace.training.user_code.trial import drawn, trial
from headrace.training.whole_model import cut
from headrace.trees import map_tensors
from headrace.worker.attributes import attributes_of, copied, same

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class FirstForward:
    """Looks at a model's first forward of a share, on rank 0, which says what is not that of one process."""

    def __init__(self, model: nn.Module, meeting: Meeting) -> None:
        self._meeting = meeting
        self._before: dict[str, Any] = {}
        if meeting.rank == 0:
            self._handles = [
                model.register_forward_pre_hook(OwnHook(self._note)),
                model.register_forward_hook(OwnHook(self._look), with_kwargs=True),
            ]

    def _examples(self, model: nn.Module) -> int:
        share = None if torch.compiler.is_compiling() else self._meeting.deliveries.last
        return share.examples if share is not None and model.training and torch.is_grad_enabled() else 0

    def _note(self, model: nn.Module, _: object) -> None:
        if self._examples(model):
            self._before = {path: copied(each.value) for path, each in attributes_of(model).items()}

    def _look(self, model: nn.Module, values: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
        examples = self._examples(model)
        if not examples:
            return
        for handle in self._handles:
            handle.remove()
        before = self._before
        now = {path: each.value for path, each in attributes_of(model).items()}
        changed = [path for path in now if path in before and not same(now[path], before[path])]
        if changed:
            self._meeting.say(
                f"forward changes {names_of(changed)}, which is no parameter or buffer: each process has that of its "
                "own shares; keep it in a buffer (register_buffer), which is averaged after each backward pass"
            )
        if examples > 1 and not changed:
            self._compare(model, values, named, examples)

    def _compare(self, model: nn.Module, values: tuple[Any, ...], named: dict[str, Any], examples: int) -> None:
        half = examples // 2

        def run(start: int, stop: int) -> list[Tensor]:
            places, keywords = cut([list(values), named], start, stop, examples, "a probe")
            rows: list[Tensor] = []
            map_tensors(rows.append, model.forward(*places, **keywords))
            return [each for each in rows if each.dim() and len(each) == stop - start]

        with trial(model), evaluating(model):
            for part in model.modules():
                # They are said, or draw random numbers.
                part.training = not isinstance(part, (internals.BatchNorm, internals.DropoutNd))
            begins = drawn()
            try:
                pairs = [*zip(run(0, examples), run(0, half), strict=True)]
            except DataError:
                # It takes something that is not of single examples.
                return
            except Exception as error:
                self._meeting.say(
                    f"whether forward combines examples is not known: of half a share it raises {error!r:.200}"
                )
                return
            if drawn() != begins:
                return
        if any(_apart(whole[:half], part) for whole, part in pairs):
            self._meeting.say(
                "forward combines the examples of a batch (their mean, their order, a norm over all): each process has "
                "those of its share, and the result is not that of one process"
            )


def _apart(one: Tensor, other: Tensor) -> bool:
    tolerance = _TOLERANCE.get(one.dtype)
    return tolerance is not None and float((one - other).abs().max()) > tolerance * max(1.0, float(one.abs().max()))
