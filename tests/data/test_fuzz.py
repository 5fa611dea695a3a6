"""Hostile files of text, tokens and tokenizers: each gives tokens or an error of the project."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lingua.base.errors import UserError
from lingua.data.shards import Source
from lingua.data.sources import held_out_windows
from lingua.tokenizer import TokenizerArgs, build_tokenizer
from tests.data.prepared import TEXTS, Prepared, expected_tokens, make_args, train_tokens
from tests.mutation import change_bytes, change_file, change_json, fuzz
from tests.tokenizer import test_tokenizer as tokenizers

pytestmark = pytest.mark.soak

SECONDS = 15


def test_any_change_to_a_file_of_text_gives_tokens_or_a_named_error(tmp_path):
    lines = b"".join(json.dumps({"n": 1, "text": text}).encode() + b"\n" for text in TEXTS[:200])
    table = pa.table({"n": list(range(200)), "text": TEXTS[:200]})
    pq.write_table(table, tmp_path / "p", row_group_size=50)
    forms = {
        "jsonl": lines,
        "jsonl.gz": gzip.compress(lines),
        "jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
        "parquet": (tmp_path / "p").read_bytes(),
        "json": json.dumps([{"text": text} for text in TEXTS[:200]], indent=1).encode(),
        "csv": table.to_pandas().to_csv().encode(),
        "txt": "".join(TEXTS).encode(),
        "txt.gz": gzip.compress("".join(TEXTS).encode()),
    }

    def make(draw):
        form = draw.choice(list(forms))
        for path in tmp_path.glob("a.*"):
            path.unlink()
        (tmp_path / f"a.{form}").write_bytes(change_bytes(forms[form], draw))
        args = make_args(tmp_path, on_bad_record=draw.choice(["stop", "skip"]))
        unit_bytes = draw.choice([1000, 10**9])
        read = lambda: train_tokens(Prepared(args, unit_bytes=unit_bytes).source)  # noqa: E731
        return read, [str(tmp_path), "data."]

    fuzz(make, SECONDS)


def test_any_change_to_a_shard_is_named_by_a_run_and_built_again_by_the_next(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    args, tokens = make_args(tmp_path), expected_tokens(TEXTS)
    whole = Prepared(args, unit_bytes=20_000).source.folder.parent
    backup = shutil.copytree(whole, tmp_path / "backup")

    def make(draw):
        shutil.rmtree(whole)
        shutil.copytree(backup, whole)
        source = Source.open(next(whole.glob("a-*[!d]")))
        path = draw.choice(sorted(path for path in whole.glob("**/*") if path.is_file()))
        change_file(path, draw)

        def read_and_build_again():
            errors = []
            held_out = lambda source: held_out_windows(source, 64, (10**6, "tokens"))  # noqa: E731
            for read in (train_tokens, held_out):
                try:
                    read(source)  # as a run that has them open
                except UserError as error:
                    errors.append(error)
            found = train_tokens(Prepared(args, unit_bytes=20_000).source)
            assert found == tokens or path.name == "manifest.json"
            if errors:
                raise errors[0]

        return read_and_build_again, [str(tmp_path)]

    fuzz(make, SECONDS)


def test_any_change_to_a_tokenizer_gives_ids_of_its_vocabulary_or_a_named_error(tmp_path):
    files = [
        ("sp", tokenizers.write_sentencepiece(tmp_path / "bpe.model", model_type="bpe")),
        ("tiktoken", tokenizers.write_ranks(tmp_path / "ranks")),
        ("hf", tokenizers.write_byte_level(tmp_path / "byte_level.json")),
        ("hf", tokenizers.write_metaspace(tmp_path / "metaspace.json")),
    ]
    config = json.dumps({"bos_token": "<s>", "eos_token": {"content": "<s>"}, "x": [1]}).encode()
    pattern = rb"\w+|\s+|[^\w\s]+(?!\S)|."

    def make(draw):
        name, source = draw.choice(files)
        data, odd, split = Path(source).read_bytes(), b"{}", b"."
        if draw.random() < 0.2:  # the file of names or the pattern is the odd one
            odd = draw.choice([change_json, change_bytes])(config, draw)
            split = change_bytes(pattern, draw)
        else:
            is_json = name == "hf" and draw.random() < 0.8
            data = change_json(data, draw) if is_json else change_bytes(data, draw)
        for file, content in (("x", data), ("tokenizer_config.json", odd), ("x.pattern", split)):
            (tmp_path / file).write_bytes(content)

        def use():
            tokenizer = build_tokenizer(TokenizerArgs(name, str(tmp_path / "x")))
            for ids in tokenizer.encode_batch(["", TEXTS[0], "a\0 \u2028😀" * 500, "<s>"]):
                assert not len(ids) or ids.max() < tokenizer.vocab_size
                tokenizer.decode(ids)
            tokenizer.encode("x", bos=True, eos=True)

        return use, ["data."]

    fuzz(make, SECONDS)
