from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import Tensor

from headrace import metrics, tasks
from headrace.errors import DataError, UnknownName, UsageError
from headrace.tasks import Task

ALL = [
    *(tasks.regression(), tasks.regression("absolute_error"), tasks.binary(), tasks.binary("hinge")),
    *(tasks.multilabel(5), tasks.multilabel(5, loss="squared_hinge"), tasks.multiclass(10, top_k=5)),
    *(tasks.own_loss(), tasks.own_loss(-100), tasks.language_model()),
]


def ints(*shape: int, high: int = 2) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % high


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_a_task_travels_and_is_small(task: Task) -> None:
    sent = cloudpickle.dumps(task)
    assert len(sent) < 2000
    assert pickle.load(io.BytesIO(sent)).metrics.keys() == task.metrics.keys()


@pytest.mark.parametrize(
    ("task", "output", "expected"),
    [
        (tasks.regression(), [[-3.0]], [[-3.0]]),
        (tasks.binary(), [0.0], [0.5]),
        (tasks.multilabel(2), [[0.0, 100.0]], [[0.5, 1.0]]),
        (tasks.multiclass(2), [[0.0, 0.0], [100.0, 0.0]], [[0.5, 0.5], [1.0, 0.0]]),
    ],
)
def test_predictions(task: Task, output: object, expected: object) -> None:
    torch.testing.assert_close(task.activation(torch.tensor(output)), torch.tensor(expected))


def test_dense_predictions_sum_up_to_one_over_classes() -> None:
    made = tasks.multiclass(3).activation(torch.randn(2, 3, 4, 5))
    torch.testing.assert_close(made.sum(dim=1), torch.ones(2, 4, 5))


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        (tasks.regression(), metrics.squared_error),
        (tasks.regression(loss="absolute_error"), metrics.absolute_error),
        (tasks.binary(), metrics.binary_cross_entropy),
        (tasks.binary(loss="hinge"), metrics.hinge),
        (tasks.binary(loss="squared_hinge"), metrics.squared_hinge),
        (tasks.multilabel(3), metrics.binary_cross_entropy),
        (tasks.multilabel(3, loss="hinge"), metrics.hinge),
        (tasks.multiclass(3), metrics.cross_entropy),
    ],
)
def test_the_loss_of_a_task(made: Task, loss: object) -> None:
    assert made.loss is loss


@pytest.mark.parametrize("make", [tasks.regression, tasks.binary, lambda loss: tasks.multilabel(3, loss=loss)])
def test_an_unknown_loss_is_refused_before_anything_runs(make: Callable[[str], Task]) -> None:
    with pytest.raises(UnknownName, match=r"there is no loss 'absolute_hinge'; .*known: "):
        make("absolute_hinge")


def test_an_unknown_loss_gets_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="did you mean 'squared_hinge'"):
        tasks.binary("squared_hing")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tasks.multiclass(1), "classes must be a whole number of at least 2, got 1"),
        (lambda: tasks.multiclass(True), "got True"),
        (lambda: tasks.multilabel(0), "labels must be a whole number of at least 1, got 0"),
        (lambda: tasks.multiclass(10, top_k=0), "top_k must be a whole number of at least 1, got 0"),
        (lambda: tasks.multiclass(10, top_k=11), "top_k must be at most the number of classes, 10, got 11"),
    ],
)
def test_counts_that_cannot_be_meant(make: Callable[[], Task], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_top_k_is_measured_where_it_was_asked_for() -> None:
    assert set(tasks.multiclass(10).metrics) == {"accuracy"}
    measured = tasks.multiclass(10, top_k=3).metrics
    assert set(measured) == {"accuracy", "top_3_accuracy"}
    output = torch.arange(10.0).expand(10, 10)
    assert measured["top_3_accuracy"](output, torch.arange(10)).item() == pytest.approx(0.3)  # type: ignore[union-attr]


TAKEN: list[tuple[Task, Tensor, Tensor]] = [
    (tasks.regression(), torch.zeros(4), torch.randn(4)),
    (tasks.regression(), torch.zeros(4, 1), torch.randn(4)),
    (tasks.regression(), torch.zeros(4), ints(4, 1)),
    (tasks.regression(), torch.zeros(4, 3), torch.randn(4, 3).double()),
    (tasks.binary(), torch.zeros(4), ints(4)),
    (tasks.binary(), torch.zeros(4, 1), ints(4).bool()),
    (tasks.binary(), torch.zeros(4, 1), ints(4, 1).float()),
    (tasks.binary(), torch.zeros(4), ints(4) * 2 - 1),
    (tasks.binary(), torch.zeros(4), torch.rand(4)),
    (tasks.binary("hinge"), torch.zeros(4), ints(4)),
    (tasks.binary("hinge"), torch.zeros(4), ints(4).float() * 2 - 1),
    (tasks.binary("hinge"), torch.zeros(4), torch.ones(4)),
    (tasks.multilabel(3), torch.zeros(4, 3), ints(4, 3)),
    (tasks.multilabel(3, "squared_hinge"), torch.zeros(4, 3), ints(4, 3).bool()),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4, high=3)),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4, high=3).to(torch.uint8)),
    (tasks.multiclass(3), torch.zeros(4, 3), torch.eye(3)[ints(4, high=3)].double()),
    (tasks.multiclass(3), torch.zeros(4, 3), torch.rand(4, 3).softmax(dim=1).half()),
    (tasks.multiclass(3), torch.zeros(4, 3, 2, 2), ints(4, 2, 2, high=3)),
    (tasks.multiclass(3), torch.zeros(4, 3, 2), torch.rand(4, 3, 2).softmax(dim=1)),
    (tasks.multiclass(3), torch.zeros(0, 3), ints(0)),
]


