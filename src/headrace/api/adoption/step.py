"""What a round of the loop computes, as a job has it: what the model is given, and the loss of what it returns.

Where the loss is not a function of one call of the model and of the batch, a module takes the whole batch.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.api.adoption.loop import BatchLoop, Unfit, carried
from headrace.api.adoption.syntax import called, needed, reads, replaced, sets, text_of

BATCH = "batch"


@dataclass(frozen=True)
class JobStep:
    """The functions of a job's step.

    Attributes:
        text: their definitions, for the body of `job`.
        fields: of the Job, but the model, by name.
        model: the expression of the job's model, in the names of the loop's function.
        kept: the statements that the loss needs.
        idle: those that do nothing where no device is chosen.
        needs: the names that these functions take from outside.
    """

    text: list[str]
    fields: dict[str, str]
    model: str
    kept: list[ast.stmt]
    idle: list[ast.stmt]
    needs: set[str]


def read_step(loop: BatchLoop) -> JobStep:
    """Returns the step of a loop.

    Raises:
        Unfit: a round depends on its number, the epoch or the round before.
    """
    model = loop.names["model"]
    body = [each for each in loop.body if not _is_called(each, "zero_grad") and not _is_called(each, "train")]
    kept, names = needed(body, reads(loop.loss))
    if loop.number in names:
        raise Unfit(f"line {loop.node.lineno}: the loss depends on {loop.number}, the number of the batch")
    for scope in loop.scopes:
        for each in scope.loops:
            if isinstance(each, ast.For) and (found := sets(each.target) & names):
                raise Unfit(
                    f"line {each.lineno}: the loss depends on {min(found)}, and a job's is the same in every epoch"
                )
    if name := carried(loop, kept):
        raise Unfit(f"line {loop.node.lineno}: a round takes {name} from the round before")
    idle = [each for each in kept if _is_same(each)]
    kept = [each for each in kept if each not in idle]
    calls = [
        each
        for one in (*kept, loop.loss)
        for each in ast.walk(one)
        if isinstance(each, ast.Call) and text_of(each.func) == model
    ]
    uses = sum(text_of(each) == model for one in (*kept, loop.loss) for each in ast.walk(one) if _names(each))
    taken = _taken(loop, kept, calls[0]) if len(calls) == uses == 1 else None
    text, fields, whole = taken or (
        [_module_text(loop, kept), f"step = Step({model})"],
        {"inputs": "whole", "target": "whole", "loss": 'lambda output, _: output["loss"]'},
        "step",
    )
    needs = (reads([*kept, loop.loss]) | {model.partition(".")[0]}) - sets(loop.batch)
    needs -= set[str]().union(*(sets(each) for each in kept))
    if "whole" in fields.values():
        text = [f"def whole({BATCH}):\n    return {BATCH}", *text]
    return JobStep(text, fields, whole.format(model=model), kept, idle, needs)


def _names(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)


def _is_called(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and called(statement.value) == name


def _is_same(statement: ast.stmt) -> bool:
    """Tells whether a statement binds names to themselves, as one does that moved a batch to a device."""
    return isinstance(statement, ast.Assign) and all(
        text_of(target) == text_of(statement.value) for target in statement.targets
    )


def _taken(loop: BatchLoop, kept: Sequence[ast.stmt], call: ast.Call) -> tuple[list[str], dict[str, str], str] | None:
    """Returns functions for a model that is called once, and the fields that they fill; None where they do not do."""
    places = [place for place, each in enumerate(kept) if any(one is call for one in ast.walk(each))]
    if any(isinstance(kept[place], ast.With | ast.For | ast.If | ast.While | ast.FunctionDef) for place in places):
        return None
    place = places[0] if places else len(kept)
    first, later = list(kept[:place]), list(kept[place:])
    given = _given(loop, first, call)
    if given is None:
        return None
    text, fields = given
    output, changed = "output", ast.Name("output", ast.Load())
    if later and isinstance(later[0], ast.Assign) and later[0].value is call:
        target = later[0].targets[0]
        if isinstance(target, ast.Name):
            output, later = target.id, later[1:]
        else:
            later[0] = replaced(later[0], [call], changed)
    elif later:
        later[0] = replaced(later[0], [call], changed)
    result = loop.loss
    if not places:
        holder = replaced(ast.copy_location(ast.Expr(loop.loss), loop.loss), [call], changed)
        assert isinstance(holder, ast.Expr)
        result = holder.value
    if isinstance(result, ast.Name) and later and isinstance(later[-1], ast.Assign):
        end = later[-1]
        if len(end.targets) == 1 and text_of(end.targets[0]) == result.id:
            result, later = end.value, later[:-1]
    own = f"{output}.loss"
    if text_of(result) == own and not later and fields.get("inputs") is None:
        return [], {"task": "hr.tasks.own_loss()"}, "{model}"
    wanted = reads([*later, result])
    before, _ = needed(first, wanted)
    names = sets(loop.batch)
    pair = isinstance(loop.batch, ast.Tuple) and len(loop.batch.elts) == 2 and all(map(_names_store, loop.batch.elts))
    if pair and not before and (reads([*later, result]) & names) <= {_store(loop.batch, 1)}:
        head = f"def loss({output}, {_store(loop.batch, 1)}):"
        if fields.get("inputs") not in (None, "0"):
            fields["target"] = "1"
        lines = [*map(text_of, later), f"return {text_of(result)}"]
    else:
        head = f"def loss({output}, {BATCH}):"
        fields["target"] = "whole"
        lines = [*_unpacked(loop, before, [*later, result]), *map(text_of, before), *map(text_of, later)]
        lines.append(f"return {text_of(result)}")
    return [*text, _function(head, lines)], {**fields, "loss": "loss"}, "{model}"


def _given(loop: BatchLoop, first: Sequence[ast.stmt], call: ast.Call) -> tuple[list[str], dict[str, str]] | None:
    """Returns how the model's input is taken from a batch."""
    batch = loop.batch
    arguments = [*call.args, *(each.value for each in call.keywords)]
    before, _ = needed(first, reads(arguments))
    names = [text_of(each) for each in call.args]
    if not before and isinstance(batch, ast.Tuple) and all(map(_names_store, batch.elts)):
        places = [_store(batch, place) for place in range(len(batch.elts))]
        if not call.keywords and names and all(name in places for name in names):
            chosen = [places.index(name) for name in names]
            if len(places) == 2 and chosen == [0]:
                return [], {}
            return [], {"inputs": str(chosen[0]) if len(chosen) == 1 else f"({', '.join(map(str, chosen))})"}
    spread = [each for each in call.keywords if each.arg is None]
    if not before and isinstance(batch, ast.Name) and not call.args and len(call.keywords) == 1 and spread:
        return ([], {}) if text_of(spread[0].value) == batch.id else None
    if len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred):
        lines = [*_unpacked(loop, before, arguments), *map(text_of, before), f"return {names[0]}"]
        return [_function(f"def inputs({BATCH}):", lines)], {"inputs": "inputs"}
    return None


