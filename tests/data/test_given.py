"""What users have already: torch's data sets, loaders and iterables, and Hugging Face's."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import headrace as hr
from headrace.data import as_pipeline, from_torch
from headrace.data.pipeline.source import Epoch, Source
from headrace.errors import DataError, UsageError
from late import Late

datasets = Late("datasets")
EPOCH = Epoch(0, 0)


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(number) for number in range(5))


def numbers(pipeline: hr.data.Pipeline) -> list[int]:
    return [int(pipeline.source.example(index, EPOCH)) for index in range(len(pipeline))]


@pytest.mark.parametrize(
    "given",
    [Numbers(), DataLoader(Numbers()), [0, 1, 2, 3, 4], range(5), np.arange(5), {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}.keys()],
    ids=["IterableDataset", "DataLoader", "list", "range", "array", "iterable"],
)
def test_whatever_yields_examples(given: Any) -> None:
    assert numbers(hr.data.from_torch(given, limit=5)) == [0, 1, 2, 3, 4]


def test_a_generator_is_read_up_to_its_limit() -> None:
    assert numbers(hr.data.from_torch((number for number in range(5)), limit=5)) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="the generator has more than 4 examples"):
        hr.data.from_torch((number for number in range(5)), limit=4)
    with pytest.raises(DataError, match="0 examples"):
        hr.data.from_torch(number for number in range(0))
    with pytest.raises(UsageError, match="limit must be"):
        hr.data.from_torch(Numbers(), limit=0)
    for no_examples in (3, "abc", {"a": 1}):
        with pytest.raises(DataError, match="data cannot be a"):
            hr.data.from_torch(no_examples)


def test_of_a_loader_the_order_is_kept_or_not() -> None:
    dataset = TensorDataset(torch.arange(10))
    assert not hr.data.from_torch(dataset).shuffled
    assert not hr.data.from_torch(DataLoader(dataset, batch_size=4)).shuffled
    assert hr.data.from_torch(DataLoader(dataset, batch_size=4, shuffle=True)).shuffled
    listed = DataLoader(Numbers(), collate_fn=lambda examples: {"sum": sum(examples)})
    assert hr.data.from_torch(listed).source.gather(torch.tensor([4, 3]), EPOCH) == {"sum": torch.tensor(7)}


ROWS = {
    "text": ["a", "b", "c", "d"],
    "label": [0, 1, 0, 1],
    "weight": [0.5, 1.5, 2.5, 3.5],
    "tokens": [[1, 2], [3, 4], [5, 6], [7, 8]],
    "ragged": [[1], [2, 3], [], [4]],
}


def test_rows_of_hugging_face_one_by_one_and_many_at_once() -> None:
    dataset = datasets.Dataset.from_dict(ROWS).select([3, 2, 1, 0])
    source = hr.data.from_hugging_face(dataset).source
    copy = pickle.loads(pickle.dumps(source))
    for each in (source, copy):
        example = each.example(2, EPOCH)
        assert example["text"] == "b"
        assert [example[name].tolist() for name in ("label", "weight", "tokens", "ragged")] == [1, 1.5, [3, 4], [2, 3]]
    batch = hr.data.from_hugging_face(dataset, ["tokens", "text", "label"]).source.gather(torch.tensor([3, 0]), EPOCH)
    assert list(batch) == ["tokens", "text", "label"]
    assert batch["tokens"].tolist() == [[1, 2], [7, 8]]
    assert batch["text"] == ["a", "d"]
    assert batch["label"].dtype == torch.int64
    assert source.identity == copy.identity != hr.data.from_hugging_face(dataset, ["text"]).source.identity
    padded = hr.data.from_hugging_face(dataset, ["ragged"]).batch(pad=0)
    share = next(hr.data.Loader(padded, 0, 4, (1,), 0).sweep())
    assert share.batch["ragged"].tolist() == [[4, 0], [0, 0], [2, 3], [1, 0]]


def test_a_format_of_its_own_is_kept_and_a_stream_read() -> None:
    dataset = datasets.Dataset.from_dict(ROWS)
    own = dataset.with_transform(lambda rows: {"double": [2 * label for label in rows["label"]]})
    assert hr.data.from_hugging_face(own).source.gather(torch.tensor([0, 1]), EPOCH)["double"].tolist() == [0, 2]
    stream = hr.data.from_hugging_face(dataset.to_iterable_dataset(), limit=4).source
    assert stream.example(1, EPOCH)["tokens"].tolist() == [3, 4]
    with pytest.raises(DataError, match="has more than 3 examples"):
        hr.data.from_hugging_face(dataset.to_iterable_dataset(), limit=3)


def test_what_is_no_data_set_of_hugging_face() -> None:
    dataset = datasets.Dataset.from_dict({**ROWS, "gap": [1, None, 2, 3]})
    with pytest.raises(DataError, match=r"splits train; give one, dataset\['train'\]"):
        hr.data.from_hugging_face(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(DataError, match=r"takes a datasets\.Dataset, got list"):
        hr.data.from_hugging_face([1])
    with pytest.raises(DataError, match="no column 'image'; it has text"):
        hr.data.from_hugging_face(dataset, ["image"])
    with pytest.raises(DataError, match=r"example 1: 'gap' is missing \(null\)"):
        hr.data.from_hugging_face(dataset, ["text", "gap"]).source.gather(torch.tensor([0, 1]), EPOCH)


class Records(Source):
    """Examples of one's own, of which one cannot be read."""

    def __len__(self) -> int:
        return 8

    def example(self, index: int, epoch: Epoch) -> Any:
        if index == 5:
            raise KeyError("label")
        return torch.tensor([float(index)]), torch.tensor(index % 2)


def test_a_source_alone_is_a_pipeline_shuffled_as_other_data_of_a_job() -> None:
    pipeline, lines = as_pipeline(Records())
    assert (len(pipeline), pipeline.shuffled, lines) == (8, True, ())
    assert not from_torch(Records()).shuffled


@pytest.mark.parametrize("transformed", [False, True])
def test_an_error_in_a_source_of_ones_own_names_the_example(transformed: bool) -> None:
    pipeline = hr.data.Pipeline(Records()).shuffle(seed=1)
    pipeline = pipeline.map(lambda example: example) if transformed else pipeline
    with pytest.raises(DataError, match="example 5 cannot be had: the source raised KeyError: 'label'") as failed:
        list(hr.data.batches(pipeline.batch(3)))
    assert isinstance(failed.value.__cause__, KeyError)


def test_a_bare_data_set_with_lists_names_from_hugging_face() -> None:
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5, 6]], "label": [0, 1, 0]})
    said = (
        r"columns 'input_ids' are not numbers or text, .* give hr\.data\.from_hugging_face\(dataset, collator=\.\.\.\)"
    )
    with pytest.raises(DataError, match=said):
        as_pipeline(ragged)
    with pytest.raises(DataError, match=said):
        as_pipeline(DataLoader(ragged))
    # What forms batches as it is stays allowed.
    assert len(as_pipeline(ragged.select_columns(["label"]))[0]) == 3
    assert len(as_pipeline(ragged.with_format("torch"))[0]) == 3
    assert len(as_pipeline(DataLoader(ragged, collate_fn=list))[0]) == 3
