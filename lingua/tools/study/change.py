"""What a try changes: keys, code, or both, as a difference to the base, complete and allowed.

The code of a try is a copy of the checkout, or of the base's code with a patch. All files count but
pages and tests, and what measures a run may not differ.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lingua.base.dump_dir import CODE, CODE_DIFF
from lingua.base.errors import UserError
from lingua.base.files import temporary
from lingua.run.files import flat
from lingua.tools.slurm.freeze import freeze_code

BASE = "base.yaml"  # the config of the first base, which all command lines begin with
CODES = "codes"  # folder of a study: copies of code by their hash
NOT_CODE = re.compile(r"(docs|tests|\.git[^/]*|\.ci)/.*|.*\.md|.*__pycache__/.*")
# What a run is measured by, as files, and as lines of the others.
MEASURE = re.compile(
    r"lingua/(tokenizer|tools/(prepare|study))/.*|lingua/tools/commands/study\.py"
    r"|lingua/data/(rows|sources|shards|chat|token_\w+)\.py|lingua/monitor/(held_out|means|metrics|reporter)\.py"
    r"|lingua/model/head\.py|lingua/tools/runs/held_out\.py|apps/onefile/run\.py"
)
MEASURED = re.compile(rb"[^\n]*# measured\b.*?# end of measured\n", re.DOTALL)
NAMES = ("name", "dump_dir", "seed")  # keys that a study gives
FIXED = re.compile(  # others, and those of the text that is measured
    r"seed|name|dump_dir|stop_at|checkpoint\.path|validation\..*|data\.(tokenizer\..*|add_[be]os"
    r"|chat(\..*)?|root_dir|cache_dir|source_files(\..*)?)"
)
# Print the config of a command line, as the code that is imported reads it.
READ = """
import sys
from importlib import import_module
from lingua.config.load import to_yaml
from lingua.parallel.program import run_program
check = lambda: import_module(sys.argv[1]).check(sys.argv[3:], int(sys.argv[2]))
run_program(lambda: print("---", to_yaml(check()[0]), sep="\\n"))
"""


def copy_of_checkout(study: Path, modules: Sequence[str]) -> str:
    """Copy the checkout that this program runs from, unless the study has this code. Returns its
    hash. Raises UserError."""
    new, spec = temporary(study / CODES / "new"), find_spec(modules[0])
    freeze_code(Path(str(spec and spec.origin)), new, modules, [], [], lambda line: None)
    return _keep(new)


def patched(study: Path, base: str, patches: Sequence[Path]) -> str:
    """As copy_of_checkout, of the code with the hash `base` and what patches of `git diff` change.
    Raises UserError where they do not apply."""
    new = temporary(study / CODES / "new")
    shutil.copytree(study / CODES / base, new, symlinks=True)
    # In a repository git would look for the files elsewhere.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(new.parent)}
    try:
        for patch in patches:
            command = ["git", "apply", "--whitespace=nowarn"]
            command += [f"--exclude={name}" for name in ("docs/*", "tests/*", "*.md")]
            command.append(str(patch.absolute()))
            done = subprocess.run(command, cwd=new / CODE, env=env, capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip()
                raise UserError(f"{patch}: does not apply to the code of the base: {why}")
            with (new / CODE_DIFF).open("ab") as file:
                file.write(patch.read_bytes())
        return _keep(new)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _keep(new: Path) -> str:
    """Name a copy of code by its hash, or remove it where there is one of this hash. What does not
    count is not kept."""
    for path in [path for path in (new / CODE).rglob("*") if path.is_file()]:
        if NOT_CODE.fullmatch(path.relative_to(new / CODE).as_posix()):
            path.unlink()
    content = repr(sorted(files_of(new / CODE).items()))
    name = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    if new.with_name(name).exists():
        shutil.rmtree(new)
    else:
        new.rename(new.with_name(name))
    return name


def files_of(code: Path) -> dict[str, str]:
    """{file: hash of its content} of the files that count."""
    files = {path.relative_to(code).as_posix(): path for path in code.rglob("*") if path.is_file()}
    return {
        name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for name, path in files.items()
    }


def changed_files(study: Path, base: str, code: str) -> list[str]:
    """The files in which two copies of code differ. Raises UserError where one is part of what
    measures a run."""
    before, after = (study / CODES / name / CODE for name in (base, code))
    changed = sorted({name for name, _ in files_of(before).items() ^ files_of(after).items()})

    def marked(name: str) -> list[list[bytes]]:
        files = [folder / name for folder in (before, after)]
        return [MEASURED.findall(file.read_bytes()) if file.exists() else [] for file in files]

    wrong = [name for name in changed if MEASURE.fullmatch(name)]
    lines = [name for name in changed if len(set(map(repr, marked(name)))) > 1]
    wrong += [f"{name}, lines between its marks `measured`" for name in lines]
    if wrong:
        what = "it is part of what measures a run, and the try would measure something else"
        raise UserError(f"{', '.join(wrong)}: may not change in a study: {what}")
    return changed


def difference(study: Path, base: str, code: str) -> bytes:
    """What `git apply` in the base's code changes into the other."""
    sides = [f"{CODES}/{name}/{CODE}" for name in (base, code)]
    # Whatever the user's git is set to.
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    command = ["git", "diff", "--no-index", "--binary", *options, *sides]
    shown = subprocess.run(command, cwd=study, capture_output=True, check=False).stdout
    for side in sides:
        for letter in "ab":
            shown = shown.replace(f"{letter}/{side}/".encode(), f"{letter}/".encode())
    return shown


def read_config(
    study: Path, code: str, script: str, ranks: int, words: Sequence[str], cwd: str
) -> dict[str, Any]:
    """{"optim.lr": 0.001, ...}: the config of a command line as that code reads it, without NAMES.
    Raises UserError."""
    command = [sys.executable, "-c", READ, script, str(ranks), *words]
    env = environment(study, code)
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(done.stderr.rpartition("error: ")[2][-2000:].strip())
    config = flat(yaml.safe_load(done.stdout.rpartition("---\n")[2]))
    return {key: value for key, value in config.items() if key not in NAMES}


def environment(study: Path, code: str) -> dict[str, str]:
    """This process's environment, for one that imports the modules of a copy."""
    path = [str(study / CODES / code / CODE), os.environ.get("PYTHONPATH")]
    names = ("PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **dict.fromkeys(names, "1"),
    }


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{key: [value in the base, in the try]} of the keys that differ. Raises UserError where one is
    the study's, or of the text that is measured."""
    changed = {
        key: [before.get(key), after.get(key)]
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    }
    wrong = [key for key in changed if FIXED.fullmatch(key)]
    if set(before.get("data.sources") or ()) != set(after.get("data.sources") or ()):
        wrong.append("data.sources")
    if wrong:
        what = "the text that is measured, and how, is that of the base"
        raise UserError(f"{', '.join(wrong)}: may not change in a study: {what}")
    return changed
