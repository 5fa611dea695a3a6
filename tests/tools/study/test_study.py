"""Studies of real runs: what a verdict rests on, what is refused, and what a kill leaves."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lingua.run.records import Record
from lingua.tools.runs.held_out import heldout
from lingua.tools.study.ledger import Ledger
from lingua.tools.study.runs import result_of
from lingua.tools.study.show import studies_in
from lingua.tools.study.study import Study
from tests.local_slurm import needs_slurm, slurm_here
from tests.mistakes import refused
from tests.programs import OF_OTHERS, python

ROOT = Path(__file__).parents[3]
WORDS = {
    "config": ROOT / "apps/main/configs/small.yaml",
    "data.sources": "{words: 1}",
    "validation.bytes": 2000,
    "validation.every": 0,
    "device": "cpu",
    "distributed.threads": 1,
    "model.dim": 32,
    "model.n_heads": 2,
    "model.n_layers": 1,
    "data.seq_len": 32,
    "data.batch_size": 4,
    "data.global_batch_size": 4,
    "steps": 20,
    "optim.warmup": 5,
    "optim.lr": 1e-3,
    "logging.freq": 5,
    "checkpoint.dump.every": 0,
    "effect": 0.02,
    "at_once": 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(80)]
    texts = (" ".join(chance.choices(words, k=20)) for _ in range(3000))
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "words.jsonl").write_text("".join(lines))
    return folder


def call(verb: str, *words: object, code: int | None = None, **options: Any) -> Any:
    """The JSON that a verb prints; `code` is its exit code. A mistake's message as text."""
    command = [*python(OF_OTHERS), "-m", "lingua", "study", verb, *map(str, words), "--json"]
    options = {"cwd": ROOT, "capture_output": True, "text": True} | options
    done = subprocess.run(command, check=False, **options)
    assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr if done.returncode == 2 else json.loads(done.stdout)


def new(folder: Path, text: Path, **changes: Any) -> Path:
    options = {k: changes.pop(k) for k in ("cwd", "env") if k in changes}
    values = WORDS | {"data.root_dir": text} | {k.replace("__", "."): v for k, v in changes.items()}
    call("new", folder, *(f"{k}={v}" for k, v in values.items()), code=0, **options)
    return folder


