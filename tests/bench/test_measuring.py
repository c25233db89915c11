"""What is measured on this machine: numbers that are there, and reasons where they are not."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.bench import arithmetic, library, measuring, networks, saving, settings, storage
from headrace.bench.figures import Figure, Gap, MachineFigures, OtherWork
from headrace.bench.measuring import measure
from headrace.bench.saving import OtherWorkGauge
from headrace.bench.settings import QUICK, Setting, repeat
from headrace.errors import UnfitMachine, UnknownName, UsageError
from headrace.machine.resources import ProcessorTimes, own_processor_s

TINY = replace(QUICK, cell_s=0.01, sizes=(8, 16), file_bytes=1_000_000, files=5)
CPU = Setting("CPU", torch.device("cpu"), 1)


class Cut(Exception):
    pass


def cut_after(count: int) -> Callable[[str], None]:
    left = iter(range(count))

    def say(line: str) -> None:
        if next(left, None) is None:
            raise Cut

    return say


def tiny(tmp_path: Path, *only: str) -> MachineFigures:
    return measure(TINY, tmp_path, only)


@pytest.mark.slow
def test_each_part_gives_numbers_or_says_why_not(tmp_path: Path) -> None:
    said: list[str] = []
    found = measure(TINY, tmp_path, ("matrix", "memory", "transfer", "storage"), said.append)
    assert found.parts() == ["matrix", "memory", "transfer", "storage"]
    assert all(each.value > 0 for each in found.figures)
    assert len(said) == len(found.figures)
    assert found.at("matrix", "float32, 16 x 16", "CPU, 1 thread")
    assert found.at("storage", "1.00 MB, in order", storage.CACHE)
    if not torch.cuda.is_available():
        why = {(gap.part, gap.column, gap.why) for gap in found.gaps if gap.part in ("matrix", "memory", "transfer")}
        assert why == {(part, "GPU", "no CUDA device here") for part in ("matrix", "memory", "transfer")}
    assert list(tmp_path.iterdir()) == []


def test_a_copy_reads_and_writes_and_a_sum_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "repeat", lambda *_: [0.5, 0.5])
    monkeypatch.setattr(arithmetic, "_LARGE", 1 << 20)
    monkeypatch.setattr(arithmetic, "gpu_settings", list)
    monkeypatch.setattr(arithmetic, "processor_settings", lambda: [CPU])
    found = {
        each.row: each.value for each in arithmetic.memory(TINY, MachineFigures("here", ())) if isinstance(each, Figure)
    }
    for words in ("64 kB, in a cache", "256 MB"):
        assert found[f"copy, {words}"] == 2 * found[f"sum, {words}"]


def test_a_product_that_takes_too_long_is_left_out(tmp_path: Path) -> None:
    found = measure(replace(TINY, longest_s=0.0), tmp_path, ["matrix"])
    assert {each.row for each in found.figures} == {f"{kind}, 8 x 8" for kind in ("float64", "float32", "bfloat16")}
    assert all(gap.why.startswith("would take") for gap in found.gaps if gap.row)


def test_unknown_parts_and_full_disks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="did you mean 'matrix'"):
        tiny(tmp_path, "matrx")
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1000))
    with pytest.raises(UnfitMachine, match=r"has 1\.00 kB free, and the files to read are 1\.08 MB"):
        tiny(tmp_path, "storage")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnfitMachine, match=r"missing: .*No such file or directory.*; use another --folder"):
        measure(TINY, tmp_path / "missing", ("storage",))


def test_files_that_stay_cached_are_not_taken_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_is_cached", lambda file: True)
    monkeypatch.setattr(storage, "_LETS_GO_S", 0.0)
    found = tiny(tmp_path, "storage")
    assert {each.column for each in found.figures} == {storage.CACHE}
    assert {gap.why for gap in found.gaps} == {"the page cache keeps what was written here"}


def test_a_cache_that_lets_go_after_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, True, False]
    monkeypatch.setattr(storage, "_is_cached", lambda file: answers.pop(0) if answers else False)
    monkeypatch.setattr(storage, "_LETS_GO_S", 60.0)
    assert tiny(tmp_path, "storage").gaps == ()
    assert answers == []


def test_whether_a_file_is_cached_is_asked_of_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    assert storage._is_cached(file)


def test_short_acts_are_repeated_between_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(settings, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def act(seconds: float) -> None:
        now[0] += seconds
        counted.append(seconds)

    counted: list[float] = []
    times = repeat(partial(act, 2**-20), CPU, 2**-6)
    # Two calls measure how many fit in 2 ms.
    assert times == [2**-20] * 8
    assert len(counted) == 2 + 8 * 2097
    # The first call is not counted, and one that takes long is made twice more.
    counted.clear()
    assert repeat(partial(act, 0.5), CPU, 0.001) == [0.5, 0.5]
    assert len(counted) == 3


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(images.mean((2, 3)))
        return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", types.ModuleType("torchvision.models"))
    monkeypatch.setattr(networks, "NETWORKS", dict.fromkeys(["A", "B", "C", "D"], lambda models: Small()))


@pytest.mark.slow
def test_networks_are_measured_both_ways(small: None, tmp_path: Path) -> None:
    found = measure(replace(TINY, networks=2), tmp_path, ["networks"])
    assert [(each.part, each.row) for each in found.figures] == [
        (part, row) for part in ("inference", "training") for row in ("A", "B")
    ]
    assert {gap.row for gap in found.gaps if gap.column == "CPU"} == {"C", "D"}
    assert Gap("training", "", "CPU, compiled", "left out by --quick") in found.gaps


@pytest.mark.slow
def test_a_network_that_is_kept_is_not_built_again(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.json"
    with pytest.raises(Cut):
        measure(replace(TINY, networks=2), tmp_path, ["networks"], cut_after(2), file)
    built: list[str] = []

    def make(name: str) -> Callable[[object], nn.Module]:
        return lambda models: (built.append(name), Small())[1]

    monkeypatch.setattr(networks, "NETWORKS", {name: make(name) for name in "ABCD"})
    whole = measure(replace(TINY, networks=2), tmp_path, ["networks"], save=file)
    assert (built, len(whole.figures)) == (["B"], 4)


@pytest.mark.slow
def test_each_network_is_compiled_afresh(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Compiled:
        def __init__(self, module: nn.Module, full: int) -> None:
            said.append("compiled")
            self._module = module

        def forward(self, examples: int) -> nn.Module:
            return self._module

        def errors(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    monkeypatch.setattr(networks, "CompiledModule", Compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: said.append("reset"))
    found = measure(replace(TINY, networks=2, compiled=True), tmp_path, ["networks"])
    assert [each.row for each in found.figures if each.column == "CPU, compiled"] == ["A", "B", "A", "B"]
    assert said == ["compiled", "reset"] * 4


def test_what_does_not_fit_into_time_or_memory_is_left_out(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = measure(replace(TINY, until_s=-1.0), tmp_path, ["networks"])
    assert late.figures == ()
    assert Gap("inference", "A", "CPU", "left out by --quick, after -1 s") in late.gaps
    monkeypatch.setattr(networks, "spare_memory_bytes", lambda: 1000)
    short = measure(replace(TINY, networks=1), tmp_path, ["networks"])
    assert [each.part for each in short.figures] == ["inference"]
    assert any(gap.why.startswith("needs about") and gap.why.endswith("1.00 kB are free") for gap in short.gaps)


def test_a_torchvision_that_is_not_there_or_does_not_load_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    monkeypatch.setattr(library.torch, "__version__", "2.13.0+cpu")
    why = "needs torchvision: pip install --no-deps 'torchvision==0.28.*' pillow"
    with monkeypatch.context() as absent:
        absent.setattr(library.importlib.util, "find_spec", lambda name: None)
        assert tiny(tmp_path, "networks").gaps[0].why == why

    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(library.importlib, "import_module", broken)
    assert "does not load beside torch 2.13.0+cpu: operator" in tiny(tmp_path, "networks").gaps[0].why


@pytest.mark.slow
def test_the_time_of_children_is_ours(real_python: None) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = own_processor_s()
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert own_processor_s() >= before + 0.25
        child.communicate(b"\n")
    assert own_processor_s() >= before + 0.25


def test_the_kernel_s_figures_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([ProcessorTimes(10.0, 1.0, 100.0, 2), ProcessorTimes(13.0, 1.5, 104.0, 2), None, None])
    own = iter([5.0, 7.0, 7.0, 7.0])
    monkeypatch.setattr(saving, "processor_times", lambda: next(times))
    monkeypatch.setattr(saving, "own_processor_s", lambda: next(own))
    gauge = OtherWorkGauge()
    gauge.measured("matrix")
    assert gauge.work() == (OtherWork("matrix", 4.0, 1.0, 0.5),)
    assert gauge.work()[0].share == 0.375
    # Where the kernel does not say, nothing is added.
    gauge.skipped()
    gauge.measured("matrix")
    assert gauge.work() == (OtherWork("matrix", 4.0, 1.0, 0.5),)


def test_a_measurement_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kept" / "here.json"
    with pytest.raises(Cut):
        measure(TINY, tmp_path, ["matrix"], cut_after(2), file)
    begun = MachineFigures.load(file)
    assert len(begun.figures) == 3
    # Kept before it is said.
    said: list[str] = []
    whole = measure(TINY, tmp_path, ["matrix"], said.append, file)
    assert said[0] == f"{file} has 3 numbers already; the others follow"
    assert len(said) == 1 + len(whole.figures) - 3
    assert whole.figures[:3] == begun.figures
    assert whole == MachineFigures.load(file)
    assert [each.part for each in whole.others] == ["matrix"]
    again = measure(TINY, tmp_path, ["matrix"], said.append, file)
    assert again == whole
    # Another part is added, in the order of the parts.
    both = measure(TINY, tmp_path, ["storage"], said.append, file)
    assert both.parts() == ["matrix", "storage"]
    # What the page cache kept before may be read from the disk now.
    assert set(both.figures) <= set(measure(TINY, tmp_path, ["storage"], said.append, file).figures)
    assert [each.name for each in (tmp_path / "kept").iterdir()] == ["here.json"]


def test_figures_of_two_machines_are_not_put_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "here.json"
    measure(TINY, tmp_path, ["matrix", "storage"], save=file)
    before = file.read_bytes()
    with pytest.raises(UsageError, match=r"was measured with effort 'quick', and here it is 'full'.*--save"):
        measure(replace(TINY, name="full"), tmp_path, ["matrix"], save=file)
    with pytest.raises(UsageError, match="was measured with folder "):
        measure(TINY, tmp_path / "kept", ["storage"], save=file)
    facts = {**settings.machine_facts(), "torch": "3.0"}
    monkeypatch.setattr(measuring, "machine_facts", lambda: facts)
    with pytest.raises(UsageError, match=rf"with torch '{re.escape(torch.__version__)}', and here it is '3\.0'"):
        measure(TINY, tmp_path, ["matrix"], save=file)
    assert file.read_bytes() == before
    file.write_text("{")
    with pytest.raises(UsageError, match="cannot be read as figures of a machine"):
        measure(TINY, tmp_path, ["matrix"], save=file)
    with pytest.raises(UnfitMachine, match=r"cannot be kept in .*; name another file with --save"):
        measure(TINY, tmp_path, ["transfer"], save=tmp_path / "here.json" / "file.json")


def test_all_networks_are_torchvision_s() -> None:
    library.declare_operators()
    pytest.importorskip("torchvision", exc_type=ImportError, reason="torchvision is not installed")
    from torchvision import models

    counts = {name: sum(each.numel() for each in make(models).parameters()) for name, make in networks.NETWORKS.items()}
    assert counts["ResNet-200"] == pytest.approx(64.7e6, rel=0.01)
    assert counts["Inception-V1"] == pytest.approx(6.6e6, rel=0.01)


def test_a_figure_is_of_this_machine(tmp_path: Path) -> None:
    found = tiny(tmp_path, "transfer")
    assert found.facts["torch"] == torch.__version__
    assert all(isinstance(each, Figure) for each in found.figures)
