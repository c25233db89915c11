"""Stands in for Ray where no cluster is needed: what an actor answers is there at once, or when a test says it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """What Ray raises of an actor that is lost."""


class RayTaskError(RayError):
    """What Ray raises of an actor's method that has raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Reference:
    """An answer; `make` is called where it is read, and raises where the actor is lost."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self.make = make


class StandIn(ModuleType):
    """The part of the module `ray` that the engine uses while a run goes on."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.known_nodes: list[dict[str, Any]] = []

    @classmethod
    def replace(cls, monkeypatch: pytest.MonkeyPatch) -> StandIn:
        """Puts one in the place of Ray."""
        own = cls()
        monkeypatch.setitem(sys.modules, "ray", own)
        return own

    def nodes(self) -> list[dict[str, Any]]:
        return self.known_nodes

    def wait(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float = 0
    ) -> tuple[list[Reference], list[Reference]]:
        done = [each for each in references if each.make]
        return done, [each for each in references if not each.make]

    def get(self, reference: Reference, timeout: float = 0) -> Any:
        if reference.make is None:
            raise RayError("it has not answered")
        return reference.make()

    @staticmethod
    def fail(*_: Any) -> Any:
        raise RayError("its node is lost")


def remote(call: Callable[..., Any], *first: Any) -> Any:
    """Returns an actor's method that answers what a function returns."""
    return SimpleNamespace(remote=lambda *arguments: Reference(lambda: call(*first, *arguments)))
