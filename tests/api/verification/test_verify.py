"""verify finds equal what is equal, and says what differs, where it begins, and why."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace import errors as hr_errors
from headrace.api.verification import plain_loop
from headrace.api.verification.differences import DIFFERS, EQUAL
from headrace.api.verification.jobs import changed_attributes
from headrace.api.verification.page import write_page
from headrace.api.verification.verification import plain_values
from headrace.strategies import Strategy
from training.odd_optimizers import Averaging, of_tensors

draws = torch.Generator().manual_seed(1)
X = torch.randn(40, 4, generator=draws)
DATA = X, torch.randint(0, 3, (40,), generator=draws)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def job(**changes: Any) -> hr.Job:
    made = hr.Job(
        model=dense,
        task=hr.tasks.multiclass(3),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        data=DATA,
        eval_data=DATA,
        global_batch_size=8,
        epochs=3,
    )
    return dataclasses.replace(made, **changes)


def verified(job: hr.Job, strategy: Strategy, **more: Any) -> hr.Verification:
    return hr.verify(job, strategy, rounds=4, engine=hr.ThreadEngine(), **more)


SERVED = hr.ParameterServer(workers=2, staleness_bound=0)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize(
    "strategy",
    [
        hr.OneDevice(),
        hr.Mirrored(workers=2),
        hr.CentralStorage(workers=2),
        hr.Pipeline(stages=2),
        SERVED,
        hr.ParameterServer(workers=2),
        hr.Downpour(workers=2),
        hr.LocalSGD(workers=2, period=2, post_local=1),
        hr.DiLoCo(workers=2, period=2),
        hr.EASGD(workers=2, period=3),
        hr.Gossip(workers=2),
        hr.Unconnected(workers=2),
    ],
    ids=lambda strategy: strategy.name,
)
def test_a_plain_job_is_equal_under_every_strategy(strategy: Strategy) -> None:
    found = verified(job(), strategy, double=True)
    assert found.equal, str(found)
    assert {row.what for row in found.rows if row.verdict == EQUAL} >= {"losses", "run.model"}
    assert max(len(line) for line in str(found).splitlines()) <= 80


def test_what_is_compared_and_how_much_of_the_data() -> None:
    found = verified(job(), hr.Mirrored(workers=2))
    assert found.equal, str(found)
    assert (found.strategy, found.workers, found.rounds, found.batch, found.examples) == ("mirrored", 2, 4, 8, 13)
    compared = {row.what: row.verdict for row in found.rows}
    assert set(compared.values()) == {EQUAL}
    assert list(compared) == [
        *("losses", "parameters", "optimizer state", "all ranks with each other", "evaluation in the run"),
        *("run.model", "run.model evaluated here", "run.predict", "resumed run"),
    ]


def summed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


@pytest.mark.slow
def test_a_difference_is_said_with_its_place_and_its_cause() -> None:
    found = verified(job(task=None, loss=summed), hr.Mirrored(workers=2))
    assert not found.equal
    first = next(row for row in found.rows if row.what == "parameters")
    assert (first.verdict, first.round, first.name) == (DIFFERS, 0, "0.weight")
    assert first.by > 1e-3
    assert "the job's loss" in found.cause
    assert "likely cause: the job's loss" in str(found)


class Following(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) * self.scale
        self.scale = 0.9 * self.scale + float(x.abs().mean())
        return out


def test_the_attributes_that_a_forward_changes_are_named() -> None:
    model = Following()
    assert changed_attributes(job(model=model), torch.ones(2, 4)) == ["scale"]
    assert model.scale == 1.0


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output


@pytest.mark.slow
def test_local_batch_norm_is_compared_with_shares_and_divided_models_without() -> None:
    found = verified(job(model=Normalised, data=tuple(each[:24] for each in DATA)), hr.Mirrored(workers=2), examples=16)
    assert found.equal, str(found)
    assert "over the workers' shares" in found.reference
    assert "statistics of BatchNorm follow each worker's own share" in found.notes[0]
    synced = job(model=Normalised, options=hr.Options(batch_norm="sync"))
    assert verified(synced, hr.Mirrored(workers=2), double=True).reference == "a plain PyTorch loop"
    staged = verified(job(model=Normalised), hr.Pipeline(stages=2), double=True)
    assert staged.equal, str(staged)
    assert "eval mode" in staged.notes[0]


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + torch.rand(4), DATA[1][index]


def test_data_that_draw_without_a_seed_are_said_and_read_once() -> None:
    found = verified(job(data=Noisy()), hr.OneDevice())
    assert found.equal, str(found)
    assert "without a seed" in found.notes[0]


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x)
        return output


def test_a_round_that_takes_long_has_fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.verification.verify._ROUND_S", 1e-9)
    found = verified(job(model=Slow, global_batch_size=20), hr.OneDevice())
    assert found.equal, str(found)
    assert found.batch == 8
    assert "a round of 20 examples takes longer than" in found.notes[0]


def test_a_model_that_needs_a_gpu_is_said() -> None:
    class OnGpu(Slow):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("Found no NVIDIA driver on your system")

    with pytest.raises(hr_errors.JobError, match="NVIDIA driver") as raised:
        verified(job(model=OnGpu), hr.OneDevice())
    assert "verify runs on the CPU" in raised.value.__notes__[0]


def test_a_given_model_and_loss_are_as_before() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.cross_entropy(output, target)

    model, loss = dense(), Counting()
    model.eval()
    weight, before = model[0].weight, model[0].weight.detach().clone()  # type: ignore[index]
    weight.register_hook(lambda gradient: gradient * 2)
    found = verified(job(model=model, task=None, loss=loss), hr.OneDevice())
    assert found.rows[0].verdict == EQUAL
    assert model[0].weight is weight  # type: ignore[index]
    assert torch.equal(weight, before)
    assert (weight.dtype, weight.grad, model.training, loss.calls) == (torch.float32, None, False, 0)


@pytest.mark.slow
def test_in_double_precision_a_given_model_is_the_same_object() -> None:
    model = Normalised()
    weight, mean = model.head.weight, model.body[1].running_mean
    weight.register_hook(lambda gradient: gradient * 2)
    found = verified(job(model=model), hr.OneDevice(), double=True)
    assert found.equal, str(found)
    assert model.head.weight is weight
    assert model.body[1].running_mean is mean
    assert weight.dtype == torch.float32


def twice(worker: hr.Worker) -> None:
    """Differentiates the loss in two halves."""
    for inputs, target in worker.batches():
        for _ in range(2):
            worker.backward(nn.functional.cross_entropy(worker.model(inputs), target) / 2)
        worker.update()
        if worker.evaluation_due:
            worker.evaluate()


@pytest.mark.slow
def test_a_loop_of_ones_own_is_run_beside_itself() -> None:
    found = verified(job(), hr.Mirrored(workers=2), train=twice, double=True)
    assert found.equal, str(found)
    assert {row.what for row in found.rows if row.verdict == EQUAL} >= {"losses", "parameters", "resumed run"}


halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def masked() -> nn.Module:
    model = dense()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index]
    return model


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.angle = int.from_bytes(os.urandom(2)) / 2**16

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x * self.angle)
        return output


class Called(nn.Module):
    """Extra state and a buffer, which each forward changes and uses."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.body, self.head, self.calls = nn.Linear(4, 4), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
        output: Tensor = self.head(torch.tanh(self.body(x - self.mean)) / (1 + self.calls))
        return output

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Unused(Called):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        output: Tensor = self.head(self.body(x))
        return output


