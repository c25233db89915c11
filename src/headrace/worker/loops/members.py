"""How workers in lockstep go on when one is lost, joins or leaves: between two rounds, with the state handed over.

    worker 0   round 7 ─ ✗        view 2: 0, 2 ─ round 7 again ─ round 8 ─ view 3: 0, 2, 3 ─ gives the state ─ round 9
    worker 1   round 7 ─ lost
    worker 2   round 7 ─ ✗        view 2: 0, 2 ─ round 7 again ─ round 8 ─ view 3: 0, 2, 3 ──────────────────── round 9
    worker 3                                         starts, waits ─────── view 3: 0, 2, 3 ─ takes the state ── round 9

A round is done where its last barrier is passed: all members pass it, or none.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.checkpoint.forms import extra_states, load_extra_states, pack, unpack
from headrace.collectives.views.group import ViewGroup
from headrace.machine.generators import random_states, set_random_states
from headrace.modules import restore
from headrace.policies.views import Member
from headrace.shared_memory.barrier import MemberLost
from headrace.spec.events import Notice
from headrace.training.optimizer import StatePiece
from headrace.worker.control import RunControl
from headrace.worker.session import WorkerSession

_TWISTER_BYTES = 4 * 624 + 4
"""What a Mersenne Twister of numpy is in memory: 624 numbers, and how many of them are used."""

_VALUES = "values"
"""The name of what is no tensor, as JSON, in a state that is handed over."""


@dataclass(frozen=True)
class _Before:
    """What a worker was after so many rounds; `counted` are its examples, and those of all processes of its rank."""

    done: int
    buffers: list[Tensor]
    extra: dict[str, Tensor]
    generators: tuple[Tensor, Any, Any, Mapping[str, Tensor]]
    counted: tuple[int, int]


class _NumpyState:
    """The state of numpy's global generator, which is asked for in every round and rarely changes.

    numpy makes it in 0.1 ms, number by number; whether it has changed its memory tells in a hundredth of that.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Returns the present state; the caller must not change it."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in its stubs
        known = isinstance(generator, np.random.MT19937)
        memory = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES) if known else b""
        # The second of a pair of normal numbers is drawn without a change of this memory.
        if not known or memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return self._state


