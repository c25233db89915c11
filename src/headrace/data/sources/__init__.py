"""Where examples come from: one file a format, each behind `Source`."""

from headrace.data.sources.files import from_files

__all__ = ["from_files"]
