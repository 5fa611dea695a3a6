"""The page of runs, in a real browser: what it shows is what the files have, and nothing in a run
can break it."""

import base64
import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from selenium.webdriver.support.wait import WebDriverWait

from lingua.base.errors import UserError
from lingua.run.records import Record
from lingua.tools.commands.compare import main as compare
from lingua.tools.commands.runs import main as list_runs
from lingua.tools.runs.held_out import smooth
from lingua.tools.runs.report.code import code_differences, code_files
from lingua.tools.runs.report.content import page_content
from lingua.tools.runs.report.page import build_page, main
from tests.browser import Browser, browser
from tests.run.test_records import a_run

pytestmark = pytest.mark.quick

BREAK = "document.title='broken'"
EVIL = f'</script><script>{BREAK}</script><img src=x onerror="{BREAK}">\u2028`${{{BREAK}}}'
FIRST = "#charts .chart:first-child"
ASK = Path(__file__).with_name("report.js").read_text()


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as browser_:
        yield browser_


@pytest.fixture
def chromium(opened: Browser) -> Iterator[Browser]:
    """A browser, whose console stays empty."""
    yield opened
    assert opened.messages() == []


def open_page(chromium: Browser, folder: Path, smoothing: bool = True, **options: Any) -> Path:
    """The page of the runs in a folder."""
    page = page_of(folder)
    chromium.open(page, **options)
    chromium.run(ASK)
    if not smoothing:
        choose(chromium, "smoothing", 0)
    return page


