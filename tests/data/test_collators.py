"""Collators, such as those of the transformers library, make the batches of a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import headrace as hr
from headrace.errors import DataError, UsageError
from late import Late

datasets, transformers = Late("datasets"), Late("transformers")
LENGTHS = (3, 1, 5, 2, 4, 2, 6)
TOKENS = {"input_ids": [[7 + at] * length for at, length in enumerate(LENGTHS)], "label": list(range(len(LENGTHS)))}


def tokenizer(**special: str) -> Any:
    words = {f"w{number}": number for number in range(20)} | {"<pad>": 20, "<mask>": 21}
    splitting = Tokenizer(models.WordLevel(words, unk_token="w0"))
    splitting.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=splitting, **special)


def batches(collator: Any, rank: int = 0, shares: tuple[int, ...] = (1,), seed: int = 0, **columns: Any) -> list[Any]:
    pipeline = hr.data.from_hugging_face(datasets.Dataset.from_dict(columns or TOKENS), collator=collator)
    return [share.batch for share in hr.data.Loader(pipeline, seed, 4, shares, rank).sweep(alone=True)]


def test_examples_are_padded_to_the_longest_of_their_share() -> None:
    collator = transformers.DataCollatorWithPadding(tokenizer(pad_token="<pad>"))
    first, last = batches(collator)
    assert type(first) is dict
    assert first["input_ids"][:2].tolist() == [[7, 7, 7, 20, 20], [8, 20, 20, 20, 20]]
    assert first["attention_mask"].sum(1).tolist() == [3, 1, 5, 2]
    assert first["labels"].tolist() == [0, 1, 2, 3]
    assert last["input_ids"].shape == (3, 6)
    lengths = [[batch["input_ids"].shape[1] for batch in batches(collator, rank, (1, 1))] for rank in (0, 1)]
    assert lengths == [[3, 4], [5, 6]]


def test_a_share_without_examples_has_the_same_columns() -> None:
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(pad_token="<pad>"), mlm=False)
    *_, last = batches(collator, 3, (1, 1, 1, 1), input_ids=[[1, 2]] * 5)
    assert {name: len(value) for name, value in last.items()} == {"input_ids": 0, "attention_mask": 0, "labels": 0}


def test_masks_follow_from_seed_and_epoch_alone() -> None:
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer(pad_token="<pad>", mask_token="<mask>"), mlm_probability=0.5
    )
    state = torch.get_rng_state()
    rows = {"input_ids": [[5] * 40] * 6}
    first, again, other = batches(collator, **rows), batches(collator, **rows), batches(collator, seed=1, **rows)
    assert torch.equal(state, torch.get_rng_state())
    for one, same, different in zip(first, again, other, strict=True):
        assert torch.equal(one["input_ids"], same["input_ids"])
        assert not torch.equal(one["input_ids"], different["input_ids"])
    assert collator.generator is None


def test_a_function_with_rng_draws_from_the_examples_generator() -> None:
    def collate(examples: list[Mapping[str, Any]], rng: np.random.Generator) -> Any:
        return {"x": np.full(len(examples), rng.random())}

    assert torch.equal(batches(collate)[0]["x"], batches(collate)[0]["x"])
    assert not torch.equal(batches(collate)[0]["x"], batches(collate, seed=1)[0]["x"])


def test_steps_come_before_the_collator() -> None:
    pipeline = hr.data.from_hugging_face(datasets.Dataset.from_dict(TOKENS), collator=lambda rows: torch.tensor(rows))
    lengths = pipeline.map(lambda row: len(row["input_ids"])).filter(lambda length: length > 1).batch(3)
    assert [batch.tolist() for batch in hr.data.batches(lengths)] == [[3, 5], [2, 4, 2], [6]]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["threads", "processes"])
def test_batches_of_any_length_come_from_threads_and_processes(parallel: str) -> None:
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer(pad_token="<pad>", mask_token="<mask>"), mlm_probability=0.5
    )
    pipeline = hr.data.from_hugging_face(datasets.Dataset.from_dict(TOKENS), collator=collator).map(dict)
    ahead = dataclasses.replace(pipeline, reading=dataclasses.replace(pipeline.reading, parallel=parallel, count=2))
    shares = [list(hr.data.Loader(each, 0, 2, (1,), 0).rounds(0, 8)) for each in (pipeline, ahead)]
    assert len({share.batch["input_ids"].shape for share in shares[0]}) > 2
    for inline, other in zip(*shares, strict=True):
        assert all(torch.equal(inline.batch[name], other.batch[name]) for name in inline.batch)


@pytest.mark.parametrize(
    ("collator", "said"),
    [
        (lambda rows: None, "returned a NoneType; a batch is a dict of tensors"),
        (lambda rows: {"x": [1, 2]}, "returned a list as 'x'; a batch is made of tensors"),
        (lambda rows: {"x": torch.zeros(1, 9)}, r"returned batch\['x'\] of shape \(1, 9\) for 4 examples"),
        (lambda rows: rows[0]["none"], "cannot make a batch of example 0 to example 3: KeyError: 'none'"),
    ],
)
def test_what_is_no_batch(collator: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"the collator <lambda> {said}"):
        batches(collator)


def test_a_tokenizer_that_cannot_pad() -> None:
    with pytest.raises(DataError, match=r"cannot make .* does not have a padding token") as error:
        batches(transformers.DataCollatorWithPadding(tokenizer()))
    assert "\n" not in str(error.value)


def test_what_does_not_go_with_a_collator() -> None:
    dataset = datasets.Dataset.from_dict(TOKENS)
    with pytest.raises(UsageError, match="collate must be a function"):
        hr.data.from_hugging_face(dataset, collator="pad")  # type: ignore[arg-type]
    pipeline = hr.data.from_hugging_face(dataset, collator=lambda rows: torch.tensor([len(row) for row in rows]))
    with pytest.raises(UsageError, match="give one"):
        pipeline.batch(pad=0)
    assert [len(batch) for batch in hr.data.batches(pipeline.batch(5, lengths=LENGTHS))] == [5, 2]
    with pytest.raises(DataError, match="no column 'text'"):
        hr.data.from_hugging_face(dataset, ["text"], collator=print)