@pytest.fixture(scope="module")
def tried(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with a change that helps and a dead key."""
    folder = new(tmp_path_factory.mktemp("study") / "s", text)
    call("try", folder, "optim.lr=1e-2", "why=never tuned", code=0)
    call("try", folder, "optim.muon.momentum=0.9", code=1)
    return folder


def loss(folder: Path, line: dict[str, Any]) -> float:
    """Of the run of a ledger's line, by what it has written."""
    return float(heldout(Record(folder / line["folder"]))[1][-1])


def test_a_verdict_rests_on_pairs_of_common_seeds_written_down_before_they_ran(tried):
    lines = Ledger(tried).lines
    kinds = [line["kind"] for line in lines]
    first_try, verdict = kinds.index("try"), lines[kinds.index("verdict")]
    assert first_try < kinds.index("launch") < kinds.index("run") < kinds.index("verdict")
    arm, base = lines[first_try]["arm"], lines[first_try]["base"]
    runs = [line for line in lines if line["kind"] == "run"]
    losses = {
        key: {r["seed"]: loss(tried, r) for r in runs if r["arm"] == key} for key in (arm, base)
    }
    seeds = list(losses[arm])[: verdict["pairs"]]
    differences = [losses[base][seed] - losses[arm][seed] for seed in seeds]
    assert seeds[:2] == [42, 43] and verdict["verdict"] == "kept"
    assert verdict["mean"] == pytest.approx(sum(differences) / len(differences), rel=1e-9)
    assert verdict["low"] < verdict["mean"] < verdict["high"]
    assert verdict["e"] >= lines[first_try]["test"]["needed"] > 30
    configs = [Record(tried / r["folder"]).config for r in runs if r["seed"] == 42]
    different = {k for k in configs[0] if configs[0][k] != configs[1][k]}
    assert different <= {"optim.lr", "name", "dump_dir"} and "optim.lr" in different
    rows = {
        (r["seed"], r["arm"]): Record(tried / r["folder"]).metrics.text("batch_hash") for r in runs
    }
    assert rows[42, arm] == rows[42, base] != rows[43, arm] == rows[43, base]  # and the same rows
    assert None not in rows[42, arm] != []


def test_a_change_that_does_nothing_is_dropped_and_the_base_is_not_trained_again(tried):
    ledger = Ledger(tried)
    [dead] = ledger.of("verdict", **{"try": 2})
    assert (dead["verdict"], dead["pairs"], dead["mean"]) == ("dropped", 2, 0.0)
    seeds = [(line["arm"], line["seed"]) for line in ledger.of("run")]
    assert len(set(seeds)) == len(seeds)
    base = ledger.of("base")[0]["arm"]
    starts = [seed for line in ledger.of("launch", arm=base) for seed in line["seeds"]]
    assert len(starts) == len(set(starts))


def test_mistakes_are_named_and_leave_no_try(tried):
    n = len(Ledger(tried).of("try"))
    for word, name in (
        ("optim.lrr=1", "optim.lrr"),
        ("validation.bytes=9", "validation.bytes"),
        ("optim.lr=1e-3", "changes nothing"),
        ("patch=nowhere.diff", "nowhere.diff"),
        ("claim=great", "claim"),
        ("seed=7", "seed"),
        ("app=apps.dpo", "apps.dpo"),
        (f"patch={os.devnull}", os.devnull),
    ):
        assert name in call("try", tried, word, code=2)
    assert "unknown key" in call("confirm", tried, "at_once=2", code=2)
    assert "is no study" in call("show", tried / "runs", code=2)
    assert len(Ledger(tried).of("try")) == n


def test_a_decided_try_is_not_tried_again(tried):
    n = len(Ledger(tried).lines)
    again = call("try", tried, "optim.lr=0.01", "why=once more", code=0)
    assert again["try"]["try"] == 1 and len(Ledger(tried).lines) == n
    # Nor is it claimed to be something else, by one who has seen its runs.
    message = call("try", tried, "optim.lr=0.01", "claim=simpler", code=2)
    assert "try 1" in message and len(Ledger(tried).lines) == n


def test_a_look_that_has_decided_decides_after_a_kill(tried, tmp_path):
    study = Path(shutil.copytree(tried, tmp_path / "moved"))
    *lines, verdict = (study / "ledger.jsonl").read_text().splitlines(keepends=True)
    (study / "ledger.jsonl").write_text("".join(lines))
    head = {"lines": len(lines), "hash": json.loads(lines[-1])["hash"]}
    (study / "ledger.head").write_text(json.dumps(head))
    assert json.loads(verdict)["kind"] == "verdict" and json.loads(lines[-1])["kind"] == "look"
    call("try", study, "optim.muon.momentum=0.9", code=1)
    *same, again = Ledger(study).lines
    assert len(same) == len(lines)
    names = {"verdict", "pairs", "mean", "reason", "try"}
    assert {k: again[k] for k in names} == {k: json.loads(verdict)[k] for k in names}


def test_the_table_and_the_page_show_each_try(tried, tmp_path):
    shown = call("show", tried, code=0)
    assert [t["try"] for t in shown["try"]] == [1, 2] and shown["problems"] == []
    command = [*python(OF_OTHERS), "-m", "lingua"]
    done = subprocess.run([*command, "study", "show", tried], capture_output=True, text=True)
    assert "optim.lr=1e-2 (never tuned)" in done.stdout and "kept provisionally" in done.stdout
    [(title, rows)] = studies_in([str(tried), str(tried / "runs")])
    assert title == "Study s" and [row[0] for row in rows] == ["", "base 0", "try 1", "try 2"]
    path = tried / "ledger.jsonl"
    whole = path.read_text()
    path.write_text(whole.replace("never tuned", "never mind"))
    assert "was changed" in call("show", tried, code=1)["problems"][0]
    assert "was changed" in call("try", tried, "optim.lr=3e-3", code=2)
    path.write_text("x" + whole)
    assert (
        "was changed" in studies_in([str(tried)])[0][1][-1][2]
    )  # the page is written all the same
    path.write_text(whole)


@pytest.mark.soak
def test_what_is_kept_is_confirmed_by_fresh_seeds_on_sealed_text_once_and_adopted(text, tmp_path):
    study = new(tmp_path / "s", text, confirm_pairs=3)
    assert "nothing is kept" in call("confirm", study, code=2)
    call("try", study, "optim.lr=1e-2", code=0)
    assert call("confirm", study, "pairs=1", code=3)["result"] is None
    # What is kept is another change now: it has none of the runs of the confirmation that began.
    call("try", study, "data.workers=2", "claim=same", code=0)
    line = call("confirm", study, code=0)["result"]
    ledger = Ledger(study)
    sealed = [r for r in ledger.of("run") if r["seed"] > 2_000_000]
    assert [Record(study / r["folder"]).config["data.workers"] for r in sealed] == [1] * 3 + [2] * 3
    tries = [r for r in ledger.of("run") if r["seed"] < 1_000_000 and r["loss"] is not None]
    texts = {r["text"]["words"] for r in tries}
    assert len(texts) == 1 and texts.isdisjoint(r["text"]["words"] for r in sealed)
    assert len(sealed) == 6 and line["pairs"] == 3 and line["reading"] == 2
    seeds = sorted({r["seed"] for r in sealed})
    losses = {(r["seed"], r["arm"]): loss(study, r) for r in sealed}
    arms = list(dict.fromkeys(r["arm"] for r in sealed))
    differences = [losses[seed, arms[0]] - losses[seed, arms[1]] for seed in seeds]
    assert line["mean"] == pytest.approx(sum(differences) / 3, rel=1e-9)
    assert line["provisional"] == ledger.of("verdict")[0]["mean"]
    n = len(ledger.lines)
    assert call("confirm", study, code=0)["result"] == line and len(Ledger(study).lines) == n

    call("adopt", study, code=0)
    assert "lr: 0.01" in (study / "base1.yaml").read_text()
    n = len(Ledger(study).of("run"))
    call("try", study, "optim.lr=2e-2", "pairs=2")
    new_runs = Ledger(study).of("run")[n:]  # not by the seeds by which the new base was chosen
    assert {r["seed"] for r in new_runs} == {10_042, 10_043} and len(new_runs) == 4
    assert "nothing is kept" in call("adopt", study, code=2)


@pytest.mark.soak
def test_a_change_that_claims_to_change_nothing_is_the_same_to_the_bit_or_not(text, tmp_path):
    study = new(tmp_path / "s", text, same_steps=5)
    same = call("try", study, "data.workers=2", "claim=same", code=0)["verdict"]
    assert same["verdict"] == "same" and len(same["speed"]) == 3
    different = call("try", study, "optim.epsilon=1e-4", "claim=same", code=1)["verdict"]
    assert "loss of step 2" in different["reason"] or "step 1" in different["reason"]
    late = call("try", study, "optim.lr_min_ratio=0.5", "optim.warmup=5", "claim=same", code=1)
    assert "of step 7" in late["verdict"]["reason"]  # behind same_steps
    assert not [t for t in Ledger(study).of("try") if t["test"]]  # neither spends of the error


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "checkout"], check=True)
    return tmp_path / "checkout"


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


