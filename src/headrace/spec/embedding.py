"""An embedding table whose rows are made one by one: what it is, without its rows."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number by the types that a table may have."""


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
class TableSpec:
    """A table of embeddings.

    Attributes:
        name: of the layer, as in `named_modules()`.
        rows, width: its shape.
        seed: of the job; with the name it determines every row.
        padding: the row that stays zero and gets no gradient; -1 for none.
        trainable: False for a frozen table.
        state_width: numbers of optimizer state that each row has.
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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its state."""
        return self.width * FLOAT_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of all rows with their optimizer state."""
        return self.rows * (self.width + self.state_width) * FLOAT_BYTES[self.dtype]
