"""Batches on their way to a device; a CUDA device has its test in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.data import Loader, delivered, from_arrays
from headrace.data.loading import transfer


def test_on_the_cpu_batches_stay_where_they_are() -> None:
    shares = Loader(from_arrays(torch.arange(8)), 0, 4, (1,), 0).rounds()
    assert delivered(shares, torch.device("cpu")) is shares


class Device:
    """A CUDA device that writes down what it is asked for, and whose memory is the host's."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.type = "cuda"

    def Stream(self, device: Any) -> Any:
        return self

    def stream(self, stream: Any) -> Any:
        return torch.no_grad()

    def current_stream(self, device: Any) -> Any:
        return self

    def record_event(self) -> str:
        self.log.append("copy")
        return f"copy {self.log.count('copy')}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"wait for {event}")


def test_each_batch_is_copied_while_the_one_before_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)
    monkeypatch.setattr(transfer, "map_tensors", lambda function, batch: batch)
    shares = Loader(from_arrays(torch.arange(6)), 0, 2, (1,), 0).sweep()
    found = []
    for share in delivered(shares, device):  # type: ignore[arg-type]
        device.log.append("step")
        found.append(share.batch[0].tolist())
    assert found == [[0, 1], [2, 3], [4, 5]]
    assert device.log == [
        *("copy", "copy", "wait for copy 1", "step"),
        *("copy", "wait for copy 2", "step"),
        *("wait for copy 3", "step"),
    ]
    with pytest.raises(StopIteration):
        next(shares)
