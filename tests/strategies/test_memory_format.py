"""Weights of convolutions in channels-last order train as others do, whoever has put them there."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UsageError
from strategies.contract_runs import distance, train

EXAMPLES = torch.linspace(-1, 1, 24 * 2 * 6 * 6, dtype=torch.float64).sin().view(24, 2, 6, 6), torch.arange(24) % 3
STRATEGIES = [
    hr.OneDevice(),
    hr.Mirrored(2),
    hr.MultiWorkerMirrored(2),
    hr.CentralStorage(2),
    hr.ParameterServer(2, staleness_bound=0, sharding="max_size:256B"),
    hr.Downpour(1, local="optimizer"),
    hr.Pipeline(2),
    hr.TensorParallel(2),
    hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
]
KEEPING = [hr.OneDevice(), hr.Mirrored(2), hr.Mirrored(2, min_workers=1), hr.CentralStorage(2), hr.CentralStorage(3)]
"""Of these the models of N workers equal that of one device."""


class Net(nn.Sequential):
    """Two convolutions, with statistics between them; sees in which order its input lies."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        )
        self.double()
        self.seen: set[bool] = set()

    def forward(self, images: Tensor) -> Any:
        self.seen.add(images.is_contiguous(memory_format=torch.channels_last))
        return super().forward(images)  # type: ignore[no-untyped-call]


def job(model: Any = Net, order: str = "preserve", **changes: Any) -> hr.Job:
    made = hr.Job(
        model,
        task=hr.tasks.multiclass(3),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        data=EXAMPLES,
        global_batch_size=12,
        epochs=2,
        options=hr.Options(memory_format=order, batch_norm="sync", ema_decay=0.5),
    )
    return replace(made, **changes)


def plain_model(last: bool) -> nn.Module:
    made = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    return made.to(memory_format=torch.channels_last) if last else made  # type: ignore[call-overload]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_model_that_comes_in_channels_last_order_changes_no_number(strategy: hr.Strategy) -> None:
    def of(last: bool) -> hr.Job:
        return job(functools.partial(plain_model, last), options=hr.Options())

    assert distance(train(of(True), strategy).tensors, train(of(False), hr.OneDevice()).tensors) <= 1e-9


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_its_gradients_have_its_order_as_fused_optimizers_need_it(strategy: hr.Strategy) -> None:
    """On CPUs these go over memory, whatever the strides say."""

    def of(last: bool) -> hr.Job:
        rule = functools.partial(torch.optim.Adam, lr=0.01, fused=last)
        return job(functools.partial(plain_model, last), options=hr.Options(), optimizer=rule)

    assert distance(train(of(True), strategy).tensors, train(of(False), hr.OneDevice()).tensors) <= 1e-9


def is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def watched(worker: hr.Worker) -> None:
    """Trains, and fails if anything of a step lies in the usual order."""
    for batch in worker.batches():
        worker.step(batch)
        model = worker.model
        assert isinstance(model, Net)
        assert model.seen == {True}
        for name in ("0.weight", "3.weight"):
            assert is_last(model.get_parameter(name))


def by_backward(worker: hr.Worker) -> None:
    for inputs, target in worker.batches():
        worker.backward(nn.functional.cross_entropy(worker.model(inputs), target))
        worker.update()
        assert worker.model.seen == {True}


@functools.cache
def usual() -> Any:
    return train(job(), hr.OneDevice())


@pytest.mark.parametrize("strategy", KEEPING, ids=str)
def test_weights_and_inputs_lie_in_that_order_and_numbers_are_equal(strategy: hr.Strategy) -> None:
    outcome = train(job(order="channels_last"), strategy, loop=watched)
    assert distance(outcome.tensors, usual().tensors) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.Mirrored(2), hr.CentralStorage(2)], ids=lambda each: each.name)
def test_in_processes(strategy: hr.Strategy) -> None:
    with LocalEngine() as engine:
        outcome = train(job(order="channels_last"), strategy, engine, loop=watched)
    assert distance(outcome.tensors, usual().tensors) <= 1e-9


def test_unconnected_workers_keep_the_order_too() -> None:
    run = hr.launch(
        watched,
        job(order="channels_last", options=hr.Options(memory_format="channels_last")),
        hr.Unconnected(2),
        engine=hr.ThreadEngine(),
    )
    assert run.status == "ok"


