"""Files of tokens, each written by the tool that has the form; nanoGPT's by what it documents."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch


def write_plain(
    path: Path, documents: list[np.ndarray], kind: str = "u2", head: Sequence[int] = ()
) -> None:
    # nanoGPT's form, and llm.c's, which has a header.
    header = np.zeros(256 if head else 0, np.int32)
    header[: len(head)] = head
    path.write_bytes(header.tobytes() + np.concatenate(documents).astype(kind).tobytes())


def write_llmc(path: Path, documents: list[np.ndarray], kind: str = "u2") -> None:
    n = sum(map(len, documents))
    head = {"u2": (20240520, 1, n), "u4": (20240801, 7, n)}[kind]
    write_plain(path, documents, kind, head)


def write_megatron(
    path: Path, documents: list[np.ndarray], dtype: type = np.int32, sentences: int = 1
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(path), dtype)
    for document in documents:
        parts = np.array_split(document, sentences)
        builder.add_document(torch.from_numpy(document), list(map(len, parts)))
    builder.finalize(str(path.with_suffix(".idx")))


def write_datatrove(path: Path, documents: list[np.ndarray], size: int = 2) -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    options = {"token_size": size, "save_final_metadata": size == 2}
    file = TokenizedFile(str(path.parent), path.name, **options)
    for document in documents:
        file.write(document.tolist(), None)
    file.close()


def write_datasets(path: Path, documents: list[np.ndarray], kind: str = "int32") -> None:
    from datasets import Dataset, Features, Sequence, Value

    columns = {"n": list(map(len, documents)), "input_ids": [d.tolist() for d in documents]}
    features = Features({"n": Value("int64"), "input_ids": Sequence(Value(kind))})
    Dataset.from_dict(columns, features).save_to_disk(str(path), num_shards=3)
