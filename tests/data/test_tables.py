"""Parquet and CSV: rows come back as they were written, and what does not fit together is named."""

from __future__ import annotations

import functools
import gzip
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, parquet

import headrace as hr
from data.readers import forked
from headrace.data.pipeline.source import Epoch
from headrace.data.sources.storage import BoundedCache
from headrace.errors import DataError, UsageError

EPOCH = Epoch(0, 0)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def rows_of(pipeline: hr.data.Pipeline) -> list[dict[str, Any]]:
    source = pipeline.source
    found = [source.example(index, EPOCH) for index in range(len(source))]
    return [{name: plain(value) for name, value in row.items()} for row in found]


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.integers(-(2**63), 2**63 - 1),
            "f": FINITE,
            "t": st.booleans(),
            "s": st.text(max_size=10),
            "b": st.binary(max_size=10),
            "l": st.lists(st.integers(-9, 9), max_size=4),
            "p": st.lists(FINITE, min_size=2, max_size=2),
        }
    ),
    min_size=1,
    max_size=30,
)
SCHEMA = pa.schema(
    {
        "i": pa.int64(),
        "f": pa.float64(),
        "t": pa.bool_(),
        "s": pa.string(),
        "b": pa.binary(),
        "l": pa.list_(pa.int64()),
        "p": pa.list_(pa.float64(), 2),
    }
)


@pytest.mark.slow
@given(ROWS, st.integers(1, 7), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_parquet_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], group: int, limit: int, random: Any
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    middle = len(rows) // 2
    for name, some in (("0", rows[:middle]), ("1", rows[middle:])):
        parquet.write_table(pa.Table.from_pylist(some, SCHEMA), folder / name, row_group_size=group)
    whole = hr.data.from_parquet(str(folder / "*"), memory_limit=limit)
    assert rows_of(whole) == rows
    assert rows_of(hr.data.from_parquet(str(folder / "*"), ["s", "i"])) == [{"s": r["s"], "i": r["i"]} for r in rows]
    numbers = hr.data.from_parquet(str(folder / "*"), ["i", "p"], memory_limit=limit).source
    wanted = [random.randrange(len(rows)) for _ in range(20)]
    batch = numbers.gather(torch.tensor(wanted), EPOCH)
    assert batch["i"].tolist() == [rows[at]["i"] for at in wanted]
    assert batch["p"].tolist() == [rows[at]["p"] for at in wanted]
    mixed = hr.data.from_parquet(str(folder / "*"), ["s", "f"], memory_limit=limit).source
    listed = hr.data.from_parquet(str(folder / "*"), ["l"], memory_limit=limit).batch(pad=0)
    longest = max(len(row["l"]) for row in rows)
    share = next(hr.data.Loader(listed, 0, len(rows), (1,), 0).sweep())
    assert share.batch["l"].tolist() == [row["l"] + [0] * (longest - len(row["l"])) for row in rows]
    batch = mixed.gather(torch.tensor(wanted), EPOCH)
    assert batch["s"] == [rows[at]["s"] for at in wanted]
    assert batch["f"].tolist() == [rows[at]["f"] for at in wanted]
    assert numbers.gather(torch.zeros(0, dtype=torch.int64), EPOCH)["p"].shape == (0, 2)


@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_parquet_keeps_what_was_decoded_within_its_bound_also_for_threads(tmp_path: Path, limit: int) -> None:
    parquet.write_table(pa.table({"x": np.arange(64)}), tmp_path / "a", row_group_size=4)
    source = hr.data.from_parquet(str(tmp_path / "a"), memory_limit=limit).source
    copy = pickle.loads(pickle.dumps(source))
    assert copy.identity == source.identity
    wanted = [*range(64), *reversed(range(64))]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(functools.partial(copy.example, epoch=EPOCH), wanted))
    assert [int(row["x"]) for row in rows] == wanted


def test_what_is_kept_stays_within_its_bound_and_is_made_once() -> None:
    made = []

    def make(key: int) -> bytes:
        made.append(key)
        return bytes(40)

    kept: BoundedCache[bytes] = BoundedCache(100, len)
    for key in (0, 1, 0, 2, 0, 1):
        kept.get(key, functools.partial(make, key))
    # 2 came, and 1 went, because 0 was asked for meanwhile.
    assert made == [0, 1, 2, 1]


def test_a_fork_while_a_thread_decodes_goes_on_with_what_is_kept() -> None:
    kept: BoundedCache[bytes] = BoundedCache(100, len)
    kept.get("before", lambda: b"1")

    def read() -> None:
        assert kept.get("before", lambda: b"2") == b"1"
        assert kept.get("during", lambda: b"3") == b"3"

    def make() -> bytes:
        # The lock of this key is held by this thread, which the fork has not got.
        return bytes([forked(read)])

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(kept.get, "during", make).result() == b"\0"