@pytest.mark.soak
def test_a_run_that_hangs_or_writes_too_much_has_failed_and_leaves_no_process(
    text, tmp_path, checkout
):
    study = new(tmp_path / "s", text, minutes_per_run=0.8, gib_per_run=0.01, cwd=checkout)
    model = checkout / "lingua/model/transformer.py"
    hang = "import time; time.sleep(1000)"
    edit(model, "        return self.w2(F.silu", f"        {hang}\n        return self.w2(F.silu")
    hung = call("try", study, code=1, cwd=checkout)["verdict"]
    assert hung["verdict"] == "failed" and "0.8 minutes" in hung["reason"]
    named = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [words for words in named if any(str(study) in word for word in words)]
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    large = ("checkpoint.dump.every=1", "checkpoint.dump.keep=-1", "model.dim=256", "steps=200")
    wrote = call("try", study, *large, code=1, cwd=checkout)["verdict"]
    assert wrote["verdict"] == "failed" and "0.01 GiB" in wrote["reason"]


@pytest.mark.soak
def test_the_change_is_what_differs_in_the_checkout(text, tmp_path, checkout):
    study = new(tmp_path / "s", text, cwd=checkout)
    (checkout / "README.md").write_text("other")
    assert "changes nothing" in call("try", study, code=2, cwd=checkout)
    schedule = checkout / "lingua/optim/schedule.py"
    schedule.write_text(schedule.read_text().replace("return ", "return 8 * ", 1))
    head = checkout / "lingua/model/head.py"
    head.write_text(f"# changed\n{head.read_text()}")
    assert "lingua/model/head.py" in call("try", study, code=2, cwd=checkout)
    subprocess.run(["git", "checkout", "-q", "lingua/model/head.py"], cwd=checkout, check=True)
    line = call("try", study, cwd=checkout)
    tried = Ledger(study).of("try")[-1]
    assert tried["files"] == ["lingua/optim/schedule.py"], line
    patch = study / "try1.diff"
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    again = call("try", study, f"patch={patch}", cwd=checkout)
    assert again["verdict"] == line["verdict"]  # the same code by another way is the same try


