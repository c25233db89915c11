"""What is packed arrives, and no process sees what another writes into it."""

from __future__ import annotations

import builtins
import copyreg
import functools
import linecache
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headrace as hr
from engine.victims import EXAMPLES, TARGETS, make_job
from headrace.engine.local.engine import LocalEngine
from headrace.engine.shipping import pack, unpack
from headrace.errors import JobError, WorkerFailed
from headrace.serving.page import page_text

LARGE = 20_000
"""Elements that travel in memory, of every type with at least 4 bytes."""


def shipped(value: Any) -> Any:
    return unpack(*pack(value))


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8,
          torch.uint8, torch.bool]  # fmt: skip


@pytest.mark.slow
@given(st.sampled_from(DTYPES), st.sampled_from([0, 1, 300, 70_000]), st.sampled_from(["plain", "step", "turned"]))
def test_tensors_arrive(dtype: torch.dtype, count: int, view: str) -> None:
    tensor = torch.randint(0, 2, (count, 2), generator=torch.Generator().manual_seed(count)).to(dtype)
    sent = {"plain": tensor, "step": tensor[::2], "turned": tensor.t()}[view]
    got = shipped({"a": [sent]})["a"][0]
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert torch.equal(got, sent)


@pytest.mark.slow
@given(
    st.sampled_from(["<f8", ">f8", "f4", "f2", "i8", "u2", "i1", "?", "c8", "U3", "longdouble"]),
    st.sampled_from([0, 3, 70_000]),
    st.sampled_from(["plain", "backwards", "fortran", "read-only"]),
)
def test_arrays_arrive(dtype: str, count: int, view: str) -> None:
    array = (np.arange(2 * count) % 100).reshape(count, 2).astype(dtype)
    if view == "read-only":
        array.flags.writeable = False
    sent = {"backwards": array[::-1], "fortran": np.asfortranarray(array)}.get(view, array)
    got = shipped((sent,))[0]
    assert (got.dtype.newbyteorder("="), got.shape) == (sent.dtype.newbyteorder("="), sent.shape)
    assert np.array_equal(got, sent)


def test_memoized_functions_of_a_job_file_arrive() -> None:
    @functools.cache
    def steps(number: int) -> int:
        return number if number < 2 else steps(number - 1) + steps(number - 2)

    @functools.lru_cache(maxsize=8, typed=True)
    def half(number: float) -> float:
        return number / 2

    here, there = shipped((steps, half))
    assert (here(30), there(3), here.__name__) == (832_040, 1.5, "steps")
    assert here.cache_info().hits > 0
    assert there.cache_parameters() == {"maxsize": 8, "typed": True}
    # One that a worker can import goes by its name, and keeps what it has.
    assert shipped(page_text) is page_text


def test_examples_that_are_views_of_one_tensor_do_not_take_all_of_it_with_them() -> None:
    images, labels = torch.rand(400, 100), torch.arange(400)
    code, memory, _ = pack(list(zip(images, labels, strict=True)))
    assert memory == -1
    assert len(code) < 2_000_000, "400 examples of 408 bytes; all of them with each would be 65 MB"
    got = shipped({"some": list(zip(images, labels, strict=True))[:3], "conjugate": torch.ones(4).cfloat()[1:].conj()})
    assert [label.item() for _, label in got["some"]] == [0, 1, 2]
    assert all(torch.equal(image, sent) for (image, _), sent in zip(got["some"], images[:3], strict=True))
    assert torch.equal(got["conjugate"], torch.ones(3).cfloat())


def test_large_ones_stay_out_of_the_pickle() -> None:
    tensor = torch.zeros(LARGE)
    code, memory, length = pack({"once": tensor, "again": tensor, "array": np.zeros(LARGE)})
    os.close(memory)
    assert len(code) < 2000
    assert LARGE * (4 + 8) <= length < LARGE * (4 + 8) + 200


def test_small_ones_need_no_memory() -> None:
    assert pack({"lr": torch.tensor(0.1)})[1:] == (-1, 0)


def test_a_model_keeps_its_ties_and_its_kinds() -> None:
    first, second = nn.Linear(200, 200), nn.Linear(200, 200)
    second.weight = first.weight
    first.weight.requires_grad_(False)
    model = nn.Sequential(first, second, nn.BatchNorm1d(20_000))
    got = shipped(model)
    assert got[0].weight is got[1].weight
    assert isinstance(got[0].weight, nn.Parameter)
    assert [each.requires_grad for each in got.parameters()] == [each.requires_grad for each in model.parameters()]
    torch.testing.assert_close(got.state_dict(), model.state_dict())


class Maker:
    """Makes the arrays that it is pickled as on the spot, so that they may lie where others lay."""

    def __init__(self, number: int) -> None:
        self.array = np.full(2 * LARGE, number)


copyreg.pickle(Maker, lambda maker: (np.copy, (maker.array[::2],)))  # type: ignore[arg-type, return-value]


def test_arrays_that_live_for_a_moment_are_not_mistaken_for_each_other() -> None:
    got = shipped([Maker(number) for number in range(20)])
    assert [set(array.tolist()) for array in got] == [{number} for number in range(20)]


