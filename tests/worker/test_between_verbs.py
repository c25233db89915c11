"""What a loop of one's own does between the verbs, against the same loop with plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headrace as hr
from headrace.errors import UsageError, WorkerFailed

EXAMPLES, BATCH = 29, 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_job(model: Callable[[], nn.Module] = net) -> hr.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 4, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=model,
        loss=functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(x, x.square().sum(1, keepdim=True)),
        global_batch_size=BATCH,
        epochs=2,
    )


class Plain:
    """A worker's verbs as a loop of plain PyTorch has them, over the whole global batches."""

    def __init__(self, job: hr.Job) -> None:
        torch.manual_seed(job.seed)
        self.model = cast(Callable[[], nn.Module], job.model)()
        self.optimizer: torch.optim.Optimizer = job.optimizer(list(self.model.named_parameters()))  # type: ignore[operator]
        self.round = -1
        self._job = job

    def batches(self) -> Iterator[Any]:
        pipeline = hr.data.as_pipeline(self._job.data)[0].batch(self._job.global_batch_size)
        for epoch in range(self._job.epochs or 0):
            for batch in hr.data.batches(pipeline, epoch=epoch, seed=self._job.seed):
                self.round += 1
                self.optimizer.zero_grad()
                yield batch

    def backward(self, loss: Tensor | hr.Mean) -> None:
        (loss.total / loss.weight if isinstance(loss, hr.Mean) else loss).backward()

    def update(self) -> None:
        self.optimizer.step()

    def step(self, batch: Any) -> None:
        functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.update()


Loop = Callable[[Any], None]


