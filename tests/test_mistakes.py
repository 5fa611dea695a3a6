"""Mistakes on a command line, one a line: what a user types, and after two spaces each what the
refusal must name. `refused` of tests/mistakes.py says what is compared."""

import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest

from apps.dpo import TrainArgs as DPOArgs
from apps.main.config import TrainArgs
from apps.main.eval import EvalArgs
from apps.main.generate import GenerateArgs
from apps.sft import TrainArgs as SFTArgs
from lingua.app import choose_app
from lingua.checkpoint.run_config import load_run
from lingua.config.help import help_text
from lingua.config.load import load, meta_lingua
from lingua.tokenizer import TokenizerArgs
from lingua.tools.commands import checkpoint, compare, report, runs, tokenizer
from lingua.tools.commands import stool as stool_command
from lingua.tools.commands.data_prepare import PrepareArgs
from lingua.tools.commands.data_show import ShowArgs
from lingua.tools.plan.make import make_plan
from lingua.tools.slurm.launch import JobArgs
from tests.apps.runs import SMALL, write_sources
from tests.config.example import Config
from tests.mistakes import refused
from tests.tools.runs.compare.pool import write_run

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "tests/samples/0.1.0/run/checkpoints/0000000006"
DEBUG = ROOT / "apps/main/configs/debug.yaml"


def stool(argv):
    words = {key: value for key, value in SMALL.items() if f"sweep.{key}" not in " ".join(argv)}
    words |= {"data.root_dir": ".", "dump_dir": "new"}
    stool_command.main(["launcher=print", *(f"{k}={v}" for k, v in words.items()), *argv])


def loads(config, *needed, **options):
    return lambda argv: load(config, [*needed, *argv], **options)


