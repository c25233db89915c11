"""What a run has left, as it is compared: its events, its checkpoints and its model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.api.run import Run
from headrace.api.verification.recording import KINDS, OF_RANKS, Tensors, Trained, by_kind, numbers_in, tensors_in
from headrace.checkpoint import CheckpointFolder
from headrace.spec.events import Stepped
from headrace.training.embeddings.pieces import blocks_of, is_row_piece
from headrace.training.optimizer import StatePiece
from headrace.training.update import AVERAGE


def read_run(run: Run) -> Trained:
    """Reads what a run has left: its events, its checkpoints and its model."""
    found = Trained(losses=losses_of(run), metrics=run.metrics)
    folder = CheckpointFolder(run.run_dir / "checkpoints")
    for step in folder.steps():
        checkpoint = folder.open(step)
        state: dict[str, Tensors] = {kind: {} for kind in KINDS}
        pieces = []
        settings = json.dumps(checkpoint.description["settings"]).encode()
        state[OF_RANKS] = {"settings": torch.frombuffer(bytearray(settings), dtype=torch.uint8)}
        for rank in reversed(checkpoint.ranks):
            tensors = checkpoint.read(rank)
            extra = numbers_in(tensors)
            state["extra state"] |= extra
            state[OF_RANKS] |= {f"rank {rank}/{name}": each for name, each in extra.items()}
            for kind, named in by_kind(tensors).items():
                state[kind] |= named
            for name, tensor in tensors.items():
                kind, _, own = name.partition("/")
                if kind == "state":
                    pieces.append(StatePiece.parse(own, tensor))
                if kind in ("own", "local") or AVERAGE in name:
                    state[OF_RANKS][f"rank {rank}/{own}"] = tensor
        state["optimizer state"] = _joined(pieces)
        found.rounds[step] = state
    found.model = tensors_in(run.model)
    return found


def losses_of(run: Run) -> list[float]:
    """Returns the loss of each round of a run, the mean over the global batch."""
    sums: dict[int, tuple[float, float]] = {}
    for event in sorted(run.events, key=lambda event: event.rank):
        if isinstance(event, Stepped):
            total, weight = sums.get(event.step, (0.0, 0.0))
            own = 0.0 if event.loss is None else event.weight
            sums[event.step] = total + (event.loss or 0.0) * own, weight + own
    return [total / weight if weight else 0.0 for _, (total, weight) in sorted(sums.items())]


def _joined(pieces: Sequence[StatePiece]) -> Tensors:
    """Returns whole tensors, flat, of the pieces of optimizer state that the ranks have saved."""
    parts: dict[str, dict[int, Tensor]] = {}
    for piece in pieces:
        if piece.key != AVERAGE and not is_row_piece(piece):
            parts.setdefault(f"{piece.parameter}/{piece.key}", {})[piece.start] = piece.value.flatten()
    found = {name: torch.cat([own[start] for start in sorted(own)]) for name, own in parts.items()}
    for table in {piece.parameter for piece in pieces if is_row_piece(piece)}:
        # In blocks, as the servers have them.
        blocks = list(blocks_of(pieces, table))
        order = torch.cat([block.ids for block in blocks]).argsort()
        found[f"{table}/rows"] = torch.cat([block.values for block in blocks])[order].flatten()
        found[f"{table}/row steps"] = torch.tensor(sorted({block.steps for block in blocks}))
        for key in blocks[0].state:
            found[f"{table}/{key}"] = torch.cat([block.state[key] for block in blocks])[order].flatten()
    return found
