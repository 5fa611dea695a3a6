"""A study: a base, the tries against it, and what is known of them, all of it from the ledger."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lingua.app import choose_app, main_program
from lingua.base.errors import UserError
from lingua.base.files import temporary
from lingua.data.args import DataArgs, ValidationArgs
from lingua.data.sources import TextData
from lingua.run.records import Record
from lingua.tokenizer.build import build_tokenizer
from lingua.tools.arguments import load_data
from lingua.tools.runs.compare.differences import first_differences
from lingua.tools.runs.compare.statistics import paired
from lingua.tools.slurm.command_line import split_arguments
from lingua.tools.slurm.job import JobArgs
from lingua.tools.study import change
from lingua.tools.study.ledger import LEDGER, Ledger, Line, hash_of
from lingua.tools.study.rule import LEVEL, MIN_PAIRS, Look, Test, look, next_test
from lingua.tools.study.runs import result_of, run_all, run_of

BASE_SEED = 10_000  # distance of the first seeds of two bases
CONFIRM_SEED = 1_000_000  # seeds of confirmations, and their distance
SAME_SEEDS = 3  # runs of each side that show a change to change nothing, in turns
MAX_BASE_FAILURES = 3
GOOD = ("kept", "same", "confirmed")  # verdicts


class NotYetError(Exception):
    """The budget of the call is spent."""


class Study:
    """Its verbs are methods, called inside of `ledger.writing`. Each returns a line of the ledger,
    and goes on where an earlier call was stopped. Arms, a code and a config each, are lines too."""

    def __init__(self, folder: Path, pairs: int | None = None, minutes: float | None = None):
        """`pairs`, `minutes`: what a call may spend; None: as much as it takes."""
        self.folder = folder.absolute()
        self.ledger = Ledger(self.folder)
        if not self.ledger.of("base"):  # or its first line was changed
            raise UserError("; ".join(self.ledger.problems) or f"{folder}: is no whole study")
        self.settings = self.ledger.lines[0]
        if not Path(self.settings["cwd"]).is_dir():  # it was moved, or is another machine's
            self.settings = self.settings | {"cwd": os.getcwd()}
        self._left, self._end = pairs, None if minutes is None else time.monotonic() + 60 * minutes

    def report(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # ---- what the ledger says

    def kept(self, after: int) -> list[Line]:
        """The tries behind number `after` that are kept."""
        good = {v["try"] for v in self.ledger.of("verdict") if v["verdict"] in GOOD}
        return [t for t in self.ledger.of("try") if t["try"] > after and t["try"] in good]

    def arm(self, key: str) -> Line:
        return self.ledger.of("arm", key=key)[0]

    def runs(self, arm: Line) -> dict[int, Line]:
        """The runs of an arm that are over, by seed."""
        return {line["seed"]: line for line in self.ledger.of("run", arm=arm["key"])}

    # ---- arms and runs

    def make_arm(
        self, label: str, code: str, words: Sequence[str], salt: str = "", base: Line | None = None
    ) -> tuple[Line, dict[str, list[Any]]]:
        """The arm of a code and of words beside BASE, and the keys in which it differs from `base`.
        It may have been known by another label; with a `salt` it shares its runs with no other.
        Raises UserError."""
        s = self.settings
        line = [f"config={self.folder / change.BASE}", *words]
        config = change.read_config(self.folder, code, s["script"], s["ranks"], line, s["cwd"])
        keys = {} if base is None else change.changed_keys(base["config"], config)
        key = hash_of({"code": code, "config": config, "salt": salt})
        if not self.ledger.of("arm", key=key):
            values = {"label": label, "code": code, "words": [*words], "config": config}
            self.ledger.append("arm", key=key, **values)
        return self.arm(key), keys

    def combined(self, label: str) -> Line:
        """The newest base with all that is kept since. Raises UserError where it does not fit."""
        newest = self.ledger.of("base")[-1]
        base, kept = self.arm(newest["arm"]), self.kept(newest["after"])
        words = [*base["words"], *(word for t in kept for word in t["changes"])]
        codes = [t for t in kept if t["files"]]
        code = self.arm(codes[0]["arm"])["code"] if codes else base["code"]
        if len(codes) > 1:
            code = change.patched(self.folder, base["code"], [self._diff_of(t) for t in codes])
        return self.make_arm(label, code, words)[0]

    def _diff_of(self, line: Line) -> Path:
        """What a try changes in the code of its base, as a file that `git apply` takes."""
        path = self.folder / f"try{line['try']}.diff"
        codes = [self.arm(line[side])["code"] for side in ("base", "arm")]
        path.write_bytes(change.difference(self.folder, *codes))
        return path

    def train(self, arm: Line, seeds: Sequence[int], measured: bool = True) -> None:
        """Train an arm with these seeds, without those it was trained with. Raises UserError."""
        starts: Counter[int] = Counter()
        while missing := [seed for seed in seeds if seed not in self.runs(arm)]:
            groups = [line["seeds"] for line in self.ledger.of("launch", arm=arm["key"])]
            group = next((group for group in groups if missing[0] in group), None)
            if group is None:
                group = missing
                self.ledger.append("launch", arm=arm["key"], seeds=group)
            name, began = f"{arm['label']}-{arm['key'][:6]}", time.monotonic()
            root = self.folder / "runs" / name / str(group[0])
            ended = run_all(self.folder, self.settings, arm, root, group)
            seconds = (time.monotonic() - began) / len(group)
            starts[group[0]] += 1
            for seed in [seed for seed in group if seed not in self.runs(arm)]:
                run = run_of(root, seed)
                result = result_of(run, ended.get(seed), starts[group[0]], measured)
                if result is not None:
                    place = {"folder": str(run.relative_to(self.folder)), "seconds": seconds}
                    self.ledger.append("run", arm=arm["key"], seed=seed, **place, **result)
                    loss = "trained" if result["loss"] is None else f"{result['loss']:.4f}"
                    self.report(f"{arm['label']}, seed {seed}: {result['failed'] or loss}")

    def pairs(self, base: Line, arm: Line, seeds: Sequence[int]) -> tuple[list[float], str]:
        """(differences in the order of seeds, as far as both were trained, why the arm failed).
        Seeds with which the base failed are left out."""
        before, after = self.runs(base), self.runs(arm)
        differences: list[float] = []
        for seed in [seed for seed in seeds if not before.get(seed, {}).get("failed")]:
            if seed not in before or seed not in after:
                break
            if why := after[seed]["failed"]:
                return differences, f"seed {seed}: {why}"
            if any(before[seed][key] != after[seed][key] for key in ("measure", "text")):
                return differences, f"seed {seed}: measured on another text than the base"
            differences.append(before[seed]["loss"] - after[seed]["loss"])
        return differences, ""

    def add_pairs(self, base: Line, arm: Line, seeds: Sequence[int], least: int) -> None:
        """Train the next pairs, as many at once as the launcher takes. Raises NotYetError where the
        budget is spent, UserError where the base fails."""
        if self._left == 0 or (self._end is not None and time.monotonic() > self._end):
            raise NotYetError
        failed = {seed: run["failed"] for seed, run in self.runs(base).items() if run["failed"]}
        if len(failed) >= MAX_BASE_FAILURES:
            raise UserError(f"the base fails with {len(failed)} seeds: {[*failed.values()][-1]}")
        usable = [seed for seed in seeds if seed not in failed and seed not in self.runs(arm)]
        chosen = usable[: max(least, self.settings["at_once"])][: self._left]
        self.train(base, chosen)
        self.train(arm, [seed for seed in chosen if not self.runs(base)[seed]["failed"]])
        self._left = None if self._left is None else self._left - len(chosen)

    # ---- verbs

    def copy_checkout(self, changes: Sequence[str]) -> str:
        """The hash of the checkout's code now, for a try of these keys. Raises UserError."""
        apps = [word.removeprefix("app=") for word in changes if word.startswith("app=")]
        return change.copy_of_checkout(self.folder, [self.settings["script"], *apps])

    def open_try(self, claim: str, changes: Sequence[str], code: str, why: str) -> Line:
        """The line of a try, written before its first run: a new one, or that of the same change.
        `code` is a hash, or the path of a patch. Raises UserError where it changes nothing, or what
        it may not."""
        s, number, bases = self.settings, len(self.ledger.of("try")) + 1, self.ledger.of("base")
        if wrong := [word for word in changes if change.FIXED.fullmatch(word.partition("=")[0])]:
            raise UserError(f"{wrong[0]}: is given by the study, or measures its runs")
        if apps := [word for word in changes if word.startswith("app=")]:
            check_app(apps)
        base, n = self.arm(bases[-1]["arm"]), len(bases) - 1
        if (self.folder / change.CODES / code).is_dir():
            if code != base["code"] and any(code == self.arm(b["arm"])["code"] for b in bases):
                diff = self.folder / f"base{n}.diff"
                raise UserError(f"the checkout lacks what base {n} has: git apply {diff}")
        else:
            code = change.patched(self.folder, base["code"], [Path(code)])
        files = change.changed_files(self.folder, base["code"], code)
        arm, keys = self.make_arm(f"try{number}", code, [*base["words"], *changes], base=base)
        if arm == base:
            raise UserError("the change changes nothing: config and code are those of the base")
        arms = {"base": base["key"], "arm": arm["key"]}
        for line in self.ledger.of("try", **arms):
            if line["claim"] == claim:
                return line
            if line["test"] and claim != "same":
                was = f"try {line['try']}, which claims that it is {line['claim']}"
                raise UserError(f"claim = {claim}: {was}, has the runs of this change")
        about: Line = {"claim": claim, "why": why, "changes": [*changes], "keys": keys}
        first = s["seed"] + BASE_SEED * n
        about["seeds"] = [first, first + 2 * s["max_pairs"]]  # the last is not one of them
        diff = self._diff_of({"try": number, **arms})
        if files:
            self._check_fit(base["code"], diff)
        about["files"] = files
        about["test"] = None if claim == "same" else asdict(self._next_test(claim))
        return self.ledger.append("try", **{"try": number}, **arms, **about)

    def _check_fit(self, base: str, diff: Path) -> None:
        """Raise UserError where code has, or contradicts, that of a try that is kept: it would be
        credited with both."""
        kept = self.kept(self.ledger.of("base")[-1]["after"])
        for t in [t for t in kept if t["files"]]:
            try:
                change.patched(self.folder, base, [self._diff_of(t), diff])
            except UserError:
                which = f"try {t['try']}, which is kept"
                need = f"the code has that of {which}, or contradicts it: adopt it first"
                raise UserError(need) from None

    def _next_test(self, claim: str) -> Test:
        """By what is known before the try."""
        s, verdicts = self.settings, self.ledger.of("verdict")
        number = 1 + sum(t["test"] is not None for t in self.ledger.of("try"))
        n_kept = len(self.ledger.of("verdict", verdict="kept"))
        # Those of changes that do next to nothing say nothing of others.
        decided = [v for v in verdicts if v.get("deviation", 0.0) > s["effect"] / 100]
        earlier = [(v["deviation"], v["pairs"]) for v in decided]
        margin = s["effect"] / 2 if claim == "simpler" else 0.0
        return next_test(number, n_kept, earlier, s["error"], s["effect"], margin, s["max_pairs"])

    def decide(self, line: Line) -> Line:
        """The verdict of a try, once enough pairs are trained. Raises NotYetError."""
        number, base, arm = line["try"], self.arm(line["base"]), self.arm(line["arm"])
        if (known := self.ledger.verdict(number)) is not None:
            return known
        looks, seeds = self.ledger.of("look", **{"try": number}), range(*line["seeds"])
        shown = looks[-1] if looks else {}  # one that decided it may have been the last line
        shown = {key: value for key, value in shown.items() if key in Look.__annotations__}
        if line["test"] is None:
            shown = self._decide_same(number, base, arm)
        while not shown.get("verdict"):
            differences, failed = self.pairs(base, arm, seeds)
            first = MIN_PAIRS + len(self.ledger.of("look", **{"try": number}))
            for n in range(first, len(differences) + 1):
                shown = asdict(look(Test(**line["test"]), differences[:n]))
                self.ledger.append("look", **{"try": number}, **shown)
                e = f"e = {shown['e']:.3g} of {line['test']['needed']:.3g}"
                self.report(f"try {number}: {n} pairs, better by {shown['mean']:.4g}; {e}")
                if shown["verdict"]:
                    break
            else:
                if failed:
                    shown = {"verdict": "failed", "reason": failed}
                else:
                    self.add_pairs(base, arm, seeds, MIN_PAIRS - len(differences))
        return self.ledger.append("verdict", **{"try": number}, **shown, **self._notes(line, shown))

    def _notes(self, line: Line, shown: Line) -> Line:
        """How long the runs of a try took, and notes on one that is kept."""
        arm = self.arm(line["arm"])
        before, after = self.runs(self.arm(line["base"])), self.runs(arm)
        seconds, notes = sum(run["seconds"] for run in after.values()), []
        if shown["verdict"] == "kept":
            seed = next(iter(after))
            if (ratio := after[seed]["tokens"] / max(1, before[seed]["tokens"])) != 1:
                notes.append(f"on {ratio:.3g} times the tokens")
            if line["files"] and self.settings["script"] != main_program():
                notes.append(self._measure_again(after[seed]))
        return {"seconds": seconds, "notes": notes}

    def _measure_again(self, run: Line) -> str:
        """What the first base's program measures for the checkpoint of another one."""
        first = self.arm(self.ledger.of("base")[0]["arm"])
        words = [self.settings["script"], f"again={self.folder / run['folder']}"]
        command = [sys.executable, "-m", *words]
        env = change.environment(self.folder, first["code"])
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            return "not measured again: the base's code does not load its checkpoint"
        if done.stdout.startswith(f"held-out {run['loss']:.4f} "):
            return "measured again by the base's code: equal"
        why = "it computes another model, or measures otherwise"
        return f"the base's code measures {done.stdout.strip()}, not {run['loss']:.4f}: {why}"

    def _decide_same(self, number: int, base: Line, arm: Line) -> Line:
        """Whether runs of both are equal to the bit, and how much faster the new one is, by runs in
        turns."""
        n, seed = self.settings["same_steps"], self.settings["seed"]
        words = ["deterministic=true", "logging.freq=1"]
        sides: list[Line] = []
        speed: list[float] = []
        for i in range(SAME_SEEDS):
            if i < 2:  # the first pair is of whole runs: a difference may come late
                words += [f"stop_at={n}"] * i
                sides = [
                    self.make_arm(label, side["code"], [*side["words"], *words], f"{label}{i}")[0]
                    for label, side in ((f"try{number}-base", base), (f"try{number}-new", arm))
                ]
            for side in sides[:: -1 if i % 2 else 1]:
                self.train(side, [seed + i], measured=i == 0)
            runs = [self.runs(side)[seed + i] for side in sides]
            records = [Record(self.folder / run["folder"]) for run in runs]
            differs = [f"seed {seed + i}: {run['failed']}" for run in runs if run["failed"]]
            unlike = [] if differs else [x for x in first_differences(*records) if x.first]
            differs += [f"{x.name} of step {x.first}: {x.values}" for x in unlike]
            if differs:
                return {"verdict": "different", "reason": differs[0]}
            old, new = (np.median(r.metrics["tokens_per_s"][n // 4 :]) for r in records)
            speed.append(float(new / old))
        return {"verdict": "same", "steps": n, "speed": sorted(speed)}

    def confirm(self) -> Line:
        """The difference of all that is kept together to the first base, of fresh seeds, on the
        sealed text. The same is measured once. Raises NotYetError."""
        s, begun = self.settings, self.ledger.of("confirm")
        first = self.arm(self.ledger.of("base")[0]["arm"])
        arm = self.combined(f"confirm{len(begun) + 1}")
        number = next((x["reading"] for x in begun if x["arm"] == arm["key"]), len(begun) + 1)
        if arm == first:
            raise UserError("nothing is kept: there is nothing to confirm")
        if known := self.ledger.of("sealed", arm=arm["key"]):
            return known[0]
        tries = [t["try"] for t in self.kept(0)]
        seeds = range(s["seed"] + CONFIRM_SEED * number, s["seed"] + CONFIRM_SEED * (number + 1))
        if number > len(begun):
            ends = [seeds[0], seeds[-1] + 1]
            self.ledger.append("confirm", arm=arm["key"], reading=number, tries=tries, seeds=ends)
        before, after = (
            self.make_arm(f"confirm{number}-{name}", side["code"],
                          [*side["words"], f"validation.skip={s['open']}"])[0]
            for name, side in (("base", first), ("new", arm))
        )  # fmt: skip
        while True:
            differences, failed = self.pairs(before, after, seeds)
            left = s["confirm_pairs"] - len(differences)
            if failed or left <= 0:
                break
            self.add_pairs(before, after, seeds, left)
        estimate = paired(differences, LEVEL)
        good = estimate is not None and estimate.low > 0 and not failed
        values = {"pairs": len(differences)} | (asdict(estimate) if estimate else {})
        values["provisional"] = sum((self.ledger.verdict(n) or {}).get("mean", 0.0) for n in tries)
        about = {"verdict": "confirmed" if good else "not confirmed", "reason": failed}
        return self.ledger.append(
            "sealed", arm=arm["key"], tries=tries, reading=number, **about, **values
        )

    def adopt(self) -> Line:
        """Make what is kept the new base, and write its config and what it changes in the code of
        the one before. Raises UserError."""
        newest, number = self.ledger.of("base")[-1], len(self.ledger.of("base"))
        if not (kept := self.kept(newest["after"])):
            raise UserError("nothing is kept since the newest base: there is nothing to adopt")
        arm, last = self.combined(f"base{number}"), self.ledger.of("try")[-1]["try"]
        (self.folder / f"base{number}.yaml").write_text(yaml.safe_dump(arm["config"]))
        diff = change.difference(self.folder, self.arm(newest["arm"])["code"], arm["code"])
        (self.folder / f"base{number}.diff").write_bytes(diff)
        tries = [t["try"] for t in kept]
        return self.ledger.append("base", arm=arm["key"], after=last, tries=tries)


def new_study(folder: Path, args: Any, words: Sequence[str]) -> Study:
    """A study of what `words` train, keys of the run and of lingua stool; `args` has its own keys.
    Raises UserError."""
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists; a study needs a folder of its own")
    job, run_words, sweep = split_arguments([*words])
    if sweep or job.launcher == "print":
        raise UserError("sweep and launcher=print are not for a study")
    apps = [word for word in run_words if word.startswith("app=")]
    given = {key: value for key, value in asdict(job).items() if value != getattr(JobArgs(), key)}
    if not any(word.startswith("launcher=") for word in words):
        given["launcher"] = "local"
    settings = asdict(args) | {"at_once": job.at_once or 1}
    settings["job"] = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    settings |= {"script": job.script or main_program(), "ranks": job.nodes * job.ngpu}
    settings["cwd"] = os.getcwd()  # which paths of the config may refer to
    new = temporary(folder)  # until it is whole
    (new / change.CODES).mkdir(parents=True)
    try:
        modules = [settings["script"], *(word.removeprefix("app=") for word in apps)]
        code = change.copy_of_checkout(new, modules)
        for line in (run_words, [*apps, f"config={new / change.BASE}"]):  # as tries will read it
            config = change.read_config(new, code, modules[0], settings["ranks"], line, ".")
            (new / change.BASE).write_text(yaml.safe_dump(config, sort_keys=False))
        (new / LEDGER).touch()
        ledger = Ledger(new)
        ledger.append("study", **settings, open=check_sealed(apps, config))
        key = hash_of({"code": code, "config": config, "salt": ""})
        ledger.append("arm", key=key, label="base0", code=code, words=apps, config=config)
        ledger.append("base", arm=key, after=0, tries=[])
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Study(folder)


@dataclass
class TextArgs:
    seed: int = 0
    app: str | None = None
    data: DataArgs = field(default_factory=DataArgs)
    validation: ValidationArgs = field(default_factory=ValidationArgs)


def check_sealed(apps: Sequence[str], config: Mapping[str, Any]) -> int:
    """Bytes, or tokens, of the held-out text that tries see. Tokenizes what is not yet. Raises
    UserError where a source has no text behind it, to seal."""
    known = {key: config[key] for key in config if re.match(r"(data|validation)\.", key)}
    size = config["validation.tokens"] or config["validation.bytes"]
    known |= {"validation.skip": size, "data.batch_size": 1, "data.global_batch_size": 1}
    words = [*apps, *(f"{key}={json.dumps(value)}" for key, value in known.items())]
    if config["validation.skip"]:
        raise UserError(f"validation.skip = {config['validation.skip']}: must be 0 in a study")
    check_app(words)
    _, args = load_data(TextArgs, words, None)
    data, tokenizer = TextData(), build_tokenizer(args.data.tokenizer)
    data.prepare(args, tokenizer, lambda line: print(line, file=sys.stderr))
    left = data.open(args, tokenizer).held_out
    if few := [
        name for name in args.data.read_sources(args.validation.sources) if name not in left
    ]:
        need = "must be less, so that a part of the held-out text is left to be sealed"
        raise UserError(f"validation.bytes = {size}: {need} ({', '.join(few)})")
    return int(size)


def check_app(words: Sequence[str]) -> None:
    """Raise UserError where the app of a command line measures otherwise than apps.main."""
    app = choose_app([*words])
    if app.objective is not None or app.data is not None:
        raise UserError(
            f"app = {app.path}: has rows or losses of its own, which a study cannot use"
        )
