"""What a job's data may be, as a pipeline, and how it is read otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline, from_arrays
from headrace.data.pipeline.steps import Cache, cached
from headrace.errors import UsageError


def as_pipeline(data: Any) -> tuple[InputPipeline, tuple[str, ...]]:
    """Returns the pipeline for `Job.data`, and lines that the user should see.

    A pipeline stays as it was defined; anything else is shuffled by the job's seed.

    Args:
        data: a pipeline, a tuple or list of tensors or arrays, a dict of them, one alone, a list of
            examples, a `Source`, a map-style data set, or a `DataLoader` around one.

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


def read_by(
    data: Any,
    parallel: str | int | None = None,
    cache: str | os.PathLike[str] | None = None,
    prefetch: int | None = None,
) -> InputPipeline:
    """Returns data that is read in another way; its batches are the same, in the same order.

    Args:
        data: as of `as_pipeline`.
        parallel: as of `hr.data.Pipeline.map`; where a torch `DataLoader` with workers was given, how many they are.
        cache: "memory" or a folder: examples are kept behind the last step before the first that draws random numbers.
            What a map-style data set draws itself is kept as it was drawn first.
        prefetch: batches that are read ahead.

    Raises:
        UsageError: there is no such way to read, or the pipeline has a cache already.
        DataError: as of `as_pipeline`.

    Examples:
        >>> pipeline = hr.data.read_by((torch.zeros(8, 4), torch.zeros(8)), parallel="threads", cache="memory")
        >>> pipeline.reading.parallel, len(pipeline.steps)
        ('threads', 1)
    """
    pipeline, _ = as_pipeline(data)
    reading, processes, steps = pipeline.reading, pipeline.processes, pipeline.steps
    if parallel is not None and processes is not None:
        if not isinstance(parallel, int) or parallel < 1:
            raise UsageError(f"the DataLoader reads with workers of its own; give their number, got {parallel!r}")
        processes = replace(processes, count=parallel)
    elif parallel is not None:
        name, count = ("threads", parallel) if isinstance(parallel, int) else (parallel, None)
        reading = replace(reading, parallel=name, count=count)
    if cache is not None:
        if not isinstance(cache, str | os.PathLike):
            raise UsageError(f'cache is "memory" or a folder, got {cache!r:.60}')
        if any(isinstance(step, Cache) for step in steps):
            raise UsageError("the data has a cache already; one is enough")
        drawn = next((place for place, step in enumerate(steps) if step.draws), len(steps))
        steps = (*steps[:drawn], cached(pipeline.source, steps[:drawn], cache, None, None), *steps[drawn:])
    changed = replace(pipeline, reading=reading, processes=processes, steps=steps)
    return changed if prefetch is None else changed.prefetch(prefetch)
