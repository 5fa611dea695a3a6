"""An audit from its plan to its verdict."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lingua.app import choose_app
from lingua.base.dump_dir import AUDIT, CONFIG, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.format import counted
from lingua.config.load import load, meta_lingua
from lingua.parallel.alone import one_process
from lingua.tools.audit.again import PATIENCE_S, Task, compute
from lingua.tools.audit.args import AuditArgs
from lingua.tools.audit.due import earlier_version
from lingua.tools.audit.files import RunFiles
from lingua.tools.audit.independent import Implementation
from lingua.tools.audit.ranks import Ranks, reason_of
from lingua.tools.audit.records import Finding, check_checkpoints, check_expected, check_lines
from lingua.tools.audit.segments import Segment, choose, segments_of
from lingua.tools.audit.verdict import CODES, DIFFERS, FITS, NOT_COMPARED, Verdict, compare, worst

MAX_WRONG = 3  # things that do not fit to name in a verdict

Say = Callable[[str], None]


def audit(folder: Path, args: AuditArgs, words: Sequence[str], say: Say) -> int:
    """Audit the run in a dump dir, and return the exit code. Called by every rank; `say` prints a
    line on rank 0. `words` are keys of the training program. Raises UserError."""
    ranks, record = Ranks(), RunFiles(folder)
    by = Implementation.read(args.by) if args.by is not None else None
    if by is not None and ranks.n > 1:
        raise UserError(f"by = {args.by}: computes in one process, and here are {ranks.n}")
    wrong = ranks.share("types", lambda: check_types(record))
    verdict = wrong_files([Finding(text, False) for text in wrong], say)
    verdict = verdict or verdict_on(record, args, words, by, ranks, say)
    say(f"verdict: {verdict.text}")
    ranks.gather("end", None)  # the store is rank 0's
    if ranks.rank == 0:
        what = "steps computed again" if args.run else "files"
        entry = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": what + (f" by {by.file}" if by else ""),
            "by": by and asdict(by),
            "verdict": verdict.kind,
            "detail": "; ".join(filter(None, (verdict.detail, *verdict.conditions))),
        }
        if args.out is not None:
            _write(Path(args.out), entry)
        if args.record:
            _write(folder / AUDIT, entry)
    return CODES[verdict.kind]


def check_types(record: RunFiles) -> list[str]:
    """What the files of a run have that no run writes. By rank 0. Raises UserError where the folder
    has no run, and where a file cannot be read."""
    if not os.path.exists(record.folder / CONFIG):
        raise UserError(f"{record.folder}: must be the dump dir of a run, with its {CONFIG}")
    return list(dict.fromkeys(record.wrong()))


def verdict_on(
    record: RunFiles,
    args: AuditArgs,
    words: Sequence[str],
    by: Implementation | None,
    ranks: Ranks,
    say: Say,
) -> Verdict:
    """The verdict on a run whose files are as a run writes them."""
    segments: list[Segment] = []
    conditions = ranks.share("version", lambda: earlier_version(record))
    if args.run:
        seed = args.seed if args.seed is not None else datetime.now(UTC).date().isoformat()
        chosen = ranks.share(
            "segments", lambda: [s.to_json() for s in choose(record, args.steps, args.sample, seed)]
        )
        segments = [Segment.from_json(values) for values in chosen]
        if args.steps is None:
            say(f"{counted(len(segments), 'segment')} drawn by seed={seed}")
        ranks.share("checks", lambda: check(record, words))
    if ranks.share("running", lambda: record.is_running):
        say(f"{record.folder} is running: what it has recorded so far is checked")
    files = ranks.share("files", lambda: check_files(record, args, segments, say))
    verdicts = [Verdict(**files)] if files else []
    verdicts += compute_all(record, args, segments, words, by, ranks, say)
    verdict = worst(verdicts)
    conditions += ranks.share("left out", lambda: left_out(record, args, segments))
    if by is not None:
        conditions.append(f"by {by}, an independent implementation: it cannot import lingua")
    return replace(verdict, conditions=[*verdict.conditions, *conditions])


def check(record: RunFiles, words: Sequence[str]) -> None:
    """Raise UserError, before anything is computed, where `words` are wrong."""
    if words:
        argv = [f"config={record.folder / CONFIG}", *words]
        load(choose_app(argv).config, argv, meta_lingua)


def check_files(
    record: RunFiles, args: AuditArgs, segments: Sequence[Segment], say: Say
) -> dict[str, Any] | None:
    """The verdict on the files, without the checkpoints that are in no segment if some are to be
    computed; None where that decides and nothing is wrong. By rank 0."""
    used = {str(path) for s in segments for path in (s.start, s.end)} if args.run else None
    expected = [check_expected(record, args.expect)] if args.expect is not None else []
    findings = expected + check_lines(record)
    with one_process():
        findings += check_checkpoints(record, used)
    if wrong := wrong_files(findings, say):
        return vars(wrong)
    if expected and expected[0].fits is None:
        return vars(Verdict(NOT_COMPARED, expected[0].text))
    if args.run:
        return None
    if not any(f.fits for f in findings):
        return vars(Verdict(NOT_COMPARED, "the run has recorded no hashes"))
    return vars(Verdict(FITS))


def wrong_files(findings: Sequence[Finding], say: Say) -> Verdict | None:
    """The verdict where a finding does not fit. Each is printed."""
    for text, fits in findings:
        say(text if fits is not False else f"does not fit: {text}")
    wrong = [f.text for f in findings if f.fits is False]
    return Verdict(DIFFERS, f"in its files: {'; '.join(wrong[:MAX_WRONG])}") if wrong else None


def left_out(record: RunFiles, args: AuditArgs, segments: Sequence[Segment]) -> list[str]:
    """What of a run's steps the verdict does not cover, where some are computed."""
    if not args.run:
        return []
    conditions = []
    n = sum(s.last - s.first + 1 for s in segments)
    ends = segments_of(record)
    if n < (of := ends[-1].last - ends[0].first + 1):
        conditions.append(f"{n} of {counted(of, 'step')} computed again")
    if ends[-1].end is None and ends[-1].last == record.config.get("steps"):
        conditions.append(f"there is no checkpoint of the last step, {ends[-1].last}")
    if not args.heldout and any(any(record.lines(VALIDATION, s.first, s.last)) for s in segments):
        conditions.append("held-out losses not computed again")
    return conditions


