"""lingua trains, evaluates and compares language models:

    python -m lingua train config=apps/main/configs/debug.yaml
    python -m lingua runs runs
    python -m lingua COMMAND --help

Where the package is installed, `lingua` is the same program.
"""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder

from lingua.app import main_program
from lingua.base.errors import UserError, nearest, tool_needed_by
from lingua.parallel.environment import detect_launch
from lingua.parallel.program import run_program

PROGRAMS = ("eval", "generate")  # modules of apps/main, which run any app
# {command: (module, what it does)}, in the order of --help. A module has a function main(argv), and
# nothing is imported until it is run.
COMMANDS = {
    "train": ("lingua.run.program", "train a model, or resume its training"),
    "eval": ("", "score a trained model on benchmarks or your own tasks"),
    "generate": ("", "continue a text, or chat"),
    "runs": ("lingua.tools.commands.runs", "print a table of runs"),
    "report": ("lingua.tools.runs.report.page", "write a page with the curves of runs"),
    "compare": ("lingua.tools.commands.compare", "test whether runs differ beyond chance"),
    "study": ("lingua.tools.commands.study", "try many changes, with few false discoveries"),
    "audit": ("lingua.tools.commands.audit", "check a run: compute steps again and compare"),
    "check": ("lingua.tools.commands.check", "measure a machine before a run"),
    "plan": ("lingua.tools.plan.make", "estimate memory, traffic and time of a run"),
    "tokenizer": ("lingua.tools.commands.tokenizer", "train a tokenizer, or show one"),
    "convert": ("lingua.tools.exchange.convert", "convert to and from other forms of a model"),
    "checkpoint": ("lingua.tools.commands.checkpoint", "show, compare, mark checkpoints"),
    "data prepare": ("lingua.tools.commands.data_prepare", "tokenize the text of a run"),
    "data show": ("lingua.tools.commands.data_show", "print rows of a run and their origin"),
    "data verify": ("lingua.tools.commands.data_verify", "compare token shards with their hashes"),
    "stool": ("lingua.tools.slurm.command_line", "launch runs on Slurm or on this machine"),
}


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return
    name, arguments = find_command(words)
    if detect_launch().rank == 0:
        sys.meta_path.insert(0, TorchNotice())
    if name in PROGRAMS:
        module = import_module(main_program(name))
    else:
        with tool_needed_by(f"lingua {name}"):
            module = import_module(COMMANDS[name][0])
    gc.freeze()  # the imports stay: run_program froze only what came before them
    module.main(arguments)


class TorchNotice(MetaPathFinder):
    """Finds no module, and prints a line before the seconds in which torch is imported."""

    def find_spec(self, name: str, *where: object) -> None:
        if name == "torch":
            sys.meta_path.remove(self)
            command, _ = find_command(sys.argv[1:])
            print(f"lingua {command}: importing torch", file=sys.stderr, flush=True)


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """(command, the words after it). Raises UserError where there is none of this name."""
    for n in (1, 2):
        if (name := " ".join(words[:n])) in COMMANDS:
            return name, list(words[n:])
    name = " ".join(words[:2]) if words[0] == "data" else words[0]
    raise UserError(f"{name}: unknown command{nearest(name, COMMANDS)}; see --help")


def help_text() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join([str(__doc__).strip(), "", "Commands:", *rows])


def run() -> None:
    """The console script `lingua`."""
    run_program(main)


if __name__ == "__main__":
    run()
