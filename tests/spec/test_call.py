"""Names with options, as they are typed."""

from __future__ import annotations

import pytest

from headrace.errors import UsageError
from headrace.spec.call import parse_call, split_calls


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
    assert parse_call(text) == (name, options)


@pytest.mark.parametrize(
    "text",
    ["x(", "x(2)", "x(a=)", "x(a=b)", "x(a=print(1))", "x(**{'a': 1})", "x(a=1)(b=2)", "x.y(a=1)", "x(a=1", "x(a=1) y"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a name with options"):
        parse_call(text)


def test_a_list_is_cut_at_its_own_commas() -> None:
    text = "one_device, downpour(push_every=2, fetch_every=3),x(a='b,(c', d=(1, 2))"
    assert split_calls(text) == ["one_device", "downpour(push_every=2, fetch_every=3)", "x(a='b,(c', d=(1, 2))"]
    assert split_calls("a,,b") == ["a", "", "b"]
