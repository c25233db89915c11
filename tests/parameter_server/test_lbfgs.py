"""L-BFGS on servers is torch's L-BFGS, also where the process that steers is another one at every evaluation."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from headrace.parameter_server.lbfgs.solver import (
    Command,
    CommandLog,
    SolverOptions,
    Stage,
    VectorServers,
    _Tape,
    steer,
)
from headrace.parameter_server.lbfgs.store import VectorStore
from headrace.parameter_server.lbfgs.vectors import PortionSums
from headrace.parameter_server.server.updater import PushedStep
from headrace.parameter_server.wire import ShardLayout, ShardSpec

PORTIONS = 5
START = torch.linspace(-1, 1, 12, dtype=torch.float64)


class Died(Exception):
    """The process that steers is lost."""


class Servers(VectorServers):
    """Servers in this process, each with some elements of one parameter; `chance` ends who steers, now and then."""

    def __init__(self, start: Tensor, cuts: Sequence[int], chance: random.Random | None = None) -> None:
        self.x = start.clone()
        self.chance = chance
        self.carried = self.deaths = self.most = 0
        self.stores: list[VectorStore] = []
        for first, stop in zip([0, *cuts], [*cuts, len(start)], strict=True):
            # The first server has two shards, where there are several.
            ends = [first, (first + stop) // 2, stop] if cuts and not first else [first, stop]
            pieces = [ShardSpec("w", a, (b - a,), "float64") for a, b in itertools.pairwise(ends)]
            store = VectorStore(ShardLayout(pieces), PORTIONS)
            store.bind([self.x[a:b] for a, b in itertools.pairwise(ends)])
            self.stores.append(store)

    def logs(self) -> list[CommandLog]:
        return [store.log for store in self.stores]

    def run(self, stage: Stage, index: int, commands: Sequence[Command], servers: Sequence[int]) -> list[list[float]]:
        numbers = []
        for server in servers:
            if self.chance is not None and self.chance.random() < 0.05:
                self.deaths += 1
                raise Died
            self.carried += 1
            numbers.append(self.stores[server].carry_out(stage, index, json.dumps(commands).encode()))
            self.most = max(self.most, len(self.stores[server].vectors.named))
        return numbers

    def push(self, serial: int, part: int, gradient: Tensor, weight: float) -> None:
        for store in self.stores:
            for shard, spec in enumerate(store._layout.pieces):
                own = gradient[spec.start : spec.start + spec.elements]
                store.apply([(shard, own)], [shard], PushedStep(0, 0.1, 0, 1, serial * (PORTIONS + 1) + part, weight))


Loss = Callable[[Tensor, int], Tensor]


def rosenbrock(x: Tensor, part: int) -> Tensor:
    """A valley, of which each portion has its own part."""
    low, high = x[:-1], x[1:]
    return (100 * (high - low**2) ** 2 + (1 - low) ** 2).sum() * (1 + part / 7) + (x**2).sum() * part


def logistic(x: Tensor, part: int) -> Tensor:
    rows = torch.sin(torch.arange(30 * len(x), dtype=torch.float64) * (part + 1)).view(30, len(x))
    target = (rows[:, 0] + rows[:, 1] > 0).double()
    return torch.nn.functional.binary_cross_entropy_with_logits(rows @ x, target) + 1e-3 * (x**2).sum()


def evaluated(loss: Loss, x: Tensor, part: int) -> tuple[float, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = loss(x, part)
    value.backward()
    assert x.grad is not None
    return value.item(), x.grad


def on_servers(servers: Servers, loss: Loss, options: SolverOptions, rounds: int) -> list[Tensor]:
    """Returns the parameters after each round."""
    after, serial = [], 0
    weights = [1.0 + part for part in range(PORTIONS)]
    chance = random.Random(0)
    for round_ in range(rounds):
        results: list[tuple[float, float]] = []
        more = True
        while more:
            every = {part: evaluated(loss, servers.x, part) for part in range(PORTIONS)}
            for part in chance.sample(range(PORTIONS), PORTIONS):
                servers.push(serial, part, every[part][1], weights[part])
            total = sum(weights)
            results.append((sum(every[p][0] * weights[p] for p in range(PORTIONS)) / total, total))
            while True:
                try:
                    more = steer(servers, options, round_, serial, results)
                    break
                except Died:
                    continue
            serial += 1
        after.append(servers.x.clone())
    return after


def by_torch(start: Tensor, loss: Loss, options: SolverOptions, rounds: int) -> list[Tensor]:
    x = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x], options.lr, options.max_iter, options.max_eval, options.tolerance_grad, options.tolerance_change,
        options.history, "strong_wolfe" if options.line_search else None,
    )  # fmt: skip
    weights = [1.0 + part for part in range(PORTIONS)]

    def closure() -> Tensor:
        every = [evaluated(loss, x, part) for part in range(PORTIONS)]
        a, b, c, d, e = (gradient * weight for (_, gradient), weight in zip(every, weights, strict=True))
        x.grad = (((a + b) + (c + d)) + e) / sum(weights)
        losses = sum(loss * weight for (loss, _), weight in zip(every, weights, strict=True))
        return torch.tensor(losses / sum(weights), dtype=torch.float64)

    after = []
    for _ in range(rounds):
        optimizer.step(closure)
        after.append(x.detach().clone())
    return after


OPTIONS = {
    "search": SolverOptions(1.0, 20, 25, 1e-7, 1e-9, 10, line_search=True),
    "many evaluations": SolverOptions(1.0, 20, 200, 1e-12, 1e-14, 3, line_search=True),
    "one iteration a round": SolverOptions(1.0, 1, 25, 1e-7, 1e-9, 4, line_search=True),
    "no evaluation to search with": SolverOptions(1.0, 1, 1, 1e-7, 1e-9, 4, line_search=True),
    "fixed steps": SolverOptions(0.1, 8, 10, 1e-7, 1e-9, 5, line_search=False),
    "one fixed step a round": SolverOptions(0.1, 1, 1, 1e-7, 1e-9, 2, line_search=False),
}


@cache
def reference(name: str, loss: Loss) -> list[Tensor]:
    rounds = 2 if OPTIONS[name].max_iter > 1 else 20
    return by_torch(START, loss, OPTIONS[name], rounds)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("loss", [rosenbrock, logistic])
def test_on_one_server_it_is_torchs_bit_for_bit(name: str, loss: Loss) -> None:
    its = reference(name, loss)
    ours = on_servers(Servers(START, ()), loss, OPTIONS[name], len(its))
    assert all(map(torch.equal, ours, its))
    assert not torch.allclose(its[-1], START, atol=1e-3)


@pytest.mark.parametrize(("name", "loss"), [("search", logistic), ("one iteration a round", logistic)])
def test_on_several_servers_it_is_torchs_but_for_the_order_of_sums(name: str, loss: Loss) -> None:
    its = reference(name, loss)
    ours = on_servers(Servers(START, (2, 9)), loss, OPTIONS[name], len(its))
    assert torch.allclose(ours[0], its[0], rtol=1e-9, atol=1e-9)
    assert loss(ours[-1], 0).item() == pytest.approx(loss(its[-1], 0).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["search", "many evaluations", "fixed steps"])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_goes_on_for_a_process_that_died_changes_nothing(name: str, seed: int) -> None:
    whole, hurt = Servers(START, (2, 9)), Servers(START, (2, 9), random.Random(seed))
    results = [on_servers(servers, rosenbrock, OPTIONS[name], 2) for servers in (whole, hurt)]
    assert all(map(torch.equal, *results))
    assert hurt.deaths > 3
    assert hurt.carried == whole.carried, "no command is carried out twice, and none is left out"


def test_a_line_search_keeps_few_gradients() -> None:
    servers = Servers(START, ())
    on_servers(servers, rosenbrock, OPTIONS["many evaluations"], 1)
    # Beside the history of 3 pairs, x, x0, g, p, d, and the two of a new pair.
    assert servers.most <= 6 + 5 + 2 + 4


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (3, "commands are a list, got int"),
        (["dot"], "no command: 'dot'"),
        ([["norm", "x"]], "there is no command 'norm' with 1 values"),
        ([["dot", "x"]], "there is no command 'dot' with 1 values"),
        ([["axpy", "x", "x", "1"]], "axpy takes no '1'"),
        ([["scale", "g", "x", True]], "scale takes no True"),
        ([["dot", "x", "g"]], "'g' is none of the vectors"),
        ([["move", "g", "x"]], "'x' is none of the vectors"),
        ([["copy", "../x", "x"]], "'../x' is none of the vectors"),
        ([["gather", "x", 0, 1.0]], "'x' is none of the vectors"),
        ([["copy", "g", "x"], ["move", "p", "g"], ["dot", "g", "x"]], "'g' is none of the vectors"),
    ],
)
def test_what_is_no_command_changes_nothing(commands: object, reason: str) -> None:
    servers = Servers(START, ())
    with pytest.raises(ValueError, match=re.escape(reason)):
        servers.stores[0].carry_out((0, 0), 0, json.dumps(commands).encode())
    assert servers.logs() == [CommandLog()]
    assert torch.equal(servers.x, START)


def test_commands_come_in_their_order_and_a_stage_that_is_over_stays_so() -> None:
    (store,) = Servers(START, ()).stores
    double = json.dumps([["scale", "g", "x", 2.0], ["max", "g"]]).encode()
    assert store.carry_out((4, 0), 0, double) == [2.0]
    assert store.carry_out((4, 0), 0, b"[]") == [2.0], "it is not carried out again"
    for stage, index in (((4, 0), 2), ((4, 1), 1), ((3, 9), 0)):
        with pytest.raises(ValueError, match="of stage \\(4, 0\\) are next"):
            store.carry_out(stage, index, double)
    assert store.carry_out((4, 1), 0, double) == [2.0]


@pytest.mark.parametrize("parts", [1, 5, 8, 11])
def test_portions_are_summed_in_one_order_however_they_come(parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    gradients = [torch.randn(64, generator=generator) * 10.0**part for part in range(parts)]
    sums = []
    for seed in range(6):
        order, total = random.Random(seed).sample(range(parts), parts), PortionSums()
        for part in order:
            total.add(part, gradients[part].clone())
        sums.append(total.take())
    assert sums[0] is not None
    assert torch.allclose(sums[0].double(), torch.stack(gradients).double().sum(0), rtol=1e-4)
    assert all(other is not None and torch.equal(sums[0], other) for other in sums)
    assert PortionSums().take() is None


def test_a_gradient_of_another_evaluation_is_no_part_of_the_sum() -> None:
    (store,) = Servers(START, ()).stores
    for lease, number in ((0, 1.0), (PORTIONS + 1, 2.0), (1, 4.0)):
        store.apply([(0, torch.full_like(START, number))], [0], PushedStep(0, 0.1, 0, 1, lease, 3.0))
    assert store.carry_out((0, 0), 0, b'[["gather", "g", 1, 3.0], ["max", "g"]]') == [2.0]


@pytest.mark.parametrize("place", range(len(START)))
def test_a_nan_is_the_largest_wherever_it_is(place: int) -> None:
    """As torch has it: a gradient that is not a number is not one that is small enough."""
    servers = Servers(START, (4, 8))
    servers.x.zero_()
    servers.x[place] = math.nan
    assert math.isnan(_Tape(servers, (0, 0), [()] * 3).ask("max", "x"))
