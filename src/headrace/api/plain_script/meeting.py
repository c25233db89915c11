"""Where the processes of a script meet: each says what it does, and all raise the same error where they differ."""

from __future__ import annotations

import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from headrace.api.plain_script.draws import CommonDraws
from headrace.api.plain_script.given.deliveries import Deliveries
from headrace.collectives.base import ProcessGroup, gather_texts
from headrace.errors import PeerLost, UsageError
from headrace.training.user_code.loss_graph import SEARCHES, Made, otherwise_made

BACKWARD, ASSIGNED, CLOSURE, STEP, ITERATION, BATCH, SETUP, BARRIER, GATHER, SAVED, LOADED, COMMON = range(12)
_ACTS = (
    "loss.backward()",
    "optimizer.step() with gradients that the script has assigned",
    "optimizer.step(closure)",
    "the end of optimizer.step()",
    "the beginning of an iteration over its loader",
    "a batch of its loader, without a backward pass before",
    "hr.setup",
    "barrier() or on_first() of hr.processes()",
    "gather(), sum(), mean() or whole() of hr.processes()",
    "optimizer.state_dict(), which every process calls under central_storage, where each has a part of the states",
    "model.load_state_dict(), which every process calls under central_storage",
    "common() of hr.processes()",
)
_REMEDY = (
    "every process must do the same passes and steps, in the same order; where a share has nothing to train on, call "
    "backward() of a loss times 0, (model(inputs) * 0).sum()"
)
_OPTIONS = ("lr", "momentum", "betas", "weight_decay")


class _Record(NamedTuple):
    """What one process does at a meeting, and has done before."""

    act: int
    model: int
    passes: int
    steps: int
    batches: int
    epoch: int
    place: int
    order: int
    state: int
    options: int
    examples: int
    chosen: int
    made: int

    @property
    def where(self) -> str:
        on = f", batch {self.place} of iteration {self.epoch}" if self.batches else ""
        at = f" of model {self.model}" if self.act in (BACKWARD, CLOSURE) and self.model else ""
        return f"{_ACTS[self.act]}{at} (after {self.passes} backward passes and {self.steps} steps{on})"


