"""Keys of Meta Lingua's configs that have no meaning or another form here. Those that mean the same
have the same name here and need no entry."""

from lingua.config.foreign import Foreign

META_LINGUA = Foreign(
    ignored={
        "data.prefetch_size": "batches are always prepared a few steps ahead",
        "data.load_async": "batches are always prepared in the background",
        "gc_collect_freq": "garbage is collected every 100 steps",
        "env": "environment variables are set where the run is launched",
        "optim.annealing_step": "no schedule here has an annealing step",
        "model.max_seqlen": "it follows data.seq_len",
        "logging.acc_freq": "the logged loss is that of whole steps",
        "distributed.compile_cache_size_limit": "PyTorch's own limit is kept",
        "distributed.spawn_method": "data workers are threads",
        "distributed.float8_filter": "distributed.float8 has the products of all blocks",
        "eval.harness": "benchmarks are set by eval.tasks",
        "eval.generator": "benchmarks are set by eval.tasks, and each says how it generates",
        "eval.validation": "the held-out loss is set by validation",
        "eval.dataset_dir": "lm_eval finds the data of its tasks, eval.task_dir has your own tasks",
        "eval.name": "results are written to the dump dir, in evals/<step>",
        "eval.dump_dir": "results are written to the dump dir, in evals/<step>",
        "eval.metric_log_dir": "results are written to the dump dir, in metrics.eval.jsonl",
        "eval.ckpt_dir": "the checkpoint of the step is evaluated",
        "eval.global_step": "the checkpoint of the step is evaluated",
        "eval.wandb": "results go to the run of logging.wandb",
        "profiling.trace_folder": "traces are written to the dump dir, in profiling",
        "async_eval_gpus": "the jobs of benchmarks are set by eval.job",
    },
    same_as={"model.seed": "seed", "data.seed": "seed"},
    alias_of={
        "checkpoint.init_ckpt_path": "checkpoint.init_from",
        "probe_freq": "probe.every",
    },
    translated={
        "distributed.fsdp_type": {
            "full_shard": {"distributed.dp_shard": None},
            "no_shard": {"distributed.dp_shard": 1, "distributed.dp_replicate": None},
        },
        "distributed.selective_activation_checkpointing": {
            True: {"distributed.activation_checkpointing": "selective"},
            False: {"distributed.activation_checkpointing": "none"},
        },
        "distributed.float8_recipe": {None: {}},
        "distributed.detect_anomaly": {False: {}},
        "distributed.allow_bf16_reduced_precision_reduction": {True: {}},
    },
)