def compute_all(
    record: RunFiles,
    args: AuditArgs,
    segments: Sequence[Segment],
    words: Sequence[str],
    by: Implementation | None,
    ranks: Ranks,
    say: Say,
) -> Iterator[Verdict]:
    """Yields the verdict on each segment."""
    with ExitStack() as folders:
        made = ""
        if ranks.rank == 0:
            made = folders.enter_context(TemporaryDirectory(prefix="lingua-audit-"))
        shared = ranks.share("folder", lambda: made)
        for i, segment in enumerate(segments):
            task = Task(segment, record, words, Path(shared, str(i)), args.heldout, by)
            verdict = compute_one(task, ranks)
            say(f"{segment}: {verdict.text}")
            for note in verdict.notes:
                say(f"  {note}")
            yield verdict.with_causes(f"{segment}: ")


def compute_one(task: Task, ranks: Ranks) -> Verdict:
    """The verdict on a segment, which all ranks compute as one mesh."""
    computed, reason, name = None, "", f"reason/{task.folder.name}"
    try:
        computed = compute(task, ranks.meet_anew)
    except Exception as error:  # the training program may end with any
        reason = reason_of(error)
        if not ranks.have_met(name, reason, PATIENCE_S):  # they wait for this one in a collective
            raise UserError(f"rank {ranks.rank}: {reason}", local=True) from None
    reasons = ranks.gather(name, reason)

    def verdict() -> dict[str, Any]:
        if computed is None or any(reasons):
            return vars(Verdict(NOT_COMPARED, next(filter(None, reasons))))
        return vars(compare(task, computed))

    try:
        return Verdict(**ranks.share(f"verdict/{task.folder.name}", verdict))
    except UserError as error:
        return Verdict(NOT_COMPARED, str(error))
    finally:
        if ranks.rank == 0:
            shutil.rmtree(task.folder, ignore_errors=True)


def _write(place: Path, entry: dict[str, Any]) -> None:
    try:
        write_atomically(place, json.dumps(entry, indent=1))
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error}") from None
