"""Document masks: a row of several documents equals each of them alone, forward and gradient."""

import numpy as np
import pytest
import torch
from torch import nn

from apps.mtp.model import ModelArgs as ManyArgs
from apps.mtp.model import build_multi_token
from lingua.config.load import load
from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.data.rows import DocumentMarks, document_marks
from lingua.parallel.init import init_parameters
from lingua.tokenizer import TokenizerArgs, build_tokenizer

pytestmark = pytest.mark.quick

BOS, EOS = 256, 257
LENGTHS = [5, 1, 9, 2, 3]  # of the documents in the row, 20 tokens in all
LONG = [30 * n for n in LENGTHS]  # a row whose documents are computed one by one on a CPU


def model(n_heads: int, **changes: object) -> nn.Module:
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 8}
    args = ManyArgs(vocab_size=258, **(sizes | changes))
    built = build_multi_token(args, n_heads)
    init_parameters(built, 5, torch.device("cpu"))
    return built


def documents_of(lengths: list[int]) -> torch.Tensor:
    """Where they begin."""
    return torch.tensor([[0, *lengths[:-1]]]).cumsum(1)


@pytest.mark.parametrize(
    ("n_heads", "changes"),
    [(1, {}), (1, {"sliding_window": 3}), (1, {"n_kv_heads": 4}), (3, {"n_layers": 3})],
)
@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
def test_a_masked_row_is_each_document_alone(lengths, n_heads, changes):
    together, alone = (model(n_heads, **changes) for _ in range(2))
    generator, n = torch.Generator().manual_seed(0), sum(lengths)
    row = torch.randint(0, 256, (1, n + n_heads), generator=generator)
    tokens = row[:, :n]
    targets = torch.stack([row[:, view + 1 : view + 1 + n] for view in range(n_heads)])
    for end in np.cumsum(lengths):  # what crosses into the next document
        for view in range(n_heads):
            targets[view, :, max(end - view - 1, 0) : end] = IGNORE

    sums, counts, *_ = together(tokens, targets, documents_of(lengths))
    sums.sum().backward()
    expected = 0.0
    for document, target in zip(tokens.split(lengths, 1), targets.split(lengths, 2), strict=True):
        part = alone(document, target).sums
        part.sum().backward()
        expected += part.sum().item()
    assert counts.tolist() == (targets != IGNORE).sum((1, 2)).tolist()
    assert sums.sum().item() == pytest.approx(expected, rel=1e-6)
    for (name, p), q in zip(together.named_parameters(), alone.parameters(), strict=True):
        error = (p.grad - q.grad).norm() / q.grad.norm()
        assert error < 2e-6, (name, error)

    unmasked = together(tokens, targets).sums.sum()  # the control: without the mask it is another
    assert abs(unmasked.item() / expected - 1) > 1e-4


@pytest.mark.parametrize("bos", [True, False])
def test_documents_are_recognised_by_their_first_or_last_token(bos):
    marks = DocumentMarks(BOS if bos else None, EOS, ignores_first=True)
    begin = [BOS] if bos else []
    documents = [[7, 8, EOS], [*begin, 1, 2, EOS], [*begin, EOS], [*begin, 3]]
    row = np.array([[token for document in documents for token in document]])
    expected = [i for i, document in enumerate(documents) for _ in document]
    assert marks.index(row).tolist() == [expected]


def test_targets_across_a_document_start_are_ignored_at_every_distance():
    documents = np.array([[0, 0, 0, 1, 1, 2, 2, 2]])
    for view in (1, 2):
        targets = np.arange(6)[None] * 10
        DocumentMarks(BOS, EOS, ignores_first=True).drop_targets(targets, documents, view)
        crossing = [documents[0, t] != documents[0, t + view] for t in range(6)]
        assert ((targets[0] == IGNORE) == crossing).all()
        kept = np.arange(6)[None] * 10
        DocumentMarks(BOS, EOS, ignores_first=False).drop_targets(kept, documents, view)
        assert (kept >= 0).all()


def test_a_mask_needs_a_first_or_a_last_token_of_documents_and_no_mask_needs_none():
    assert load(DataArgs, ["document_mask=keep", "add_bos=false", "sources.a=1"])
    assert document_marks(DataArgs(), build_tokenizer(TokenizerArgs())) is None
