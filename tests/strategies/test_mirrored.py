"""Mirrored on devices of their own: gradients by a wire, when backward is over or while it runs."""

from __future__ import annotations

import pytest
import torch

import headrace as hr
from headrace.collectives.base import Collective
from headrace.errors import InfeasiblePlan, UnknownName
from strategies.contract_models import COUNTS, MODELS, VARIANTS
from strategies.contract_options import OPTIONS
from strategies.contract_runs import distance, drive, train
from strategies.test_contract import DOUBLE, assert_equal, assert_same_bits, on_one_device

ROUNDS = 9


@pytest.fixture(params=[1, 100, 1 << 20])
def bucket_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A bucket a parameter, a few, or one for all."""
    monkeypatch.setattr(Collective, "bucket_bytes", (request.param, request.param))
    return request.param


def assert_one_device(model: str, strategy: hr.Mirrored, workers: int) -> None:
    case = {**MODELS, **VARIANTS, **OPTIONS}[model]
    job = case.job(COUNTS["tiny"])
    (reference,) = drive(job, hr.OneDevice(), 1, 0, ROUNDS)
    ranks = drive(job, strategy, workers, 0, ROUNDS, wired=True)
    assert distance(ranks[0].tensors, reference.tensors) <= DOUBLE
    trained = dict(case.model().named_parameters())
    for rank in ranks[1:]:
        assert all((rank.tensors[name] == ranks[0].tensors[name]).all() for name in trained)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("option", ["accumulate-tokens", "all-together", "average-partial", "clip-value-and-norm"])
def test_options_by_a_wire_are_those_of_one_device(option: str, overlap: bool) -> None:
    assert_one_device(option, hr.Mirrored(2, overlap=overlap), 2)


@pytest.mark.parametrize("model", sorted({**MODELS, **VARIANTS}))
@pytest.mark.parametrize("workers", [1, 3])
def test_a_wire_after_backward_is_one_device(model: str, workers: int) -> None:
    assert_one_device(model, hr.Mirrored(workers, overlap=False), workers)


@pytest.mark.each_value
@pytest.mark.parametrize("model", sorted({**MODELS, **VARIANTS}))
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_wire_during_backward_is_one_device(model: str, workers: int, bucket_bytes: int) -> None:
    assert_one_device(model, hr.Mirrored(workers), workers)


def test_a_codec_on_one_host_is_refused() -> None:
    sharded = hr.TensorParallel(devices=2)
    for strategy in (hr.Mirrored(2, codec="int8"), hr.Hybrid(hr.Mirrored(2, codec="int8"), sharded)):
        with pytest.raises(
            InfeasiblePlan, match=r"codec='int8', which saves bytes between hosts, and there is one host"
        ):
            drive(MODELS["mlp"].job(COUNTS["tiny"]), strategy, 2, 0, 1)
    with pytest.raises(UnknownName, match="int4"):
        hr.Mirrored(codec="int4")


IN_PLACE = {
    "mirrored": hr.Mirrored(2),
    "mirrored of three": hr.Mirrored(3),
    "central storage": hr.CentralStorage(2),
    "central storage without some": hr.CentralStorage(2, min_workers=1),
}


@pytest.mark.parametrize("strategy", sorted(IN_PLACE))
@pytest.mark.parametrize("model", ["mlp", "tied"])
def test_gradients_made_where_they_are_summed_are_those_of_one_device(
    model: str, strategy: str, placed: list[bool]
) -> None:
    """Other ranks read them there, and the next backward writes over them."""
    case = {**MODELS, **VARIANTS}[model]
    job = case.job(COUNTS["uneven"])
    outcome = train(job, IN_PLACE[strategy])
    assert_equal(outcome, on_one_device(case, "uneven", torch.float64, None), DOUBLE)
    assert_same_bits(outcome, train(job, IN_PLACE[strategy]))
    assert sum(placed) > len(placed) / 2
