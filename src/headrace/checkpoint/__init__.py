"""Checkpoints: a crash at any moment leaves one from which the run can be resumed.

    <run>/checkpoints/
        step-00000100/                  a committed checkpoint
            rank-0.safetensors          the tensors of rank 0 by name
            rank-1.safetensors
            manifest.json               step, size and digest of every file, a description by the caller
        step-00000120.part/             a checkpoint that is being written
        step-00000080.old/              a checkpoint that is being deleted

A checkpoint is written aside, synced and renamed, and the folder synced, before old ones are deleted:

    begin ─► write (every rank) ─► commit: manifest ─► rename .part ─► sync ─► rename to .old ─► sync ─► delete

A committed one may be copied to another file system, in the same layout, its manifest last.
"""

from typing import TYPE_CHECKING

from headrace.registry import lazy_names

if TYPE_CHECKING:
    from headrace.checkpoint.folder import Checkpoint, CheckpointFolder
    from headrace.checkpoint.manifest import FileRecord, Manifest
    from headrace.checkpoint.storage import File, Storage

__all__ = ["Checkpoint", "CheckpointFolder", "File", "FileRecord", "Manifest", "Storage"]

__getattr__ = lazy_names(
    __name__,
    {
        "Checkpoint": "headrace.checkpoint.folder:Checkpoint",
        "CheckpointFolder": "headrace.checkpoint.folder:CheckpointFolder",
        "File": "headrace.checkpoint.storage:File",
        "FileRecord": "headrace.checkpoint.manifest:FileRecord",
        "Manifest": "headrace.checkpoint.manifest:Manifest",
        "Storage": "headrace.checkpoint.storage:Storage",
    },
)
