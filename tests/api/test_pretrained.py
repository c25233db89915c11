"""Models of the transformers library: trained through a collator, saved as a directory that `from_pretrained` reads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn

import headrace as hr
from headrace.api.checks import inspect_job
from headrace.bench.library import declare_operators
from headrace.errors import DataError, JobError, UsageError
from late import Late

declare_operators()

datasets, transformers = Late("datasets"), Late("transformers")
THREADS = hr.ThreadEngine()
ROWS = [
    [(7 * row + place) % 29 for place in range(length)] for row, length in enumerate((3, 9, 5, 8, 2, 7, 4, 6, 9, 5))
]


def tokenizer(**special: str) -> Any:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(29)} | {"<pad>": 29}, "w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", **special)


def model() -> nn.Module:
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    made.loss_function = causal_loss
    return made.double()


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """The library's loss without its cast to float32, which would hide differences below 1e-7."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_job(**changes: Any) -> hr.Job:
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    data = hr.data.from_hugging_face(datasets.Dataset.from_dict({"input_ids": ROWS}), collator=collator)
    given: dict[str, Any] = {
        "model": model,
        "task": hr.tasks.own_loss(ignore_index=-100),
        "optimizer": functools.partial(torch.optim.Adam, lr=1e-2),
        "data": data.shuffle(),
        "eval_data": data,
        "global_batch_size": 4,
        "epochs": 1,
    }
    return hr.Job(**{**given, **changes})


def one_device() -> hr.Run:
    return hr.fit(make_job(), engine=THREADS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.Mirrored(3),
        pytest.param(hr.CentralStorage(2), marks=pytest.mark.full),
        pytest.param(hr.ParameterServer(2, staleness_bound=0), marks=pytest.mark.full),
        hr.TensorParallel(2),
        hr.Pipeline(2),
        pytest.param(hr.Pipeline(2, schedule="1f1b"), marks=pytest.mark.full),
        pytest.param(hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)), marks=pytest.mark.full),
        pytest.param(hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)), marks=pytest.mark.full),
    ],
    ids=lambda strategy: strategy.name,
)
def test_padded_batches_of_any_length_equal_one_device_and_are_saved(strategy: Any, tmp_path: Path) -> None:
    run, alone = hr.fit(make_job(), strategy, engine=THREADS), one_device()
    for name, trained in alone.model.state_dict().items():
        assert torch.allclose(run.model.state_dict()[name], trained, rtol=0, atol=1e-9), name
    where = run.save_pretrained(tmp_path / "saved", tokenizer())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in where.iterdir()}
    read = transformers.GPT2LMHeadModel.from_pretrained(where)
    assert read.lm_head.weight is read.transformer.wte.weight
    for name, trained in run.model.state_dict().items():
        assert torch.equal(read.state_dict()[name], trained), name
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(read.eval()(tokens).logits, run.model.eval()(tokens).logits)
    assert transformers.PreTrainedTokenizerFast.from_pretrained(where).pad_token == "<pad>"


@pytest.mark.slow
def test_what_cannot_be_saved_so(tmp_path: Path) -> None:
    run = one_device()
    with pytest.raises(UsageError, match=r"saved by its save_pretrained, and Tokenizer has none; wrap"):
        run.save_pretrained(tmp_path / "saved", tokenizer().backend_tokenizer)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; save_pretrained makes a directory"):
        run.save_pretrained(tmp_path / "file")
    plain = hr.Job(
        model=lambda: nn.Linear(2, 1),
        task=hr.tasks.regression(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(torch.zeros(4, 2), torch.zeros(4, 1)),
        global_batch_size=4,
        steps=1,
    )
    with pytest.raises(UsageError, match="models of the transformers and peft libraries, and the job's is a Linear"):
        hr.fit(plain, engine=THREADS).save_pretrained(tmp_path / "plain")


def test_a_batch_without_labels_is_refused_before_the_start() -> None:
    data = hr.data.from_hugging_face(
        datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 4}),
        collator=lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])},
    )
    with pytest.raises((DataError, UsageError), match="labels"):
        hr.fit(make_job(data=data, eval_data=None), engine=THREADS)


def test_an_index_beyond_an_embedding_is_explained() -> None:
    data = make_job().data
    too_long = hr.data.from_hugging_face(
        datasets.Dataset.from_dict({"input_ids": [[1] * 17] * 4}), collator=data.batching.collate.function
    )
    with pytest.raises(JobError, match=r"an embedding has no such row: .* a sequence is longer than"):
        hr.fit(make_job(data=too_long, eval_data=None), engine=THREADS)


def test_a_collator_that_draws_from_the_process_is_told() -> None:
    def collate(rows: list[Any]) -> Any:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids.where(torch.rand(ids.shape) < 0.9, -100)}

    def notices(collator: Any) -> str:
        rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
        job = make_job(data=hr.data.from_hugging_face(rows, collator=collator), eval_data=None)
        return " ".join(inspect_job(job).notices)

    assert "the collator collate draws from the process's own random numbers" in notices(collate)
    masking = transformers.DataCollatorForLanguageModeling(tokenizer(mask_token="w1"), mlm_probability=0.5)
    assert "draws" not in notices(masking)
