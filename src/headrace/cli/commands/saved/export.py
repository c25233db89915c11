"""`headrace export`: the trained model of a run as files that run without headrace."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.cli.command import argument, command, option
from headrace.cli.commands.saved.job_of_run import job_of_run
from headrace.cli.options import SettingsOption
from headrace.cli.output import Answer
from headrace.export.choice import choose, read_labels
from headrace.report.format import byte_count
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    from headrace.export.signature import Signature

_EXAMPLES = """
  headrace export runs/a -o model
  headrace export runs/a -o model --step 120
  headrace export runs/a -o model --formats onnx --json | jq .files
  headrace export runs/a -o model --quantize int8
  headrace export runs/a -o phone --target mobile --quantize int8
  headrace export runs/a -o phone --target mobile --formats tflite
  headrace export runs/a -o page --target browser --labels classes.txt
"""


class Precision(StrEnum):
    """What numbers are made smaller to."""

    INT8 = "int8"
    FP16 = "fp16"


class Target(StrEnum):
    """What an export is for."""

    SERVER = "server"
    BROWSER = "browser"
    MOBILE = "mobile"


_TargetOption = Annotated[
    Target, option("--target", "What will run it. browser: also a page that shows it; mobile: a phone.")
]
_FormatsOption = Annotated[
    str | None,
    option(
        "--formats NAME,NAME",
        "pt2 (torch.export), onnx; for mobile pte (ExecuTorch) or tflite (LiteRT). Default: those of the target.",
    ),
]
_LabelsOption = Annotated[
    Path | None, option("--labels FILE", "Names of the classes or of a text's tokens: one a line, or a JSON list.")
]
_WebOption = Annotated[
    Path | None,
    option(
        "--onnxruntime-web PATH",
        "For a browser: the archive that `npm pack` wrote, or the package's folder. Default: npm fetches it.",
    ),
]
_QuantizeOption = Annotated[
    Precision | None,
    option("--quantize", "Smaller numbers in the file. Shows the metrics on the evaluation set before and after."),
]
_ServerOption = Annotated[
    str | None, option("--for SERVER", "Also what triton, kserve or docker needs to run the model.")
]


@command(_EXAMPLES, "exporting the model")
def export(
    answer: Answer,
    run: Annotated[Path, argument("RUN", "The directory of a run.")],
    folder: Annotated[Path, option("--output -o FOLDER", "Which is made; it must not exist.")],
    target: _TargetOption = Target.SERVER,
    formats: _FormatsOption = None,
    labels: _LabelsOption = None,
    onnxruntime_web: _WebOption = None,
    step: Annotated[
        int | None,
        option("--step N", "Of a checkpoint of the run. [default: its end, or its newest checkpoint]", min=0),
    ] = None,
    job_file: Annotated[Path | None, option("--job JOB.py", "Where the run does not name its own.")] = None,
    server: _ServerOption = None,
    quantize: _QuantizeOption = None,
    settings: SettingsOption = None,
) -> None:
    """Write a trained model as files that run without headrace.

    Each file is run on 100 examples beside the trained model, and the largest difference is shown. The folder holds
    model.pt2, model.onnx, sample.safetensors, and signature.json, which says what goes in and comes out; for a browser
    also a page with onnxruntime-web.
    """
    # Lazily: they import torch.
    from headrace.api.exporting import export_run
    from headrace.export.deployment import check_kind, write_deployment

    choice = choose(
        target,
        None if formats is None else tuple(filter(None, formats.split(","))),
        () if labels is None else read_labels(labels),
        onnxruntime_web,
        quantize,
    )
    job = job_of_run(run, job_file, settings, otherwise="call run.export(...) in the program")
    if server is not None:
        check_kind(server)
    signature = export_run(job, run, folder, choice, step)
    document = {"folder": str(folder), **to_plain(signature)}
    lines = _lines(folder, signature)
    if server is not None:
        path, advice = write_deployment(folder, signature, server)
        document |= {"deployment": str(path), "advice": advice}
        lines.append(f"{path}: {advice}")
    answer.give(document, "\n".join(lines))


def _lines(folder: Path, signature: Signature) -> list[str]:
    lines = [f"{folder}: {signature.task or 'model'}, trained under {signature.strategy}"]
    for word, forms in (("takes", signature.inputs), ("returns", signature.outputs)):
        listed = ", ".join(
            f"{form.name} {form.dtype} ({', '.join('any' if n < 0 else str(n) for n in form.shape)})" for form in forms
        )
        lines.append(f"  {word:8}{listed}")
    for name, file in signature.files.items():
        same = "" if file.difference is None else f"   differs by at most {file.difference:.1e} from the trained model"
        lines.append(f"  {name:28}{byte_count(file.bytes):>10}{same}")
    lines += _cost(signature)
    if "index.html" in signature.files:
        lines.append(f"to see it: python -m http.server --bind 127.0.0.1 --directory {folder}")
    return lines + [f"note: {note}" for note in signature.notes]


def _cost(signature: Signature) -> list[str]:
    """Returns what quantizing did to the metrics."""
    made = signature.quantized
    if made is None:
        return []
    lines = [f"{made.kind}: {made.how}"]
    for name, file in signature.files.items():
        for metric, after in file.metrics.items():
            lines.append(f"  {name:28}{metric} {_figure(made.before[metric])} before, {_figure(after)} after")
    return lines


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
