"""The job file of a script: what makes the model, the optimizer and the data, as it stands there, and an `hr.Job`."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.api.adoption.beside import beside, objects
from headrace.api.adoption.devices import without_devices
from headrace.api.adoption.facts import Facts
from headrace.api.adoption.loop import BatchLoop, LoopScope, Unfit, find_loop
from headrace.api.adoption.step import JobStep, read_step
from headrace.api.adoption.syntax import DEFINITION, FUNCTION, called, needed, original, reads, sets, text_of

_WIDTH = 110


@dataclass(frozen=True)
class JobFile:
    """A job file's text, and what it does not have of the script, as lines with their numbers."""

    text: str
    left_out: tuple[str, ...]


def write_job(name: str, source: str, facts: Facts) -> JobFile:
    """Returns the job of a script.

    Args:
        name: the script's, as the job file names it.

    Raises:
        Unfit: it is none; the message says why.
    """
    _require_one(facts)
    tree = ast.parse(source)
    moved = without_devices(tree, facts)
    loop = find_loop(tree, facts)
    step = read_step(loop)
    writing = _Writing(loop, step, facts, source.splitlines(), moved)
    fields = writing.fields()
    made = [each for _, each in writing.kept]
    left = beside(loop, [*step.kept, *step.idle, *writing.carried, *made], objects(made), facts.arguments or {})
    return JobFile(writing.text(name, fields, left), tuple(_line_of(each) for each in left))


def _require_one(facts: Facts) -> None:
    for count, what in (
        (facts.optimizers, "optimizers make steps in turn"),
        (facts.passes, "backward passes are made before one update"),
        (facts.loaders, "loaders give batches to the loop"),
    ):
        if count > 1:
            raise Unfit(f"{count} {what}, and a job of a script has one")
    if facts.elsewhere:
        raise Unfit(f"the loop stands in another file, {facts.elsewhere}")
    if not facts.loop_line:
        raise Unfit("no DataLoader gives the batches; the script makes them itself")
    if not facts.examples or not facts.batch_size:
        raise Unfit("the loader has no number of examples, or no batch size of its own, and a job orders examples")
    if facts.order:
        raise Unfit(facts.order)