@pytest.mark.parametrize(("task", "output", "target"), TAKEN)
def test_a_target_that_is_taken_works_in_loss_and_metrics(task: Task, output: Tensor, target: Tensor) -> None:
    task.check(output, target)
    output = output.requires_grad_()
    loss = task.loss(output, target)
    assert isinstance(loss, Tensor)
    assert loss.shape == ()
    assert loss.dtype == output.dtype
    loss.backward()
    for metric in task.metrics.values():
        value = metric(output, target)
        assert isinstance(value, Tensor)
        assert value.shape == ()
        assert not output.numel() or torch.isfinite(value)


REFUSED: list[tuple[Task, object, object, type[Exception], str]] = [
    # The trap: (4, 1) and (4, 2) or (4,) and (4, 4) would broadcast.
    (tasks.regression(), torch.zeros(4, 4), torch.zeros(4), DataError, r"\(4, 4\) and target \(4,\)"),
    (tasks.regression(), torch.zeros(4, 1), torch.zeros(1, 4), DataError, r"\(4, 1\) and target \(1, 4\)"),
    (tasks.regression(), torch.zeros(4), torch.tensor([0, 1, float("nan"), 2]), DataError, "1 of 4 are NaN"),
    (
        tasks.regression(),
        torch.zeros(2),
        torch.zeros(2).to(torch.complex64),
        DataError,
        "real targets, got complex64",
    ),
    (tasks.regression(), torch.zeros(2), ints(2).to(torch.uint32), DataError, r"uint32 .*does not compute.*long\(\)"),
    (tasks.multiclass(3), torch.zeros(2, 3), ints(2).to(torch.uint16), DataError, "uint16 .*does not compute"),
    (tasks.regression(), {"logits": 1}, torch.zeros(2), UsageError, "one tensor as the model's output, got dict"),
    (tasks.regression(), torch.zeros(2), {"y": 1}, DataError, r"one tensor as the target, got dict.*Job\(target="),
    (tasks.binary(), torch.zeros(4, 2), ints(4), UsageError, r"multiclass\(2\)"),
    (tasks.binary(), torch.zeros(4), ints(4, high=3), DataError, r"0/1, -1/\+1 or prob.*int64 \(4,\) from 0 to 2"),
    (tasks.binary(), torch.zeros(4), torch.tensor([-1, 0, 1, 1]), DataError, "not mixed.*from -1 to 1"),
    (tasks.binary("hinge"), torch.zeros(4), torch.rand(4), DataError, r"0/1 or -1/\+1, not mixed.*float32 \(4,\)"),
    (tasks.binary(), torch.zeros(1), torch.tensor([float("nan")]), DataError, "nan"),
    (tasks.multilabel(3), torch.zeros(4, 3), ints(4), DataError, r"int64 \(4,\).*one_hot\(target, 3\)"),
    (
        tasks.multilabel(3),
        torch.zeros(4, 2),
        ints(4, 2),
        UsageError,
        r"logits \(batch, 3\), got output float32 \(4, 2\)",
    ),
    (tasks.multiclass(3), torch.zeros(4, 4), ints(4), UsageError, r"logits \(batch, 3\).*\(4, 4\)"),
    (tasks.multiclass(3), torch.zeros(4), ints(4), UsageError, r"got output float32 \(4,\)"),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4, high=4), DataError, "between 0 and 2; got int64 .* from 0 to 3"),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4) - 1, DataError, "from -1 to 0"),
    (
        tasks.multiclass(3),
        torch.zeros(4, 3),
        ints(4).float(),
        DataError,
        r"integers \(4,\).*float32 \(4,\).*\.long\(\)",
    ),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4, 3), DataError, r"int64 \(4, 3\).*target\.float\(\)"),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4, 1), DataError, r"int64 \(4, 1\).*squeeze\(-1\)"),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4, 5), DataError, r"int64 \(4, 5\)"),
    (tasks.multiclass(3), torch.zeros(4, 3), ints(4).bool(), DataError, r"got bool \(4,\)"),
    (tasks.multiclass(3), torch.zeros(4, 3), torch.ones(4, 3), DataError, "sums from 3 to 3.*multilabel"),
    (tasks.multiclass(3), torch.zeros(1, 3), torch.tensor([[2.0, -1.0, 0.0]]), DataError, "at least 0.*from -1 to 2"),
    (tasks.multiclass(3), torch.zeros(4, 3, 2), ints(4), DataError, r"integers \(4, 2\).*int64 \(4,\)"),
]