def test_functions_of_the_main_module_arrive() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("SCALE = 3\ndef scale(x):\n    return SCALE * x\nclass Net:\n    f = staticmethod(scale)", namespace)
    assert shipped(namespace["scale"])(5) == 15
    assert shipped(namespace["Net"]()).f(5) == 15
    assert shipped(lambda x: namespace["scale"](x) + 1)(5) == 16


def test_code_keeps_its_file_and_its_line(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def fail():\n    inner = lambda: 1 / 0\n    inner()", tmp_path / "train.py", "exec"), namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        shipped(namespace["fail"])()
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [(frame.filename, frame.lineno) for frame in frames] == [
        (str(tmp_path / "train.py"), line) for line in (3, 2)
    ]


@pytest.mark.slow
def test_the_traceback_of_a_notebooks_cell_shows_its_lines(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, own = "<cell 7>", os.getpid()
    code = (
        "def loss(output, target):\n"
        f"    if os.getpid() != {own}:\n"
        "        raise ValueError('broken')\n"
        "    return mse(output, target)\n"
    )
    monkeypatch.setitem(linecache.cache, cell, (len(code), None, code.splitlines(keepends=True), cell))
    namespace: dict[str, Any] = {"__name__": "__main__", "os": os, "mse": nn.functional.mse_loss}
    exec(compile(code, cell, "exec"), namespace)
    with pytest.raises(WorkerFailed) as caught:
        hr.fit(make_job(task=None, loss=namespace["loss"]), hr.Mirrored(2), engine=engine)
    assert f"File \"{cell}\", line 3, in loss\n    raise ValueError('broken')\n" in caught.value.traceback


def test_what_a_library_keeps_among_the_builtins_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(builtins), "__kept_by_a_library__", threading.Lock())
    namespace: dict[str, Any] = {}
    exec("def size(x):\n    return len(x)", namespace)
    assert shipped(lambda x: namespace["size"](x))("abc") == 3


def test_a_function_may_name_what_only_looks_like_a_module() -> None:
    namespace: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec("def enabled():\n    return torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled", namespace)
    assert shipped(namespace["enabled"])() == (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled)


def test_two_processes_do_not_see_what_the_other_writes() -> None:
    packed, descriptor, length = pack(torch.zeros(40_000))
    one, two = (unpack(packed, each, length) for each in (os.dup(descriptor), descriptor))
    one += 1
    assert (float(one.sum()), float(two.sum())) == (40_000.0, 0.0)


class Unwilling:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


@pytest.mark.parametrize(
    ("make", "message"),
    [(threading.Lock, "cannot pickle '_thread.lock'"), (Unwilling, "RuntimeError: not me"),
     (lambda: open(os.devnull, "w"), "Cannot pickle files")],  # noqa: SIM115
    ids=["lock", "unwilling", "file"],
)  # fmt: skip
def test_what_cannot_be_sent(make: Callable[[], Any], message: str) -> None:
    thing = make()
    with pytest.raises(JobError, match="the job cannot be sent to a worker") as caught:
        pack(lambda: thing)
    assert message in str(caught.value)
    assert "inside the function that needs them" in str(caught.value)
    getattr(thing, "close", lambda: None)()


def writes_into_its_data(worker: hr.Worker) -> None:
    """Fails if anything but this worker's own writes can be seen."""
    data: Tensor = worker._session.run.job.data[0]
    for number, batch in enumerate(worker.batches()):
        assert float(data.sum()) == 100 * number
        data.view(-1)[number * 2 + worker.rank] += 100
        worker.step((batch[0][:, :4] * 0, batch[1]))


class Narrow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs[:, :4])


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_what_a_worker_writes_into_its_data_is_its_own(engine: LocalEngine, make: Callable[..., Any]) -> None:
    data = make((EXAMPLES, 400))
    job = make_job(data=(torch.as_tensor(data).float(), TARGETS), model=Narrow)
    assert hr.launch(writes_into_its_data, job, hr.Mirrored(2), engine=engine).status == "ok"
    assert float(data.sum()) == 0


@pytest.mark.slow
def test_a_job_that_cannot_be_unpacked(engine: LocalEngine, tmp_path: Path) -> None:
    class Sour:
        def __reduce__(self) -> Any:
            return (exec, ("raise KeyError('sour')",))

    sour = Sour()
    job = make_job(model=lambda: (sour, nn.Linear(4, 1))[1])
    with pytest.raises(WorkerFailed, match=r"cannot be unpacked here: KeyError: 'sour'") as caught:
        hr.fit(job, hr.Mirrored(2), engine=engine, run_dir=tmp_path)
    assert caught.value.worker_exit_code == JobError.exit_code
    # A resumed attempt begins later on the run's clock, and counts what happens from then on.
    hr.fit(make_job(), hr.Mirrored(2), engine=engine, run_dir=tmp_path / "resumed")
    longer = make_job(model=lambda: (sour, nn.Linear(4, 1))[1], epochs=50)
    with pytest.raises(WorkerFailed, match=r"cannot be unpacked here: KeyError: 'sour'"):
        hr.fit(longer, hr.Mirrored(2), engine=engine, run_dir=tmp_path / "resumed", resume=True)