class _Writing:
    """Collects what a job file consists of."""

    def __init__(self, loop: BatchLoop, step: JobStep, facts: Facts, lines: Sequence[str], moved: set[int]) -> None:
        self.loop, self.step, self.facts, self.lines, self.moved = loop, step, facts, lines, moved
        self.carried: list[ast.stmt] = []
        self.aliases: list[ast.stmt] = []
        self.parsed: set[str] = set()
        self.evaluation = ""
        names = loop.names
        for role in ("model", "loader", "optimizer"):
            if role not in names:
                raise Unfit(f"line {loop.node.lineno}: the loop's function has no name for the {role}")

    def fields(self) -> dict[str, str]:
        """Returns the fields of the Job, and collects what they need."""
        names, step = self.loop.names, self.step
        options = self._options()
        wanted = step.needs | {names[role].partition(".")[0] for role in ("model", "loader", "optimizer")}
        wanted |= set().union(*(reads(ast.parse(each)) for each in options.values())) - {names["optimizer"]}
        schedule = self._schedule()
        self.kept = self._keep(wanted, schedule[0] if schedule else "")
        fields = {"model": step.model, **step.fields}
        fields["optimizer"] = self._optimizer()
        if schedule:
            options |= self._made_schedule(*schedule)
        fields["data"] = f"hr.data.from_torch({names['loader']})"
        if self.evaluation:
            fields["eval_data"] = f"hr.data.from_torch({self.evaluation})"
        fields["global_batch_size"] = f"{names['loader']}.batch_size"
        epochs = self.loop.epochs
        fields["epochs"] = _count(epochs) if epochs is not None else "1"
        if options:
            given = "".join(f"        {key}={value},\n" for key, value in options.items())
            fields["options"] = f"hr.Options(\n{given}    )"
        return fields

    def _options(self) -> dict[str, str]:
        """Finds what a round does after its backward pass: clipping, the optimizer's step, the schedule's."""
        names, options, steps = self.loop.names, dict[str, str](), 0
        for each in self.loop.after:
            call = each.value if isinstance(each, ast.Expr | ast.Assign) else None
            if not isinstance(call, ast.Call):
                continue
            name, on = called(call), text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if name == "step" and on == names.get("optimizer"):
                if call.args or call.keywords:
                    raise Unfit(f"line {each.lineno}: {text_of(call)}: a job's optimizer steps without a closure")
                steps += 1
            elif name in ("clip_grad_norm_", "clip_grad_value_"):
                most = [*call.args[1:], *(one.value for one in call.keywords)]
                if text_of(call.args[0]) != f"{names.get('model')}.parameters()" or len(most) != 1 or steps:
                    raise Unfit(
                        f"line {each.lineno}: {text_of(call)}: a job clips all gradients by their 2-norm or value"
                    )
                options["clip_norm" if name == "clip_grad_norm_" else "clip_value"] = text_of(most[0])
            elif name != "zero_grad":
                continue
            self.carried.append(each)
        self.carried += [each for each in self.loop.body if _is_expression(each, ("zero_grad", "train"))]
        # A job's model is in train mode by itself.
        modes = [(each, scope.frame.names.get("model")) for scope in self.loop.scopes for each in scope.before]
        self.carried += [each for each, model in modes if text_of(each) == f"{model}.train()"]
        if steps != 1:
            raise Unfit(f"line {self.loop.node.lineno}: the optimizer does not step once in every round")
        if list(options) == ["clip_norm", "clip_value"]:
            raise Unfit("it clips by norm and then by value, and a job by value first")
        return options

    def _schedule(self) -> tuple[str, str] | None:
        """Returns the schedule's name, and when it advances."""
        names = {role: name for role, name in self.loop.names.items() if role.startswith("schedule")}
        for scope in self.loop.scopes[:-1]:
            names |= {role: name for role, name in scope.frame.names.items() if role.startswith("schedule")}
        if len(names) > 1:
            raise Unfit(f"{len(names)} schedules change the rate of one optimizer: {', '.join(names.values())}")
        if not names:
            return None
        known = {scope.frame.names.get("schedule") for scope in self.loop.scopes}
        found: list[tuple[ast.stmt, str]] = [(each, "step") for each in self.loop.after]
        found += [(each, "epoch") for scope in self.loop.scopes for each in scope.within]
        for each, when in found:
            if _is_expression(each, ("step",)) and text_of(each.value.func.value) in known:  # type: ignore[attr-defined]
                if each.value.args or each.value.keywords:  # type: ignore[attr-defined]
                    raise Unfit(f"line {each.lineno}: {text_of(each)}: a job's schedule follows rounds or epochs alone")
                self.carried.append(each)
                return names["schedule"], when
        raise Unfit(f"the schedule {names['schedule']} does not advance in every round or every epoch")

    def _keep(self, wanted: set[str], schedule: str) -> list[tuple[LoopScope, ast.stmt]]:
        """Returns the statements before the loop that make what is wanted, from the script's down to the loop's."""
        kept: list[tuple[LoopScope, ast.stmt]] = []
        bound: dict[str, LoopScope] = {}
        globally: set[str] = set()
        scopes = self.loop.scopes
        for place in range(len(scopes) - 1, -1, -1):
            scope = scopes[place]
            used = [each for each in scope.frame.others if any(each in reads(one) for one in scope.within)]
            if len(used) == 1 and not self.evaluation:
                self.evaluation = used[0]
                wanted = wanted | {used[0]}
            if place == 0:
                wanted = wanted | globally
            wanted = wanted.union(*(reads(each.iter) for each in scope.epochs))
            if schedule and scope.frame.names.get("schedule") == schedule:
                wanted, schedule = wanted | {schedule.partition(".")[0]}, ""
            given_names = self._names("arguments")
            parsed = [each for each in scope.before if _parses(each, given_names)]
            before = [each for each in scope.before if each not in parsed and not _is_expression(each, ("train",))]
            mine, names = needed(before, wanted)
            if names & given_names and parsed:
                self.parsed = names & given_names
                names -= given_names
            outer: set[str] = set()
            aliases: list[ast.stmt] = []
            made = set[str]().union(*(sets(each) for each in mine))
            within = set[str]().union(*(sets(each) for each in (*scope.within, *(one.target for one in scope.epochs))))
            for name in sorted(names - made):
                if name in within and name not in (self.loop.number,):
                    raise Unfit(f"line {self.loop.node.lineno}: {name} is set in every epoch, and a job's step in none")
                given = self._given(scope, scopes[place - 1], name) if place else None
                if given is None:
                    globally.add(name)
                    continue
                outer |= reads(given)
                if text_of(given) != name:
                    aliases.append(ast.parse(f"{name} = {text_of(given)}").body[0])
            for name in made | {text_of(each.targets[0]) for each in aliases if isinstance(each, ast.Assign)}:
                if name in bound:
                    raise Unfit(f"{name} has two meanings, in {bound[name].frame.function} and {scope.frame.function}")
                bound[name] = scope
            for each in mine:
                if any(isinstance(one, ast.Global | ast.Nonlocal) for one in ast.walk(each)):
                    raise Unfit(f"line {each.lineno}: what the step needs sets names of the script by `global`")
            self.aliases += aliases
            kept = [*((scope, each) for each in aliases), *((scope, each) for each in mine), *kept]
            wanted = outer
        return kept

    def _given(self, scope: LoopScope, outer: LoopScope, name: str) -> ast.expr | None:
        """Returns what a function's parameter is given, where the function above calls it."""
        node = scope.node
        if not isinstance(node, ast.FunctionDef):
            return None
        parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if name not in parameters:
            return None
        calls = [
            each
            for each in ast.walk(outer.on or outer.node)
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name | ast.Attribute)
            and called(each) == node.name
        ]
        if len(calls) != 1 or any(isinstance(each, ast.Starred) for each in calls[0].args):
            raise Unfit(f"line {outer.frame.line}: what {node.name} is given as {name} cannot be read")
        for each in calls[0].keywords:
            if each.arg == name:
                return each.value
        given = calls[0].args
        if parameters[0] == "self" and isinstance(calls[0].func, ast.Attribute):
            given = [calls[0].func.value, *given]
        place = parameters.index(name)
        if place < len(given):
            return given[place]
        defaults = dict(
            zip(reversed([each.arg for each in node.args.args]), reversed(node.args.defaults), strict=False)
        )
        if name not in defaults:
            raise Unfit(f"line {outer.frame.line}: what {node.name} is given as {name} cannot be read")
        return defaults[name]

    def _optimizer(self) -> str:
        """Returns what makes the job's optimizer; the script's statement stays only where it is needed."""
        for place, (scope, each) in enumerate(self.kept):
            name = scope.frame.names.get("optimizer", "")
            others = [one for other, (_, one) in enumerate(self.kept) if other != place]
            alone = not any(name in reads(one) for one in others if not self._is_schedule(one))
            if not (
                isinstance(each, ast.Assign) and text_of(each.targets[0]) == name and isinstance(each.value, ast.Call)
            ):
                continue
            if self.facts.whole and alone and each.value.args and called(each.value)[:1].isupper():
                del self.kept[place]
                _first, *rest = each.value.args
                given = [*map(text_of, rest), *(text_of(one) for one in each.value.keywords)]
                return f"lambda parameters: {text_of(each.value.func)}({', '.join(['parameters', *given])})"
        names = next(scope.frame.names for scope in reversed(self.loop.scopes) if "optimizer" in scope.frame.names)
        return f"hr.optimizer_like({names['optimizer']}, {self.step.model})"

    def _is_schedule(self, statement: ast.stmt) -> bool:
        names = {scope.frame.names.get("schedule") for scope in self.loop.scopes}
        return bool(sets(statement) & names)

    def _made_schedule(self, name: str, when: str) -> dict[str, str]:
        scope, made = next((each for each in self.kept if name in sets(each[1])), (None, None))
        optimizer = scope.frame.names.get("optimizer") if scope else None
        if scope is None or not isinstance(made, ast.Assign) or optimizer is None or not optimizer.isidentifier():
            raise Unfit(f"what makes the schedule {name} is not one assignment beside the optimizer")
        self.kept = [each for each in self.kept if each[1] is not made]
        text = f"lambda {optimizer}: {text_of(made.value)}"
        return {"schedule": text, "schedule_every": repr(when)}

    def text(self, name: str, fields: Mapping[str, str], left: Sequence[ast.stmt]) -> str:
        """Returns the file."""
        outside, inside = self._placed()
        call = "\n".join(["hr.Job(", *(f"    {key}={value}," for key, value in fields.items()), ")"])
        parameters, values = self._arguments([*outside, *inside, *self.step.text, call])
        line = self.loop.node.lineno
        head = [
            f'"""The job of {name}, whose loop begins at line {line}. Its shuffled order is by the job\'s seed.',
            "",
        ]
        if left:
            head += ["A job has no place for these lines of the script:", ""]
            head += [f"    {_line_of(each)[:_WIDTH]}".replace('"""', "'''").replace("\\", "\\\\") for each in left]
        head = [*head, '"""', ""] if left else [f'{head[0]}"""', ""]
        future = [each for each in outside if each.startswith("from __future__")]
        texts = [each for each in outside if each not in future]
        imports = [each for each in texts if each.startswith(("import ", "from "))]
        if values and "import argparse" not in imports:
            imports.append("import argparse")
        if any("torch.nn.Module" in each for each in self.step.text) and "import torch" not in imports:
            imports.append("import torch")
        if "import headrace as hr" not in imports:
            imports.append("\nimport headrace as hr")
        others = [each for each in texts if not each.startswith(("import ", "from "))]
        body = [*values, *inside]
        for each in self.step.text:
            body += [*([""] if body[-1:] != [""] else []), each, ""] if "\n" in each else [each]
        body.append(f"return {call}")
        lines = [f"def job({', '.join(parameters)}):", *(textwrap.indent(each, "    ") for each in body)]
        blocks = ["\n".join([*head, *future, *imports]), *others, "\n".join(lines)]
        return "\n\n\n".join(each.strip("\n") for each in blocks) + "\n"

    def _placed(self) -> tuple[list[str], list[str]]:
        """Returns the statements that stand outside of `job`, and those inside."""
        definitions = [each for _, each in self.kept if _is_definition(each)]
        moved = set[str]().union(*(sets(each) for _, each in self.kept if each not in definitions))
        while True:
            dependent = [each for each in definitions if reads(each) & moved]
            if not dependent:
                break
            definitions = [each for each in definitions if each not in dependent]
            moved |= set[str]().union(*(sets(each) for each in dependent))
        outside = [self._text(each) for _, each in self.kept if each in definitions]
        inside = [self._text(each) for _, each in self.kept if each not in definitions]
        return outside, inside

    def _text(self, statement: ast.stmt) -> str:
        changed = any(statement.lineno <= line <= (statement.end_lineno or 0) for line in self.moved)
        return text_of(statement) if changed or statement in self.aliases else original(self.lines, statement)

    def _names(self, role: str) -> set[str]:
        return {name for scope in self.loop.scopes if (name := scope.frame.names.get(role))}

    def _arguments(self, texts: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the parameters of `job`, and the line that has them in the place of the script's own parser."""
        if not self.parsed:
            return [], []
        literals = self.facts.arguments or {}
        tree = ast.parse("\n".join(texts))
        held = [
            each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and text_of(each.value) in self.parsed
        ]
        whole = sum(isinstance(each, ast.Name) and each.id in self.parsed for each in ast.walk(tree)) > len(held)
        used = {each.attr for each in held}
        chosen = [key for key in literals if (whole or key in used) and key.isidentifier()]
        made = {each.attr for each in held if isinstance(each.ctx, ast.Store)}
        if missing := sorted(used - literals.keys() - made):
            raise Unfit(f"the argument {missing[0]} of the script is no literal")
        name, given = min(self.parsed), ", ".join(f"{key}={key}" for key in chosen)
        return [f"{key}={literals[key]!r}" for key in chosen], [f"{name} = argparse.Namespace({given})"]


def _is_expression(statement: ast.stmt, names: tuple[str, ...]) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and called(call) in names


def _is_definition(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
        return all(isinstance(each, ast.Name) and each.id.isupper() for each in statement.targets)
    return isinstance(statement, DEFINITION)


def _parses(statement: ast.stmt, names: set[str]) -> bool:
    return not isinstance(statement, FUNCTION) and bool(sets(statement) & names) and not isinstance(statement, ast.If)


def _count(loop: ast.For) -> str:
    """Returns how often a loop over epochs goes round."""
    given = loop.iter
    while isinstance(given, ast.Call) and called(given) in ("tqdm", "trange"):
        given = given.args[0] if called(given) == "tqdm" else ast.Call(ast.Name("range", ast.Load()), given.args, [])
    if not (isinstance(given, ast.Call) and called(given) == "range"):
        raise Unfit(f"line {loop.lineno}: how many epochs {text_of(given)} are is not known")
    if len(given.args) == 1:
        return text_of(given.args[0])
    return f"len({text_of(given)})"


def _line_of(statement: ast.stmt) -> str:
    return f"{statement.lineno:4d}  {text_of(statement).splitlines()[0]}"
