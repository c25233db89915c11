"""Save in the middle, load into fresh replicas of any strategy, go on: as if nothing had happened."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.data import Loader
from headrace.errors import UsageError
from headrace.strategies import STRATEGIES
from headrace.training.exchange import Replica
from headrace.training.optimizer import StatePiece
from strategies.contract_models import ADAM, MODELS, SGD, Case, Partial, by_name, dense, matrices
from strategies.contract_options import OPTIONS, SCHEDULES
from strategies.contract_runs import Saved, by_hand, distance, drive, held, step, with_replicas
from strategies.test_contract import DOUBLE, ROWS
from training.block_state import Blockwise

COUNT, MIDDLE, END = 9, 4, 9


def _scheduled(name: str, **options: Any) -> Case:
    return Case(dense, options=hr.Options(schedule=SCHEDULES[name], **options))


CASES = {
    "sgd": Case(dense),
    "sgd-partial": Case(Partial),
    "adam": Case(dense, optimizer=partial(torch.optim.Adam, lr=0.01, amsgrad=True)),
    "asgd": Case(dense, optimizer=partial(torch.optim.ASGD, lr=0.1, t0=2)),
    "nadam-partial": Case(Partial, optimizer=partial(torch.optim.NAdam, lr=0.01)),
    "adagrad": Case(dense, optimizer=partial(torch.optim.Adagrad, lr=0.1)),
    "rprop": Case(dense, optimizer=partial(torch.optim.Rprop, lr=0.01)),
    "adafactor": Case(dense, optimizer=partial(torch.optim.Adafactor, lr=0.05)),
    "muon": Case(matrices, optimizer=partial(torch.optim.Muon, lr=0.02)),
    "blocks": Case(dense, optimizer=partial(Blockwise, lr=0.1)),
    "average-partial": Case(Partial, options=hr.Options(ema_decay=0.8)),
    "adam-one-cycle": Case(dense, optimizer=ADAM, options=hr.Options(schedule=SCHEDULES["one-cycle"])),
    "groups-warm-up": Case(dense, optimizer=by_name, options=hr.Options(schedule=SCHEDULES["step"], warmup=6)),
    "epochs-sequential": _scheduled("sequential", schedule_every="epoch"),
    **{f"schedule-{name}": _scheduled(name) for name in SCHEDULES},
    "all-together": OPTIONS["all-together"],
}

SYNCHRONOUS = [
    (name, workers)
    for name, row in ROWS.items()
    if STRATEGIES[name].equals_one_device is True and row.whole
    for workers in row.workers
    if row.replicas(workers) == workers
]
"""Name and number of workers, each of whom holds the whole model."""
WAYS = [
    *[(one, one) for one in SYNCHRONOUS],
    *[(("mirrored", 2), ("central_storage", 3)), (("central_storage", 3), ("mirrored", 2))],
    *[(("central_storage", 2), ("central_storage", 3)), (("one_device", 1), ("central_storage", 2))],
    *[(("mirrored", 3), ("one_device", 1)), (("central_storage", 2), ("one_device", 1))],
]


def all_ranks(saved: list[Saved]) -> Saved:
    assert all(each.settings == saved[0].settings for each in saved)
    return Saved(saved[0].tensors, [piece for each in saved for piece in each.pieces], saved[0].settings)


def run(case: Case, name: str, workers: int, start: int, stop: int, saved: Saved | None = None) -> Saved:
    return all_ranks(drive(case.job(COUNT), ROWS[name].make(workers), workers, start, stop, saved))


def whole(pieces: list[StatePiece]) -> dict[tuple[str, str], torch.Tensor]:
    """Returns every parameter's state by key, put together from its pieces."""
    put: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for piece in pieces:
        put.setdefault((piece.parameter, piece.key), {})[piece.start] = piece.value.flatten()
    return {key: torch.cat([values[start] for start in sorted(values)]) for key, values in put.items()}


@pytest.mark.each_value
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(("saver", "loader"), WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def test_to_save_and_to_go_on_is_no_interruption(case: str, saver: tuple[str, int], loader: tuple[str, int]) -> None:
    if case in ROWS[saver[0]].refuses:
        with pytest.raises(UsageError, match="needs whole parameters"):
            run(CASES[case], *saver, 0, MIDDLE)
        return
    begun = run(CASES[case], *saver, 0, MIDDLE)
    resumed = run(CASES[case], *loader, MIDDLE, END, begun)
    uninterrupted = run(CASES[case], *loader, 0, END)
    assert distance(resumed.tensors, uninterrupted.tensors) <= (0.0 if saver == loader else DOUBLE)
    assert distance(begun.tensors, uninterrupted.tensors) > 1e-4
    assert distance(whole(list(resumed.pieces)), whole(list(uninterrupted.pieces))) <= DOUBLE


@pytest.mark.each_value
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(("name", "workers"), [one for one in SYNCHRONOUS if one[1] > 1])
def test_the_state_of_all_ranks_is_that_of_one_device(case: str, name: str, workers: int) -> None:
    if case in ROWS[name].refuses:
        return
    ours, reference = (run(CASES[case], *who, 0, MIDDLE) for who in ((name, workers), ("one_device", 1)))
    assert distance(whole(list(ours.pieces)), whole(list(reference.pieces))) <= DOUBLE


@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
def test_a_run_begins_with_the_weights_and_buffers_of_rank_0(name: str, workers: int) -> None:
    job, strategy = MODELS["buffers"].job(COUNT), ROWS[name].make(workers)
    estranged = drive(job, strategy, workers, 0, END, estranged=True)
    assert distance(estranged[0].tensors, drive(job, strategy, workers, 0, END)[0].tensors) == 0.0
    assert torch.equal(estranged[-1].tensors["scale"], estranged[0].tensors["scale"])


@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
def test_every_rank_ends_with_the_same_bits(name: str, workers: int) -> None:
    ranks = drive(Case(Partial, optimizer=SGD).job(COUNT), ROWS[name].make(workers), workers, 0, END)
    assert all(distance(rank.tensors, ranks[0].tensors) == 0.0 for rank in ranks)


@pytest.mark.parametrize(("name", "workers"), SYNCHRONOUS)
@pytest.mark.parametrize("case", ["average-partial", "sgd", "all-together"])
def test_weights_and_their_averages_change_places_and_back(name: str, workers: int, case: str) -> None:
    def act(_: int, replica: Replica, loader: Loader) -> list[Saved]:
        for round_, share in enumerate(islice(loader.rounds(), END)):
            step(replica, share, round_)
        seen = [held(replica)]
        # An evaluation that a lost worker ends leaves the averages in place, and the next one takes over.
        with suppress(InterruptedError), replica.exchange.swapped_weights():
            raise InterruptedError
        with replica.exchange.swapped_weights():
            seen.append(held(replica))
        replica.exchange.swap_weights(averaged=False)
        seen.append(held(replica))
        return seen

    job = CASES[case].job(COUNT)
    for weights, averages, again in with_replicas(job, ROWS[name].make(workers), workers, act):
        assert distance(weights.tensors, again.tensors) == 0.0
        assert all(torch.equal(a.value, b.value) for a, b in zip(weights.pieces, again.pieces, strict=True))
        reference = by_hand(job).tensors
        assert distance(averages.tensors, reference) <= DOUBLE
        assert (distance(weights.tensors, reference) > 1e-4) == (job.options.ema_decay is not None)
