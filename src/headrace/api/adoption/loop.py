"""The loop of a script: where it stands, what of a round makes the loss, and what else happens in it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.api.adoption.facts import Facts, Frame
from headrace.api.adoption.syntax import called, inner_statements, reads, sets, text_of

_WRAPPERS = ("tqdm", "trange", "enumerate", "track")


class Unfit(Exception):
    """A script has not this form; the message says why. It is for those who then write another form."""


@dataclass
class LoopScope:
    """A function on the way to the loop, and what of it comes before.

    Attributes:
        node: the function, or the script.
        before: the statements that run before the way goes on, outside the loop over epochs.
        within: those in the loops on the way that are not on it.
        after: those that run once the way has come back.
        loops: on the way; the last one of the last function is that over batches, until it is taken out.
        on: the statement on the way.
    """

    frame: Frame
    node: ast.Module | ast.FunctionDef
    before: list[ast.stmt] = field(default_factory=list)
    within: list[ast.stmt] = field(default_factory=list)
    after: list[ast.stmt] = field(default_factory=list)
    loops: list[ast.For | ast.While] = field(default_factory=list)
    on: ast.stmt | None = None

    @property
    def epochs(self) -> list[ast.For]:
        """The loops on the way that go over something, without that over batches."""
        return [each for each in self.loops if isinstance(each, ast.For)]


@dataclass
class BatchLoop:
    """The loop whose rounds are steps.

    Attributes:
        scopes: from the script to the function that holds it.
        node: the loop over batches.
        batch: its target, without a number of the batch.
        number: the name of that number; empty where it has none.
        epochs: the loop over epochs; None where the data is gone through once.
        body: the statements before the backward pass.
        loss: what is differentiated.
        after: the statements behind it.
    """

    scopes: list[LoopScope]
    node: ast.For
    batch: ast.expr
    number: str
    epochs: ast.For | None
    body: list[ast.stmt]
    loss: ast.expr
    after: list[ast.stmt]

    @property
    def names(self) -> Mapping[str, str]:
        """The expressions of the function that holds the loop, by role."""
        return self.scopes[-1].frame.names


def find_scopes(tree: ast.Module, facts: Facts) -> list[LoopScope]:
    """Returns the functions from the script to the loop.

    Raises:
        Unfit: one of them is not a function of the script, or something on the way may skip the loop.
    """
    scopes = []
    for place, frame in enumerate(facts.frames):
        node = _node_of(tree, frame)
        if node is None:
            raise Unfit(f"line {frame.line}: the loop is reached by {frame.function}, which is not a plain function")
        scope = LoopScope(frame, node)
        last = place == len(facts.frames) - 1
        _descend(scope, node.body, facts.loop_line if last else frame.line, last)
        scopes.append(scope)
    return scopes


def find_loop(tree: ast.Module, facts: Facts) -> BatchLoop:
    """Returns the loop over batches.

    Raises:
        Unfit: it is not of the form that a job has; the message says what it does.
    """
    scopes = find_scopes(tree, facts)
    inner = scopes[-1]
    if not inner.loops:
        raise Unfit(f"line {facts.loop_line}: the batches are not taken by a for loop over the loader")
    node = inner.loops.pop()
    if not isinstance(node, ast.For) or not node.lineno <= facts.loop_line < node.body[0].lineno:
        raise Unfit(f"line {facts.loop_line}: the batches are not taken by a for loop over the loader")
    epochs = [each for scope in scopes for each in scope.epochs]
    for each in (one for scope in scopes for one in scope.loops if isinstance(one, ast.While)):
        raise Unfit(f"line {each.lineno}: how often `while {text_of(each.test)}` goes round is not known")
    if len(epochs) > 1:
        raise Unfit(
            f"line {epochs[-1].lineno}: the loop over batches stands in {len(epochs)} others, and a job has epochs"
        )
    for later in (one for scope in scopes for one in scope.after):
        if trains(later, tree):
            raise Unfit(f"line {later.lineno} trains once more: {text_of(later).splitlines()[0]}")
    batch, number = _target(node)
    backward = [
        place
        for place, each in enumerate(node.body)
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and called(each.value) == "backward"
    ]
    nested = [each.lineno for each in ast.walk(node) if isinstance(each, ast.Call) and called(each) == "backward"]
    others = [each.lineno for each in ast.walk(tree) if isinstance(each, ast.Call) and called(each) == "backward"]
    if len(others) > len(nested):
        raise Unfit(f"lines {', '.join(map(str, sorted(others)))}: the script trains in more than one place")
    if len(backward) != 1 or len(nested) != 1:
        line = nested[0] if nested else facts.frames[-1].line
        raise Unfit(
            f"line {line}: the loop has {len(nested)} backward passes of its own, {len(backward)} of them in every "
            "round, and a job makes one in each"
        )
    call = node.body[backward[0]]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    if call.value.args or call.value.keywords or not isinstance(call.value.func, ast.Attribute):
        raise Unfit(f"line {call.lineno}: {text_of(call)}: a job differentiates its loss alone")
    return BatchLoop(
        scopes=scopes,
        node=node,
        batch=batch,
        number=number,
        epochs=epochs[0] if epochs else None,
        body=node.body[: backward[0]],
        loss=call.value.func.value,
        after=node.body[backward[0] + 1 :],
    )


def trains(statement: ast.AST, tree: ast.Module) -> bool:
    """Tells whether a statement makes a backward pass, or calls a function of the script that does."""
    found: set[str] = set()
    while True:
        more = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name not in found and _calls(node, {"backward", *found})
        }
        if not more:
            return _calls(statement, {"backward", *found})
        found |= more


def _calls(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Call) and called(each) in names for each in ast.walk(node))


def _node_of(tree: ast.Module, frame: Frame) -> ast.Module | ast.FunctionDef | None:
    if frame.function == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == frame.function:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == frame.first:
                return node
    return None


def _descend(scope: LoopScope, body: Sequence[ast.stmt], line: int, last: bool) -> None:
    """Follows the way to a line, and notes what stands beside it."""
    for place, statement in enumerate(body):
        if not statement.lineno <= line <= (statement.end_lineno or 0):
            continue
        (scope.within if scope.loops else scope.before).extend(body[:place])
        (scope.within if scope.loops else scope.after).extend(body[place + 1 :])
        scope.on = statement
        inside = list(inner_statements(statement))
        if isinstance(statement, ast.For) and last and line < statement.body[0].lineno:
            scope.loops.append(statement)
        elif inside and inside[0].lineno <= line:
            if isinstance(statement, ast.For | ast.While):
                scope.loops.append(statement)
            for name in ("body", "orelse", "finalbody"):
                _descend(scope, getattr(statement, name, ()), line, last)
        return


def _target(node: ast.For) -> tuple[ast.expr, str]:
    """Returns what a batch is bound to, and the name of its number."""
    given, target, number = node.iter, node.target, ""
    while isinstance(given, ast.Call) and called(given) in _WRAPPERS and given.args:
        if called(given) == "enumerate":
            if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not isinstance(target.elts[0], ast.Name):
                raise Unfit(f"line {node.lineno}: {text_of(target)} takes the number and the batch in one")
            number, target = target.elts[0].id, target.elts[1]
        given = given.args[0]
    if isinstance(given, ast.Call):
        raise Unfit(f"line {node.lineno}: {text_of(given)} stands between the loader and the loop")
    return target, number


def carried(loop: BatchLoop, kept: Sequence[ast.stmt]) -> str:
    """Returns a name that a round takes from the round before; empty where there is none."""
    later = set[str]().union(*(sets(each) for each in (*loop.body, *loop.after)))
    known = sets(loop.batch)
    for statement in kept:
        if taken := (reads(statement) & later) - known - _first_set(statement):
            return min(taken)
        known |= sets(statement)
    taken = (reads(loop.loss) & later) - known
    return min(taken, default="")


def _first_set(statement: ast.stmt) -> set[str]:
    """Returns the names that a compound statement sets before it reads them."""
    if isinstance(statement, ast.With | ast.For | ast.If):
        found: set[str] = sets(statement.target) if isinstance(statement, ast.For) else set()
        for each in statement.body:
            if not reads(each) & sets(each) - found:
                found |= sets(each)
        return found
    return set()