SOURCES = ("data.sources={a: 1}", "model.n_heads=4")
PAIRS = ("data.chat={pairs: true}", "data.document_mask=ignore", "checkpoint.init_from=m")
BATCH = ("data.sources={a: 1}", "data.global_batch_size=8")
PROGRAMS = {
    "example": loads(Config, foreign=meta_lingua),
    "help": partial(help_text, Config),
    "train": loads(TrainArgs, *SOURCES),
    "run": lambda argv: load_run(choose_app([]), [*SOURCES, *argv]),
    "sft": loads(SFTArgs, *SOURCES),
    "dpo": loads(DPOArgs, *SOURCES, *PAIRS),
    "app": choose_app,
    "generate": loads(GenerateArgs, "ckpt=runs/a"),
    "tokens": loads(TokenizerArgs),
    "tokenizer": tokenizer.main,
    "show": loads(ShowArgs, *BATCH, partial=True),
    "plan": lambda argv: make_plan([f"config={DEBUG}", *argv]),
    "checkpoint": checkpoint.main,
    "runs": runs.main,
    "report": report.main,
    "compare": compare.main,
    "stool": stool,
}
TABLE = r"""
    example steps=1.5                           steps  1.5  whole number
    example steps=1e30                          steps  1e30  whole number
    example seed=true                           seed  true  whole number
    example seed=9223372036854775808            seed  9223372036854775808
    example distributed.dp_shard=x              distributed.dp_shard  "x"  whole number  null
    example optim.lr=abc                        optim.lr  "abc"  number
    example optim.lr=.nan                       optim.lr  .nan  number
    example optim.lr=                           optim.lr  null  number
    example distributed.compile=1               distributed.compile  1  true or false
    example name=null                           name  null  text
    example optim.ratios=1                      optim.ratios  list of float  [a, b]
    example optim.name=adam                     optim.name  "adam"  muon  did you mean "adamw"?
    example optim=3                             optim  3  lr, name, clip,
    example optim=???                           optim  must be given
    example name="'!!!CHANGE_THIS!!!'"          name  must be given
    example data.sources=[1]                    data.sources  mapping of float  {a: 1, b: 2}
    example 'data.sources={a: x}'               data.sources.a  "x"  number
    example data.stages=3                       data.stages  list of Stage
    example 'data.stages=[{from_stp: 1}]'       did you mean "data.stages[0].from_step"?
    example 'data.stages=[{sources: {}}]'       data.stages[0].from_step  must be given
    example optim.warmup=2_000                  optim.warmup  2_000  steps = 1000
    example steps=5                             optim.warmup  10  steps = 5 (the default)
    example logging.wandb.tags=[a]              logging.wandb.project  must be given
    example stpes=1                             stpes  did you mean "steps"?
    example optim.lrr=1                         optim.lrr  did you mean "optim.lr"?
    example lr=1                                lr  did you mean "optim.lr"?
    example optin.lr=1                          optin.lr  did you mean "optim.lr"?
    example modle.dmi=1                         modle.dmi  did you mean "model.dim"?
    example logging.zzz=1                       logging.zzz  freq, wandb
    example steps.x=1                           steps.x  unknown key
    example config=                             config=  file
    example debug.yaml                          did you mean "config=debug.yaml"?
    example config=c.yaml config=c.yaml         config is given twice
    example distributed.fsdp_type=hybrid        fsdp_type  "full_shard" or "no_shard"
    example seed=7 data.seed=8                  data.seed  8  seed = 7
    example model.seed=8                        model.seed  8  seed = 42
    example distributed.float8_recipe=rowwise   float8_recipe  "rowwise"  null
    help optin                               --help optin  did you mean "optim"?

    train checkpoint.allow_change=[model.dim,model.dmi]  checkpoint.allow_change[1]  "model.dim"
    train 'data.stages=[{from_step: 3}]'                 data.stages[0].sources  must be given
    train 'data.stages=[{from_step: x, sources: {a: 1}}]'  data.stages[0].from_step  "x"
    train 'data.stages=[{from_step: 3, sources: {a: -2}}]'  data.stages[0].sources.a  -2
    train 'data.stages=[{from_step: 0, sources: {a: 1}}]'  stages[0].from_step  0  data.sources
    train 'data.stages=[{from_step: 9, sources: {}}]'    data.stages[0].sources  one source
    train 'data.stages=[{from_step: 9, sources: {a: 0}}]'  data.stages[0].sources  above 0
    train 'data.stages=[{from_step: 9, sources: {../b: 1}}]'  data.stages[0].sources.../b  path
    train 'data.stages=[{from_step: 9, sources: {a: 1}}, {from_step: 9, sources: {a: 1}}]'  [1]  9
    train 'data.source_files={a: {file: [x]}}'           "data.source_files.a.files"
    train data.source_files.a.py.txt_key=x   did you mean "data.source_files.a.py.text_key"?
    train data.sources=data/books.jsonl      data.sources  "data/books.jsonl"  data.root_dir
    run checkpoint.init_from=Qwen/Q-0.6                  Qwen/Q-0.6  hf download Qwen/Q-0.6
    train 'data.sources={a: -1, b: 1}'                   data.sources.a  -1
    train 'data.sources={a: .inf}'                       data.sources.a  .inf
    train 'data.sources={a: 0}'                          data.sources  above 0
    train data.sources={}                                data.sources
    train 'data.sources={../a: 1}'                       data.sources.../a  path
    train 'data.sources={x/y: 1}'                        data.sources.x/y  path
    train 'data.sources={..: 1}'                         data.sources...  path
    train 'data.sources={.a: 1}'                         data.sources..a  path
    train validation.sources=[a]                         validation.sources[0]  "a"  data.sources.a
    train validation.sources=[../c]                      validation.sources[0]  "../c"  path
    train validation.sources=[b,b]                       validation.sources[1]  "b"  twice
    train logging.wandb.mode=ofline                      "ofline"  did you mean "offline"?
    train model.n_heads=null                             model.n_heads  model.head_dim
    train model.n_heads=null model.head_dim=6            model.head_dim  6  model.dim
    train model.dim=32 model.n_heads=32                  model.n_heads  rotary
    train model.head_dim=7                               model.head_dim  rotary
    train model.rope_scaling.low_freq_factor=4           model.rope_scaling.low_freq_factor
    train model.rope_scaling.high_freq_factor=.inf       model.rope_scaling.low_freq_factor
    train data.document_mask=keep data.add_bos=false data.add_eos=false  data.document_mask  add_bos
    train distributed.dp_replicate=null                  distributed.dp_replicate  dp_shard
    sft data.chat=null                                 data.chat  null
    sft 'data.chat={pairs: true}'                      data.chat.pairs  apps.dpo
    dpo dpo.beta=0                                     dpo.beta  0
    dpo 'data.chat={pairs: false}'                     data.chat.pairs  true
    dpo data.document_mask=none                        data.document_mask  ignore  keep
    dpo data.n_views=3                                 data.n_views  3  2
    dpo checkpoint.init_from=null                      checkpoint.init_from  reference
    app app=apps.mpt                                   apps.mpt  cannot be imported
    app app=apps.main.train                            apps.main.train  lingua.app.App
    generate system=x                                    system  chat=true
    generate prompt=a prompts=b                          prompts

    tokens name=tiktokn               "tiktokn"  bytes  sp  did you mean "tiktoken"?
    tokens name=sp                    path  null  sp
    tokens name=tiktoken path=/gone   path  "/gone"  tiktoken
    tokens eos=</s>                   eos  "</s>"  null  bytes
    tokenizer trian                             "trian"  train or show  did you mean "train"?
    tokenizer show                              show  one text
    tokenizer show two texts                    show  one text
    tokenizer show hi name=hf                   path  null  hf
    tokenizer show hi path=c.yaml               name=hf, sp or tiktoken
    tokenizer train vocab_size=300              out  must be given
    tokenizer train config=c.yaml out=new vocab_size=257  vocab_size  257  258
    tokenizer train config=c.yaml out=run                 out  run  exists
    tokenizer train config=c.yaml out=/proc/none          out  /proc/none
    tokenizer train config=c.yaml out=new 'data.sources={no: 1}'     data.sources.no
    tokenizer train config=c.yaml out=new 'data.sources={bad: 1}'    bad.jsonl:2
    tokenizer train config=c.yaml out=new 'data.sources={none: 1}'   no text

    show step=0                 step  0  1
    show step=1 row=8           row  8  0 to 7  data.global_batch_size = 8
    show optim.lr=1             optim.lr  unknown key
    show row=3                  row  3  step
    show worst=3                worst  3  step
    show step=1 worst=9         worst  9  1 to 8  data.global_batch_size = 8
    show step=1 worst=2 row=3   row  3  worst
    checkpoint show torn        torn  train_state.json
    checkpoint show empty       empty
    checkpoint shwo torn        did you mean "show"?
    checkpoint diff             diff  'folder'
    checkpoint diff torn app=apps.main.train   app  apps.main.train
    checkpoint unmark run good  good  none
    checkpoint mark run a/b     "a/b"  letters
    checkpoint mark run best    best

    plan gpu=h10 nodes=0 tokens=-1 json=none/p.json model.dims=2  "h10"  "h100"  nodes  tokens  -1
    plan json=none/p.json model.dims=2   json  none/p.json  did you mean "model.dim"?  lingua plan
    plan gpu=h10 ngpu=3 distributed.tp_size=2        "h10"  "h100"  tp_size = 2
    plan ngpu=3 distributed.tp_size=2                tp_size = 2  2 does not divide
    plan gpu=mine.yaml ngpu=3 distributed.tp_size=3  mine.yaml  tp_size  model.n_heads = 4
    plan ngpu=2 grad_acc_steps=100                   grad_acc_steps  100
    plan choices=2                                   gpu  choices = 2
    plan gpu=own.yaml    bf16_tflops  tf32_tflops  node_gb_per_s  network_gb_per_s
    plan data.tokenizer.name=tiktoken data.tokenizer.path=gone   gone  model.vocab_size=N

    runs                        python -m lingua runs DIR
    runs . --csv --json         python -m lingua runs DIR
    runs none                   none
    runs . sort=helduot         sort  helduot  did you mean "heldout"?
    runs . filter=lr            filter  lr  KEY=VALUE
    runs . filtr=lr             filtr  did you mean "filter"?
    runs . columns=[optim.rl]   columns  optim.rl  did you mean "optim.lr"?
    report                      no folder
    report . out=page.pdf       out  page.pdf  .html
    report . ot=page.html       ot  did you mean "out"?
    report missing              missing
    report empty                empty
    report . out=no/a.html      no/a.html
    compare                            python -m lingua compare
    compare a-0 --against              python -m lingua compare
    compare nowhere --against a-0      nowhere
    compare no-* --against a-0         no-*
    compare a-0 --against a-0          same
    compare a-*                        2 runs  seed
    compare a-0 --against a-1 b-0      --against  one arm  2
    compare a-0 --against b-0 stp=3    stp  did you mean "step"?
    compare a-0 --against b-0 level=95  level  95  0.5  0.9999
    compare a-0 --against b-0 measure=nats_per_tokn  did you mean "nats_per_token"?
    compare empty --against b-0        empty
    compare a-0 --against b-0 step=3 by=tokens  step  3  null  tokens
    compare plan                       pilot  effect
    compare plan effect=0 pilot=a-0    effect  0
    compare plan effect=0.1 pilot=a-0  pilot  two seeds
    compare plan effect=0.1 pilot=none  none

    stool script=..                    script  ..  apps.main
    stool script=.x                    script  .x  apps.main
    stool 'script=a b'                 script  a b  apps.main
    stool script=/etc/passwd           script  /etc/passwd  apps.main
    stool 'setup=[true, module \]'     setup[1]
    stool sweep.name=a,b               sweep.name
    stool sweep.dump_dir=a,b           sweep.dump_dir
    stool sweep.optim.lr=1e-3,0.001    sweep.optim.lr  1e-3,0.001  once
    stool sweep.seed=1 sweep.seed=2    sweep.seed  twice
    stool sweep.seed={many} sweep.steps={many}  1,521
    stool sweep.optim.lr=              sweep.optim.lr  commas
    stool sweep.optim.lr=[1,2          sweep.optim.lr  [1,2  commas
    stool sweep.optim.lr=a,,b          sweep.optim.lr  a,,b  commas
    stool sweep.optim.lr={deep}        sweep.optim.lr  commas
    stool gpu=h100 script=apps.main.eval  gpu  h100  training
    stool allow_too_large=true         allow_too_large  gpu
    stool gpu=h10                      gpu  "h10"  did you mean "h100"?
    stool launcher=local dump_dir=one.jsonl/x  one.jsonl/x
"""
# What a line cannot hold.
TOO_LONG = [
    (["steps=" + 5000 * "9"], "999...", "whole number"),
    (["seed=0x" + 5000 * "f"], "fff...", "whole number"),
    (["steps=" + 200 * "x"], "xxx...", "whole number"),
    (["name=a\0b"], r"argument 'name=a\x00b'", "UTF-8"),
    (["name=\udcff"], r"argument 'name=\udcff'", "UTF-8"),
    ([f"config={300 * 'x'}"], "xxx", "File name too long"),
    ([300 * "a." + "b=1"], "a.a...", "unknown key"),
]


