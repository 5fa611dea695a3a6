"""The page of runs, in a real browser: what it shows is what the files have, and nothing in a run
can break it."""

import base64
import gzip
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lingua.tools.commands.report import main
from lingua.tools.runs.records import Record, smooth
from tests.browser import Browser, browser, needs_chromium
from tests.tools.runs.test_records import a_run

pytestmark = pytest.mark.quick

BREAK = "document.title='broken'"
EVIL = f'</script><script>{BREAK}</script><img src=x onerror="{BREAK}">'
FIRST = "#charts .chart:first-child"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def line(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; its numbers have all the digits of float64."""
    values = {
        "step": step,
        "tokens": step * 2048,
        "loss": 7 / math.sqrt(step) + math.sin(step) / 7,
        "grad_norm": math.exp(math.sin(step)) / 3,
        "lr": 3e-4 / step,
        "tokens_per_s": 31_234.5678 + math.cos(step) * 777,
        "step_time_s": 0.06543210987,
        "peak_mem_gib": 0.7,
        "data_time_s": 1e-7 * step**3,
        "skipped_steps": 0,
    }
    return values | more


def page_of(folder: Path, *words: str) -> Path:
    out = folder / "page.html"
    main([str(folder), f"out={out}", *words])
    return out


def under_the_pointer(chromium: Browser, chart: str = FIRST) -> tuple[str, dict[str, list[str]]]:
    """Where the pointer is, and of each line its number and, where it differs, its own place."""
    script = """
        const tip = document.querySelector(arguments[0]), place = tip.querySelector("strong");
        return [place.innerText, [...tip.querySelectorAll("tr")].map(
            row => [...row.cells].map(cell => cell.innerText.trim()))];"""
    place, rows = chromium.run(script, f"{chart} .tip")
    return place, {name: numbers for name, *numbers in rows}


def choose(chromium: Browser, switch: str, value: int) -> None:
    script = "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.onchange()"
    chromium.run(script, switch, value)


def count_pixels(chromium: Browser, colour: tuple[int, int, int], chart: str = FIRST) -> int:
    script = """
        const drawn = document.querySelector(arguments[0]), [r, g, b] = arguments[1];
        const canvas = new OffscreenCanvas(drawn.width, drawn.height);
        const context = canvas.getContext("2d", {willReadFrequently: true});
        context.drawImage(drawn, 0, 0);
        const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
        let n = 0;
        for (let i = 0; i < data.length; i += 4)
            n += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] > 200;
        return n;"""
    return chromium.run(script, f"{chart} canvas", list(colour))


BLUE, ORANGE = (0x42, 0x69, 0xD0), (0xE0, 0x93, 0x1F)  # of the first two runs


# ---------------------------------------------------------------------------------- in the browser


@needs_chromium
def test_numbers_under_the_pointer_are_those_of_the_files(tmp_path, chromium):
    # Unequal steps, and numbers from 1e-290 to 1e290 of both signs in a fork's own column.
    own = {s: (-1) ** s * 10.0 ** (29 * (s % 21) - 290) / 3 for s in range(1, 400)}
    a_run(tmp_path / "a", metrics=[line(s, own=own[s]) for s in range(1, 400)])
    a_run(tmp_path / "b", metrics=[line(s, loss=line(s)["loss"] + 1) for s in range(5, 300, 7)])
    files = {name: Record(tmp_path / name).metrics for name in "ab"}
    chromium.open(page_of(tmp_path))
    titles = [e.text for e in chromium.all("#charts h3")]
    columns = {"Training loss": "loss", "Learning rate": "lr", "own": "own"}
    n_raw = n_smoothed = 0
    for title, column in columns.items():
        chart = f"#charts .chart:nth-child({titles.index(title) + 1})"
        (area,) = chromium.all(f"{chart} .u-over")
        for x in (3, 111, 242):
            chromium.point_at(area, x)
            place, numbers = under_the_pointer(chromium, chart)
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
    chromium.point_at(chromium.all(f"{FIRST} .u-over")[0], 200)
    place, numbers = under_the_pointer(chromium)
    loss = line(int(place.removesuffix(" tokens").replace(",", "")) // 2048)["loss"]
    assert f"{float(numbers['a'][0]):.6g}" == f"{loss:.6g}"
    assert chromium.messages() == []


@needs_chromium
def test_the_legend_shows_and_hides_a_run_in_every_chart(tmp_path, chromium):
    for name, more in (("a", 0), ("b", 2)):
        metrics = [line(s, loss=line(s)["loss"] + more) for s in range(1, 100)]
        held = [{"step": 50, "source": "wiki", "nats_per_byte": 1.5 + more, "bytes": 9}]
        a_run(tmp_path / name, metrics=metrics, metrics_validation=held)
    chromium.open(page_of(tmp_path))
    chromium.run("document.querySelector('#marks').click()")
    for chart in (FIRST, "#charts .chart:nth-child(2)"):  # a line, and one point
        (area,) = chromium.all(f"{chart} .u-over")
        first_box, _ = chromium.all("#legend input")
        chromium.point_at(area, 100)  # not at the legend, where a run stands out
        assert count_pixels(chromium, BLUE, chart) and count_pixels(chromium, ORANGE, chart)
        first_box.click()
        assert not count_pixels(chromium, BLUE, chart) and count_pixels(chromium, ORANGE, chart)
        chromium.point_at(area, 100)
        assert {name[0] for name in under_the_pointer(chromium, chart)[1]} == {"b"}
        first_box.click()
        assert count_pixels(chromium, BLUE, chart)
    chromium.all("#none")[0].click()
    assert not count_pixels(chromium, BLUE) and not count_pixels(chromium, ORANGE)
    assert chromium.messages() == []


@needs_chromium
def test_numbers_that_are_not_finite_are_gaps(tmp_path, chromium):
    def middle(value: str) -> str:
        lines = [json.dumps(line(s, loss="?" if 300 < s < 700 else 2.0)) for s in range(1, 1000)]
        return "\n".join(lines).replace('"?"', value)

    gaps = []
    for value in ("null", "NaN", "Infinity", "2.0"):  # the last is the control
        a_run(tmp_path / value / "run", metrics=middle(value))
        chromium.open(page_of(tmp_path / value))
        choose(chromium, "smoothing", 0)
        gaps.append(count_pixels(chromium, BLUE))
        if value != "2.0":
            chromium.point_at(chromium.all(f"{FIRST} .u-over")[0], 240)
            assert under_the_pointer(chromium)[1]["run"][0] == "no number"
    assert 0 < gaps[0] == gaps[1] == gaps[2] < 0.7 * gaps[3]
    assert chromium.messages() == []


@needs_chromium
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
    chromium.open(page_of(tmp_path))
    assert chromium.driver.title == "2 runs"
    assert not chromium.all("body img") and not chromium.all("main b:not(.sample b)")
    shown = chromium.run("return document.body.innerText.toWellFormed()")
    assert shown.count(EVIL) >= 8 and "{{payload}}" in shown and "<b>a" in shown
    assert chromium.messages() == []


@needs_chromium
def test_a_phone_never_scrolls_sideways_and_nothing_is_loaded(tmp_path, chromium):
    name = "a_rather_long_name_of_a_run_without_any_place_to_break_it_" + 40 * "x"
    events = [{"event": "norms", "step": s, "values": {name: s / 7}} for s in (1, 2)]
    event = {"event": "start", "step": 0, "hosts": ["a" * 150], "device": "cpu", "commit": "c" * 40}
    sample = {"step": 1, "source": "wiki", "prompt": "x" * 500, "text": "y" * 500}
    for run in (name, "b"):
        lines = [line(s, loss=2.0 + (run == "b")) for s in range(1, 90)]
        a_run(tmp_path / run, f"steps: 2\noptim:\n  lr: {len(run)}\n",
              metrics=[event, *events, *lines], samples=[sample])  # fmt: skip
    page = page_of(tmp_path)
    for width in (320, 390):
        chromium.open(page, width=width, dark=True)
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        assert count_pixels(chromium, BLUE)
    pdf = chromium.command("Page.printToPDF")["data"]
    assert len(pdf) > 10_000
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0
    assert chromium.messages() == []


# ------------------------------------------------------------------------------- without a browser


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
    """What the page shows, without the numbers of its curves."""
    (payload,) = re.findall(r'id="payload">([^<]+)<', page.read_text())
    data = gzip.decompress(base64.b64decode(payload))
    return json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])


def test_scores_stops_samples_and_differences_of_the_code_are_those_of_the_runs(tmp_path):
    scores = [
        {"step": s, "task": "arc", "acc,none": 0.1 * s, "acc_stderr,none": 0.02} for s in (4, 8)
    ]
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


@needs_chromium
@pytest.mark.soak
def test_twenty_runs_of_ten_thousand_points_stay_below_six_megabytes(tmp_path, chromium):
    random = np.random.default_rng(0)
    for run in range(20):
        noise = random.standard_normal((10_000, 6)) * 0.05 + 1
        lines = [
            line(10 * s, loss=float(np.float32((2 + 9 / math.sqrt(s)) * a)), grad_norm=float(b),
                 lr=1e-3 * (run + 1) * (1 + math.cos(s / 3184)), tokens_per_s=3e4 * c,
                 mfu=40 * c, step_time_s=0.2 * d, data_time_s=1e-4 * e)
            for s, (a, b, c, d, e, _) in enumerate(noise.tolist(), 1)
        ]  # fmt: skip
        a_run(tmp_path / f"run{run}", metrics=lines)
    page = page_of(tmp_path)
    assert page.stat().st_size < 6_000_000
    chromium.open(page)
    assert len(chromium.all("#charts canvas")) == 7
    assert chromium.messages() == []
