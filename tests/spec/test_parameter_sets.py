"""Jobs with several optimizers: whose turn a round is, and what is refused before the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.checks import inspect_job
from headrace.api.probes.probing import probe
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.spec.parameter_sets import TurnOrder
from headrace.strategies import Strategy
from headrace.worker.session import objectives_of
from worker.test_turns import ADAM, LOSSES, SETS, Pair, fit, make_job, penalized


def test_turns_go_round() -> None:
    order = TurnOrder({"critic": 3, "generator": 1})
    assert [order.at(round_) for round_ in range(5)] == ["critic"] * 3 + ["generator", "critic"]
    own = {"critic": 0, "generator": 0}
    for round_ in range(20):
        name = order.at(round_)
        assert order.own_round(round_) == own[name]
        own[name] += 1


def test_an_optimizer_alone_is_the_set_of_the_part_with_its_name() -> None:
    job = make_job(optimizer={"critic": ADAM, "generator": ADAM})
    sets = inspect_job(job).sets
    assert {name: len(own) for name, own in sets.items()} == {"critic": 4, "generator": 4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {}}, "optimizer is a dict without an entry"),
        ({"optimizer": {"a/b": ADAM}}, "a set of parameters has a name of letters, digits and _, got 'a/b'"),
        ({"optimizer": {"critic": 3}}, "the optimizer of 'critic' must be callable or an hr.ParameterSet, got 3"),
        ({"loss": lambda model, batch: None}, "2 sets of parameters, critic, generator, and each needs a loss"),
        ({"loss": {"critic": LOSSES["critic"]}}, "there is no loss for the set 'generator' of optimizer"),
        (
            {"loss": {**LOSSES, "judge": print}},
            "for 'judge', and optimizer has the sets critic, generator alone",
        ),
        ({"loss": {**LOSSES, "critic": 1}}, "the loss of 'critic' must be callable, got 1"),
        ({"optimizer": ADAM}, "a loss for each of critic, generator, and one optimizer"),
        ({"task": hr.tasks.regression(), "loss": None}, "a task has one loss, and optimizer has several sets"),
    ],
)
def test_sets_and_losses_must_fit_each_other(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_job(**changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": 3}, "a set's optimizer must be callable, got 3"),
        ({"patterns": "critic.*"}, "patterns are a list of names or patterns"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"clip_norm": -1.0}, "clip_norm must be a number above 0, got -1.0"),
        ({"warmup": -1}, "warmup must be a whole number"),
        ({"schedule": 3}, "schedule must take an optimizer"),
    ],
)
def test_a_set_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        hr.ParameterSet(**{"optimizer": ADAM, **given})
    assert said in str(caught.value)


class Tied(Pair):
    """The generator's last bias is the critic's first layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.critic[0].weight = self.generator[2].weight = nn.Parameter(torch.zeros(2, 8, dtype=torch.float64))
        self.critic[0] = nn.Linear(8, 8).double()
        self.critic[0].bias = self.generator[0].bias


