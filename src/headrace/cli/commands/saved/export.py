"""`headrace export`: the trained model of a run as files that run without headrace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.jobfile import check_file, load_job
from headrace.cli.options import JsonOption, SettingsOption, help_option
from headrace.cli.output import answering
from headrace.errors import UsageError
from headrace.report.format import byte_count
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    from headrace.export.signature import Signature

_EXAMPLES = """
  headrace export runs/a -o model
  headrace export runs/a -o model --step 120
  headrace export runs/a -o model --formats onnx --json | jq .files
"""


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The directory of a run.")],
    folder: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", show_default=False, help="Which is made; it must not exist."),
    ],
    formats: Annotated[
        str, typer.Option("--formats", metavar="NAME,NAME", help="pt2 (torch.export), onnx.")
    ] = "pt2,onnx",
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            min=0,
            show_default=False,
            help="Of a checkpoint of the run. [default: its end, or its newest checkpoint]",
        ),
    ] = None,
    job_file: Annotated[
        Path | None,
        typer.Option("--job", metavar="JOB.py", show_default=False, help="Where the run does not name its own."),
    ] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Write the trained model of a run as files that run without headrace.

    Each file is run on 100 examples beside the trained model, and the largest difference is shown. The folder holds
    model.pt2, model.onnx, sample.safetensors, and signature.json, which says what goes in and comes out.
    """
    with answering(as_json) as answer:
        # Lazily: they import torch.
        from headrace.api.exporting import export_run, source_of

        source = source_of(run)
        path = job_file or (Path(source.path) if source else None)
        if path is None:
            raise UsageError(
                f"the job of {run} comes from a program, not from a file: name a file that defines it by --job, or "
                "call run.export(...) in the program"
            )
        check_file(path, "job file")
        job = load_job(path, settings or (source.settings if source and not job_file else ()))
        signature = export_run(job, run, folder, tuple(filter(None, formats.split(","))), step)
        answer.give({"folder": str(folder), **to_plain(signature)}, "\n".join(_lines(folder, signature)))


def _lines(folder: Path, signature: Signature) -> list[str]:
    lines = [f"{folder}: {signature.task or 'model'}, trained under {signature.strategy}"]
    for word, forms in (("takes", signature.inputs), ("returns", signature.outputs)):
        told = ", ".join(
            f"{form.name} {form.dtype} ({', '.join('any' if n < 0 else str(n) for n in form.shape)})" for form in forms
        )
        lines.append(f"  {word:8}{told}")
    for name, file in signature.files.items():
        same = "" if file.difference is None else f"   differs by at most {file.difference:.1e} from the trained model"
        lines.append(f"  {name:20}{byte_count(file.bytes):>10}{same}")
    return lines + [f"note: {note}" for note in signature.notes]
