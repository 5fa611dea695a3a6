"""Stages across a resume: what is past stays, what is to come may be edited. A run: test_matrix."""

from types import SimpleNamespace
from typing import Any

import pytest

from apps.main.config import TrainArgs
from lingua.base.errors import UserError
from lingua.checkpoint.changes import Change, check_config, check_data
from lingua.checkpoint.saved import Saved
from lingua.checkpoint.state import Progress
from lingua.config.load import flatten, resume_classes
from lingua.data.args import Stage
from tests.mistakes import refused

CLASSES = resume_classes(TrainArgs)
EARLY, LATE = Stage(4, {"b": 1.0}), Stage(8, {"a": 1.0, "c": 1.0})


def config(sources: dict, *stages: Stage, global_batch_size: int = 10) -> dict[str, Any]:
    args = TrainArgs()
    args.data.sources, args.data.stages = sources, list(stages)
    args.data.global_batch_size = global_batch_size
    return flatten(args)


def saved_at(step: int, config: dict[str, Any], position: int | None = None, **content) -> Saved:
    progress = Progress(step, step * 10 if position is None else position)
    data = {f"data.content.{name}": value for name, value in content.items()}
    return Saved(SimpleNamespace(), config, progress, (1, 1, 1), data)


def classes_of(found: list[Change]) -> dict[str, str]:
    return {change.key: change.resume_class for change in found}


SOURCES = {"a": 1.0, "b": 3.0}
BEFORE = config(SOURCES, EARLY, LATE)
FUTURE = [
    (6, SOURCES, [EARLY]),
    (6, SOURCES, [EARLY, Stage(6, {"d": 1.0})]),
    (8, SOURCES, [EARLY, Stage(8, {"d": 1.0})]),
    (3, SOURCES, []),
    # The same shares in other words.
    (9, {"a": 2.0, "b": 6.0, "z": 0.0}, [EARLY, LATE]),
    (9, SOURCES, [Stage(4, {"b": 7.0}), LATE]),
]
PAST = [
    (9, SOURCES, [EARLY]),
    *((5, SOURCES, [*stages, LATE]) for stages in ([], [Stage(2, {"a": 1.0}), EARLY])),
    *((5, SOURCES, [Stage(step, {"b": 1.0}), LATE]) for step in (3, 5)),
    (5, SOURCES, [Stage(4, {"a": 1.0}), LATE]),
    (1, {"a": 1.0, "b": 2.0}, [EARLY, LATE]),
]


@pytest.mark.parametrize(
    "step, sources, stages, past",
    [(*edit, False) for edit in FUTURE] + [(*edit, True) for edit in PAST],
)
def test_an_edit_of_the_past_is_refused_unless_allowed(step, sources, stages, past):
    now, key = config(sources, *stages), f"data.{'stages' if sources == SOURCES else 'sources'}"
    if past:
        said = refused(lambda: check_config(saved_at(step, BEFORE), now, CLASSES, []), key)
        assert f"only stages from_step {step} on" in said
    found = check_config(saved_at(step, BEFORE), now, CLASSES, [key] * past)
    assert classes_of(found) == {key: "guarded" if past else "announced"}


def test_a_checkpoint_older_than_stages_has_none():
    older = config({"a": 1.0})
    del older["data.stages"]
    now = config({"a": 1.0}, LATE)
    found = check_config(saved_at(8, older), now, CLASSES, [])
    assert classes_of(found) == {"data.stages": "announced"}


def test_stages_and_a_changed_global_batch_size_are_refused():
    now, rows = config({"a": 1.0}, LATE, global_batch_size=20), ["data.global_batch_size"]
    with pytest.raises(UserError, match="has used 60 rows in 6 steps"):
        check_config(saved_at(6, config({"a": 1.0}, LATE)), now, CLASSES, rows)
    without = config({"a": 1.0}, global_batch_size=20)
    check_config(saved_at(6, config({"a": 1.0})), without, CLASSES, rows)


def test_only_sources_that_gave_rows_must_have_the_same_content():
    saved = saved_at(8, BEFORE, a="1", b="2", c="3")
    data = {f"data.content.{name}": value for name, value in zip("abcd", "1234", strict=True)}
    assert classes_of(check_data(saved, data, [])) == {"data.content.d": "announced"}
    data["data.content.c"] = "other"  # of a stage to come
    assert set(classes_of(check_data(saved, data, []))) == {"data.content.c", "data.content.d"}
    for name in "ab":
        with pytest.raises(UserError, match=f"data.content.{name}"):
            check_data(saved, {**data, f"data.content.{name}": "other"}, [])
    with pytest.raises(UserError, match=r"data\.content\.c"):
        check_data(saved_at(9, BEFORE, a="1", b="2", c="3"), data, [])
