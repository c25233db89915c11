"""An update that failed, which ends the server, and no connection."""

from __future__ import annotations


class StepFailed(Exception):
    """The job's optimizer has raised `error`, which is no worker's fault."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
