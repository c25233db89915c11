"""Recommendations: what wins, why the others lose, and when not to distribute."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import headrace as hr
from headrace.cli import run
from headrace.cli.commands.recommend import _needed, seconds_of
from headrace.cli.jobfile import load_job
from headrace.errors import InfeasiblePlan, UsageError
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.recommendation.candidates import call_text, candidates, counts
from headrace.prediction.recommendation.offers import Goal, Offer, Pruned, Question, search
from headrace.prediction.recommendation.page import write_page
from headrace.prediction.recommendation.recommend import Recommendation, knee, recommend
from headrace.prediction.simulation.simulate import simulate
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.strategies import resolve
from prediction.simulation.scenes import gpus, model

Capture = pytest.CaptureFixture[str]


def hosts(count: int, *, megabits: float = 10_000, price: float = 0.1) -> Cluster:
    """CPU hosts of one core, so that each is a device."""
    each = tuple(Host(f"h{index}", 1, 8_000_000_000, price_per_hour=price) for index in range(count))
    return Cluster(each, link_bytes_per_s=megabits * 1e6 / 8)


def of_speeds(*speeds: float) -> Cluster:
    """Hosts with two devices each, whose devices have these speeds."""
    cluster = gpus(len(speeds), 2)
    return replace(cluster, hosts=tuple(map(lambda host, speed: replace(host, speed=speed), cluster.hosts, speeds)))


def found(cluster: Cluster, megabytes: int = 10, **changes) -> Recommendation:
    return recommend(model(megabytes, layers=True), cluster, global_batch_size=64, **changes)


def test_a_quick_network_makes_all_devices_worth_it() -> None:
    best = found(hosts(8))
    assert best.winner.candidate.devices == 8
    assert best.distribute
    assert best.speed_up is not None
    assert 4 < best.speed_up < 8
    assert best.winner.candidate.as_one_device
    assert best.winner.slow_s > best.winner.seconds


def test_a_slow_network_means_one_device() -> None:
    best = found(hosts(8, megabits=5), megabytes=400)
    assert best.winner.text == "one_device"
    assert (best.distribute, best.knee) == (False, 1)
    mirrored = next(offer for offer in best.best if offer.candidate.family == "mirrored")
    assert "x the time; its bottleneck: network" in best.why_not(mirrored)


def test_the_winner_is_no_slower_than_any_candidate_that_may_win() -> None:
    best = found(hosts(8))
    able = [offer for offer in best.offers if offer.candidate.as_one_device and not offer.refused]
    assert best.winner.seconds <= 1.01 * min(offer.seconds for offer in able)
    assert all(later.seconds >= offer.seconds / 1.01 for offer, later in pairwise(best.offers))
    assert len(best.offers) + len(best.bounded) + sum(number for *_, number in best.misfits) == best.tried
    # What it says is what a simulation says.
    alone = simulate(model(10, layers=True), hosts(8), best.winner.candidate.strategy, global_batch_size=64)
    assert best.winner.seconds == pytest.approx(1_000_000 / alone.examples_per_s, rel=0.02)


VARIED = Assumptions(spread=0.3, slow_share=0.2, slow_factor=3.0)


def best_of(found: list[object]) -> dict[tuple[str, int, bool, bool], tuple[float, float]]:
    """The least time and the least money of each family on each number of devices."""
    best: dict[tuple[str, int, bool, bool], tuple[float, float]] = {}
    for each in found:
        if isinstance(each, Offer):
            own = each.candidate
            key = (own.family, own.devices, own.as_one_device, bool(each.refused))
            seconds, money = best.get(key, (each.seconds, each.money))
            best[key] = (min(seconds, each.seconds), min(money, each.money))
    return best


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster",
    [hosts(8), hosts(8, megabits=100), gpus(2, 4), gpus(4, 2, gigabytes_per_s=0.1), of_speeds(1.0, 0.5, 2.0, 0.25)],
)
@pytest.mark.parametrize("assumed", [Assumptions(), VARIED])
def test_what_is_only_bounded_is_not_the_best_of_anything(cluster: Cluster, assumed: Assumptions) -> None:
    question = Question(model(20, layers=True), cluster, Goal(1_000_000, 64), assumed)
    tried = list(candidates(question.model, cluster, question.goal.global_batch_size))
    bounded = search(tried, question)
    simulated = search(tried, question, bounds=False)
    skipped = [each for each in bounded if isinstance(each, Pruned)]
    assert len(skipped) > len(tried) / 10
    taken = {each.candidate.text: each.seconds for each in simulated if isinstance(each, Offer)}
    for each in skipped:
        assert each.least_s <= taken[each.candidate.text], each.candidate.text
        assert taken[each.better] <= taken[each.candidate.text]
    few, every = best_of(bounded), best_of(simulated)
    for (family, devices, as_one_device, refused), (seconds, money) in every.items():
        # Another one that is the same to the ranking, or better in it, is there.
        ahead = [
            few[key]
            for same in {True, as_one_device}
            for able in {False, refused}
            if (key := (family, devices, same, able)) in few
        ]
        assert min(each[0] for each in ahead) <= seconds
        assert min(each[1] for each in ahead) <= money


def test_pipelines_make_no_micro_batches_besides_their_own() -> None:
    known = model(10, layers=True)
    assert known.compute is not None
    (batch,) = known.compute.batches
    large = tuple(replace(layer, saved_bytes=10**9) for layer in batch.layers)
    compute = ComputeProfile((replace(batch, saved_bytes=4 * 10**9, layers=large),))
    scarce = recommend(replace(known, layers=large, compute=compute), gpus(1, 4, memory=2 * 10**9), global_batch_size=8)
    staged = [each for each in scarce.offers if "pipeline" in each.text]
    assert staged
    assert {each.accumulate for each in staged} == {1}
    assert any(each.accumulate > 1 for each in scarce.offers)


def test_hosts_that_fail_all_the_time_are_named() -> None:
    failing = tuple(replace(host, hours_between_failures=1e-3) for host in hosts(500).hosts)
    with pytest.raises(InfeasiblePlan, match="is hours_between_failures in hours"):
        recommend(
            model(10), replace(hosts(1), hosts=failing), global_batch_size=64, assumptions=Assumptions(restart_s=1e4)
        )


def test_other_updates_win_only_where_they_are_asked_for() -> None:
    slow = hosts(8, megabits=200)
    best, any_updates = found(slow), found(slow, any_updates=True)
    assert not any_updates.winner.candidate.as_one_device
    assert any_updates.winner.seconds < best.winner.seconds
    assert "of which it may need more" in best.why_not(any_updates.winner)


def test_money_and_deadline() -> None:
    cluster = hosts(8, megabits=2000)
    cheapest, quickest = found(cluster, by_money=True), found(cluster)
    assert cheapest.winner.money < quickest.winner.money
    assert cheapest.winner.seconds > quickest.winner.seconds
    between = (cheapest.winner.seconds + quickest.winner.seconds) / 2
    in_time = found(cluster, deadline_s=between)
    assert in_time.winner.seconds <= between
    assert in_time.winner.money < quickest.winner.money
    too_soon = found(cluster, deadline_s=1.0)
    assert too_soon.winner.seconds == quickest.winner.seconds


def test_what_headrace_cannot_run_does_not_win() -> None:
    best = found(gpus(4, 2))
    assert len(best.winner.hosts) == 4
    assert not best.winner.refused
    refused = [offer for offer in best.offers if offer.refused]
    assert [offer.hosts for offer in refused] == [("h0",), ("h0",)]
    assert all("headrace cannot run it here: mirrored has codec=" in best.why_not(offer) for offer in refused)


def test_activations_that_do_not_fit_are_made_in_pieces() -> None:
    profile = ComputeProfile((BatchProfile(8, 0.01, 0.02, 800_000_000),))
    known = ModelSpec((ParameterSpec("w", (1000,)),), compute=profile)
    best = recommend(known, gpus(1, 1, memory=500_000_000), global_batch_size=8)
    assert (best.winner.text, best.winner.accumulate) == ("one_device", 2)
    with pytest.raises(
        InfeasiblePlan, match=r"none of \d+ candidates fits on this cluster; the largest, one_device: .*too few"
    ):
        recommend(known, gpus(1, 1, memory=50_000_000), global_batch_size=8)


@pytest.mark.parametrize(
    ("rates", "devices"),
    [({1: 1.0, 2: 1.9, 4: 2.4, 8: 4.5}, 2), ({1: 1.0, 2: 1.4}, 1), ({1: 1.0, 2: 1.9, 4: 3.6}, 4)],
)
def test_the_knee_is_where_more_bring_less_than_half(rates: dict[int, float], devices: int) -> None:
    offer = found(hosts(1)).winner
    offers = [
        replace(
            offer,
            candidate=replace(offer.candidate, devices=count),
            prediction=replace(offer.prediction, examples_per_s=rate),
        )
        for count, rate in rates.items()
    ]
    assert knee(offers) == devices


def test_the_command_names_the_same_strategy() -> None:
    for candidate in candidates(model(layers=True), hosts(8), 64):
        assert resolve(candidate.text) == candidate.strategy, candidate.text
    assert call_text(hr.Mirrored(2)) == "mirrored(workers=2)"
    assert (
        call_text(hr.Hybrid(hr.Mirrored(2), hr.Pipeline(4)))
        == "hybrid(outer=mirrored(workers=2), inner=pipeline(stages=4))"
    )
    assert counts(12) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"by_money": True, "cluster": hosts(2, price=0.0)}, "no host of the cluster has a price_per_hour"),
        ({"deadline_s": 0.0}, "deadline must be above 0 s"),
        ({"examples": 0}, "examples must be a whole number of at least 1"),
    ],
)
def test_what_is_refused(changes: dict[str, object], says: str) -> None:
    cluster = changes.pop("cluster", hosts(2))
    with pytest.raises(UsageError, match=says):
        found(cluster, **changes)  # type: ignore[arg-type]


def test_a_model_without_a_batch_needs_one() -> None:
    known = ModelSpec((ParameterSpec("w", (1000,)),), flops_per_example=1e9)
    quick = replace(gpus(1), hosts=(replace(gpus(1).hosts[0], device_flops=1e12),))
    with pytest.raises(UsageError, match="give global_batch_size"):
        recommend(known, quick)
    assert recommend(known, quick, global_batch_size=10).winner.text == "one_device"


def test_a_model_that_fits_nowhere_is_told_the_smallest_cluster_that_would_do() -> None:
    large = model(8_000, layers=True)
    with pytest.raises(InfeasiblePlan, match=r"too few; .*; the smallest cluster that would do") as told:
        recommend(large, hosts(1), global_batch_size=64)
    said = re.search(r"has (\d+) hosts like h0, with ([a-z_]+)\(", str(told.value))
    assert said
    enough = int(said[1])
    assert enough > 2
    assert said[2] in {offer.candidate.family for offer in recommend(large, hosts(enough), global_batch_size=64).offers}
    with pytest.raises(InfeasiblePlan, match=f"has {enough} hosts like h0"):
        recommend(large, hosts(enough - 1), global_batch_size=64)


def test_a_model_that_no_number_of_hosts_divides() -> None:
    with pytest.raises(InfeasiblePlan, match="not even 256 hosts like h0 would do"):
        recommend(model(20_000), gpus(3), global_batch_size=8)


def test_times_of_a_deadline() -> None:
    assert [seconds_of(text) for text in ("90s", "90min", "2h", "0.5d")] == [90.0, 5400.0, 7200.0, 43200.0]
    for text in ("2", "h", "-2h", "soon"):
        with pytest.raises(UsageError, match="--deadline takes a time above 0"):
            seconds_of(text)


@pytest.mark.slow
def test_a_page_with_curves(tmp_path: Path) -> None:
    best = found(hosts(4))
    write_page(tmp_path / "a" / "page.html", best, ["One sentence."], ["headrace train \\", "    --set a=1"])
    text = (tmp_path / "a" / "page.html").read_text()
    assert "<pre>headrace train \\\n    --set a=1</pre>" in text
    assert "<b>one_<wbr/>device</b>: " in text
    assert text.count("<figure>") == 3
    assert "Money by devices" in text
    assert best.winner.text in text


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    model(10, layers=True).save(tmp_path / "model.json")
    (tmp_path / "cluster.toml").write_text(hosts(4).toml())
    command = ["recommend", str(tmp_path / "model.json"), "--cluster", str(tmp_path / "cluster.toml")]
    assert run([*command, "--global-batch-size", "64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["distribute"] is True
    launched = f"headrace launch --cluster {tmp_path / 'cluster.toml'} --workers 4 job.py --strategy "
    assert document["command"].startswith(launched)
    assert document["notes"][0] == "The command needs global_batch_size=64 in job.py."
    assert len(document["offers"]) + len(document["bounded"]) <= document["candidates"]
    assert all(each["least_seconds"] > 0 for each in document["bounded"])
    assert document["offers"][0]["seconds"] <= document["winner"]["seconds"]
    assert run([*command, "--global-batch-size", "64", "--deadline", "2h"]) == 0
    out = capsys.readouterr().out
    told = " ".join(out.split())
    assert out.startswith("Do not distribute: one device trains 1,000,000 examples in rounds of 64")
    assert "before the deadline, and no other costs less. The fastest is fully_sharded(workers=4) on 4 devices" in told
    assert "no other is faster" not in told
    assert "\nheadrace train job.py --strategy one_device\n" in out
    assert f"{len(document['bounded'])} were bounded, not simulated" in " ".join(out.split())
    assert "\nThe command needs global_batch_size=64 in job.py.\n" in out
    assert max(map(len, out.splitlines())) <= 80
    assert run([*command, "--set", "a=1"]) == 2
    assert "--set is for a job's file" in capsys.readouterr().err


def test_the_command_of_rented_machines_names_them_and_that_of_some_hosts_too(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A batch of 2 leaves one host idle.
    model(1, layers=True).save(tmp_path / "model.json")
    Path("cluster.toml").write_text(hosts(3).toml())
    asked = ["recommend", "model.json", "--cluster", "cluster.toml", "--global-batch-size", "2", "--json"]
    assert run([*asked, "--examples", "3000000"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = document["winner"]["hosts"]
    words = shlex.split(document["command"])
    assert len(names) == 2
    assert words[: words.index("job.py")] == [
        *("headrace", "launch", "--cluster", "cluster.toml", "--hosts", ",".join(names)),
        *("--workers", str(len(names))),
    ]
    assert words[-2:] == ["--strategy", document["winner"]["strategy"]]


JOB = """
import torch
from torch import nn

