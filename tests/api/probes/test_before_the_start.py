"""What users write around a model is said, refused or left as it was before the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.checks import inspect_job
from headrace.api.probes.probing import probe
from headrace.errors import DataError, HeadraceError, JobError, UsageError
from headrace.worker.guards.witness import updates_of
from headrace.worker.session import objectives_of

RNG = torch.Generator().manual_seed(1)
INPUTS = torch.rand(32, 4, generator=RNG, dtype=torch.float64)
CLASSES = torch.randint(0, 3, (32,), generator=RNG)
SGD = partial(torch.optim.SGD, lr=0.1)
THREADS = hr.ThreadEngine()


def _linear() -> nn.Module:
    return nn.Linear(4, 3).double()


def _job(model: Any = _linear, **changes: Any) -> hr.Job:
    given = {
        "model": model, "loss": nn.functional.cross_entropy, "optimizer": SGD, "data": (INPUTS, CLASSES),
        "global_batch_size": 8, "epochs": 1, **changes,
    }  # fmt: skip
    return hr.Job(**given)


def _said(job: hr.Job, strategy: Any = None, **options: Any) -> str:
    run = hr.fit(job, strategy or hr.OneDevice(), engine=THREADS, **options)
    return " ".join(event.text for event in run.events if event.kind == "notice")


class Carrying(nn.Module):
    """Adds a part of the last batch's mean output."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layer, self.kept, self.state, self.steps = nn.Linear(4, 3).double(), kept, None, 0
        self.inside = {"states": [torch.zeros(3).double()]}
        self.register_buffer("buffer", torch.zeros(3).double())

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        mean = output.detach().mean(0)
        if self.kept == "tensor":
            output, self.state = output if self.state is None else output + self.state, mean
        elif self.kept == "counter":
            self.steps += 1
            output = output * self.steps
        elif self.kept == "nested":
            output = output + self.inside["states"][-1]
            self.inside["states"].append(mean)
        elif self.kept == "buffer":
            output = output + self.buffer
            self.buffer.copy_(mean)
        elif self.kept == "cache":
            self.state = mean
        return output


@pytest.mark.parametrize(
    ("kept", "name"), [("tensor", "'state'"), ("counter", "'steps'"), ("nested", "\"inside['states'][1]")]
)
def test_state_in_plain_attributes_is_said(kept: str, name: str) -> None:
    said = _said(_job(partial(Carrying, kept)))
    assert f"the model's {name}" in said
    assert "no checkpoint has it; keep it in a buffer (register_buffer), or return it from get_extra_state" in said


@pytest.mark.parametrize("kept", ["buffer", "cache"])
def test_what_is_saved_or_never_used_is_not_said(kept: str) -> None:
    assert "no checkpoint has it" not in _said(_job(partial(Carrying, kept)))


def test_stages_that_would_carry_nothing_are_refused() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Carrying("tensor"), nn.Linear(3, 3).double())

    with pytest.raises(JobError, match=r"stages, which carry nothing to the next one, .*'0\.state'"):
        hr.fit(_job(make), hr.Pipeline(stages=2, micro_batches=1), engine=THREADS)


class Annealed:
    """Counts in an attribute, and in a list."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[float] = []

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = nn.functional.cross_entropy(output, target) * (1 + 1 / self.calls)
        self.seen.append(float(loss.detach()))
        return loss


class Normalised(nn.Module):
    """Divides by a running mean of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(output, target)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)
        return loss / self.mean


def _counting() -> tuple[Callable[[Tensor, Tensor], Tensor], dict[str, int]]:
    calls, number = {"loss": 0}, 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal number
        number += 1
        calls["loss"] += 1
        return nn.functional.cross_entropy(output, target) * number

    return loss, calls


def test_a_loss_that_changes_from_call_to_call_is_said() -> None:
    assert "the loss ('calls', 'seen'): it changes from call to call" in _said(_job(loss=Annealed()))
    assert "it changes from call to call" in _said(_job(loss=_counting()[0]))


@pytest.mark.parametrize("check", [True, False])
def test_what_is_tried_before_the_start_leaves_the_loss_as_it_was(check: bool) -> None:
    annealed, normalised = Annealed(), Normalised()
    for each in (annealed, normalised):
        hr.fit(_job(loss=each), hr.Mirrored(workers=2), engine=THREADS, check=check)
    assert (annealed.calls, annealed.seen, float(normalised.mean)) == (0, [], 1.0)


