"""Benchmarks through EleutherAI's lm-evaluation-harness (the package lm_eval), on any topology.

Only rank 0 runs the harness: it reads tasks and data and computes metrics. All ranks together
score and generate what the harness requests of the model.
"""

import json
import logging
import os
import random
import re
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.base.dump_dir import RESULTS
from lingua.base.errors import UserError, all_of, import_optional, nearest
from lingua.config.load import flatten, from_values
from lingua.model.generate import Request, fit_prompts, generate
from lingua.model.sampling import SamplingArgs
from lingua.monitor.args import HarnessArgs
from lingua.parallel.mesh import dp_degree, on_rank_0
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.inference.score import score

HUB_S = 3.0  # seconds to wait for an address of the hub
PART = 32  # batches of each data-parallel rank between two checks whether to stop
# What follows a key of a task file that names tasks, with the lines of a list below it.
NAMING = re.compile(
    r"""^[ -]*["']?(?:task|group|tag)["']? *:(.*(?:\n *(?:-.*|\#.*)?$)*)""", re.MULTILINE
)

logger = logging.getLogger(__name__)
Report = Callable[[list[dict[str, Any]]], None]


def find_tasks(args: HarnessArgs) -> Any:
    """lm_eval's TaskManager with all tasks of `args`; their data is not read.

    Raises:
        UserError: lm_eval is not installed, or tasks do not exist.
    """
    package = import_optional("lm_eval", "tasks:")
    defaults = Path(package.__file__).parent / "tasks"
    named = [name for name in args.tasks if not os.path.isfile(name)]
    if args.task_dir is None:  # names are checked before what takes time is imported and parsed
        _check_names(named, harness_names(defaults))
    library = import_optional("lm_eval.tasks", "tasks:")
    # The harness parses all of its 14,000 task files: not where task_dir is enough.
    manager = library.TaskManager(include_path=args.task_dir, include_defaults=False)
    if not set(named) <= {*manager.all_subtasks}:
        _check_names(named, {*manager.all_tasks, *harness_names(defaults)})
        logger.info("the task files of lm_eval are read")
        manager = library.TaskManager(include_path=args.task_dir)
        _check_names(named, manager.all_tasks)
    return manager


def _check_names(named: list[str], known: Collection[str]) -> None:
    need = "is not a task, group or tag of lm_eval or task_dir, nor a file"
    wrong = [f"tasks: {name} {need}{nearest(name, known)}" for name in named if name not in known]
    if wrong:
        raise all_of(wrong)


def harness_names(folder: Path) -> set[str]:
    """The words in the task files of a folder that may name a task, group or tag: all names are
    among them. The files are read as text, which takes a tenth of the time."""
    names: set[str] = set()
    for path in folder.rglob("*"):
        if path.suffix in ("", ".yaml") and path.is_file():  # a file to include may have no suffix
            for value in NAMING.findall(path.read_text(encoding="utf-8", errors="replace")):
                names.update(re.findall(r"""[^\s,[\]{}"']+""", value))
    return names


def load_tasks(args: HarnessArgs, context: int) -> dict[str, Any]:
    """The tasks with their data, in the form of lm_eval's `evaluate`; on rank 0, other ranks have
    none. Called by every rank.

    Raises:
        UserError: as find_tasks; or a task cannot be loaded, needs what is not supported, or
            generates texts that leave no room for a prompt in a context of `context` tokens.
    """
    tasks: dict[str, Any] = {}

    def load() -> None:
        manager = find_tasks(args)
        use_only_cache_offline()
        seed_all(args.seed)
        try:
            tasks.update(manager.load(list(args.tasks)))
        except Exception as error:  # the library and its tasks raise all kinds
            why = f"{type(error).__name__}: {error}"
            need = "; load them once with a network, HF_HUB_OFFLINE=1 then reads the cache"
            why = f"({why}){need * isinstance(error, ConnectionError)}"
            raise UserError(f"tasks = {args.tasks}: cannot be loaded {why}") from error
        for name, task in tasks["tasks"].items():
            # As lm_eval's own command: a task with 0 in its file keeps 0.
            task_shots = task.get_config("num_fewshot")
            if task_shots is None or (args.num_fewshot is not None and task_shots != 0):
                task.set_config(key="num_fewshot", value=args.num_fewshot or 0)
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise UserError(f"tasks: {name} runs generated code, or has images or sound")
            if task.OUTPUT_TYPE == "generate_until":
                kwargs = task.get_config("generation_kwargs") or {}
                try:
                    settings = to_settings(kwargs, args.max_gen_tokens)
                    fit_prompts([Request([0], settings)], context)
                except UserError as error:
                    raise UserError(f"tasks: {name}: {error}") from None

    on_rank_0(load)
    return tasks


