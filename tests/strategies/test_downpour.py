"""What Downpour promises beside the contract: Dean et al.'s algorithm, nothing lost, and what it does in threads."""

from __future__ import annotations

import copy
import dataclasses
import re
import threading
from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from cover import in_turn
from headrace.data import Loader, as_pipeline
from headrace.errors import UsageError
from headrace.machine.background import BackgroundThread
from headrace.spec.events import NonFinite, ServerStats
from strategies.contract_models import BATCH, COUNTS, MODELS, VARIANTS, verb_by_verb
from strategies.contract_options import OPTIONS
from strategies.contract_runs import distance, train
from strategies.test_contract import DOUBLE, assert_same_bits, assert_same_through_servers, on_one_device

STEPWISE = partial(hr.Downpour, fetch_every=1, push_every=1, overlap=False)
CASES = {
    name: dataclasses.replace(case, options=dataclasses.replace(case.options, batch_norm="local"))
    for name, case in {**MODELS, **VARIANTS, **OPTIONS}.items()
}
"""Of the contract; with one worker, BatchNorm is the same either way."""
RATE = 0.0625
DESCENT = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(("name", "size"), in_turn(sorted(CASES), ["uneven", "tiny"], third=0))
def test_one_worker_that_waits_is_one_device_bit_for_bit(name: str, size: str) -> None:
    job = CASES[name].job(COUNTS[size])
    assert_same_through_servers(train(job, STEPWISE(1)), on_one_device(CASES[name], size, torch.float64, None), job)


def test_adam_is_bit_for_bit_where_the_job_says_how() -> None:
    job = CASES["mlp"].job(COUNTS["tiny"], optimizer=partial(torch.optim.Adam, lr=0.01, foreach=False))
    assert_same_bits(train(job, STEPWISE(1)), train(job, hr.OneDevice()))


@pytest.mark.parametrize("layout", [{"servers": 3}, {"sharding": "max_size:64B"}, {"servers": 2, "scale": "full"}])
def test_one_worker_that_waits_is_one_device_in_any_layout(layout: dict[str, Any]) -> None:
    outcome = train(CASES["mlp"].job(COUNTS["uneven"]), STEPWISE(1, **layout))
    assert_same_bits(outcome, on_one_device(CASES["mlp"], "uneven", torch.float64, None))


def test_a_loop_of_ones_own() -> None:
    outcome = train(CASES["mlp"].job(COUNTS["tiny"]), STEPWISE(1), loop=partial(verb_by_verb, CASES["mlp"].loss))
    assert_same_bits(outcome, on_one_device(CASES["mlp"], "tiny", torch.float64, None))


def downpour(job: hr.Job, fetch_every: int, push_every: int, fences: int) -> nn.Module:
    """Algorithm 7.1 for one worker that waits for its fetches and pushes, which meets itself every so many rounds."""
    module = copy.deepcopy(job.model)
    assert isinstance(module, nn.Module)
    assert job.loss is not None
    server = copy.deepcopy(module)
    optimizer = job.optimizer(server.named_parameters())
    local = job.optimizer(module.named_parameters())
    make = job.options.schedule
    schedules = [make(each) for each in (optimizer, local)] if make else []
    loader = Loader(as_pipeline(job.data)[0], job.seed, BATCH, (1,), 0)
    rounds = loader.rounds_per_epoch * (job.epochs or 0)
    accrued: dict[str, Tensor] = {}
    behind = 0
    for step, share in enumerate(islice(loader.rounds(), rounds)):
        if step % fences % fetch_every == 0:
            module.load_state_dict(server.state_dict())
        loss = job.loss(module(share.batch[0]), share.batch[1])
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            if gradient is not None:
                accrued[name] = gradient + accrued[name] if name in accrued else gradient
                parameter.data -= rate_of(local, parameter) * gradient
        for schedule in schedules[1:]:
            schedule.step()
        behind += 1
        since = step % fences + 1
        if since % push_every == 0 or since == fences or step + 1 == rounds:
            for name, parameter in server.named_parameters():
                parameter.grad = accrued.get(name)
            optimizer.step()
            for _ in range(behind if schedules else 0):
                schedules[0].step()
            accrued, behind = {}, 0
    return server


