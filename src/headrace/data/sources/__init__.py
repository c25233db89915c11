"""Where examples come from: one file a format, each behind `Source`."""

from headrace.data.sources.array_record import from_array_record
from headrace.data.sources.comma_separated import from_csv
from headrace.data.sources.files import from_files
from headrace.data.sources.hugging_face import from_hugging_face
from headrace.data.sources.parquet import from_parquet
from headrace.data.sources.text import from_text
from headrace.data.sources.tfrecord import from_tfrecord
from headrace.data.sources.webdataset import from_webdataset

__all__ = [
    "from_array_record",
    "from_csv",
    "from_files",
    "from_hugging_face",
    "from_parquet",
    "from_text",
    "from_tfrecord",
    "from_webdataset",
]
