"""Counts of steps lie where fused kernels look for them, also after a run goes on."""

from __future__ import annotations

import torch
from torch import nn

from headrace.training.on_device.steps import place_steps


def test_steps_go_to_the_device_of_fused_and_capturable_parameters_alone() -> None:
    places = [torch.device("meta"), torch.device("cpu")]
    groups = [
        {"params": [nn.Parameter(torch.zeros(1, device=place))], "fused": fused, "capturable": capturable}
        for place in places
        for fused, capturable in ((True, False), (False, True), (None, False))
    ]
    optimizer = torch.optim.Adam([{"params": group["params"]} for group in groups])
    for group, wanted in zip(optimizer.param_groups, groups, strict=True):
        group.update(fused=wanted["fused"], capturable=wanted["capturable"])
        for parameter in group["params"]:
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1)}
    place_steps(optimizer)
    found = [optimizer.state[group["params"][0]]["step"].device.type for group in optimizer.param_groups]
    assert found == ["meta", "meta", "cpu", "cpu", "cpu", "cpu"]