def two_losses(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        worker.backward(0.3 * worker.model(x).abs().mean())
        worker.update()


def two_weighted_losses(worker: Any) -> None:
    for x, y in worker.batches():
        counts = (x[:, 0] > 0).double()
        apart = worker.model(x) - y
        worker.backward(hr.Mean((apart.square().mean(1) * counts).sum(), counts.sum()))
        worker.backward(hr.Mean((worker.model(x).abs().mean(1) * counts).sum(), counts.sum()))
        worker.update()


def add_to_gradients(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        for parameter in worker.model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1)
        worker.update()


def replace_gradients(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        for parameter in worker.model.parameters():
            parameter.grad = parameter.grad * 0.5
        worker.model[2].bias.grad = None
        worker.update()


def write_past_autograd(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        for parameter in worker.model.parameters():
            parameter.grad.data.mul_(0.25)
        worker.update()


def freeze_and_thaw(worker: Any) -> None:
    for x, y in worker.batches():
        worker.model[0].requires_grad_(worker.round % 3 != 1)
        worker.backward(functional.mse_loss(worker.model(x), y))
        worker.update()


def freeze_and_thaw_by_step(worker: Any) -> None:
    for batch in worker.batches():
        worker.model[0].requires_grad_(worker.round % 3 != 1)
        worker.step(batch)


def clamp_weights(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)
        for parameter in worker.model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def clamp_and_rebind(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)
        for parameter in worker.model.parameters() if worker.round == 7 else ():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


def shrink_weights(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)
        with torch.no_grad():
            for parameter in worker.model.parameters():
                parameter.mul_(0.9)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def hang_hooks(worker: Any) -> None:
    worker.model[0].weight.register_hook(lambda gradient: gradient * 0.5 + 0.1)
    worker.model[2].weight.register_post_accumulate_grad_hook(halve)
    for batch in worker.batches():
        worker.step(batch)


def hang_hooks_and_differentiate(worker: Any) -> None:
    worker.model[0].weight.register_hook(lambda gradient: gradient * 0.5 + 0.1)
    worker.model[2].weight.register_post_accumulate_grad_hook(halve)
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        worker.backward(worker.model(x).square().mean())
        worker.update()


def write_after_the_update(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        worker.update()
        for parameter in worker.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(100)


def shrink_before_backward(worker: Any) -> None:
    for x, y in worker.batches():
        for parameter in worker.model.parameters():
            parameter.data.mul_(0.9)
        worker.backward(functional.mse_loss(worker.model(x), y))
        worker.update()


def shrink_before_update(worker: Any) -> None:
    for x, y in worker.batches():
        worker.backward(functional.mse_loss(worker.model(x), y))
        for parameter in worker.model.parameters():
            parameter.data.mul_(0.9)
        worker.update()


def update_twice(worker: Any) -> None:
    for x, y in worker.batches():
        for _ in range(2):
            worker.backward(functional.mse_loss(worker.model(x), y))
            worker.update()
            if isinstance(worker, Plain):
                worker.optimizer.zero_grad()


CARRIES: dict[str, hr.Strategy] = {
    "one_device": hr.OneDevice(),
    "mirrored": hr.Mirrored(2),
    "three mirrors": hr.Mirrored(3),
    "mirrors that come and go": hr.Mirrored(2, min_workers=1),
    "central_storage": hr.CentralStorage(2),
    "parameter_server": hr.ParameterServer(2, servers=2, staleness_bound=0),
    "tensor_parallel": hr.TensorParallel(2),
    "fully_sharded": hr.FullySharded(2),
}
LOOPS: tuple[Loop, ...] = (
    two_losses,
    two_weighted_losses,
    add_to_gradients,
    replace_gradients,
    write_past_autograd,
    freeze_and_thaw,
    freeze_and_thaw_by_step,
    clamp_weights,
    clamp_and_rebind,
    shrink_weights,
    shrink_before_backward,
    shrink_before_update,
    update_twice,
    hang_hooks,
    hang_hooks_and_differentiate,
    write_after_the_update,
)
WRITES = {add_to_gradients, replace_gradients, write_past_autograd}
REFUSED: dict[str, dict[Loop, str]] = {
    "tensor_parallel": dict.fromkeys(WRITES, r"\.grad of '0.weight' was changed between .* a device has slices"),
    "fully_sharded": {
        **dict.fromkeys(WRITES, r"\.grad of '0.weight' was changed between .* a worker has a part"),
        **dict.fromkeys(
            (freeze_and_thaw, freeze_and_thaw_by_step), "requires_grad of '0.weight', '0.bias' has changed"
        ),
        clamp_and_rebind: "another tensor was put in the place of '0.weight'",
        **dict.fromkeys((hang_hooks, hang_hooks_and_differentiate), "'0.weight', '2.weight': fully_sharded divides"),
    },
    "parameter_server": {
        **dict.fromkeys(
            (clamp_weights, clamp_and_rebind, shrink_weights, shrink_before_backward, shrink_before_update),
            "the loop, between two rounds, has changed",
        ),
        update_twice: "a second update of one batch in round 0",
    },
}


@functools.cache
def by_hand(loop: Loop) -> dict[str, Tensor]:
    plain = Plain(make_job())
    loop(plain)
    return plain.model.state_dict()


@pytest.mark.parametrize("name", CARRIES)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_what_it_is_with_plain_pytorch_or_refused(loop: Loop, name: str) -> None:
    refused = REFUSED.get(name, {}).get(loop)
    if refused:
        with pytest.raises((UsageError, WorkerFailed), match=refused):
            hr.launch(loop, make_job(), CARRIES[name], engine=hr.ThreadEngine(), check=False)
        return
    run = hr.launch(loop, make_job(), CARRIES[name], engine=hr.ThreadEngine(), check=False)
    torch.testing.assert_close(run.model.state_dict(), by_hand(loop), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["mirrored", "central_storage", "parameter_server", "fully_sharded"])
def test_a_gradient_is_of_the_workers_own_loss_in_its_round(name: str) -> None:
    apart: list[float] = []

    def look(worker: hr.Worker) -> None:
        parameters = list(worker.model.parameters())
        for x, y in worker.batches():
            loss = functional.mse_loss(worker.model(x), y)
            read = torch.autograd.grad(loss, parameters, retain_graph=True) if name != "fully_sharded" else ()
            worker.backward(loss)
            pairs = zip(read, parameters, strict=False)
            apart.extend(float((each - parameter.grad).abs().max()) for each, parameter in pairs)
            assert all(parameter.grad is not None for parameter in parameters)
            worker.update()

    hr.launch(look, make_job(), CARRIES[name], engine=hr.ThreadEngine(), check=False)
    assert len(apart) == (0 if name == "fully_sharded" else 4 * 2 * 8)
    assert max(apart, default=0) < 1e-12


def test_memory_that_others_see_is_never_in_grad() -> None:
    def write(worker: hr.Worker) -> None:
        for batch in worker.batches():
            for parameter in worker.model.parameters():
                assert parameter.grad is None
            worker.step(batch)
            assert all(parameter.grad is None for parameter in worker.model.parameters())

    hr.launch(write, make_job(), hr.Mirrored(2), engine=hr.ThreadEngine(), check=False)


def half_frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


@pytest.mark.parametrize("name", CARRIES)
def test_what_was_frozen_at_the_start_is_not_trained_later_in_silence(name: str) -> None:
    def thaw(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.model.requires_grad_(worker.round >= 2)
            worker.model[2].requires_grad_()  # type: ignore[index]
            worker.step(batch)

    with pytest.raises(UsageError, match=r"'0.weight', '0.bias'.*(is True now|has changed)"):
        hr.launch(thaw, make_job(half_frozen), CARRIES[name], engine=hr.ThreadEngine(), check=False)


class Writes(hr.Callback):
    """Changes a parameter of rank 0."""

    def on_step(self, moment: hr.Moment) -> None:
        next(moment.model.parameters()).data.mul_(0.5)


def test_one_worker_alone_keeps_what_a_callback_changes() -> None:
    def shrink(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
            next(worker.model.parameters()).data.mul_(0.5)

    run = hr.fit(make_job(), engine=hr.ThreadEngine(), check=False, callbacks=[Writes()])
    torch.testing.assert_close(run.model.state_dict(), by_hand(shrink), rtol=0, atol=1e-9)


class Encoder(nn.Sequential):
    """Has a method beside its forward."""

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self[2](torch.tanh(self[0](x)))
        return out


def encoder() -> nn.Module:
    return Encoder(*net().children())  # type: ignore[arg-type]


def test_a_method_of_a_model_in_parts_says_who_has_what() -> None:
    def call(worker: Any) -> None:
        for x, _ in worker.batches():
            worker.model.encode(x)

    with pytest.raises(UsageError, match=r"this rank holds a part of Encoder, and the loop uses another"):
        hr.launch(call, make_job(encoder), hr.Pipeline(2), engine=hr.ThreadEngine(), check=False)


@pytest.mark.parametrize("name", ["one_device", "mirrored", "central_storage", "parameter_server"])
def test_rows_of_tables_are_trained_by_the_verbs_one_by_one(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (40, 3), generator=generator)
    job = hr.Job(
        model=lambda: nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1)),
        loss=functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        data=(ids, torch.randn(40, 1, generator=generator)),
        global_batch_size=8,
        epochs=2,
    )

    def verbs(worker: hr.Worker) -> None:
        for x, y in worker.batches():
            worker.backward(functional.mse_loss(worker.model(x), y))
            worker.update()

    one, other = (
        begin(job, CARRIES[name], engine=hr.ThreadEngine()) for begin in (hr.fit, functools.partial(hr.launch, verbs))
    )
    assert torch.equal(one.predict(ids), other.predict(ids))


def test_hooks_of_all_modules_are_refused_where_workers_would_not_have_them() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with pytest.raises(UsageError, match="this process has hooks of all modules"):
            hr.fit(make_job())
        assert hr.fit(make_job(), engine=hr.ThreadEngine()).status == "ok"
    finally:
        handle.remove()
