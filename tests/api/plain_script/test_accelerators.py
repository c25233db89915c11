"""A plain script on accelerators: each process's model on a device of its own, on one host and on several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from headrace.api.plain_script import script_devices
from headrace.errors import UsageError
from simulated.cluster import Ended, ranks, started

VISIBLE = "FAKE_VISIBLE_DEVICES"

PROGRAM = """
import json, os, sys
from simulated import nccl
import torch
import headrace as hr
from api.plain_script.test_accelerators import trained

torch.set_num_threads(1)
here = hr.processes()
try:
    device = os.environ.get("DEVICE") or here.device
    model, first = trained(device, lambda *parts: hr.setup(*parts, encrypt="ENCRYPT" in os.environ))
except hr.errors.HeadraceError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    raise SystemExit(1)
print(json.dumps({"device": device, "first": first, "model": [each.tolist() for each in model.parameters()],
                  "buffers": [each.tolist() for each in model.buffers()]}), flush=True)
"""


def trained(device: str, setup: Any) -> tuple[nn.Module, float]:
    """What a script does on a device; returns its model, and a number that it draws there."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double().to(device)
    data = torch.utils.data.TensorDataset(torch.randn(22, 4, dtype=torch.float64), torch.arange(22) % 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = setup(model, optimizer, loader)
    for _ in range(2):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss: Tensor = F.cross_entropy(model(inputs.to(device)), target.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model, float(torch.rand(1, device=device))


def run(folder: Path, told: list[dict[str, str]], own: list[Mapping[str, str]] | None = None, **more: str) -> Ended:
    each = own or [{}] * len(told)
    return started(PROGRAM, folder, [{**one, **mine, **more} for one, mine in zip(told, each, strict=True)])


def apart(ended: Ended) -> float:
    """How far the ranks' parameters are from those of the script alone, at most."""
    alone, _ = trained("cpu", lambda *parts: parts)
    return max(
        float((torch.tensor(own, dtype=torch.float64) - one.detach()).abs().max())
        for said in ended.said
        for own, one in zip(said[0]["model"], alone.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "own", "more", "calls"),
    [
        (1, [{}, {}], {}, True),
        # As under srun --gpus-per-task=1.
        (1, [{VISIBLE: "0"}, {VISIBLE: "1"}], {}, True),
        (1, [{VISIBLE: "1"}, {VISIBLE: "1"}], {}, False),
        (1, [{}, {}], {"DEVICE": "fake:1"}, False),
        (2, [{}, {}], {}, True),
        (2, [{}, {}], {"ENCRYPT": "yes"}, False),
    ],
    ids=["by number", "own", "shared", "one for all", "hosts", "encrypted"],
)
def test_a_script_trains_as_alone(
    tmp_path: Path, hosts: int, own: list[Mapping[str, str]], more: dict[str, str], calls: bool
) -> None:
    ended = run(tmp_path, ranks(hosts, 2 // hosts), own, **more)
    assert ended.codes == [0, 0], ended.errors
    assert apart(ended) <= 1e-9
    # Each draws numbers of its own on its device.
    first, second = (said[0]["first"] for said in ended.said)
    assert first != second
    assert any(call["call"] == "all_reduce" for each in ended.calls.values() for call in each) == calls
    said = "headrace: gradients go through host memory: "
    assert (said in ended.errors[0]) != calls
    if hosts == 1 and not calls:
        assert "ranks 0, 1 share fake:" in ended.errors[0]


@pytest.mark.parametrize(
    ("found", "number", "device"),
    [
        ((), "3", "cpu"),
        (("cuda:0",), "3", "cuda:0"),
        (("cuda:0", "cuda:1"), "1", "cuda:1"),
        (("cuda:0", "cuda:1"), "", "cuda:0"),
    ],
)
def test_the_device_of_a_process(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, ...], number: str, device: str
) -> None:
    monkeypatch.setattr(script_devices, "choose", lambda kind: ("cuda" if found else "cpu", found))
    monkeypatch.setenv("LOCAL_RANK", number)
    assert hr.processes().device == device


def test_a_process_without_a_device_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_devices, "choose", lambda kind: ("cuda", ("cuda:0", "cuda:1")))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match=r"process 2 of this host has no CUDA device of its own: there are 2; start"):
        assert hr.processes().device