def test_what_is_tried_leaves_what_a_function_has_closed_over_as_it_was() -> None:
    loss, calls = _counting()
    info = inspect_job(_job(loss=loss))
    probe(info.job, info.module, *objectives_of(info.job, info.module))
    assert calls["loss"] == 0
    ones = torch.ones(1, 3), torch.zeros(1).long()
    assert loss(*ones) == nn.functional.cross_entropy(*ones)


class Detector(nn.Module):
    """Gives losses in train mode, and predictions in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()

    def forward(self, inputs: Tensor, target: Tensor) -> Any:
        output = self.body(inputs)
        return {"loss": nn.functional.cross_entropy(output, target)} if self.training else [output.argmax(1)]


def _total(output: dict[str, Tensor], batch: Any) -> Tensor:
    return sum(output.values(), torch.zeros(()))


def test_a_model_that_gives_losses_in_train_mode_alone_is_trained() -> None:
    data = {"inputs": INPUTS, "target": CLASSES}
    job = _job(Detector, loss=_total, data=data, epochs=2)
    torch.manual_seed(0)
    model = Detector()
    optimizer = SGD(model.parameters())
    for epoch in range(2):
        for batch in hr.data.batches(hr.data.as_pipeline(data)[0].batch(8), epoch=epoch):
            optimizer.zero_grad()
            _total(model(**batch), batch).backward()
            optimizer.step()
    for check in (True, False):
        trained = dict(hr.fit(job, engine=THREADS, check=check).model.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(trained[name], parameter, rtol=0, atol=1e-12)
    assert "not probed" not in _said(job, hr.Mirrored(workers=2))
    with pytest.raises(
        HeadraceError, match=r"on eval_data.*In train mode it can: evaluations run the model in eval mode"
    ):
        hr.fit(_job(Detector, loss=_total, data=data, eval_data=data), engine=THREADS)


def test_an_error_of_both_modes_is_that_of_eval_mode() -> None:
    with pytest.raises(JobError, match="the loss cannot be computed on data: ZeroDivisionError"):
        hr.fit(_job(loss=lambda output, target: 1 / 0), engine=THREADS)
    with pytest.raises(JobError, match="the metric 'wrong' cannot be computed on data"):
        hr.fit(_job(metrics={"wrong": lambda output, target: 1 / 0}), engine=THREADS)


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize(
    ("strategy", "examples", "options", "parts"),
    [
        (hr.OneDevice(), 17, {}, "1"),
        (hr.OneDevice(), 19, {"accumulate": 2}, "2 \\+ 1"),
        (hr.Mirrored(workers=2), 19, {}, "2 \\+ 1"),
        (hr.ParameterServer(workers=2), 19, {}, "2 \\+ 1"),
        (hr.Pipeline(stages=2, micro_batches=2), 19, {}, "2 \\+ 1"),
        (hr.Mirrored(workers=8), 16, {}, "1( \\+ 1){7}"),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_batch_norm_and_a_share_of_one_is_refused(
    strategy: Any, examples: int, options: dict[str, Any], parts: str
) -> None:
    job = _job(_normed, data=(INPUTS[:examples], CLASSES[:examples]), options=hr.Options(**options))
    with pytest.raises(UsageError, match=f"in parts of {parts}, and BatchNorm computes no statistics of one") as caught:
        hr.fit(job, strategy, engine=THREADS)
    # A remedy that the strategy would refuse is none.
    assert ("or Options(batch_norm='sync')" in str(caught.value)) == (strategy.name == "mirrored")


def test_batch_norm_with_enough_examples_is_trained() -> None:
    few = _job(_normed, data=(INPUTS[:19], CLASSES[:19]))
    sync = hr.Options(batch_norm="sync")
    assert hr.fit(_job(_normed, data=few.data, options=sync), hr.Mirrored(workers=2), engine=THREADS).status == "ok"
    # The job ends before the last batch of an epoch.
    short = _job(_normed, data=few.data, epochs=None, steps=2)
    assert hr.fit(short, hr.Mirrored(workers=2), engine=THREADS).status == "ok"

    def pictures() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)).double()

    assert hr.fit(_job(pictures, data=few.data), hr.Mirrored(workers=2), engine=THREADS).status == "ok"


class Noisy(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer, self.when = nn.Linear(4, 3).double(), when

    def forward(self, inputs: Tensor) -> Tensor:
        noisy = self.when == "always" or (self.when == "train" and self.training)
        output: Tensor = self.layer(inputs + 0.1 * torch.randn_like(inputs) if noisy else inputs)
        return output


@pytest.mark.parametrize("when", ["never", "train", "always"])
@pytest.mark.parametrize("summed", [True, False])
def test_a_sum_as_loss_is_said_by_its_name(when: str, summed: bool) -> None:
    job = _job(partial(Noisy, when), loss=nn.CrossEntropyLoss(reduction="sum" if summed else "mean"))
    assert ("it is a sum over the examples" in _said(job, hr.Mirrored(workers=2))) == summed


def test_every_example_left_out_is_an_error_of_the_data() -> None:
    nothing = hr.data.from_arrays(INPUTS, CLASSES).filter(lambda example: False)
    with pytest.raises(DataError, match="left"):
        hr.fit(_job(_normed, data=nothing), engine=THREADS)


class Late(nn.Module):
    """Makes a layer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6).double(), None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.head is None:
            self.head = nn.Linear(6, 3).double()
        output: Tensor = self.head(self.body(inputs))
        return output


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(workers=2)], ids=lambda each: each.name)
def test_a_layer_that_forward_makes_is_refused_by_name(strategy: Any) -> None:
    with pytest.raises(JobError, match=r"forward makes 'head\.weight', 'head\.bias', which .* nn\.LazyLinear"):
        hr.fit(_job(Late), strategy, engine=THREADS)


