"""setup: a plain loop in several processes does what it does in one, on the same global batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import headrace as hr
from headrace.api.plain_script.checks import check_parts, facts_of, refuse_wrappers
from headrace.engine.local.engine import launch_script
from headrace.errors import UsageError

WAYS = ["plain", "clip", "accumulate", "scheduler", "adamw", "in order", "unused", "batch of one", "fused"]
WAYS += ["seeded", "chosen", "closure", "unfrozen", "readers"]

TRAIN = '''
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
import headrace as hr

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.unused = nn.Linear(6, 2)
    def forward(self, inputs):
        return self.body(inputs)

def train(strategy, way):
    """An ordinary training script, but for one line; returns all parameters."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(51, 6).double(), torch.randn(51, 2).double())
    model = Net().double()
    if way == "fused":
        # Column by column: fused optimizers go over memory, and gradients must lie in the same order.
        for parameter in model.parameters():
            parameter.data = parameter.data.t().contiguous().t()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    elif way == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    size = {"batch of one": 17}.get(way, 10)
    shuffled = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=size, shuffle=way != "in order", generator=shuffled)
    if way == "seeded":
        loader = DataLoader(data, size, shuffle=True)
    elif way == "chosen":
        loader = DataLoader(data, size, sampler=WeightedRandomSampler(torch.arange(51) + 1.0, 37))
    elif way == "readers":
        loader = DataLoader(data, size, shuffle=True, num_workers=2, persistent_workers=True)
    elif way == "unfrozen":
        model.body[0].requires_grad_(False)
    model, optimizer, loader = hr.setup(model, optimizer, loader, strategy=strategy)
    step = 0
    for epoch in range(3):
        model.body[0].requires_grad_(way != "unfrozen" or epoch > 0)
        for inputs, targets in loader:
            if way == "closure":
                def closure():
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    loss.backward()
                    return loss
                optimizer.step(closure)
                continue
            if way != "accumulate" or step % 2 == 0:
                optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            if way == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if way != "accumulate" or step % 2 == 1:
                optimizer.step()
                if way == "scheduler":
                    scheduler.step()
            step += 1
    return [parameter.flatten().tolist() for parameter in model.parameters()], len(loader)