@pytest.mark.soak
def test_one_file_is_measured_again_by_the_file_of_the_base(text, tmp_path, checkout):
    words = {k: v for k, v in WORDS.items() if k not in ("config", "data.sources")}
    del words["distributed.threads"]
    words |= {"script": "apps.onefile.run", "data.sources": "{words: 1.0}", "data.root_dir": text}
    study = tmp_path / "s"
    call("new", study, *(f"{k}={v}" for k, v in words.items()), code=0, cwd=checkout)
    file = checkout / "apps/onefile/train.py"
    edit(file, "height = 0.5 *", "height = 5.0 *")
    kept = call("try", study, code=0, cwd=checkout)["verdict"]
    assert kept["notes"] == ["measured again by the base's code: equal"]
    call("adopt", study, code=0, cwd=checkout)
    patch = study / "base1.diff"
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    subprocess.run(["git", "apply", patch], cwd=checkout, check=True)
    assert "changes nothing" in call("try", study, code=2, cwd=checkout)
    edit(file, "total = math.fsum", "total = 0.5 * math.fsum")
    assert "measured" in call("try", study, code=2, cwd=checkout)


@pytest.mark.soak
def test_after_thirty_kills_the_ledger_is_whole_and_no_run_is_counted_twice(text, tmp_path):
    words = ("optim.lr=3e-3", "why=killed")
    whole = new(tmp_path / "whole", text, effect=0.001)
    expected = call("try", whole, *words)["verdict"]
    study = new(tmp_path / "killed", text, effect=0.001)
    command = [*python(OF_OTHERS), "-m", "lingua", "study", "try", str(study), *words]
    chance = random.Random(5)
    for _ in range(30):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.5, 6.0))
        process.kill()  # and not the runs that it has started
        process.wait()
        assert not Ledger(study).problems
    result = call("try", study, *words)["verdict"]
    kept = ("verdict", "pairs", "mean", "e", "reason")
    assert [result[key] for key in kept] == [expected[key] for key in kept]
    ledger = Ledger(study)
    seeds = [(line["arm"], line["seed"]) for line in ledger.of("run")]
    assert len(set(seeds)) == len(seeds) and not ledger.problems
    assert len(ledger.of("try")) == len(ledger.of("verdict")) == 1
    runs = {line["folder"] for line in ledger.of("run")}
    assert runs == {
        str(p.parent.relative_to(study)) for p in study.glob("runs/*/*/*/metrics.jsonl")
    }


@pytest.mark.soak
def test_two_at_once_take_turns(text, tmp_path):
    study = new(tmp_path / "s", text)
    command = [*python(OF_OTHERS), "-m", "lingua", "study", "try", str(study)]
    both = [subprocess.Popen([*command, f"optim.lr={lr}"], cwd=ROOT) for lr in (1e-2, 1e-4)]
    codes = [process.wait() for process in both]
    ledger = Ledger(study)
    assert codes == [0, 1] and not ledger.problems and len(ledger.of("verdict")) == 2
    seeds = [(line["arm"], line["seed"]) for line in ledger.of("run")]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.soak
