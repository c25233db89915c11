"""Parts of parameters, gradients and optimizer state in host memory: as one device, with less on the device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.errors import UsageError
from simulated.cluster import COMPILES, on_hosts

PROGRAM = "import headrace as hr\nfrom simulated import nccl\nfrom fully_sharded import offload_runs\n"
SHARDED, OFFLOADED = "hr.FullySharded(2)", "hr.FullySharded(2, offload=True)"

simulates = pytest.mark.skipif(not COMPILES, reason="no C++ compiler here, for the devices")


def steps(folder: Path, name: str) -> dict[str, int]:
    """The last step of rank 0, what it counted."""
    found: dict[str, int] = json.loads((folder / f"{name}.0").read_text().splitlines()[-1])
    return found


@simulates
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        f"{{'sharded': {OFFLOADED}}}",
        f"{{'mirrored': hr.Hybrid(hr.Mirrored(2), {OFFLOADED})}}",
        f"{{'slices': hr.Hybrid({OFFLOADED}, hr.TensorParallel(2))}}",
        "{'deferred': hr.FullySharded(4, deferred=True, offload=True)}",
    ],
    ids=["sharded", "sharded replicas", "slices", "deferred"],
)
def test_it_is_one_device_with_clipping_accumulation_averages_and_weights(strategies: str, tmp_path: Path) -> None:
    ended = on_hosts(f"{PROGRAM}offload_runs.options({strategies})", tmp_path, 1, 4)
    assert ended.codes == [0], ended.errors
    assert len(ended.said[0]) == 5
    assert all(each["apart"] <= 1e-9 for each in ended.said[0]), ended.said
    assert not any(counters["faults"] for counters in ended.counters.values())


@simulates
@pytest.mark.slow
def test_between_hosts_it_is_one_device(tmp_path: Path) -> None:
    said = f"{PROGRAM}offload_runs.apart('hosts', offload_runs.job_of(clip_norm=0.05), {OFFLOADED})"
    ended = on_hosts(said.replace("Sharded(2", "Sharded(4"), tmp_path, 2, 2)
    assert ended.codes == [0] * 4, ended.errors
    assert [each["apart"] <= 1e-9 for own in ended.said for each in own].count(True) >= 1


@simulates
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [(OFFLOADED, SHARDED), ("hr.Mirrored(2)", OFFLOADED)], ids=["from it", "to it"]
)
def test_a_run_goes_on_with_and_without_it(first: str, second: str, tmp_path: Path) -> None:
    ended = on_hosts(f"{PROGRAM}offload_runs.resumed({first}, {second})", tmp_path, 1, 2)
    assert ended.codes == [0], ended.errors
    assert ended.said[0][0]["apart"] <= 1e-9


@simulates
@pytest.mark.slow
def test_a_device_holds_the_units_that_it_computes_with(tmp_path: Path) -> None:
    runs = "".join(
        f"offload_runs.apart({name!r}, offload_runs.deep(), {strategy})\n"
        for name, strategy in (("device", SHARDED), ("host", OFFLOADED))
    )
    ended = on_hosts(PROGRAM + runs, tmp_path, 1, 2)
    assert ended.codes == [0], ended.errors
    there, here = steps(tmp_path, "device"), steps(tmp_path, "host")
    unit = 8 * 256 * 257
    part = 8 * unit // 2
    # Parameters, and both averages of AdamW; in a step the gradients, too.
    assert there["held"] >= 3 * part
    # What summed the gradients of the last unit.
    assert here["held"] <= 2 * unit
    assert here["peak"] <= there["peak"] - 3.5 * part
    # Copies of parts and gradients go to and from pinned memory.
    assert here["pageable_writes"] == there["pageable_writes"] == 0
    assert here["pinned_reads"] > there["pinned_reads"]


@simulates
@pytest.mark.slow
def test_activations_wait_in_host_memory(tmp_path: Path) -> None:
    program = f"offload_runs.activations(hr.Mirrored(2)); offload_runs.activations({OFFLOADED}, recompute='full')"
    ended = on_hosts(PROGRAM + program, tmp_path, 1, 2)
    assert ended.codes == [0], ended.errors
    assert [each["apart"] <= 1e-9 for each in ended.said[0]] == [True] * 4, ended.said
    assert not any(counters["faults"] for counters in ended.counters.values())
    kept, offloaded = steps(tmp_path, "kept None"), steps(tmp_path, "offloaded None")
    # Of 6 blocks two results of 512 x 256 numbers are kept each; of those that are on the host few at a time are there.
    result = 8 * 512 * 256
    assert kept["peak"] - offloaded["peak"] >= 6 * result
    assert offloaded["pinned_reads"] - kept["pinned_reads"] >= 8


def test_it_is_refused_where_it_would_do_nothing() -> None:
    data = torch.zeros(8, 4), torch.zeros(8, 2)
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = hr.Job(
        model=nn.Linear(4, 2), loss=nn.functional.mse_loss, optimizer=sgd, data=data, global_batch_size=4, epochs=1
    )
    for strategy in (
        hr.FullySharded(2, offload=True),
        hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2, offload=True)),
    ):
        with pytest.raises(UsageError, match=r"offload=True .* on CPUs have them anyway; leave it out"):
            hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine())
    offloaded = replace(job, options=hr.Options(recompute="offload"))
    with pytest.raises(UsageError, match=r"recompute='offload': .* leave it out, give device='cuda'"):
        hr.fit(offloaded, "mirrored", device="cpu", engine=hr.ThreadEngine())
    with pytest.raises(UsageError, match=r"recompute='offload' with compile=True: .* one of the two"):
        hr.Options(recompute="offload", compile=True)
    with pytest.raises(UsageError, match=r"give Pipeline\(recompute='always'\)"):
        hr.fit(offloaded, hr.Pipeline(2), device="cpu", engine=hr.ThreadEngine())


def test_what_is_run_again_and_what_is_moved_are_told_apart() -> None:
    found = [
        (options.again, options.offloads)
        for options in (hr.Options(recompute=choice) for choice in (None, "full", "offload", ["full", "offload"]))
    ]
    assert found == [(None, False), ("full", False), (None, True), ("full", True)]
    assert hr.Options(recompute=["a.*", "offload", "b.*"]).again == ["a.*", "b.*"]


def test_what_an_offload_may_be() -> None:
    with pytest.raises(UsageError, match="offload must be True or False, got 'cpu'"):
        hr.FullySharded(2, offload="cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"offload=True keeps parts .* a pipeline has stages; leave it out"):
        hr.Hybrid(hr.FullySharded(2, offload=True), hr.Pipeline(2))
