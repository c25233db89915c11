"""Another number of processes than a strategy asks for is refused before they meet."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.errors import InfeasiblePlan
from headrace.strategies.started import require_started

LEVELS = hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.Pipeline(2), hr.TensorParallel(2))


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        (hr.Hybrid(hr.Mirrored(2), hr.FullySharded(4)), 4, "hybrid(mirrored(2), fully_sharded(4)) is 8 processes"),
        (LEVELS, 8, "hybrid(mirrored(2), fully_sharded(2), pipeline(2), tensor_parallel(2)) is 16 processes"),
        (hr.Hybrid(hr.Mirrored(), hr.Pipeline(3)), 8, "hybrid(mirrored(?), pipeline(3)) is a multiple of 3 processes"),
        (hr.ParameterServer(2, servers=2), 2, "parameter_server(2) is 4 processes, 2 of which are servers"),
        (hr.Hybrid(hr.ParameterServer(2), hr.TensorParallel(2)), 4, "tensor_parallel(2)) is 5 processes, 1 of which"),
        (hr.ExpertParallel(3), 2, "expert_parallel(3) is 3 processes, and the launcher started 2; start 3"),
    ],
)
def test_another_number_is_refused_with_the_product(strategy: hr.Strategy, ranks: int, says: str) -> None:
    with pytest.raises(InfeasiblePlan) as refused:
        require_started(strategy, ranks)
    assert says in str(refused.value)
    assert f"the launcher started {ranks}; start " in str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (LEVELS, 16),
        (hr.Hybrid(hr.Mirrored(), hr.Pipeline(3)), 9),
        (hr.Hybrid(hr.ParameterServer(2), hr.TensorParallel(2)), 5),
        (hr.Hybrid(hr.ParameterServer(servers=2), hr.TensorParallel(2)), 8),
        (hr.ParameterAveraging(2), 2),
        (hr.ParameterServer(2, servers=1, backups=1), 4),
        (hr.Mirrored(), 7),
        (hr.OneDevice(), 2),
    ],
)
def test_what_fits_or_is_not_said_goes_on(strategy: hr.Strategy, ranks: int) -> None:
    require_started(strategy, ranks)