import headrace as hr


def job(width: int = 4, note: str = "") -> hr.Job:
    torch.manual_seed(0)
    return hr.Job(
        model=lambda: nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=hr.data.from_arrays(torch.randn(64, width), torch.zeros(64, dtype=torch.int64)),
        global_batch_size=16,
        epochs=1,
    )
"""


@pytest.mark.full
@pytest.mark.slow
def test_the_command_runs_as_it_stands(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("here.toml").write_text(Cluster((Host("here", 2, 8_000_000_000),)).toml())
    settings = ["--set", "width=6", "--set", "note='a b'"]
    assert run(["recommend", "job.py", "--cluster", "here.toml", "--any-updates", *settings, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    words = shlex.split(document["command"])
    assert words[0] == "headrace"
    assert words[-4:] == settings
    assert run([*words[1:], "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["status"] == "ok"


@pytest.mark.slow
def test_micro_batches_that_the_winner_needs_are_in_the_command(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    profile = ComputeProfile((BatchProfile(8, 0.01, 0.02, 800_000_000),))
    ModelSpec((ParameterSpec("w", (1000,)),), compute=profile).save(Path("model.json"))
    Path("cluster.toml").write_text(Cluster((Host("here", 1, 500_000_000),)).toml())
    asked = ["recommend", "model.json", "--cluster", "cluster.toml", "--global-batch-size", "8", "--examples", "800"]
    assert run(asked) == 0
    out = capsys.readouterr().out
    assert "Each share is cut into 2 micro-batches, so that activations fit." in out
    assert run([*asked, "--json"]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert command == "headrace train job.py --strategy one_device --set options.accumulate=2"
    assert f"\n{command}\n" in out
    words = shlex.split(command)
    assert load_job(Path(words[2]), [words[-1]]).options.accumulate == 2
    assert run([*words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "ok"


def test_the_batch_that_the_job_must_say_is_named() -> None:
    best = found(hosts(2))
    assert best.winner.prediction.global_batch_size == 64
    assert _needed(best, Path("job.py"), 64) == []
    assert "needs global_batch_size=64 in place of 16 in" in _needed(best, Path("digits.py"), 16)[0]


def test_nestings_of_shards_stages_and_slices_are_tried() -> None:
    """And what stands in the text is what was tried."""
    tried = list(candidates(model(10, layers=True), gpus(2, 4), 64))
    nested = {each.text for each in tried if each.devices == 8 and each.family == "hybrid"}
    for wanted in (
        hr.Hybrid(hr.Mirrored(2), hr.FullySharded(4)),
        hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(4)),
        hr.Hybrid(hr.Pipeline(2, 8, "1f1b"), hr.TensorParallel(4)),
        hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 8, "1f1b"), hr.TensorParallel(2)),
    ):
        assert call_text(wanted) in nested
    assert all(resolve(each.text) == each.strategy for each in tried)