@pytest.mark.parametrize("strategy", [hr.DiLoCo(2, period=1), hr.EASGD(2, period=1)], ids=["diloco", "easgd"])
def test_averaged_parameters_keep_the_order_too(tmp_path: Path, strategy: hr.Strategy) -> None:
    """So does what the outer step keeps of them, which is saved in the usual order."""

    def fit(order: str, name: str, **changes: Any) -> hr.Run:
        asked = job(options=hr.Options(memory_format=order), **changes)
        resume = (tmp_path / name).exists()
        return hr.launch(
            watched if order == "channels_last" else plainly, asked, strategy,
            run_dir=tmp_path / name, resume=resume, engine=hr.ThreadEngine(), check=False,
        )  # fmt: skip

    expected: dict[str, Tensor] = {}
    for order, then in (("preserve", "preserve"), ("channels_last", "preserve"), ("preserve", "channels_last")):
        fit(order, f"{order} {then}", epochs=1)
        run = fit(then, f"{order} {then}")
        expected = expected if order != then else run.model.state_dict()
        assert distance(run.model.state_dict(), expected) <= 1e-9


def plainly(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
    model = worker.model
    assert isinstance(model, Net)
    assert model.seen == {False}


def test_a_forward_of_the_users_own_gets_inputs_in_that_order() -> None:
    plain = hr.Options(memory_format="channels_last")
    outcome = train(job(options=plain), hr.Mirrored(2), loop=by_backward)
    expected = train(job(options=hr.Options()), hr.Mirrored(2))
    assert distance(outcome.tensors, expected.tensors) <= 1e-9


@pytest.mark.parametrize("strategy", KEEPING[:2] + KEEPING[3:4], ids=lambda each: each.name)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_fused_optimizers_find_gradients_in_the_order_of_the_weights(strategy: hr.Strategy, optimizer: Any) -> None:
    def of(order: str, fused: bool) -> Any:
        rule = functools.partial(optimizer, lr=0.01, fused=fused)
        return train(job(order=order, optimizer=rule), strategy if fused else hr.OneDevice()).tensors

    assert distance(of("channels_last", fused=True), of("preserve", fused=False)) <= 1e-9


def test_optimizer_state_is_loaded_in_the_order_of_the_weights(tmp_path: Path) -> None:
    """Of a fused optimizer, whose kernels run over memory."""
    rule = functools.partial(torch.optim.Adam, lr=0.01, fused=True)
    fit = functools.partial(hr.fit, strategy=hr.Mirrored(2), run_dir=tmp_path, engine=hr.ThreadEngine(), check=False)
    fit(job(order="channels_last", optimizer=rule, epochs=1))
    run = fit(job(order="channels_last", optimizer=rule), resume=True)
    assert distance(run.model.state_dict(), usual().tensors) <= 1e-9


def contents(folder: Path) -> dict[str, Tensor]:
    """Returns what a run's last checkpoint has, flat and whole, by name."""
    checkpoint, _ = CheckpointFolder(folder / "checkpoints").latest()
    assert checkpoint is not None
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for rank in checkpoint.ranks:
        for name, each in checkpoint.read(rank).items():
            assert each.is_contiguous()
            # Pieces of what is cut among the workers are put together.
            head, _, start = name.partition("@")
            if not name.startswith("random/"):
                found.setdefault(head, []).append((int(start or 0), each))
    return {
        head: torch.cat([each.flatten() for _, each in sorted(pieces, key=lambda pair: pair[0])])
        for head, pieces in found.items()
    }


@pytest.mark.parametrize("strategy", [KEEPING[1], KEEPING[3]], ids=lambda each: each.name)
@pytest.mark.parametrize(("saved", "resumed"), [("channels_last", "preserve"), ("preserve", "channels_last")])
def test_a_checkpoint_goes_into_the_other_order_bit_for_bit(
    tmp_path: Path, strategy: hr.Strategy, saved: str, resumed: str
) -> None:
    fit = functools.partial(hr.fit, strategy=strategy, run_dir=tmp_path, engine=hr.ThreadEngine(), check=False)
    fit(job(order=saved, epochs=1))
    before = contents(tmp_path)
    # A run of no further round saves what it has loaded.
    fit(job(order=resumed, epochs=1), run_dir=tmp_path / "next", resume=tmp_path)
    after = contents(tmp_path / "next")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], each) for name, each in before.items())
    run = fit(job(order=resumed), resume=True)
    assert distance(run.model.state_dict(), usual().tensors) <= 1e-9


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (hr.ParameterServer(2), "parameter_server does not keep that order; use one_device, mirrored, central_storage"),
        (hr.Pipeline(2), "pipeline does not keep that order"),
        (hr.TPU(1), "tpu does not keep that order"),
        (hr.CentralStorage(2, min_workers=1), "between any two elements; leave out min_workers, or use mirrored"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_strategies_that_do_not_keep_it_refuse_it(strategy: hr.Strategy, message: str) -> None:
    asked = job(options=hr.Options(memory_format="channels_last"))
    with pytest.raises(UsageError, match=message):
        hr.fit(asked, strategy, engine=hr.ThreadEngine())
