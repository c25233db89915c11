"""calibrate: fits a prediction's constants to measured runs, and says how far off it is, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from headrace.errors import HeadraceError, UsageError
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.cloud import cluster_of
from headrace.prediction.profiling.origin import require_usable
from headrace.prediction.simulation.simulate import Prediction, simulate
from headrace.report.model.events import attempts, of_kind, read_log
from headrace.report.model.summary import Summary, summarize
from headrace.report.predicted import PredictedRun
from headrace.spec.cluster import Cluster
from headrace.spec.events import Event, Lost
from headrace.spec.model import ModelSpec
from headrace.strategies import Strategy, made_again

_STEPS = 50
_NETWORK_FACTORS = tuple(2.0 ** (exponent / 2) for exponent in range(-10, 9))
"""That are tried first: 1/32 to 16."""
_REFINEMENTS = 4
_FLAT = 0.002
"""Errors that differ by less do not say how fast the network is."""


@dataclass(frozen=True)
class Constants:
    """What measured runs say about a profile and a cluster.

    Attributes:
        compute: all times of the profile are so many times as long.
        network: all links and buses are so many times as fast; None where the runs do not say.
    """

    compute: float = 1.0
    network: float | None = None

    def model(self, model: ModelSpec) -> ModelSpec:
        """Returns the profile with its times."""
        if model.compute is None:
            raise UsageError("the model's file says no times, so that there is nothing to calibrate; profile the job")
        factor = self.compute
        batches = tuple(
            replace(
                batch,
                forward_s=batch.forward_s * factor,
                backward_s=batch.backward_s * factor,
                layers=tuple(
                    replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor)
                    for layer in batch.layers
                ),
            )
            for batch in model.compute.batches
        )
        old = model.compute
        names = ("optimizer_s", "fixed_s", "accumulate_s")
        times = replace(old, batches=batches, **{name: getattr(old, name) * factor for name in names})
        return replace(model, compute=times, layers=batches[-1].layers)

    def cluster(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with its links."""
        factor = self.network or 1.0
        return replace(
            cluster,
            hosts=tuple(replace(host, bus_bytes_per_s=host.bus_bytes_per_s * factor) for host in cluster.hosts),
            link_bytes_per_s=cluster.link_bytes_per_s * factor,
            links=tuple(replace(link, bytes_per_s=link.bytes_per_s * factor) for link in cluster.links),
        )


@dataclass(frozen=True)
class ComparedRate:
    """A run's measured rate, and the predicted ones; examples a second.

    Attributes:
        predicted: from the files as they are.
        calibrated: with constants that were fitted to the other runs alone; None if there is no other.
    """

    run: str
    strategy: Strategy
    measured: float
    predicted: float
    calibrated: float | None


