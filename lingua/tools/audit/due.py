"""Which lines a run must have: those that its config makes due, each once, and no other. Decided
from the record alone, without the code that wrote it."""

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from lingua.base.dump_dir import CONFIG, METRICS, VALIDATION
from lingua.config.values import shorten
from lingua.monitor.metrics import LINKED_EVENTS
from lingua.tools.audit.files import Config, RunFiles, config_of, read_text

EARLIER = "recorded by an earlier version: "


def starts_with_configs(record: RunFiles) -> list[tuple[int, Config]]:
    """(the step, the config) of each start. Earlier versions have not recorded a start's config: it
    is known where there is one start alone. Raises UserError."""
    starts = record.starts
    if len(starts) == 1 and "config" not in starts[0]:
        return [(starts[0]["step"], record.config)]
    return [(start["step"], record.start_config(start)) for start in starts]


def earlier_version(record: RunFiles) -> list[str]:
    """What of a run's record is not part of a chain, since an earlier version has written it."""
    own = [event for event in record.events if event["event"] in LINKED_EVENTS]
    notes = []
    if record.summary[2]:
        notes.append(f"{EARLIER}lines are not part of a chain")
    if not any(event["event"] == "start" for event in own):
        notes.append(f"{EARLIER}no start is recorded")
    elif not all(event.get("chain") for event in own):
        notes.append(f"{EARLIER}events are not part of the chain")
    return notes


# ---- metrics.jsonl


def wrong_lines(record: RunFiles) -> Iterator[str]:
    """The first line of metrics.jsonl, or the first missing one, that is not as the config of the
    start before it makes it due. Raises UserError."""
    newest = max((c.step for c in record.checkpoints), default=0)  # before the lines grow
    configs = iter(starts_with_configs(record))
    path, config, last = record.folder / METRICS, Config(), 0
    has_started, has_stopped = False, False

    def missing(up_to: int) -> Iterator[str]:
        """The line that is due next, where it is due up to a step."""
        due = next_line(config, last)
        if due is not None and due <= up_to:
            yield f"{path}: the line of step {due} is missing"

    for line in record.lines(METRICS):
        step, event = line["step"], line.get("event")
        if event not in (None, *LINKED_EVENTS):
            continue  # of an app, about any step
        if event is not None:
            failed = event == "stop" and line.get("reason") == "error"
            yield from missing(step - 1 if failed else step)
            if has_started and step < last:
                yield f"{path}: the {event} after step {step} is behind the line of step {last}"
        if event == "start":
            last, config = next(configs, (step, Config()))
            has_started, has_stopped = True, False
        elif event == "stop":
            has_stopped = True
        elif event is None:
            yield from missing(step - 1)
            if not has_started and line.get("chain"):  # the first version recorded neither
                yield f"{path}: the line of step {step} is before any start"
            if has_stopped:
                yield f"{path}: the line of step {step} is behind the end of the run"
            elif step <= last:
                yield f"{path}: the line of step {step} is there twice, or in the wrong place"
            elif config and step != next_line(config, last):
                yield f"{path}: the line of step {step} is not due: the run has no such line"
            last = step
    if not has_stopped:
        yield from missing(newest)


def next_line(config: Config, last: int) -> int | None:
    """The step of the next line after step `last`; None where none is due, or none is known."""
    end = last_step(config)
    return min([*multiples(config, "logging.freq", last, end)[:1], end]) if last < end else None


def last_step(config: Config) -> int:
    """The last step that a start makes; 0 where it is not known."""
    ends = [number(config, "steps"), number(config, "stop_at")]
    return min((n for n in ends if n), default=0)


def number(config: Config, key: str) -> int:
    """A number of steps; 0 where a config has none."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


def multiples(config: Config, key: str, begin: int, end: int) -> range:
    """The steps after `begin` up to `end` that the period of a key divides; of none for 0."""
    every = number(config, key)
    return range((begin // every + 1) * every, end + 1, every) if every else range(0)


# ---- metrics.validation.jsonl


def wrong_held_out(record: RunFiles) -> Iterator[str]:
    """The first line of metrics.validation.jsonl, or the first missing one, that is not as the
    config makes it due. Raises UserError."""
    path = record.folder / VALIDATION
    keys = [(line["step"], line["source"]) for line in record.lines(VALIDATION)]
    steps = [step for step, _ in keys]
    for (before, _), (step, source) in pairwise(keys):
        if step < before:
            yield f"{path}: the line of step {step}, {source} is in the wrong place"
    seen = set()
    for step, source in keys:
        if (step, source) in seen:
            yield f"{path}: the line of step {step}, {source} is there twice"
        seen.add((step, source))
    starts = starts_with_configs(record) if keys else []
    failed = {e["step"] for e in record.events if e.get("reason") == "error"}
    own = [e["step"] for e in record.events if e["event"] in LINKED_EVENTS]
    made = max([0, *(c.step for c in record.checkpoints), *own])
    newest = max([made, *steps])
    ends = [*(step for step, _ in starts[1:]), newest]
    sources: dict[str, set[str]] = {}  # that lines name, of starts with the same text
    for (begin, config), end in zip(starts, ends, strict=False):
        named = keys[bisect_right(steps, begin) : bisect_right(steps, end)]
        sources.setdefault(text_of(config), set()).update(source for _, source in named)
    for (begin, config), end in zip(starts, ends, strict=False):
        due = sorted(sources[text_of(config)])
        for step in held_out_steps(config, begin, min(end, made)) if due else ():
            for source in due if step not in failed else ():
                if (step, source) not in seen:
                    yield f"{path}: the line of step {step}, {source} is missing"
        named = keys[bisect_right(steps, begin) : bisect_right(steps, end)]
        for step, source in named if config else ():
            if not may_measure(config, step):
                yield f"{path}: the line of step {step}, {source} is not due"


def text_of(config: Config) -> str:
    """The names of the sources that a config has, as text."""
    return str([config.get("data.sources"), config.get("validation.sources")])


def held_out_steps(config: Config, begin: int, end: int) -> Iterator[int]:
    """The steps after `begin` up to `end` that a config has the held-out loss measured at, in
    order; one may be repeated. Saves by the clock are not among them."""
    keys, last = ["validation.every"], {number(config, "steps")}
    if config.get("checkpoint.keep_best"):
        keys += ["checkpoint.dump.every", "checkpoint.eval.every", "eval.every"]
        last.add(last_step(config))
    periods = [multiples(config, key, begin, end) for key in keys]  # of any number of steps
    return heapq.merge(*periods, sorted(step for step in last if begin < step <= end))


def may_measure(config: Config, step: int) -> bool:
    """Whether the held-out loss may be measured at a step: where the lowest one is kept, at every
    save."""
    return bool(config.get("checkpoint.keep_best")) or step in held_out_steps(
        config, step - 1, step
    )


# ---- config.yaml


def wrong_configs(record: RunFiles) -> Iterator[str]:
    """The config files that are not those of the starts that have written them."""
    starts = [start for start in record.starts if start.get("config") is not None]
    places: list[tuple[Path, int | None]] = [(record.folder / CONFIG, None)]
    places += [(c.path / CONFIG, c.step) for c in record.checkpoints]
    for path, step in places:
        before = [s for s in starts if step is None or s["step"] < step]
        text = read_text(path)
        if before and text.decode() != before[-1]["config"]:
            was, now = record.start_config(before[-1]), config_of(text, str(path))
            key = next((key for key in was | now if was.get(key) != now.get(key)), "its text")
            a, b = (shorten(str(config.get(key))) for config in (now, was))
            yield f"{path}: {key}: {a}, in the event of its start {b}"
