"""Names with options, as they are typed."""

from __future__ import annotations

import pytest

from headrace.errors import UsageError
from headrace.spec.call import Call, parse_call, split_calls


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("mirrored", "mirrored", {}),
        (" mirrored ", "mirrored", {}),
        ("downpour()", "downpour", {}),
        ("downpour(push_every=2, overlap=False)", "downpour", {"push_every": 2, "overlap": False}),
        ("parameter_server(sharding='max_size:4MB')", "parameter_server", {"sharding": "max_size:4MB"}),
        ("x(a=None, b=-1.5)", "x", {"a": None, "b": -1.5}),
    ],
)
def test_a_name_and_its_options(text: str, name: str, options: dict[str, object]) -> None:
    assert parse_call(text) == Call(name, (), options)


def test_values_may_have_no_names_and_be_calls() -> None:
    inner = Call("pipeline", (2,), {"schedule": "1f1b", "partition": [3, 3]})
    text = "hybrid(mirrored, pipeline(2, schedule='1f1b', partition=[3, 3]))"
    assert parse_call(text) == Call("hybrid", (Call("mirrored"), inner))
    assert parse_call("hybrid(mirrored(2), inner=tensor_parallel(2))") == Call(
        "hybrid", (Call("mirrored", (2,)),), {"inner": Call("tensor_parallel", (2,))}
    )


@pytest.mark.parametrize(
    "text",
    [
        "x(",
        "x(a=)",
        "x(a=1 + b)",
        "x(y.z(1))",
        "x(*[1])",
        "x(**{'a': 1})",
        "x(a=1)(b=2)",
        "x.y(a=1)",
        "x(a=1",
        "x(a=1) y",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a name with options"):
        parse_call(text)


def test_a_list_is_cut_at_its_own_commas() -> None:
    text = "one_device, downpour(push_every=2, fetch_every=3),x(a='b,(c', d=(1, [2, 3]))"
    assert split_calls(text) == ["one_device", "downpour(push_every=2, fetch_every=3)", "x(a='b,(c', d=(1, [2, 3]))"]
    assert split_calls("x(a=[1, 2]),y") == ["x(a=[1, 2])", "y"]
    assert split_calls("a,,b") == ["a", "", "b"]


def test_a_place_within_a_call_takes_quotes() -> None:
    assert parse_call("hybrid('mine.py:Ours(workers=2)', pipeline(2))").values[0] == "mine.py:Ours(workers=2)"
    with pytest.raises(UsageError, match=r", and a place within it as 'file\.py:Name\(\.\.\.\)'"):
        parse_call("hybrid(mine.py:Ours(workers=2), pipeline(2))")
