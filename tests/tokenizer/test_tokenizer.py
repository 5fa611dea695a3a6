"""Every tokenizer keeps the text: its tokens decode to it."""

import base64
import io
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from tests.mistakes import refused

pytestmark = pytest.mark.quick

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, and they'll jump 1234567 times!\n",
    "Grüße aus Köln: naïve Œuvre, ça va? Привет, мир! Ψωμί Δέλτα.\n",
    "日本語の文章です。漢字とかな。中文也可以。 한국어 문장.\n",
    "def f(x):\n    return {x: [1, 2]}\t# tab\n\n\n  two  spaces   three\n",
    "🎉😀 party 👩‍👩‍👧 family 🇩🇪\n",
] * 20

TEXTS = [
    "",
    "a",
    " ",
    "  leading and trailing  ",
    "line\r\nends\n\n\n\ttabs\t",
    *CORPUS[:5],
    "".join(CORPUS[:5]),
    "unseen: ꙮ ☃ 𝄞 ŷ ﷽ \u200d é \u00a0 z",
    "𝄞𝄞a☃☃b😀𝄞",
    "<s> </s> <|begin_of_text|> <|end_of_text|> <|endoftext|> <unk>",
    "\x00\x01 nul",
]


def write_sentencepiece(path: Path, **options: object) -> str:
    model = io.BytesIO()
    given = {
        "vocab_size": 450, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "character_coverage": 0.98, "minloglevel": 2,
    }  # fmt: skip
    given |= {"sentence_iterator": iter(CORPUS), "model_writer": model}
    sentencepiece.SentencePieceTrainer.train(**(given | options))
    path.write_bytes(model.getvalue())
    return str(path)


def write_ranks(path: Path) -> str:
    ranks = [bytes([i]) for i in range(256)]
    ranks += [b"th", b"the", b" the", b"  ", b"    ", b"jump", "é".encode(), "日本".encode()]
    ranks += ["\U0001f600".encode()[:2], b"\n\n", b"12", b"123", b" \xe2", b"!\n"]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    return str(path)


def write_byte_level(path: Path, prefix_space: bool = False) -> str:
    made = HfTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<s>"]
    options = {"initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, **options)
    made.train_from_iterator(CORPUS, trainer)
    made.save(str(path))
    return str(path)


def write_metaspace(path: Path) -> str:
    made = HfTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["id"] < 3]
    path.write_text(json.dumps(spec), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerArgs]:
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = write_sentencepiece(folder / "bpe.model", model_type="bpe")
    options = {"add_dummy_prefix": False, "hard_vocab_limit": False}
    unigram = write_sentencepiece(folder / "unigram.model", **options)
    return {
        "bytes": TokenizerArgs("bytes"),
        "sp-bpe": TokenizerArgs("sp", bpe),
        "sp-unigram": TokenizerArgs("sp", unigram),
        "tiktoken": TokenizerArgs("tiktoken", write_ranks(folder / "ranks.tiktoken")),
        "hf-byte-level": TokenizerArgs("hf", write_byte_level(folder / "byte_level.json")),
        "hf-metaspace": TokenizerArgs("hf", write_metaspace(folder / "metaspace.json")),
    }


KINDS = ["bytes", "sp-bpe", "sp-unigram", "tiktoken", "hf-byte-level", "hf-metaspace"]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, paths: dict[str, TokenizerArgs]) -> Tokenizer:
    return build_tokenizer(paths[request.param])


def test_tokens_decode_to_the_text_in_a_batch_and_alone(tokenizer):
    batch = tokenizer.encode_batch(TEXTS)
    for ids, text in zip(batch, TEXTS, strict=True):
        assert ids.dtype == tokenizer.dtype == np.uint16
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text
        assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        # Special tokens are no text, also where a text spells them out.
        assert {tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids.tolist())
    assert tokenizer.encode_batch([]) == []
    if tokenizer.bos_id is not None:
        framed = tokenizer.encode("a", bos=True, eos=True)
        plain = tokenizer.encode("a")
        assert framed.tolist() == [tokenizer.bos_id, *plain.tolist(), tokenizer.eos_id]
        assert framed.dtype == plain.dtype and tokenizer.decode(framed) == "a"
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode_batch(["fine", "half \ud83d of one"])
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(IndexError, match=f"token {wrong} is outside the vocabulary"):
            tokenizer.decode([wrong])


