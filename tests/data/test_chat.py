"""Sources of conversations: records to packed rows, and what is no conversation."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lingua.base.errors import UserError
from lingua.data import IGNORE
from lingua.data.args import ChatArgs, DataArgs, SourceFiles
from lingua.data.chat import ChatRows, held_out_answers
from lingua.data.loader import Loader
from lingua.data.rows import document_marks
from lingua.data.sources import check_sources, prepare_source
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools.chat_template import open_chat
from lingua.tools.inspect.describe import describe_mixture, describe_row
from tests.chats import CHATML, TEMPLATES, write_tokenizer
from tests.mistakes import refused

pytestmark = pytest.mark.quick
S = 96


def conversation(i: int) -> list[dict[str, str]]:
    turns = [("user", f"question {i}"), ("assistant", f"answer {'x' * (i % 11)} {i}")]
    if i % 3 == 0:
        turns += [("user", "again"), ("assistant", f"größer {i}")]
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS = [conversation(i) for i in range(200)]


def make_args(root: Path, records: list[Any], template: str = CHATML, **changes: Any) -> DataArgs:
    root.mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    (root / "a.jsonl").write_text("\n".join(lines) + "\n")
    folder = write_tokenizer(root / ".tokenizer", template)
    tokenizer = TokenizerArgs(name="hf", path=str(folder))
    known: dict[str, Any] = {"chat": ChatArgs(), "document_mask": "ignore", "seq_len": S}
    known |= {"global_batch_size": 4, "sources": {"a": 1.0}, "root_dir": str(root)}
    return DataArgs(tokenizer=tokenizer, **(known | changes))


def prepared(args: DataArgs) -> tuple[Any, list[str]]:
    lines: list[str] = []
    tokenizer = build_tokenizer(args.tokenizer)
    return prepare_source("a", args, tokenizer, lines.append, processes=1), lines


def rows_of(args: DataArgs, source: Any) -> ChatRows:
    vocab_size = build_tokenizer(args.tokenizer).vocab_size
    return ChatRows(args.row_stream({"a": source}, 1), args.seq_len, args.n_views, vocab_size)


def documents_of(tokens: np.ndarray, index: np.ndarray, target: np.ndarray) -> list[Any]:
    """(tokens, targets) of each document of rows."""
    return [
        (row[i == d].tolist(), t[i == d].tolist())
        for row, i, t in zip(tokens, index, target, strict=True)
        for d in range(i.max() + 1)
    ]


@pytest.mark.parametrize("n_views", [2, 4])
def test_every_example_is_whole_in_one_row_with_the_targets_of_its_answers(tmp_path, n_views):
    """But for those that are held out, whose loss is in tests/apps/test_sft.py."""
    args = make_args(tmp_path, [{"messages": c} for c in CONVERSATIONS], n_views=n_views)
    source, lines = prepared(args)
    rows = rows_of(args, source)
    n_rows = source.n_tokens // args.row_tokens
    assert source.n_tokens == n_rows * args.row_tokens  # whole rows
    every = np.arange(n_rows)
    found = documents_of(rows.rows(every), rows.documents(every), rows.is_target(every))

    chat = open_chat(args.tokenizer, build_tokenizer(args.tokenizer))
    expected = []
    for c in CONVERSATIONS:
        ids, is_answer = chat.encode_example(chat.examples(c)[0])
        expected.append((ids.tolist(), is_answer.tolist()))
    padding = [d for d in found if not any(d[1])]
    assert all(set(tokens) == {0} for tokens, _ in padding)
    trained = sorted(d for d in found if any(d[1]))
    n_held_out = source.manifest.total("heldout", "documents")
    assert 0 < n_held_out < 20 and len(trained) + n_held_out == len(CONVERSATIONS)
    assert all(d in expected for d in trained)
    padded = sum(len(tokens) for tokens, _ in padding)
    assert padded < 0.2 * source.n_tokens

    assert "held out" in lines[-1]


def test_micro_batches_have_the_documents_and_targets_of_the_rows(tmp_path):
    args = make_args(tmp_path, [{"messages": c} for c in CONVERSATIONS])
    source, _ = prepared(args)
    rows, marks = rows_of(args, source), document_marks(args, build_tokenizer(args.tokenizer))
    loader = Loader(rows, 4, 0, 1, 1, 4, marks=marks, documents=rows.documents)
    [micro] = next(loader.steps(0))
    first = np.arange(4)
    wanted = np.where(rows.is_target(first), rows.rows(first).astype(np.int64), IGNORE)[:, 1:]
    assert np.array_equal(micro.targets[0].numpy(), wanted)
    assert (micro.targets != IGNORE).sum() > 20
    index = rows.documents(first)[:, :S]
    begins = [np.flatnonzero(np.diff(i, prepend=-1)).tolist() for i in index]
    assert [[b for b in row if b < S] for row in micro.documents.tolist()] == begins


def same_source(root: Path, forms: dict[str, list[Any]], **changes: Any) -> tuple[DataArgs, Any]:
    """The source that each form of the records gives, `parquet` as a table."""
    made = {name: make_args(root / name, records, **changes) for name, records in forms.items()}
    (root / "parquet/a.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(forms["parquet"]), root / "parquet/a.parquet")
    sources = [prepared(args)[0] for args in made.values()]
    assert len({source.fingerprint for source in sources}) == 1
    return next(iter(made.values())), sources[0]


def test_forms_of_records_give_the_same_shards(tmp_path):
    single = [c[:2] for c in CONVERSATIONS]
    messages = [{"messages": c} for c in single]
    pairs = [{"prompt": c[0]["content"], "completion": c[1]["content"]} for c in single]
    _, source = same_source(tmp_path, {"messages": messages, "pairs": pairs, "parquet": messages})
    files = {"a": SourceFiles(["a.jsonl"], "chat")}
    keyed = make_args(tmp_path / "key", [{"chat": c} for c in single], source_files=files)
    assert prepared(keyed)[0].fingerprint == source.fingerprint
    changed = [{"messages": [*c[:1], c[1] | {"content": "?"}]} for c in single]
    other = make_args(tmp_path / "other", changed)
    assert prepared(other)[0].fingerprint != source.fingerprint


TOOLS = """{% for m in messages %}<|im_start|>{{ m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_what_arrow_fills_in_for_calls_of_other_arguments_is_no_part_of_a_text(tmp_path):
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        function = {"arguments": arguments, "name": name}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}

    records = []
    for i in range(20):
        asked = {"role": "user", "content": f"question {i}"}
        records.append({"messages": [asked, call("weather", city=f"Paris {i}")]})
        records.append({"messages": [asked, call("add", a=i, b=[1, 2])]})
    args, source = same_source(tmp_path, {"lines": records, "parquet": records}, template=TOOLS)
    decode = build_tokenizer(args.tokenizer).decode
    text = decode(rows_of(args, source).rows(np.arange(3)).ravel())
    assert 'add {"a": ' in text and "null" not in text


def test_the_mask_the_template_and_the_row_are_part_of_the_shards(tmp_path):
    records = [{"messages": c} for c in CONVERSATIONS]
    args = make_args(tmp_path, records)
    first = prepared(args)[0]
    marked = prepared(make_args(tmp_path, records, TEMPLATES["marked"]))[0]
    wider = prepared(replace(args, seq_len=2 * S))[0]
    assert len({s.folder for s in (first, marked, wider)}) == 3
    # Where answers are marked, the line break after them is none: the same ids, other targets.
    ids = [s.manifest.tokenizer["vocab_size"] for s in (first, marked)]
    assert ids[0] == ids[1] and first.fingerprint != marked.fingerprint


def test_long_examples_are_refused_or_cut_and_counted(tmp_path):
    long = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y" * 300}]
    lost = [{"role": "user", "content": "q" * 300}, {"role": "assistant", "content": "y"}]
    records = [{"messages": c} for c in [*CONVERSATIONS[:50], long]]
    too_long = make_args(tmp_path / "refused", records)
    refused(lambda: prepared(too_long), "a.jsonl:51: longer than a row", "97")
    args = make_args(tmp_path / "skipped", records, on_bad_record="skip")
    assert "1 bad record left out (1 longer than a row)" in " ".join(prepared(args)[1])
    cut = {"chat": ChatArgs(on_long_example="cut")}
    source, lines = prepared(make_args(tmp_path / "cut", records, **cut))
    assert source.manifest.cut == 1 and "1 example longer than a row cut" in " ".join(lines)
    records.append({"messages": lost})
    refused(lambda: prepared(make_args(tmp_path / "lost", records, **cut)), "a.jsonl:52: ", "97")


USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def test_what_is_no_source_of_conversations_is_named(tmp_path):
    args = make_args(tmp_path, [{"messages": [USER, BOT]}], "{{ raise_exception('not today') }}")
    refused(lambda: prepared(args), "a.jsonl:1: ", "not today")
    (tmp_path / ".tokenizer/tokenizer_config.json").unlink()
    refused(lambda: check_sources(args, build_tokenizer(args.tokenizer)), "no chat template")
    text = make_args(tmp_path / "text", [{"text": "q"}, {"messages": [USER, BOT]}])
    refused(lambda: prepared(text), "a.jsonl:1: ", "data.source_files.a.text_key")
    (tmp_path / "text/a.jsonl").rename(tmp_path / "text/a.txt")
    refused(lambda: prepared(text), "a.txt:1: ")


PAIRS = [(f"q {i}", "x" * (i % 9 + 1), f"no {i}") for i in range(150)]
PAIRS = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS]
AS_PAIRS = {"chat": ChatArgs(pairs=True)}


