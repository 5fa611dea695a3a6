"""Text -> token shards (prepare) -> row stream (stream) -> this rank's micro-batches (loader)."""

IGNORE = -100  # a target that carries no loss
