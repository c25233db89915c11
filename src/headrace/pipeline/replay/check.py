"""Whether a replayed model may be cut at a place: its stages are run alone, and compared with the whole forward.

A stage gets what the plain forward has made on the stages before it. Modules of other stages have no parameters
meanwhile, and what they set on the way is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoint.forms import extra_states
from headrace.errors import in_one_line
from headrace.modules import is_dense, replace_tensors, without_data
from headrace.pipeline.replay.interception import intercepted
from headrace.pipeline.replay.recording import Irreplayable, Leaf
from headrace.pipeline.replay.replayed import ReplayedModel, ReplayedStage
from headrace.pipeline.replay.structure import template
from headrace.pipeline.stage import OUTPUT
from headrace.training.user_code.trial import SavedModule


@dataclass
class PlainRun:
    """What the whole forward does.

    Attributes:
        made: the tensors that tracked calls have returned.
        output: the tensors of its output.
        state: the model's own extra state afterwards.
        before, after: torch's random state at the begin and at the end of each call.
    """

    values: Mapping[str, Tensor]
    start: Tensor = field(default_factory=torch.get_rng_state)
    made: dict[Leaf, Tensor] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    _inside: bool = False

    def __call__(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stands for the call of a tracked module."""
        if self._inside:
            return original(*args, **kwargs)
        self.before.append(torch.get_rng_state())
        self._inside = True
        output = original(*args, **kwargs)
        self._inside = False
        for leaf, tensor in enumerate(template(output)[1]):
            self.made[len(self.after), leaf] = tensor.detach().clone()
        self.after.append(torch.get_rng_state())
        return output

    def follow(self, index: int, ended: bool) -> None:
        """Lets a stage draw the random numbers that the whole forward has drawn."""
        torch.set_rng_state((self.after if ended else self.before)[index])


class CutCheck:
    """Checks the cuts of a model on several batches, in the mode that the model is in."""

    def __init__(self, model: ReplayedModel, saved: SavedModule, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._model = model
        self._saved = saved
        self._runs = [self._plain(values) for values in batches]

    def join(self, joined: list[str]) -> None:
        """Notes for each layer why no cut may stand behind it, where a stage would not do as the whole model does.

        Raises an `Irreplayable` where all of it is one stage.
        """
        count = len(joined)
        start = 0
        for stop in range(1, count + 1):
            if joined[stop - 1] and stop < count:
                continue
            first, why = start, self._fault(start, stop)
            while why and first > 0:
                first -= 1
                while first > 0 and joined[first - 1]:
                    first -= 1
                cause, why = why, self._fault(first, stop)
                for index in range(first, stop - 1):
                    joined[index] = joined[index] or cause
            if why:
                raise Irreplayable(why)
            start = stop

    def _plain(self, values: Mapping[str, Tensor]) -> PlainRun:
        run = PlainRun(values)
        with self._saved.restoring(), intercepted(self._model.tracked, run):
            run.output = [each.detach().clone() for each in template(self._model.call(values))[1]]
            run.state = self._state()
        return run

    def _state(self) -> Mapping[str, Tensor]:
        return extra_states(self._model.module, lambda name: not name)

    def _release(self, held: set[str]) -> None:
        """Leaves no data in the parameters and buffers that are not held."""
        module = self._model.module
        named = (*module.named_parameters(), *module.named_buffers())
        left = [tensor for name, tensor in named if name not in held and is_dense(tensor)]
        replace_tensors(module, {id(tensor): without_data(tensor) for tensor in left})

    def _fault(self, start: int, stop: int) -> str:
        """Returns what a stage of these layers does otherwise than the whole model; "" where it does the same."""
        count = len(self._model.layers)
        placed = [0 if index < start else 1 if index < stop else 2 for index in range(count)]
        lowest = placed[0]
        stages = self._model.stages([each - lowest for each in placed], placed[-1] - lowest + 1)
        stage = stages[1 - lowest]
        assert isinstance(stage, ReplayedStage)
        for run in self._runs:
            torch.set_rng_state(run.start)
            try:
                with self._saved.restoring():
                    self._release({*stage.parameters, *stage.buffers})
                    out = stage.run({**run.values, **stage.given(run.made)}, follow=run.follow)
                    state = self._state()
            except Exception as error:
                return f"{stage.layers[-1]} fails without the layers before it: {in_one_line(error)}"
            for name, tensor in stage.expected(run.made).items():
                if not _same(out[name], tensor):
                    return f"{name.rpartition('/')[0]} gets something from an earlier layer past its arguments"
            if stage.last:
                output = template(out[OUTPUT])[1]
                if len(output) != len(run.output) or not all(map(_same, output, run.output)):
                    return "the output gets something from an earlier layer past its arguments"
                if state.keys() != run.state.keys() or not all(_same(state[name], run.state[name]) for name in state):
                    return "get_extra_state of the model returns something that depends on an earlier layer"
        return ""


def _same(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if not is_dense(one):
        one, other = one.to_dense(), other.to_dense()
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one, other, rtol=1e-5, atol=1e-8, equal_nan=True)
    return torch.equal(one, other)
