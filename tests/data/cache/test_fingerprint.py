"""What a function does, as far as that can be seen."""

from __future__ import annotations

import enum
import functools
import importlib
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data import DecodeImage
from headrace.data.cache.fingerprint import fingerprint
from headrace.errors import UsageError


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


PROGRAM = """
    import functools, re
    import numpy as np
    SCALE = 2
    class Base:
        def double(self, x): return x * 2
    class Transform(Base):
        shift = 1
        def __init__(self, by): self.by = by
        def __call__(self, x): return self.double(x) + self.by + self.shift
    def inner(x): return x + SCALE
    def outer(x, y=3, *, z=4): return [inner(part) for part in (x, y, z) if part in {"a", "b", 3}]
    def closing(over):
        def close(x): return x + over
        return close
    TABLE = np.arange(4)
    def looks(x): return TABLE[x]
    def matches(x): return re.match("a+", x)
"""
VALUES = ("outer", "Transform(1)", "closing(1)", "looks", "matches", "functools.partial(outer, y=1)")


def made(program: str, value: str) -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(program), names)
    return eval(value, names)


@pytest.mark.parametrize(
    ("value", "old", "new"),
    [
        ("outer", "y=3", "y=5"),
        ("outer", "z=4", "z=5"),
        ("outer", "inner(part)", "-inner(part)"),
        ("outer", "x + SCALE", "x - SCALE"),
        ("outer", "SCALE = 2", "SCALE = 2.0"),
        ("outer", '"b"', '"c"'),
        ("Transform(1)", "+ self.by", "- self.by"),
        ("Transform(1)", "shift = 1", "shift = 2"),
        ("Transform(1)", "x * 2", "x * 3"),
        ("Transform(1)", "self.by = by", "self.by = by + 1"),
        ("closing(1)", "x + over", "over + x"),
        ("looks", "arange(4)", "arange(5)"),
        ("matches", '"a+"', '"a*"'),
        ("functools.partial(outer, y=1)", "SCALE = 2", "SCALE = 3"),
    ],
)
def test_another_program_has_another_fingerprint(value: str, old: str, new: str) -> None:
    assert old in PROGRAM
    before = fingerprint(made(PROGRAM, value))
    assert fingerprint(made(PROGRAM, value)) == before
    assert fingerprint(made(PROGRAM.replace(old, new), value)) != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), ("1", b"1"), ((1, 2), [1, 2]), ((1, (2,)), (1, 2)), ({1: 2}, {1: 3}), ({1}, {2}),
        (np.arange(3), np.arange(3.0)), (np.arange(4), np.arange(4).reshape(2, 2)), (torch.zeros(3), torch.ones(3)),
        (Colour.RED, Colour.BLUE), (Path("a"), Path("b")), (re.compile("a"), re.compile("b")),
        (DecodeImage(2, 3), DecodeImage(2, 4)), ("a".upper, "b".upper), (str.upper, str.lower), (np.sin, np.cos),
        (torch.relu, torch.tanh), (functools.partial(max, 1), functools.partial(max, 2)), (len, max),
        (functools.lru_cache(lambda x: 1), functools.lru_cache(lambda x: 2)), (None, Ellipsis),
    ],
)  # fmt: skip
def test_different_values_have_different_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_installed_elsewhere_counts_by_its_version(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the user's site-packages, or by `pip install --target`."""
    folder, name = tmp_path / "packages", f"elsewhere_{installed}".lower()
    folder.mkdir()
    if installed:
        (folder / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(folder)

    def digest(text: str) -> str:
        (folder / f"{name}.py").write_text(f"def transform(x):\n    return {text}\n")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return fingerprint(importlib.import_module(name).transform)

    assert (digest("x") == digest("x + 10")) is installed


@pytest.mark.slow
def test_every_process_finds_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(PROGRAM)
        + "from headrace.data import DecodeImage\nfrom headrace.data.cache.fingerprint import fingerprint\n"
        + "for _ in range(2000): outer(1)\n"
        + f"print(fingerprint({', '.join(VALUES)}, {{'a', 'b', 'c'}}, DecodeImage(2, 3)))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=60, check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(said) == 1


def test_running_a_function_does_not_change_it() -> None:
    outer: Callable[[int], Any] = made(PROGRAM, "outer")
    before = fingerprint(outer)
    for _ in range(2000):
        outer(3)
    assert fingerprint(outer) == before


def test_what_goes_round_in_a_circle_has_an_end() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert fingerprint(ring) == fingerprint(ring)
    both = made("def even(x): return x == 0 or odd(x - 1)\ndef odd(x): return x != 0 and even(x - 1)", "(even, odd)")
    assert fingerprint(both[0]) != fingerprint(both[1])


def test_what_cannot_be_looked_into_needs_a_key() -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"whether a _thread.lock is still the same .* give .cache\(folder, key="):
        fingerprint(lambda example: (example, lock))
