"""The names of the files and folders in a dump dir, the folder that holds all of one run."""

import re

# ---- written by the run

CONFIG = "config.yaml"  # every value resolved; each checkpoint has one too
TRAIN_LOG = "train.log"  # what the console shows, with times in UTC
METRICS = "metrics.jsonl"  # a line per log step, and events
VALIDATION = "metrics.validation.jsonl"  # held-out losses, a line per source
EVALUATION = "metrics.eval.jsonl"  # results of benchmarks, a line per task
SAMPLES = "samples.jsonl"  # generated text
RECEIPT = "receipt.json"  # of a finished run: what it is and what came of it, with hashes
WANDB_ID, TRACKIO_ID = "wandb_id", "trackio_id"  # ids of the run in Weights & Biases and Trackio
LINES = (METRICS, VALIDATION, EVALUATION, SAMPLES)  # lines of JSON, each with a `step`
WRONG_HOSTS = "wrong_hosts.jsonl"  # a line for each rank that distributed.check_every has named
FILES = (CONFIG, TRAIN_LOG, *LINES, WANDB_ID, TRACKIO_ID, WRONG_HOSTS)

CHECKPOINTS = "checkpoints"  # a folder per saved step
EVALS = "evals"  # a folder per evaluated step, with RESULTS
PROFILING = "profiling"  # traces, memory snapshots, COLLECTIVES
STARTS, TENSORBOARD = "starts", "tensorboard"  # a file per start, named by its number or time
FOLDERS = (CHECKPOINTS, EVALS, PROFILING, STARTS, TENSORBOARD, "wandb")

LOCK = "run.lock"  # held while the run trains
RUN_ID = "run.id"  # random text; equal in a folder of checkpoints outside of the dump dir
RESULTS = "results_*.json"  # an evaluation's results; the star stands for its time
COLLECTIVES = "collectives_step*.json"  # the star stands for the counted step
AUDIT = "audit.json"  # the newest verdict of `lingua audit` that was to be recorded

# ---- written by a launch

BASE_CONFIG = "base_config.yaml"  # the config as it was launched
LAUNCHED_AT = "# launched at "  # what BASE_CONFIG begins with: the time in UTC, assumptions
PLAN = "plan.json"  # what the run should need, by lingua.tools.plan
CODE = "code"  # a copy of the checkout
CODE_COMMIT, CODE_DIFF = f"{CODE}.commit", f"{CODE}.diff"  # commit, uncommitted changes
SUBMIT_SCRIPT = "submit.slurm"  # the batch script
JOB_ID = "job_id"  # id of the job launched last
LOGS = "logs"  # a folder per job

# ---- in the folder of a checkpoint, beside CONFIG and the tensors

MANIFEST = "manifest.json"  # every file with its size and checksum
METADATA = ".metadata"  # names and places of the tensors, as DCP writes it
STATE = "train_state.json"  # everything besides tensors and config
SURVIVORS = (
    "survivors"  # a folder of a start some of whose ranks survived: lingua.tools.elastic.survivors
)
STEP_FOLDER = re.compile(r"\d{10}")  # name of a checkpoint's folder, see step_folder


def step_folder(step: int) -> str:
    """The name of the folder of a checkpoint, and of the results of its evaluation."""
    return f"{step:010d}"
