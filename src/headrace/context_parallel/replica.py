"""What a worker runs that has some tokens of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.context_parallel.attention import attend
from headrace.context_parallel.division import counted, divide, form_of, join, require_tokens, sum_of_parts
from headrace.context_parallel.installed import Substitutes, substituted, torch_arange
from headrace.context_parallel.masks import mask_of_rows
from headrace.context_parallel.placement import Zigzag
from headrace.context_parallel.ring import Ring
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.spec.compute import TokenUse
from headrace.spec.job import Share
from headrace.tasks import TokenMean
from headrace.training.compute import Compute, Computed
from headrace.trees import tensors_of


class DividedForward:
    """Gives a model this rank's tokens of what it is called with, and its attention all tokens.

    Attributes:
        ring: what attention goes around.
        collective: what else the ranks exchange by.
        place: where the tokens are of the sequences that it was called with last.
        use: what forward does with tokens.
    """

    def __init__(self, module: nn.Module, ring: Ring, collective: Collective, use: TokenUse) -> None:
        self.ring, self.collective, self.use = ring, collective, use
        self.place = Zigzag(1, ring.rank, ring.world)
        self._divides = False
        # Before those of the user, which then see what forward does.
        module.register_forward_pre_hook(self._divide, prepend=True, with_kwargs=True)

    @contextmanager
    def dividing(self) -> Iterator[None]:
        """Does so, forward and backward: a checkpoint runs forward again."""
        if self.ring.world == 1:
            yield
            return
        self._divides = True
        try:
            with substituted(Substitutes(self._attend, self._arange, self._whole, self._mask)):
                yield
        finally:
            self._divides = False

    def _divide(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._divides:
            return None
        examples, tokens = form_of((args, kwargs))
        self.place = Zigzag(tokens, self.ring.rank, self.ring.world)
        return divide((args, kwargs), self.place, examples)  # type: ignore[no-any-return]

    def _attend(self, *values: Any, **named: Any) -> Tensor:
        return attend(self.place, self.ring, *values, **named)

    def _whole(self, numbers: Tensor) -> Tensor:
        whole: Tensor = join(numbers, self.place, self.collective, (1,))
        return whole

    def _mask(self, make: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
        return mask_of_rows(self.place, self._whole, make, *args, **kwargs)

    def _arange(self, where: str, *args: Any, **kwargs: Any) -> Tensor:
        same = counted(args, kwargs) == self.place.local
        if where not in self.use.counts and not (same and where not in self.use.others):
            return torch_arange(*args, **kwargs)
        if where not in self.use.counts or not same:
            seen = "counted tokens" if where in self.use.counts else "was not called"
            raise UsageError(
                f"torch.arange at {where} is called for {args}, and this worker has {self.place.local} tokens; when "
                f"context_parallel tried the model, it {seen}: give the model positions as an input, or use mirrored"
            )
        places = self.place.sources(kwargs.get("device"))
        return places.to(kwargs.get("dtype") or places.dtype)


@dataclass(frozen=True)
class DividedLoss:
    """The loss of whole sequences, of which each rank has made some tokens' outputs.

    A mean over tokens is added up of each rank's. Any other loss gets the outputs of all tokens, on every rank.
    """

    loss: Callable[..., Any]
    divided: DividedForward

    @property
    def by_tokens(self) -> bool:
        """Whether outputs stay divided."""
        return isinstance(self.loss, TokenMean)

    def __call__(self, output: Any, target: Any) -> Tensor | Mean:
        place, collective = self.divided.place, self.divided.collective
        if place.world == 1:
            loss: Tensor | Mean = self.loss(output, target)
            return loss
        if not isinstance(self.loss, TokenMean):
            loss = self.loss(join(output, place, collective, self.divided.use.dims), target)
            return loss
        for tensor in tensors_of(output):
            require_tokens("the model's output", tensor, place)
        labels, ignored = self.loss.labels_by_token(target), self.loss.ignore_index
        added = place.positions(labels.device) >= place.length
        own = replace(self.loss, shifted=False)(output, place.take(labels, 1).masked_fill(added, ignored))
        return Mean(sum_of_parts(own.total, collective), (labels != ignored).sum())


class ContextModel(Compute):
    """Computes this rank's tokens of every example, and the loss of all."""

    def __init__(self, whole: Compute, divided: DividedForward) -> None:
        self.module, self.device, self.divided = whole.module, whole.device, whole.divided
        self.counts = divided.ring.rank == 0
        self._whole, self._divided = whole, divided

    def run(self, share: Share) -> Computed:
        with self._divided.dividing():
            computed = self._whole.run(share)
        # The loss is the same on all ranks.
        return computed if self.counts else replace(computed, loss=None)

    def predict(self, batch: Any) -> Any:
        """Returns the output for whole sequences; all ranks that divide them call it."""
        divided, dims = self._divided, self._divided.use.evaluated
        if dims is None or divided.ring.world == 1:
            return self._whole.predict(batch)
        with divided.dividing():
            output = self._whole.predict(batch)
        return join(output, divided.place, divided.collective, dims)

    def attend(self) -> None:
        self._whole.attend()

    def explained(self, error: Exception) -> UsageError | None:
        return self._whole.explained(error)

    def equal_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole.equal_parameters()

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        return self._whole.whole_tensors(leads)
