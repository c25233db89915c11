"""Which server has a row: the one place that decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.spec.embedding import TableSpec


class RowPlacement(ABC):
    """Places the rows of tables on servers, from the row alone, so that all workers find it without asking."""

    @abstractmethod
    def owners(self, table: TableSpec, ids: Tensor, servers: int) -> Tensor:
        """Returns the index of each row's server, int64; `ids` are int64."""


class RangePlacement(RowPlacement):
    """Gives each server one range of rows, all of about the same length."""

    def owners(self, table: TableSpec, ids: Tensor, servers: int) -> Tensor:
        return ids * servers // table.rows


class HashPlacement(RowPlacement):
    """Spreads neighbouring rows over all servers, by a hash of the index (the finalizer of splitmix64)."""

    def owners(self, table: TableSpec, ids: Tensor, servers: int) -> Tensor:
        mixed = ids
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            # Without the sign: torch has no unsigned shift.
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))).remainder(servers)


ROW_PLACEMENTS: Mapping[str, RowPlacement] = {"hash": HashPlacement(), "range": RangePlacement()}


def split(placement: RowPlacement, table: TableSpec, ids: Tensor, servers: int) -> list[Tensor]:
    """Returns, by server, where in `ids` its rows are."""
    if servers == 1:
        return [torch.arange(len(ids))]
    owners = placement.owners(table, ids, servers)
    return [(owners == server).nonzero().view(-1) for server in range(servers)]
