"""Benchmarks through EleutherAI's lm-evaluation-harness (the package lm_eval), on any topology.

Rank 0 alone runs the harness: it reads tasks and data and computes metrics. All ranks together
score and generate what the harness requests of the model.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.config.schema import Free
from lingua.errors import UserError, nearest
from lingua.inference.generate import generate
from lingua.inference.score import score
from lingua.parallel.mesh import divide, dp_degree, on_rank_0
from lingua.tokenizer import Tokenizer

PART = 32  # batches of each data-parallel rank between two checks whether to stop
METRICS = "metrics.eval"  # the .jsonl file that collects results over the steps of a run
WAITING = "eval"  # the mark of a checkpoint whose evaluation job has not finished

logger = logging.getLogger(__name__)


@dataclass
class HarnessArgs:
    # names of tasks, groups and tags of the harness or of task_dir, or YAML files of tasks
    tasks: Free[list[str]] = field(default_factory=list)
    task_dir: Free[str | None] = None  # folder of your own task files
    num_fewshot: Free[int | None] = None  # solved examples in each prompt; null: each task's own
    # documents of each task at most; below 1 the share of them; null: all
    limit: Free[float | None] = None
    batch_size: Free[int] = 32  # texts of one forward on each data-parallel rank
    max_gen_tokens: Free[int] = 256  # tokens generated at most, for tasks that set no limit
    seed: Free[int] = 1234  # of the choice of solved examples, and of sampling

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.tasks:
            yield "tasks", "must name at least one task"
        if self.task_dir is not None and not Path(self.task_dir).is_dir():
            yield "task_dir", "must be a folder of task files"
        if self.num_fewshot is not None and self.num_fewshot < 0:
            yield "num_fewshot", "must be at least 0, or null"
        if self.limit is not None and not (0 < self.limit < 1 or self.limit % 1 == 0 < self.limit):
            yield "limit", "must be a whole number, a share between 0 and 1, or null"
        for key in ("batch_size", "max_gen_tokens"):
            if getattr(self, key) < 1:
                yield key, "must be at least 1"


# ------------------------------------------------------------------------------------------ tasks


def find_tasks(args: HarnessArgs) -> Any:
    """lm_eval's TaskManager with all tasks of `args`; their data is not read.

    Raises:
        UserError: lm_eval is not installed, or a task does not exist.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(
            "tasks: need the Python package lm_eval, which is not installed (pip install lm_eval)"
        ) from None
    named = [name for name in args.tasks if not Path(name).is_file()]
    # The harness reads all of its 14,000 task files: not where task_dir is enough.
    manager = TaskManager(include_path=args.task_dir, include_defaults=False)
    if not set(named) <= {*manager.all_subtasks}:
        manager = TaskManager(include_path=args.task_dir)
    for name in named:
        if name not in manager.all_tasks:
            raise UserError(
                f"tasks: {name} is not a task, group or tag of lm_eval or task_dir, nor a file"
                f"{nearest(name, manager.all_tasks)}"
            )
    return manager


def open_tasks(args: HarnessArgs, context: int) -> dict[str, Any]:
    """The tasks with their data, in the form of lm_eval's `evaluate`. On rank 0.

    Args:
        context: positions of the model; generated text must leave room for a prompt.

    Raises:
        UserError: as find_tasks; or a task cannot be loaded, or needs what is not supported.
    """
    manager = find_tasks(args)
    try:
        with seeded(args.seed):
            loaded = manager.load(list(args.tasks))
    except Exception as error:  # the library and its tasks raise all kinds
        raise UserError(
            f"tasks = [{', '.join(args.tasks)}]: cannot be loaded ({type(error).__name__}: {error})"
        ) from error
    for name, task in loaded["tasks"].items():
        # As lm_eval's own command: a task with 0 in its file keeps 0.
        of_task = task.get_config("num_fewshot")
        if of_task is None or (args.num_fewshot is not None and of_task != 0):
            task.set_config(key="num_fewshot", value=args.num_fewshot or 0)
        check_task(name, task, args, context)
    return loaded


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators that tasks draw from; restore the caller's state afterwards."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def check_task(name: str, task: Any, args: HarnessArgs, context: int) -> None:
    from lingua.inference.harness_model import to_settings

    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise UserError(f"tasks: {name} runs code that the model generates, or has images or sound")
    if task.OUTPUT_TYPE != "generate_until":
        return
    try:
        settings = to_settings(task.get_config("generation_kwargs") or {}, args.max_gen_tokens)
    except UserError as error:
        raise UserError(f"tasks: {name}: {error}") from None
    if settings.max_gen_tokens >= context:
        raise UserError(
            f"tasks: {name} generates up to {settings.max_gen_tokens} tokens (max_gen_toks of the "
            f"task, else max_gen_tokens); must be below the context of {context} tokens"
        )


# ------------------------------------------------------------------------------------- evaluation


