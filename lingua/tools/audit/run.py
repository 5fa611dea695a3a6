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

import torch

from lingua.app import choose_app
from lingua.base.dump_dir import AUDIT, CONFIG, VALIDATION
from lingua.base.errors import UserError
from lingua.base.files import write_atomically
from lingua.base.format import counted
from lingua.config.load import load, meta_lingua
from lingua.parallel.alone import one_process
from lingua.parallel.environment import Launch
from lingua.tools.audit.again import PATIENCE_S, Computed, Task, check_memory, compute
from lingua.tools.audit.args import AuditArgs
from lingua.tools.audit.due import earlier_version
from lingua.tools.audit.files import RunFiles
from lingua.tools.audit.independent import Implementation
from lingua.tools.audit.ranks import Ranks, bits, outliers, reason_of
from lingua.tools.audit.records import Finding, check_checkpoints, check_expected, check_lines
from lingua.tools.audit.segments import Segment, choose, segments_of
from lingua.tools.audit.verdict import CODES, DIFFERS, FITS, NOT_COMPARED, Verdict, compare, worst

MAX_WRONG = 3  # things that do not fit to name in a verdict

Say = Callable[[str], None]


def audit(folder: Path, args: AuditArgs, words: Sequence[str], say: Say) -> int:
    """Audit the run in a dump dir, and return the exit code. Called by every rank; `say` prints a
    line on rank 0. `words` are keys of the training program. Raises UserError."""
    ranks, record = Ranks(), RunFiles(folder)
    if args.ranks == "all" and ranks.n < 3:
        need = "needs three ranks or more, such as torchrun --nproc-per-node 3"
        raise UserError(f"ranks = all: {need}; here is {counted(ranks.n, 'rank')}")
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
        how = ", each rank alone" if args.ranks == "all" else f" by {by.file}" if by else ""
        entry = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": what + how,
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
        ranks.share("checks", lambda: check(record, args, segments, words, ranks.launch))
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


def check(
    record: RunFiles,
    args: AuditArgs,
    segments: Sequence[Segment],
    words: Sequence[str],
    launch: Launch,
) -> None:
    """Raise UserError, before anything is computed, where `words` are wrong, or one rank cannot
    hold a model that it is to compute alone."""
    if words:
        argv = [f"config={record.folder / CONFIG}", *words]
        load(choose_app(argv).config, argv, meta_lingua)
    for segment in segments if args.ranks == "all" else ():
        if (saved := segment.start or segment.end) is not None:
            check_memory(saved, launch.local_world_size)


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
    """Yields the verdict on each segment, computed on one mesh or by every rank separately."""
    separately = args.ranks == "all"
    if separately:
        ranks.separate()
        words = [*words, *["deterministic=true"] * (not record.config.get("deterministic"))]
    on_ranks = _on_each if separately else _together
    with ExitStack() as folders:
        made = ""
        if separately or ranks.rank == 0:
            made = folders.enter_context(TemporaryDirectory(prefix="lingua-audit-"))
        shared = made if separately else ranks.share("folder", lambda: made)
        for i, segment in enumerate(segments):
            task = Task(segment, record, words, Path(shared, str(i)), args.heldout, by)
            verdict = on_ranks(task, ranks)
            say(f"{segment}: {verdict.text}")
            for note in verdict.notes:
                say(f"  {note}")
            yield verdict.with_causes(f"{segment}: ")


def _together(task: Task, ranks: Ranks) -> Verdict:
    """The verdict on a segment that all ranks compute as one mesh."""
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


def _on_each(task: Task, ranks: Ranks) -> Verdict:
    """The verdict on a segment that every rank computes alone: which ranks are not as most, and
    what the first of the others is, compared with the record."""
    computed: Computed | None = None
    try:
        computed = compute(task)
        result = bits(computed)
    except (MemoryError, torch.OutOfMemoryError) as error:
        result = {"error": f"ranks = all: one rank cannot hold this model: {error}"}
    except Exception as error:
        result = {"error": reason_of(error)}
    results = ranks.gather(f"result/{task.folder.name}", result)
    if errors := [r["error"] for r in results if "error" in r]:
        return Verdict(NOT_COMPARED, errors[0])
    if ranks.rank:  # rank 0 reports
        return Verdict(NOT_COMPARED)
    try:
        wrong = outliers(results, task.segment.last)
    except UserError as error:
        return Verdict(NOT_COMPARED, str(error))
    if wrong:
        return Verdict(DIFFERS, f"between ranks: {'; '.join(wrong)}")
    assert computed is not None  # no rank has an error
    try:
        verdict = compare(task, computed)
    except UserError as error:
        return Verdict(NOT_COMPARED, str(error))
    shutil.rmtree(task.folder, ignore_errors=True)
    return replace(verdict, notes=[f"all {ranks.n} ranks compute equal bits", *verdict.notes])


def _write(place: Path, entry: dict[str, Any]) -> None:
    try:
        write_atomically(place, json.dumps(entry, indent=1))
    except OSError as error:
        raise UserError(f"{place}: cannot be written: {error}") from None
