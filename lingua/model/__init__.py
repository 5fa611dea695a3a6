"""The contract of a language model: how its forward is called, and what it returns. The files here
are the parts that models are built of."""

from __future__ import annotations  # the keys of a model are read before torch is imported

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from lingua.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from lingua.model.cache import Cache

PerRow: TypeAlias = "dict[str, Tensor]"  # float32 [B] by name
Metrics: TypeAlias = "Mapping[str, Tensor | tuple[Tensor, Tensor]]"  # see Losses


class Losses(NamedTuple):
    """The losses that forward returns where it is given targets.

    sums: float32 [V-1], the sum of the token losses of each view, in nats.
    counts: int64 [V-1], the targets that these cover. An objective's losses may leave them out.
    per_row: float32 [B] by name, terms that each row adds to the objective, such as an auxiliary
        loss. The model scales a term, and it depends on nothing but its row, so that the result
        does not depend on which rows a micro-batch has.
    metrics: numbers to log, by name: the mean over the global batch of a value for each row [B] or
        for each target ([B, S] of the first view, or [V-1, B, S]), or of the values where a mask is
        true, (values, bool), of one shape. They take no part in the objective.
    """

    sums: Tensor
    counts: Tensor | None = None
    per_row: PerRow = {}  # noqa: RUF012, nothing adds to it
    metrics: Metrics = {}  # noqa: RUF012


def as_losses(returned: Any, n_targets: int) -> Losses:
    """What a model's forward returned for targets. Raises UserError where it is something else, or
    of another number of views than rows have."""
    if not isinstance(returned, tuple) or len(returned) < 2:
        need = "must be lingua.model.Losses or (sums, counts)"
        raise UserError(f"the model's forward returned {type(returned).__name__}; {need}")
    losses = Losses(*returned)
    if len(losses.sums) != n_targets:  # else a division by their counts would broadcast
        raise UserError(
            f"data.n_views = {n_targets + 1}: the model predicts {len(losses.sums)} of the "
            f"{n_targets} views after the first; must be {len(losses.sums) + 1}"
        )
    return losses


class LanguageModel(Protocol):
    """An nn.Module whose forward has this signature; V is `data.n_views`, B rows, S positions.

    Gradients are those of (sum of `sums` / valid targets) over the views, plus (sum of each
    `per_row` term over the rows) / rows, both of the whole global batch. The mean of a term is
    logged under its name. The terms of padding rows, which have no valid target, are left out by
    the caller.

    All arguments after `targets` may be missing from the signature. Without `documents` the model
    cannot be trained with `data.document_mask`, without `noise` not with `model.dropout`. Without
    `cache`, generation runs the model on the whole text for every token, and what follows a
    position must not change its logits. No program of apps/main uses `per_token`.

    Under tensor parallelism the results are DTensors, or plain tensors that are equal on all
    ranks of the group; losses and terms are made plain by `parallelize_model`.
    """

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        cache: Cache | None = None,
        per_token: bool = False,
    ) -> Losses | tuple[Tensor, Tensor] | Tensor:
        """Losses of the targets, or (sums, counts) where there are no terms per row; without
        targets logits B S vocabulary, with a cache those of the last position, B 1 vocabulary.

        Args:
            tokens: int64 B S.
            targets: int64 V-1 B S, lingua.data.IGNORE where there is no loss.
            documents: int64 B K, the positions at which the documents of each row begin, from 0 on
                and never falling. One that the next repeats, or S, begins an empty document: rows
                may have different numbers. None: every row is one document.
            noise: int64 B, a random key of each row in this step. What is random in the model
                depends on it and on where it is (layer, position, feature) alone. None, as in
                evaluation: nothing is random.
            cache: while generating; the tokens are the columns from `cache.begin` on.
            per_token: for objectives of another form, such as preferences: return the loss of each
                target instead, float32 V-1 B S, 0 where it is ignored.
        """