@dataclass
class RankServer:
    """All ranks answer the requests of rank 0, which alone runs the harness."""

    model: nn.Module
    tokenizer: Tokenizer
    mesh: DeviceMesh
    batch_size: int
    context: int  # positions of the model
    stopping: Callable[[], bool]  # whether rank 0 shall stop the evaluation
    answering: bool = False

    def run(self, lead: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of `lead`, on rank 0; it may call `ask`. Every rank raises what it raises."""
        if dist.get_rank() != 0:
            while (kind := on_rank_0(lambda: None)) is not None:
                self.answer(kind, [])
            return None
        result, failure = None, None
        try:
            result = lead()
        except Exception as error:
            if self.answering:  # the other ranks are in a collective, where no message reaches them
                raise
            failure = error
            if not isinstance(error, UserError):  # tasks raise all kinds
                logger.exception("the evaluation failed")
                failure = UserError(f"the evaluation failed: {type(error).__name__}: {error}")

        def finish() -> None:
            if failure is not None:
                raise failure

        on_rank_0(finish)
        return result

    def ask(self, kind: str, items: list) -> list:
        """Results for the items, computed in parts: between two parts the evaluation may stop."""
        size = PART * self.batch_size * dp_degree(self.mesh)
        answers = []
        for first in range(0, len(items), size):
            if self.stopping():
                raise UserError("a signal asks the run to stop")
            on_rank_0(lambda: kind)
            self.answering = True
            answers += self.answer(kind, items[first : first + size])
            self.answering = False
        return answers

    def answer(self, kind: str, items: list) -> list:
        """Results for rank 0's items. Called by every rank."""
        of_rank_0 = [items]
        dist.broadcast_object_list(of_rank_0)
        [items] = of_rank_0
        if kind == "score":
            return score(self.model, items, self.mesh, self.batch_size, self.context)
        return divide(
            lambda mine: generate(self.model, mine, self.tokenizer, self.mesh, self.batch_size),
            items,
            self.mesh,
        )


def evaluate(
    args: HarnessArgs,
    tasks: dict[str, Any] | None,
    model: nn.Module,
    tokenizer: Tokenizer,
    mesh: DeviceMesh,
    add_bos: bool,
    context: int,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """lm_eval's results and samples, on rank 0. Called by every rank.

    Args:
        tasks: what open_tasks returned on rank 0.
        add_bos: texts begin with bos, as the model's training documents do.
        context: positions of the model; longer contexts are cut on the left.
        stopping: whether rank 0 shall stop; then every rank raises UserError.
    """
    server = RankServer(model, tokenizer, mesh, args.batch_size, context, stopping)

    def lead() -> dict[str, Any]:
        from lm_eval.evaluator import evaluate

        from lingua.inference.harness_model import HarnessModel

        settings = (tokenizer, add_bos, context, args.max_gen_tokens, args.seed)
        for task in tasks["tasks"].values():
            task.set_fewshot_seed(seed=args.seed)  # in a second evaluation too
        with seeded(args.seed):
            lm = HarnessModel(server.ask, *settings)
            return evaluate(lm=lm, task_dict=tasks, limit=args.limit)

    return server.run(lead)


# ---------------------------------------------------------------------------------------- results


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError in this block becomes a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def make_folder(folder: Path) -> None:
    """Create the folder of results and write a file into it, before the model is loaded."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


def write_results(
    folder: Path, results: Mapping[str, Any], step: int, config: Mapping[str, Any]
) -> None:
    """Write results and every task's samples into `folder`, into new files for each evaluation."""
    from lm_eval.utils import handle_non_serializable

    def dump(value: Any, indent: int | None = None) -> str:
        text = json.dumps(value, indent=indent, ensure_ascii=False, default=handle_non_serializable)
        return text + "\n"

    now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
    whole = {key: value for key, value in results.items() if key != "samples"}
    whole = {"step": step, "config": config} | whole
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for task, samples in results["samples"].items():
            text = "".join(map(dump, samples))
            (folder / f"samples_{task}_{now}.jsonl").write_text(text, encoding="utf-8")
        (folder / f"results_{now}.json").write_text(dump(whole, 2), encoding="utf-8")


def metrics_lines(results: Mapping[str, Any], step: int) -> Iterator[dict[str, Any]]:
    """The lines of metrics.eval.jsonl for an evaluation: one for each task, then for each group."""
    for task, values in (results["results"] | results.get("groups", {})).items():
        numbers = {key: v for key, v in values.items() if isinstance(v, int | float)}
        yield {"step": step, "task": task, "num_fewshot": results["n-shot"].get(task)} | numbers


def results_table(results: Mapping[str, Any]) -> str:
    """lm_eval's own table, groups after tasks."""
    from lm_eval.utils import make_table

    columns = [column for column in ("results", "groups") if results.get(column)]
    return "\n".join(make_table(results, column) for column in columns)
