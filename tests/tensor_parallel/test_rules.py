"""Which layers are split how, and where values can stay split: on drawings of models."""

from __future__ import annotations

from headrace.tensor_parallel.rules import Splittable, ValueStep, choose, follow

LINEAR = Splittable("linear", 8, 8)
CONVOLUTION = Splittable("convolution", 8, 8)


def chain(*words: str) -> list[ValueStep]:
    """Returns steps one after the other; words that no step is called by are layers."""
    known = {"relu": "elementwise", "drop": "dropout", "pool": "pool", "flatten": "flatten", "norm": "other"}
    steps = [ValueStep("other")]
    for index, word in enumerate(words):
        does = "part" if word.startswith("part") else known.get(word, "layer")
        steps.append(ValueStep(does, "" if word in known and word != "drop" else word, (index,)))
    return [*steps, ValueStep("other", inputs=(len(words),))]


def test_a_column_and_a_row_are_a_pair_with_nothing_between_but_single_features() -> None:
    steps = chain("a", "relu", "drop", "b", "c")
    kinds = choose(steps, dict.fromkeys("abc", LINEAR), 2)
    assert kinds == {"a": "column", "b": "row"}
    flow = follow(steps, dict.fromkeys("abc", LINEAR), kinds)
    assert flow.gathers == set()
    assert flow.takes == {"a": "", "b": "features"}
    assert flow.drops == {"drop": "features"}


def test_what_looks_at_all_features_keeps_layers_apart() -> None:
    steps = chain("a", "norm", "b", "relu", "c")
    assert choose(steps, dict.fromkeys("abc", LINEAR), 2) == {"b": "column", "c": "row"}
    flow = follow(steps, dict.fromkeys("abc", LINEAR), {"a": "column", "b": "row"})
    assert flow.gathers == {"a"}
    assert flow.takes == {"a": "", "b": ""}


def test_two_that_mix_and_one_that_takes_both_belong_together() -> None:
    gated = [
        *(ValueStep("other"), ValueStep("layer", "a", (0,)), ValueStep("layer", "b", (0,))),
        *(ValueStep("elementwise", inputs=(1, 2)), ValueStep("layer", "c", (3,)), ValueStep("other", inputs=(4,))),
    ]
    layers = dict.fromkeys("abc", LINEAR)
    assert choose(gated, layers, 2) == {"a": "column", "b": "column", "c": "row"}
    assert follow(gated, layers, choose(gated, layers, 2)).sources == {"a": 0, "b": 0, "c": 3}
    # Slices of one and the whole of the other do not fit each other.
    flow = follow(gated, layers, {"a": "column", "c": "row"})
    assert flow.gathers == {"a"}
    assert flow.takes["c"] == ""


def test_a_residual_connection_takes_the_whole() -> None:
    steps = [
        ValueStep("other"),
        ValueStep("layer", "a", (0,)),
        ValueStep("elementwise", inputs=(0, 1)),
        ValueStep("layer", "b", (2,)),
    ]
    layers = dict.fromkeys("ab", LINEAR)
    assert follow(steps, layers, {"a": "column", "b": "row"}).gathers == {"a"}
    # No pair, so each is split by itself.
    assert choose(steps, layers, 2) == {"a": "column", "b": "column"}


def test_channels_are_features_behind_a_flatten() -> None:
    steps = chain("a", "relu", "pool", "flatten", "drop", "b")
    layers = {"a": CONVOLUTION, "b": LINEAR}
    assert choose(steps, layers, 4) == {"a": "channels", "b": "row"}
    assert follow(steps, layers, choose(steps, layers, 4)).drops == {"drop": "features"}
    # A flatten of features would mix dims that no rule knows.
    steps = chain("a", "flatten", "b")
    assert follow(steps, dict.fromkeys("ab", LINEAR), {"a": "column", "b": "row"}).gathers == {"a"}


def test_towers_take_and_leave_slices() -> None:
    layers = {"a": CONVOLUTION, "b": Splittable("grouped", 0, 2), "c": CONVOLUTION}
    flow = follow(chain("a", "relu", "b", "pool", "c"), layers, dict.fromkeys("abc", "channels"))
    assert flow.takes == {"a": "", "b": "channels", "c": "channels"}
    assert flow.gathers == {"c"}


def test_parts_of_a_batch_go_into_columns_and_nowhere_else() -> None:
    layers = {"a": LINEAR, "b": LINEAR}
    flow = follow(chain("part", "flatten", "drop", "a", "relu", "b"), layers, {"a": "column", "b": "row"})
    assert flow.gathers == set()
    assert flow.takes == {"a": "batch", "b": "features"}
    assert flow.drops == {"drop": "batch"}
    assert follow(chain("part", "a"), layers, {"a": "row"}).gathers == {"part"}


def test_only_what_divides_is_chosen() -> None:
    layers = {"a": Splittable("linear", 8, 6), "b": Splittable("linear", 6, 9)}
    assert choose(chain("a", "relu", "b"), layers, 4) == {"a": "row"}
    assert choose(chain("a", "relu", "b"), layers, 3) == {"a": "column", "b": "row"}
    assert choose(chain("a", "relu", "b"), layers, 5) == {}
    heads = {"a": Splittable("attention", 0, 4), "b": Splittable("attention", 0, 3)}
    assert choose([], heads, 2) == {"a": "heads"}


def test_a_layer_that_is_used_twice_must_take_the_same_both_times() -> None:
    steps = chain("a", "relu", "b", "norm", "b")
    flow = follow(steps, dict.fromkeys("ab", LINEAR), {"a": "column", "b": "row"})
    assert flow.gathers == {"a"}
    assert flow.takes["b"] == ""


def test_layers_without_a_rule_take_and_leave_whole_values() -> None:
    flow = follow([], {"a": LINEAR}, {"a": "column"})
    assert (flow.gathers, flow.takes) == ({"a"}, {"a": ""})