'''
SCRIPT = (
    TRAIN
    + """
for strategy in ("mirrored", "central_storage"):
    for way in json.loads(sys.argv[1]):
        result = train(strategy, way)
        with open(f"{sys.argv[2]}/{strategy}-{way}-{os.environ['RANK']}.json", "w") as file:
            json.dump(result, file)
"""
)


def alone(way: str) -> tuple[list[list[float]], int]:
    space: dict[str, Any] = {"__name__": "alone"}
    exec(TRAIN, space)
    result: tuple[list[list[float]], int] = space["train"]("mirrored", way)
    return result


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every rank had in the end, under each strategy, each way."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "script.py").write_text(SCRIPT)
    assert launch_script(folder / "script.py", [json.dumps(WAYS), str(folder)], 3) == 0
    return folder


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_three_processes_train_what_one_trains(launched: Path, strategy: str, way: str) -> None:
    expected, rounds = alone(way)
    for rank in range(3):
        parameters, length = json.loads((launched / f"{strategy}-{way}-{rank}.json").read_text())
        assert length == rounds
        for got, wanted in zip(parameters, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-9)


FIT = """
torch.manual_seed(0)
data = torch.randn(20, 3), torch.randn(20, 1)
optimizer = lambda named: torch.optim.SGD(named, lr=0.1)
job = hr.Job(lambda: nn.Linear(3, 1), optimizer, data, 4, hr.tasks.regression(), epochs=1)
run = hr.fit(job, "central_storage")
assert (run.plan.workers, run.status, run.model.training) == (2, "ok", False)
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """First setup under each strategy, then fit, in the same processes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + FIT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command, '["clip"]', str(tmp_path)], env=environment, timeout=120,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected, _ = alone("clip")
    for strategy in ("mirrored", "central_storage"):
        parameters, _ = json.loads((tmp_path / f"{strategy}-clip-1.json").read_text())
        assert parameters == [pytest.approx(wanted, abs=1e-9) for wanted in expected]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(10, 2), torch.randn(10, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)


def test_one_process_gets_every_example_of_every_batch() -> None:
    model, optimizer, loader = parts()
    inputs = loader.dataset.tensors[0]  # type: ignore[attr-defined]
    same_model, same_optimizer, shares = hr.setup(model, optimizer, loader)
    assert same_model is model
    assert same_optimizer is optimizer
    assert len(shares) == 3
    for _ in range(2):
        assert [len(batch[0]) for batch in shares] == [4, 4, 2]
        assert torch.equal(torch.cat([batch[0] for batch in shares]), inputs), (
            "a loader without shuffling keeps its order"
        )


def clamping() -> nn.Module:
    model = nn.Linear(2, 1)
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("build", "optimizer_of", "message"),
    [
        (lambda: torch.ones(2), lambda _: None, "the model is a Tensor; hr.setup takes a torch.nn.Module"),
        (lambda: nn.LazyLinear(1), sgd, "weight has no shape yet; run the model on an example before hr.setup"),
        (
            lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 1))),
            sgd,
            "0 is in DataParallel, which divides each batch itself, and hr.setup does that; give hr.setup its .module",
        ),
        (clamping, sgd, "a hook of 'weight' is not linear"),
        (lambda: nn.Linear(2, 1), lambda _: sgd(nn.Linear(2, 1)), "2 of the optimizer's parameters are not the"),
        (lambda: nn.Linear(2, 1), lambda model: [sgd(model)], "the optimizer is a list"),
    ],
)
def test_what_several_processes_cannot_train_is_refused(build: Any, optimizer_of: Any, message: str) -> None:
    model = build()
    with pytest.raises(UsageError, match=re.escape(message)):
        check_parts(model, optimizer_of(model))


def test_what_is_wrapped_after_setup_is_refused_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    refuse_wrappers()
    with pytest.raises(UsageError, match=r"test_setup.py, line \d+, has DataParallel, which .*; take it out"):
        nn.DataParallel(nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"has DistributedDataParallel, which averages gradients, whatever the sizes"):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 1))


def test_a_factor_in_a_hook_is_the_same_for_a_share() -> None:
    model = nn.Linear(2, 1)
    model.weight.register_hook(lambda gradient: gradient * 0.5)
    check_parts(model, None)


def test_a_strategy_that_setup_does_not_know() -> None:
    with pytest.raises(UsageError, match="no strategy for plain scripts 'mirored'; did you mean 'mirrored'"):
        hr.setup(*parts(), strategy="mirored")


def test_a_loader_without_a_batch_size() -> None:
    model, optimizer, loader = parts()
    with pytest.raises(UsageError, match="the loader has no batch_size, so there is no global batch to split"):
        hr.setup(model, optimizer, DataLoader(loader.dataset, batch_size=None))


def test_drop_last_is_taken_over() -> None:
    model, optimizer, loader = parts()
    _, _, shares = hr.setup(model, optimizer, DataLoader(loader.dataset, batch_size=4, drop_last=True))
    assert len(shares) == 2
    first = torch.cat([batch[0] for batch in shares])
    assert torch.equal(first, torch.cat([batch[0] for batch in shares]))
    assert len(first) == 8


class _Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9, -1, -1))

    def __len__(self) -> int:
        return 10


def test_samplers_give_the_order() -> None:
    """Every process gets its share of each batch, so one that divides the data among processes gives all of it."""
    model, optimizer, loader = parts()
    inputs = loader.dataset.tensors[0]  # type: ignore[attr-defined]

    def seen(sampler: Sampler[int]) -> Tensor:
        _, _, shares = hr.setup(model, optimizer, DataLoader(loader.dataset, 4, sampler=sampler))
        assert len(shares) == 3
        return torch.cat([batch[0] for batch in shares])

    for shuffling in (DistributedSampler(inputs, 2, 0), RandomSampler(inputs)):
        found = seen(shuffling)
        assert not torch.equal(found, inputs)
        assert torch.equal(found.sort(0).values, inputs.sort(0).values)
    for sequential in (DistributedSampler(inputs, 2, 0, shuffle=False), SequentialSampler(inputs)):
        assert torch.equal(seen(sequential), inputs)
    assert torch.equal(seen(_Backwards()), inputs.flip(0))


class Held(Dataset[Any]):
    """Examples in an attribute."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


def test_data_that_a_rank_has_drawn_otherwise_has_another_digest() -> None:
    model, optimizer, _ = parts()

    def facts(data: Any) -> dict[str, str]:
        return facts_of(model, optimizer, DataLoader(data, 4))

    ones, twos = TensorDataset(torch.ones(100, 2)), TensorDataset(torch.full((100, 2), 2.0))
    assert facts(ones) == facts(TensorDataset(torch.ones(100, 2)))
    assert facts(ones) != facts(twos)
    assert facts(Subset(ones, range(50))) == facts(Subset(ones, list(range(50))))
    assert facts(Subset(ones, range(50))) != facts(Subset(twos, range(50)))
    assert facts(Subset(ones, range(50))) != facts(Subset(ones, range(1, 51)))
    for data in (np.ones((100, 2)), list(range(100)), ["a", "b"]):
        other = data.copy()
        other[0] = other[1] * 2
        assert facts(Held(data)) == facts(Held(data.copy())) != facts(Held(other))
        assert facts(data) != facts(other)
    nested = Subset(Subset(ones, range(50)), [1, 2])
    assert facts(nested) != facts(Subset(Subset(ones, range(50)), [1, 3]))


def test_without_a_loader_there_are_no_shares() -> None:
    model, optimizer, _ = parts()
    assert hr.setup(model, optimizer, None) == (model, optimizer, None)


def test_a_loader_may_be_given_again() -> None:
    model, optimizer, loader = parts()
    _, _, shares = hr.setup(model, optimizer, loader)
    assert hr.setup(*parts()[:2], shares)[2] is shares


def test_a_reduction_that_setup_does_not_know() -> None:
    with pytest.raises(UsageError, match="no reduction 'total'"):
        hr.setup(*parts(), reduction="total")


DIFFERENT = """
import os, torch, headrace as hr
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
loader = torch.utils.data.DataLoader(
    data, 4, shuffle=True, generator=torch.Generator().manual_seed(int(os.environ["RANK"]))
)
hr.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
"""


@pytest.mark.slow
def test_processes_with_seeds_of_their_own_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(DIFFERENT)
    assert launch_script(tmp_path / "script.py", [], 2) == UsageError.exit_code
    # Rank 0's output, or that of the rank that failed first.
    assert "the seed of the loader's generator differs" in "".join(capfd.readouterr())


APART = """
import os, sys, random, numpy, torch, headrace as hr
torch.manual_seed(0), numpy.random.seed(0), random.seed(0)
model = torch.nn.Linear(2, 1)
rank, way = int(os.environ["RANK"]), sys.argv[1]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), 4)
model, optimizer, loader = hr.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
draws = torch.rand(()).item(), numpy.random.rand(), random.random(), model.weight.sum().item()
with open(sys.argv[2] + str(rank), "w") as file:
    print(*draws, file=file)
beside = torch.nn.Parameter(torch.ones(1))
other = torch.optim.SGD([beside], lr=0.1)
for epoch in range(2):
    for (inputs,) in loader:
        if way == "ends" and (rank, epoch) == (1, 1):
            sys.exit(0)
        optimizer.zero_grad()
        if way == "other":
            other.step()
        loss = model(inputs).square()
        (loss.sum() if way == "sum" else loss.mean()).backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("right", ""),
        ("other", "headrace: SGD steps over 1 parameters that hr.setup was not given"),
        ("ends", "the script on rank 1 has ended after 2 backward passes, and rank 0 waits for it at loss.backward()"),
        ("sum", "the loss is a sum (SumBackward0 over [2, 1]), where this process has 2 of a batch of 4 examples"),
    ],
)
def test_processes_draw_for_themselves_and_end_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str, message: str
) -> None:
    (tmp_path / "script.py").write_text(APART)
    code = launch_script(tmp_path / "script.py", [way, str(tmp_path / "rank")], 2)
    assert code == (0 if way in ("right", "other") else UsageError.exit_code)
    assert message in "".join(capfd.readouterr())
    first, second = ((tmp_path / f"rank{rank}").read_text().split() for rank in range(2))
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, False, False, True]