@pytest.mark.parametrize(("task", "output", "target", "kind", "said"), REFUSED)
def test_a_target_of_another_form_is_refused(
    task: Task, output: object, target: object, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        task.check(output, target)


def test_one_hot_and_indices_give_the_same_numbers() -> None:
    task = tasks.multiclass(4, top_k=2)
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(32, 4, generator=generator)
    indices = torch.randint(0, 4, (32,), generator=generator)
    rows = torch.nn.functional.one_hot(indices, 4).double()
    for measure in (task.loss, *task.metrics.values()):
        torch.testing.assert_close(measure(output, indices), measure(output, rows))


@pytest.mark.parametrize("loss", ["cross_entropy", "hinge", "squared_hinge"])
def test_labels_as_signs_and_as_zero_one_give_the_same_numbers(loss: str) -> None:
    task = tasks.binary(loss)
    output, labels = torch.linspace(-2, 2, 16), ints(16)
    for measure in (task.loss, *task.metrics.values()):
        assert measure(output, labels) == measure(output, labels * 2 - 1)
    # A share that has only one of the labels is read as the whole batch is.
    ones = output[labels == 1]
    assert task.loss(ones, torch.ones(8)) == task.loss(ones, torch.ones(8, dtype=torch.bool))


def test_the_models_own_loss_is_a_mean_over_examples() -> None:
    loss = torch.tensor(2.0)
    for output in ({"loss": loss}, SimpleNamespace(loss=loss)):
        assert tasks.own_loss().loss(output, {}) is loss


@pytest.mark.parametrize(("shifted", "weight"), [(True, 3.0), (False, 4.0)])
def test_the_models_own_loss_is_weighed_by_tokens(shifted: bool, weight: float) -> None:
    labels = torch.tensor([[1, 2, -100], [-100, 5, 6]])
    made = tasks.own_loss(-100, shifted=shifted).loss({"loss": torch.tensor(2.0)}, {"labels": labels})
    assert isinstance(made, metrics.Mean)
    assert (float(made.total), float(made.weight)) == (2.0 * weight, weight)


def test_a_batch_of_padding_weighs_nothing() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    labels = torch.full((1, 2), -100)
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0])
    made = tasks.own_loss(-100, shifted=False).loss({"loss": loss}, {"labels": labels})
    assert isinstance(made, metrics.Mean)
    made.total.backward()
    assert float(made.total.detach()) == 0
    assert float(made.weight) == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("shifted", [True, False])
def test_the_shift_of_labels_is_checked(shifted: bool) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    scores, wanted = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    output = {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()), "logits": logits}
    tasks.own_loss(-100, shifted=shifted).check(output, {"labels": labels})
    with pytest.raises(UsageError, match=f"use shifted={shifted}"):
        tasks.own_loss(-100, shifted=not shifted).check(output, {"labels": labels})


def test_a_model_without_loss_or_labels_is_refused() -> None:
    with pytest.raises(UsageError, match="has none; put labels into the batch"):
        tasks.own_loss().loss(torch.ones(2), {})
    with pytest.raises(DataError, match=r"counts batch\['labels'\]"):
        tasks.own_loss(-100).loss({"loss": torch.tensor(1.0)}, {})


