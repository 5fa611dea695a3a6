"""Keys of Meta Lingua's configs that have no meaning or another form here, for `args.load`.

Its keys that mean the same here have the same name and need no entry.
"""

from collections.abc import Mapping
from typing import Any

from lingua.config.load import Foreign


def _fsdp_type(value: Any, below: Mapping[str, Any]) -> dict[str, Any]:
    if value == "full_shard":
        ours: dict[str, Any] = {"distributed.dp_shard": None}
        if below.get("distributed.dp_replicate", 1) is None:
            ours["distributed.dp_replicate"] = 1  # undoes a no_shard of a file below
        return ours
    if value == "no_shard":
        return {"distributed.dp_shard": 1, "distributed.dp_replicate": None}
    raise ValueError("must be full_shard or no_shard; sizes are set by distributed.dp_shard")


def _selective(value: Any, below: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return {"distributed.activation_checkpointing": "selective" if value else "none"}


META_LINGUA = Foreign(
    ignored={
        "data.prefetch_size": "batches are always prepared a few steps ahead",
        "data.load_async": "batches are always prepared in the background",
        "gc_collect_freq": "the garbage collector is left alone",
        "env": "environment variables are set where the run is launched",
        "optim.annealing_step": "no schedule here has an annealing step",
        "model.max_seqlen": "it follows data.seq_len",
        "logging.acc_freq": "the logged loss is that of whole steps",
        "distributed.compile_cache_size_limit": "PyTorch's own limit is kept",
        "distributed.spawn_method": "data workers are threads",
        "distributed.float8_filter": "there is no float8 recipe to filter for",
        "probe_freq": "probing does not exist yet",
        "eval.harness": "benchmarks are set by eval.tasks",
        "eval.generator": "benchmarks are set by eval.tasks, and each says how it generates",
        "eval.validation": "the held-out loss is set by validation",
        "async_eval_gpus": "the jobs of benchmarks are set by eval.job",
    },
    only={
        "distributed.float8_recipe": (None,),
        "distributed.detect_anomaly": (False,),
        "distributed.allow_bf16_reduced_precision_reduction": (True,),
    },
    same_as={"model.seed": "seed", "data.seed": "seed"},
    translated={
        "distributed.fsdp_type": _fsdp_type,
        "distributed.selective_activation_checkpointing": _selective,
    },
)
