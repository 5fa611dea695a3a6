"""Selective activation checkpointing: what a block keeps for its backward pass, and what it
computes again."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lingua.parallel.torch_private import ATTENTION_OPERATORS, PRODUCTS, REDUCE_SCATTER

# Results worth keeping when the rest of a block is recomputed: each costs far more to compute, or
# to communicate, than its memory is worth.
_SAVED = {*ATTENTION_OPERATORS, str(REDUCE_SCATTER)}


def _selective(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is in _SAVED, and matrix products that do not narrow. The last product of a block
    narrows; nothing in the backward pass reads it, so that it is not even computed again."""
    saved = str(operator) in _SAVED
    if operator in PRODUCTS:
        n_in, n_out = args[1].shape
        saved = n_in <= n_out
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


# The context_fn of torch.utils.checkpoint.
selective_contexts = partial(create_selective_checkpoint_contexts, _selective)
