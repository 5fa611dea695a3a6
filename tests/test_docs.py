"""The pages that people read: what they link to and name exists, and their commands run.

CONTRIBUTING.md states the rule that fenced blocks follow:

    ```bash, ```console     commands; of the latter the lines after `$ `, the others are output
    ```bash not-run         the same, for commands that a test cannot run; they are parsed alone
    ```LANGUAGE PATH        a file of the repository, of which it is a part, or else one to be made
    ```diff PATH            a change of a file of the repository, which has the lines that go
"""

import importlib.util
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from apps.bench.__main__ import CONFIG, MEASUREMENTS
from apps.bench.gpu.command import GpuArgs
from apps.main.eval import EvalArgs
from apps.main.generate import GenerateArgs
from lingua.__main__ import PROGRAMS, find_command
from lingua.app import choose_app
from lingua.base.errors import UserError
from lingua.config.load import draft, load, meta_lingua
from lingua.config.values import LocatedValue
from lingua.tools.arguments import split_folders
from lingua.tools.commands.audit import arguments as arguments_of_audit
from lingua.tools.commands.check import CheckArgs
from lingua.tools.commands.compare import arguments as arguments_of_compare
from lingua.tools.commands.data_prepare import PrepareArgs
from lingua.tools.commands.data_show import ShowArgs
from lingua.tools.commands.data_verify import VerifyArgs
from lingua.tools.commands.runs import arguments as arguments_of_runs
from lingua.tools.commands.tokenizer import TokenizerTrainArgs
from lingua.tools.exchange.convert import ConvertArgs
from lingua.tools.plan.make import PlanArgs, split_words
from lingua.tools.runs.compare.pilot import PilotArgs
from lingua.tools.runs.report.page import ReportArgs
from lingua.tools.slurm.command_line import split_arguments
from tests.programs import OF_OTHERS, python

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
NOT_RUN = "not-run"
FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.M | re.S)
# The run of the README's first command, small enough for a test; other configs are laid over it.
SMALL = {
    "data": {"seq_len": 160},  # room for what is generated
    "model": {"dim": 16, "n_layers": 1, "multiple_of": 8},
    "validation": {"tokens": 2000},
}
COMMAND_S = 600.0  # the longest that one command may take, on a busy machine


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its info string and its text."""

    where: str  # page:line
    language: str
    info: str
    text: str

    @property
    def has_commands(self) -> bool:
        return self.language in ("bash", "console")

    @property
    def is_file(self) -> bool:
        return bool(self.info) and not self.has_commands

    @property
    def is_change(self) -> bool:
        """A change of a file: lines that begin with "-" go, those with "+" come."""
        return self.is_file and self.language == "diff"

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """(command, lines of output shown after it)."""
        if self.language == "bash":
            yield self.text, []
            return
        command, shown = "", []
        for line in self.text.splitlines():
            if line.startswith("$ ") and not command.endswith("\\\n"):
                if command:
                    yield command, shown
                command, shown = f"{line[2:]}\n", []
            elif command.endswith("\\\n"):
                command += f"{line}\n"
            else:
                shown.append(line)
        yield command, shown


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(f"{page.relative_to(ROOT)}:{text[: m.start()].count(chr(10)) + 1}", *m.groups())
        for m in FENCE.finditer(text)
    ]


@cache
def listed(*options: str) -> list[str]:
    """The files of the repository, as git lists them."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *options]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if (ROOT / name).is_file()]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def test_the_readme_is_a_front_page():
    assert len(README.read_text(encoding="utf-8").split()) <= 2000  # as wc -w counts


