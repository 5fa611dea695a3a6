"""Log-probabilities of given texts: what benchmarks of choices and perplexities ask for."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from lingua.model.generate import evaluating
from lingua.parallel.mesh import divide, dp_degree
from lingua.parallel.tensors import to_device, whole

Window = tuple[list[int], int]  # tokens, and how many of the last ones are scored


def windows(context: Sequence[int], continuation: Sequence[int], length: int) -> Iterator[Window]:
    """The continuation in pieces that fit a model of `length` positions.

    Each token is scored once, in the last piece too with all the context that fits before it: what
    is cut is cut on the left. `context` has at least one token.
    """
    tokens, start = [*context, *continuation], len(context)
    while start < len(tokens):
        end = min(start + length, len(tokens))
        yield tokens[max(0, end - length - 1) : end], end - start
        start = end


@torch.no_grad()
def score(
    model: nn.Module,
    pairs: Sequence[tuple[list[int], list[int]]],
    mesh: DeviceMesh,
    batch_size: int,
    length: int,
) -> list[tuple[float, bool]]:
    """Returns, for each (context, continuation), the continuation's log-probability in nats, from
    float32 logits, and whether each of its tokens is the most likely.

    Every rank calls it with the same texts, which the data-parallel ranks divide among themselves,
    and has all results: the same on every topology.

    Args:
        batch_size: rows of one forward on each data-parallel rank, of like length.
        length: positions of the model.
    """
    rows = [(i, window) for i, pair in enumerate(pairs) for window in windows(*pair, length)]
    rows.sort(key=lambda row: -len(row[1][0]))  # what does not fit in memory fails at once
    n_batches = -(-len(rows) // (batch_size * dp_degree(mesh)))

    def score_share(share: list[Window]) -> list[tuple[float, bool]]:
        scores = []
        for i in tqdm(range(n_batches), "scoring", disable=mesh.get_rank() != 0, leave=False):
            scores += _score_batch(model, share[i * batch_size : (i + 1) * batch_size], mesh)
        return scores

    with evaluating(model):
        scores = divide(score_share, [window for _, window in rows], mesh)
    sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
    for (i, _), (logprob, likeliest) in zip(rows, scores, strict=True):
        sums[i] += logprob
        greedy[i] &= likeliest
    return list(zip(sums, greedy, strict=True))


def _score_batch(
    model: nn.Module, rows: list[Window], mesh: DeviceMesh
) -> list[tuple[float, bool]]:
    """Without rows the model runs all the same: other ranks need this one in its collectives."""
    tp, device = mesh["tp"].size(), torch.device(mesh.device_type)
    n_columns = max((len(tokens) - 1 for tokens, _ in rows), default=1)
    # tp ranks share the columns; padding at the end of a row cannot reach what is before it.
    inputs = torch.zeros(max(1, len(rows)), -(-n_columns // tp) * tp, dtype=torch.int64)
    for (tokens, _), into in zip(rows, inputs, strict=False):
        into[: len(tokens) - 1] = torch.tensor(tokens[:-1])
    logits = whole(model(to_device(inputs, device)))  # B S V
    logits = logits.cpu() if device.type == "mps" else logits  # which has no float64
    scores: list[Tensor] = []
    for (tokens, n), row_logits in zip(rows, logits, strict=False):
        end = len(tokens) - 1
        logprobs = row_logits[end - n : end].float().log_softmax(-1)
        targets = to_device(torch.tensor(tokens[-n:]), logits.device)
        total = logprobs.gather(1, targets[:, None]).double().sum()
        scores.append(torch.stack((total, (logprobs.argmax(-1) == targets).all().double())))
    return [(t, bool(greedy)) for t, greedy in torch.stack(scores).tolist()] if scores else []
