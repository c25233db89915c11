from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec.plain import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    number: float
    word: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...] = ()
    named: Mapping[str, int] | None = None
    anything: Any = None
    flag: bool = False
    waited_s: Mapping[str, float] | None = None


INNER = st.builds(Inner, st.floats(allow_nan=False), st.none() | st.text())
OUTER = st.builds(
    Outer,
    INNER,
    st.lists(INNER, max_size=3).map(tuple),
    st.none() | st.dictionaries(st.text(), st.integers(-(2**128) + 1, 2**128 - 1), max_size=3),
    st.none() | st.integers(-(2**128) + 1, 2**128 - 1) | st.lists(st.text(), max_size=2),
    st.booleans(),
)


@given(OUTER)
def test_there_and_back_through_json(value: Outer) -> None:
    assert from_plain(Outer, json.loads(json.dumps(to_plain(value)))) == value


def test_missing_fields_take_their_defaults_and_whole_numbers_are_floats_too() -> None:
    made = from_plain(Outer, {"inner": {"number": 3}})
    assert made == Outer(Inner(3.0))
    assert isinstance(made.inner.number, float)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"inner": {"number": "3"}}, "Expected `float`, got `str` - at `$.inner.number`"),
        ({"inner": {"number": True}}, "Expected `float`, got `bool` - at `$.inner.number`"),
        ({"inner": {"number": 1.0, "colour": 2}}, "unknown field `colour` - at `$.inner`"),
        ({"inner": 1}, "Expected `object`, got `int` - at `$.inner`"),
        ({"inner": {"number": 1.0}, "many": {}}, "Expected `array`, got `object` - at `$.many`"),
        ({"inner": {"number": 1.0}, "named": {"a": True}}, "Expected `int`, got `bool` - at `$.named[...]`"),
        ({"inner": {"number": 10**400}}, "Number out of range - at `$.inner.number`"),
        ({"inner": {"number": 1.0}, "anything": [10**400]}, "got one of 1329 - at `$.anything[0]`"),
        ({"inner": {"number": 1.0}, "named": {"a": -(2**128)}}, "at most 128 bits, got one of 129 - at `$.named.a`"),
        (
            {"inner": {"number": 1.0}, "waited_s": {"a": float("nan")}},
            "a finite number, got nan - at `$.waited_s.a`",
        ),
        ({"inner": {"number": 1.0}, "waited_s": {"a": float("inf")}}, "expected a finite number, got inf"),
        ({"inner": {"number": 1.0}, "flag": 1}, "Expected `bool`, got `int` - at `$.flag`"),
        ({}, "missing required field `inner`"),
    ],
)
def test_another_form_is_refused(plain: object, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        from_plain(Outer, plain)


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="range has no JSON form"):
        to_plain({"a": range(2)})
