"""A LightningModule as a job: its steps are the model's forward, its optimizer and its schedule are the job's."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from headrace.data.sources.torch import from_torch
from headrace.errors import UsageError
from headrace.modules import copy_module
from headrace.spec.job import Job
from headrace.spec.options import Options

_CARRIED = {
    *("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "prepare_data"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "example_input_array"),
}
"""What a subclass may define. All else that LightningModule has changes what its Trainer does."""
_OF_A_TRAINER = {
    *("current_epoch", "global_step", "global_rank", "local_rank", "trainer", "fabric", "logger", "loggers"),
    *("optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"),
    *("all_gather", "device_mesh", "strict_loading", "automatic_optimization"),
}
"""Attributes that are wrong, or missing, without Lightning's Trainer."""
_LOOP = "use hr.launch with a loop of your own"


def from_lightning(
    module: Any,
    train_dataloader: Any = None,
    val_dataloader: Any = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    options: Options | None = None,
) -> Job:
    """Makes a job of a LightningModule: the numbers are those of Lightning's own Trainer on one device.

    The loss is that of `training_step`; `validation_step` gives the evaluation's, and what it logs gives the metrics.
    What `training_step` logs is left out. A loader that shuffles does so by the job's seed, not in Lightning's order.

    Args:
        module: with its weights, which the run starts from; it stays as it is.
        train_dataloader: a DataLoader, whose batch size is the global one; None for the module's own.
        val_dataloader: likewise; there is no evaluation where there is none.
        epochs, steps, seed: of the job, in the place of the Trainer's `max_epochs` and `max_steps`.
        options: of the job; `clip_norm` is the Trainer's `gradient_clip_val`. The schedule is the module's.

    Raises:
        UsageError: it does something that a job does not carry; the message names it, and what to do.

    Examples:
        >>> import lightning
        >>> class Digits(lightning.LightningModule):
        ...     def training_step(self, batch):
        ...         return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> module = Digits()
        >>> module.layers = torch.nn.Linear(4, 2)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*job.data), batch_size=16)
        >>> hr.fit(hr.from_lightning(module, loader, epochs=1)).status
        'ok'
    """
    base = _base_of(module)
    _refuse(module, base)
    training = _training_loader(module, base, train_dataloader)
    validation = _validation_loader(module, base, val_dataloader)
    template = copy_module(module)
    given = _with_schedule(options or Options(), template)
    model = LightningSteps(template)
    return Job(
        model=model,
        optimizer=functools.partial(_optimizer_of, template),
        data=from_torch(training),
        eval_data=None if validation is None else from_torch(validation),
        global_batch_size=training.batch_size or 1,
        loss=_loss,
        metrics=None if validation is None else _metrics(model, validation),
        inputs=_same,
        target=_same,
        epochs=epochs,
        steps=steps,
        seed=seed,
        options=given,
    )


def _training_loader(module: Any, base: type, given: Any) -> Any:
    loader = _loader(module, base, "train_dataloader", given)
    if loader is None:
        raise UsageError("there is no data: give a train_dataloader, or define the module's own")
    return loader


def _validation_loader(module: Any, base: type, given: Any) -> Any:
    loader = _loader(module, base, "val_dataloader", given)
    if loader is not None and loader.drop_last:
        raise UsageError("val_dataloader has drop_last=True, and an evaluation has all examples; leave it out")
    return loader


def _base_of(module: Any) -> type:
    base = next((each for each in type(module).__mro__ if each.__name__ == "LightningModule"), None)
    if base is None:
        raise UsageError(f"from_lightning takes a LightningModule, got {type(module).__name__}")
    return base


def _with_schedule(given: Options, template: Any) -> Options:
    if given.schedule is not None:
        raise UsageError("the schedule is that of configure_optimizers; leave it out of options, or out of the module")
    _, scheduler, every = configured(template)
    if scheduler is None:
        return given
    schedule = functools.partial(_scheduler_of, template)
    return Options(**{**vars(given), "schedule": schedule, "schedule_every": every})


class LightningSteps(nn.Module):
    """Takes a batch; returns the loss of `training_step`, or in eval mode that of `validation_step` and what it logs.

    Attributes:
        module: the LightningModule.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> dict[str, Any]:
        step = self.module.training_step if self.training else self.module.validation_step
        logged: dict[str, Any] = {}
        named = vars(self.module)
        named["log"], named["log_dict"] = functools.partial(_log, logged), functools.partial(_log_dict, logged)
        try:
            index = (_NoIndex(),) if len(inspect.signature(step).parameters) > 1 else ()
            result = step(batch, *index)
        finally:
            del named["log"], named["log_dict"]
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if loss is None and not self.training:
            loss = next((value for name, value in logged.items() if name.endswith("loss")), None)
        if not isinstance(loss, Tensor):
            raise UsageError(f"{step.__name__} must return the loss, or a dict with 'loss', got {loss!r:.60}")
        return {"loss": loss} if self.training else {"loss": loss, "logged": logged}


class _NoIndex:
    """The index of a batch: another one on each worker, so that a step may not depend on it."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(f"a step uses batch_idx, and a job has no index of a batch; {_LOOP}, which has worker.round")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __add__ = __sub__ = __mul__ = _refuse
    __floordiv__ = __truediv__ = __int__ = __index__ = __float__ = __bool__ = __hash__ = __str__ = __format__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rmod__ = __neg__ = _refuse


