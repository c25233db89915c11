"""Strategies by name, with options."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.errors import UnknownName, UsageError
from headrace.strategies import resolve


def test_a_name_alone_takes_the_number_of_workers() -> None:
    assert resolve("mirrored", 3) == hr.Mirrored(3)
    assert resolve("one_device", 3) == hr.OneDevice()


def test_names_of_tensorflow() -> None:
    assert resolve("multi_worker_mirrored(codec='bf16')", 2) == hr.MultiWorkerMirrored(2, codec="bf16")
    assert hr.MultiWorkerMirrored is hr.Mirrored


def test_options_are_the_strategys_own() -> None:
    wanted = hr.ParameterServer(2, servers=2, staleness_bound=0, sharding="max_size:4MB")
    assert resolve("parameter_server(servers=2, staleness_bound=0, sharding='max_size:4MB')", 2) == wanted
    assert resolve("downpour(workers=4)", 2) == hr.Downpour(4)
    assert resolve("pipeline(micro_batches=8)", 2) == hr.Pipeline(2, 8)


def test_what_does_not_exist_is_refused_with_what_does() -> None:
    with pytest.raises(UnknownName, match="did you mean 'push_every'"):
        resolve("downpour(push_evry=2)")
    with pytest.raises(UnknownName, match="did you mean 'downpour'"):
        resolve("downpur(push_every=2)")
    with pytest.raises(UsageError, match="fetch_every must be a whole number of at least 1, got 0"):
        resolve("downpour(fetch_every=0)")
    with pytest.raises(UsageError, match="schedule of pipeline is no strategy: a text takes quotes, schedule='gpipe'"):
        resolve("pipeline(schedule=gpipe)")
    with pytest.raises(UsageError, match="the inner strategy of a hybrid must be"):
        resolve("hybrid(mirrored, pipeline, mirrored)")
    with pytest.raises(UsageError, match="pipeline gets stages twice: 2 and 3"):
        resolve("pipeline(2, stages=3)")


def test_a_hybrid_is_written_with_its_strategies() -> None:
    wanted = hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 4, schedule="1f1b"))
    assert resolve("hybrid(mirrored(2), pipeline(2, 4, schedule='1f1b'))") == wanted
    assert resolve("hybrid(outer='mirrored(2)', inner=\"pipeline(2, 4, '1f1b')\")") == wanted
    assert resolve("hybrid(inner='pipeline(2, 4, \\'1f1b\\')', outer='mirrored(2)')") == wanted
    assert resolve("hybrid(mirrored, tensor_parallel)") == hr.Hybrid(hr.Mirrored(), hr.TensorParallel())
    levels = hr.Mirrored(2), hr.FullySharded(2), hr.Pipeline(2), hr.TensorParallel(2)
    assert resolve("hybrid(mirrored(2), fully_sharded(2), pipeline(2), tensor_parallel(2))") == hr.Hybrid(*levels)
    with pytest.raises(UnknownName, match="did you mean 'mirrored'"):
        resolve("hybrid(mirored(2), pipeline(2))")
    with pytest.raises(UsageError, match="a strategy is a name"):
        resolve("hybrid(2, pipeline(2))")
    with pytest.raises(UsageError, match=r"hybrid needs inner; write it as hybrid\(outer, inner\)"):
        resolve("hybrid(mirrored(2))")


def test_a_strategy_whose_refusals_would_not_be_asked_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Old.check\(options\) would not be called; .* refusals"):
        type("Old", (hr.Strategy,), {"check": lambda self, options: None})