class Extra(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


class Sparse(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


def detached(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model.critic(model.generator(batch[1]).detach()).mean()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": Tied}, r"the parameter 'generator\.0\.bias' is in the sets .* \(it is tied: .*critic\.0\.bias\)"),
        ({"model": Sparse}, r"the sparse embedding 'table' is updated row by row, .* use sparse=False there"),
        ({"model": Extra}, r"the parameter 'scale' is in none of the sets critic, generator; add a pattern"),
        (
            {"optimizer": {**SETS, "critic": hr.ParameterSet(ADAM, patterns=["*.weight", "critic.*"])}},
            r"'generator\.0\.weight' is in the sets critic and generator; .* make the patterns of one narrower",
        ),
        ({"loss": {**LOSSES, "generator": detached}}, r"the loss of 'generator' depends on no parameter of its set"),
        (
            {"loss": {**LOSSES, "generator": lambda model, batch: torch.zeros(())}},
            r"the loss of 'generator' depends on no parameter of its set",
        ),
        ({"loss": {**LOSSES, "critic": lambda model, batch: batch[0]}}, r"the loss of 'critic'.* scalar"),
        (
            {"loss": {**LOSSES, "critic": lambda *given: hr.Mean(LOSSES["critic"](*given), 1.0)}},
            r"some of the losses of critic, generator are hr\.Mean and others plain scalars",
        ),
        ({"model": hr.frozen(Pair, "critic.*")}, r"all parameters of the set 'critic' are frozen; leave the set out"),
        (
            {"model": hr.frozen(Pair, "critic.*", until_epoch=2)},
            r"all parameters of the set 'critic' are frozen until epoch 2",
        ),
        ({"options": hr.Options(compile=True)}, r"compile=True is not for them: .* compile those parts"),
        ({"options": hr.Options(batch_norm="sync")}, r"batch_norm='sync' is not for them"),
        ({"options": hr.Options(schedule_every="epoch")}, r"schedule_every='epoch' is not for them"),
    ],
)
def test_a_job_that_cannot_be_trained_in_turns_is_refused_before_the_start(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        fit(make_job(**changes))
    assert "\n" not in str(caught.value)


def test_a_pattern_that_fits_nothing_is_named() -> None:
    sets = {**SETS, "critic": hr.ParameterSet(ADAM, patterns=["critics.*"])}
    with pytest.raises(UnknownName, match=r"no parameter that fits 'critics\.\*' of the model"):
        fit(make_job(optimizer=sets))


def test_early_stopping_follows_the_loss_of_a_set() -> None:
    job = make_job(eval_data=make_job().data)
    with pytest.raises(UnknownName, match="loss/critic, loss/generator"):
        fit(replace(job, options=hr.Options(early_stopping=hr.EarlyStopping("loss"))))
    follows = hr.Options(early_stopping=hr.EarlyStopping("loss/critic", patience=1, min_delta=9.0), eval_every=1)
    assert fit(replace(job, options=follows)).summary.steps == 2


@pytest.mark.parametrize(
    "strategy",
    [
        hr.FullySharded(2),
        hr.ParameterServer(1),
        hr.Downpour(1),
        hr.Sandblaster(1),
        hr.ParameterAveraging(2, period=2),
        hr.Gossip(2),
        hr.Pipeline(2, micro_batches=2),
        hr.TensorParallel(2),
        hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, micro_batches=1)),
        hr.TPU(1),
    ],
    ids=lambda strategy: strategy.name,
)
def test_a_strategy_that_cannot_have_them_says_so(strategy: Strategy) -> None:
    with pytest.raises((UsageError, InfeasiblePlan)) as caught:
        fit(make_job(), strategy)
    said = str(caught.value)
    assert said.startswith("the job trains 2 sets of parameters in turns (critic, generator), and ")
    assert strategy.name in said
    assert said.endswith("use one_device, mirrored or central_storage")


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (hr.find_learning_rate, "find_learning_rate"),
        (hr.profile, "a profile"),
        (partial(hr.rehearse, strategy=hr.Mirrored(2)), "a "),
    ],
    ids=["find_learning_rate", "profile", "rehearse"],
)
def test_what_needs_one_optimizer_says_so(use: Callable[[hr.Job], object], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.* is for a job with one optimizer, and this one trains 2 sets"):
        use(make_job())


def test_a_summary_counts_all_sets() -> None:
    found = hr.summary(make_job())
    assert found.trainable == sum(each.numel() for each in Pair().parameters())
    assert [layer.name for layer in found.layers if layer.output] == ["generator.0", "generator.1", "generator.2"]


def test_probes_look_at_every_loss() -> None:
    job = make_job(
        loss={"critic": penalized, "generator": lambda model, batch: model.generator(batch[1]).square().sum()}
    )
    info = inspect_job(job)
    findings = probe(info.job, info.module, *objectives_of(info.job, info.module))
    assert [each.where for each in findings] == ["the loss"]
    assert "is the sum of its parts' losses" in findings[0].what
