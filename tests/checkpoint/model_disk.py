"""A disk in memory that remembers what was done to it, and what a power cut could have left of that.

The model is as weak as POSIX lets a disk be. What was done to a file or a folder since it was last synced may be
kept or lost, each thing for itself and in any order; a write may also be torn, or leave zeros in its place.
Renaming is atomic. Only what was synced, with the file or the folder that it was done to, is sure.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.checkpoint import File, Storage

__all__ = ["Act", "Crash", "ModelDisk", "Tree", "crashes"]

Tree = dict[str, dict[str, bytes]]
"""Files' contents by name, by folder."""

ROOT = 0


@dataclass(frozen=True)
class Act:
    """One thing that was done, or (`kind` "mark") said by the test.

    Attributes:
        kind: "names", "write", "sync" or "mark".
        node: of the file or folder that it was done to.
        label: for people and for mutants, "sync step-00000001.part".
        names: for "names": what each name stands for afterwards, None for nothing.
        at, data: for "write".
        mark: for "mark".
    """

    kind: str
    node: int = ROOT
    label: str = ""
    names: tuple[tuple[str, int | None], ...] = ()
    at: int = 0
    data: bytes = b""
    mark: object = None


@dataclass(frozen=True)
class Crash:
    """What a power cut left.

    Attributes:
        tree: what is there.
        mark: what had been said last.
    """

    tree: Tree
    mark: object


@dataclass
class _Node:
    names: dict[str, int] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)


class ModelDisk(Storage):
    """A disk in memory.

    Args:
        tree: what is on it, synced.
        on_act: called before each act, to end the process there.
    """

    def __init__(self, tree: Mapping[str, Mapping[str, bytes]] = {}, on_act: Callable[[Act], None] | None = None):
        self.acts: list[Act] = []
        self._nodes = [_Node()]
        self._on_act: Callable[[Act], None] | None = None
        for folder, files in tree.items():
            self.make_folder(folder)
            for name, data in files.items():
                with self.create(f"{folder}/{name}") as file:
                    file.write(memoryview(data))
                    file.sync()
            self.sync(folder)
        self.sync("")
        self._on_act = on_act

    def mark(self, mark: object) -> None:
        """Says something that holds from here on."""
        self.acts.append(Act("mark", mark=mark))

    def forked(self, on_act: Callable[[Act], None] | None = None) -> ModelDisk:
        """Returns a disk with the same past, which goes its own way."""
        other = ModelDisk(on_act=on_act)
        other.acts = list(self.acts)
        other._nodes = [_Node(dict(node.names), bytearray(node.data)) for node in self._nodes]
        return other

    def prepare(self) -> None:
        pass

    def entries(self, folder: str) -> Iterator[str]:
        yield from list(self._folder(folder).names)

    def make_folder(self, folder: str) -> None:
        self._do(Act("names", ROOT, f"make {folder}", ((folder, self._new()),)))

    def create(self, place: str) -> File:
        folder, name = place.split("/")
        if name in self._folder(folder).names:
            raise FileExistsError(place)
        node = self._new()
        self._do(Act("names", self._find(folder), f"create {place}", ((name, node),)))
        return _ModelFile(self, node, place)

    def open(self, place: str) -> File:
        return _ModelFile(self, self._find(place), place)

    def rename(self, old: str, new: str) -> None:
        self._do(Act("names", ROOT, f"rename {old} {new}", ((old, None), (new, self._find(old)))))

    def sync(self, folder: str) -> None:
        self._do(Act("sync", self._find(folder), f"sync {folder or 'root'}"))

    def delete_file(self, place: str) -> None:
        folder, name = place.split("/")
        self._find(place)
        self._do(Act("names", self._find(folder), f"delete {place}", ((name, None),)))

    def delete_folder(self, folder: str) -> None:
        assert not self._folder(folder).names
        self._do(Act("names", ROOT, f"delete {folder}", ((folder, None),)))

    def _new(self) -> int:
        self._nodes.append(_Node())
        return len(self._nodes) - 1

    def _find(self, place: str) -> int:
        node = ROOT
        for name in filter(None, place.split("/")):
            if name not in self._nodes[node].names:
                raise FileNotFoundError(2, os.strerror(2), place)
            node = self._nodes[node].names[name]
        return node

    def _folder(self, folder: str) -> _Node:
        return self._nodes[self._find(folder)]

    def _do(self, act: Act) -> None:
        if self._on_act is not None:
            self._on_act(act)
        self.acts.append(act)
        _apply(self._nodes[act.node], act)


