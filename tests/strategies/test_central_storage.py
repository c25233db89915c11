"""Central storage: what one worker computes is in the memory that all share."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.training.central_storage.exchange import CentralCopy
from headrace.training.gradients import UsedParameters
from strategies.contract_models import COUNTS, MODELS
from strategies.contract_runs import drive


def test_gradients_are_in_host_memory_before_other_workers_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    bring, settle = CentralCopy.bring, UsedParameters.settle

    def noted_bring(copy: CentralCopy) -> None:
        calls.append("bring")
        bring(copy)

    def noted_settle(used: UsedParameters) -> tuple[int, ...]:
        calls.append("settle")
        return settle(used)

    monkeypatch.setattr(CentralCopy, "bring", noted_bring)
    monkeypatch.setattr(UsedParameters, "settle", noted_settle)
    drive(next(iter(MODELS.values())).job(COUNTS["even"]), hr.CentralStorage(1), 1, 0, 2)
    assert calls == ["bring", "settle"] * 2
