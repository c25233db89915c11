"""The loss scale, as torch's GradScaler grows and shrinks it."""

from __future__ import annotations

import torch

from headrace.training.clipping import LossScale


def test_it_follows_torchs_grad_scaler() -> None:
    scale, growth = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    ours = LossScale()
    values = []
    for round_ in range(12_000):
        overflow = round_ in (100, 150, 6000)
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflow)), 2.0, 0.5, 2000)
        if overflow:
            ours.shrink()
        else:
            ours.grow()
        assert ours.value * ours.inverse == 1.0
        values.append(ours.value)
        assert ours.settings() == {"value": float(scale), "good": int(growth)}
    assert min(values) < 2.0**16 < max(values)


def test_its_state_is_taken_up() -> None:
    one, other = LossScale(), LossScale()
    for _ in range(1500):
        one.grow()
    one.shrink()
    one.grow()
    other.load(one.settings())
    assert other.settings() == {"value": 2.0**15, "good": 1}
