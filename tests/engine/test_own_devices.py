"""Ranks that each see other devices, and a device that fails, on the simulated accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from simulated.cluster import Ended, ranks, started

pytestmark = pytest.mark.slow

VISIBLE = "FAKE_VISIBLE_DEVICES"
PROGRAM = """
import json, os
from simulated import nccl
import torch
import headrace as hr
from engine.test_own_devices import job

torch.set_num_threads(1)
named = json.loads(os.environ["DEVICE"])
try:
    run = hr.fit(job(nccl.cross_entropy), "mirrored", device=named, check=False, encrypt=False)
    print(json.dumps({"devices": [[role.device, role.identity] for role in run.plan.roles],
                      "model": [each.tolist() for each in run.model.parameters()]}), flush=True)
except hr.errors.HeadraceError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
"""
FAILS = """
import json
from simulated import nccl
import torch
import headrace as hr
from engine.test_own_devices import job

calls = []

def loss(output, target):
    calls.append(1)
    if str(output.device) == "fake:1" and len(calls) == 3:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\\nCUDA kernel errors might be asynchronous")
    return nccl.cross_entropy(output, target)

try:
    hr.fit(job(loss), hr.Mirrored(2), device="fake", check=False)
except hr.errors.WorkerFailed as error:
    print(json.dumps({"rank": error.rank, "error": str(error)}), flush=True)
"""


def job(loss: Any) -> hr.Job:
    torch.manual_seed(0)
    return hr.Job(
        model=lambda: nn.Linear(4, 2).double(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(torch.randn(32, 4, dtype=torch.float64), torch.arange(32) % 2),
        global_batch_size=8,
        steps=4,
    )


def launched(folder: Path, own: list[Mapping[str, str]], hosts: int = 1, device: str = '"fake"') -> Ended:
    told = ranks(hosts, len(own) // hosts)
    environment = [{**one, **mine, "DEVICE": device} for one, mine in zip(told, own, strict=True)]
    return started(PROGRAM, folder, environment, devices=4, timeout_s=500)


def alone() -> list[Tensor]:
    return list(hr.fit(job(F.cross_entropy), device="cpu", check=False, engine=hr.ThreadEngine()).model.parameters())


@pytest.mark.parametrize(
    ("own", "hosts", "device", "through_host"),
    [
        ([{VISIBLE: "0"}, {VISIBLE: "1"}], 1, '"fake"', False),
        ([{VISIBLE: "3"}, {VISIBLE: "1"}], 1, '["fake:0"]', False),
        ([{VISIBLE: "1"}, {VISIBLE: "1"}], 1, '["fake:0", "fake:0"]', True),
        ([{VISIBLE: str(index)} for index in range(4)], 2, '"fake"', False),
    ],
    ids=["own", "own and named", "shared", "hosts"],
)
def test_ranks_compute_on_the_devices_that_they_were_given(
    tmp_path: Path, own: list[Mapping[str, str]], hosts: int, device: str, through_host: bool
) -> None:
    ended = launched(tmp_path, own, hosts, device)
    said = [each[0] for each in ended.said]
    assert all("model" in each for each in said), (said, ended.errors)
    assert [name for name, _ in said[0]["devices"]] == ["fake:0"] * len(own)
    assert len({identity for _, identity in said[0]["devices"]}) == len({mine[VISIBLE] for mine in own})
    for each in said:
        for mine, one in zip(each["model"], alone(), strict=True):
            assert float((torch.tensor(mine, dtype=torch.float64) - one.detach()).abs().max()) <= 1e-9
    assert any(ended.calls.values()) != through_host


def test_a_rank_without_a_device_is_named_on_all(tmp_path: Path) -> None:
    ended = launched(tmp_path, [{VISIBLE: "0"}, {VISIBLE: ""}], device='"auto"')
    said = "InfeasiblePlan: rank 1 on host-0 sees no fake accelerator, and mirrored computes on fake"
    assert [each[0]["error"].startswith(said) for each in ended.said] == [True, True]


def test_a_device_that_fails_is_named_with_rank_host_and_remedy(tmp_path: Path) -> None:
    (said,) = started(FAILS, tmp_path, [{"HEADRACE_HOST": "b"}], timeout_s=500).said
    assert said[0]["rank"] == 1
    assert said[0]["error"].startswith(
        "rank 1 on b failed: RunFailed: fake:1 of rank 1 on b cannot be used: CUDA error: uncorrectable ECC error "
        "encountered; its hardware or driver has failed"
    )
    assert "\n" not in said[0]["error"]
