"""What an error that says no more than "out of memory" means: where it was, what was there, and what would fit.

All of it is found when it has happened, from the frames of the error and from what is left of the graph of backward.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.devices import HOST
from headrace.errors import UnfitMachine
from headrace.machine.accelerators import memory_in_use
from headrace.machine.resources import resident_bytes, spare_memory_bytes
from headrace.modules import memory_of
from headrace.spec.options import SELECTIVE
from headrace.spec.plan import Role, has_stages
from headrace.trees import tensors_of
from headrace.worker.evaluations.evaluation import Evaluation
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import WorkerSession

_BUILDING = "while the model was built"
_REST = "activations and all else about"
_FORWARD, _BACKWARD, _UPDATE, _EVALUATION = "forward", "backward", "the optimizer's step", "an evaluation"


def explained(error: BaseException, run: RunSpec, role: Role, session: WorkerSession | None) -> UnfitMachine:
    """Returns what an error that says that memory ran out means."""
    where = f"{role.device} of {role.host}"
    if isinstance(error, UnfitMachine):
        # What explains itself, a stage.
        begun = session.progress.begun + 1 if session else 0
        return UnfitMachine(f"{where}, step {begun}: {error.what()}").with_remedy(error.remedy)
    module = session.replica.compute.module if session else None
    phase, layer = _place(error, module)
    if session is None or module is None:
        return UnfitMachine(f"{where} ran out of memory {_BUILDING}: {_said(error)}").with_remedy(
            f"what needs less: {_fewer_copies(run, role)}"
        )
    share, options = session.progress.share, run.job.options
    of = f"of {share.examples} example{'s' * (share.examples != 1)}" if share.examples else "without examples"
    batch = f"round {session.progress.begun}, epoch {share.epoch}, a share {of}"
    done = f" after step {session.progress.done}"
    step = f"in {phase}" + (done if phase == _EVALUATION else f" of step {session.progress.begun + 1} ({batch})")
    at = f", at {layer}" if layer else ""
    held = _held(session, module, role)
    amounts = ", ".join(f"{name} {count:,}" for name, count in held.items())
    less = "; ".join(_remedies(run, role, held, phase, -(-share.examples // max(1, options.accumulate))))
    return UnfitMachine(f"{where} ran out of memory {step}{at}: {_said(error)}. In bytes: {amounts}").with_remedy(
        f"what needs less: {less}"
    )


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{text:.300}" or "no more memory"


def _place(error: BaseException, module: nn.Module | None) -> tuple[str, str]:
    """Returns the phase and the path of the module in which memory ran out; "" where no module was at work."""
    names = {id(part): name for name, part in module.named_modules()} if module is not None else {}
    phase, layer, roots = "", "", list[Any]()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, place = frame.f_locals.get("self"), str(frame.f_globals.get("__name__"))
        if isinstance(owner, Evaluation):
            phase = _EVALUATION
        elif isinstance(owner, torch.optim.Optimizer):
            phase = phase or _UPDATE
        elif place.startswith("torch.autograd"):
            phase = _BACKWARD
        elif id(owner) in names:
            phase, layer = phase or _FORWARD, f"{names[id(owner)] or 'the model'!r} ({type(owner).__name__})"
        if phase != _BACKWARD:
            tensors = [each for each in frame.f_locals.values() if isinstance(each, Tensor)]
            roots = [each.grad_fn for each in tensors if each.grad_fn is not None] or roots
    if phase == _BACKWARD and not _within(error, names):
        layer = _unfinished(roots, module)
    return phase or _UPDATE, layer


def _within(error: BaseException, names: Mapping[int, str]) -> bool:
    """Tells whether backward has called a module: what forward did not keep is computed again."""
    begun = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        begun = begun or str(frame.f_globals.get("__name__")).startswith("torch.autograd")
        if begun and id(frame.f_locals.get("self")) in names:
            return True
    return False


def _unfinished(roots: list[Any], module: nn.Module | None) -> str:
    """Returns the layer of the first node of backward that still has what forward saved for it."""
    paths = {id(each): name for name, each in module.named_parameters()} if module is not None else {}
    for node in _in_order(roots):
        if _is_kept(node):
            name = next((paths[id(each)] for each in _parameters(node) if id(each) in paths), "")
            return f"{name.rpartition('.')[0] or name or 'a node'!r} ({node.name()})"
    return ""


def _in_order(roots: list[Any]) -> Iterator[Any]:
    """Yields the nodes of a graph, each when all that come before it in backward have been."""
    waiting: dict[Any, int] = {}
    rest, seen = list(roots), set(roots)
    while rest:
        for after, _ in rest.pop().next_functions:
            if after is not None:
                waiting[after] = waiting.get(after, 0) + 1
                if after not in seen:
                    seen.add(after)
                    rest.append(after)
    ready = [root for root in dict.fromkeys(roots) if not waiting.get(root)]
    for node in ready:
        yield node
        for after, _ in node.next_functions:
            if after is not None:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)


def _is_kept(node: Any) -> bool:
    """Tells whether a node has tensors of forward; a node that backward has passed has released them."""
    for name in dir(node):
        if name.startswith(internals.SAVED) or name == "saved_tensors":
            try:
                if tensors_of(getattr(node, name)):
                    return True
            except RuntimeError:
                return False
    return False


def _parameters(node: Any) -> Iterator[Any]:
    """Yields the parameters that a node and those after it lead to, the nearest first."""
    rest, seen = [node], {node}
    for each in rest:
        if (variable := getattr(each, "variable", None)) is not None:
            yield variable
        for after, _ in each.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                rest.append(after)


def _held(session: WorkerSession, module: nn.Module, role: Role) -> dict[str, int]:
    """Returns what is where memory ran out, in bytes."""
    device, exchange = torch.device(role.device), session.replica.exchange
    own = [each for each in (*module.parameters(), *module.buffers()) if each.device.type == device.type]
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    held = {
        "parameters": _bytes_of(own),
        "gradients": max(_bytes_of(gradients), exchange.gradient_bytes),
        "optimizer state": exchange.memory()[1],
    }
    if device.type == HOST:
        total, free = resident_bytes(), spare_memory_bytes()
    else:
        total, free = memory_in_use(device)
    if not total:
        return held
    return {**held, _REST: max(0, total - sum(held.values())), "in use": total, "free": free}


def _bytes_of(tensors: list[Tensor]) -> int:
    """Returns the bytes of tensors, of which several may have one memory."""
    return sum({memory_of(each): each.untyped_storage().nbytes() for each in tensors}.values())


def _remedies(run: RunSpec, role: Role, held: Mapping[str, int], phase: str, examples: int) -> Iterator[str]:
    options, activations = run.job.options, held.get(_REST, 0)
    of_state = [_fewer_copies(run, role)]
    if phase == _EVALUATION:
        yield from ("Options(eval_batch_size=...), of the examples of one evaluation batch a worker", *of_state)
        return
    of_activations = list(_fewer_activations(run, examples, activations, role.device == HOST))
    steady = held["parameters"] + held["gradients"] + held["optimizer state"]
    first_state = phase == _UPDATE or steady > activations
    yield from (*of_state, *of_activations) if first_state else (*of_activations, *of_state)
    if options.precision == "fp32":
        yield "Options(precision='bf16'), which halves most activations"


def _fewer_activations(run: RunSpec, examples: int, activations: int, on_host: bool) -> Iterator[str]:
    accumulate = run.job.options.accumulate
    if has_stages(run.plan):
        yield "more micro_batches, or recompute='always'"
    elif examples > 1:
        half = -(-examples // 2)
        about = f": about {activations * half // examples:,} for activations" if activations else ""
        yield f"Options(accumulate={accumulate * 2}), with micro-batches of {half} examples, not {examples}{about}"
    if has_stages(run.plan) or run.job.options.compile:
        yield "torch.utils.checkpoint(layer, x, use_reentrant=False) in the model, which computes activations again"
    elif run.job.options.again in (None, SELECTIVE):
        yield "Options(recompute='full'), which computes the activations of blocks again"
    if not (has_stages(run.plan) or run.job.options.compile or run.job.options.offloads or on_host):
        yield "Options(recompute='offload'), which keeps them in host memory"


def _fewer_copies(run: RunSpec, role: Role) -> str:
    name = run.strategy.name
    if "fully_sharded" in name:
        there = "" if role.device == HOST else ", or offload=True, which keeps these in host memory"
        return f"more workers, each with a smaller part of parameters, gradients and optimizer state{there}"
    where = "" if role.device == HOST else "; central_storage, which keeps the optimizer's state in host memory"
    return (
        "fully_sharded, under which each of N workers keeps 1/N of parameters, gradients and optimizer state, or an "
        f"optimizer that keeps less{where}"
    )
