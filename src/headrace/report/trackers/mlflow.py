"""A run's events as parameters, metrics and tags of MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.machine.extras import require_extra
from headrace.report.trackers.curves import Tracked, TrackedPicture, TrackedText, TrackedValue
from headrace.report.trackers.tracker import Tracker
from headrace.spec.events import RunStarted

if TYPE_CHECKING:
    from mlflow import MlflowClient

_MOST_METRICS = 1000
"""In one request, by MLflow's REST interface."""
_MOST_TEXT = 5000
"""Characters of a tag that every store takes."""
_STATUS = {"ok": "FINISHED", "failed": "FAILED"}


class MLflow(Tracker):
    """Takes events (`fit(..., on_event=MLflow("mlruns"))`) and writes them to MLflow.

    Each attempt at a run is a run of MLflow's: strategy, workers and batch are its parameters, `resumed_step` among
    them; the curves are named as `TensorBoard` names them; notices and failures are tags, pictures artifacts. Where
    mlflow is not installed or refuses to begin, one line says so, and the run goes on without it.

    Args:
        uri: the folder of a local file store, made if missing, or a tracking server's URL.
        experiment: the runs' experiment, made if missing.
        run_name: None for `<strategy>-<workers>`.
        every_s: seconds between two rounds that are written where rounds are shorter; 0 for every round.

    Raises:
        UsageError: `every_s` is no number of seconds of at least 0.

    Examples:
        >>> run = hr.fit(job, on_event=hr.MLflow("mlruns"))
    """

    def __init__(
        self,
        uri: Path | str = "mlruns",
        experiment: str = "headrace",
        run_name: str | None = None,
        every_s: float = 0.25,
    ) -> None:
        super().__init__("MLflow", every_s)
        self._in_files = "://" not in str(uri)
        # Now, because a run may change the working directory.
        self._uri = Path(uri).absolute().as_uri() if self._in_files else str(uri)
        self._experiment = experiment
        self._run_name = run_name
        self._client: MlflowClient | None = None
        self._run_id = ""

    def begin(self, started: RunStarted) -> None:
        require_extra("mlflow", "it")
        # Inside, since importing it takes a second, and most users do not have it.
        from mlflow import MlflowClient, environment_variables
        from mlflow.entities import Param

        allowed = getattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)
        if self._in_files and allowed is not None:
            # Newer releases refuse a file store to those who did not ask for one.
            allowed.set(True)
        client = self._client = MlflowClient(tracking_uri=self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._experiment)
        name = self._run_name or f"{started.strategy}-{started.workers}"
        self._run_id = client.create_run(experiment, run_name=name).info.run_id
        client.log_batch(self._run_id, params=[Param(key, str(value)) for key, value in parameters(started)])

    def write(self, entries: Sequence[Tracked]) -> None:
        from mlflow.entities import Metric, RunTag

        assert self._client is not None  # `begin` comes first
        values = [
            Metric(each.tag, each.value, int(1000 * each.time_s), each.step)
            for each in entries
            if isinstance(each, TrackedValue)
        ]
        # A tag has one value: the last text of its kind.
        texts = {each.tag: each.text[:_MOST_TEXT] for each in entries if isinstance(each, TrackedText)}
        tags = [RunTag(key, text) for key, text in texts.items()]
        if tags:
            self._client.log_batch(self._run_id, tags=tags)
        for first in range(0, len(values), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=values[first : first + _MOST_METRICS])
        for each in entries:
            if isinstance(each, TrackedPicture):
                self._client.log_artifact(self._run_id, each.path, "pictures")

    def end(self, status: str) -> None:
        assert self._client is not None  # `begin` comes first
        self._client.set_terminated(self._run_id, _STATUS.get(status, "KILLED"))


def parameters(started: RunStarted) -> Iterator[tuple[str, str | int]]:
    """Yields what a run was started with, by name."""
    yield "strategy", started.strategy
    yield "workers", started.workers
    yield "device", started.device
    yield "threads", started.threads
    yield "global_batch_size", started.global_batch_size
    yield "examples_per_epoch", started.examples_per_epoch
    yield "resumed_step", started.resumed_step
    for package, version in started.versions.items():
        yield f"version_{package}", version