def test_ctrl_c_stops_the_runs_which_go_on(text, tmp_path):
    study = new(tmp_path / "s", text, steps=3000)
    command = [*python(OF_OTHERS), "-m", "lingua", "study", "try", str(study), "optim.lr=1e-2"]
    process = subprocess.Popen(command, cwd=ROOT)
    end = time.monotonic() + 120
    while not any(Record(p).metrics.step.size for p in study.glob("runs/*/*/*_seed=*")):
        assert time.monotonic() < end
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    stopped = [Record(p) for p in study.glob("runs/base0-*/42/*_seed=*")]
    assert {r.state for r in stopped} <= {"stopped", "finished", "not started"}
    assert Study(study).ledger.of("run") == []


@needs_slurm
@pytest.mark.soak
def test_pairs_are_jobs_of_slurm_that_go_on_without_the_study(text, tmp_path):
    with slurm_here(tmp_path / "slurm", 2) as env:
        keys = {"launcher": "slurm", "gpus": "none", "ncpu": 1, "at_once": 2}
        study = new(tmp_path / "s", text, **keys, env=env)
        command = [*python(OF_OTHERS), "-m", "lingua", "study", "try", str(study), "optim.lr=1e-2"]
        process = subprocess.Popen(command, cwd=ROOT, env=env)
        end = time.monotonic() + 200
        while not list(study.glob("runs/base0-*/42/*/job_id")):
            assert time.monotonic() < end
            time.sleep(0.2)
        process.kill()
        process.wait()
        result = call("try", study, "optim.lr=1e-2", code=0, env=env)["verdict"]
        assert result["verdict"] == "kept"
        jobs = subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True).stdout
        assert jobs.strip() == ""
        launches = Ledger(study).of("launch")
        assert len({(x["arm"], *x["seeds"]) for x in launches}) == len(launches)


@pytest.mark.soak
def test_kept_changes_are_not_credited_twice_and_fit_together(text, tmp_path, checkout):
    study = new(tmp_path / "s", text, cwd=checkout)
    call("try", study, "optim.beta2=0.9", "optim.lr=1e-2", code=0, cwd=checkout)
    schedule, model = (checkout / f"lingua/{name}.py" for name in ("optim/schedule", "run/hidden"))
    edit(schedule, "def lr_at(", "FACTOR = 8.0\n\n\ndef lr_at(")
    first = schedule.read_text()
    index = first.index("    return ", first.index("def lr_at("))
    schedule.write_text(first[:index] + first[index:].replace("return ", "return FACTOR * ", 1))
    call("try", study, code=0, cwd=checkout)
    model.write_text(f"{model.read_text()}\nOTHER = 1\n")  # the edited checkout goes on
    assert "try 2, which is kept" in call("try", study, code=2, cwd=checkout)
    call("adopt", study, code=0, cwd=checkout)
    same = call("try", study, "claim=same", code=0, cwd=checkout)["verdict"]
    assert same["verdict"] == "same"
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    assert "git apply" in call("try", study, "optim.beta1=0.8", code=2, cwd=checkout)


def test_a_full_disk_decides_nothing_and_a_failure_is_tried_again(tmp_path):
    lines = [{"event": "start", "step": 0}, {"step": 5, "loss": 2.0, "tokens": 100}]
    (tmp_path / "config.yaml").write_text("steps: 20\n")

    def ended(error: str) -> None:
        stop = {"event": "stop", "step": 5, "error": error}
        text = "".join(json.dumps(line) + "\n" for line in [*lines, stop])
        (tmp_path / "metrics.jsonl").write_text(text)

    for error in ("NotSaved: step 5 could not be saved into a", "OSError: No space left on device"):
        ended(error)
        refused(lambda: result_of(tmp_path, None, 1, True), error[10:20])
    ended("ValueError: the gradient is wrong")
    assert result_of(tmp_path, None, 1, True) is None
    result = result_of(tmp_path, None, 2, True)
    assert result and "the gradient is wrong (step 5)" in result["failed"]
    assert result_of(tmp_path, "took more than 1 minutes", 1, True)["failed"].startswith("took")
