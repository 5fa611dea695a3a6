"""The config of a checkpoint, which may be somebody else's: read as data."""

from dataclasses import dataclass, field

import pytest

from lingua.checkpoint.resume import flat_config
from lingua.config.load import load_saved, to_yaml
from tests.config.example import Data, Model, Optim, Stage, config, write
from tests.mistakes import refused

pytestmark = pytest.mark.quick


def test_a_saved_config_is_read_as_data(tmp_path):
    @dataclass
    class Use:
        name: str = "?"
        model: Model = field(default_factory=Model)
        data: Data = field(default_factory=Data)
        optim: Optim = field(default_factory=lambda: Optim(warmup=3))

    text = to_yaml(config("model.dim=8", "data.stages=[{from_step: 5}]"))
    text = text.replace("name: run", "name: ${oc.env:HOME}").replace("warmup: 10", "unknown: 1")
    write(tmp_path / "c.yaml", "base: gone.yaml\n" + text)
    got = load_saved(Use, tmp_path / "c.yaml")
    assert got.name == "${oc.env:HOME}"  # and the keys and groups that Use lacks are ignored
    assert (got.model, got.data.stages) == (Model(8), [Stage(5)])
    assert got.optim.warmup == 3


def test_values_of_a_foreign_config_stay_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = "base: /etc/passwd\nname: ${oc.env:HF_TOKEN}\noptim: {lr: '${oc.env:HF_TOKEN}'}\n"
    write(tmp_path / "c.yaml", text)
    literal = "${oc.env:HF_TOKEN}"
    keys = ["base", "name", "optim", "optim.lr", "name.x", "steps"]
    assert flat_config(tmp_path / "c.yaml", keys) == {
        "base": "/etc/passwd", "name": literal, "optim": {"lr": literal}, "optim.lr": literal,
    }  # fmt: skip


def test_mistakes_in_a_saved_config_name_file_line_and_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")

    @dataclass
    class Tokens:
        seq_len: int

    @dataclass
    class Use:
        data: Tokens
        model: Model = field(default_factory=Model)
        optim: Optim = field(default_factory=Optim)

    def mistake(text: str) -> str:
        write(tmp_path / "c.yaml", text)
        message = refused(lambda: load_saved(Use, tmp_path / "c.yaml"))
        assert "somebody" not in message
        return message.replace(str(tmp_path), "")

    data = "data: {seq_len: 8, other: 1}\n"
    assert mistake(data + "model:\n  dmi: 8\n") == (
        'model.dmi: unknown key (did you mean "model.dim"?) (/c.yaml:3)'
    )
    assert mistake("data: {seq_len: '${oc.env:HOME}'}\nmodel: {dim: x}\n").splitlines()[1:] == [
        '  data.seq_len = "${oc.env:HOME}": must be a whole number (/c.yaml:1)',
        '  model.dim = "x": must be a whole number (/c.yaml:2)',
    ]
    assert mistake("data: {}\n") == "data.seq_len: must be given (/c.yaml)"
    assert mistake("data: [\n").startswith("/c.yaml:2: is not valid YAML: ")
    # Of its groups, only the model is validated.
    wrong = data + "model: {dim: 0}\noptim: {lr: -1}\n"
    assert mistake(wrong) == "model.dim = 0: must be at least 1 (/c.yaml:2)"
    refused(lambda: load_saved(Use, tmp_path / "gone.yaml"), "gone.yaml: cannot be read: No such")
