"""What a run leaves for its caller."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headrace.api.run_directory import TemporaryRunDir
from headrace.batches import call
from headrace.checkpoint import forms
from headrace.errors import CorruptCheckpoint, RunFailed, UnfitMachine, UsageError
from headrace.machine import disk
from headrace.modules import copy_module, is_dense, restore
from headrace.report.model.events import EventLog, read_log
from headrace.report.model.summary import Summary, summarize
from headrace.spec.events import Event
from headrace.spec.job import Job
from headrace.spec.plan import Plan
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.embeddings.local import load_rows, with_layers_of_torch
from headrace.worker.attributes import load_attributes
from headrace.worker.evaluations.loss import LOSS, LossOfModel, without_loss
from headrace.worker.run_spec import model_path
from headrace.worker.session import make_module

if TYPE_CHECKING:
    from headrace.export.signature import Signature


def _loss_of(run: Run) -> Any:
    if not isinstance(run.job.loss, LossOfModel):
        return run.job.loss
    # Loading the model takes it out.
    return vars(run)["_loss"] if run.model is not None else None


@dataclass(frozen=True)
class Run:
    """One training that has ended. Everything is read from the files of its directory.

    Attributes:
        job: what was trained.
        plan: who did what.
        run_dir: events, logs, `model.safetensors`.
        status: "ok", or "interrupted" where the user ended it early.
        template: the job's model before training.

    Examples:
        >>> run = hr.fit(job, hr.Mirrored(workers=2))
        >>> sorted(run.metrics)
        ['accuracy', 'loss']
        >>> run.predict(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    job: Job = field(repr=False)
    plan: Plan = field(repr=False)
    run_dir: Path
    status: str
    template: nn.Module = field(repr=False)
    # Of a run that was given no directory.
    _keeper: TemporaryRunDir | None = field(default=None, repr=False)

    cause = property(attrgetter("summary.outcome.cause"))
    """What has ended it before all its rounds were done, in the words of the terminal and the report; else ""."""

    remedy = property(attrgetter("summary.outcome.remedy"))
    """What to do next where it has not done all its rounds; "" where that is in the cause, or not known."""

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it early."""
        return self.status == "interrupted"

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode, on the CPU.

        Raises:
            RunFailed: no model was saved.
        """
        path, module = self._saved(), self._untrained()
        load_model(module, path)
        vars(self)["_loss"] = without_loss(module)
        named = self.plan.options.get("sparse")
        return with_layers_of_torch(module, named if isinstance(named, list | tuple) else ()).eval()

    loss = cached_property(_loss_of)
    """The job's loss; one that is a module with parameters or buffers as it was trained with the model."""

    def _saved(self) -> Path:
        path = model_path(self.run_dir)
        if not disk.is_file(path):
            raise RunFailed(
                f"there is no {path}: the run ended before a model was saved, or no worker was on this host: then name "
                "a run_dir on a file system of all hosts"
            )
        return path

    def _untrained(self) -> nn.Module:
        try:
            module = copy_module(self.template)
        except Exception:
            if isinstance(self.job.model, nn.Module):
                raise
            # Of a lock or an open file there is no copy.
            with torch.random.fork_rng(devices=[]):
                module = make_module(self.job)
        if any(each.is_meta for each in module.parameters()):
            from headrace.training.deferred.parts import with_memory

            with_memory(module)
        return module

    @cached_property
    def summary(self) -> Summary:
        """What the events say, in numbers."""
        return summarize(self.run_dir, self._log)

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation; {} if there was none."""
        evaluations = self.summary.curves.evaluations
        return dict(evaluations[-1].metrics) if evaluations else {}

    @property
    def throughput(self) -> float | None:
        """Examples a second of all workers, without warm-up and evaluations; None for a run too short to say."""
        return self.summary.training.examples_per_s

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every event of every process, by time."""
        return self._log.events

    @cached_property
    def _log(self) -> EventLog:
        return read_log(self.run_dir)

    def predict(self, batch: Any) -> Any:
        """Returns predictions for a batch in the form that the data has: the task's activation of the output."""
        with torch.no_grad():
            output = call(self.model, batch, self.job.inputs)
        return self.job.task.activation(output) if self.job.task else output

    def save_pretrained(self, path: Path | str, tokenizer: Any = None) -> Path:
        """Saves the trained model as a directory of safetensors files.

        That of a job with `weights` has the layout of these: the same names in files of the same names, with the index,
        and what else is in their folder, such as `config.json`. A model of the transformers library is saved as
        `from_pretrained` reads it; one of the peft library as that saves it: its adapters, without the base.

        Args:
            path: of the directory, which is made: config.json, model.safetensors, and the tokenizer's files.
            tokenizer: saved beside the model, if given.

        Returns:
            The path.

        Raises:
            UsageError: the job has no weights and its model is none of these libraries, `path` is where its weights
                are, parameters were trained that are not the adapters', or the tokenizer cannot be saved.
            RunFailed: no model was saved.
            UnfitMachine: the directory cannot be written.
        """
        # A model of a library has imported it.
        library, peft = map(sys.modules.get, ("transformers.modeling_utils", "peft"))
        known = library is not None and isinstance(self.template, library.PreTrainedModel)
        adapters = peft is not None and isinstance(self.template, peft.PeftModel)
        if self.job.weights is None and not known and not adapters:
            raise UsageError(
                f"save_pretrained is for jobs with weights and models of the transformers and peft libraries, and the "
                f"job's is a {type(self.template).__name__}; if it contains one, call "
                "run.model.<its name>.save_pretrained(...); run.model is the trained model, and model.safetensors in "
                "run.run_dir has its weights"
            )
        saves = getattr(tokenizer, "save_pretrained", None)
        if tokenizer is not None and not callable(saves):
            raise UsageError(
                f"a tokenizer is saved by its save_pretrained, and {type(tokenizer).__name__} has none; wrap one of "
                "the tokenizers library: PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
            )
        path = Path(path)
        if disk.is_file(path):
            raise UsageError(f"{path} is a file; save_pretrained makes a directory: name another path")
        try:
            if adapters:
                from headrace.weights.adapters import save_adapters

                save_adapters(self.model, path)
            elif self.job.weights is not None:
                from headrace.spec.weights import Weights
                from headrace.weights.saving import save_like

                save_like(Weights.of(self.job.weights), self.template, self._saved(), path)
            else:
                self.model.save_pretrained(path)  # type: ignore[operator]
            if callable(saves):
                saves(path)
        except OSError as error:
            raise UnfitMachine(f"cannot save the model to {path}: {error.strerror or error}") from error
        return path

    def export(
        self,
        path: Path | str,
        formats: Sequence[str] | None = None,
        *,
        target: str = "server",
        labels: Sequence[str] = (),
        onnxruntime_web: Path | str | None = None,
        quantize: str | None = None,
    ) -> Signature:
        """Writes the trained model as files that run without headrace, after each was run beside it.

        Args:
            path: of the folder, which is made: the model's files, a sample, and `signature.json`, which says what goes
                in and comes out.
            formats: "pt2" (torch.export), "onnx"; of phones "pte" or "tflite"; None for those of the target.
            target: "server"; "browser": also a page that runs the model, for any static web server; "mobile":
                ExecuTorch with XNNPACK ("pte"), or LiteRT ("tflite").
            labels: names of the classes in the order of the outputs; for a model of texts, of its tokens.
            onnxruntime_web: for the page, an archive or a folder of that package; None to let npm fetch it.
            quantize: "int8" or "fp16" for smaller files; the signature has the metrics before and after.

        Returns:
            The signature, with the largest difference of each file from the trained model.

        Raises:
            UsageError: the folder exists already; an unknown format or target.
            JobError: the model cannot be exported, or a file computes something else.
            RunFailed: no model was saved.
            UnfitMachine: a library is missing, or the folder cannot be written.
        """
        from headrace.export.choice import choose
        from headrace.export.signature import Signature
        from headrace.export.writing import write_model

        choice = choose(target, formats, labels, onnxruntime_web, quantize)
        facts = Signature(
            name=self.run_dir.resolve().name if self._keeper is None else "model",
            inputs=(),
            outputs=(),
            task=self.job.task.name if self.job.task else "",
            strategy=self.plan.strategy,
            metrics=self.metrics,
        )
        return write_model(replace(self.job, loss=self.loss), self.model, Path(path), facts, choice)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        from headrace.report.views.page import page_fragment

        return page_fragment([self.summary])

    def report(self, path: Path | str | None = None) -> Path:
        """Writes the page of this run; returns where."""
        from headrace.report.views.page import write_page

        return write_page(path or self.run_dir / "report.html", [self.summary])


def load_model(module: nn.Module, path: Path) -> None:
    """Loads the tensors and the extra state of a whole model from `model.safetensors` of a run."""
    try:
        saved = forms.decode(load_file(path))
    except SafetensorError as error:
        raise CorruptCheckpoint(
            path, f"it is not the whole model that was saved: {error}", "name a checkpoint by --step, or train again"
        ) from None
    if not any(name.startswith(f"{LOSS}.") for name in saved):
        without_loss(module)
    # It also holds the versions of the modules' forms, which a module may ask for.
    state = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state.items():
            if isinstance(value, Tensor) and is_dense(value):
                state[name] = saved[name]
            elif isinstance(value, Tensor):
                restore(value, saved[name])
    unread = module.load_state_dict(state, strict=False)
    # What a module writes and does not read (bitsandbytes' scales of numbers in 4 bits) must be what it makes itself.
    made, others = module.state_dict(), unread.missing_keys
    others += [name for name in unread.unexpected_keys if not torch.equal(made[name], saved[name])]
    if others:
        raise UsageError(
            f"{path}: the model writes {', '.join(map(repr, others)):.200} and does not read it, and the job makes "
            "another one now; build the model from the base that it was trained on"
        )
    load_rows(sparse_layers(module), saved)
    forms.load_extra_states(module, saved)
    load_attributes(module, path.parent)
