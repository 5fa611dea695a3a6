"""The text of `--help`: every key of a configuration class, with the comment beside its field."""

import importlib
import re
import subprocess

import pytest

from lingua.__main__ import COMMANDS
from lingua.config.help import help_text
from lingua.config.load import load, resume_classes
from tests.config.example import Config
from tests.programs import python


@pytest.mark.parametrize("width", [60, 80, 140])
def test_help_lists_every_key_within_the_width(width):
    text = help_text(Config, [], None, width)
    lines = text.splitlines()
    for key in resume_classes(Config):
        if key not in ("logging.wandb", "eval"):  # groups, whose keys are listed
            assert any(re.match(rf"  {re.escape(key)}\s", line) for line in lines), key
    assert max(map(len, lines)) <= width
    assert "optim: the optimizer" in lines
    assert re.search(r"optim\.lr +0\.001 +announced +float\n +peak learning rate\n", text)
    shares = r"optim\.ratios .*\n +shares of the peak that the layers have\n"  # of two lines
    assert re.search(shares, text)
    assert re.search(r"checkpoint\.eval\.every +500 +free +int", text)  # of this place
    assert re.search(r"logging\.wandb\.project +\(required\) +free +str", text)


def test_help_is_printed_in_the_terminals_width_and_nothing_else_happens(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "64")
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as caught:
            load(Config, ["config=missing.yaml", flag])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert "optim.lr" in text and 60 < max(map(len, text.splitlines())) <= 64
    text = help_text(Config, ["optim", "checkpoint.dump.every"], None, 80)
    keys = re.findall(r"^  (\S+)", text, re.M)
    names = ("lr", "name", "clip", "warmup", "ratios")
    assert keys == [*(f"optim.{name}" for name in names), "checkpoint.dump.every"]


PROGRAMS = {f"apps.main.{name}": f"apps.main.{name}" for name in ("train", "eval", "generate")}
PROGRAMS |= {module: f"lingua {name}" for name, (module, _) in COMMANDS.items() if module}
del PROGRAMS["lingua.tools.commands.checkpoint"]  # without keys


@pytest.mark.parametrize(("module", "command"), PROGRAMS.items())
def test_help_says_what_the_program_does_with_examples_in_the_width(module, command):
    text = help_text(Config, [], importlib.import_module(module).__doc__, 70)
    sentence, examples = text.split("\n\n")[:2]
    assert sentence.endswith((":", ".")) and max(map(len, text.splitlines())) <= 70
    assert len(re.findall(r"^    \S", examples, re.M)) >= 2
    assert f"    python -m {command} " in examples


def test_the_reader_of_help_may_stop_and_without_arguments_a_command_is_suggested():
    """The programs themselves, of which one starts at a time."""
    command = [*python(), "-m", "apps.main.train"]
    script = '"$@" --help | true; echo ${PIPESTATUS[0]}'
    bash = ["bash", "-c", script, "bash", *command]
    done = subprocess.run(bash, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")  # as if ended by SIGPIPE
    done = subprocess.run(command, capture_output=True, text=True)
    example = "\nAn example: python -m apps.main.train config=apps/main/configs/debug.yaml\n"
    assert done.returncode == 2 and done.stderr.endswith(example)
