"""How far the exported files of the zoo are from the trained models, and how large they are; see README.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from zoo import JOBS, Trained, trained

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine

from headrace.errors import HeadraceError, UnfitMachine
from headrace.export.browser.runtime import FILES
from headrace.export.choice import FORMATS, ExportChoice, choose
from headrace.export.opening import open_runner
from headrace.export.predictor import answering_form, inputs_of, predictor_of, run
from headrace.export.programs import ProgramRunner
from headrace.export.signature import Signature
from headrace.export.writing import MOST_DIFFERENT, examples_of, write_model

RESULTS = Path(__file__).parent / "results" / "fidelity.json"
TARGETS: dict[str, ExportChoice] = {
    "onnx": choose(formats=("onnx",)),
    "pt2": choose(formats=("pt2",)),
    "browser": choose("browser"),
    "pte": choose("mobile"),
    "tflite": choose("mobile", ("tflite",)),
    "onnx int8": choose(quantize="int8"),
    "pte int8": choose("mobile", quantize="int8"),
    "pte fp16": choose("mobile", quantize="fp16"),
}
EXACT = ("onnx", "pt2", "browser", "pte", "tflite")
"""Those that the target of 1e-4 is for."""
MOST_INT8, MOST_BROWSER = 0.3, 1.2


@dataclass
class Row:
    """One model for one target.

    Attributes:
        difference: the largest on the evaluation examples, relative to the largest value of the output; None where
            nothing was written.
        shorter: the same for sequences of half the length, where any length may come.
        bytes: of the file that computes, or of a browser's folder.
        rest: for a browser, the bytes of the model and of onnxruntime-web alone.
        before, after: metrics of the trained model and of a quantized file on the evaluation set.
        refused: why nothing was written.
    """

    model: str
    target: str
    difference: float | None = None
    shorter: float | None = None
    bytes: int = 0
    rest: int = 0
    before: Mapping[str, float] | None = None
    after: Mapping[str, float] | None = None
    refused: str = ""


class Examples:
    """The evaluation examples of a trained model, and what it returns for them."""

    def __init__(self, zoo: Trained) -> None:
        job, model = answering_form(zoo.job, zoo.model)
        batches = examples_of(job)
        self._predictor, _ = predictor_of(job, model, batches[0])
        self.inputs = [inputs_of(job, self._predictor.model, batch).tensors for batch in batches]
        self.count = sum(len(next(iter(each.values()))) for each in self.inputs)

    def apart(self, runner: ProgramRunner, halved: bool = False) -> float:
        """Returns the largest difference of a file from the trained model."""
        most = 0.0
        for inputs in self.inputs:
            given = {name: tensor[:, : tensor.shape[1] // 2] if halved else tensor for name, tensor in inputs.items()}
            given = {name: tensor.contiguous() for name, tensor in given.items()}
            found = runner.run(given)
            for name, wanted in run(self._predictor, given).items():
                most = max(most, _apart(found[name], wanted))
        return most

    def write(self, folder: Path) -> list[Path]:
        """Writes each batch with the model's outputs as a file."""
        paths = []
        for index, inputs in enumerate(self.inputs):
            tensors = {f"input/{name}": tensor.contiguous() for name, tensor in inputs.items()}
            outputs = run(self._predictor, inputs)
            tensors |= {f"output/{name}": tensor.contiguous() for name, tensor in outputs.items()}
            paths.append(folder / f"examples-{index}.safetensors")
            save_file(tensors, paths[-1])
        return paths


def _apart(found: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point():
        return (found != wanted).double().mean().item()
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=torch.finfo(torch.float32).tiny)).item()


