from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.pipeline.partition import COSTS, Terms, costs, read, split
from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.strategies import Pipeline

NAMES = "abcdefghij"


def layer(
    index: int, seconds: int = 1, own: int = 0, saved: int = 0, crossing: int = 0, joined: bool = False
) -> LayerSpec:
    """Returns a layer that uses parameter `own`, of as many elements."""
    return LayerSpec(NAMES[index], (f"p{own}",), 4 * own, float(seconds), 2.0 * seconds, saved, crossing, joined)


def model_of(*layers: LayerSpec) -> ModelSpec:
    names = {name for layer in layers for name in layer.parameters}
    return ModelSpec(tuple(ParameterSpec(name, (int(name[1:]),)) for name in sorted(names)), layers=layers)


def every(model: ModelSpec, stages: int) -> list[tuple[tuple[str, ...], ...]]:
    """Returns all splits that there are."""
    names = [layer.name for layer in model.layers]
    places = [index + 1 for index, layer in enumerate(model.layers[:-1]) if not layer.joined]
    return [
        tuple(tuple(names[a:b]) for a, b in pairwise([0, *cuts, len(names)]))
        for cuts in combinations(places, stages - 1)
    ]


def worst(model: ModelSpec, partition: tuple[tuple[str, ...], ...], terms: Terms) -> float:
    (whole,) = costs(model, (tuple(layer.name for layer in model.layers),), terms)
    stages = costs(model, partition, terms)
    seconds, taken = np.array([stage.seconds for stage in stages]), np.array([stage.bytes for stage in stages])
    return float(COSTS[terms.cost](seconds, taken, whole).max())


NUMBERS = st.integers(0, 50)
MODELS = st.lists(
    st.tuples(NUMBERS, st.integers(0, 6), NUMBERS, NUMBERS, st.integers(0, 3).map(lambda die: die == 0)),
    min_size=1,
    max_size=len(NAMES),
).map(lambda each: model_of(*(layer(index, *numbers) for index, numbers in enumerate(each))))
TERMS = st.builds(
    Terms,
    cost=st.sampled_from(sorted(COSTS)),
    held=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    limit_bytes=st.none() | st.integers(0, 600),
    again=st.sampled_from([0.0, 0.75, 1.0]),
    bytes_per_s=st.sampled_from([1.0, 10.0]),
    link_bytes_per_s=st.lists(st.sampled_from([0.5, 2.0, math.inf]), max_size=4).map(lambda each: (math.inf, *each)),
)


@given(model=MODELS, stages=st.integers(1, 4), terms=TERMS)
def test_no_split_has_a_cheaper_worst_stage(model: ModelSpec, stages: int, terms: Terms) -> None:
    fitting = [
        partition
        for partition in every(model, stages)
        if terms.limit_bytes is None
        or max(stage.bytes for stage in costs(model, partition, terms)) <= terms.limit_bytes
    ]
    if not fitting:
        with pytest.raises(InfeasiblePlan):
            split(model, stages, terms)
        return
    found = split(model, stages, terms)
    assert found in fitting
    assert worst(model, found, terms) == min(worst(model, partition, terms) for partition in fitting)


def test_the_docstrings_drawing() -> None:
    model = model_of(*(layer(index, units) for index, units in enumerate((2, 4, 1, 7, 3))))
    found = split(model, 3, Terms())
    assert found == (("a", "b", "c"), ("d",), ("e",))
    assert max(stage.seconds for stage in costs(model, found, Terms())) == 3.0 * 7


def test_a_stage_pays_for_what_crosses_its_cuts_both_ways() -> None:
    model = model_of(layer(0, crossing=10), layer(1, crossing=4), layer(2))
    first, second = costs(model, (("a",), ("b", "c")), Terms(bytes_per_s=2.0))
    assert (first.seconds, second.seconds) == (3 + 10, 6 + 10)
    assert (first.received_bytes, second.received_bytes) == (0, 10)
    # Where a cut is dear, the split is less even.
    dear = model_of(layer(0, 3, crossing=1), layer(1, 2, crossing=100), layer(2, 3, crossing=50), layer(3, 2))
    assert split(dear, 2, Terms(bytes_per_s=1e9)) == (("a", "b"), ("c", "d"))
    assert split(dear, 2, Terms(bytes_per_s=10.0)) == (("a",), ("b", "c", "d"))


def test_memory_is_parameters_once_and_what_is_kept_of_the_micro_batches_in_flight() -> None:
    model = model_of(layer(0, own=10, saved=100, crossing=7), layer(1, own=10, saved=50), layer(2, own=5, saved=1))
    one, two = costs(model, (("a",), ("b", "c")), Terms(held=(4, 2)))
    assert (one.parameter_bytes, two.parameter_bytes) == (40, 60)
    assert one.bytes == 3 * 40 + 4 * 100
    assert two.bytes == 3 * 60 + 2 * (7 + 51)
    assert [stage.bytes for stage in costs(replace(model, copies=5), (("a",), ("b", "c")), Terms(held=(4, 2)))] == [
        one.bytes + 2 * 40,
        two.bytes + 2 * 60,
    ]
    (whole,) = costs(model, (("a", "b", "c"),), Terms())
    assert whole.parameter_bytes == 60  # tied: a and b use the same
    _, again = costs(model, (("a",), ("b", "c")), Terms(held=(4, 2), again=0.5))
    assert again.bytes == 3 * 60 + 2 * 7 + 51
    assert again.seconds == pytest.approx(2 * 1.5 + 4, abs=1e-6)


