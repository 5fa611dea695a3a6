"""The config of a checkpoint, which may be somebody else's: read as data."""

from dataclasses import dataclass, field
from functools import partial

import pytest

from lingua.checkpoint.resume import flat_config
from lingua.config.load import load_saved, to_yaml
from tests.config.example import Data, Model, Optim, Stage, config, write
from tests.mistakes import refused

pytestmark = pytest.mark.quick


def test_a_saved_config_is_read_as_data(tmp_path, monkeypatch):
    @dataclass
    class Use:
        name: str = "?"
        model: Model = field(default_factory=Model)
        data: Data = field(default_factory=Data)
        optim: Optim = field(default_factory=lambda: Optim(warmup=3))

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    literal = "${oc.env:HF_TOKEN}"
    text = to_yaml(config("model.dim=8", "data.stages=[{from_step: 5}]"))
    text = text.replace("name: run", f"name: {literal}").replace("warmup: 10", "unknown: 1")
    file = tmp_path / "c.yaml"
    write(file, "base: /etc/passwd\n" + text)
    got = load_saved(Use, file)
    assert got.name == literal  # and the keys and groups that Use lacks are ignored
    assert (got.model, got.data.stages) == (Model(8), [Stage(5)])
    assert got.optim.warmup == 3
    write(file, f"base: /etc/passwd\nname: {literal}\noptim: {{lr: '{literal}'}}\n")
    expected = {"base": "/etc/passwd", "name": literal, "optim": {"lr": literal}}
    expected |= {"optim.lr": literal}
    assert flat_config(file, [*expected, "name.x", "steps"]) == expected


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

    data = "data: {seq_len: 8, other: 1}\n"
    home = "data: {seq_len: '${oc.env:HOME}'}\nmodel: {dim: x}\n"
    for text, n_lines, *names in (
        (f"{data}model:\n  dmi: 8\n", 1, "model.dmi", 'did you mean "model.dim"?', "c.yaml:3)"),
        (home, 3, 'data.seq_len = "${oc.env:HOME}"', "c.yaml:1)", 'model.dim = "x"', "c.yaml:2)"),
        ("data: {}\n", 1, "data.seq_len", "must be given", "c.yaml)"),
        ("data: [\n", 1, "c.yaml:2", "YAML"),
        # Of its groups, only the model is validated.
        (f"{data}model: {{dim: 0}}\noptim: {{lr: -1}}\n", 1, "model.dim = 0", "c.yaml:2"),
    ):
        write(tmp_path / "c.yaml", text)
        message = refused(partial(load_saved, Use, tmp_path / "c.yaml"), *names)
        assert "somebody" not in message and len(message.splitlines()) == n_lines
    refused(lambda: load_saved(Use, tmp_path / "gone.yaml"), "gone.yaml", "No such")
