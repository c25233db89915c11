"""On simulated devices a step waits for nothing, and its numbers, rounds left out and losses are those of CPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simulated.cluster import on_hosts

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here, which the simulated accelerator needs"),
]
BAD = (0, 3, 4)
FIRST = 4
"""Rounds in which a loop's guards look at losses, and an optimizer makes its state, after the bad first round."""


@pytest.mark.parametrize(
    ("call", "devices"),
    [
        (f"steps(hr.OneDevice(), bad={BAD})", 1),
        (f"steps(hr.Mirrored(2), bad={BAD})", 2),
        (f"steps(hr.FullySharded(2), ('clip', 'skip, clip'), bad={BAD})", 2),
        (f"steps(hr.Pipeline(2), ('default', 'both', 'skip, clip'), bad={BAD})", 2),
        (f"steps(hr.TensorParallel(2), ('default', 'both', 'skip, clip'), bad={BAD})", 2),
        ("optimizers(hr.OneDevice())", 1),
        ("means(hr.Mirrored(2))", 2),
        ("means(hr.FullySharded(2))", 2),
        ("means(hr.Pipeline(2), ('default', 'clip'))", 2),
        ("means(hr.TensorParallel(2))", 2),
        (f"hybrids({BAD})", 4),
    ],
)
def test_a_step_waits_for_nothing(call: str, devices: int, tmp_path: Path) -> None:
    program = f"from simulated import nccl\nimport headrace as hr\nfrom worker import waits_runs\nwaits_runs.{call}"
    ended = on_hosts(program, tmp_path, 1, devices, timeout_s=560)
    assert not any(ended.codes), ended.errors
    assert not any(counters["faults"] for counters in ended.counters.values())
    assert ended.said[0]
    for run in ended.said[0]:
        assert run["apart"] <= 1e-9, run["name"]
        assert run["left_out"] == run["expected"]
        assert len(run["losses"]) == len(run["like"])
        for one, other in zip(run["losses"], run["like"], strict=True):
            assert one == pytest.approx(other, abs=1e-9)
        for own in run["waits"]:
            assert own[FIRST:] == [0] * (8 - FIRST), run["name"]


HEAD = "from simulated import nccl\nimport headrace as hr\nfrom worker import waits_runs\nwaits_runs."
BESIDE = {"default": 1, "clip": 2, "both": 3, "skip": 2, "skip, clip": 2, "accumulated": 1, "skip, both": 3}
"""Waits of a thread beside the training thread, between hosts that encrypt: one a tensor that is summed."""


def test_between_hosts_that_encrypt_a_thread_waits_for_each_copy(tmp_path: Path) -> None:
    ended = on_hosts(f"{HEAD}steps(hr.Mirrored(2), bad={BAD})", tmp_path, 2, 1, timeout_s=560)
    assert not any(ended.codes), ended.errors
    assert not any(counters["faults"] for counters in ended.counters.values())
    assert {run["name"]: [own[FIRST:] for own in run["waits"]] for run in ended.said[0]} == {
        name: [[count] * (8 - FIRST)] * 2 for name, count in BESIDE.items()
    }
    for run in ended.said[0]:
        assert run["apart"] <= 1e-9, run["name"]
        assert (run["reads"], run["left_out"]) == (run["waits"], run["expected"])


def test_buckets_leave_hosts_that_encrypt_during_backward(tmp_path: Path) -> None:
    ended = on_hosts(f"{HEAD}overlapping(hr.Mirrored(2), accumulate=2)", tmp_path, 2, 1)
    assert not any(ended.codes), ended.errors
    (said,) = ended.said[0]
    assert said["apart"] <= 1e-9
    # Of two micro-batches, each from the last layer to the first.
    assert said["found"] == [[[0, 0, 0, 0, 0, 0, 1, 1]] * 8] * 2


def test_what_is_pushed_to_servers_comes_to_the_host_by_one_copy(tmp_path: Path) -> None:
    names = ("default", "clip", "both")
    ended = on_hosts(f"{HEAD}steps(hr.ParameterServer(2, staleness_bound=0), {names})", tmp_path, 1, 2, timeout_s=560)
    assert not any(ended.codes), ended.errors
    assert [run["name"] for run in ended.said[0]] == [*names]
    for run in ended.said[0]:
        assert run["apart"] <= 1e-9, run["name"]
        # In the last step the worker meets the others, and all losses are read. What is pulled is waited for by none.
        assert [own[FIRST:-1] for own in run["reads"]] == [[1] * (7 - FIRST)] * 2
        assert [own[FIRST:-1] for own in run["waits"]] == [[1] * (7 - FIRST)] * 2


def test_codecs_send_the_bits_of_cpus(tmp_path: Path) -> None:
    program = f"{HEAD}coded(hr.Mirrored(2, codec='int8'))\nwaits_runs.coded(hr.Mirrored(2, codec='bf16'))"
    ended = on_hosts(program, tmp_path, 2, 1)
    assert not any(ended.codes), ended.errors
    assert [said["apart"] for said in ended.said[0]] == [0.0, 0.0]


@pytest.mark.parametrize(("strategy", "devices"), [("OneDevice()", 1), ("Mirrored(2)", 2)])
def test_an_evaluation_waits_once_and_once_for_copies_compared(strategy: str, devices: int, tmp_path: Path) -> None:
    program = "from simulated import nccl\nimport headrace as hr\nfrom worker import waits_runs\n"
    ended = on_hosts(f"{program}waits_runs.evaluations(hr.{strategy})", tmp_path, 1, devices, timeout_s=560)
    assert not any(ended.codes), ended.errors
    assert not any(counters["faults"] for counters in ended.counters.values())
    for run in ended.said[0]:
        assert run["apart"] <= 1e-9
        assert run["names"] == ["accuracy", "best two", "loss"]
        for counts in run["counts"]:
            assert counts == {**dict.fromkeys(counts, 0), "waits": devices, "reads": devices}
