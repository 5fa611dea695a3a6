"""Many changes against one base, and few false discoveries among those that are kept:

    python -m lingua study new runs/rates config=apps/main/configs/small.yaml steps=300
    python -m lingua study try runs/rates optim.lr=5e-3 why="the rate was never tuned"
    python -m lingua study try runs/rates app=my_block
    python -m lingua study try runs/rates patch=my.diff claim=same
    python -m lingua study confirm runs/rates
    python -m lingua study adopt runs/rates
    python -m lingua study show runs/rates

A try changes keys, and the code where the checkout differs from the base's. Other keys of `new` are
those of the run and of lingua stool. --json prints the result for programs. Exit code: 0 better, or
the same as claimed; 1 not; 2 a mistake; 3 not decided, since the budget of the call is spent.
"""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lingua.base.errors import UserError
from lingua.base.format import printable
from lingua.config.load import load
from lingua.config.schema import Free, bounds, require
from lingua.tools.arguments import split_folders

VERBS = ("new", "try", "confirm", "adopt", "show")


@dataclass
class StudyArgs:
    effect: Free[float] = 0.01  # the smallest gain that is worth keeping, in nats per byte
    error: Free[float] = 0.1  # of what is kept, the share that may be false, in the mean
    max_pairs: Free[int] = 40  # of a try
    confirm_pairs: Free[int] = 8  # of a confirmation
    same_steps: Free[int] = 20  # in which a change that claims to change nothing is compared
    minutes_per_run: Free[float | None] = None  # a run that takes longer has failed
    gib_per_run: Free[float | None] = None  # and one whose folder is larger
    seed: Free[int] = 42  # of the first pair; others follow

    def validate(self) -> Iterator[tuple[str, str]]:
        positive = ("effect", "minutes_per_run", "gib_per_run")
        yield from require(self, "above 0", lambda v: v > 0, *positive)
        yield from require(self, "above 0 and below 1", lambda v: 0 < v < 1, "error")
        yield from bounds(self, 2, "max_pairs", "confirm_pairs", "same_steps", maximum=1000)


@dataclass
class CallArgs:
    # that it is better, simpler (worse by less than half of the effect), or the same to the bit
    claim: Free[Literal["better", "simpler", "same"]] = "better"
    why: Free[str] = ""  # the reason, for the ledger
    patch: Free[str | None] = None  # by `git diff`: in place of what differs in the checkout
    pairs: Free[int | None] = None  # that this call may train
    minutes: Free[float | None] = None  # after which this call begins no other pair

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from bounds(self, 1, "pairs")
        yield from require(self, "above 0", lambda v: v > 0, "minutes")


def main(argv: Sequence[str]) -> None:
    verb, cls = argv[0] if argv else "", CallArgs
    cls = StudyArgs if verb == "new" else CallArgs  # type: ignore[assignment]
    folders, words = split_folders([word for word in argv[1:] if word != "--json"])
    if {"-h", "--help"} & set(argv):
        load(cls, ["--help"], program_doc=__doc__)
    if verb == "new" and not folders:  # it does not exist yet, and its name may have a =
        folders, words = words[:1], words[1:]
    if verb not in VERBS or len(folders) != 1:
        raise UserError(f"usage: python -m lingua study {'|'.join(VERBS)} DIR [key=value ...]")
    names = {field.name for field in fields(cls)}
    others = [word for word in words if word.partition("=")[0] not in names]
    args: Any
    args, _ = load(cls, [word for word in words if word not in others])
    known = ("pairs", "minutes") if verb == "confirm" else ()
    for word in words if verb not in ("new", "try") else ():
        if word.partition("=")[0] not in known:
            raise UserError(
                f"{word}: unknown key of study {verb}; must be {' or '.join(known) or 'left out'}"
            )
    # Imported here, since --help needs no numpy.
    from lingua.tools.study.runs import Interrupted
    from lingua.tools.study.show import as_json, lines
    from lingua.tools.study.study import GOOD, NotYetError, Study, new_study

    line, code = None, 0
    try:
        if verb == "new":
            study = new_study(Path(folders[0]), args, others)
        else:
            study = Study(Path(folders[0]), args.pairs, args.minutes)
        if verb in ("try", "confirm", "adopt"):
            code_of = args.patch  # the checkout as it is now, however long others write
            if verb == "try" and code_of is None:
                code_of = study.copy_checkout(others)
            with study.ledger.writing(study.report):
                if verb == "try":
                    line = study.open_try(args.claim, others, code_of, args.why)
                    line = study.decide(line)
                else:
                    line = study.confirm() if verb == "confirm" else study.adopt()
                code = 0 if line.get("verdict", "kept") in GOOD else 1
    except NotYetError:
        code = 3
    except Interrupted as stopped:
        print(f"stopped by {stopped}; the same command goes on", file=sys.stderr)
        sys.exit(128 + signal.Signals[str(stopped)])
    if "--json" in argv:
        print(json.dumps({"code": code, **as_json(study.ledger, verb, line)}, indent=1))
    else:
        for text in lines(study.ledger, verb, line):
            print(printable(text))
    sys.exit(1 if verb == "show" and study.ledger.problems else code)