@dataclass(frozen=True)
class Calibration:
    """The constants that all runs give, each run's rates, and the runs that could not be compared, with the reason."""

    constants: Constants
    runs: tuple[ComparedRate, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class _Measured:
    name: str
    strategy: Strategy
    examples: int
    rate: float
    compute_s: float | None


def calibrate(
    runs: Sequence[Path | str], model: ModelSpec | Path | str, cluster: Cluster | Path | str, *, force: bool = False
) -> Calibration:
    """Compares runs with what a profile and a cluster predict, and fits two constants.

    A run that was used to fit a constant is never counted as predicted with it: `calibrated` leaves it out. What the
    files predict as they are is kept in each run's directory, if no prediction is, and its report shows it.

    Args:
        runs: their directories; runs of the profile's job on the cluster's machines.
        model, cluster: as for `simulate`.
        force: as for `simulate`.

    Raises:
        UsageError: no run can be compared, or the profile belongs to something else.

    Examples:
        >>> run = hr.fit(job, hr.OneDevice(threads=1), run_dir="measured")
        >>> found = hr.calibrate(["measured"], profile, "cluster.toml", force=True)
        >>> found.constants.compute > 0
        True
    """
    model = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    cluster = cluster_of(cluster)
    require_usable(model, cluster, force)
    found: list[_Measured] = []
    left_out: dict[str, str] = {}
    for run in {Path(run).resolve(): run for run in runs}.values():
        try:
            measured = _measured(Path(run))
            prediction = _predict(measured, model, cluster, Constants(), force)
            # One that was made before the run says more.
            if PredictedRun.of_run(Path(run)) is None:
                prediction.save(run)
        except HeadraceError as error:
            left_out[str(run)] = str(error)
            continue
        found.append(measured)
    if not found:
        reasons = "; ".join(f"{run}: {why}" for run, why in left_out.items())
        raise UsageError(f"no run can be compared with a prediction: {reasons or 'none was given'}")

    def predict(measured: _Measured, constants: Constants) -> Prediction:
        return _predict(measured, model, cluster, constants, force)

    compared = []
    for measured in found:
        others = [each for each in found if each is not measured]
        calibrated = predict(measured, _fit(others, predict)).examples_per_s if others else None
        plain = predict(measured, Constants()).examples_per_s
        compared.append(ComparedRate(measured.name, measured.strategy, measured.rate, plain, calibrated))
    return Calibration(_fit(found, predict), tuple(compared), left_out)


_Predict = Callable[[_Measured, Constants], Prediction]


def _fit(runs: Sequence[_Measured], predict: _Predict) -> Constants:
    ratios = []
    for run in runs:
        if run.compute_s:
            plain = predict(run, Constants())
            expected = plain.shares.get("computing", 0.0) * plain.step_s
            ratios += [run.compute_s / expected] * (expected > 0)
    compute = median(ratios) if ratios else 1.0

    def error(network: float) -> float:
        constants = Constants(compute, network)
        return median(abs(math.log(predict(run, constants).examples_per_s / run.rate)) for run in runs)

    errors = {factor: error(factor) for factor in _NETWORK_FACTORS}
    if max(errors.values()) - min(errors.values()) < _FLAT:
        return Constants(compute)
    best, width = min(errors, key=errors.__getitem__), 2.0**0.25
    for _ in range(_REFINEMENTS):
        near = {factor: error(factor) for factor in (best / width, best, best * width)}
        best, width = min(near, key=near.__getitem__), math.sqrt(width)
    return Constants(compute, best)


def _predict(run: _Measured, model: ModelSpec, cluster: Cluster, constants: Constants, force: bool) -> Prediction:
    return simulate(
        constants.model(model),
        constants.cluster(cluster),
        run.strategy,
        global_batch_size=run.examples,
        assumptions=Assumptions(steps=_STEPS),
        force=force,
    )


def _measured(run: Path) -> _Measured:
    log = read_log(run)
    summary = summarize(run, log)
    _require_steady(log.events)
    rate = summary.training.examples_per_s
    if rate is None or summary.status != "ok":
        raise UsageError(f"its status is {summary.status!r}, and no rate of a steady state was measured")
    # The compute of a stage has waiting in it.
    compute_s = summary.times.compute_s if summary.times and not summary.started.plan.get("partition") else None
    return _Measured(summary.label, _strategy(summary), summary.started.global_batch_size, rate, compute_s)


def _require_steady(events: Sequence[Event]) -> None:
    """Raises UsageError where a run's rate is not that of the workers that it began with."""
    every = attempts(events)
    counts = {count for each in every for count in (each.started.workers, max(each.started.workers, len(each.steps)))}
    if len(counts) > 1:
        raise UsageError(
            f"it had {min(counts)} to {max(counts)} workers, so that its rate is not that of one number of them"
        )
    lost = next(of_kind(Lost, events), None)
    if lost is not None:
        raise UsageError(f"it lost rank {lost.lost}, and its rate is that of all workers for a part of the time alone")


def _strategy(summary: Summary) -> Strategy:
    """Returns the strategy of a run's plan, with as many workers as it had."""
    options = summary.started.plan.get("options")
    return made_again(summary.strategy, options if isinstance(options, Mapping) else {}, summary.workers)
