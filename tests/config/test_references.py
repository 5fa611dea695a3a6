"""References in a configuration to other keys and to the environment."""

import pytest

from lingua.config.load import flatten
from tests.config.example import Every, config, mistakes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["name=run_${seed}"], "name", "run_42"),
        (["name=run_${steps}", "steps=1e3"], "name", "run_1000"),
        (["optim.lr=${seed}"], "optim.lr", 42.0),
        (["optim.warmup=${.lr}", "optim.lr=1"], "optim.warmup", 1),
        (["seed=${steps}", "steps=${optim.warmup}"], "seed", 10),
        (["data.sources={a: '${seed}', b: 1}"], "data.sources", {"a": 42.0, "b": 1.0}),
        (["data.sources.a=${seed}"], "data.sources", {"stdlib": 1.0, "a": 42.0}),
        (["checkpoint.eval=${checkpoint.dump}"], "checkpoint.eval.every", 100),
        (["checkpoint.eval=${checkpoint.dump}", "checkpoint.eval.keep=4"], "checkpoint.eval.keep",
         4),
        (["logging.wandb.project=${name}"], "logging.wandb.project", "run"),
        (["name=${oc.env:LINGUA_TEST}"], "name", "of the environment"),
        (["name=${oc.env:NOT_SET,a b}"], "name", "a b"),
        (["dump_dir=${oc.env:NOT_SET,null}"], "dump_dir", None),
        (["data.seq_len=${optim.ratios[0]}"], "data.seq_len", 1),
    ],
)  # fmt: skip
def test_a_reference_stands_for_the_value_of_another_key(monkeypatch, arguments, key, value):
    monkeypatch.setenv("LINGUA_TEST", "of the environment")
    made = config(*arguments)
    assert flatten(made)[key] == value
    assert made.checkpoint.dump == Every()  # what is referred to stays


def test_every_wrong_reference_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("DOLLAR", "${seed}")
    found = mistakes("name=${nope}", "seed=${name}", "data.root_dir=${", r"dump_dir=\${seed}",
                     "optim.warmup=${data.sources}", "eval=${gone}", "steps=${data.seq_len.x}",
                     "optim.lr=${optim.clip}", "optim.clip=${.lr}", "optim.name=${oc.env:NOT_SET}",
                     "data.seq_len=${oc.env:DOLLAR}")  # fmt: skip
    for start in (
        'name = "${nope}": there is no key "nope" (command line)',
        'seed = "${name}": there is no key "nope"',
        'data.root_dir = "${": must not contain ${ besides the references ',
        r'dump_dir = "\\${seed}": must not contain ${ besides',
        'optim.warmup = {"stdlib": 1.0}: must be a whole number (command line)',
        'eval = "${gone}": there is no key "gone"',
        'steps = "${data.seq_len.x}": there is no key "data.seq_len.x"',
        'optim.lr = "${optim.clip}": must not refer to itself',
        'optim.clip = "${.lr}": must not refer to itself',
        'optim.name = "${oc.env:NOT_SET}": the environment variable NOT_SET is not set',
        'data.seq_len = "${oc.env:DOLLAR}": must not contain ${ besides',
    ):
        assert [line for line in found if line.startswith(start)], start
    assert len(found) == 11


def test_a_secret_of_the_environment_is_only_written_where_that_is_asked_for(monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "wandb_api_key"):
        monkeypatch.setenv(name, "hf_secret")
        [line] = mistakes(f"name=${{oc.env:{name}}}")
        assert f"{name} looks like a secret, which config.yaml" in line and "hf_secret" not in line
        assert config(f"name=${{oc.env.secret:{name}}}").name == "hf_secret"
    for name in ("USER_NAME", "TOKENIZER", "MAX_TOKENS_", "KEYBOARD"):
        monkeypatch.setenv(name, "x")
        assert config(f"name=a ${{oc.env:{name}}}").name == "a x"