def test_what_is_asked_for_decides() -> None:
    model = model_of(layer(0, 9, saved=1), layer(1, 1, saved=1), layer(2, 1, saved=90), layer(3, 1, saved=1))
    assert split(model, 2, Terms("time")) == (("a",), ("b", "c", "d"))
    assert split(model, 2, Terms("memory")) == (("a", "b"), ("c", "d"))
    assert split(model, 2, Terms("time", limit_bytes=92)) == (("a",), ("b", "c", "d"))
    assert split(model, 2, Terms("time", limit_bytes=91)) == (("a", "b"), ("c", "d"))
    with pytest.raises(UnknownName, match="cost of a stage 'tim'; did you mean 'time'"):
        Terms("tim")


def test_an_error_says_the_numbers() -> None:
    model = model_of(layer(0, own=100), layer(1, own=5, joined=True), layer(2))
    with pytest.raises(
        InfeasiblePlan, match=r"3 layers into 2 stages .* within 1,000 bytes: .* stage 0 \(a\) needs 1,200"
    ):
        split(model, 2, Terms(limit_bytes=1000))
    with pytest.raises(
        InfeasiblePlan, match=r"3 layers, of which 1 cannot be parted .* 3 stages; use stages=2 or fewer"
    ):
        split(model, 3, Terms())


def test_a_partition_is_read_in_counts_and_in_names() -> None:
    blocks = tuple(
        LayerSpec(name, (), 0, 1.0, 1.0, 0, 0, name == "blocks.1.norm")
        for name in ("stem", "blocks.0.conv", "blocks.0.norm", "blocks.1.norm", "blocks.1.relu", "head", "head:2")
    )
    names = [layer.name for layer in blocks]
    assert read(blocks, [3, 2, 2], 3) == (tuple(names[:3]), tuple(names[3:5]), tuple(names[5:]))
    assert read(blocks, [["stem", "blocks.0"], ["blocks.1", "head"]], 2) == (tuple(names[:3]), tuple(names[3:]))
    assert read(blocks, [1, ["blocks", "head"]], 2) == (("stem",), tuple(names[1:]))


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ([3, 3], r"partition has 3 \+ 3 = 6 layers, and the model has 7"),
        ([7, 0], "every stage needs at least one"),
        ([2, 3, 2], "partition has 3 stages, and stages=2"),
        ([["stem", "blocks"], ["hed"]], "no layer 'hed'; did you mean 'head'"),
        (
            [["head", "stem"], ["blocks"]],
            "stage 0 head, stem, and in the order of forward its layers are stem, blocks.0",
        ),
        ([["stem"], ["blocks"]], r"partition has 1 \+ 4 = 5 layers, .*; no stage has head, head:2"),
        ([4, 3], "between blocks.1.norm and blocks.1.relu, where no cut can be"),
    ],
)
def test_a_partition_that_does_not_add_up_is_refused(wish: list[int], said: str) -> None:
    blocks = tuple(
        LayerSpec(name, (), 0, 1.0, 1.0, 0, 0, name == "blocks.1.norm")
        for name in ("stem", "blocks.0.conv", "blocks.0.norm", "blocks.1.norm", "blocks.1.relu", "head", "head:2")
    )
    with pytest.raises(UsageError, match=said):
        read(blocks, wish, 2)


def test_a_cut_between_hosts_is_where_little_crosses_it() -> None:
    # By time alone the cut would be behind b, where 40 bytes cross; behind a and c it is 1.
    model = model_of(*(layer(index, 10, crossing=crossing) for index, crossing in enumerate((1, 40, 1, 0))))
    near = Terms(link_bytes_per_s=(math.inf, math.inf))
    far = Terms(link_bytes_per_s=(math.inf, 0.5))
    assert split(model, 2, near) == (("a", "b"), ("c", "d"))
    assert split(model, 2, far) in ((("a",), ("b", "c", "d")), (("a", "b", "c"), ("d",)))
    # Values one way, gradients the other, while the stage computes for 60 s.
    assert [stage.seconds for stage in costs(model, (("a", "b"), ("c", "d")), far)] == [160.0, 160.0]


def test_stages_that_wait_for_a_link_have_as_many_layers() -> None:
    model = model_of(*(layer(index, 1, index + 1, crossing=100) for index in range(8)))
    for stages in (2, 4):
        slow = Terms(link_bytes_per_s=(math.inf, *[0.5] * (stages - 1)))
        assert [len(stage) for stage in split(model, stages, slow)] == [8 // stages] * stages


def test_a_link_that_is_faster_than_the_stages_costs_nothing() -> None:
    model = model_of(*(layer(index, 10, crossing=10) for index in range(4)))
    parts = (("a", "b"), ("c", "d"))
    one, two = (costs(model, parts, Terms(link_bytes_per_s=rates)) for rates in ((), (math.inf, 1.0)))
    assert one == two


def test_measured_links_move_the_cut() -> None:
    hosts = (Host("x", 2, 2**30, ranks=(0,)), Host("y", 2, 2**30, ranks=(1,)))
    model = model_of(*(layer(index, 10, crossing=crossing) for index, crossing in enumerate((1, 40, 1, 0))))
    known = Cluster(hosts, 2, links=(Link("x", "y", 1.0), Link("y", "x", 0.5)))
    assert Pipeline(2, cost="time").plan(model, Cluster(hosts, 2)).partition == (("a", "b"), ("c", "d"))
    assert Pipeline(2, cost="time").plan(model, known).partition in (
        (("a",), ("b", "c", "d")),
        (("a", "b", "c"), ("d",)),
    )