def test_parquet_of_another_schema_names_file_column_and_both_types(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [1], "y": [1.0]}), tmp_path / "a")
    parquet.write_table(pa.table({"x": [1.5], "y": [1.0]}), tmp_path / "b")
    with pytest.raises(DataError, match=rf"{tmp_path}/b: column 'x' is double, and in {tmp_path}/a it is int64"):
        hr.data.from_parquet(str(tmp_path / "*"))
    assert len(hr.data.from_parquet(str(tmp_path / "*"), ["y"])) == 2
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "b")
    with pytest.raises(DataError, match=r"/b has no column 'y', which .*/a has; it has x"):
        hr.data.from_parquet(str(tmp_path / "*"))
    with pytest.raises(DataError, match="no column 'z'; it has x, y"):
        hr.data.from_parquet(str(tmp_path / "a"), ["z"])


def test_parquet_that_is_none_or_ends_early(tmp_path: Path) -> None:
    file = tmp_path / "a"
    parquet.write_table(pa.table({"x": np.arange(10_000)}), file, row_group_size=1000)
    whole = file.read_bytes()
    source = hr.data.from_parquet(str(file)).source
    file.write_bytes(whole[:-100])
    said = rf"/a had {len(whole):,} bytes when it was found and has {len(whole) - 100:,} now"
    with pytest.raises(DataError, match=said):
        source.example(0, EPOCH)
    with pytest.raises(DataError, match=rf"/a \({len(whole) - 100:,} bytes .* not a whole Parquet file"):
        hr.data.from_parquet(str(file))
    file.unlink()
    with pytest.raises(DataError, match="/a cannot be read: No such file"):
        source.example(0, EPOCH)
    with pytest.raises(DataError, match="no file is found by"):
        hr.data.from_parquet(str(file))
    parquet.write_table(pa.table({"x": np.arange(0)}), file)
    with pytest.raises(DataError, match="0 examples"):
        hr.data.from_parquet(str(file))


@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_what_is_missing_is_named_by_row_and_can_be_skipped(tmp_path: Path, limit: int) -> None:
    x = pa.array([1.0, 2.0, 3.0, None, 5.0, 6.0], pa.float32())
    pairs = pa.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, None], [11, 12]], pa.list_(pa.int16(), 2))
    flags = pa.array([True, False, None, True, False, True])
    parquet.write_table(pa.table({"x": x, "pair": pairs, "flag": flags}), tmp_path / "a", row_group_size=2)
    pipeline = hr.data.from_parquet(str(tmp_path / "a"), memory_limit=limit)
    for row, name in ((2, "flag"), (3, "x"), (4, "pair")):
        said = rf"/a, row {row}: '{name}' is missing \(null\)"
        with pytest.raises(DataError, match=said):
            pipeline.source.gather(torch.tensor([5, row, 0]), EPOCH)
        with pytest.raises(DataError, match=said):
            pipeline.source.example(row, EPOCH)
    share = next(hr.data.Loader(pipeline.on_error("skip"), 0, 6, (1,), 0).sweep())
    assert share.batch["x"].tolist() == [1.0, 2.0, 6.0]
    assert share.batch["pair"].tolist() == [[1, 2], [3, 4], [11, 12]]
    assert share.batch["flag"].tolist() == [True, False, True]
    assert [share.batch[name].dtype for name in ("x", "pair", "flag")] == [torch.float32, torch.int16, torch.bool]


def test_words_of_a_dictionary_and_the_keys_of_rows(tmp_path: Path) -> None:
    words = pa.array(["a", "b", "a", "c"]).dictionary_encode()
    parquet.write_table(pa.table({"w": words}), tmp_path / "a", row_group_size=3)
    source = hr.data.from_parquet(str(tmp_path / "a")).source
    assert [source.example(index, EPOCH)["w"] for index in range(4)] == ["a", "b", "a", "c"]
    assert source.key(3) == f"{tmp_path}/a, row 3"
    assert (source.nbytes(0) or 0) > 0


