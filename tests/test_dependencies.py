"""What installing headrace brings beside torch, as the metadata of installed packages says."""

from __future__ import annotations

from importlib.metadata import distribution

from installed import PROJECT, ROOT, closure

MOST_MB = 84
MOST_MB_BUT_NUMPY = 26
"""NumPy alone is 57 MB, with OpenBLAS; a torch is rarely without it."""


def megabytes(name: str) -> float:
    """Returns the size of a package's files, without what Python compiles of them."""
    files = distribution(name).files or ()
    return sum(file.size or 0 for file in files if file.suffix != ".pyc") / 1e6


def test_a_plain_install_stays_small() -> None:
    added = closure(PROJECT["dependencies"]) - closure(["torch"])
    assert {"cloudpickle", "numpy", "pyzmq", "rich", "safetensors", "typer"} <= added
    sizes = {name: megabytes(name) for name in sorted(added)}
    assert all(size > 0.005 for size in sizes.values()), "a package without metadata of its files"
    own = sum(path.stat().st_size for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix != ".pyc")
    sizes["headrace"] = own / 1e6
    assert sum(sizes.values()) < MOST_MB, sizes
    assert sum(sizes.values()) - sizes["numpy"] < MOST_MB_BUT_NUMPY, sizes
