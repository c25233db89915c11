"""Tables of what is imported when it is asked for, and what other installed packages add to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import headrace as hr
from headrace import registry
from headrace.cli import app
from headrace.engine import shipping
from headrace.errors import UnknownName, UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.strategies import resolve
from headrace.strategies.table import SHORT_NAMES, STRATEGIES
from headrace.transport.codec import CODECS

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
class Unfinished(Strategy):
    equals_one_device = True
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
        ("first_package:number", "alone is 3, and must be a subclass of headrace.strategies.strategy.Strategy"),
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


MINE = """
from beside import RATE
from headrace.pipeline.schedules.gpipe import GPipe
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule
from headrace.strategies.mirrored import Mirrored
from headrace.transport.codec import Codec

class Downwards(PipelineSchedule):
    def actions(self, rank):
        for kind in (PassKind.FORWARD, PassKind.BACKWARD):
            yield from (Action(rank, index, kind) for index in range(self.micro_batches))

class Halved(Codec):
    feedback = True

    def nbytes(self, elements, dtype):
        return 2 * elements

    def encode(self, tensor, out, residual=None):
        import torch
        wanted = tensor.flatten() if residual is None else tensor.flatten() + residual.flatten()
        out.view(torch.float16)[:] = wanted.to(torch.float16)
        if residual is not None:
            residual.copy_((wanted - out.view(torch.float16)).view(residual.shape))

    def decode(self, data, out):
        import torch
        out.copy_(data.view(torch.float16).view(out.shape))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a user's, with one beside it that it imports; it is forgotten after the test."""
    (tmp_path / "beside.py").write_text("RATE = 3\n")
    (tmp_path / "mine.py").write_text(MINE + CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for table in (registry.PLACED, registry.FILES):
        monkeypatch.setattr(registry, "PLACED" if table is registry.PLACED else "FILES", {})
    for module in (shipping,):
        monkeypatch.setattr(module, "PLACED", registry.PLACED)
        monkeypatch.setattr(module, "FILES", registry.FILES)
    return tmp_path / "mine.py"


def test_what_is_in_a_file_or_a_module_is_found_by_its_place(mine: Path) -> None:
    assert resolve("mine.py:Alone(threads=2)") == resolve(f"{mine}:Alone(2)")
    assert resolve("headrace.strategies.mirrored:Mirrored(workers=2)") == hr.Mirrored(2)
    assert "mine.py:Downwards" in SCHEDULES
    assert SCHEDULES["mine.py:Downwards"](2, 2).orders()[0][0].stage == 0
    assert CODECS["mine.py:Halved"].nbytes(3, torch.float32) == 6


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "your.py:Alone",
            r"your\.py:Alone cannot be loaded: there is no 'your\.py' here; write it as file",
        ),
        ("mine.py:Lone", r"no name 'Lone' in mine\.py, which defines Alone, Downwards, Halved, Unfinished"),
        ("mine.py:", "no name '' in mine.py, which defines"),
        (":Alone", ":Alone cannot be loaded: there is no '' here; write it as"),
        ("no_such_module:Alone", "cannot be loaded: there is no 'no_such_module' here; write it as"),
        ("mine.txt:Alone", "cannot be loaded: there is no 'mine.txt' here; write it as"),
        ("syntax.py:Alone", r"cannot be loaded: SyntaxError: .* \(syntax\.py, line 1\); mend syntax\.py"),
        ("exits.py:Alone", "cannot be loaded: SystemExit: 3; mend exits.py"),
        ("raises.py:Alone", "cannot be loaded: RuntimeError: no device; mend raises.py"),
        ("imports.py:Alone", "cannot be loaded: ModuleNotFoundError: No module named 'not_there'; mend imports.py"),
        ("mine.py:Halved", "mine.py:Halved is <class .*Halved'>, and must be a subclass of .*Strategy"),
        ("mine.py:number", "mine.py:number is 3, and must be a subclass of"),
        (
            "mine.py:Unfinished",
            "Unfinished lacks name, plan, replica, which each Strategy has; write it in",
        ),
    ],
)
def test_a_place_with_nothing_of_the_kind_is_an_error_that_says_so(mine: Path, place: str, said: str) -> None:
    for name, line in (("syntax", "class :"), ("exits", "exit(3)"), ("raises", "raise RuntimeError('no device')")):
        mine.with_name(f"{name}.py").write_text(f"{line}\n")
    mine.with_name("imports.py").write_text("import not_there\n")
    with pytest.raises(UsageError, match=said):
        resolve(place)
    assert not [name for name in sys.modules if name.endswith(("_syntax", "_exits", "_raises", "_imports"))]


def test_a_codec_of_a_file_is_made_without_values_or_refused(mine: Path) -> None:
    code = "from headrace.transport.codec import Plain\nclass Scaled(Plain):\n    def __init__(self, scale): ...\n"
    mine.with_name("scaled.py").write_text(code)
    with pytest.raises(
        UsageError, match=r"scaled\.py:Scaled cannot be made without values: .*'scale'; give them defaults"
    ):
        CODECS["scaled.py:Scaled"]


def test_workers_get_what_a_file_has_and_need_not_find_it(mine: Path) -> None:
    strategy = hr.Pipeline(2, 4, "mine.py:Downwards")
    sent = shipping.pack(strategy)
    mine.unlink()
    registry.PLACED.clear()
    assert shipping.unpack(*sent) == strategy
    assert SCHEDULES["mine.py:Downwards"](2, 2).micro_batches == 2


@pytest.mark.slow
def test_the_command_line_trains_with_what_a_file_has(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import functools, torch, headrace as hr\n"
        "data = torch.randn(64, 4), torch.arange(64) % 3\n"
        "layers = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))\n"
        "sgd = functools.partial(torch.optim.SGD, lr=0.1)\n"
        "loss = torch.nn.functional.cross_entropy\n"
        "job = hr.Job(model=layers, data=data, loss=loss, optimizer=sgd, global_batch_size=16, epochs=1)\n"
    )
    for number, strategy in enumerate(
        (
            "mine.py:Alone",
            "pipeline(2, 4, schedule='mine.py:Downwards')",
            "parameter_server(push_codec='mine.py:Halved')",
        )
    ):
        ran = CliRunner().invoke(
            app, ["train", "job.py", "--strategy", strategy, "--run-dir", f"runs/{number}", "--device", "cpu"]
        )
        assert ran.exit_code == 0, ran.output
