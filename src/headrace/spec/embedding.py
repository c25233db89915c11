"""An embedding table whose rows are made one by one: what it is, without its rows."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number by the types that a table may have."""

LIMIT_BYTES = 16 + 64
"""Bytes that a row of a limited table needs beside its numbers: its two numbers of use, and its part of the index."""


@dataclass(frozen=True)
class RowInit:
    """How rows begin: "normal" with mean and standard deviation, "uniform" from and to, or "constant" with a value.

    `first` and `second` are these numbers; a constant has the first alone. A "truncated" normal is between `bounds`.
    """

    kind: str = "normal"
    first: float = 0.0
    second: float = 1.0
    bounds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class RowLimit:
    """How many rows a table holds at most, and which go where there would be more: by "age" or by "count"."""

    rows: int
    evict: str = "age"


@dataclass(frozen=True)
class TableSpec:
    """A table of embeddings.

    Attributes:
        name: of the layer, as in `named_modules()`.
        rows, width: its shape.
        seed: of the job; with the name it determines every row.
        padding: the row that stays zero and gets no gradient; -1 for none.
        trainable: False for a frozen table.
        state_width: numbers of optimizer state that each row has.
        limit: of the rows that are held; None for as many as there are.
    """

    name: str
    rows: int
    width: int
    dtype: str = "float32"
    init: RowInit = RowInit()
    seed: int = 0
    padding: int = -1
    trainable: bool = True
    state_width: int = 0
    limit: RowLimit | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its state."""
        return self.width * FLOAT_BYTES[self.dtype]

    @property
    def most_rows(self) -> int:
        """How many rows may be held at the same time."""
        return self.rows if self.limit is None else min(self.rows, self.limit.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all rows that may be held, with their optimizer's state."""
        return self.bytes_of(self.most_rows)

    def bytes_of(self, rows: int) -> int:
        """Returns the bytes of so many rows with their optimizer's state, and with a limit with uses and index."""
        return rows * ((self.width + self.state_width) * FLOAT_BYTES[self.dtype] + (LIMIT_BYTES if self.limit else 0))
