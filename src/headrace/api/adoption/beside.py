"""What a script's loops do beside the step: a job leaves it out, if its text shows that it changes no training."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.api.adoption.loop import BatchLoop, LoopScope, Unfit
from headrace.api.adoption.syntax import FUNCTION, called, inner_statements, sets, text_of

_HARMLESS = {
    *("train", "eval", "zero_grad", "state_dict", "parameters", "named_parameters", "modules", "get_last_lr", "item"),
    *("print", "len", "str", "float", "int", "isinstance", "next", "iter", "save", "save_pretrained", "format", "id"),
    *("set_description", "set_postfix", "add_scalar", "add_scalars", "info", "log", "debug", "tqdm", "join", "getattr"),
    *("enumerate", "range", "sum", "time", "perf_counter", "write", "round", "no_grad", "inference_mode", "numel"),
    *("max", "min", "abs", "cpu", "detach", "deepcopy", "list", "dict", "tuple", "zip", "type", "hasattr"),
}
"""Functions that may be given what is trained, and leave it as it is."""
_TRAINED = ("data", "grad", "requires_grad", "lr", "param_groups")
_VALUES = {"get_last_lr", "item", "len", "float", "int", "str", "isinstance", "type", "numel", "round", "format", "id"}
"""Functions that return a number or a text, which no longer belongs to what is trained."""
_RATES = ("lr", "momentum", "weight_decay", "betas")


@dataclass(frozen=True)
class _Known:
    """What statements may not change, and the script's functions by name, where there is one of that name."""

    names: frozenset[str]
    functions: Mapping[str, ast.FunctionDef]
    seen: tuple[str, ...] = ()

    def touched(self, node: ast.AST) -> bool:
        """Tells whether an expression names something of the training, or an object that holds it."""
        if isinstance(node, ast.Call) and called(node) in _VALUES:
            return False
        if isinstance(node, ast.Call) and _chain(node.func) in self.names:
            return any(map(self.touched, (*node.args, *node.keywords)))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in _RATES:
            return False
        if isinstance(node, ast.Name | ast.Attribute):
            chain = _chain(node)
            if chain:
                return any(
                    chain == name or chain.startswith(f"{name}.") or name.startswith(f"{chain}.") for name in self.names
                )
        return any(self.touched(each) for each in ast.iter_child_nodes(node))

    def owns(self, node: ast.AST) -> bool:
        """Tells whether an expression is something of the training, or a part of it."""
        while isinstance(node, ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        chain = _chain(node)
        return any(chain == name or chain.startswith(f"{name}.") for name in self.names)


def beside(
    loop: BatchLoop, kept: Sequence[ast.stmt], made: set[str], arguments: Mapping[str, object]
) -> list[ast.stmt]:
    """Returns the statements of the loops, and those behind them, that a job leaves out.

    Args:
        kept: the statements that the job has.
        made: names of the objects that these make.
        arguments: what the script's parser has given.

    Raises:
        Unfit: one of those in the loops may change the training, or end it.
    """
    functions: dict[str, ast.FunctionDef] = {}
    for each in ast.walk(loop.scopes[0].node):
        if isinstance(each, ast.FunctionDef):
            functions[each.name] = each
    left, after, repeated = [], [], False
    for scope in loop.scopes:
        names = {*(name for role, name in scope.frame.names.items() if role != "arguments"), *made}
        known = _Known(frozenset(names), functions)
        inner = [*loop.body, *loop.after] if scope is loop.scopes[-1] else []
        statements = [*scope.within, *inner]
        if repeated:
            statements += [*scope.before, *scope.after]
        else:
            after += scope.after
        repeated = repeated or bool(scope.loops)
        for statement in statements:
            if (
                statement in kept
                or statement is scope.on
                or isinstance(statement, (*FUNCTION, ast.Import, ast.ImportFrom))
            ):
                continue
            seen = _living(statement, scope, arguments)
            reason = _effect(seen, known) or (statement in inner and _runs(seen, known)) or _ends(seen)
            if reason:
                raise Unfit(f"line {statement.lineno} {reason}: {text_of(statement).splitlines()[0]}")
            left.append(statement)
    _require_modes(loop)
    return sorted([*left, *after], key=lambda each: each.lineno)


def _require_modes(loop: BatchLoop) -> None:
    """Refuses a loop that goes on in eval mode after its first evaluation, where a job is in train mode."""
    calls = {called(each) for each in ast.walk(loop.scopes[0].node) if isinstance(each, ast.Call)}
    if "eval" in calls and "train" not in calls:
        raise Unfit("eval() is called and train() is not, so the model trains in eval mode, and a job's in train mode")


def _living(statement: ast.stmt, scope: LoopScope, arguments: Mapping[str, object]) -> list[ast.stmt]:
    """Returns what of a statement runs, where the script's arguments decide it."""
    if not isinstance(statement, ast.If):
        return [statement]
    test, turned = statement.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, turned = test.operand, True
    given = scope.frame.names.get("arguments")
    if isinstance(test, ast.Attribute) and text_of(test.value) == given and test.attr in arguments:
        chosen = statement.body if bool(arguments[test.attr]) != turned else statement.orelse
        return [each for one in chosen for each in _living(one, scope, arguments)]
    inside = [each for one in statement.body for each in _living(one, scope, arguments)]
    others = [each for one in statement.orelse for each in _living(one, scope, arguments)]
    return [ast.copy_location(ast.If(statement.test, inside or [ast.Pass()], others), statement)]


def _effect(nodes: Sequence[ast.AST], known: _Known) -> str:
    """Returns what statements do to what is trained; empty where that is nothing."""
    for node in _all(nodes):
        stored = isinstance(node, ast.Attribute | ast.Subscript | ast.Name) and not isinstance(node.ctx, ast.Load)
        if stored and (known.owns(node) or getattr(node, "attr", "") in _TRAINED):
            return "changes what is trained"
        key = node.slice if stored and isinstance(node, ast.Subscript) else None
        if isinstance(key, ast.Constant) and key.value in _RATES:
            return "sets what the optimizer goes by"
        if isinstance(node, ast.Call) and (reason := _effect_of_call(node, known)):
            return reason
    return ""


def _effect_of_call(node: ast.Call, known: _Known) -> str:
    name, function = called(node), node.func
    if name in ("backward", "step") or (name.endswith("_") and not name.endswith("__")):
        return f"calls {name}"
    own = isinstance(function, ast.Attribute) and known.touched(function.value)
    given = any(known.touched(each) for each in (*node.args, *(one.value for one in node.keywords)))
    if not (own or given) or name in _HARMLESS or (known.owns(function) and _is_model_call(node, known)):
        return ""
    defined = known.functions.get(name)
    if defined is None or known.owns(function):
        return f"may change the training by {name}"
    if name in known.seen:
        return ""
    inside = _Known(_handed(node, defined, known), known.functions, (*known.seen, name))
    reason = _effect(defined.body, inside)
    if not reason and _runs(defined.body, inside) and not _evaluates(defined):
        reason = "runs the model in train mode"
    return f"may change the training: {name} (line {defined.lineno}) {reason}" if reason else ""


def _handed(call: ast.Call, function: ast.FunctionDef, known: _Known) -> frozenset[str]:
    """Returns the names by which a function knows what it is given of the training, those of the script among them."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    given: list[ast.expr] = list(call.args)
    if names[:1] == ["self"] and isinstance(call.func, ast.Attribute):
        given.insert(0, call.func.value)
    pairs = [*zip(names, given, strict=False), *((each.arg or "", each.value) for each in call.keywords)]
    handed: set[str] = set()
    for name, value in pairs:
        chain = _chain(value)
        inner = [each[len(chain) :] for each in known.names if chain and each.startswith(f"{chain}.")]
        if known.owns(value) or (not chain and known.touched(value)):
            handed.add(name)
        handed |= {f"{name}{rest}" for rest in inner}
    # A function of the script sees its global names.
    return frozenset(handed | {name for name in known.names if name.partition(".")[0] not in names})


def _is_model_call(node: ast.Call, known: _Known) -> bool:
    return _chain(node.func) in known.names


def _runs(nodes: Sequence[ast.AST], known: _Known) -> str:
    """Tells whether statements run a model once more, which BatchNorm and random numbers would notice."""
    if any(isinstance(each, ast.Call) and _is_model_call(each, known) for each in _all(nodes)):
        return "runs the model once more"
    return ""


def _evaluates(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Call) and called(each) == "eval" for each in ast.walk(function))


def _ends(nodes: Sequence[ast.stmt]) -> str:
    """Tells whether a loop may end early, or leave out a part of a round."""
    for node in nodes:
        if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Raise):
            return "may end the loop before its last batch"
        if not isinstance(node, (*FUNCTION, ast.ClassDef, ast.For, ast.While)) and _ends(list(inner_statements(node))):
            return "may end the loop before its last batch"
    return ""


def _all(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for each in nodes:
        yield from ast.walk(each)


def _chain(node: ast.AST) -> str:
    """Returns "a.b" of such an expression; empty where it is another."""
    whole = node
    while isinstance(node, ast.Attribute):
        node = node.value
    return text_of(whole) if isinstance(node, ast.Name) else ""


def objects(kept: Sequence[ast.stmt]) -> set[str]:
    """Returns the names that statements bind to what a call returns."""
    made = [each for each in kept if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    return set().union(*(sets(each) for each in made)) - set().union(*(_plain(each) for each in made))


def _plain(statement: ast.Assign) -> set[str]:
    """Returns the names of a statement whose call makes a number or a text."""
    assert isinstance(statement.value, ast.Call)
    return (
        sets(statement) if called(statement.value) in ("len", "int", "float", "str", "max", "min", "round") else set()
    )