def rate_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
    (rate,) = [group["lr"] for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
    return float(rate)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(("fetch_every", "push_every"), [(3, 3), (1, 3), (3, 1), (2, 5), (5, 2), (99, 99)])
@pytest.mark.parametrize("name", ["mlp", "idle", "tied", "partial", "groups-by-dimensions", "schedule-step"])
def test_steps_between_are_those_of_the_paper(name: str, fetch_every: int, push_every: int) -> None:
    case = CASES[name]
    job = case.job(COUNTS["even"], optimizer=None if "-" in name else DESCENT)
    outcome = train(job, hr.Downpour(1, fetch_every=fetch_every, push_every=push_every, overlap=False))
    # They meet after every epoch, to evaluate.
    expected = downpour(job, fetch_every, push_every, fences=COUNTS["even"] // BATCH)
    assert distance(outcome.tensors, expected.state_dict()) <= DOUBLE


def without_fences(count: int, epochs: int = 3, **changes: Any) -> hr.Job:
    return dataclasses.replace(CASES["mlp"].job(count, **changes), eval_data=None, epochs=epochs)


@pytest.mark.parametrize(("fetch_every", "push_every"), [(3, 3), (2, 4), (7, 2), (4, 7)])
@pytest.mark.parametrize("optimizer", [DESCENT, partial(torch.optim.Adagrad, lr=0.1)])
def test_pushes_go_on_over_the_ends_of_epochs(fetch_every: int, push_every: int, optimizer: Any) -> None:
    job = without_fences(COUNTS["uneven"], optimizer=optimizer)
    outcome = train(job, hr.Downpour(1, fetch_every=fetch_every, push_every=push_every, overlap=False))
    expected = downpour(job, fetch_every, push_every, fences=9)
    assert distance(outcome.tensors, expected.state_dict()) <= DOUBLE


class Nothing(torch.optim.Optimizer):
    """Writes down what it is given, and moves nothing."""

    given: list[tuple[float, dict[str, Tensor]]]

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if threading.current_thread() is threading.main_thread():
            return  # the check before the start: a server of ThreadEngine is another thread
        for group in self.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            Nothing.given.append((group["lr"], {name: p.grad.clone() for name, p in named if p.grad is not None}))


def gradients_of(job: hr.Job, module: nn.Module, share: Any) -> dict[str, Tensor]:
    assert job.loss is not None
    loss = job.loss(module(share.batch[0]), share.batch[1])
    named = dict(module.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_server_gets_the_sum_with_the_learning_rate_of_one_step(overlap: bool) -> None:
    Nothing.given = []
    job = without_fences(COUNTS["even"], optimizer=Nothing)
    train(job, hr.Downpour(1, fetch_every=99, push_every=3, overlap=overlap))
    module, loader = copy.deepcopy(job.model), Loader(as_pipeline(job.data)[0], job.seed, BATCH, (1,), 0)
    assert isinstance(module, nn.Module)
    expected: list[dict[str, Tensor]] = [{}, {}]
    for step, share in enumerate(islice(loader.rounds(), 6)):
        accrued = expected[step // 3]
        for name, gradient in gradients_of(job, module, share).items():
            accrued[name] = accrued[name] + gradient if name in accrued else gradient
            module.get_parameter(name).data -= RATE * gradient
    assert [rate for rate, _ in Nothing.given] == [RATE, RATE]
    assert max(distance(given, sums) for (_, given), sums in zip(Nothing.given, expected, strict=True)) <= DOUBLE


@pytest.mark.parametrize("scale", ["share", "full"])
def test_gradients_of_a_short_batch_count_by_their_own_share(scale: str) -> None:
    """Where nothing moves, all that was pushed is the sum of all gradients, each times its share of its batch."""
    Nothing.given = []
    job = without_fences(COUNTS["tiny"], optimizer=Nothing)
    train(job, hr.Downpour(2, fetch_every=1, push_every=3, scale=scale, overlap=False))
    module = job.model
    assert isinstance(module, nn.Module)
    total: dict[str, Tensor] = {}
    loaders = [Loader(as_pipeline(job.data)[0], job.seed, BATCH, (1, 1), rank).rounds() for rank in range(2)]
    for shares in islice(zip(*loaders, strict=True), 9):
        for share in (share for share in shares if share.examples):
            part = share.examples / share.of if scale == "share" else 1.0
            for name, gradient in gradients_of(job, module, share).items():
                total[name] = total.get(name, 0) + part * gradient
    # Shards that a worker has read before and after another one's step differ in their age, and step apart.
    given = [(name, rate / RATE * gradient) for rate, each in Nothing.given for name, gradient in each.items()]
    pushed = {name: sum(gradient for of, gradient in given if of == name) for name in total}
    assert distance(pushed, total) <= DOUBLE
    assert Counter(name for name, _ in given) == dict.fromkeys(total, 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_local_steps_have_the_learning_rate_of_their_share(overlap: bool) -> None:
    Nothing.given = []
    job = without_fences(24, epochs=1, optimizer=Nothing)
    begun = threading.Barrier(2)

    def loop(worker: hr.Worker) -> None:
        for number, batch in enumerate(worker.batches()):
            if not number:
                # Now that both have a lease, each has one of the two that there are.
                begun.wait(30)
            worker.step(batch)

    hr.launch(loop, job, hr.Downpour(2, fetch_every=99, push_every=99, overlap=overlap), engine=hr.ThreadEngine())
    expected = []
    for rank in range(2):
        module, accrued = copy.deepcopy(job.model), {}
        assert isinstance(module, nn.Module)
        loader = Loader(as_pipeline(job.data)[0], job.seed, BATCH, (1, 1), rank)
        for share in islice(loader.rounds(), 6):
            for name, gradient in gradients_of(job, module, share).items():
                accrued[name] = accrued.get(name, 0) + gradient
                module.get_parameter(name).data -= RATE / 2 * gradient
        expected.append(accrued)
    assert [rate for rate, _ in Nothing.given] == [RATE / 2] * 2
    apart = [[distance(given, sums) for sums in expected] for _, given in Nothing.given]
    assert max(map(min, apart)) <= DOUBLE
    assert max(map(min, zip(*apart, strict=True))) <= DOUBLE


def poisoned(bad: set[int], worker: hr.Worker) -> None:
    """The usual loop, but that the inputs of some rounds are no numbers."""
    for inputs, target in worker.batches():
        worker.step((torch.full_like(inputs, float("nan")) if worker.round in bad else inputs, target))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_is_not_finite_is_left_out_of_the_sum(overlap: bool) -> None:
    Nothing.given = []
    job = without_fences(40, epochs=1, optimizer=Nothing)
    job = dataclasses.replace(job, options=hr.Options(on_nonfinite="skip"))
    strategy = hr.Downpour(1, fetch_every=1, push_every=3, overlap=overlap)
    run = hr.launch(partial(poisoned, {1, 3, 4, 5}), job, strategy, engine=hr.ThreadEngine())
    assert [event.step for event in run.events if isinstance(event, NonFinite)] == [1, 3, 4, 5]
    module, expected = job.model, [{}, {}, {}, {}]
    assert isinstance(module, nn.Module)
    loader = Loader(as_pipeline(job.data)[0], job.seed, BATCH, (1,), 0)
    for step, share in enumerate(islice(loader.rounds(), 10)):
        if step not in {1, 3, 4, 5}:
            for name, gradient in gradients_of(job, module, share).items():
                expected[step // 3][name] = expected[step // 3].get(name, 0) + gradient
    if not overlap:
        # Else a worker may go on from its own local steps for longer.
        pushed = [sums for sums in expected if sums]
        assert max(distance(given, sums) for (_, given), sums in zip(Nothing.given, pushed, strict=True)) <= DOUBLE
    assert len(Nothing.given) == 3
    assert dict(served(run).refused) == {"not_finite": len(served(run).shards)}


def served(run: hr.Run) -> ServerStats:
    return [event for event in run.events if isinstance(event, ServerStats)][-1]


def staleness(run: hr.Run) -> dict[int, float]:
    """Returns how many pushes had which staleness; parts of them where their shards were of different versions."""
    shards = len(served(run).shards)
    total: Counter[int] = Counter()
    for counts in served(run).staleness.values():
        total.update({int(behind): count for behind, count in counts.items()})
    return {behind: count / shards for behind, count in total.items()}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_push_is_of_the_version_that_came_in_last(overlap: bool) -> None:
    # Nothing comes in: every push is one further behind.
    strategy = hr.Downpour(1, fetch_every=99, push_every=1, overlap=overlap)
    run = hr.fit(without_fences(COUNTS["even"]), strategy, engine=hr.ThreadEngine())
    assert staleness(run) == dict.fromkeys(range(6), 1)
    # Where all meet, after every epoch of two rounds, the newest come in.
    run = hr.fit(MODELS["mlp"].job(COUNTS["even"]), strategy, engine=hr.ThreadEngine())
    assert staleness(run) == {0: 3, 1: 3}


def test_what_is_fetched_in_turn_is_new() -> None:
    job = without_fences(COUNTS["even"], epochs=6)
    run = hr.fit(job, hr.Downpour(1, fetch_every=3, push_every=1, overlap=False), engine=hr.ThreadEngine())
    assert staleness(run) == {0: 4, 1: 4, 2: 4}


@pytest.mark.parametrize("slow", [False, True])
def test_what_is_fetched_in_the_background_comes_in_by_the_next_fetch(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        # As if no fetch ever came to its end between two.
        monkeypatch.setattr(BackgroundThread, "done", lambda self: False)
    job = without_fences(COUNTS["even"], epochs=20)
    run = hr.fit(job, hr.Downpour(1, fetch_every=1, push_every=1), engine=hr.ThreadEngine())
    counted = staleness(run)
    # It was fetched two steps ago, when all but the last push had come; of that one, some shards may have.
    assert max(counted) <= 2
    assert sum(counted.values()) == 40


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fetch_every": 0}, "fetch_every must be a whole number of at least 1, got 0"),
        ({"fetch_every": "5"}, "fetch_every must be a whole number of at least 1, got '5'"),
        ({"push_every": True}, "push_every must be a whole number"),
        ({"push_every": None}, "push_every must be a whole number"),
        ({"warmstart_steps": -1}, "warmstart_steps must be a whole number of at least 0, got -1"),
        ({"warmstart_steps": None}, "warmstart_steps must be a whole number of at least 0, got None"),
        ({"overlap": "no"}, "overlap must be True or False, got 'no'"),
        ({"servers": 0}, "servers must be a whole number of at least 1, got 0"),
        ({"scale": "x"}, "scale must be 'share' or 'full', got 'x'"),
        ({"transport": "carrier pigeons"}, "transport"),
        ({"push_every": 70_000}, "push_every must be at most 65,535"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        hr.Downpour(**given)
