"""A Trainer of the transformers library as a job: its model, data, optimizer and schedule."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from headrace.data.sources.torch import from_torch
from headrace.errors import UsageError
from headrace.machine.extras import import_package, remedy
from headrace.modules import copy_module, evaluating
from headrace.spec.job import Job
from headrace.spec.options import Options
from headrace.tasks import own_loss

_CHANGING = (
    *("deepspeed", "fsdp", "fp16", "neftune_noise_alpha", "torch_compile", "gradient_checkpointing"),
    *("dataloader_drop_last", "auto_find_batch_size", "label_smoothing_factor", "use_liger_kernel"),
    *("optim_target_modules", "parallelism_config", "load_best_model_at_end"),
)
"""Arguments that a job does not carry, where they are set."""
_QUIET = ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
_OWN = "write an hr.Job with hr.tasks.own_loss(ignore_index=-100), and what is left out as its fields"


def from_trainer(trainer: Any) -> Job:
    """Makes a job of a transformers Trainer: the numbers are those of its own run on one device.

    Carried are the model with its weights, the data with their collator, the optimizer with its groups, schedule and
    warm-up, accumulation, clipping, epochs or steps, bf16 and the seed. A loss counts by tokens that are not -100. A
    Trainer that shuffles is shuffled by the job's seed, so in another order than its own. The evaluation's loss is the
    mean over tokens, where the Trainer's is the mean over batches.

    Args:
        trainer: a `Trainer` that has not trained; it stays as it is.

    Raises:
        UsageError: it does something that a job does not carry; the message names it, and what to do.
        UnfitMachine: the transformers library is missing.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> sizes = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> texts = [{"input_ids": torch.arange(8), "labels": place % 2} for place in range(32)]
        >>> settings = TrainingArguments("out", use_cpu=True, report_to=[], max_steps=4)
        >>> trainer = Trainer(BertForSequenceClassification(sizes), settings, train_dataset=texts)
        >>> hr.from_trainer(trainer).global_batch_size
        8
    """
    library = import_package("transformers", "from_trainer needs transformers", remedy("transformers"))
    if not isinstance(trainer, library.Trainer):
        raise UsageError(f"from_trainer takes a transformers Trainer, got {type(trainer).__name__}")
    _refuse(trainer, library.Trainer)
    args = trainer.args
    loader = _loader(trainer.get_train_dataloader(), args.per_device_train_batch_size)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else None
    data = from_torch(loader)
    rounds = steps or math.ceil(args.num_train_epochs * math.ceil(len(data) / batch))
    model = copy_module(trainer.model).cpu()
    if args.gradient_accumulation_steps > 1:
        _require_items(trainer, model, next(iter(loader)))
    kind, settings = trainer.get_optimizer_cls_and_kwargs(args, model)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or "params" in settings:
        raise UsageError(f"optim={str(args.optim)!r} makes its own groups of parameters; {_OWN}")
    decayed = frozenset(trainer.get_decay_parameter_names(model))
    evaluated = trainer.eval_dataset
    return Job(
        model=model,
        optimizer=functools.partial(_optimizer_of, kind, settings, decayed, args.weight_decay),
        data=data,
        eval_data=None
        if evaluated is None
        else from_torch(_loader(trainer.get_eval_dataloader(), args.per_device_eval_batch_size)),
        task=own_loss(ignore_index=-100, shifted=_is_causal(model)),
        global_batch_size=batch,
        steps=rounds,
        seed=args.seed,
        options=Options(
            clip_norm=args.max_grad_norm or None,
            accumulate=args.gradient_accumulation_steps,
            schedule=_schedule_of(library, args, rounds),
            precision="bf16" if args.bf16 else "fp32",
        ),
    )


def _schedule_of(library: Any, args: Any, rounds: int) -> functools.partial[Any]:
    """Returns what a schedule is made of, without the trainer."""
    return functools.partial(
        library.get_scheduler,
        args.lr_scheduler_type,
        num_warmup_steps=args.get_warmup_steps(rounds),
        num_training_steps=rounds,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def _refuse(trainer: Any, base: type) -> None:
    for name in dir(base):
        if not name.startswith("__") and name in {key for owner in _above(trainer, base) for key in vars(owner)}:
            raise UsageError(f"{type(trainer).__name__} defines {name}, and a job has no such method; {_OWN}")
    args = trainer.args
    if found := [name for name in _CHANGING if getattr(args, name, None)]:
        raise UsageError(
            f"TrainingArguments({found[0]}={getattr(args, found[0])!r:.60}) is not carried by a job; leave it out, and "
            "give hr.fit a strategy, or hr.Options what it has"
        )
    wrong = [each for each in trainer.callback_handler.callbacks if type(each).__name__ not in _QUIET]
    wrong = [each for each in wrong if not type(each).__module__.startswith("transformers.integrations")]
    if wrong:
        raise UsageError(f"the callback {type(wrong[0]).__name__} may change the loop; write an hr.Callback")
    for name in ("compute_loss_func", "compute_metrics", "optimizer", "lr_scheduler", "model_init"):
        if getattr(trainer, name, None) is not None:
            raise UsageError(f"the Trainer was given {name}; {_OWN}")


def _require_items(trainer: Any, model: nn.Module, batch: Any) -> None:
    """Refuses micro-batches of a model whose loss is not divided by the items of all of them."""
    losses = [1.0, 0.0]
    if trainer.model_accepts_loss_kwargs:
        with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices=[]):
            losses = [float(model(**batch, num_items_in_batch=torch.tensor(count))["loss"]) for count in (8, 16)]
    if not math.isclose(losses[0], 2 * losses[1], rel_tol=1e-3):
        raise UsageError(
            f"gradient_accumulation_steps={trainer.args.gradient_accumulation_steps}: the loss of "
            f"{type(model).__name__} leaves num_items_in_batch aside, so the Trainer weighs micro-batches otherwise "
            "than a job, which weighs tokens; use 1, with a larger batch"
        )


def _above(trainer: Any, base: type) -> tuple[type, ...]:
    order = inspect.getmro(type(trainer))
    return order[: order.index(base)]


def _loader(prepared: DataLoader[Any], batch: int) -> DataLoader[Any]:
    """Returns a plain loader of what the Trainer's own reads."""
    sampler = getattr(prepared.batch_sampler, "sampler", prepared.sampler)
    shuffles = isinstance(sampler, RandomSampler)
    if not shuffles and not isinstance(sampler, SequentialSampler):
        raise UsageError(
            f"the Trainer reads by a {type(sampler).__name__}, and a job shuffles or goes in order; {_OWN}"
        )
    return DataLoader(prepared.dataset, batch, shuffle=shuffles, collate_fn=prepared.collate_fn)


def _is_causal(model: nn.Module) -> bool:
    names = import_package("transformers.models.auto.modeling_auto", "from_trainer needs transformers")
    return type(model).__name__ in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _optimizer_of(kind: Any, settings: Any, decayed: frozenset[str], decay: float, named: Any) -> Any:
    """Makes the Trainer's two groups: what decays, and the rest."""
    named = [(name, each) for name, each in named if each.requires_grad]
    groups = [
        {"params": [pair for pair in named if pair[0] in decayed], "weight_decay": decay},
        {"params": [pair for pair in named if pair[0] not in decayed], "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], **settings)