def mistakes():
    """(program, its arguments, what must be named)."""
    filled = {"{many}": ",".join(map(str, range(1, 40))), "{deep}": 500 * "[" + 500 * "]"}
    for line in filter(str.strip, TABLE.splitlines()):
        command, *names = re.split(r"  +", line.strip())
        program, *argv = shlex.split(re.sub(r"\{(many|deep)\}", lambda m: filled[m[0]], command))
        yield pytest.param(program, argv, names, id=command)
    for argv, *names in TOO_LONG:
        yield pytest.param("example", argv, names, id=argv[0][:20])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs, a torn checkpoint, sources of text and a config."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, lr, seed in (("a-0", 0.1, 0), ("a-1", 0.1, 1), ("b-0", 0.2, 0)):
        write_run(folder / name, [f"optim.lr={lr}", f"seed={seed}", "steps=20"], [10, 20], [3, 2])
    write_sources(folder)
    (folder / "empty").mkdir()
    (folder / "bad.jsonl").write_text('{"text": "a line"}\n{"text": \n')
    (folder / "none.jsonl").touch()
    (folder / "c.yaml").write_text("data: {root_dir: ., sources: {one: 1}}\n")
    (folder / "own.yaml").write_text("{memory_gib: 10, memory_gb_per_s: 1000, fp32_tflops: 1}")
    shutil.copytree(SAMPLE, folder / "run/checkpoints" / SAMPLE.name)
    (shutil.copytree(SAMPLE, folder / "torn") / "train_state.json").unlink()
    return folder