def measured(name: str, target: str, zoo: Trained, examples: Examples, place: Path) -> Row:
    """Exports one model for one target, and compares it with the trained one."""
    row, choice = Row(name, target), TARGETS[target]
    folder = place / target.replace(" ", "-")
    try:
        made = write_model(zoo.job, zoo.model, folder, Signature(name="zoo", inputs=(), outputs=()), choice)
    except UnfitMachine as error:
        row.refused = f"not here: {error}"
        return row
    except HeadraceError as error:
        row.refused = str(error)
        return row
    file = folder / FORMATS[choice.formats[0]]
    if target == "browser":
        row.difference = _under_node(folder, examples)
        row.bytes = sum(path.stat().st_size for path in folder.iterdir())
        row.rest = sum((folder / each).stat().st_size for each in (file.name, *FILES))
    else:
        runner = open_runner(file, made.inputs, made.outputs)
        row.difference = examples.apart(runner)
        row.bytes = file.stat().st_size
        if all(form.shape[1:2] == (-1,) for form in made.inputs):
            row.shorter = examples.apart(runner, halved=True)
    if made.quantized is not None:
        row.before, row.after = made.quantized.before, made.files[file.name].metrics
    return row


def _under_node(folder: Path, examples: Examples) -> float:
    (folder / "package.json").write_text('{"type": "module"}')
    with tempfile.TemporaryDirectory() as place:
        command = ["node", Path(__file__).with_name("node.mjs"), folder, *examples.write(Path(place))]
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    (folder / "package.json").unlink()
    return float(found)


def show(rows: list[Row]) -> None:
    """Prints the table, what was refused, and which targets are reached."""
    models = list(dict.fromkeys(row.model for row in rows))
    targets = [each for each in TARGETS if any(row.target == each for row in rows)]
    found = {(row.model, row.target): row for row in rows}
    print("| model | " + " | ".join(targets) + " |\n|---|" + "--:|" * len(targets))
    for model in models:
        print(f"| {model} | " + " | ".join(_cell(found.get((model, each))) for each in targets) + " |")
    for row in rows:
        if row.refused:
            print(f"{row.model}, {row.target}: {row.refused}")
        for metric, before in (row.before or {}).items():
            print(f"{row.model}, {row.target}: {metric} {before:.4f} before, {(row.after or {})[metric]:.4f} after")
        if row.rest:
            ratio = row.bytes / row.rest
            print(f"{row.model}, folder: {ratio:.3f} x the model and onnxruntime-web (target {MOST_BROWSER})")
        whole = found.get((row.model, row.target.split()[0]))
        if row.target not in EXACT and row.bytes and whole and whole.bytes:
            target = f" (target {MOST_INT8})" if row.target == "pte int8" else ""
            print(f"{row.model}, {row.target}: {row.bytes / whole.bytes:.3f} x the file in single precision{target}")
    exact = [row for row in rows if row.target in EXACT and row.difference is not None]
    worst = max((max(row.difference or 0, row.shorter or 0) for row in exact), default=0.0)
    print(f"largest difference of {len(exact)} files: {worst:.1e} (target {MOST_DIFFERENT:.0e})")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.difference is None:
        return "not here" if row.refused.startswith("not here") else "refused"
    return f"{row.difference:.1e}" + ("" if row.shorter is None else f" ({row.shorter:.1e})")


def keep(row: Row) -> None:
    """Adds a figure to those of earlier calls, for no interpreter has every converter."""
    if row.refused.startswith("not here"):
        return
    rows = [each for each in kept() if (each.model, each.target) != (row.model, row.target)] + [row]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**machine(), "rows": [asdict(each) for each in rows]}, indent=1) + "\n")


def kept() -> list[Row]:
    """Returns the figures of all calls, in the order of the table."""
    found = [Row(**each) for each in json.loads(RESULTS.read_text())["rows"]] if RESULTS.is_file() else []
    return sorted(found, key=lambda row: (list(JOBS).index(row.model), list(TARGETS).index(row.target)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(JOBS), choices=JOBS)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--keep", action="store_true", help="merge the figures into results/")
    chosen = parser.parse_args()
    rows = []
    for name in chosen.models:
        zoo = trained(name)
        examples = Examples(zoo)
        with tempfile.TemporaryDirectory() as place:
            for target in chosen.targets:
                rows.append(measured(name, target, zoo, examples, Path(place)))
                told = f"{name}, {target}, {examples.count} examples: {_cell(rows[-1])} {rows[-1].refused}"
                print(told, file=sys.stderr, flush=True)
                if chosen.keep:
                    keep(rows[-1])
    show(kept() if chosen.keep else rows)
