"""Examples come from files in the form that the model takes, or are refused with what was expected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import DataError, UsageError
from headrace.export.reading import read_inputs
from headrace.export.signature import TensorForm

PIXELS = (TensorForm("image", "float32", (-1, 1, 2, 3)),)
TWO = (TensorForm("user", "int64", (-1,)), TensorForm("item", "int64", (-1,)))
VALUES = np.arange(12, dtype=np.float32).reshape(2, 1, 2, 3)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_kind_of_file_gives_the_same_examples(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES.astype(np.float64))
    np.savez(tmp_path / "a.npz", image=VALUES)
    np.savez(tmp_path / "unnamed.npz", VALUES)
    written(tmp_path / "a.json", json.dumps(VALUES.tolist()))
    written(tmp_path / "named.json", json.dumps({"image": VALUES.tolist()}))
    written(tmp_path / "rows.json", json.dumps([{"image": each} for each in VALUES.tolist()]))
    rows = "\n".join(",".join(map(str, each.ravel())) for each in VALUES)
    written(tmp_path / "a.csv", rows)
    written(tmp_path / "header.csv", f"a,b,c,d,e,f\n{rows}\n")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8
    for path in files:
        found = read_inputs(path, PIXELS)["image"]
        assert found.dtype == np.float32
        assert (found == VALUES).all(), path


def test_one_example_gets_the_dimension_of_the_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES[0])
    assert read_inputs(tmp_path / "a.npy", PIXELS)["image"].shape == (1, 1, 2, 3)


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    found = read_inputs(written(tmp_path / "a.csv", "when,item,user\n5,3,1\n6,4,2\n"), TWO)
    assert found["user"].tolist() == [1, 2]
    assert found["item"].tolist() == [3, 4]
    assert found["item"].dtype == np.int64


def test_an_image_is_resized_and_scaled(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    cv2.imwrite(str(tmp_path / "a.png"), np.full((20, 30, 3), 51, np.uint8))
    found = read_inputs(tmp_path / "a.png", PIXELS)["image"]
    assert found.shape == (1, 1, 2, 3)
    assert np.allclose(found, 0.2)
    ranged = (TensorForm("image", "float32", (-1, 1, 2, 3), (-1.0,), (1.0,)),)
    assert np.allclose(read_inputs(tmp_path / "a.png", ranged)["image"], -0.6)
    unknown = (TensorForm("image", "float32", (-1, 1, 2, 3), (None,), (2.0,)),)
    assert np.allclose(read_inputs(tmp_path / "a.png", unknown)["image"], 0.4)
    whole = (TensorForm("image", "uint8", (-1, 3, 4, 4)),)
    assert (read_inputs(tmp_path / "a.png", whole)["image"] == 51).all()
    with pytest.raises(DataError, match=r"an image is for an input .* the model takes image float32 \(any, 6\)"):
        read_inputs(tmp_path / "a.png", (TensorForm("image", "float32", (-1, 6)),))
    written(tmp_path / "b.png", "no image")
    with pytest.raises(DataError, match="not an image"):
        read_inputs(tmp_path / "b.png", PIXELS)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", "[[1, 2]]", r"expected image float32 \(any, 1, 2, 3\), got the shape \(1, 2\)"),
        ("a.json", "[[1, 2], [3]]", "lists of different lengths"),
        ("a.json", '[["a"]]', "got text"),
        ("a.json", "[[null]]", "got null"),
        ("a.json", "[[1e400]]", "shape"),
        ("a.json", "[[1, 2, 3], 4]", "lists of different lengths"),
        ("a.json", "[[[[1e39, 2, 3], [4, 5, 6]]]]", "a number that float32 does not hold"),
        ("a.json", "[[[[true, 2, 3], [4, 5, 6]]]]", "got numbers, true and false"),
        ("a.json", '{"picture": [1]}', r"expected image float32 .*; got 'picture'"),
        ("a.json", "{}", "got no input"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.csv", "", "has no row"),
        ("a.csv", "a,b,c,d,e,f\n", "a header and no row"),
        ("a.csv", "1,2,3\n", "expected 6 numbers a row"),
        ("a.csv", "1,2,3,4,5,6\n1,2,3,4,5,x\n", "row 2: 'x' is not a number"),
        ("a.csv", "1,2,3,4,5,6\n1,2\n", "row 2 has 2 fields, the first has 6"),
        ("a.npy", "no array", "not an array"),
        ("a.npz", "no archive", "not an archive"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected(
    tmp_path: Path, name: str, content: str, told: str
) -> None:
    with pytest.raises(DataError, match=told) as refused:
        read_inputs(written(tmp_path / name, content), PIXELS)
    assert str(tmp_path / name) in str(refused.value)


def test_numbers_that_the_type_does_not_hold_are_refused(tmp_path: Path) -> None:
    for values, told in (
        (2.5, "int64 does not hold"),
        (2**63, "int64 does not"),
        (2.0**63, "int64 does not"),
        (True, "true and"),
    ):
        with pytest.raises(DataError, match=told):
            read_inputs(written(tmp_path / "a.json", json.dumps({"user": [1], "item": [values]})), TWO)
    with pytest.raises(DataError, match="as many examples, got user 2, item 1"):
        read_inputs(written(tmp_path / "a.json", json.dumps({"user": [1, 2], "item": [1]})), TWO)


def test_whole_numbers_beside_floats_are_not_rounded(tmp_path: Path) -> None:
    content = '{"user": [1, 2.0], "item": [9007199254740993, 2.0]}'
    assert read_inputs(written(tmp_path / "a.json", content), TWO)["item"].tolist() == [2**53 + 1, 2]
    with pytest.raises(DataError, match="int64 does not hold"):
        read_inputs(written(tmp_path / "a.json", content.replace("2.0]}", "2.5]}")), TWO)


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asarray([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="not an array of numbers"):
        read_inputs(tmp_path / "a.npy", PIXELS)


def test_other_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.bmp, \.csv"):
        read_inputs(tmp_path / "a.txt", PIXELS)
    with pytest.raises(UsageError, match="does not exist"):
        read_inputs(tmp_path / "a.npy", PIXELS)
