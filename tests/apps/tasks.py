"""Tasks for lm-evaluation-harness, of our own making: every kind of request, nothing fetched."""

import json
from pathlib import Path

WORDS = ["the quick brown fox", "a lazy dog", "it jumps", "over 12 the 日本 fence", "naïve café"]

# What the harness asks of a model, by the task that asks it.
NAMES = ("choice", "rolling", "reply", "story")
TASKS = {n: (Path(__file__).parent / f"harness_tasks/{n}.yaml").read_text() for n in NAMES}
MEASURE = """
def length(doc, results):
    return {"length": len(results[0])}
"""


def write_tasks(folder: Path, n: int = 6) -> Path:
    """A task folder: YAML files, the function that two of them name, and n documents."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = []
    for i in range(2 * n):
        words = [WORDS[(i + k) % len(WORDS)] for k in range(1 + i % 4)]
        documents.append(
            {
                "question": f"{i}: {' '.join(words)}",
                "choices": [words[0], "some other words " * (1 + i % 2), f"a{i}", " is"],
                "answer": i % 4,
                "text": " ".join(words * (1 + 3 * (i % 3))),
            }
        )
    for split, part in (("train", documents[:n]), ("test", documents[n:])):
        lines = "".join(json.dumps(document) + "\n" for document in part)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    files = f"{{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}"
    given = f"{{data_files: {files}, cache_dir: {folder}/cache}}"
    data = f"dataset_path: json\ndataset_kwargs: {given}\ntest_split: test\n"
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + data, encoding="utf-8")
    (folder / "measure.py").write_text(MEASURE)
    return folder