@pytest.mark.parametrize(("program", "argv", "names"), list(mistakes()))
def test_a_mistake_is_refused_by_what_it_is_about(place, monkeypatch, program, argv, names):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    message = refused(lambda: PROGRAMS[program](argv), *names)
    assert "Traceback" not in message and len(message) < 2500
    assert sorted(place.rglob("*")) == before  # nothing is written


# ---- numbers out of range: the key is named, and what it must be

TRAIN = """
    steps=-1 steps=1e10 stop_at=0 grad_acc_steps=-2 name= name=a\x1b[31m checkpoint.path=a\x7f
    data.seq_len=1e13 data.n_views=-1 data.batch_size=1e9 data.global_batch_size=-8
    data.workers=100000 data.workers=-1 model.n_layers=1e8 model.n_layers=-1 model.dim=1e9
    model.multiple_of=-1 model.vocab_size=-2 model.vocab_size=1e12 model.ffn_dim_multiplier=1e300
    model.sliding_window=-1 model.sliding_window=0 model.rope_scaling.original_seq_len=-1
    model.rope_scaling.original_seq_len=0 model.rope_scaling.factor=0.5 model.dim=0 model.n_heads=0
    model.n_heads=5 model.n_kv_heads=0 model.n_kv_heads=3 model.n_kv_heads=8 model.head_dim=0
    model.head_dim=1e9 model.multiple_of=0 model.norm_eps=0 model.rope_theta=.inf
    model.init_base_std=-0.02 model.ffn_dim_multiplier=-1 model.ffn_dim_multiplier=1e-6
    model.ffn_dim_multiplier=.inf model.dropout=-0.1 model.dropout=1
    optim.warmup=-1 optim.lr=-1e-9 optim.lr=.inf optim.weight_decay=-0.1 optim.beta1=-0.1
    optim.beta1=1 optim.beta2=1.5 optim.epsilon=0 optim.epsilon=-1 optim.clip=0 optim.clip=-1
    optim.lr_min_ratio=-0.1 optim.lr_min_ratio=1.1 optim.cycle_length=0 optim.cycle_length=-1
    optim.cycle_length=.inf optim.cosine_theta=0 optim.decay_fraction=-0.1 optim.decay_fraction=1.1
    optim.exp_factor=0 optim.exp_factor=.inf optim.muon.ns_steps=1e9
    optim.muon.ns_steps=0 optim.muon.momentum=-0.1 optim.muon.momentum=1 optim.muon.rms=0
    optim.muon.rms=.inf
    distributed.dp_replicate=-1 distributed.dp_replicate=0 distributed.dp_shard=0
    distributed.dp_shard=-1 distributed.tp_size=-1 distributed.tp_size=0
    distributed.rendezvous_s=-1 distributed.rendezvous_s=.inf
    checkpoint.dump.every=-5 checkpoint.dump.keep=-2 checkpoint.dump.every_minutes=-1
    checkpoint.eval.every=-5 checkpoint.eval.keep=-2 checkpoint.keep_every=-1
    validation.every=-1 validation.tokens=-1 logging.freq=-1 logging.freq=0
    profiling.mem_steps=-1 profiling.profile_warmup=-2
    eval.every=-1 eval.num_fewshot=-1 eval.limit=-1 eval.batch_size=-1 eval.max_gen_tokens=1e9
    eval.seed=-1
"""
GENERATE = """
    top_k=0 top_k=9223372036854775808 top_p=-1 top_p=0 top_p=1.5 temperature=-1 temperature=.inf
    max_gen_tokens=0 max_gen_tokens=1e9 stop=[a,''] stop_tokens=[-1] context=0 batch_size=-1
"""
EVAL = "tasks=[] context=-1 seed=1e12 num_fewshot=-1 limit=1.5"
RANGES = [
    (TrainArgs, (*SOURCES, "eval.tasks=[a]"), TRAIN),
    (GenerateArgs, ("ckpt=runs/a",), GENERATE),
    (EvalArgs, ("ckpt=runs/a", "tasks=[a]"), EVAL),
    (JobArgs, (), "nodes=-1 ngpu=1e6 ncpu=-1 signal_s=-1 at_once=-1"),
    (PrepareArgs, SOURCES[:1], "processes=-1 processes=1e9"),
    (ShowArgs, (*BATCH, "step=1"), "step=-1 row=-1 row=8"),
]


@pytest.mark.parametrize(
    ("config", "needed", "argument"),
    [
        *((config, needed, word) for config, needed, words in RANGES for word in words.split()),
        (TrainArgs, SOURCES, "dump_dir=a\nb"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_key(config, needed, argument):
    message = refused(lambda: load(config, [*needed, argument]))
    assert message.startswith(argument.partition("=")[0]) and ": must " in message
    assert len(message.splitlines()) == 1
    load(config, [*needed])  # what is refused is that value and no other