def line(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; its numbers have all the digits of float64."""
    loss, speed = 7 / math.sqrt(step) + math.sin(step) / 7, 31_234.5678 + math.cos(step) * 777
    values = {"step": step, "tokens": step * 2048, "loss": loss, "lr": 3e-4 / step}
    values |= {"grad_norm": math.exp(math.sin(step)) / 3, "tokens_per_s": speed}
    values |= {"step_time_s": 0.06543210987, "data_time_s": 1e-7 * step**3}
    return values | {"peak_mem_gib": 0.7, "skipped_steps": 0} | more


def page_of(folder: Path, *words: str) -> Path:
    out = folder / "page.html"
    main([str(folder), f"out={out}", *words])
    return out


def under_the_pointer(chromium: Browser, x: int, chart: str = FIRST) -> tuple[str, dict]:
    """Where the pointer is, once it is moved to `x`, and of each line its number and, where it
    differs, its own place."""
    chromium.point_at(chromium.all(f"{chart} .u-over")[0], x)
    place, rows = chromium.run("return ask.tip(arguments[0])", chart)
    return place, {name: numbers for name, *numbers in rows}


def choose(chromium: Browser, switch: str, value: int) -> None:
    chromium.run("ask.choose(...arguments)", switch, value)


def count_pixels(chromium: Browser, colour: tuple[int, int, int], chart: str = FIRST) -> int:
    return chromium.run("return ask.pixels(...arguments)", chart, list(colour))


BLUE, ORANGE = (0x42, 0x69, 0xD0), (0xE0, 0x93, 0x1F)  # of the first two runs


def test_numbers_under_the_pointer_are_those_of_the_files(tmp_path, chromium):
    # Unequal steps, and numbers from 1e-290 to 1e290 of both signs in a fork's own column.
    own = {s: (-1) ** s * 10.0 ** (29 * (s % 21) - 290) / 3 for s in range(1, 400)}
    a_run(tmp_path / "a", metrics=[line(s, own=own[s]) for s in range(1, 400)])
    a_run(tmp_path / "b", metrics=[line(s, loss=line(s)["loss"] + 1) for s in range(5, 300, 7)])
    files = {name: Record(tmp_path / name).metrics for name in "ab"}
    open_page(chromium, tmp_path)
    titles = [e.text for e in chromium.all("#charts h3")]
    columns = {"Training loss": "loss", "Learning rate": "lr", "own": "own"}
    n_raw = n_smoothed = 0
    for title, column in columns.items():
        chart = f"#charts .chart:nth-child({titles.index(title) + 1})"
        for x in (3, 111, 242):
            place, numbers = under_the_pointer(chromium, x, chart)
            for name, (shown, own_place) in numbers.items():
                run, _, is_smoothed = name.partition(", ")
                step = int((own_place or place).removeprefix("step ").replace(",", ""))
                steps, values = files[run].step, files[run][column]
                at = steps.tolist().index(step)
                if not is_smoothed:
                    assert f"{float(shown):.6g}" == f"{values[at]:.6g}", (title, name, step)
                    n_raw += 1
                elif column == "loss":  # a 40th of 399 steps
                    assert float(shown) == pytest.approx(smooth(values, steps, 10)[at], rel=5e-6)
                    n_smoothed += 1
    assert n_raw == 3 * (2 + 2 + 1) and n_smoothed == 3 * 2
    choose(chromium, "axis", 1)
    place, numbers = under_the_pointer(chromium, 200)
    shown, own_place = numbers["a"]
    loss = line(int((own_place or place).removesuffix(" tokens").replace(",", "")) // 2048)["loss"]
    assert f"{float(shown):.6g}" == f"{loss:.6g}"


def test_the_crosshair_stands_at_the_point_nearest_to_the_pointer(tmp_path, chromium):
    a_run(tmp_path / "dense", metrics=[line(s, loss=1 + s / 400) for s in range(1, 400)])
    a_run(tmp_path / "sparse", metrics=[line(s, loss=3.0) for s in range(1, 400, 50)])
    open_page(chromium, tmp_path, smoothing=False)
    (area,) = chromium.all(f"{FIRST} .u-over")
    for x, nearest in ((100, 51), (120, 101), (230, 151)):
        for down, run, step in ((-80, "sparse", nearest), (80, "dense", None)):
            chromium.point_at(area, x, down)
            place, rows = chromium.run("return ask.tip(arguments[0])", FIRST)
            assert rows[0][0] == run and rows[0][2] == ""  # its place is that of the title
            assert rows[1][2] and (step is None or place == f"step {step}")
            line_at, dot_at = chromium.run("return ask.crosshair(arguments[0])", FIRST)
            assert line_at == pytest.approx(dot_at, abs=1)


def test_the_legend_shows_and_hides_a_run_in_every_chart(tmp_path, chromium):
    for name, more in (("a", 0), ("b", 2)):
        metrics = [line(s, loss=line(s)["loss"] + more) for s in range(1, 100)]
        held = [{"step": 50, "source": "wiki", "nats_per_byte": 1.5 + more, "bytes": 9}]
        a_run(tmp_path / name, metrics=metrics, metrics_validation=held)
    open_page(chromium, tmp_path)
    chromium.run("document.querySelector('#marks').click()")
    for chart in (FIRST, "#charts .chart:nth-child(2)"):  # a line, and one point
        (area,) = chromium.all(f"{chart} .u-over")
        first_box, _ = chromium.all("#legend input")
        chromium.point_at(area, 100)  # not at the legend, where a run stands out
        assert count_pixels(chromium, BLUE, chart) and count_pixels(chromium, ORANGE, chart)
        first_box.click()
        assert not count_pixels(chromium, BLUE, chart) and count_pixels(chromium, ORANGE, chart)
        assert {name[0] for name in under_the_pointer(chromium, 100, chart)[1]} == {"b"}
        first_box.click()
        assert count_pixels(chromium, BLUE, chart)
    chromium.all("#none")[0].click()
    assert not count_pixels(chromium, BLUE) and not count_pixels(chromium, ORANGE)


def test_numbers_that_are_not_finite_are_gaps(tmp_path, chromium):
    def middle(value: str) -> str:
        lines = [json.dumps(line(s, loss="?" if 300 < s < 700 else 2.0)) for s in range(1, 1000)]
        return "\n".join(lines).replace('"?"', value)

    gaps = []
    for value in ("null", "NaN", "Infinity", "2.0"):  # the last is the control
        a_run(tmp_path / value / "run", metrics=middle(value))
        open_page(chromium, tmp_path / value, smoothing=False)
        gaps.append(count_pixels(chromium, BLUE))
        if value != "2.0":
            assert under_the_pointer(chromium, 240)[1]["run"][0] == "no number"
    assert 0 < gaps[0] == gaps[1] == gaps[2] < 0.7 * gaps[3]


def test_text_of_a_run_is_shown_and_never_executed(tmp_path, chromium):
    sample = {"step": 1, "source": EVIL, "prompt": EVIL, "text": f"{{{{payload}}}}{EVIL}\ud800"}
    for lr, name in enumerate(("<b>a", "{{payload}}")):
        events = [{"event": "start", "step": 0, "device": EVIL},
                  {"event": "stop", "step": 1, "reason": EVIL},
                  {"event": EVIL, "step": 1, EVIL: {EVIL: 1.5}}]  # fmt: skip
        a_run(tmp_path / name, f"steps: 3\ndata:\n  root_dir: {json.dumps(EVIL + str(lr))}\n",
              metrics=[*events, line(1, **{EVIL: 2.5})], samples=[sample],
              metrics_validation=[{"step": 1, "source": EVIL, "nats_per_byte": 1.0}],
              metrics_eval=[{"step": 1, "task": EVIL, "acc": 0.5}])  # fmt: skip
        file = tmp_path / name / "code" / EVIL  # below folders, which its slashes make
        file.parent.mkdir(parents=True)
        file.write_text(f"{EVIL}{lr}\n")
        (tmp_path / name / "code.commit").write_text(f"{EVIL}{lr}")
    open_page(chromium, tmp_path)
    chromium.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert chromium.driver.title == "2 runs"
    assert not chromium.all("body img") and not chromium.all("main b:not(.sample b)")
    shown = chromium.run("return document.body.innerText.toWellFormed()")
    assert (
        shown.count(EVIL) >= 8
        and f"+++ b/{EVIL}" in shown
        and "{{payload}}" in shown
        and "<b>a" in shown
    )


def test_a_phone_never_scrolls_sideways_and_nothing_is_loaded(tmp_path, chromium):
    name = "a_rather_long_name_of_a_run_without_any_place_to_break_it_" + 40 * "x"
    events = [{"event": "norms", "step": s, "values": {name: s / 7}} for s in (1, 2)]
    event = {"event": "start", "step": 0, "hosts": ["a" * 150], "device": "cpu", "code": "c" * 40}
    sample = {"step": 1, "source": "wiki", "prompt": "x" * 500, "text": "y" * 500}
    for run in (name, "b"):
        lines = [line(s, loss=2.0 + (run == "b")) for s in range(1, 90)]
        a_run(tmp_path / run, f"steps: 2\noptim:\n  lr: {len(run)}\n",
              metrics=[event, *events, *lines], samples=[sample])  # fmt: skip
    for width in (320, 360, 390):
        open_page(chromium, tmp_path, width=width, dark=True)
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        assert count_pixels(chromium, BLUE)
        scrolled, broken = chromium.run("return ask.tables()")
        assert scrolled == ["Runs", "Machines and versions, at every start"] and broken == []
    assert len(chromium.command("Page.printToPDF")["data"]) > 10_000
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0


def seeds_of(folder: Path, arms: dict[float, list[list[float]]]) -> None:
    """A run for each list of losses, at steps 1, 2, ...; held out are a tenth of the last."""
    for lr, runs in arms.items():
        for seed, losses in enumerate(runs):
            held = [{"step": 9, "source": "a", "nats_per_byte": losses[-1] / 10, "bytes": 1}]
            a_run(folder / f"{lr}" / f"{seed}", f"steps: 1\nseed: {seed}\noptim:\n  lr: {lr}\n",
                  metrics=[line(s, loss=x) for s, x in enumerate(losses, 1)],
                  metrics_validation=held)  # fmt: skip


def test_an_arm_is_the_mean_of_its_seeds_and_never_of_survivors(tmp_path, chromium):
    random = np.random.default_rng(1)
    arms = {lr: (3 + lr + random.random((3, 100)) / 4).round(4) for lr in (1.0, 2.0)}
    losses = {lr: values.tolist() for lr, values in arms.items()}
    losses[2.0][1] = losses[2.0][1][:50]  # failed
    seeds_of(tmp_path, losses)
    open_page(chromium, tmp_path, smoothing=False)
    names = [f"optim.lr={lr} (3 seeds), mean" for lr in arms]
    for x in (70, 160, 400):
        place, numbers = under_the_pointer(chromium, x)
        step = int(place.removeprefix("step "))
        assert (step > 50) == (names[1] not in numbers) == ("2.0/2" in numbers)
        assert names[0] in numbers
        for lr, name in zip(arms, names, strict=True):
            if name in numbers:
                mean, low, high = map(float, re.findall(r"[\d.]+", numbers[name][0]))
                column = arms[lr][:, step - 1]
                assert mean == pytest.approx(column.mean(), rel=1e-5)
                assert (low, high) == pytest.approx((column.min(), column.max()), rel=1e-5)
    chromium.run("state.zoom = [20, 22]; state.charts.forEach(chart => chart.follow())")
    assert set(under_the_pointer(chromium, 70)[1]) == set(names)  # far from the nearest point
    chromium.run("state.zoom = null")
    chromium.all("#seeds")[0].click()
    place, numbers = under_the_pointer(chromium, 70)
    step = int(place.removeprefix("step "))
    for lr, values in losses.items():
        for seed, of_seed in enumerate(values):
            assert float(numbers[f"{lr}/{seed}"][0]) == pytest.approx(of_seed[step - 1])


def test_the_page_has_the_verdict_of_compare_with_its_interval(tmp_path, chromium, capsys):
    seeds_of(tmp_path, {1.0: [[3.1], [3.25], [3.3], [3.4]], 2.0: [[3.0], [3.2], [3.1], [3.2]]})
    open_page(chromium, tmp_path)
    shown = chromium.all("#verdict")[0].text
    capsys.readouterr()
    compare([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["verdict"] in shown
    title = chromium.run("return document.querySelector('#verdict title').textContent")
    paired = stats.ttest_rel([0.30, 0.32, 0.31, 0.32], [0.31, 0.325, 0.33, 0.34])
    interval = paired.confidence_interval(0.95)
    mean, low, high = map(float, re.findall(r"-?\d[\d.]*", title)[:3])
    assert (low, high) == pytest.approx((interval.low, interval.high), rel=1e-4)
    bar, dot = chromium.all("#verdict .interval")[0], chromium.all("#verdict .mean")[0]
    ends = [float(bar.get_attribute(name)) for name in ("x1", "x2")]
    assert float(dot.get_attribute("cx")) == pytest.approx(sum(ends) / 2) and mean < 0


def test_outliers_do_not_set_the_range(tmp_path, chromium):
    losses = [1e6 * (s == 40) + 2 + s / 99 for s in range(1, 100)]
    a_run(tmp_path / "run", metrics=[line(s, loss=x) for s, x in enumerate(losses, 1)])
    open_page(chromium, tmp_path, smoothing=False)
    n = count_pixels(chromium, BLUE)
    assert "1 outlier not in the picture" in chromium.all(FIRST)[0].text
    chromium.all("#outliers")[0].click()
    assert "outlier" not in chromium.all(FIRST)[0].text and count_pixels(chromium, BLUE) != n


def test_the_legend_is_searched_and_hides_nothing_and_tables_are_sorted(tmp_path, chromium):
    for i in range(40):
        a_run(tmp_path / f"run{i}", metrics=[line(s + i) for s in range(1, 9)])
    open_page(chromium, tmp_path)
    chromium.all("#search")[0].send_keys("run3")
    labels = chromium.all("#legend label")
    assert len(labels) == 40 and all(label.is_displayed() for label in labels)
    legend = "const l = document.getElementById('legend'); return l.scrollHeight <= l.clientHeight"
    assert chromium.run(legend) and chromium.all("#matches")[0].text == "11 of 40"
    assert len(chromium.all("#legend .other")) == 29
    assert len(chromium.all("#legend input:checked")) == 40
    chromium.all("#only")[0].click()
    assert len(chromium.all("#legend input:checked")) == 11
    cells = "document.querySelectorAll('[data-table=Runs] td:nth-child(%d)')"
    column = f"return [...{cells}].map(c => c.innerText)"
    steps = [str(i + 8) for i in range(40)]
    for press, expected in ((2, steps), (2, steps[::-1]), (1, [f"run{i}" for i in range(40)])):
        chromium.all("[data-table=Runs] th button")[press - 1].click()
        assert chromium.run(column % press) == expected


def test_a_watched_page_follows_the_runs_and_keeps_what_the_reader_chose(tmp_path, chromium):
    """The page is asked for before there is a run. It grows above what the reader looks at."""
    runs, out = tmp_path / "runs", tmp_path / "page.html"
    sample = {"step": 1, "source": "wiki", "prompt": "p", "text": "t"}
    texts = [sample, sample | {"prompt": "q"}]
    command = [sys.executable, "-m", "lingua", "report", str(runs), f"out={out}", "watch=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first == f"{runs}: does not exist; waiting for a run there, Ctrl-C ends\n"
            for run in "bc":
                a_run(runs / run, metrics=[line(s) for s in range(1, 9)], samples=texts)
            assert f"{out} shows" in process.stdout.readline()
            chromium.open(out)
            chosen, top = chromium.run(ASK + "return ask.use()")
            a_run(runs / "a", metrics=[line(1234)], samples=texts)
            wait = WebDriverWait(chromium.driver, 60)
            wait.until(lambda driver: "1,234" in chromium.run("return document.body.innerText"))
            chosen_then, top_then = chromium.run(ASK + "return ask.used()")
        finally:
            process.send_signal(signal.SIGINT)
    assert chosen == {"axis": 1, "hidden": ["c"], "sorted": "descending", "samples": "c",
                      "open": [True, False], "focus": "search"}  # fmt: skip
    assert chosen_then == chosen and top_then == pytest.approx(top, abs=1) and 0 < top < 900
    assert process.returncode == 0 and payload_of(out)["refresh_s"] is None


def test_a_screen_reader_has_names_for_all_and_numbers_for_pictures(tmp_path, chromium):
    for run in "ab":
        losses = [line(s, loss=s * (s - 60.0) + (run == "b")) for s in range(1, 100)]
        a_run(tmp_path / run, metrics=[*losses, {"event": "norms", "step": 9, "x": 1, "y": 2}])
    open_page(chromium, tmp_path)
    chromium.all("#legend input")[1].click()
    tree = chromium.command("Accessibility.getFullAXTree")["nodes"]
    nodes = [(n["role"]["value"], n.get("name", {}).get("value")) for n in tree if not n["ignored"]]
    names = [name for role, name in nodes if role == "image"]
    assert names[0] == (
        "Training loss, nats per token, over steps: a from -59 at step 1 to 3861 at step 99, "
        "lowest -900 at step 30"
    )
    assert len(names) == len(chromium.all(".chart")) and all(name.count("a from") for name in names)
    controls = [node for node in nodes if node[0] in ("checkbox", "combobox", "searchbox", "table")]
    assert len(set(controls)) == len(controls) > 15 and all(name for _, name in controls)


def test_runs_with_nothing_to_show_are_listed_and_what_cannot_be_read_is_reported(tmp_path, capsys):
    a_run(tmp_path / "empty")
    a_run(tmp_path / "torn", metrics=json.dumps(line(1)) + '\n{"step": 2, "lo')
    a_run(tmp_path / "strange", metrics='[]\n{"step": "x"}\n{"loss": 1}\n')
    a_run(tmp_path / "one", metrics=[line(1)], metrics_eval=[{"step": 1, "task": 3}])
    a_run(tmp_path / "tiny", metrics=[line(1, loss=1e-304), line(2, loss=5e-324)])
    page = page_of(tmp_path)
    out, problems = capsys.readouterr()
    assert "shows 5 runs" in out and page.stat().st_size < 200_000
    assert "torn/metrics.jsonl:2" in problems and problems.count("strange/metrics.jsonl") == 3


def payload_of(page: Path) -> dict[str, Any]:
    """What the page shows."""
    (payload,) = re.findall(r'id="payload">([^<]+)<', page.read_text())
    return json.loads(gzip.decompress(base64.b64decode(payload)))


def test_scores_stops_samples_and_differences_of_the_code_are_those_of_the_runs(tmp_path):
    score = {"task": "arc", "acc_stderr,none": 0.02}
    scores = [score | {"step": s, "acc,none": 0.1 * s} for s in (4, 8)]
    events = [{"event": "stop", "step": 4, "reason": "SIGTERM"}, {"event": "start", "step": 4}]
    texts = [{"step": s, "source": "a", "prompt": "p", "text": f"t{s}"} for s in (4, 8)]
    lines = [line(s, skipped_steps=2 * (s > 6)) for s in range(1, 9)]
    for run, word in (("a", "old"), ("b", "new")):
        a_run(tmp_path / run, metrics=[*lines[:4], *events, *lines[4:]], metrics_eval=scores,
              samples=texts)  # fmt: skip
        (tmp_path / run / "code").mkdir()
        (tmp_path / run / "code" / "model.py").write_text(f"same\n{word}\n")
        (tmp_path / run / "code.commit").write_text(f"commit of {run}\n")
    shown = payload_of(page_of(tmp_path))
    assert shown["scores"][1] == ["a", "0.8000 ± 0.0200 (step 8)"]
    assert shown["samples"][1] == [{"source": "a", "prompt": "p", "texts": [[4, "t4"], [8, "t8"]]}]
    assert [(m["kind"], m["x"][0]) for m in shown["marks"] if m["run"] == 0] == [
        ("resume", 4), ("stop", 4), ("skipped", 7),
    ]  # fmt: skip
    first, second = shown["code"]
    assert (first["commit"], first["difference"]) == ("commit of a", "")
    assert second["difference"].splitlines()[-2:] == ["-old", "+new"]


SECRET = "secret of another place"
LINKED = {
    "metrics.jsonl": {"step": 1, "loss": 1.0, SECRET: 2.0},
    "metrics.validation.jsonl": {"step": 1, "source": SECRET, "nats_per_byte": 1.0},
    "metrics.eval.jsonl": {"step": 1, "task": SECRET, "acc": 1.0},
    "samples.jsonl": {"step": 1, "source": "a", "prompt": SECRET, "text": SECRET},
    "config.yaml": {"steps": 3, "name": SECRET, SECRET: SECRET},
    "base_config.yaml": {"steps": 3, "name": SECRET, SECRET: SECRET},
    "audit.json": {"date": SECRET, "kind": SECRET, "verdict": SECRET},
    "code.commit": SECRET,
    "code.diff": f"{SECRET}\n",
    "code/key.txt": SECRET,
    "code": {},
    "checkpoints": {},
}


def saved(folder: Path, data: str) -> None:
    """A folder of checkpoints with what is read of one."""
    (folder / "0000000001").mkdir(parents=True)
    (folder / "0000000001" / "train_state.json").write_text(json.dumps({"data": {"a": data}}))


@pytest.mark.parametrize("file", LINKED)
def test_what_a_run_links_to_outside_of_it_is_left_out_and_named(file, tmp_path, capsys):
    runs, place = tmp_path / "runs", tmp_path / "elsewhere" / file
    for lr, run in enumerate("ab"):
        held_out = [{"step": 1, "source": "a", "nats_per_byte": 1.0 + lr}]
        a_run(runs / run, f"lr: {lr}\n", metrics=[line(1)], metrics_validation=held_out)
        saved(runs / run / "checkpoints", "of this run")
        (runs / run / "code").mkdir()
        (runs / run / "code" / "key.txt").write_text(f"key of {run}\n")
        (runs / run / "code.commit").write_text(f"commit of {run}")
    if file in ("code", "checkpoints"):
        saved(place, SECRET)
        (place / "key.txt").write_text(SECRET)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(LINKED[file] if type(LINKED[file]) is str else json.dumps(LINKED[file]))
    link = runs / "b" / file
    if file == "base_config.yaml":
        (runs / "b" / "config.yaml").unlink()
    elif link.is_dir():
        shutil.rmtree(link)
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(place)
    for command in (list_runs, compare):
        with suppress(UserError):  # where nothing is left to compare
            command([str(runs)])
    shown = json.dumps(payload_of(page_of(runs)))
    out, problems = capsys.readouterr()
    assert SECRET not in out + problems + shown
    named = f"{link}: left out: it is a link to a place outside of the run"
    assert named in problems and named in shown and problems.count(str(link)) <= 2


def test_links_inside_a_launch_are_followed_and_a_folder_beside_a_run_is_not_its_code(tmp_path):
    sweep = tmp_path / "sweep"
    for lr, place in enumerate(("sweep/0", "sweep/1", "alone")):
        a_run(tmp_path / place, f"steps: 3\nlr: {lr}\n", metrics=[line(1)])
    (tmp_path / "alone" / "code.commit").write_text("commit of alone")
    for folder, text in ((sweep, "of the launch"), (tmp_path, SECRET)):
        (folder / "code").mkdir()
        (folder / "code" / "model.py").write_text(text)
    (sweep / "code" / "again.py").symlink_to("model.py")
    os.mkfifo(sweep / "code" / "pipe")  # reading it would wait for another program
    (sweep / "code.commit").write_text("commit of sweep")
    (sweep / "1" / "code").symlink_to("../code")
    records = [Record(sweep / "0"), Record(sweep / "1"), Record(tmp_path / "alone")]
    for record in records[:2]:
        contents = {name: path.read_text() for name, path in code_files(record).items()}
        assert contents == {"model.py": "of the launch", "again.py": "of the launch"}
    assert code_files(records[2]) == {}
    assert [v["runs"] for v in code_differences(records)] == [["0", "1"], ["alone"]]
    assert all(record.problems == [] for record in records)


def test_a_page_is_made_without_an_object_for_each_number(tmp_path):
    """That would take 4.5 times the size of the file."""
    common = {"batch_hash": "342c25b24bd059bc", "created_at": "2026-11-27T05:13:23.180352+00:00"}
    lines = [line(s, **common) for s in range(1, 8000)]
    record = Record(a_run(tmp_path / "run", metrics=lines))
    page_content([Record(a_run(tmp_path / "short", metrics=lines[:9]))])  # imports
    tracemalloc.start()
    try:
        page = build_page(page_content([record]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert len(page) > 100_000 and peak < 1.4 * size, peak / size


def test_the_machines_of_the_runs_are_a_table(tmp_path):
    start = {"event": "start", "step": 0, "topology": [2, 4, 1], "hosts": ["n1", "n2"]}
    start |= {"device": "H100", "flops_per_token": 1234.0, "commit": "a" * 40 + "-dirty"}
    resumed = start | {"step": 5, "topology": None, "torch": "2.13", "created_at": "2026-01-02T03"}
    a_run(tmp_path / "run", metrics=[start, line(1), resumed])
    header, first, second = payload_of(page_of(tmp_path))["machines"]
    assert header == ["run", "step", "dp_replicate x dp_shard x tp (x cp)", "hosts", "device",
                      "FLOPs per token", "commit", "torch", "when, UTC"]  # fmt: skip
    commit = "aaaaaaaaaaaa-dirty"
    assert first == ["run", "0", "2 x 4 x 1", "n1, n2", "H100", "1,234", commit, "", ""]
    assert second[2] == "?" and second[-2:] == ["2.13", "2026-01-02 03"]


def test_of_very_many_runs_those_drawn_do_not_depend_on_their_losses(tmp_path):
    described = []
    for turn in (1, -1):
        for i in range(60):
            held = [{"step": 5, "source": "a", "nats_per_byte": turn * i + 99.0, "bytes": 1}]
            run = tmp_path / f"{turn}" / f"r{i:02d}"
            a_run(run, f"seed: {i % 3}\nlr: {i // 3}\n", metrics=[line(5)], metrics_validation=held)
        described.append(payload_of(page_of(tmp_path / f"{turn}")))
    first, second = described
    assert first["names"] == second["names"] and first["names"][0] == "r00"
    assert first["names"][-1] == "r59" and len(first["names"]) == 48  # whole arms: 16 of 20
    assert all(arm["name"].endswith("(3 seeds)") for arm in first["arms"])
    assert first["notes"][0].startswith("Curves are of 48 of the 60 runs")
    assert len(first["overview"]) == 61