def test_a_number_that_counts_is_said_where_it_does_nothing_yet() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += self.training
            return super().forward(inputs).tanh() if self.calls > 3 else super().forward(inputs)

    class Loss:
        calls = 0

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.cross_entropy(output, target) * (2 if self.calls > 3 else 1)

    said = _said(_job(lambda: Counting(4, 3).double(), loss=Loss()))
    assert "the model's 'calls': each call changes this number (" in said
    assert "the loss's 'calls': each call changes this number (" in said


def test_a_buffer_that_is_not_saved_and_carried_is_said() -> None:
    class Following(nn.Linear):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("mean", torch.zeros(4), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(inputs.mean(0), 0.1)
            return super().forward(inputs - self.mean)

    assert "the model's 'mean': forward carries it from batch to batch" in _said(_job(lambda: Following().double()))


def test_a_buffer_that_forward_makes_is_refused() -> None:
    class First(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if not hasattr(self, "first"):
                self.register_buffer("first", inputs.mean(0))
            return super().forward(inputs - self.get_buffer("first"))

    with pytest.raises(JobError, match="forward makes the buffer 'first', which the model did not have before"):
        inspect_job(_job(lambda: First(4, 3).double()))


class OfClass(nn.Linear):
    """Counts for all objects of its class."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        OfClass.calls += 1
        return super().forward(inputs)


def test_what_optimizers_schedules_and_classes_count_begins_in_the_run_as_it_was() -> None:
    steps: list[int] = []
    asked: list[int] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made = SGD(named)
        made.register_step_post_hook(lambda *_: steps.append(1))
        return made

    def factor(_: int) -> float:
        asked.append(1)
        return 0.9 ** len(asked)

    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)
    job = _job(lambda: OfClass(4, 3).double(), optimizer=optimizer, options=hr.Options(schedule=schedule))
    info = inspect_job(job)
    probe(info.job, info.module, *objectives_of(info.job, info.module, info.weighed))
    updates_of(job, info.module)
    assert (steps, asked, OfClass.calls) == ([], [], 0)


def test_a_parameter_in_a_list_is_refused_where_parameters_are_divided() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.kept = {"weights": [self.layer.weight]}

        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs, self.kept["weights"][0], self.layer.bias)

    job = _job(lambda: Listed().double())
    with pytest.raises(UsageError, match=r"kept\['weights'\]\[0\].*: this attribute holds a parameter beside"):
        hr.fit(job, hr.FullySharded(2), engine=THREADS)


def test_backward_hooks_of_a_whole_model_are_refused_by_a_pipeline() -> None:
    def hooked() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        model.register_full_backward_pre_hook(lambda _, gradients: tuple(each * 0.5 for each in gradients))
        return model

    with pytest.raises(JobError, match="it has backward hooks, which would see no backward"):
        hr.fit(_job(hooked), hr.Pipeline(2), engine=THREADS)
