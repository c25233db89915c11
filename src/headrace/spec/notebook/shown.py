"""What a notebook shows as a short table."""

from __future__ import annotations

from abc import ABC


class ShownAsTable(ABC):  # noqa: B024  (a dataclass that is one needs nothing else)
    """A frozen dataclass: a notebook shows its fields."""

    def _repr_html_(self) -> str:
        from headrace.spec.notebook.table import shown_as_table

        return shown_as_table(self)
