"""A strategy's options as a checkpoint has them: a resumed run is the same one, however they were written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.strategies.strategy import describe_options
from headrace.trees import described


class Halved(hr.OuterStep):
    def __init__(self, share: float) -> None:
        self.share = share

    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        return mean

    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        for copy in copies:
            copy.lerp_(mean, self.share)


@pytest.mark.parametrize(
    ("strategy", "option", "described"),
    [
        (hr.FullySharded(2, units=("0", "2")), "units", ["0", "2"]),
        (hr.Pipeline(2, partition=(("0",), ("2",))), "partition", [["0"], ["2"]]),
        (hr.TensorParallel(2, rules={"0": "column"}), "rules", {"0": "column"}),
        (hr.ParameterAveraging(2, outer=Halved(0.5)), "outer", {"class": "Halved", "share": 0.5}),
        (hr.ParameterAveraging(2, outer="fed_adam"), "outer", "fed_adam"),
    ],
)
def test_options_are_those_that_a_file_gives_back(strategy: hr.Strategy, option: str, described: object) -> None:
    found = describe_options(strategy)
    assert json.loads(json.dumps(found)) == found
    assert found[option] == described


def test_values_without_attributes_are_their_text() -> None:
    assert described({"folder": Path("weights"), "kind": nn.Linear}) == {
        "folder": "PosixPath('weights')",
        "kind": "Linear",
    }


@pytest.mark.slow
def test_options_in_a_tuple_are_resumed_with_each_ranks_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 2))
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    job = hr.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=(inputs, (inputs.sum(1) > 0).long()),
        global_batch_size=8,
        steps=10,
    )
    strategy = hr.FullySharded(2, units=("0", "2"))
    saving = hr.Checkpoints(every_steps=5, every_s=None)
    whole = hr.fit(job, strategy, run_dir=tmp_path / "whole", checkpoints=saving)
    middle = tmp_path / "whole" / "checkpoints" / "step-00000005"
    resumed = hr.fit(job, strategy, run_dir=tmp_path / "resumed", resume=middle)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
