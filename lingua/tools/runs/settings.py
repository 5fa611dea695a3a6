"""The config keys of runs, and those in which they differ."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingua.run.records import CODE_HASH, Record

# Keys that only name a run, a place or its last step; what is trained does not depend on them.
NAMES = {"name", "dump_dir", "stop_at", "checkpoint.path"}
NAMES |= {"logging.wandb.name", "logging.wandb.dir"}
# Values that are filled in when a run starts, or not known: they differ from no other.
UNRESOLVED = {"model.vocab_size": -1, "data.global_batch_size": None, CODE_HASH: None}
UNRESOLVED["distributed.grad_sync"] = None
NOT_GIVEN = "not given"  # value of a key that a config lacks


def differing(records: Sequence[Record]) -> list[str]:
    """The config keys whose values differ between runs, in the order of the configs, without names
    and places; `code` is one of them. A value differs from none, and a group from null: it is then
    one key."""
    keys = dict.fromkeys(key for record in records for key in record.settings)
    wholes = {group for key in keys for group in _groups(key) if group in keys}
    keys = dict.fromkeys(key for key in keys if wholes.isdisjoint(_groups(key)))
    return [key for key in keys if key not in NAMES and len(_distinct(records, key)) > 1]


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a key; of a group a mapping of its keys; NOT_GIVEN where there is none."""
    if key in settings:
        return settings[key]
    group = f"{key}."
    inner = {k.removeprefix(group): v for k, v in settings.items() if k.startswith(group)}
    return inner or NOT_GIVEN


def settings_of(records: Sequence[Record], keys: Iterable[str]) -> list[dict[str, Any]]:
    """{key: value} of each run. A value that a start fills in, or that is not known, is that of the
    other runs where they have one alone."""
    values = [{key: setting(record.settings, key) for key in keys} for record in records]
    for key in UNRESOLVED.keys() & set(keys):
        known = _distinct(records, key)
        for run in values:
            if run[key] in (UNRESOLVED[key], NOT_GIVEN) and len(known) == 1:
                run[key] = known[0]
    return values


def _distinct(records: Sequence[Record], key: str) -> list[Any]:
    """The different values of a key, without those that a start fills in or that are not known."""
    values: list[Any] = []
    for record in records:
        value = setting(record.settings, key)
        unresolved = key in UNRESOLVED and value in (UNRESOLVED[key], NOT_GIVEN)
        if not unresolved and value not in values:
            values.append(value)
    return values


def _groups(key: str) -> list[str]:
    """["a", "a.b"] of "a.b.c"."""
    return [key[:i] for i, c in enumerate(key) if c == "."]
