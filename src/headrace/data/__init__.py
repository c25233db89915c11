"""Input pipelines: data sets, the order of their examples, and the loader that reads one worker's share.

    hr.data.from_arrays(images, labels).shuffle(seed=3).map(augment)

A `Pipeline` is a definition; a `Loader` runs it for one worker. The order follows from (seed, epoch, index) alone, so
that an epoch visits every example exactly once for any number of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.registry import lazy_names

if TYPE_CHECKING:
    from headrace.data.datasets import ImageData, digits, fashion_mnist, fashion_mnist_or_digits
    from headrace.data.given import as_pipeline, read_by
    from headrace.data.loading.loader import Loader, batches
    from headrace.data.loading.reader import CpuBudget
    from headrace.data.loading.transfer import delivered
    from headrace.data.pipeline.clients import dirichlet
    from headrace.data.pipeline.combined import interleave, mix
    from headrace.data.pipeline.order import Hosts
    from headrace.data.pipeline.pipeline import InputPipeline, Pipeline, by_client, from_arrays, local
    from headrace.data.pipeline.source import Epoch, Source
    from headrace.data.sources.arrow import from_hugging_face
    from headrace.data.sources.ray import from_ray
    from headrace.data.sources.records import from_array_record, from_files, from_text, from_tfrecord
    from headrace.data.sources.tables import from_csv, from_parquet
    from headrace.data.sources.torch import from_torch
    from headrace.data.sources.webdataset import from_webdataset
    from headrace.data.transforms import DecodeImage, ParseExample, string_ids

__all__ = [
    "CpuBudget",
    "DecodeImage",
    "Epoch",
    "Hosts",
    "ImageData",
    "InputPipeline",
    "Loader",
    "ParseExample",
    "Pipeline",
    "Source",
    "as_pipeline",
    "batches",
    "by_client",
    "delivered",
    "digits",
    "dirichlet",
    "fashion_mnist",
    "fashion_mnist_or_digits",
    "from_array_record",
    "from_arrays",
    "from_csv",
    "from_files",
    "from_hugging_face",
    "from_parquet",
    "from_ray",
    "from_text",
    "from_tfrecord",
    "from_torch",
    "from_webdataset",
    "interleave",
    "local",
    "mix",
    "read_by",
    "string_ids",
]

# Where each name is imported from when it is first used: a worker that trains from arrays loads no reader of files.
_MODULES = {
    "datasets": ("ImageData", "digits", "fashion_mnist", "fashion_mnist_or_digits"),
    "given": ("as_pipeline", "read_by"),
    "loading.loader": ("Loader", "batches"),
    "loading.reader": ("CpuBudget",),
    "loading.transfer": ("delivered",),
    "pipeline.combined": ("interleave", "mix"),
    "pipeline.order": ("Hosts",),
    "pipeline.clients": ("dirichlet",),
    "pipeline.pipeline": ("InputPipeline", "Pipeline", "by_client", "from_arrays", "local"),
    "pipeline.source": ("Epoch", "Source"),
    "sources.arrow": ("from_hugging_face",),
    "sources.ray": ("from_ray",),
    "sources.records": ("from_array_record", "from_files", "from_text", "from_tfrecord"),
    "sources.tables": ("from_csv", "from_parquet"),
    "sources.torch": ("from_torch",),
    "sources.webdataset": ("from_webdataset",),
    "transforms": ("DecodeImage", "ParseExample", "string_ids"),
}
__getattr__ = lazy_names(
    __name__, {name: f"headrace.data.{module}:{name}" for module, names in _MODULES.items() for name in names}
)


def __dir__() -> list[str]:
    return __all__
