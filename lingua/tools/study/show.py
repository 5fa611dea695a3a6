"""What a study shows: a line for a try, a table of all, and the same for programs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lingua.base.format import align, counted, short_time
from lingua.tools.study.ledger import LEDGER, Ledger, Line


def change_of(line: Line) -> str:
    """What a try changes, in a few words."""
    more = f" and {len(line['files']) - 2} more" if line["files"][2:] else ""
    code = [f"code: {', '.join(line['files'][:2])}{more}"] if line["files"] else []
    return " ".join([*line["changes"], *code])


def difference_of(ledger: Ledger, line: Line) -> str:
    runs = ledger.of("run")
    unit = runs[0]["measure"].replace("_", " ") if runs else ""
    low, high = (f"{x:.3g}" if x is not None else "?" for x in (line["low"], line["high"]))
    return f"{line['mean']:.3g} {unit} ({low} to {high})"


def verdict_of(ledger: Ledger, line: Line) -> str:
    """What became of a try."""
    if (v := ledger.verdict(line["try"])) is None:
        looks = ledger.of("look", **{"try": line["try"]})
        pairs = counted(looks[-1]["pairs"] if looks else 0, "pair")
        return f"not decided, {pairs} so far; the same command goes on"
    if v["verdict"] == "same":
        low, median, high = (v["speed"][i] for i in (0, len(v["speed"]) // 2, -1))
        speed = f"{median:.3g} times as fast ({low:.3g} to {high:.3g})"
        return f"the same to the bit in {v['steps']} steps, {speed}; kept"
    if v["verdict"] != "kept":
        return f"{v['reason']}; {v['verdict']}"
    spent = f"{v['pairs']} pairs, {short_time(v['seconds'])}"
    text = f"better by {difference_of(ledger, v)}, {spent}; kept provisionally"
    return "; ".join([text, *v["notes"]])


def confirmation(ledger: Ledger, line: Line) -> str:
    tries = f"tries {', '.join(map(str, line['tries']))} together"
    if line["reason"]:
        return f"{tries}: {line['reason']}; not confirmed"
    how = f"{line['pairs']} fresh pairs on the sealed text, reading {line['reading']} of it"
    over = f"the provisional estimates add up to {line['provisional']:.3g}, which overstates"
    return f"{tries}: {line['verdict']}, better by {difference_of(ledger, line)}, {how}; {over}"


def rule(test: dict[str, Any] | None) -> Iterator[str]:
    """What was fixed before the first run of a try."""
    if test is not None:
        size, prior = test["margin"] or test["effect"], f"{test['variance'] ** 0.5:.3g}"
        yield (
            f"  rule: kept at e = {test['needed']:.4g}, as number {test['number']} of the series; "
            f"dropped where mean and 0.84 standard errors are below half of {size:g}, or after "
            f"{test['max_pairs']} pairs; "
            + (f"deviation {prior} by earlier tries" if test["freedom"] else "no prior")
        )


def lines(ledger: Ledger, verb: str, line: Line | None) -> Iterator[str]:
    """The text of a verb's result; without a `line` it is not decided."""
    if verb == "try":
        [tried] = ledger.of("try", **{"try": (line or {})["try"]})
        yield f"try {tried['try']}: {change_of(tried)}: {verdict_of(ledger, tried)}"
        yield from rule(tried["test"])
    elif verb == "confirm":
        yield confirmation(ledger, line) if line else "not confirmed yet; the same command goes on"
    elif verb == "adopt":
        number = len(ledger.of("base")) - 1
        diff = ledger.folder / f"base{number}.diff"
        yield f"base {number}: tries {', '.join(map(str, (line or {})['tries']))} are in it"
        yield f"  config  {ledger.folder / f'base{number}.yaml'}"
        if diff.stat().st_size:
            yield f"  code    git apply {diff}, unless the checkout has it, and commit"
    else:
        yield from table(ledger)


def table(ledger: Ledger) -> Iterator[str]:
    s, n = ledger.lines[0], len(ledger.lines)
    yield f"effect {s['effect']:g}, error {s['error']:g}, open text {s['open']:,}; {n} lines"
    yield from align(rows_of(ledger), left=3)


def rows_of(ledger: Ledger) -> list[list[str]]:
    """A title, and a row for each base, try, confirmation and problem of the ledger."""
    rows = [["", "change", "verdict"]]
    for number, base in enumerate(ledger.of("base")):
        has = f"tries {', '.join(map(str, base['tries']))}" * bool(base["tries"])
        rows.append([f"base {number}", has, ""])
        for t in ledger.of("try", base=base["arm"]):
            why = f" ({t['why']})" * bool(t["why"])
            rows.append([f"try {t['try']}", change_of(t) + why, verdict_of(ledger, t)])
    rows += [["sealed", "", confirmation(ledger, line)] for line in ledger.of("sealed")]
    return rows + [["problem", "", problem] for problem in ledger.problems]


def studies_in(folders: Sequence[str]) -> list[tuple[str, list[list[str]]]]:
    """(title, rows) of each folder that is a study, for the page of lingua report."""
    ledgers = [Ledger(Path(folder)) for folder in folders if (Path(folder) / LEDGER).exists()]
    return [(f"Study {ledger.folder.absolute().name}", rows_of(ledger)) for ledger in ledgers]


def as_json(ledger: Ledger, verb: str, line: Line | None) -> dict[str, Any]:
    """The same for programs."""
    if verb in ("new", "show"):
        kinds = ("study", "base", "try", "verdict", "sealed")
        parts = {kind: ledger.of(kind) for kind in kinds}
        return {**parts, "problems": ledger.problems}
    if verb == "try":
        [tried] = ledger.of("try", **{"try": (line or {})["try"]})
        text = next(lines(ledger, verb, tried))
        return {"text": text, "try": tried, "verdict": ledger.verdict(tried["try"])}
    return {"text": next(lines(ledger, verb, line)), "result": line}