def test_vocabularies_and_special_ids(paths):
    expected = {"bytes": (258, 256, 257), "sp-bpe": (450, 1, 2), "tiktoken": (526, 270, 271)}
    expected |= {"hf-metaspace": (450, 1, 2), "hf-byte-level": (400, 1, 0)}
    made = {kind: build_tokenizer(paths[kind]) for kind in expected}
    assert {k: (t.vocab_size, t.bos_id, t.eos_id) for k, t in made.items()} == expected


LLAMA_3 = (  # as published
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_tiktoken_gives_the_librarys_own_tokens(paths):
    lines = Path(paths["tiktoken"].path).read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    plain = tiktoken.Encoding("plain", pat_str=LLAMA_3, mergeable_ranks=ranks, special_tokens={})
    ours = build_tokenizer(paths["tiktoken"])
    spaces = "x" + " " * 99_999 + "y\n"
    rng = random.Random(0)
    kinds = [" ", "  ", "\t", "\n", "\r\n", "\u3000", "'", "'S", "'ll", "\u017f", "a", "日", "é"]
    kinds += ["1", "٣", "Ⅳ", "!", "_", "\u0301", "😀", "\0"]
    mixed = ["".join(rng.choices(kinds, k=rng.randrange(1, 30))) for _ in range(5000)]
    for text in [*TEXTS, *mixed, "".join(CORPUS * 50), spaces, "a" * 300_000, "!" * 300_000]:
        assert ours.encode(text).tolist() == plain.encode_ordinary(text)
    for run in (" ", "\t", "\u3000", " \n", "a", "!", "日", "1"):  # at which the library fails
        text = "start " + run * 1_000_000 + "end"
        assert ours.decode(ours.encode(text)) == text


def test_a_large_vocabulary_needs_the_larger_type(tmp_path):
    tokens = [bytes([i]) for i in range(256)]
    tokens += [bytes([i, j]) for i in range(255) for j in range(256)]
    path = tmp_path / "large.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    large = build_tokenizer(TokenizerArgs("tiktoken", str(path)))
    assert large.vocab_size == 65536 + 256 > 2**16
    ids = large.encode("\U000b9fbf", eos=True)
    assert ids.dtype == np.uint32
    assert ids[-1] == large.eos_id == 65537
    assert large.decode(ids) == "\U000b9fbf"


def test_fingerprint_follows_the_content_not_the_place(paths, tmp_path):
    prints = {kind: build_tokenizer(args).fingerprint() for kind, args in paths.items()}
    assert len(set(prints.values())) == len(prints)
    source = Path(paths["tiktoken"].path).read_bytes()
    copy = tmp_path / "other name"
    copy.write_bytes(source)
    args = TokenizerArgs("tiktoken", str(copy))
    assert build_tokenizer(args).fingerprint() == prints["tiktoken"]
    copy.write_bytes(source.replace(base64.b64encode(b"jump"), base64.b64encode(b"jumq")))
    assert build_tokenizer(args).fingerprint() != prints["tiktoken"]
    # Shards and checkpoints on disk record them: these are the ones of the first version.
    recorded = "5ca69cc987378e490d35cb7a52ebb4e20f1d515c4471b3ef3a7fd3e5314d9072"
    assert prints["bytes"] == recorded
    recorded = "8c8c7e4422bb65ae0011caf0feb5366d622d9aef87a9adc3d18e2ab79e163613"
    assert prints["tiktoken"] == recorded


def test_bos_and_eos_of_a_tokenizer_config_win_over_usual_names(tmp_path):
    write_byte_level(tmp_path / "tokenizer.json")
    args = TokenizerArgs("hf", str(tmp_path))  # the folder is as good as the file
    before = build_tokenizer(args)
    assert (before.bos_id, before.eos_id) == (1, 0)
    config = {"bos_token": None, "eos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    after = build_tokenizer(args)
    assert (after.bos_id, after.eos_id) == (None, 1)
    assert after.fingerprint() != before.fingerprint()
    refused(lambda: after.encode("x", bos=True), "add_bos", "hf")
    config = {"bos_token": "<start>", "eos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused(lambda: build_tokenizer(args).encode("x", bos=True), "bos", "<start>")


@pytest.mark.parametrize("kind", ["hf-byte-level", "hf-metaspace", "sp-bpe"])
def test_the_config_may_name_the_tokens_that_begin_and_end_documents(paths, kind):
    first, last = ("<s>", "<|endoftext|>") if kind == "hf-byte-level" else ("</s>", "<unk>")
    own = build_tokenizer(paths[kind])
    named = build_tokenizer(replace(paths[kind], bos=last, eos=first))
    name_of = own.library.id_to_piece if kind == "sp-bpe" else own.library.id_to_token
    assert [name_of(named.bos_id), name_of(named.eos_id)] == [last, first]
    assert (named.bos_id, named.eos_id) != (own.bos_id, own.eos_id)
    assert named.fingerprint() != own.fingerprint()
    again = build_tokenizer(replace(paths[kind], bos=name_of(own.bos_id)))
    assert again.fingerprint() == own.fingerprint()
    wrong = replace(paths[kind], eos="<ss>")
    refused(lambda: build_tokenizer(wrong), "data.tokenizer.eos", '"<ss>"', '"<s>"')


def test_padding_truncation_and_prefix_space_of_the_file_do_no_harm(tmp_path):
    path = write_byte_level(tmp_path / "tokenizer.json", prefix_space=True)
    made = HfTokenizer.from_file(path)
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save(path)
    ours = build_tokenizer(TokenizerArgs("hf", path))
    text = "日本語 ☃ text"
    assert ours.decode(ours.encode(text)) == " " + text


def test_a_wrong_file_of_a_tokenizer_is_named_with_what_is_wrong_in_it(tmp_path, paths):
    """Also where the library would end the process. Any change of a file: tests/test_fuzz.py."""

    def words(vocabulary, unknown):
        return json.loads(HfTokenizer(models.WordLevel(vocabulary, unk_token=unknown)).to_str())

    far, good = words({"x": 0}, "x"), words({"[UNK]": 0}, "[UNK]")
    far["model"]["vocab"]["far"] = 2**32 - 1
    aborts = json.loads(Path(paths["hf-byte-level"].path).read_text())
    aborts["model"]["continuing_subword_prefix"] = "x"
    panics = good | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    strip = good | {"decoder": {"type": "Strip", "content": "K", "start": 0, "stop": 9}}
    ranks = Path(paths["tiktoken"].path).read_bytes()
    no_a = ranks.replace(base64.b64encode(b"A") + b" ", b"QUJD ")
    for name, content, pattern, *named in (
        ("sp", b"a", None),
        ("hf", far, None, "16,777,216", "4,294,967,295"),
        ("hf", words({}, "x"), None, "-1"),
        ("hf", words({"x": 0}, "[UNK]"), None, "UNK"),
        ("hf", aborts, None, "continuing_subword_prefix"),
        ("hf", panics, None, "precompiled_charsmap"),
        ("hf", strip | {"model": words({"KK": 0}, "KK")["model"]}, None, "fails at tokens"),
        ("hf", good | {"truncation": "9" * 10**6}, None, "999 ... 999", "at line 1 column 1000"),
        ("tiktoken", ranks + b"no-base64 99\n", None, "line 271"),
        ("tiktoken", ranks + b"QUJD 269\n", None, "from 0, each once"),
        ("tiktoken", no_a, None, "0x41"),
        ("tiktoken", ranks, b"\xff", "pattern"),
        ("tiktoken", ranks, b""),  # Rust panics at a match of nothing
        ("tiktoken", ranks, rb"\w+|\s+", "must match every character", "It's  12"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        if pattern is not None:
            path.with_suffix(".pattern").write_bytes(pattern)
        args = TokenizerArgs(name, str(path))

        def use(args=args):
            tokenizer = build_tokenizer(args)
            tokenizer.decode(tokenizer.encode("x y"))

        assert len(refused(use, "data.tokenizer.", *named)) < 2000


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_end_is_no_part_of_the_expression_in_a_file(paths, tmp_path, end):
    ranks, text = Path(paths["tiktoken"].path).read_bytes(), "the  cat sat on 12 mats"
    tokenizers = []
    for name, ending in (("without", ""), ("with", end)):
        (path := tmp_path / f"{name}.tiktoken").write_bytes(ranks)
        path.with_suffix(".pattern").write_text(rf"\w+|[^\w\s]+|\s+{ending}", newline="")
        tokenizers.append(build_tokenizer(TokenizerArgs("tiktoken", str(path))))
    plain, ended = tokenizers
    assert ended.encode(text).tolist() == plain.encode(text).tolist()
    assert ended.fingerprint() == plain.fingerprint()


def test_the_absence_of_a_library_is_explained(paths, monkeypatch):
    """That each is imported where it is used: tests/test_main.py."""
    libraries = {"sp-bpe": "sentencepiece", "tiktoken": "tiktoken", "hf-byte-level": "tokenizers"}
    for kind, library in libraries.items():
        monkeypatch.setitem(sys.modules, library, None)  # as Python marks an absent package
        needs = f"needs the Python package {library}, which is not installed"
        refused(lambda kind=kind: build_tokenizer(paths[kind]), needs)
    assert build_tokenizer(paths["bytes"]).decode([104, 105]) == "hi"
