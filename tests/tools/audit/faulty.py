"""A fork whose rank 1 computes wrongly in silence: one bit of one gradient, in step 5."""

import os
from dataclasses import replace
from typing import Any

import torch

from apps.main import app as main_app
from lingua.parallel.tensors import local


def flip(run: Any) -> None:
    if os.environ.get("FAULTY") and run.progress.step + 1 == 5:
        grad = local(next(run.model.parameters()).grad).view(-1)
        grad.view(torch.int32)[grad.abs().argmax()] ^= 1 << 20


app = replace(main_app, path=__name__, probe=flip)