class Meeting:
    """The processes of a script, how far this one is, and what is common to all.

    Attributes:
        rank, world: of the group.
        deliveries: the shares that this process's loaders have given.
        passes, steps: backward passes and optimizer steps so far, of all models.
        optimizers: those whose learning rates must be the same on all ranks.
        weight: this rank's part of the examples of the last backward pass.
        comparisons: what compares the parameters of all ranks.
        thread: the one that trains.
        made: what the losses since the last meeting are made of.
        gathers: how often the processes have gathered values.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = group.rank, group.world
        self.deliveries = Deliveries()
        self.passes = self.steps = self.gathers = 0
        self.weight = 1.0 / group.world
        self.optimizers: list[torch.optim.Optimizer] = []
        self.comparisons: list[Callable[[], None]] = []
        self.thread = threading.current_thread()
        self.made: list[Made] = []
        self._searches = SEARCHES
        self._draws: CommonDraws | None = None
        self._said: set[str] = set()
        self._values: list[Any] = []
        self._values_digest = 0

    def say(self, line: str) -> None:
        """Prints a line once, on rank 0."""
        if self.rank == 0 and line not in self._said:
            self._said.add(line)
            sys.stderr.write(f"headrace: {line}\n")

    def part(self) -> None:
        """Lets each rank draw random numbers of its own from now on, and samplers common ones."""
        if self._draws is None:
            self._draws = CommonDraws(self.group)
        else:
            self._draws.agree()

    def compare(self) -> None:
        """Compares the parameters of all ranks, where there was no backward pass to do it."""
        self.meet(BATCH)
        for comparison in self.comparisons:
            comparison()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Lets what runs inside draw random numbers that are common to all ranks."""
        if self._draws is None:
            yield
        else:
            with self._draws.drawing():
                yield

    @contextmanager
    def begin_common(self, act: int = COMMON) -> Iterator[None]:
        """Lets what runs inside draw common random numbers, as where an iteration over a loader begins on all ranks."""
        self.meet(act)
        if self._draws is not None:
            self._draws.agree()
        with self.drawing():
            yield

    def reader_seed(self, common: int) -> int:
        """Returns a seed of this rank's own for a number that all ranks have drawn."""
        return self._draws.reader_seed(common) if self._draws is not None else common

    def meet(
        self,
        act: int,
        model: int = 0,
        state: int = 0,
        states: Callable[[], Mapping[str, str]] | None = None,
        examples: int = 0,
        chosen: int = 0,
    ) -> list[int]:
        """Compares what all ranks do; returns the examples of each.

        Args:
            act: one of the constants above.
            model: the number of its setup.
            state: a digest of `states`, which says what it is of, by name.
            examples: of this rank's share.
            chosen: of which so many were trained on; 0 for all.

        Raises:
            UsageError: the ranks differ.
            PeerLost: a process was lost.
        """
        given = self.deliveries
        self.gathers += act == GATHER
        own = _Record(
            *(act, model, self.passes, self.steps, given.batches, given.epoch, given.index, given.order),
            *(state, self._options_digest(), examples, chosen, zlib.crc32(repr(self.made).encode())),
        )
        try:
            rows = self.group.gather(torch.tensor(own, dtype=torch.int64).view(torch.uint8)).view(torch.int64)
        except (PeerLost, UsageError) as error:
            raise self._explained(own, error) from error
        records = [_Record(*row) for row in rows.tolist()]
        self._compare(records, states)
        shares = [record.examples for record in records]
        if len({record.made for record in records}) > 1 and act == BACKWARD and min(shares) > 1 and self._searches:
            self._searches -= 1
            made = [json.loads(text) for text in gather_texts(self.group, json.dumps(self.made))]
            if said := otherwise_made([*zip(range(self.world), made, shares, strict=True)]):
                self._searches = 0
                self.say(said)
        self.made = []
        return shares

    def mean(self, value: float, model: int) -> float:
        """Returns the mean of all ranks' values, weighted as the gradients of the last backward pass were."""
        self.meet(CLOSURE, model)
        # The mean over no examples is not a number.
        return self.group.sum([value * self.weight if self.weight else 0.0])[0]

    def require_same(self, facts: Mapping[str, str], remedy: str) -> None:
        """Raises a UsageError on all ranks if a fact differs on some; all call it together."""
        of_ranks = [json.loads(text) for text in gather_texts(self.group, json.dumps(facts))]
        first = of_ranks[0]
        for rank, theirs in enumerate(of_ranks):
            for name in (*first, *theirs):
                if first.get(name) != theirs.get(name):
                    raise UsageError(
                        f"{name} is {theirs.get(name, 'unknown')} on rank {rank} and {first.get(name, 'unknown')} on "
                        f"rank 0, after {self.passes} backward passes and {self.steps} steps; {remedy}"
                    )

    def _compare(self, records: Sequence[_Record], states: Callable[[], Mapping[str, str]] | None) -> None:
        first = records[0]
        # The last three fields may differ.
        other = next((rank for rank, record in enumerate(records) if record[:-3] != first[:-3]), 0)
        if not other:
            _require_same_parts(records)
            return
        theirs = records[other]
        if theirs[:7] != first[:7]:
            raise UsageError(f"rank {other} is at {theirs.where}, and rank 0 at {first.where}: {_REMEDY}")
        if theirs.order != first.order:
            raise UsageError(
                f"rank {other} has taken other examples than rank 0 until batch {first.place} of iteration "
                f"{first.epoch}: its sampler draws otherwise, or takes a rank's part by itself; let the samplers "
                "of all ranks yield the same, and setup divides every batch; what share() takes is the same on all, "
                "and random numbers of it are drawn within hr.processes().common()"
            )
        if states is not None and theirs.state != first.state:
            self.require_same(states(), "freeze, make and convert parameters and buffers alike on all ranks")
        self.require_same(
            self._options(),
            "every process steps with the same: a schedule that follows a metric (ReduceLROnPlateau) needs the "
            "metric of the whole set, or of all processes, on each",
        )

    def _explained(self, own: _Record, error: PeerLost | UsageError) -> Exception:
        """Returns the error that says where this rank waits for one whose script has ended."""
        ended = [rank for rank in self.group.ends.ended if rank != self.rank]
        if not ended:
            return error
        passes = self.group.ends.rounds(ended[0])
        return UsageError(
            f"the script on rank {ended[0]} has ended after {passes} backward passes, and rank {self.rank} waits for "
            f"it at {own.where}: {_REMEDY}"
        )

    def _options_digest(self) -> int:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        values = [_plain(group.get(name)) for group in groups for name in _OPTIONS]
        # Most steps change none.
        if values != self._values:
            self._values, self._values_digest = values, zlib.crc32(repr(values).encode())
        return self._values_digest

    def _options(self) -> dict[str, str]:
        return {
            f"{name} of parameter group {place} of {type(optimizer).__name__}": repr(_plain(group[name]))
            for optimizer in self.optimizers
            for place, group in enumerate(optimizer.param_groups)
            for name in _OPTIONS
            if name in group
        }


def _require_same_parts(records: Sequence[_Record]) -> None:
    """Raises a UsageError where ranks have trained on unequal parts of their shares, by whose sizes they count."""
    if not any(record.chosen for record in records):
        return
    parts = [(record.chosen or record.examples, record.examples) for record in records if record.examples]
    if any(chosen * parts[0][1] != parts[0][0] * examples for chosen, examples in parts):
        listed = ", ".join(f"{chosen} of {examples}" for chosen, examples in parts[:4])
        raise UsageError(
            f"the model got {listed} examples of the shares of ranks 0, 1 and so on, and gradients are weighted by all "
            "examples of a share. Choose examples in the data set or by a sampler; or multiply their losses by 0 or 1 "
            "and divide the sum by len(batch); hr.setup(..., reduction=...) leaves this check out"
        )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