def _names_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def _store(batch: ast.expr, place: int) -> str:
    assert isinstance(batch, ast.Tuple)
    return text_of(batch.elts[place])


def _unpacked(loop: BatchLoop, statements: Sequence[ast.AST], others: Sequence[ast.AST]) -> list[str]:
    """Returns the line that binds what the loop's header does, where it is used."""
    used = reads([*statements, *others]) & sets(loop.batch)
    target = copy.deepcopy(loop.batch)
    if not used or text_of(target) == BATCH:
        return []
    if isinstance(target, ast.Tuple):
        for place, each in enumerate(target.elts):
            if isinstance(each, ast.Name) and each.id not in used:
                target.elts[place] = ast.Name("_", ast.Store())
    return [f"{text_of(target).strip('()')} = {BATCH}"]


def _function(head: str, lines: Sequence[str]) -> str:
    return "\n".join([head, *(f"    {line}" for each in lines for line in each.splitlines())])


def _module_text(loop: BatchLoop, kept: Sequence[ast.stmt]) -> str:
    """Returns a module whose forward takes a batch and returns the loss."""
    model = loop.names["model"]
    lines = [f"{model} = self.model"] if model.isidentifier() else []
    lines += [*_unpacked(loop, kept, [loop.loss]), *map(text_of, kept), f'return {{"loss": {text_of(loop.loss)}}}']
    head = [
        "class Step(torch.nn.Module):",
        f'    """Takes a batch, returns the loss: line {loop.node.lineno} and those that follow."""',
        "",
        "    def __init__(self, model):",
        "        super().__init__()",
        "        self.model = model",
        "",
    ]
    return "\n".join(
        [*head, *(f"    {line}" for line in _function(f"def forward(self, {BATCH}):", lines).splitlines())]
    )
