"""The checkpoint room: what a run saves, so that a crash at any moment leaves something to go on from.

    <run>/checkpoints/
        step-00000100/                  a committed checkpoint
            rank-0.safetensors          what rank 0 saved: tensors by name
            rank-1.safetensors
            manifest.json               step, size and digest of every file, a description by the caller
        step-00000120.part/             one that is being written
        step-00000080.old/              one that is being deleted

Written aside, synced, renamed, the folder synced, only then are old ones deleted:

    begin ─► write (every rank) ─► commit: manifest ─► rename .part ─► sync ─► rename to .old ─► sync ─► delete

Nothing here imports torch before a tensor is written or read.
"""

from headrace.checkpoint.folder import Checkpoint, CheckpointFolder
from headrace.checkpoint.manifest import FileRecord, Manifest
from headrace.checkpoint.storage import File, LocalStorage, Storage

__all__ = ["Checkpoint", "CheckpointFolder", "File", "FileRecord", "LocalStorage", "Manifest", "Storage"]
