"""Which lines a run must have: those that its config makes due, each once, and no other. Decided
from the record alone, without the code that wrote it."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import CONFIG, METRICS, VALIDATION
from lingua.config.values import parse_mapping, plain
from lingua.monitor.metrics import LINKED_EVENTS
from lingua.run.files import flat
from lingua.run.receipt import checkpoints_of
from lingua.run.records import Record

Config = dict[str, Any]  # flat; empty where it is not known
EARLIER = "recorded by an earlier version: "


def config_of(start: dict[str, Any]) -> Config:
    """The configuration of a start, as its event has it. Raises UserError where it is none."""
    text = start.get("config")
    return flat(plain(parse_mapping(text, "a start's config"))) if isinstance(text, str) else {}


def starts_with_configs(record: Record) -> list[tuple[int, Config]]:
    """(the step, the config) of each start. Earlier versions have not recorded a start's config: it
    is known where there is one start alone. Raises UserError."""
    starts = [event for event in record.events if event["event"] == "start"]
    if len(starts) == 1 and "config" not in starts[0]:
        return [(starts[0]["step"], record.config)]
    return [(start["step"], config_of(start)) for start in starts]


def earlier_version(record: Record) -> list[str]:
    """What of a run's record is not part of a chain, since an earlier version has written it."""
    own = [event for event in record.events if event["event"] in LINKED_EVENTS]
    steps = [line for line in record.lines(METRICS) if "event" not in line]
    notes = []
    if steps and not all(line.get("chain") for line in steps):
        notes.append(f"{EARLIER}lines are not part of a chain")
    if not any(event["event"] == "start" for event in own):
        notes.append(f"{EARLIER}no start is recorded")
    elif not all(event.get("chain") for event in own):
        notes.append(f"{EARLIER}events are not part of the chain")
    return notes


# ---- metrics.jsonl


def wrong_lines(record: Record) -> Iterator[str]:
    """The first line of metrics.jsonl, or the first missing one, that is not as the config of the
    start before it makes it due. Raises UserError."""
    newest = max(
        (c.step for c in checkpoints_of(record.folder, record.config)), default=0
    )  # before the lines grow
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


def wrong_held_out(record: Record) -> Iterator[str]:
    """The first line of metrics.validation.jsonl, or the first missing one, that is not as the
    config makes it due. Raises UserError."""
    path, lines = record.folder / VALIDATION, record.lines(VALIDATION)
    keys = [(line["step"], line.get("source")) for line in lines]
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
    made = max([0, *(c.step for c in checkpoints_of(record.folder, record.config)), *own])
    newest = max([made, *(step for step, _ in keys)])
    ends = [*(step for step, _ in starts[1:]), newest]
    sources: dict[str, set[str]] = {}  # that lines name, of starts with the same text
    for (begin, config), end in zip(starts, ends, strict=False):
        named = {str(source) for step, source in keys if begin < step <= end}
        sources.setdefault(text_of(config), set()).update(named)
    for (begin, config), end in zip(starts, ends, strict=False):
        for step in sorted(set(held_out_steps(config, begin, min(end, made))) - failed):
            for source in sorted(sources[text_of(config)]):
                if (step, source) not in seen:
                    yield f"{path}: the line of step {step}, {source} is missing"
        for step, source in keys if config else ():
            if begin < step <= end and not may_measure(config, step):
                yield f"{path}: the line of step {step}, {source} is not due"


def text_of(config: Config) -> str:
    """The names of the sources that a config has, as text."""
    return str([config.get("data.sources"), config.get("validation.sources")])


def held_out_steps(config: Config, begin: int, end: int) -> Iterator[int]:
    """The steps after `begin` up to `end` that a config has the held-out loss measured at. Saves
    by the clock are not among them."""
    keys, last = ["validation.every"], {number(config, "steps")}
    if config.get("checkpoint.keep_best"):
        keys += ["checkpoint.dump.every", "checkpoint.eval.every", "eval.every"]
        last.add(last_step(config))
    for key in keys:
        yield from multiples(config, key, begin, end)
    yield from (step for step in last if begin < step <= end)


def may_measure(config: Config, step: int) -> bool:
    """Whether the held-out loss may be measured at a step: where the lowest one is kept, at every
    save."""
    return bool(config.get("checkpoint.keep_best")) or step in held_out_steps(
        config, step - 1, step
    )


# ---- config.yaml


def wrong_configs(record: Record) -> Iterator[str]:
    """The config files that are not those of the starts that have written them."""
    starts = [
        e for e in record.events if e["event"] == "start" and isinstance(e.get("config"), str)
    ]
    places: list[tuple[Path, int | None]] = [(record.folder / CONFIG, None)]
    places += [(c.path / CONFIG, c.step) for c in checkpoints_of(record.folder, record.config)]
    for path, step in places:
        before = [s for s in starts if step is None or s["step"] < step]
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            yield f"{path}: cannot be read: {error}"
            continue
        if before and text != before[-1]["config"]:
            was, now = config_of(before[-1]), flat(plain(parse_mapping(text, str(path))))
            keys = [key for key in was | now if was.get(key) != now.get(key)] or ["its text"]
            shown = f"{keys[0]}: {now.get(keys[0])}, in the event of its start {was.get(keys[0])}"
            yield f"{path}: {shown}"
