"""How bytes move among all workers: all-reduce, broadcast, barrier."""

from typing import TYPE_CHECKING

from headrace.registry import lazy_names

if TYPE_CHECKING:
    from headrace.collectives.base import ProcessGroup
    from headrace.collectives.joining import join

__all__ = ["ProcessGroup", "join"]

__getattr__ = lazy_names(
    __name__, {"ProcessGroup": "headrace.collectives.base:ProcessGroup", "join": "headrace.collectives.joining:join"}
)
