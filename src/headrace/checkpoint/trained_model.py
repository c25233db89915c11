"""The file of the trained model at the end of a run: in the run's directory, or elsewhere where that cannot take it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace.checkpoint.forms import encode
from headrace.errors import UnfitMachine
from headrace.modules import is_dense, memory_of


def in_memory_of_their_own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors in host memory of which no two share any, as a file needs them; copies those alone that do."""
    found, seen = {}, set()
    for name, each in tensors.items():
        tensor = each.detach().cpu()
        if is_dense(tensor) and memory_of(tensor) not in seen and tensor.untyped_storage().nbytes() == tensor.nbytes:
            seen.add(memory_of(tensor))
        else:
            tensor = tensor.clone()
        found[name] = tensor
    return found


def save_model(
    module: nn.Module,
    saved: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],
    path: Path,
    place: tuple[int, str],
    remedy: str,
) -> None:
    """Writes a model's state to a file of a run's directory.

    Args:
        saved: the gathered tensors of the state.
        extra: what else there is.
        place: rank and host of this process.
        remedy: if nothing can be written.

    Raises:
        UnfitMachine: it could not be written; where another directory could take it, the message says which.
    """
    # A tensor may have several names in the module's state, and has one in a checkpoint.
    first = {id(parameter): f"parameter/{name}" for name, parameter in module.named_parameters()}
    first |= {id(buffer): f"buffer/{name}" for name, buffer in module.named_buffers()}
    state = module.state_dict(keep_vars=True)
    current = {name: saved.get(first.get(id(value), ""), value) for name, value in state.items()}
    tensors = in_memory_of_their_own({name: each for name, each in current.items() if isinstance(each, Tensor)})
    dense = {name: tensor.contiguous() for name, tensor in encode({**tensors, **extra}).items()}
    try:
        # It may have been deleted while the run trained.
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(dense, path, place[0])
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in dense.values())
        spare = _keep(dense, path.name, place[0])
        then = f"it is kept in {spare}" if spare else f"make room there, then {remedy}"
        who = f"rank {place[0]} on {place[1]}"
        what = f"{who} cannot save the trained model, {size:,} bytes, in {path.parent}: {error}"
        raise UnfitMachine(what).with_remedy(then) from None


def _write(tensors: Mapping[str, Tensor], path: Path, rank: int) -> Path:
    # A name of its own, because several hosts may have one file system.
    part = path.with_name(f"{path.name}.part-{rank}")
    try:
        save_file(dict(tensors), part)
        return part.rename(path)
    except (OSError, SafetensorError):
        with suppress(OSError):
            part.unlink()
        raise


def _keep(tensors: Mapping[str, Tensor], name: str, rank: int) -> Path | None:
    """Writes it to a temporary directory; returns the file, or None where that has no room either."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="headrace-model-"))
        return _write(tensors, folder / name, rank)
    except (OSError, SafetensorError):
        # The error that is raised is that of the run's directory.
        if folder:
            folder.rmdir()
        return None
