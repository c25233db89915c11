"""Input pipelines: data sets, the order of their examples, and the loader that reads one worker's share.

    hr.data.from_arrays(images, labels).shuffle(seed=3).map(augment)

A `Pipeline` is a definition; a `Loader` runs it for one worker. The order follows from (seed, epoch, index) alone, so
that an epoch visits every example exactly once for any number of workers.
"""

from headrace.data.datasets import ImageData, digits, fashion_mnist, fashion_mnist_or_digits
from headrace.data.loading.batch_reader import CpuBudget
from headrace.data.loading.loader import Loader, batches
from headrace.data.loading.prefetcher import delivered
from headrace.data.loading.torch_data import as_pipeline, from_torch
from headrace.data.pipeline.combined import interleave, mix
from headrace.data.pipeline.order import Hosts
from headrace.data.pipeline.pipeline import InputPipeline, from_arrays, local
from headrace.data.pipeline.source import Epoch, Source
from headrace.data.sources.arrow import from_hugging_face
from headrace.data.sources.ray import from_ray
from headrace.data.sources.records import from_array_record, from_files, from_text, from_tfrecord
from headrace.data.sources.tables import from_csv, from_parquet
from headrace.data.sources.webdataset import from_webdataset
from headrace.data.strings import string_ids
from headrace.data.transforms import DecodeImage, ParseExample

Pipeline = InputPipeline
"""The public name; `hr.Pipeline` is a strategy."""

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
    "delivered",
    "digits",
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
    "string_ids",
]
