"""Values of all processes: joined, summed, made one size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.accelerate.base import Prepared
from headrace.errors import UnknownName
from headrace.trees import map_tensors, tensors_of

_REDUCTIONS = ("mean", "none", "sum")


class Gathering(Prepared):
    """What each process has a part of. All of them call the same methods, in the same order."""

    def gather(self, tensor: Any) -> Any:
        """Returns the tensors of all processes, joined along their first dim; one without dims counts as one value."""
        if not self.use_distributed:
            return tensor
        return self._here.whole(map_tensors(lambda each: each if each.dim() else each[None], tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns what all processes have of a batch, in the order of the data, without what completes the last batch.

        Args:
            input_data: tensors of a batch's examples in any tree, or a list of other values, one for each example.
            use_gather_object: takes tensors for such values, too: as lists of numbers.
        """
        if not self.use_distributed:
            return input_data
        if use_gather_object or not tensors_of(input_data):
            listed = self._here.gather(map_tensors(Tensor.tolist, input_data))
            data: Any = [each for values in listed for each in (values if isinstance(values, list) else [values])]
        else:
            data = self.gather(input_data)
        loaders = self._progress.loaders
        left = loaders[-1].remainder if self._progress.is_last_batch else -1
        if left < 0:
            return data
        return map_tensors(lambda each: each[:left], data) if tensors_of(data) else data[:left]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns the sum or the mean of the tensors of all processes; "none" returns the tensors as they are.

        Args:
            tensor: one, or a tree of them.
            reduction: "sum", "mean" or "none".
            scale: changes nothing, as in Accelerate, which applies it on TPUs alone.

        Raises:
            UnknownName: another reduction.
        """
        if reduction not in _REDUCTIONS:
            raise UnknownName("reduction", reduction, _REDUCTIONS)
        if not self.use_distributed or reduction == "none":
            return tensor
        whole = self._here.whole(map_tensors(lambda each: each[None], tensor))
        count = self.num_processes if reduction == "mean" else 1
        return map_tensors(lambda each: each.sum(0) / count if count > 1 else each.sum(0), whole)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Returns tensors that are as long along `dim` as the longest of all processes.

        Args:
            tensor: tensors in any tree; those without this dim stay.
            dim: which is made longer.
            pad_index: the value that is added.
            pad_first: adds it in front.
        """
        sizes = [each.shape[dim] for each in tensors_of(tensor) if -each.dim() <= dim < each.dim()]
        longest = iter([max(of) for of in zip(*self._here.gather(sizes), strict=True)])

        def padded(each: Tensor) -> Tensor:
            if not -each.dim() <= dim < each.dim() or not (lacks := next(longest) - each.shape[dim]):
                return each
            shape = list(each.shape)
            shape[dim] = lacks
            added = each.new_full(shape, pad_index)
            return torch.cat([added, each] if pad_first else [each, added], dim)

        return map_tensors(padded, tensor)
