"""Under every strategy blocks that run again in backward change no bit."""

from __future__ import annotations

import dataclasses

import pytest

import headrace as hr
from headrace.errors import UsageError
from headrace.training.recompute.blocks import find_blocks
from strategies.contract_models import COUNTS, MODELS, VARIANTS
from strategies.contract_runs import train
from strategies.test_contract import EVERY, ROWS, assert_same_bits, of


@pytest.mark.each_value
@of([name for name in EVERY if ROWS[name].model is None])
@pytest.mark.parametrize("choice", ["full", "selective", "*"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "tied", "buffers", "tokens"])
def test_running_blocks_again_changes_no_bit(name: str, workers: int, model: str, choice: str) -> None:
    case = {**MODELS, **VARIANTS}[model]
    plain, again = (dataclasses.replace(case, options=hr.Options(recompute=each)) for each in (None, choice))
    # Of several that do not wait, the order of pushes is that of the machine.
    workers = min(workers, ROWS[name].many[0])
    strategy, job = ROWS[name].make(workers), again.job(COUNTS["uneven"], optimizer=ROWS[name].optimizer)
    if any(refusal.option == "recompute" for refusal in strategy.refusals()):
        with pytest.raises(UsageError, match="leave"):
            hr.fit(job, strategy)
        return
    if choice != "*" and model in ("tied", "buffers", "tokens"):
        with pytest.raises(UsageError, match="has none with parameters"):
            find_blocks(job.model, choice)
        return
    other = train(plain.job(COUNTS["uneven"], optimizer=ROWS[name].optimizer), ROWS[name].make(workers))
    assert_same_bits(train(job, strategy), other)
