"""Where examples come from: one file a format, each behind `Source`."""

from headrace.data.sources.arrow import from_hugging_face
from headrace.data.sources.files import from_files, from_text
from headrace.data.sources.records import from_array_record, from_tfrecord
from headrace.data.sources.tables import from_csv, from_parquet
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
