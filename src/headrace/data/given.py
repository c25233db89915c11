"""What a job is given as its data, as a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline, from_arrays


def as_pipeline(data: Any) -> tuple[InputPipeline, tuple[str, ...]]:
    """Returns the pipeline for `Job.data`, and lines that the user should see.

    A pipeline stays as it was defined; anything else is shuffled by the job's seed.

    Args:
        data: a pipeline, a tuple or list of tensors or arrays, a dict of them, one alone, a list of
            examples, a map-style data set, or a `DataLoader` around one.

    Raises:
        DataError: it is none of these, is empty or ragged.

    Examples:
        >>> pipeline, lines = hr.data.as_pipeline((torch.zeros(8, 4), torch.zeros(8)))
        >>> len(pipeline), pipeline.shuffled
        (8, True)
    """
    if isinstance(data, InputPipeline):
        return data, ()
    if isinstance(data, Tensor | np.ndarray | Mapping):
        return from_arrays(data).shuffle(), ()
    examples = isinstance(data, list) and data and isinstance(data[0], tuple | dict)
    if isinstance(data, tuple | list) and not examples:
        return from_arrays(*data).shuffle(), ()
    # Imported for those alone that give such data.
    from headrace.data.sources.torch import from_indexed

    return from_indexed(data)