def tokens(examples: int = 6, length: int = 5) -> tuple[Tensor, Tensor]:
    """Logits over 7 words and labels; each example has one token more of padding, the last has nothing else."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(examples, length, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (examples, length), generator=generator)
    for row in range(examples):
        labels[row, length - row :] = -100
    return logits, labels


@pytest.mark.parametrize("shifted", [True, False])
def test_tokens_weigh_the_same_on_any_split(shifted: bool) -> None:
    task = tasks.language_model(shifted=shifted)
    logits, labels = tokens()
    task.check(logits, labels)
    scores, wanted = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    expected = torch.nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-100)
    hits = (scores.argmax(-1) == wanted)[wanted != -100].double().mean()
    for measure, whole in ((task.loss, expected), (task.metrics["accuracy"], hits)):
        for sizes in ([6], [1, 5], [2, 2, 2], [1] * 6):
            parts = [measure(*both) for both in zip(logits.split(sizes), labels.split(sizes), strict=True)]
            means = [part for part in parts if isinstance(part, metrics.Mean)]
            assert len(means) == len(sizes)
            total, weight = sum(float(each.total) for each in means), sum(float(each.weight) for each in means)
            assert weight == int((wanted != -100).sum())
            assert total / weight == pytest.approx(float(whole), rel=1e-12)


def test_tokens_are_found_in_outputs_and_batches() -> None:
    logits, labels = tokens()
    task = tasks.language_model(ignore_index=-1)
    labels = labels.where(labels != -100, -1)
    plain = task.loss(logits, labels)
    assert isinstance(plain, metrics.Mean)
    for output in ({"logits": logits}, SimpleNamespace(logits=logits)):
        task.check(output, {"labels": labels})
        made = task.loss(output, {"labels": labels})
        assert isinstance(made, metrics.Mean)
        assert (float(made.total), float(made.weight)) == (float(plain.total), float(plain.weight))
    torch.testing.assert_close(task.activation({"logits": logits}).sum(-1), torch.ones(6, 5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_tokens_of_short_types_give_the_same_numbers(dtype: torch.dtype) -> None:
    task, logits, labels = tasks.language_model(), torch.randn(2, 3, 4), ints(2, 3)
    task.check(logits, labels.to(dtype))
    for measure in (task.loss, task.metrics["accuracy"]):
        short, long = measure(logits, labels.to(dtype)), measure(logits, labels)
        assert isinstance(short, metrics.Mean)
        assert isinstance(long, metrics.Mean)
        assert (float(short.total), float(short.weight)) == (float(long.total), float(long.weight))


@pytest.mark.parametrize("shifted", [True, False])
def test_a_batch_of_ignored_tokens_weighs_nothing(shifted: bool) -> None:
    task = tasks.language_model(shifted=shifted)
    logits, labels = torch.randn(2, 3, 4, requires_grad=True), torch.full((2, 3), -100)
    task.check(logits, labels)
    made = task.loss(logits, labels)
    assert isinstance(made, metrics.Mean)
    made.total.backward()
    assert (float(made.total.detach()), float(made.weight)) == (0.0, 0.0)
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("output", "target", "kind", "said"),
    [
        (
            torch.zeros(2, 3),
            ints(2, 3),
            UsageError,
            r"logits \(batch, tokens, vocabulary\).* got output float32 \(2, 3\)",
        ),
        ({"loss": torch.zeros(())}, ints(2, 3), UsageError, r"or \.logits, got output dict"),
        (torch.zeros(2, 3, 4), {"input_ids": ints(2, 3)}, DataError, r"counts batch\['labels'\], and gets a dict"),
        (torch.zeros(2, 3, 4), ints(2, 2), DataError, r"integers \(2, 3\) between 0 and 3.*int64 \(2, 2\)"),
        (torch.zeros(2, 3, 4), ints(2, 3).float(), DataError, r"labels, integers \(2, 3\).*got float32 \(2, 3\)"),
        (torch.zeros(2, 3, 4), ints(2, 3).to(torch.uint16), DataError, "language_model got uint16"),
        (torch.zeros(2, 3, 4), ints(2, 3, high=5), DataError, "between 0 and 3, or -100 .*from 0 to 4"),
        (torch.zeros(2, 3, 4), ints(2, 3) - 1, DataError, "between 0 and 3, or -100 .*from -1 to 0"),
    ],
)
def test_tokens_of_another_form_are_refused(output: object, target: object, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        tasks.language_model().check(output, target)
