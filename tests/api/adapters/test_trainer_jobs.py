"""A Trainer of the transformers library as a job has its numbers, and what a job cannot carry is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headrace as hr
from headrace.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _accelerate() -> None:
    """Trainer needs it. Both take seconds to import, which not every process that collects tests should."""
    pytest.importorskip("accelerate")


SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def examples(count: int, classes: int = 0) -> list[dict[str, Any]]:
    """Texts of eight tokens, of which some labels do not count."""
    draws = torch.Generator().manual_seed(count)
    found = []
    for place in range(count):
        tokens = torch.randint(2, 40, (8,), generator=draws)
        labels = tokens.clone()
        labels[: place % 7] = -100
        found.append({"input_ids": tokens, "labels": torch.tensor(place % classes) if classes else labels})
    return found


class Tokens(nn.Module):
    """Scores each token; models of the library compute losses of tokens in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, input_ids: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> dict[str, Any]:
        scores = self.head(self.norm(self.embedding(input_ids)).cumsum(1)).flatten(0, 1)
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum") / count}


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens().double()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3, **none)).double()


def make_trainer(folder: Path, kind: type | None = None, model: Any = None, **more: Any) -> Any:
    given = {name: more.pop(name) for name in ("callbacks", "compute_metrics") if name in more}
    classes = 3 if isinstance(model, transformers.BertForSequenceClassification) else 0
    settings = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.1,
        "warmup_steps": 3, "lr_scheduler_type": "cosine", "train_sampling_strategy": "sequential", **more,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**settings)
    return (kind or transformers.Trainer)(
        model=model or tokens(), args=arguments, train_dataset=examples(22, classes), **given
    )


@pytest.mark.slow
@pytest.mark.parametrize(("build", "accumulate"), [(tokens, 1), (tokens, 2), (classifier, 1)])
def test_the_numbers_of_its_own_run(build: Any, accumulate: int, tmp_path: Path) -> None:
    model = build()
    job = hr.from_trainer(
        make_trainer(tmp_path, model=copy.deepcopy(model), gradient_accumulation_steps=accumulate, max_grad_norm=0.5)
    )
    trainer = make_trainer(tmp_path, model=model, gradient_accumulation_steps=accumulate, max_grad_norm=0.5)
    trainer.train()
    for strategy in (hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)):
        run = hr.fit(job, strategy, engine=hr.ThreadEngine())
        assert run.summary.steps == trainer.state.global_step
        for name, value in trainer.model.state_dict().items():
            torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_hooks_of_parameters_are_carried(tmp_path: Path) -> None:
    model = tokens()
    first, second = list(model.parameters())[:2]
    before = [first.detach().clone(), second.detach().clone()]
    first.register_hook(torch.zeros_like)
    run = hr.fit(hr.from_trainer(make_trainer(tmp_path, model=model, weight_decay=0.0)), hr.OneDevice())
    after = list(run.model.parameters())[:2]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def own_loss() -> type:
    class OwnLoss(transformers.Trainer):
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            return super().compute_loss(*given, **more)

    return OwnLoss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: {"kind": own_loss()}, "OwnLoss defines compute_loss"),
        (lambda: {"label_smoothing_factor": 0.1, "model": classifier()}, "label_smoothing_factor=0.1"),
        (lambda: {"gradient_checkpointing": True, "model": classifier()}, "gradient_checkpointing=True"),
        (lambda: {"callbacks": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback may change the loop"),
        (lambda: {"compute_metrics": len}, "was given compute_metrics"),
        (lambda: {"model": classifier(), "gradient_accumulation_steps": 2}, "leaves num_items_in_batch aside"),
    ],
)
def test_what_a_job_does_not_carry_is_refused(
    settings: Callable[[], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        hr.from_trainer(make_trainer(tmp_path, **settings()))


def test_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="takes a transformers Trainer, got Linear"):
        hr.from_trainer(nn.Linear(1, 1))