def use_only_cache_offline() -> None:
    """Where the Hugging Face hub cannot be reached, have its libraries read their cache alone: they
    would try for a minute, for each data set."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or getproxies():
        return
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname, port), HUB_S).close()
    except OSError as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error})"
        logger.info(f"{why}: only the cache of data sets is read, as with HF_HUB_OFFLINE=1")
        constants.HF_HUB_OFFLINE = True
        import_optional("datasets.config", "tasks:").HF_HUB_OFFLINE = True


def seed_all(seed: int) -> None:
    """Seed the generators that tasks draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass
class Evaluator:
    """A model with which rank 0 runs the harness; all ranks together answer its requests.

    To the harness it is an lm_eval.api.model.LM of one process. Requests are encoded as by the
    harness's own class for Hugging Face models.
    """

    args: HarnessArgs
    model: nn.Module
    tokenizer: Tokenizer
    mesh: DeviceMesh
    add_bos: bool  # texts begin with bos, as the model's training documents do
    context: int  # positions of the model; longer contexts are cut on the left
    stopping: Callable[[], bool] = lambda: False  # whether rank 0 is asked to stop

    rank, world_size = 0, 1
    in_collectives = False  # all ranks are

    def evaluate(self, tasks: dict[str, Any], folder: Path, step: int, report: Report) -> None:
        """Evaluate, log a table, and write results and every task's samples into new files of
        `folder`. Called by every rank.

        Args:
            tasks: what load_tasks returned.
            report: called on rank 0, before anything is written, with the lines of
                metrics.eval.jsonl: of each task, then of each group.

        Raises:
            UserError: on every rank: the evaluation failed, or rank 0 was asked to stop.
        """
        if dist.get_rank() != 0:
            while (kind := on_rank_0(lambda: None)) is not None:
                self.answer(kind, [])
            return
        results, failure = {}, ""
        try:
            from lm_eval.evaluator import evaluate

            for task in tasks["tasks"].values():
                task.set_fewshot_seed(seed=self.args.seed)  # the same examples in every evaluation
            seed_all(self.args.seed)
            results = evaluate(lm=self, task_dict=tasks, limit=self.args.limit)
        except Exception as error:
            if self.in_collectives:  # no message reaches the other ranks there
                raise
            failure = str(error)
            if not isinstance(error, UserError):  # tasks raise all kinds
                logger.exception("the evaluation failed")
                failure = f"the evaluation failed: {type(error).__name__}: {error}"

        def finish() -> None:
            if failure:
                raise UserError(failure)
            try:
                logger.info(f"step {step} on benchmarks:\n{results_table(results)}")
                report(metrics_lines(results, step))
                write_results(folder, {"step": step, "config": flatten(self.args)} | results)
            except OSError as error:
                where = error.filename or folder
                raise UserError(f"{where}: cannot be written ({error.strerror})") from None

        on_rank_0(finish)

    def ask(self, kind: str, items: list) -> list:
        """Results for the items, computed in parts: between two parts the evaluation may stop."""
        size = PART * self.args.batch_size * dp_degree(self.mesh)
        answers = []
        for first in range(0, len(items), size):
            if self.stopping():
                raise UserError("a signal asks the run to stop")
            on_rank_0(lambda: kind)
            self.in_collectives = True
            answers += self.answer(kind, items[first : first + size])
            self.in_collectives = False
        return answers

    def answer(self, kind: str, items: list) -> list:
        """Results for rank 0's items: of `score` for (context, continuation) pairs, of `generate`
        for requests. Called by every rank."""
        broadcast_items, batch_size = [items], self.args.batch_size
        dist.broadcast_object_list(broadcast_items)
        if kind == "score":
            return score(self.model, broadcast_items[0], self.mesh, batch_size, self.context)
        return generate(self.model, broadcast_items[0], self.tokenizer, self.mesh, batch_size)

    # ---- what the harness calls, with lists of lm_eval.api.instance.Instance

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return self.ask("score", [self.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        texts = self.tokenizer.encode_batch([request.args[0] for request in requests])
        before = self.before_text()
        # As the harness does, so that numbers can be compared: the bos of a text is scored too, as
        # a token that follows another bos.
        bos = before if self.add_bos else []
        scores = self.ask("score", [(before, [*bos, *text.tolist()]) for text in texts])
        return [logprob for logprob, _ in scores]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Request i, from 0 on, is sampled with the seed of `args` + i."""
        encoded = []
        for i, (context, kwargs) in enumerate(request.args for request in requests):
            tokens = self.tokenizer.encode(context, bos=self.add_bos).tolist() or self.before_text()
            settings = to_settings(kwargs, self.args.max_gen_tokens)
            # decoded without the prompt before it, as by the harness's own class
            encoded.append(Request(tokens, settings, self.args.seed + i, behind_prompt=False))
        return [done.text for done in self.ask("generate", fit_prompts(encoded, self.context))]

    def before_text(self) -> list[int]:
        """The token before a text without a context: the first token must follow one to be scored.
        UserError where the tokenizer has neither bos nor eos."""
        first = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if first is None:
            raise UserError(
                f"the {self.tokenizer.name} tokenizer has neither bos nor eos: a text without a "
                "context cannot be scored"
            )
        return [first]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both as one text and split its tokens, so that those at the boundary are the
        tokens of running text. Spaces at the end of the context belong to the continuation."""
        if not continuation:
            raise UserError(f"a task scores an empty text, after {context[-80:]!r}")
        bare = context.rstrip()
        bos = self.add_bos and bool(bare)
        both = self.tokenizer.encode(context + continuation, bos=bos).tolist()
        n = len(self.tokenizer.encode(bare, bos=bos)) if bare else 0
        n = min(n, len(both) - 1)  # a last token with the boundary inside is scored
        return both[:n] or self.before_text(), both[n:]


def to_settings(gen_kwargs: Mapping[str, Any], max_gen_tokens: int) -> SamplingArgs:
    """generation_kwargs of a task as our settings. UserError names a key that has none."""
    from lm_eval.models.utils import normalize_gen_kwargs

    try:
        values = normalize_gen_kwargs(dict(gen_kwargs), max_gen_tokens)
    except (TypeError, ValueError, RecursionError) as error:  # it converts some of them
        raise UserError(f"generation_kwargs: {error}") from None
    if not values.pop("do_sample"):
        values = {k: v for k, v in values.items() if k not in ("top_k", "top_p")}
        values["temperature"] = 0.0
    values["stop"] = [text for text in values.pop("until") if text]
    values["max_gen_tokens"] = values.pop("max_gen_toks")
    if values.get("num_beams") == 1:  # no beam search
        del values["num_beams"]
    return from_values(SamplingArgs(), values, "generation_kwargs")


# ---------------------------------------------------------------------------------------- results


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    from lm_eval.utils import handle_non_serializable

    def dump(value: Any, indent: int | None = None) -> str:
        text = json.dumps(value, indent=indent, ensure_ascii=False, default=handle_non_serializable)
        return text + "\n"

    now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
    folder.mkdir(parents=True, exist_ok=True)
    for task, samples in results["samples"].items():
        text = "".join(map(dump, samples))
        name = quote(task, safe=" ")  # a task may be `suite/part`
        (folder / f"samples_{name}_{now}.jsonl").write_text(text, encoding="utf-8")
    text = dump({key: value for key, value in results.items() if key != "samples"}, indent=2)
    (folder / RESULTS.replace("*", now)).write_text(text, encoding="utf-8")


def metrics_lines(results: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
    lines = []
    for task, values in (results["results"] | results.get("groups", {})).items():
        numbers = {key: v for key, v in values.items() if isinstance(v, int | float)}
        n_shot = results["n-shot"].get(task)
        lines.append({"step": step, "task": task, "num_fewshot": n_shot} | numbers)
    return lines


def results_table(results: Mapping[str, Any]) -> str:
    """lm_eval's own table, groups after tasks."""
    from lm_eval.utils import make_table

    columns = [column for column in ("results", "groups") if results.get(column)]
    return "\n".join(make_table(results, column) for column in columns).strip()
