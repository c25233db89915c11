"""Files by which other servers run an exported model: Triton, KServe, and `headrace serve` in a container."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError
from headrace.export.signature import Signature

_ONNX = "model.onnx"
_TRITON_TYPES = {
    "bool": "TYPE_BOOL",
    **{f"{sign}int{bits}": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
}
_MAX_BATCH, _MAX_WAIT_US = 32, 2000
_CLAIM = "models"


def write_deployment(folder: Path, facts: Signature, kind: str) -> tuple[Path, str]:
    """Writes what a server needs beside the files of an exported model; returns where, and what to do with it.

    Args:
        kind: "triton": a model repository; "kserve": a repository and an InferenceService; "docker": a Dockerfile.

    Raises:
        UsageError: an unknown kind, or the model has no ONNX file.
        UnfitMachine: the files cannot be written.
    """
    check_kind(kind)
    if _ONNX not in facts.files:
        raise UsageError(f"--for {kind} needs {_ONNX}; leave --formats as it is")
    try:
        return _WRITERS[kind](folder, facts)
    except OSError as error:
        raise UnfitMachine(f"cannot write to {folder}: {error.strerror or error}") from error


def check_kind(kind: str) -> None:
    """Raises UsageError for a server that nothing is written for."""
    if kind not in _WRITERS:
        raise UsageError(f"--for takes {', '.join(sorted(_WRITERS))}, got {kind!r}")


def triton_config(facts: Signature) -> str:
    """Returns `config.pbtxt`: the batch is no part of the shapes where Triton makes it."""
    lines = [f"name: {json.dumps(facts.name)}", 'backend: "onnxruntime"', f'default_model_filename: "{_ONNX}"']
    lines.append(f"max_batch_size: {_MAX_BATCH if facts.batched else 0}")
    for kind, forms in (("input", facts.inputs), ("output", facts.outputs)):
        for form in forms:
            # Triton wants one dimension at least: an input of one number an example is made from (batch, 1).
            dims = list(form.shape[1:] if facts.batched else form.shape)
            reshape = "" if dims else "  reshape: { shape: [ ] }\n"
            lines.append(
                f"{kind} {{\n  name: {json.dumps(form.name)}\n  data_type: {_TRITON_TYPES[form.dtype]}\n"
                f"  dims: {dims or [1]}\n{reshape}}}"
            )
    if facts.batched:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {_MAX_WAIT_US} }}")
    return "\n".join(lines) + "\n"


def _triton(folder: Path, facts: Signature) -> tuple[Path, str]:
    repository = folder / "triton"
    version = repository / facts.name / "1"
    version.mkdir(parents=True)
    for name in facts.files:
        if name.startswith(_ONNX):
            try:
                os.link(folder / name, version / name)
            except OSError:
                # The file system has no second names.
                shutil.copyfile(folder / name, version / name)
    (version.parent / "config.pbtxt").write_text(triton_config(facts), encoding="utf-8")
    return repository, f"tritonserver --model-repository {repository}"


def _kserve(folder: Path, facts: Signature) -> tuple[Path, str]:
    repository, _ = _triton(folder, facts)
    name = "".join(letter if letter.isalnum() else "-" for letter in facts.name.lower()).strip("-") or "model"
    # The server, and the weights twice, for they are read and then prepared.
    memory_mb = 512 + 2 * sum(file.bytes for file in facts.files.values()) // (1 << 20)
    manifest = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name[:63].rstrip("-")},
        "spec": {
            "predictor": {
                "model": {
                    "modelFormat": {"name": "triton"},
                    "protocolVersion": "v2",
                    "storageUri": f"pvc://{_CLAIM}/{facts.name}",
                    "resources": {"requests": {"cpu": "1", "memory": f"{memory_mb}Mi"}},
                }
            }
        },
    }
    path = folder / "inferenceservice.yaml"
    # JSON is YAML, and needs no library.
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return path, (
        f"copy the content of {repository} to {facts.name} in the volume claim {_CLAIM!r}, or name another storageUri; "
        f"then kubectl apply -f {path}"
    )


def _docker(folder: Path, facts: Signature) -> tuple[Path, str]:
    path = folder / "Dockerfile"
    packages = "httptools onnxruntime orjson prometheus-client starlette uvicorn uvloop"
    packages += " msgspec numpy rich safetensors typer"
    path.write_text(
        "# The server does without torch, which headrace names among its packages: hence --no-deps.\n"
        "FROM python:3.12-slim\n"
        f"RUN pip install --no-cache-dir --no-deps headrace && pip install --no-cache-dir {packages}\n"
        "RUN useradd --create-home server\n"
        "USER server\n"
        "COPY model.onnx* sample.safetensors signature.json /model/\n"
        "EXPOSE 8000\n"
        "# --public: who reaches the port may ask; set HEADRACE_SERVE_TOKEN where a token should be named.\n"
        'ENTRYPOINT ["headrace", "serve", "/model", "--host", "0.0.0.0", "--public"]\n',
        encoding="utf-8",
    )
    return path, f"docker build -t {facts.name.lower()} {folder} && docker run -p 8000:8000 {facts.name.lower()}"


_WRITERS: Mapping[str, Callable[[Path, Signature], tuple[Path, str]]] = {
    "docker": _docker,
    "kserve": _kserve,
    "triton": _triton,
}
