"""Tables of what is imported when it is asked for, and what other installed packages add to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import UnknownName, UsageError
from headrace.strategies import resolve
from headrace.strategies.table import SHORT_NAMES, STRATEGIES

CODE = """
from dataclasses import dataclass
from headrace.strategies.one_device import OneDevice
from headrace.strategies.strategy import Strategy
@dataclass(frozen=True)
class Alone(Strategy):
    name = "alone"
    equals_one_device = True
    plan, replica = OneDevice.plan, OneDevice.replica
    threads: int | None = None
number = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Returns what installs a package with entry points of strategies, and forgets it after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(STRATEGIES.__dict__, "added", raising=False)

    def add(package: str, **points: str) -> None:
        (tmp_path / f"{package}.py").write_text(CODE)
        folder = tmp_path / f"{package}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[headrace.strategies]", *lines, ""]))
        STRATEGIES.__dict__.pop("added", None)

    yield add
    STRATEGIES.__dict__.pop("added", None)
    for name in ("first_package", "second_package"):
        sys.modules.pop(name, None)


def test_a_strategy_of_another_package_is_found_by_name_and_by_class(install) -> None:  # type: ignore[no-untyped-def]
    install("first_package", alone="first_package:Alone")
    assert resolve("alone(threads=1)").name == "alone"
    assert hr.Alone is STRATEGIES["alone"]  # type: ignore[attr-defined]
    assert "alone" in [*STRATEGIES]
    with pytest.raises(UnknownName, match="alone"):
        resolve("alonne")


def test_a_name_of_headrace_stays_its_own(install) -> None:  # type: ignore[no-untyped-def]
    install("first_package", mirrored="first_package:Alone", diloco="first_package:Alone")
    assert type(resolve("mirrored")) is hr.Mirrored
    assert resolve("diloco").name == "parameter_averaging"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("first_package:Gone", "alone = 'first_package:Gone' of the group 'headrace.strategies' cannot be loaded"),
        ("gone:Alone", "cannot be loaded: ModuleNotFoundError: No module named 'gone'"),
        ("first_package:number", "'alone' of an installed package is 3, which is no hr.Strategy"),
    ],
)
def test_a_wrong_entry_point_is_named(install, value: str, said: str) -> None:  # type: ignore[no-untyped-def]
    install("first_package", alone=value)
    with pytest.raises(UsageError, match=said):
        resolve("alone")


def test_a_name_that_two_packages_add_is_refused_where_it_is_used(install) -> None:  # type: ignore[no-untyped-def]
    install("first_package", alone="first_package:Alone")
    install("second_package", alone="second_package:Alone")
    assert "alone" in STRATEGIES
    with pytest.raises(UsageError, match=r"alone = .* is .* in another installed package; uninstall one of the two"):
        resolve("alone")


def test_names_of_headrace_ask_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(group: str) -> None:
        raise AssertionError(f"asks for {group}")

    monkeypatch.setattr("importlib.metadata.entry_points", ask)
    monkeypatch.delitem(STRATEGIES.__dict__, "added", raising=False)
    for name in (*STRATEGIES.places, *SHORT_NAMES):
        if name != "hybrid":
            assert resolve(name)
    assert hr.DiLoCo
