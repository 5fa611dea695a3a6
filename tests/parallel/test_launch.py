"""The outermost frame of a program, in real ranks that meet at a store of rank 0's own."""

import io
import time
from contextlib import redirect_stderr

import pytest
import torch

from lingua.errors import UserError
from lingua.parallel.launch import detect_launch, start
from lingua.parallel.mesh import DistributedArgs, on_rank_0
from lingua.parallel.program import run_program


def leave_here(case: str) -> tuple[int, str]:
    """The exit code of a program in this rank, and what it prints as an error."""

    def work() -> None:
        if case == "a mistake":
            raise UserError("steps = 0: must be at least 1")

    def program() -> None:
        launch = detect_launch()
        start(torch.device("cpu"), launch, DistributedArgs())
        if case == "a mistake of one machine":
            if launch.rank == 1:
                raise UserError("no device here", local=True)
            return
        if launch.rank == 1:
            time.sleep(0.5)  # rank 0 is at its end before this one asks what it found
        on_rank_0(work)

    with redirect_stderr(io.StringIO()) as told:
        try:
            run_program(program)
        except SystemExit as left:
            return left.code, told.getvalue()


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("nothing", (0, ""), (0, "")),
        ("a mistake", (2, "error: steps = 0: must be at least 1\n"), (2, "")),
        ("a mistake of one machine", (0, ""), (2, "error: no device here\n")),
    ],
)
def test_every_rank_leaves_with_its_code_and_one_tells_the_mistake(ranks, case, first, second):
    ranks.run(2, detect_launch)  # started before the clock is
    began = time.monotonic()
    assert ranks.run(2, leave_here, case) == [first, second]
    assert time.monotonic() - began < 25  # nobody waited in vain
