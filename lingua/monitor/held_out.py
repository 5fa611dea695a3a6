"""The loss on held-out documents, the same number on every topology."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.data import IGNORE
from lingua.data.loader import MicroBatch
from lingua.data.rows import HeldOut
from lingua.model import Losses
from lingua.monitor.means import dp_sums, mean_parts, means
from lingua.monitor.reporter import Reporter
from lingua.parallel.mesh import dp_degree, dp_rank

if TYPE_CHECKING:
    from lingua.data.documents import DocumentMarks

Loss = Callable[[MicroBatch], Losses]
Prepare = Callable[[MicroBatch], MicroBatch]

# A forward without a backward keeps no activations. Of few or short rows it takes this many, whose
# hidden states and logits are small beside the gradients of a step, which do not exist meanwhile.
MIN_POSITIONS = 4096
PROGRESS_S = 20.0  # between two lines

logger = logging.getLogger(__name__)


def measure_sources(
    measure: Callable[[HeldOut], dict[str, float]],
    held_out: Mapping[str, HeldOut],
    report: Reporter | None,
    step: int,
) -> float | None:
    """Measure every source after `step`, by `validate`, and report it. Returns the loss of all in
    nats per byte; None where nothing is held out. Without a report it measures the first alone."""
    nats, n_bytes, n_sources = 0.0, 0.0, 0
    for name, windows in held_out.items():
        result = measure(windows)
        if report is None:
            return None
        report.validation(step, name, result | {"text": windows.text})
        if "bytes" in result:
            nats += result["nats_per_byte"] * result["bytes"]
            n_bytes += result["bytes"]
            n_sources += 1
    if n_sources > 1:
        mean = f"{nats / n_bytes:.4f} nats/byte"
        logger.info(f"step {step} held-out mean of {n_sources} sources: {mean}")
    return nats / n_bytes if n_bytes else None


def batches(
    held_out: HeldOut,
    batch_size: int,
    n_targets: int,
    mesh: DeviceMesh,
    marks: "DocumentMarks | None" = None,
    step: int = 0,
) -> Iterator[MicroBatch]:
    """The micro-batches in which this data-parallel rank measures the windows, on the host: on each
    rank as many, and on each mesh of as many rows, since another number rounds otherwise. The last
    one is padded. Arguments as `validate`."""
    degree, rank = dp_degree(mesh), dp_rank(mesh)
    n_windows, seq_len = held_out.tokens.shape
    rows = min(n_windows, max(batch_size, MIN_POSITIONS // seq_len))
    for start in range(rank * rows, n_windows + rank * rows, rows * degree):
        window_slice = slice(start, start + rows)
        tokens, targets = map(
            torch.as_tensor, (held_out.tokens[window_slice], held_out.targets[window_slice])
        )
        padding = rows - len(tokens)
        tokens = F.pad(tokens, (0, 0, 0, padding))
        targets = F.pad(targets[None], (0, 0, 0, padding, 0, n_targets - 1), value=IGNORE)
        starts = None
        if marks is not None:
            if held_out.documents is not None:
                index = np.pad(held_out.documents[window_slice], ((0, padding), (0, 0)))
            else:
                index = marks.index(torch.cat((tokens, targets[0, :, -1:]), dim=1).numpy())
                if marks.bos_id is not None:
                    marks.drop_targets(targets[0].numpy(), index, view=1)
            starts = torch.from_numpy(marks.starts(index[:, :seq_len]))
        row_ids = torch.arange(start, start + rows)
        row_ids[rows - padding :] = -1
        yield MicroBatch(row_ids, tokens, targets, starts, step=step, held_out=True)


@torch.no_grad()
def validate(
    model: nn.Module,
    loss: Loss,
    held_out: HeldOut,
    batch_size: int,
    n_targets: int,
    mesh: DeviceMesh,
    marks: "DocumentMarks | None" = None,
    step: int = 0,
    prepare: Prepare | None = None,
    first: bool = False,
) -> dict[str, float]:
    """Loss over every target of the windows. Called by every rank.

    Args:
        loss: that of a micro-batch, such as `Objective.loss`. The first of its sums is measured.
        batch_size: rows of the largest micro-batch. A forward of each data-parallel rank has as
            many windows, or more where these are short.
        n_targets: views the model predicts; the loss is that of the first.
        marks: with document masks. Where documents begin with bos and masks ignore it as a target,
            it is not measured either; it is not text.
        step: the last one that is complete.
        prepare: (micro-batch on the host) -> what `loss` takes, on the device; None: a copy.
        first: only the first micro-batch of each rank, of which nothing is returned.

    Returns:
        nats_per_token and the tokens measured; nats_per_byte, bits_per_byte and the bytes where
        these are known; and the mean of each metric.
    """
    device, degree = torch.device(mesh.device_type), dp_degree(mesh)
    parts: dict[str, list[Tensor]] = {}  # float32 [2] each: the sum of a forward and its count
    training = model.training
    model.eval()
    reported = time.monotonic()
    for i, read in enumerate(batches(held_out, batch_size, n_targets, mesh, marks, step)):
        if time.monotonic() - reported > PROGRESS_S:
            reported = time.monotonic()
            done, n_windows = i * degree * len(read.tokens), len(held_out.tokens)
            logger.info(f"held-out: {done:,} of {n_windows:,} windows are measured")
        micro = read.to(device) if prepare is None else prepare(read)
        losses = loss(micro)
        count = (micro.targets[0] != IGNORE).sum()
        pair = torch.stack((losses.sums[0], count))
        for name, part in {"": pair, **mean_parts(losses.metrics, micro)}.items():
            parts.setdefault(name, []).append(part)
        if first:
            break
    model.train(training)
    if first:
        return {}
    [[nats, n], *others] = dp_sums(parts, mesh)
    result = means(list(parts)[1:], others) | {"nats_per_token": nats / n}
    if (n_bytes := held_out.n_bytes) is None:
        return result | {"tokens": int(n)}
    return result | {
        "nats_per_byte": nats / n_bytes,
        "bits_per_byte": nats / n_bytes / torch.log(torch.tensor(2.0)).item(),
        "tokens": int(n),
        "bytes": n_bytes,
    }