@pytest.mark.slow
@given(
    st.lists(
        st.fixed_dictionaries(
            {"i": st.integers(-(2**63), 2**63 - 1), "f": FINITE, "s": st.text("ab,\"'é \n", min_size=1, max_size=8)}
        ),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
def test_csv_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], packed: bool) -> None:
    folder = tmp_path_factory.mktemp("csv")
    kinds = {"i": "int64", "f": "float64", "s": "string"}
    sink = pa.BufferOutputStream()
    csv.write_csv(pa.Table.from_pylist(rows, pa.schema({k: pa.type_for_alias(v) for k, v in kinds.items()})), sink)
    content = sink.getvalue().to_pybytes()
    file = folder / ("a.csv.gz" if packed else "a.csv")
    file.write_bytes(gzip.compress(content) if packed else content)
    pipeline = hr.data.from_csv(str(file), types=kinds)
    assert rows_of(pipeline) == rows
    batch = pipeline.source.gather(torch.tensor([len(rows) - 1, 0]), EPOCH)
    assert batch["i"].tolist() == [rows[-1]["i"], rows[0]["i"]]
    assert batch["s"] == [rows[-1]["s"], rows[0]["s"]]


def test_csv_of_other_columns_or_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,x\n2.5,3\n")
    with pytest.raises(DataError, match=r"/b\.csv: column 'y' is double, and in .*a\.csv it is int64; .*types={'y'"):
        hr.data.from_csv(str(tmp_path / "*.csv"))
    pipeline = hr.data.from_csv(str(tmp_path / "*.csv"), types={"y": "float32"})
    assert rows_of(pipeline) == [{"x": 1, "y": 2.0}, {"x": 3, "y": 2.5}]
    assert pipeline.source.example(0, EPOCH)["y"].dtype == torch.float32
    assert pipeline.source.key(1) == f"{tmp_path}/b.csv, row 0"
    assert rows_of(hr.data.from_csv(str(tmp_path / "*.csv"), ["x"])) == [{"x": 1}, {"x": 3}]
    (tmp_path / "b.csv").write_text("x\n3\n")
    with pytest.raises(DataError, match=r"b\.csv has no column 'y', which .*a\.csv has; it has x"):
        hr.data.from_csv(str(tmp_path / "*.csv"))
    with pytest.raises(DataError, match=r"a\.csv has no column 'z'; it has x, y"):
        hr.data.from_csv(str(tmp_path / "a.csv"), types={"z": "int64"})
    with pytest.raises(UsageError, match="no type of Arrow"):
        hr.data.from_csv(str(tmp_path / "a.csv"), types={"x": "number"})
    with pytest.raises(UsageError, match=r"columns must be a list of names, got 'x'; give \['x'\]"):
        hr.data.from_csv(str(tmp_path / "a.csv"), "x")
    with pytest.raises(UsageError, match="delimiter must be one character, got ';;'"):
        hr.data.from_csv(str(tmp_path / "a.csv"), delimiter=";;")


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_numbers_without_a_sign(tmp_path: Path, dtype: Any) -> None:
    numbers = np.array([3, 5, 2**16 - 1], dtype)
    parquet.write_table(pa.table({"x": numbers}), tmp_path / "a.parquet")
    (batch,) = hr.data.batches(hr.data.from_parquet(str(tmp_path / "a.parquet")).batch(3))
    (pair,) = hr.data.batches(hr.data.from_arrays(numbers, np.ones((3, 2), dtype)).batch(3))
    assert batch["x"].tolist() == pair[0].tolist() == numbers.tolist()
    assert batch["x"].dtype == pair[0].dtype == pair[1].dtype == getattr(torch, np.dtype(dtype).name)


def test_csv_that_cannot_be_parsed(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for content, said in (
        ("x,y\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("", "Empty CSV"),
        ("x,y\n", "0 examples"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=said):
            hr.data.from_csv(str(file))
    file.write_text("x;y\n1;2\n")
    assert rows_of(hr.data.from_csv(str(file), delimiter=";")) == [{"x": 1, "y": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", hr.Mirrored(workers=2)])
def test_training_from_parquet_is_training_from_the_same_arrays(tmp_path: Path, strategy: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, 6, generator=generator)
    target = (inputs.sum(1) > 0).long()
    listed = pa.FixedSizeListArray.from_arrays(pa.array(inputs.numpy().ravel()), 6)
    parquet.write_table(pa.table({"inputs": listed, "target": target.numpy()}), tmp_path / "a", row_group_size=17)

    def weights(data: hr.data.Pipeline) -> torch.Tensor:
        job = hr.Job(
            model=lambda: torch.nn.Linear(6, 2),
            task=hr.tasks.multiclass(2),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=data.shuffle(),
            inputs=lambda batch: batch["inputs"],
            target=lambda batch: batch["target"],
            global_batch_size=16,
            epochs=2,
        )
        model: Any = hr.fit(job, strategy).model
        return model.weight.detach()

    arrays = hr.data.from_arrays({"inputs": inputs, "target": target})
    table = hr.data.from_parquet(str(tmp_path / "a"), memory_limit=1000)
    assert torch.equal(weights(table), weights(arrays))
