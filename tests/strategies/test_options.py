"""Every option of training, under every synchronous strategy: as a loop of plain PyTorch does it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import headrace as hr
from headrace.errors import UsageError
from strategies.contract_models import COUNTS, Case
from strategies.contract_options import BF16, BF16_NAMES, OPTIONS
from strategies.contract_runs import Outcome, by_hand, distance, train
from strategies.test_contract import (
    DOUBLE,
    ROWS,
    assert_equal,
    assert_same_bits,
    every_synchronous_strategy,
    on_one_device,
)

# A product in bf16 keeps 8 bits, and batches that are cut elsewhere round elsewhere: about a per cent of a gradient,
# of which a dozen rounds at a rate of 0.1 make some hundredths.
HALF = 3e-2


@pytest.mark.each_value
@pytest.mark.parametrize("size", ["uneven", "tiny"])
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_one_device_is_a_loop_of_plain_pytorch_bit_for_bit(option: str, size: str) -> None:
    case = OPTIONS[option]
    outcome = on_one_device(case, size, torch.float64, None)
    assert_same_bits(dataclasses.replace(outcome, metrics={}), by_hand(case.job(COUNTS[size])))


@pytest.mark.each_value
@every_synchronous_strategy
@pytest.mark.parametrize("size", ["uneven", "tiny"])
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_any_number_of_workers_is_one_device(name: str, workers: int, size: str, option: str) -> None:
    case, strategy = OPTIONS[option], ROWS[name].make(workers)
    if option in ROWS[name].refuses:
        with pytest.raises(UsageError, match="needs whole parameters"):
            train(case.job(COUNTS[size]), strategy)
        return
    outcome = train(case.job(COUNTS[size]), strategy)
    assert_equal(outcome, on_one_device(case, size, torch.float64, None), DOUBLE)


def without(case: Case, **changes: object) -> Outcome:
    options = dataclasses.replace(case.options, **changes)  # type: ignore[arg-type]
    return train(dataclasses.replace(case, options=options).job(COUNTS["uneven"]), hr.OneDevice())


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_micro_batches_change_nothing_and_all_else_does(option: str) -> None:
    """An option that bites nowhere would prove nothing."""
    case = OPTIONS[option]
    outcome = on_one_device(case, "uneven", torch.float64, None)
    assert_equal(without(case, accumulate=1), outcome, DOUBLE)
    plain = {field.name: field.default for field in dataclasses.fields(hr.Options)}
    for field in ("clip_value", "clip_norm", "schedule", "warmup", "ema_decay"):
        if getattr(case.options, field) != plain[field]:
            assert distance(without(case, **{field: plain[field]}).tensors, outcome.tensors) > 1e-4, field


@pytest.mark.parametrize("option", BF16_NAMES)
def test_one_device_in_bf16_is_torch_with_autocast_bit_for_bit(option: str) -> None:
    case = BF16[option]
    outcome = on_one_device(case, "uneven", torch.float32, None)
    assert_same_bits(dataclasses.replace(outcome, metrics={}), by_hand(case.job(COUNTS["uneven"], torch.float32)))
    assert {tensor.dtype for tensor in outcome.tensors.values()} == {torch.float32}
    whole = dataclasses.replace(case, options=dataclasses.replace(case.options, precision="fp32"))
    assert distance(outcome.tensors, on_one_device(whole, "uneven", torch.float32, None).tensors) > 1e-5


@pytest.mark.each_value
@every_synchronous_strategy
@pytest.mark.parametrize("option", BF16_NAMES)
def test_any_number_of_workers_is_one_device_in_bf16(name: str, workers: int, option: str) -> None:
    case = BF16[option]
    outcome = train(case.job(COUNTS["uneven"], torch.float32), ROWS[name].make(workers))
    assert_equal(outcome, on_one_device(case, "uneven", torch.float32, None), HALF)