class MemberChanges:
    """Changes the members of a run between two rounds."""

    def __init__(self, session: WorkerSession, control: RunControl) -> None:
        assert isinstance(session.group, ViewGroup)
        assert session.replica.elastic is not None
        self._elastic = session.replica.elastic
        self._session = session
        self._control = control
        self._group = session.group
        self._views = session.group.views
        self._view = self._views.view.number
        self._told: tuple[Member, ...] = self._views.view.members
        self._before: _Before | None = None
        self._numpy = _NumpyState()

    @property
    def has_left(self) -> bool:
        """Whether this worker has left the others, as it was asked to."""
        return self._views.has_left

    def begin(self) -> None:
        """Joins the others, if this process begins while the run goes on."""
        if self._session.is_replacement:
            self._warm_up()
            self._views.join()
            self._group.adopt()
            self._complete()
            self._told = self._views.view.members
        self._keep()

    def survives(self, act: Callable[[], None]) -> bool:
        """Runs a part of a round; returns False if a member was lost, and none has got beyond that part."""
        try:
            act()
        except MemberLost:
            return False
        return True

    def ask(self, done: int) -> None:
        """Lets the first member decide whether members change after so many rounds, before the last one's barriers."""
        if self._group.rank == 0:
            self._views.announce(done)

    @property
    def begun(self) -> bool:
        """Whether the members have changed already, in something that they did together."""
        return self._views.view.number != self._view

    def notice(self) -> None:
        """Raises a MemberLost if a member was lost before a barrier that this one has not come to either."""
        self._views.now.check()

    def due(self, done: int) -> bool:
        """Tells whether members change after so many rounds; else keeps what the next round may change."""
        if self._views.is_due(done) or self.begun:
            return True
        self._keep()
        return False

    def change(self, spoilt: bool) -> bool:
        """Goes on with other members; returns whether this one stays.

        If `spoilt`, the rounds that do not count leave no trace, and come again.
        """
        if spoilt:
            self._bring_back()
        self._control.verbs.begin_again()
        self._views.renew(admits=True)
        if self.has_left:
            return False
        self._group.adopt()
        self._complete()
        self._keep()
        self._tell()
        return True

    def _warm_up(self) -> None:
        """Computes a share and drops its gradients: a first step takes longer, and the others would wait for it."""
        session = self._session
        if session.run.train is not None:
            # Its loss may be another one.
            return
        share = session.loader.portion(0, 0, session.run.plan.workers)
        if share.examples:
            compute = session.replica.compute
            compute.run(replace(share, batch=compute.place(share.batch)))

    def _complete(self) -> None:
        """Goes on with the members of a view that may change again meanwhile."""
        self._group.together(self._go_on)

    def _go_on(self) -> None:
        group = self._group
        self._session.devices.renew()
        self._elastic.regroup()
        if self._views.view.fresh:
            self._hand_over()
        group.barrier()
        self._views.settle()
        self._view = self._views.view.number
        self._session.loader.assign((1,) * group.world, group.rank)

    def _hand_over(self) -> None:
        """Gives the first member's state to those that have joined."""
        group = self._group
        content = pack(self._state()) if group.rank == 0 else b""
        (size,) = group.sum([float(len(content))])
        packed = torch.zeros(int(size), dtype=torch.uint8)
        if content:
            packed.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        group.broadcast(packed)
        if self._views.me in self._views.view.fresh:
            self._load(unpack(packed.numpy().tobytes()))

    def _state(self) -> dict[str, Tensor]:
        session, control = self._session, self._control
        values = {
            "done": session.progress.done,
            "saved": control.saved,
            "settings": session.replica.exchange.settings(),
            "early_stopping": control.stopper.state(),
            "by_user_code": control.state.by_user_code(),
        }
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        pieces = {f"state/{piece.name}": piece.flat for piece in self._elastic.give()}
        module = session.replica.compute.module
        return {**dict(self._tensors()), **pieces, **extra_states(module, lambda _: True), _VALUES: text}

    def _load(self, state: dict[str, Tensor]) -> None:
        session, control = self._session, self._control
        values = json.loads(state[_VALUES].numpy().tobytes())
        with torch.no_grad():
            for name, tensor in self._tensors():
                restore(tensor, state[name])
            load_extra_states(session.replica.compute.module, state)
        pieces = [StatePiece.parse(name[6:], each) for name, each in state.items() if name.startswith("state/")]
        self._elastic.take(pieces, values["settings"])
        control.stopper.load(values["early_stopping"])
        control.state.as_user_code(values["by_user_code"])
        control.saved = values["saved"]
        session.progress.round = values["done"] - 1

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's parameters and buffers, by names of their own."""
        module = self._session.replica.compute.module
        for name, parameter in module.named_parameters():
            yield f"parameter/{name}", parameter
        for name, buffer in module.named_buffers():
            yield f"buffer/{name}", buffer

    def _keep(self) -> None:
        """Copies what rounds may change before they count: buffers, extra state and generators of random numbers."""
        session, module = self._session, self._session.replica.compute.module
        buffers, extra = [buffer.detach().clone() for buffer in module.buffers()], extra_states(module)
        generators = torch.get_rng_state(), random.getstate(), self._numpy.read(), random_states()
        counted = session.progress.examples, session.page.ranks[session.rank].heartbeat.examples
        self._before = _Before(session.progress.done, buffers, extra, generators, counted)
        self._elastic.keep()

    def _bring_back(self) -> None:
        assert self._before is not None
        before, session = self._before, self._session
        own, python, numpy, devices = before.generators
        with torch.no_grad():
            for buffer, kept in zip(session.replica.compute.module.buffers(), before.buffers, strict=True):
                restore(buffer, kept)
            load_extra_states(session.replica.compute.module, before.extra)
        torch.set_rng_state(own)
        random.setstate(python)
        np.random.set_state(numpy)
        set_random_states(devices)
        session.progress.round = before.done - 1
        session.progress.examples, session.page.ranks[session.rank].heartbeat.examples = before.counted
        self._elastic.bring_back()

    def _tell(self) -> None:
        group, events, members = self._group, self._session.events, self._views.view.members
        before, self._told = self._told, members
        if group.rank == 0:
            changes = [f"without rank {rank}" for rank, _ in sorted(set(before) - set(members))]
            changes += [f"with a new rank {rank}" for rank, _ in sorted(set(members) - set(before))]
            there = f"{group.world} worker{'s' * (group.world > 1)}"
            text = f"round {self._session.progress.done} begins with {there}: {', '.join(changes)}"
            events.write(Notice(self._session.rank, events.now(), text))