def staged() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 3))


class Scaled(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def weighed(output: Tensor, target: Tensor) -> hr.Mean:
    weights = torch.tensor([0.1, 1.0, 10.0], dtype=output.dtype)[target]
    return hr.Mean((nn.functional.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        pytest.param(hr.Mirrored(2), {"model": Drawn}, id="a constructor that draws from the system"),
        pytest.param(hr.CentralStorage(2), {"optimizer": of_tensors(Averaging)}, id="an optimizer with an eval mode"),
        pytest.param(SERVED, {"options": hr.Options(clip_norm=0.1)}, id="servers' workers clip by themselves"),
        pytest.param(SERVED, {"options": hr.Options(schedule=halving)}, id="servers' schedule"),
        pytest.param(hr.FullySharded(2), {"model": hr.frozen(dense, "0.*", until_epoch=1)}, id="frozen for a time"),
        pytest.param(hr.LocalSGD(2, period=2), {"task": None, "loss": weighed}, id="workers count by weights"),
        pytest.param(hr.LocalSGD(2, period=2), {"model": Called}, id="each worker's state"),
        pytest.param(hr.Pipeline(2), {"model": masked}, id="hooks of a stage's parameters"),
        pytest.param(hr.Pipeline(2), {"model": Normalised}, id="micro-batches of one example"),
        pytest.param(hr.Pipeline(2), {"model": staged}, id="state of micro-batches"),
        pytest.param(hr.Hybrid(hr.LocalSGD(2, period=2), hr.Pipeline(2)), {"model": staged}, id="averaged replicas"),
        pytest.param(hr.Hybrid(hr.ParameterServer(2, 2), hr.Pipeline(2)), {}, id="replicas that push when they like"),
    ],
)
def test_what_is_carried_or_differs_by_definition_is_equal(strategy: Strategy, changes: dict[str, Any]) -> None:
    found = verified(job(**changes), strategy, double=True)
    assert found.equal, str(found)
    assert any(row.what.startswith("run.model") for row in found.rows), str(found)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3))


