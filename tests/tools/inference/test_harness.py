"""Requests of lm-evaluation-harness as tokens and settings. Scores: tests/apps/test_eval.py."""

import socket
import subprocess
import time
from typing import Any

import datasets
import pytest
from huggingface_hub import constants
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from lingua.model.generate import Completion
from lingua.model.sampling import SamplingArgs
from lingua.monitor.args import HarnessArgs
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.inference.harness import Evaluator, harness_names, load_tasks, to_settings
from tests.apps.tasks import TASKS
from tests.mistakes import refused
from tests.programs import python

pytestmark = pytest.mark.quick

BYTES = build_tokenizer(TokenizerArgs())
BOS = [256]


def a_model(asked: list[Any]) -> Evaluator:
    """It records what it is asked, and answers with placeholders."""

    def ask(kind: str, items: list) -> list:
        asked.append((kind, items))
        return [(0.0, False) if kind == "score" else Completion() for _ in items]

    args = HarnessArgs(max_gen_tokens=5, seed=7)
    evaluator = Evaluator(args, None, BYTES, None, add_bos=True, context=20)
    evaluator.ask = ask
    return evaluator


def instances(*arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance("loglikelihood", {}, given, i) for i, given in enumerate(arguments)]


def test_a_task_that_scores_an_empty_text_is_refused():
    refused(lambda: a_model([]).loglikelihood(instances(("abc", ""))), "empty text", "'abc'")


def test_each_request_is_generated_with_settings_and_a_seed_of_its_own(caplog):
    asked: list[Any] = []
    requests = instances(
        ("a", {"until": ["x", "y"], "max_gen_toks": 3}),
        ("b" * 30, {"until": "z", "do_sample": True, "temperature": 0.5, "top_p": 0.9}),
        ("", {}),
    )
    a_model(asked).generate_until(requests)
    [(kind, [first, second, third])] = asked
    assert kind == "generate" and [r.seed for r in (first, second, third)] == [7, 8, 9]
    assert first.prompt == [*BOS, 97]
    assert first.settings == SamplingArgs(temperature=0.0, max_gen_tokens=3, stop=["x", "y"])
    drawn = SamplingArgs(temperature=0.5, top_p=0.9, max_gen_tokens=5, stop=["z"])
    assert second.settings == drawn and second.prompt == [98] * 15  # cut on the left
    assert "1 of 3 prompts cut on the left" in caplog.text
    assert third.prompt == BOS and third.settings.max_gen_tokens == 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 9}, SamplingArgs(temperature=0.0, max_gen_tokens=9)),
        ({"until": ["", "\n"]}, SamplingArgs(temperature=0.0, max_gen_tokens=5, stop=["\n"])),
        ({"do_sample": False, "temperature": 1.0}, SamplingArgs(temperature=0, max_gen_tokens=5)),
        ({"temperature": 0.7, "top_k": 4}, SamplingArgs(0.7, top_k=4, max_gen_tokens=5)),
        ({"do_sample": True, "num_beams": 1}, SamplingArgs(max_gen_tokens=5)),
    ],
)
def test_generation_kwargs_are_read_as_the_harness_does(given, expected):
    assert to_settings(given, 5) == expected


def test_data_of_a_hub_out_of_reach_is_looked_for_in_the_cache_alone(tmp_path, monkeypatch, caplog):
    task = TASKS["choice"].replace("task: choice", "task: far")
    (tmp_path / "far.yaml").write_text(f"{task}dataset_path: some/data\ntest_split: test\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"  # where nothing listens afterwards
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    caplog.set_level("INFO")
    args = HarnessArgs(tasks=["far"], task_dir=str(tmp_path))
    began = time.monotonic()
    refused(lambda: load_tasks(args, 100), "far", "some/data", "HF_HUB_OFFLINE=1")
    assert time.monotonic() - began < 10 and f"{url} cannot be reached" in caplog.text


WRONG_NAMES = """
import sys
from lingua.base.errors import UserError
from lingua.monitor.args import HarnessArgs
from lingua.tools.inference.harness import find_tasks
try:
    find_tasks(HarnessArgs(tasks=["1", "helaswag", "hellaswag"]))
except UserError as error:
    print(error, "datasets" in sys.modules)
"""


def test_misspelled_tasks_are_all_refused_before_the_harness_is_imported():
    done = subprocess.run([*python(), "-c", WRONG_NAMES], capture_output=True, text=True)
    assert "tasks: 1 is not a task" in done.stdout and done.stdout.endswith(" False\n"), done
    assert "tasks: helaswag is not a task, group or tag of lm_eval or task_dir, nor" in done.stdout
    assert '(did you mean "hellaswag"?)' in done.stdout and "hellaswag is not" not in done.stdout


def test_every_name_that_the_harness_knows_is_known_from_the_text_of_its_files(tmp_path):
    (tmp_path / "in").mkdir()
    files = {
        "a.yaml": "tag:\n  - quick\n# a comment\n  - 'last-one'\ntask: first\n",
        "b.yaml": 'include: shared\n"task": "second"  # as the paper names it\n',
        "shared": "tag:\n- inherited\n\n- other\n",
        "in/c.yaml": "tag: [x-1, y.2]\ntask: third\n",
        "in/d.yaml": "group: all\ntask:\n  - first\n  - group: inner\n    task: [third]\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    known = TaskManager(include_path=tmp_path, include_defaults=False).all_tasks
    assert len(known) == 10
    assert set(known) <= harness_names(tmp_path)
