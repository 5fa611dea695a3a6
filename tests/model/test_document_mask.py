"""Where the documents of a row begin, and the targets that a mask of them leaves out. That such a
row is each document alone: test_recurrent_block.py."""

import numpy as np
import pytest

from lingua.config.load import load
from lingua.data import IGNORE
from lingua.data.args import DataArgs
from lingua.data.documents import DocumentMarks
from lingua.data.rows import document_marks
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs

pytestmark = pytest.mark.quick

BOS, EOS = 256, 257


@pytest.mark.parametrize("bos", [True, False])
def test_documents_are_recognised_by_their_first_or_last_token(bos):
    marks = DocumentMarks(BOS if bos else None, EOS, ignores_first=True)
    begin = [BOS] if bos else []
    documents = [[7, 8, EOS], [*begin, 1, 2, EOS], [*begin, EOS], [*begin, 3]]
    row = np.array([[token for document in documents for token in document]])
    expected = [i for i, document in enumerate(documents) for _ in document]
    assert marks.index(row).tolist() == [expected]


def test_documents_whose_first_and_last_token_are_one_are_told_apart_wherever_a_row_is_cut():
    marks = DocumentMarks(EOS, EOS, ignores_first=True)
    documents = [[EOS, 7, 8, EOS], [EOS, 1, EOS], [EOS, EOS], [EOS, 2, 3, EOS], [EOS, 4, EOS]]
    stream = [token for document in documents for token in document]
    index = [i for i, document in enumerate(documents) for _ in document]
    for length in range(2, len(stream)):
        for first in range(len(stream) - length + 1):
            row = np.array(stream[first : first + length])
            if (row == EOS).all():  # it cannot be seen
                continue
            expected = np.array(index[first : first + length])
            assert (marks.index(row) == expected - expected[0]).all(), (first, length)
    targets, documents_of_row = (
        np.array([[8, EOS, EOS, 1]]),
        marks.index(np.array([[7, 8, EOS, EOS, 1]])),
    )
    marks.drop_targets(targets, documents_of_row, 1)
    assert targets.tolist() == [[8, EOS, IGNORE, 1]]  # an end is a target, a begin is none


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