def as_messages(pair: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {key: [{"role": roles[key], "content": text}] for key, text in pair.items()}


def test_forms_of_pairs_give_the_same_shards(tmp_path):
    lists = [as_messages(pair) for pair in PAIRS]
    whole = [{k: p["prompt"] + p[k] for k in ("chosen", "rejected")} for p in lists]
    forms = {
        "texts": PAIRS,
        "lists": lists,
        "whole": whole,
        "both": [{**pair, **both} for pair, both in zip(PAIRS, whole, strict=True)],
        "parquet": whole,
    }
    same_source(tmp_path, forms, **AS_PAIRS)  # what their rows hold: tests/apps/test_dpo.py


def test_pairs_of_one_prompt_at_least_are_held_out(tmp_path):
    """Of which no hash is of the lowest fiftieth; all pairs of a prompt, or none."""
    records = [{**PAIRS[i], "chosen": f"{i} {c}"} for c in range(3) for i in range(10, 22)]
    args = make_args(tmp_path, records, **AS_PAIRS)
    source, lines = prepared(args)
    manifest = source.manifest
    assert manifest.held_out_below > 2**64 // 50 and "held out 3 documents (8.33%)" in lines[-1]
    windows = held_out_answers(source, args.seq_len, (10**6, "bytes"))
    parts = [held_out_answers(source, args.seq_len, b) for b in ((1, "bytes"), (9**9, "bytes", 1))]
    assert 0 < parts[0].n_bytes < sum(part.n_bytes for part in parts) == windows.n_bytes
    decode = build_tokenizer(args.tokenizer).decode
    prompts = re.findall(r"q \d+", " ".join(map(decode, windows.tokens)))
    (held_out,) = set(prompts)
    assert len(prompts) == 6  # of three pairs
    rows = rows_of(args, source)
    n = source.n_rows(args.row_tokens, 1)
    trained = "".join(map(decode, rows.rows(np.arange(n))))
    assert {p["prompt"] for p in records} - {held_out} == set(re.findall(r"q \d+", trained))
    few, _ = prepared(make_args(tmp_path / "few", records[:9] * 3, **AS_PAIRS))
    assert not few.manifest.total("heldout", "documents")


def test_only_the_last_answers_of_a_pair_carry_loss_and_long_ones_are_cut_to_one_length(tmp_path):
    history = [USER, BOT, USER]
    both = {
        k: [*history, {"role": "assistant", "content": c * 80}]
        for k, c in zip(("chosen", "rejected"), "yz", strict=True)
    }
    with pytest.raises(UserError, match=r"a\.jsonl:1: longer than a row"):
        prepared(make_args(tmp_path, [both], **AS_PAIRS))
    cut = {"chat": ChatArgs(pairs=True, on_long_example="cut")}
    args = make_args(tmp_path, [both], **cut)
    source, _ = prepared(args)
    assert source.manifest.cut == 1
    rows = rows_of(args, source)
    read = (rows.rows, rows.is_target, rows.documents)
    (tokens,), (target,), (index,) = (of(np.array([0])) for of in read)
    assert np.bincount(index).tolist()[:2] == [args.row_tokens // 2] * 2
    decode = build_tokenizer(args.tokenizer).decode
    for document, letter in ((0, "y"), (1, "z")):
        assert set(decode(tokens[target & (index == document)])) == {letter}


@pytest.mark.parametrize("pairs", [False, True])
def test_a_row_is_shown_with_its_records_and_what_carries_loss(tmp_path, pairs):
    conversations = [{"messages": c[:2]} for c in CONVERSATIONS]
    records = (PAIRS if pairs else conversations)[:60]  # each row looks its own up in all of them
    args = make_args(tmp_path, records, chat=ChatArgs(pairs=pairs))
    source, tokenizer = prepared(args)[0], build_tokenizer(args.tokenizer)
    rows, seen = rows_of(args, source), []
    n_rows = source.n_tokens // args.row_tokens
    for position in range(n_rows):
        where, origin, *shown = describe_row(args, rows, tokenizer, 1, position, position)
        assert f"position {position:,} of the run" in where and f"of {n_rows}, number" in origin
        for header, text in zip(shown[::2], shown[1::2], strict=True):
            line = int(re.search(r"a\.jsonl:(\d+)\)", header)[1])
            answers = [part.partition("\u27e7")[0] for part in text.split("\u27e6")[1:]]
            record = records[line - 1]
            if pairs:
                said = [record["chosen"], record["rejected"]]
            else:
                said = [record["messages"][1]["content"]]
            assert [answer.strip("\n") for answer in answers] == said
            seen.append(line)
    n_held_out = source.manifest.total("heldout", "documents")
    assert len(set(seen)) == len(seen) == len(records) - n_held_out
    _, _, of_source, _ = describe_mixture(args, rows.stream, 10)
    numbers = [int(n.replace(",", "")) for n in of_source.split()[1:4]]
    assert numbers == [len(seen), source.n_tokens, n_rows]