def configured(module: Any) -> tuple[torch.optim.Optimizer, Any, str]:
    """Returns what `configure_optimizers` makes: the optimizer, its scheduler or None, and when that advances.

    Raises:
        UsageError: there is none, or are several, or the schedule follows something else than steps or epochs.
    """
    made = module.configure_optimizers()
    schedulers: Any = ()
    if isinstance(made, Mapping):
        made, schedulers = made["optimizer"], made.get("lr_scheduler", ())
    elif isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], list):
        made, schedulers = made
    optimizers = list(made) if isinstance(made, tuple | list) else [made]
    schedulers = list(schedulers) if isinstance(schedulers, tuple | list) else [schedulers]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer) or len(schedulers) > 1:
        raise UsageError(
            f"configure_optimizers gives {len(optimizers)} optimizers or {len(schedulers)} schedules, and a job of a "
            "LightningModule has one optimizer and at most one schedule; write an hr.Job with a dict of optimizers"
        )
    settings = schedulers[0] if schedulers and isinstance(schedulers[0], Mapping) else {}
    scheduler = settings.get("scheduler") if settings else next(iter(schedulers), None)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError("ReduceLROnPlateau follows a metric; call moment.set_learning_rate_factor in an hr.Callback")
    if settings.get("frequency", 1) != 1 or settings.get("reduce_on_plateau"):
        raise UsageError("a schedule advances each step or each epoch; leave out frequency and reduce_on_plateau")
    return optimizers[0], scheduler, settings.get("interval", "epoch")


def _optimizer_of(template: Any, named: Any) -> torch.optim.Optimizer:
    """Calls `configure_optimizers` of a copy that has these parameters in the place of its own."""
    given = {name.removeprefix("module."): parameter for name, parameter in named}
    # A deep copy takes from the memo what is known to it.
    own = copy.deepcopy(template, {id(each): given.get(name) for name, each in template.named_parameters()})
    optimizer, scheduler, _ = configured(own)
    if scheduler is not None:
        # It has put its own there.
        vars(optimizer).pop("step", None)
    return optimizer


def _scheduler_of(template: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the schedule that `configure_optimizers` makes, for another optimizer of the same groups."""
    first, scheduler, _ = configured(template)
    for group, begun in zip(optimizer.param_groups, first.param_groups, strict=True):
        group.update({key: value for key, value in begun.items() if key not in ("params", "param_names")})
    return copy.deepcopy(scheduler, {id(first): optimizer})


def _refuse(module: Any, base: type) -> None:
    for name in sorted(set(dir(base)) - set(dir(nn.Module)) - _CARRIED):
        if name.startswith("_"):
            continue
        if inspect.getattr_static(type(module), name) is not inspect.getattr_static(base, name):
            raise UsageError(
                f"{type(module).__name__} defines {name}, which changes what Lightning's Trainer does, and a job has "
                f"no such hook; leave it out, or {_LOOP}"
            )
    if not module.automatic_optimization:
        raise UsageError(f"automatic_optimization=False: training_step updates the parameters itself; {_LOOP}")
    for owner in type(module).__mro__[: type(module).__mro__.index(base)]:
        for method in vars(owner).values():
            function = getattr(method, "fget", None) or getattr(method, "__func__", method)
            code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
            if not isinstance(code, CodeType) or code.co_name == "__init__":
                continue
            for line, name in _names_in(code):
                raise UsageError(
                    f"{code.co_filename}:{line}: {code.co_name} uses {name}, which Lightning's Trainer has; write the "
                    f"number into the module, or {_LOOP}"
                )


def _names_in(code: CodeType) -> Iterator[tuple[int, str]]:
    if found := sorted(_OF_A_TRAINER & {*code.co_names}):
        yield code.co_firstlineno, found[0]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _loader(module: Any, base: type, name: str, given: Any) -> DataLoader[Any] | None:
    defined = inspect.getattr_static(type(module), name) is not inspect.getattr_static(base, name)
    loader = getattr(module, name)() if given is None and defined else given
    if loader is None:
        return None
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise UsageError(
            f"{name} must be one DataLoader with a batch_size, got {loader!r:.60}; a job takes "
            "every example once in an epoch: write an hr.Job with a pipeline of hr.data"
        )
    return loader


def _metrics(model: LightningSteps, loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns a metric for each name that `validation_step` logs of one batch."""
    trial = copy.deepcopy(model).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        logged = trial(next(iter(loader)))["logged"]
    return {name: functools.partial(_logged, name=name) for name in logged if name != "loss"}


def _log(into: dict[str, Any], name: str, value: Any, *_: object, reduce_fx: Any = "mean", **_more: object) -> None:
    if not isinstance(value, Tensor | int | float) or reduce_fx != "mean":
        raise UsageError(
            f"self.log({name!r}) takes a number or a tensor whose mean over batches counts, got {type(value).__name__} "
            f"and reduce_fx={reduce_fx!r}; give metrics of torchmetrics to an hr.Job as metrics={{...}}"
        )
    into[name] = torch.as_tensor(value)


def _log_dict(into: dict[str, Any], values: Mapping[str, Any], *_: object, **more: Any) -> None:
    for name, value in values.items():
        _log(into, name, value, **more)


def _loss(output: Mapping[str, Any], _target: object) -> Any:
    return output["loss"]


def _logged(output: Mapping[str, Any], _target: object, name: str) -> Any:
    # Where a check runs the model in train mode nothing is logged.
    return output["logged"][name] if "logged" in output else output["loss"].detach()


def _same(batch: Any) -> Any:
    return batch
