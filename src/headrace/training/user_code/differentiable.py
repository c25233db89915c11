"""Whether a loss has a graph, and how it may be differentiated."""

from __future__ import annotations

from torch import Tensor

from headrace.errors import JobError


def has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Tells whether forward used `torch.utils.checkpoint(use_reentrant=True)`, which takes `loss.backward()` alone."""
    seen, rest = set(), [loss.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        rest += [following for following, _ in node.next_functions]
    return False


def require_graph(loss: Tensor) -> Tensor:
    """Returns a loss that can be differentiated.

    Raises:
        JobError: it depends on no parameter that is trained.
    """
    if not loss.requires_grad:
        raise JobError(
            "the loss depends on no parameter that is trained, so it has no gradient; look in forward and in the loss "
            "for detach(), torch.no_grad(), argmax, or a tensor that is made anew (torch.tensor, numpy)"
        )
    return loss