@pytest.mark.slow
def test_processes_draw_numbers_of_their_own_and_go_on_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the seeds that the plain loop over their shares has; threads would have one generator."""
    monkeypatch.setattr("headrace.api.verification.verify.SUSPECTS", {})
    found = hr.verify(job(model=dropping), hr.Mirrored(2), rounds=2, double=True)
    assert found.equal, str(found)
    assert "each worker draws its own dropout" in found.notes[0]


@pytest.mark.slow
def test_what_a_resumed_run_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has changed no parameter yet."""
    assert "extra state" in {row.what for row in verified(job(model=Called), hr.Mirrored(2), double=True).rows}
    monkeypatch.setattr("headrace.worker.state.load_extra_states", lambda module, saved: None)
    rows = verified(job(model=Unused), hr.Mirrored(2), double=True).differences
    assert [(row.what, row.name) for row in rows] == [("resumed run", "extra state/.calls")]


def test_the_plain_loop_can_be_read() -> None:
    lines = Path(plain_loop.__file__).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    assert not [line for line in lines if "headrace.strategies" in line]


def test_a_page_and_json(tmp_path: Path) -> None:
    found = verified(job(), hr.OneDevice())
    write_page(tmp_path / "verify.html", found, "job <a>")
    text = (tmp_path / "verify.html").read_text(encoding="utf-8")
    assert [part in text for part in ("job &lt;a&gt;", "resumed run")] == [True, True]
    document = json.loads(json.dumps(plain_values(found)))
    assert document["equal"] is True
    assert document["rows"][0]["what"] == "losses"


def test_sets_in_turns_have_no_reference_where_workers_are_alone() -> None:
    optimizer = {"0": partial(torch.optim.SGD, lr=0.1), "1": partial(torch.optim.SGD, lr=0.1)}
    loss = {name: lambda model, batch: model(batch[0]).square().mean() for name in optimizer}
    made = hr.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        loss=loss, optimizer=optimizer, data=(torch.randn(12, 4), torch.randn(12, 2)), global_batch_size=4, epochs=1,
    )  # fmt: skip
    found = hr.verify(made, hr.Unconnected(workers=2), rounds=2, engine=hr.ThreadEngine())
    assert str(found).splitlines()[-1].startswith("nothing was compared")
