"""Which files a source has, and every way in which a record can be wrong."""

import json
import os
from pathlib import Path

import pytest

from lingua.data.files import find_files
from tests.data.prepared import Prepared, expected_tokens, make_args, train_tokens, write_jsonl
from tests.mistakes import refused

pytestmark = pytest.mark.quick

GOOD = b'{"text": "ok"}\n'
BAD_RECORDS = [
    (b"{'text': 'x'}\n", "not JSON"),
    (b'{"text": "x"\n', "not JSON"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    (b'{"title": "x"}\n', "no text"),
    (b'["text"]\n', "no text"),
    (b"3\n", "no text"),
    (b'{"text": null}\n', "null text"),
    (b'{"content": null}\n', "null text"),
    (b'{"text": 3}\n', "text is not a string"),
    (b'{"text": ["x"]}\n', "text is not a string"),
    (b'{"text": "caf\xe9"}\n', "not UTF-8"),
    (b'{"text": "\\ud800"}\n', "not UTF-8"),
    (b"\n", "blank line"),
    (b" \t\r\n", "blank line"),
    (b'{"text": ""}\n', "empty document"),
]


@pytest.mark.parametrize("record, kind", BAD_RECORDS, ids=lambda value: str(value)[:24])
def test_a_bad_record_stops_with_file_and_line_or_is_counted(tmp_path, record, kind):
    (tmp_path / "a.jsonl").write_bytes(GOOD + record + GOOD + record)
    where = f"{tmp_path / 'a.jsonl'}:2: {kind}"
    refused(lambda: Prepared(make_args(tmp_path)), where, "data.on_bad_record")
    skipping = Prepared(make_args(tmp_path, on_bad_record="skip"))
    assert train_tokens(skipping.source) == expected_tokens(["ok", "ok"])
    assert skipping.source.manifest.skipped == {kind: 2}
    line = f"data.sources.a: 2 bad records left out (2 {kind})"
    assert line in skipping.lines
    # Reported every time, not only when they are built; and stop still stops.
    again = Prepared(make_args(tmp_path, on_bad_record="skip"))
    assert line in again.lines and not again.built
    refused(lambda: Prepared(make_args(tmp_path)), where)
    assert not Prepared(make_args(tmp_path, on_bad_record="skip")).built


@pytest.mark.parametrize(
    "data, line, kind",
    [
        (b"", 1, "empty document"),
        (b"\xef\xbb\xbf", 1, "empty document"),
        (b"a\nb\xff", 2, "not UTF"),
    ],
)
def test_a_bad_text_file_stops_with_file_and_line(tmp_path, data, line, kind):
    (tmp_path / "a.txt").write_bytes(data)
    refused(lambda: Prepared(make_args(tmp_path)), f"a.txt:{line}: {kind}")


def test_a_file_without_bad_records_serves_both_settings(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    Prepared(make_args(tmp_path))
    assert not Prepared(make_args(tmp_path, on_bad_record="skip")).built
    assert not Prepared(make_args(tmp_path)).built


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_line_ends_and_byte_order_mark_are_no_part_of_a_record(tmp_path, end):
    lines = [b'\xef\xbb\xbf{"text": "one\\r\\n"}', b'{"text": "two", "content": "not this"}']
    (tmp_path / "a.jsonl").write_bytes((end or b"\n").join(lines) + end)
    assert train_tokens(Prepared(make_args(tmp_path)).source) == expected_tokens(["one\r\n", "two"])


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffzwei\r\nZeilen \u00fc\n".encode())
    expected = expected_tokens(["zwei\r\nZeilen \u00fc\n"])
    assert train_tokens(Prepared(make_args(tmp_path)).source) == expected


def test_a_folder_of_source_files_is_read_in_byte_order(tmp_path):
    folder = tmp_path / "a"
    texts = {"Z.py": "1", "a.md": "2", "a/b.c": "3", "a0": "4", "\u00e9.txt": "5"}
    hidden = [".git/config", "x/.hidden.py", "__pycache__/a.pyc"]
    for path in [*texts, *hidden]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(texts.get(path, "hidden"), encoding="utf-8")
    os.symlink(folder, folder / "circle")
    found = [file.path for file in find_files("a", tmp_path)]
    assert found == sorted(texts, key=lambda path: path.encode())
    tokens = train_tokens(Prepared(make_args(tmp_path)).source)
    assert tokens == expected_tokens([texts[path] for path in found])


def test_a_description_is_no_text_and_shards_that_have_one_stay(tmp_path):
    write_jsonl(tmp_path / "a" / "x.jsonl", ["x"])
    for name in ("README.md", "readme", "LICENSE", "in/README.txt", "dataset_infos.json"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text("about the data")
    first = Prepared(make_args(tmp_path)).source
    assert train_tokens(first) == expected_tokens(["x"])
    manifest = first.folder / "manifest.json"  # as an earlier version wrote it
    fields = json.loads(manifest.read_text())
    fields["parts"].append(fields["parts"][0] | {"path": "README.md"})
    fields["shards"][0]["parts"] += 1
    manifest.write_text(json.dumps(fields))
    assert not Prepared(make_args(tmp_path)).built
    assert [file.path for file in find_files("README.md", tmp_path / "a")] == ["README.md"]


def test_linked_folders_and_files_are_followed(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "x.txt").write_text("far", encoding="utf-8")
    (tmp_path / "a").mkdir()
    os.symlink(tmp_path / "far", tmp_path / "a" / "linked")
    os.symlink(tmp_path / "far" / "x.txt", tmp_path / "a" / "y.txt")
    assert [file.path for file in find_files("a", tmp_path)] == ["linked/x.txt", "y.txt"]


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_name_may_leave_out_the_suffix(tmp_path, suffix):
    (tmp_path / f"a{suffix}").write_text(json.dumps({"text": "x"}), encoding="utf-8")
    for name in ("a", f"a{suffix}"):
        assert [Path(file.full).name for file in find_files(name, tmp_path)] == [f"a{suffix}"]


def test_a_form_that_is_not_read_is_refused_by_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl.bz2").write_bytes(b"BZh9")
    refused(lambda: find_files("a", tmp_path), "x.jsonl.bz2")