@pytest.mark.parametrize("name", NAMES)
def test_every_link_module_file_and_name_of_a_page_exists(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for module in re.findall(r"(?:python|torchrun [^\n]*?) -m ([\w.]+)", page.read_text("utf-8")):
        assert is_program(module), module
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(r"(apps|docs|lingua|setup|tests)/[\w./-]*", span):
            assert (ROOT / span).exists(), span
        if re.fullmatch(r"(apps|lingua)(\.\w+)+", span) and span not in NO_NAMES:
            pkgutil.resolve_name(span)  # raises where a part of it does not exist
    for block in blocks(page):  # an excerpt is in its file
        if block.is_file and block.info in listed():
            whole = plain_lines((ROOT / block.info).read_text(encoding="utf-8"))
            text = block.text
            if block.is_change:
                text = re.sub(r"^(\+.*\n|[ -])", "", text, flags=re.M)
            # Of its imports an excerpt has those that it needs, which need not be side by side.
            imports = re.findall(r"^from \S+ import (?:\([^)]*\)|[^(\n]+)\n", text, flags=re.M)
            others = text.removeprefix("".join(imports))
            for part in [*imports, *re.split(r"^ *\.\.\.\n", others, flags=re.M)]:
                assert plain_lines(part) in whole, f"{block.where}: {part}"


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


NO_NAMES = ("lingua.apps",)  # the group of entry points


def is_program(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return spec is not None


def plain_lines(text: str) -> str:
    """Lines without indentation and blank lines, which ruff changes where it formats a page."""
    return "\n" + "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the files that pages ask their reader to make."""
    copy = tmp_path_factory.mktemp("docs") / "lingua"
    for name in listed("--cached", "--others", "--exclude-standard"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    for page in PAGES:
        for block in blocks(page):
            if block.is_file and block.info not in listed():
                (copy / block.info).parent.mkdir(parents=True, exist_ok=True)
                (copy / block.info).write_text(block.text, encoding="utf-8")
    (copy / "tokenizers").mkdir()
    (copy / "tokenizers" / "llama3.model").touch()  # which the configs for real hardware name
    for name in ("chat", "speedrun", "d12"):  # which docs/tuning.md and docs/speedrun.md make
        (copy / "data" / f"{name}-tokenizer").mkdir(parents=True)
        (copy / "data" / f"{name}-tokenizer" / "tokenizer.json").touch()
    return copy


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_one_that_its_program_takes(tree, monkeypatch, name):
    monkeypatch.chdir(tree)
    monkeypatch.syspath_prepend(str(tree))
    trained = tree / "tokenizers" / "manual"  # docs/data.md makes it, and then reads it
    for block in blocks(ROOT / name):
        for text, shown in block.commands() if block.has_commands else ():
            for command in simple_commands(text):
                try:
                    parse(command)
                    if f"out={trained.relative_to(tree)}" in command:
                        trained.mkdir()
                        (trained / "tokenizer.json").touch()
                except (UserError, SystemExit) as error:
                    refused = f"error: {error}".splitlines() == shown
                    assert refused, f"{block.where}: {shlex.join(command)}: {error}"
    shutil.rmtree(trained, ignore_errors=True)


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a script, up to where it is redirected or piped."""
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        while line.endswith("\\\n") or line.count("'") % 2 or line.count('"') % 2:
            line = line.removesuffix("\\\n") + next(lines)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        ends = [i for i, word in enumerate(words) if set(word) <= set("|<>&;")]
        if words:
            yield words[: min(ends, default=len(words))]


def parse(words: list[str]) -> None:
    """Raises UserError or SystemExit where a program of this repository would."""
    while words[0] in ("./setup/run.sh", "srun") or re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[0] == "torchrun":
        options = get_args_parser().parse_args(words[1:])
        module = ["-m"] if options.module else []
        words = ["python", *module, options.training_script, *options.training_script_args]
    if words[:2] == ["python", "-m"]:
        parse_program(words[2], words[3:])
    elif words[0] == "python" and words[1].endswith(".py"):
        check_options([words[1]], [w for w in words[2:] if w[0] == "-"])


# How the programs that have no config of a run read their arguments.
READ = {
    "apps.main.eval": partial(load, EvalArgs),
    "apps.main.generate": partial(load, GenerateArgs),
    "lingua audit": arguments_of_audit,
    "lingua check": partial(load, CheckArgs),
    "lingua compare": arguments_of_compare,
    "lingua compare plan": partial(load, PilotArgs),
    "lingua convert": partial(load, ConvertArgs),
    "lingua data prepare": partial(load, PrepareArgs, foreign=meta_lingua, partial=True),
    "lingua report": lambda argv: load(ReportArgs, split_folders(argv)[1]),
    "lingua runs": arguments_of_runs,
}
READ_RUN = {"lingua data show": ShowArgs, "lingua data verify": VerifyArgs}


def parse_program(module: str, argv: list[str]) -> None:
    if module == "lingua" and argv and "--help" not in argv[:1]:
        command, argv = find_command(argv)
        module = f"apps.main.{command}" if command in PROGRAMS else f"lingua {command}"
    if "--help" in argv:
        return
    if module == "lingua compare" and argv[:1] == ["plan"]:
        module, argv = "lingua compare plan", argv[1:]
    if module in READ:
        READ[module](argv)
    elif module in READ_RUN:
        folders, keys = split_folders(argv)
        keys += ["data.sources={a: 1}", "data.global_batch_size=16"] if folders else []
        load(READ_RUN[module], keys, meta_lingua, partial=True)
    elif module == "lingua plan":
        own, of_run = split_words(argv)
        load(PlanArgs, own)
        parse_program("apps.main.train", of_run)
    elif module == "apps.main.train":
        config = choose_app(argv).config
        origin = draft(config, argv, meta_lingua)[0].checkpoint.init_from
        # An earlier command makes the model that gives its sizes.
        below = {} if origin is None else {"model.n_heads": LocatedValue.of(4, origin)}
        load(config, argv, meta_lingua, below=below)
    elif module in ("lingua stool", "lingua.stool") and argv[:1] != ["status"]:
        job, arguments, sweep = split_arguments(argv)
        swept = [f"{key}={values[0]}" for key, values in sweep.items()]
        parse_program(job.script or "apps.main.train", [*arguments, *swept])
    elif module == "lingua tokenizer" and argv[0] == "train":
        # What it makes is there already, for the configs that name it.
        keys = ["out=new" if word.startswith("out=") else word for word in argv[1:]]
        load(TokenizerTrainArgs, keys, meta_lingua, partial=True)
    elif module == "lingua checkpoint":
        options = [word for word in argv[1:] if word[0] == "-"]
        check_options(["-m", "lingua", "checkpoint"], [*argv[:1], *options])
    elif module == "apps.bench" and argv[0] == "gpu":
        load(GpuArgs, [word for word in argv[1:] if "=" in word])
    elif module == "apps.bench":
        assert argv[0] in MEASUREMENTS, argv[0]
        keys = [word for word in argv if "=" in word and word != "reference=nanogpt"]
        keys += [] if any(key.startswith("config=") for key in keys) else [f"config={CONFIG}"]
        load(choose_app(keys).config, keys, meta_lingua)
        check_options(["-m", module], [word for word in argv if word[0] == "-"])


def check_options(program: list[str], words: list[str]) -> None:
    """Raises UserError where a word of a command line is none that the program's help names."""
    for word in words:
        if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", help_of(*program)):
            raise UserError(f"{word} is not in the help of {program[-1]}")


@cache
def help_of(*program: str) -> str:
    command = [*python(), *program, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


MISTYPED = """\
python -m apps.main.train config=apps/main/configs/debug.yaml stesp=3
torchrun --procs-per-node 2 -m apps.main.train config=apps/main/configs/debug.yaml
python -m lingua stool config=apps/main/configs/debug.yaml sweep.optim.rl=1e-3,3e-4
python -m lingua checkpoint shw runs/debug
python -m lingua plan config=apps/main/configs/debug.yaml nodse=2
python -m lingua convert source=runs/debug dest=debug-hf
python -m lingua data show runs/debug step=3 wurst=2
python setup/download_tokenizer.py llama3 --folder tokenizers
"""


def test_a_mistyped_word_of_a_command_is_noticed(monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in simple_commands(MISTYPED):
        with pytest.raises((UserError, SystemExit)):
            parse(words)


@pytest.fixture(scope="module")
def toured(tree: Path) -> Path:
    """The copy as it is once the README's commands have run in it."""
    for name, values in {"small": SMALL, "debug": {}}.items():
        file = tree / "apps" / "main" / "configs" / f"{name}.yaml"
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        for group, smaller in values.items():
            config[group] |= smaller
        config["steps"] = 60
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
    for words in (["init"], ["add", "."], ["commit", "--message", "copy"]):  # what stool copies
        identity = ["-c", "user.name=docs", "-c", "user.email=docs@localhost"]
        subprocess.run(["git", *identity, *words], cwd=tree, check=True, capture_output=True)
    run_page(README, tree)
    return tree


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_commands_of_a_page_run_after_those_of_the_readme(toured, name):
    run_page(ROOT / name, toured)


def run_page(page: Path, tree: Path) -> None:
    """Run the commands of a page; a line of output that it shows is one that they print."""
    paths = [str(forking_python()), str(Path(sys.executable).parent), os.environ["PATH"]]
    settings = {"PATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    settings |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(tree / "runs" / "hugging_face")}
    for block in blocks(page):
        if not block.has_commands or block.info == NOT_RUN:
            continue
        for command, shown in block.commands():
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command.replace("./setup/run.sh ", "")],
                cwd=tree,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_S,
            )
            output = f"{block.where}: {command}{done.stdout}"
            refused = any(line.startswith("error:") for line in shown)
            assert (done.returncode != 0) == refused, output
            printed = {masked(line) for line in done.stdout.splitlines()}
            missing = [line for line in shown if masked(line) not in printed | {"", "..."}]
            assert not missing, "\n".join(["not printed:", *missing, output])


@cache
def forking_python() -> Path:
    """A folder of `python` and `torchrun` that do without the seconds of importing torch."""
    folder = Path(python(OF_OTHERS)[0]).parent
    (folder / "torchrun").write_text('#!/bin/sh\nexec python -m torch.distributed.run "$@"\n')
    (folder / "torchrun").chmod(0o700)
    return folder


def masked(line: str) -> str:
    """A line without what differs between machines and sizes: times, numbers, hashes, columns."""
    line = re.sub(r"^\d\d:\d\d:\d\d ", "", line.strip())
    line = re.sub(r"\d{4}-\d\d-\d\dT[\d:.+]+", "#", line)
    line = re.sub(r"(?<![.])\b[0-9a-f]{12,}\b", "#", line)
    line = re.sub(r"(\d[\d.]*[dhms] ?)+", "#s ", line)
    line = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?[KMG]iB|[kM]?\b)", "#", line)
    line = re.sub(r"-{2,}", "-", re.sub(r"\s+", " ", line))
    return re.sub(r" ?\| ?", "|", line).strip()


def test_only_what_differs_between_machines_is_masked():
    here = "08:02:17 step  75  loss  2.151  lr 3.0e-3   1.46k tok/s  0.5 GiB  eta 5.8m"
    there = "step 675  loss  0.9  lr 4.1e-10  970 tok/s  120 MiB  eta 8s"
    assert masked(here) == masked(there)
    assert masked(here) != masked(here.replace("loss", "losses"))
    saved = "saved: '2026-11-22T09:15:39+00:00'"
    assert masked(saved) == masked("saved: '2027-01-31T23:59:07+00:00'") != masked("saved: never")
    assert masked("steps     200    900    announced") != masked("steps  200  900  guarded")
