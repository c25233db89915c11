"""fp16 with a loss scale: one scale for all ranks, which shrinks where gradients overflow and grows where they do not.

Public runs have it on GPUs alone; autocast to float16 works on a CPU too, and slowly, which is enough to look at it.
"""

from __future__ import annotations

import dataclasses
from itertools import islice

import pytest
import torch

import headrace as hr
from headrace.data import Loader
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Replica
from strategies.contract_models import COUNTS, Case, Partial, dense
from strategies.contract_runs import Saved, distance, drive, held, step, with_replicas
from strategies.test_contract import ROWS
from strategies.test_nonfinite import Poison, Syringe, same
from strategies.test_pipeline import merged
from strategies.test_state import SYNCHRONOUS

ROUNDS = 9
START = 2.0**16

CASES = {
    "plain": Case(dense, options=hr.Options(precision="fp16")),
    "clip-norm": Case(dense, options=hr.Options(precision="fp16", clip_norm=0.3)),
    "clip-both": Case(Partial, options=hr.Options(precision="fp16", clip_norm=0.3, clip_value=0.1)),
    "accumulate": Case(dense, options=hr.Options(precision="fp16", accumulate=2, ema_decay=0.9)),
}
# A product in fp16 keeps 11 bits, and nine rounds at a rate of 0.1 add up to some thousandths.
HALF = 5e-3


def scaled(saved: Saved, value: float) -> Saved:
    """Returns the same with another loss scale."""
    return Saved(saved.tensors, saved.pieces, {**saved.settings, "scale": {"value": value, "good": 0}})


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
@pytest.mark.parametrize("case", sorted(CASES))
def test_it_trains_as_full_precision_does(name: str, workers: int, case: str) -> None:
    job, options = CASES[case].job(COUNTS["uneven"], torch.float32), CASES[case].options
    begun = scaled(drive(job, hr.OneDevice(), 1, 0, 0)[0], 2.0**10)
    ranks = drive(job, ROWS[name].make(workers), workers, 0, ROUNDS, begun)
    whole = hr.Options(clip_norm=options.clip_norm, clip_value=options.clip_value)
    (reference,) = drive(
        Case(CASES[case].model, options=whole).job(COUNTS["uneven"], torch.float32), hr.OneDevice(), 1, 0, ROUNDS
    )
    assert 0 < distance(ranks[0].tensors, reference.tensors) < HALF
    assert all(rank.settings["scale"] == {"value": 2.0**10, "good": ROUNDS} for rank in ranks)


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
@pytest.mark.parametrize("case", sorted(CASES))
def test_overflow_is_decided_alike_skips_the_update_and_halves_the_scale(name: str, workers: int, case: str) -> None:
    def act(rank: int, replica: Replica, loader: Loader) -> list[float]:
        start = held(replica)
        replica.load(start.pieces, scaled(start, 2.0**28).settings)
        scales, verdicts = [], []
        for round_, share in enumerate(islice(loader.rounds(), 25)):
            before = held(replica)
            verdicts.append(step(replica, share, round_))
            assert verdicts[-1] in (StepDecision(), StepDecision(False, (), overflow=True))
            assert same(held(replica), before) != verdicts[-1].apply
            scales.append(before.settings["scale"]["value"])
        after = [scale * (1.0 if verdict.apply else 0.5) for scale, verdict in zip(scales, verdicts, strict=True)]
        assert after[:-1] == scales[1:]
        assert verdicts[-1].apply
        return scales

    ranks = with_replicas(CASES[case].job(COUNTS["even"], torch.float32), ROWS[name].make(workers), workers, act)
    assert ranks == [ranks[0]] * workers
    assert ranks[0][-1] < 2.0**24


@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_gradient_that_overflows_on_one_rank_does_so_for_all(name: str, workers: int, case: str) -> None:
    def act(rank: int, replica: Replica, loader: Loader) -> list[StepDecision]:
        shares, syringe = loader.rounds(), Syringe(replica.compute.module)
        verdicts = []
        for round_, place in enumerate((0.7, "loss")):
            before, share = held(replica), next(shares)
            guilty = rank == workers - 1
            poison = Poison(rank, place, "inf" if place != "loss" else "nan")
            verdicts.append(step(replica, syringe.fill(poison, share) if guilty else share, round_))
            syringe.empty()
            assert same(held(replica), before)
        assert held(replica).settings["scale"] == {"value": START / 4, "good": 0}
        assert step(replica, next(shares), 2) == StepDecision()
        return verdicts

    ranks = with_replicas(CASES[case].job(COUNTS["even"], torch.float32), ROWS[name].make(workers), workers, act)
    assert ranks == [[StepDecision(False, (), overflow=True), StepDecision(False, (workers - 1,))]] * workers


@pytest.mark.parametrize(
    ("saver", "loader"), [(one, one) for one in SYNCHRONOUS] + [(("central_storage", 2), ("mirrored", 3))], ids=str
)
def test_the_scale_is_saved_and_goes_on(saver: tuple[str, int], loader: tuple[str, int]) -> None:
    job = CASES["clip-norm"].job(COUNTS["uneven"], torch.float32)

    def run(who: tuple[str, int], start: int, stop: int, saved: Saved) -> Saved:
        ranks = drive(job, ROWS[who[0]].make(who[1]), who[1], start, stop, saved)
        return Saved(ranks[0].tensors, [piece for rank in ranks for piece in rank.pieces], ranks[0].settings)

    begun = scaled(drive(job, hr.OneDevice(), 1, 0, 1)[0], 2.0**9)
    middle = run(saver, 1, 5, begun)
    assert middle.settings["scale"] == {"value": 2.0**9, "good": 4}
    resumed, uninterrupted = run(loader, 5, ROUNDS, middle), run(loader, 1, ROUNDS, begun)
    assert resumed.settings == uninterrupted.settings
    assert distance(resumed.tensors, uninterrupted.tensors) <= (0.0 if saver == loader else HALF)


STAGED = {
    "1f1b": hr.Pipeline(2, 4, "1f1b"),
    "recomputed": hr.Pipeline(2, 4, recompute="always"),
    "late-weights": hr.Pipeline(2, 4, "zb_h1"),
    "replicas": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 2)),
}


@pytest.mark.parametrize("how", sorted(STAGED))
@pytest.mark.parametrize("value", [2.0**10, 2.0**28], ids=["fits", "overflows"])
def test_stages_decide_on_one_scale_and_train_as_one_device(how: str, value: float) -> None:
    """Whose micro-batches are the same, since gradients of other pieces overflow at other scales."""
    options = hr.Options(precision="fp16", clip_norm=0.3)
    job = Case(dense, options=options).job(COUNTS["even"], torch.float32)
    begun = scaled(drive(job, hr.OneDevice(), 1, 0, 0)[0], value)
    workers = 4 if how == "replicas" else 2
    ranks = drive(job, STAGED[how], workers, 0, 2 * ROUNDS, begun)
    pieces = dataclasses.replace(job, options=dataclasses.replace(options, accumulate=4))
    (reference,) = drive(pieces, hr.OneDevice(), 1, 0, 2 * ROUNDS, begun)
    assert all(rank.settings["scale"] == reference.settings["scale"] for rank in ranks)
    assert (reference.settings["scale"]["value"] < value) == (value == 2.0**28)
    assert distance(merged(ranks), reference.tensors) < HALF / 10
    assert distance(reference.tensors, begun.tensors) > 10 * HALF