class _ModelFile(File):
    def __init__(self, disk: ModelDisk, node: int, place: str) -> None:
        self._disk, self._node, self._place, self._at = disk, node, place, 0

    def size(self) -> int:
        return len(self._disk._nodes[self._node].data)

    def read(self, buffer: memoryview) -> int:
        piece = self._disk._nodes[self._node].data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def write(self, data: memoryview) -> int:
        self._disk._do(Act("write", self._node, f"write {self._place}", at=self.size(), data=bytes(data)))
        return len(data)

    def sync(self) -> None:
        self._disk._do(Act("sync", self._node, f"sync {self._place}"))

    def close(self) -> None:
        pass


def _apply(node: _Node, act: Act) -> None:
    for name, target in act.names:
        if target is None:
            node.names.pop(name, None)
        else:
            node.names[name] = target
    if act.kind == "write":
        end = act.at + len(act.data)
        node.data.extend(bytes(max(0, end - len(node.data))))
        node.data[act.at : end] = act.data


def crashes(acts: Sequence[Act], dice: random.Random, most: int, since: int = 0) -> Iterator[Crash]:
    """Yields what a power cut after each act could have left: all of it, or a sample of `most` where it is more.

    Args:
        acts: what was done, from an empty disk on.
        dice: for samples, and for where writes are torn.
        most: how many after one act.
        since: the first act after which the power may be cut.
    """
    for count in range(since, len(acts) + 1):
        done = acts[:count]
        if done and done[-1].kind == "mark" and count < len(acts):
            continue
        synced = {act.node: place for place, act in enumerate(done) if act.kind == "sync"}
        acted = [place for place, act in enumerate(done) if act.kind in ("names", "write")]
        open_places = [place for place in acted if place > synced.get(done[place].node, -1)]
        choices = [4 if done[place].kind == "write" else 2 for place in open_places]
        picks: Iterable[tuple[int, ...]] = itertools.product(*map(range, choices))
        if math.prod(choices) > most:
            picks = (tuple(map(dice.randrange, choices)) for _ in range(most))
        marks = [act.mark for act in done if act.kind == "mark"]
        for pick in picks:
            chosen = dict(zip(open_places, pick, strict=True))
            kept = (_kept(done[place], chosen.get(place, 1), dice) for place in acted)
            yield Crash(_tree([act for act in kept if act is not None]), marks[-1] if marks else None)


def _kept(act: Act, choice: int, dice: random.Random) -> Act | None:
    """What is left of an act: 0 nothing, 1 all; of a write also 2 its beginning or its end, 3 zeros."""
    if choice == 1:
        return act
    if choice == 2:
        cut = dice.randrange(len(act.data) + 1)
        zeros = bytes(len(act.data) - cut)
        torn = act.data[:cut] if dice.random() < 0.5 else zeros + act.data[len(zeros) :]
        return Act("write", act.node, at=act.at, data=torn)
    return Act("write", act.node, at=act.at, data=bytes(len(act.data))) if choice == 3 else None


def _tree(acts: Sequence[Act]) -> Tree:
    nodes: dict[int, _Node] = {}
    for act in acts:
        _apply(nodes.setdefault(act.node, _Node()), act)
    empty = _Node()
    return {
        folder: {name: bytes(nodes.get(file, empty).data) for name, file in nodes.get(node, empty).names.items()}
        for folder, node in nodes.get(ROOT, empty).names.items()
    }
