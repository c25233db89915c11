from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.report.format import byte_count, clean, duration, fixed, percent, short, tick


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.03125, "0.0312"),
        (0.5, "0.500"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.6, "1000"),
        (4312.4, "4312"),
        (99_994, "99994"),
        (99_996, "100k"),
        (999_600, "1.00M"),
        (-1234.5, "-1234"),
        (9.99e14, "999T"),
        (-3.2e38, "-3.20e+38"),
        (float("nan"), "nan"),
    ],
)
def test_short(value, text):
    assert short(value) == text


@given(st.floats(min_value=1e-4, max_value=9e14))
def test_short_is_short_and_close(value):
    text = short(value)
    assert len(text) <= 7
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMGT")) * factor == pytest.approx(value, rel=0.006)


@given(st.floats(min_value=0, max_value=99_999))
def test_fixed_fits_its_column(value):
    text = fixed(value)
    assert len(text) <= 5
    assert float(text) == pytest.approx(value, rel=0.01, abs=0.0051)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (byte_count(0), "0 B"),
        (byte_count(999), "999 B"),
        (byte_count(1_694_000), "1.69 MB"),
        (byte_count(999_999_999), "1.00 GB"),
        (duration(0.0123), "12.3 ms"),
        (duration(8.34), "8.3 s"),
        (duration(245), "4 min 05 s"),
        (duration(59.97), "1 min 00 s"),
        (duration(11_520), "3 h 12 min"),
        (percent(0.0421), "4.2 %"),
        (percent(0.74), "74 %"),
        (fixed(1.0351), "1.04"),
        (fixed(123.4), "123"),
        (fixed(None), "–"),
        (tick(0, 10), "0"),
        (tick(0.5, 2), "0.5"),
        (tick(1750, 2000), "1750"),
        (tick(8000, 40_000), "8k"),
    ],
)
def test_words(made, text):
    assert made == text


def test_clean_leaves_no_control_characters():
    assert clean("a\x00b\x1b[31mc\ud800\nd\té中") == "a\ufffdb\ufffd[31mc\ufffd\nd\té中"
