"""Runs whose constants are known, since they were simulated: calibrate finds the constants again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from headrace.errors import UsageError
from headrace.prediction.calibration import Constants, calibrate
from headrace.prediction.simulation.simulate import simulate
from headrace.report.predicted import PredictedRun
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.events import LAUNCHER, Lost, RunStarted, Stepped, decode, encode
from headrace.spec.model import ModelSpec, ParameterSpec

COMPUTE = ComputeProfile(
    (BatchProfile(16, 0.01, 0.02), BatchProfile(64, 0.03, 0.06)), 0.005, 0.001, 0.02, device="cpu", threads=4
)
MODEL = ModelSpec((ParameterSpec("w", (5_000_000,)),), compute=COMPUTE)
CLUSTER = Cluster(tuple(Host(f"h{index}", 4, 10**10) for index in range(4)))
TRUTH = Constants(compute=1.3, network=0.4)
RUNS = (
    ("mirrored(workers=2)", 64),
    ("mirrored(workers=4)", 128),
    ("parameter_server(workers=2)", 64),
    ("parameter_averaging(workers=4, period=4)", 128),
)


def ran(folder: Path, *runs: tuple[str, int], truth: Constants = TRUTH) -> list[Path]:
    places = [folder / f"run-{place}" for place in range(len(runs))]
    for (strategy, examples), place in zip(runs, places, strict=True):
        simulate(truth.model(MODEL), truth.cluster(CLUSTER), strategy, global_batch_size=examples, run_dir=place)
    return places


@pytest.mark.slow
def test_constants_are_found_again_and_predict_runs_that_they_were_not_fitted_to(tmp_path: Path) -> None:
    found = calibrate(ran(tmp_path, *RUNS), MODEL, CLUSTER)
    assert found.constants.compute == pytest.approx(1.3, rel=0.02)
    assert found.constants.network == pytest.approx(0.4, rel=0.05)
    assert [each.strategy.name for each in found.runs] == [name.partition("(")[0] for name, _ in RUNS]
    for each in found.runs:
        assert each.predicted > 1.5 * each.measured
        assert each.calibrated == pytest.approx(each.measured, rel=0.05)
    assert found.left_out == {}


@pytest.mark.slow
def test_a_run_does_not_predict_itself(tmp_path: Path) -> None:
    slow, quick = replace(TRUTH, compute=3.0), replace(TRUTH, compute=1.0)
    places = [*ran(tmp_path / "a", RUNS[0], truth=slow), *ran(tmp_path / "b", RUNS[0], truth=quick)]
    found = calibrate(places, MODEL, CLUSTER)
    one, other = found.runs
    assert one.calibrated == pytest.approx(other.measured, rel=0.05)
    assert other.calibrated == pytest.approx(one.measured, rel=0.05)
    (alone,) = calibrate(places[:1], MODEL, CLUSTER).runs
    assert alone.calibrated is None


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    (place,) = ran(tmp_path, ("one_device", 64))
    found = calibrate([place, f"{place}/", place.parent / "." / place.name], MODEL, CLUSTER)
    assert [each.calibrated for each in found.runs] == [None]


@pytest.mark.slow
def test_runs_without_a_network_say_nothing_of_it(tmp_path: Path) -> None:
    found = calibrate(ran(tmp_path, ("one_device", 64)), MODEL, CLUSTER)
    assert found.constants.network is None
    assert found.constants.compute == pytest.approx(1.3, rel=0.02)
    assert found.constants.cluster(CLUSTER) == CLUSTER


def resumed(first: Path, second: Path) -> Path:
    """Appends the events of a run to those of another one, as its second attempt."""
    for path in (second / "events").iterdir():
        lines = []
        for line in path.read_text().splitlines():
            event = decode(line)
            event = structs.replace(event, time_s=event.time_s + 1000)
            if isinstance(event, RunStarted):
                event = structs.replace(event, resumed_step=100)
            if isinstance(event, Stepped):
                event = structs.replace(event, step=event.step + 100)
            lines.append(f"{encode(event)}\n")
        with (first / "events" / path.name).open("a") as file:
            file.writelines(lines)
    return first


def test_runs_whose_workers_changed_are_left_out(tmp_path: Path) -> None:
    fewer, more = (ran(tmp_path / name, ("mirrored(workers=2)", 64)) for name in ("a", "b"))
    same = resumed(fewer[0], more[0])
    (grown,) = ran(tmp_path / "c", ("mirrored(workers=2)", 64))
    resumed(grown, ran(tmp_path / "d", ("mirrored(workers=4)", 64))[0])
    (broken,) = ran(tmp_path / "e", ("mirrored(workers=2)", 64))
    with (broken / "events" / "launcher.jsonl").open("a") as file:
        file.write(f"{encode(Lost(LAUNCHER, 1.0, 1, 0, 'killed', True))}\n")
    found = calibrate([same, grown, broken], MODEL, CLUSTER)
    assert len(found.runs) == 1
    assert found.left_out == {
        str(grown): "it had 2 to 4 workers, so that its rate is not that of one number of them",
        str(broken): "it lost rank 1, and its rate is that of all workers for a part of the time alone",
    }


@pytest.mark.slow
def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    places = ran(tmp_path, *RUNS[:2])
    found = calibrate([*places, tmp_path / "none"], MODEL, CLUSTER)
    assert len(found.runs) == 2
    assert list(found.left_out) == [str(tmp_path / "none")]
    with pytest.raises(UsageError, match=r"no run can be compared with a prediction: .*none: "):
        calibrate([tmp_path / "none"], MODEL, CLUSTER)
    with pytest.raises(UsageError, match="says no times"):
        calibrate(places, ModelSpec(MODEL.parameters, flops_per_example=1e6), CLUSTER)
    of_gpus = replace(MODEL, origin={"device": "NVIDIA A100"})
    with pytest.raises(UsageError, match=r"^the profile of the model was measured with something else"):
        calibrate(places, of_gpus, CLUSTER)
    assert len(calibrate(places, of_gpus, CLUSTER, force=True).runs) == 2


def test_a_compared_run_keeps_what_was_predicted_of_it(tmp_path: Path) -> None:
    (run,) = ran(tmp_path, ("mirrored", 4))
    (compared,) = calibrate([run], MODEL, CLUSTER).runs
    kept = PredictedRun.of_run(run)
    assert kept is not None
    assert kept.examples_per_s == compared.predicted
    # One from before the run would have said more, so that it stays.
    calibrate([run], Constants(compute=2.0).model(MODEL), CLUSTER)
    assert PredictedRun.of_run(run) == kept
