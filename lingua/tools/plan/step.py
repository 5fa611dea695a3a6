"""A step of training on the meta device, as `lingua plan` takes it: the config of a run that need
not have data or a tokenizer, and the loop's complete step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lingua.app import App, Built, choose_app
from lingua.base.errors import UserError
from lingua.checkpoint.run_config import load_run
from lingua.checkpoint.state import Progress
from lingua.data.args import DataArgs
from lingua.data.loader import MicroBatch
from lingua.optim.optimizer import NonFiniteGuard
from lingua.parallel.mesh import dp_degree
from lingua.run.args import RunArgs
from lingua.run.program import load_loop
from lingua.run.run import Run
from lingua.run.start import add_in_order, check_forward, make_optimizer
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs

BYTES = "data.tokenizer={name: bytes, path: null, bos: null, eos: null}"
DOCUMENTS = 16  # in each row, where documents are masked


def read_config(argv: list[str]) -> tuple[App, RunArgs]:
    """The app and the config of a run with this command line. A tokenizer is needed where the
    config leaves the size of the vocabulary to it, and nowhere else. Raises UserError."""
    app = choose_app(argv)
    args: RunArgs
    args, _ = load_run(app, [*argv, BYTES])
    if args.model.vocab_size == -1:
        try:
            complete: RunArgs
            complete, _ = load_run(app, argv)
            args.model.vocab_size = build_tokenizer(complete.data.tokenizer).vocab_size
        except UserError as error:
            hint = "\nWithout the tokenizer, give the size of its vocabulary: model.vocab_size=N"
            raise UserError(f"{error}{hint}") from None
    return app, args


def build(app: App, args: RunArgs, degree: int) -> Built:
    """The model of a config on `degree` data-parallel ranks; fills in the global batch size. Raises
    UserError."""
    args.app, args.dump_dir = app.path, str(args.folder)
    args.distributed.resolve(args.exact)
    args.data.global_batch_size = args.data.global_batch_size or (
        args.data.batch_size * degree * (args.grad_acc_steps or 1)
    )
    args.micro_steps(degree)
    built = app.build(args)
    check_forward(built.module, args)
    return built


def degree_of(sizes: tuple[int, ...]) -> int:
    """The data-parallel ranks of a mesh of these sizes (`lingua.parallel.mesh.sizes_of`)."""
    replicas, shards, _, cp = (*sizes, 1)[:4]
    return replicas * shards // cp


class _NoLines:
    """Receives an objective's events in place of a Reporter."""

    def event(self, event: str, step: int, **values: Any) -> None: ...


class Step:
    """The training program's step, on a model that is laid out on `mesh` and has memory."""

    def __init__(
        self, app: App, args: RunArgs, built: Built, mesh: DeviceMesh, model: nn.Module
    ) -> None:
        args.probe.every = 1  # `take` has one
        self.loop = load_loop()
        self.run = Run(
            app, args, mesh, model, make_optimizer(app, model, args, built.plan),
            build_tokenizer(TokenizerArgs()), cast(Any, None), {}, Progress(),
            cast(Any, _NoLines()), cast(Any, None), iter(()),
        )  # fmt: skip
        if args.exact:
            add_in_order(model, args, mesh)
        try:
            self.objective = (app.objective or self.loop.Objective)(self.run)
        except UserError:
            raise
        except Exception as error:  # such as of a second model, whose weights no rank could read
            name = getattr(app.objective, "__qualname__", app.objective)
            raise UserError(
                f"app = {app.path}: its objective {name} needs more than a plan has (run.data is "
                f"None, ranks and weights do not exist): {type(error).__name__}: {error}"
            ) from error
        self.guard = NonFiniteGuard(args.optim.on_nonfinite, self.run.device)

    def take(self, n_micro: int, between: Callable[[], None] = lambda: None) -> None:
        """A step of `n_micro` micro-steps. `between` is called once gradients are complete."""
        _, rows = self.run.args.micro_steps(dp_degree(self.run.mesh))
        batch = [empty_batch(self.run.args.data, rows) for _ in range(n_micro)]
        counts = self.objective.count(batch[0]).clamp(min=1)
        self.run.app = replace(self.run.app, probe=lambda _: between())  # not the app's: it reads
        try:
            self.loop.train_step(self.run, self.objective, self.guard, batch, counts)
        except RuntimeError as error:
            if notes := getattr(error, "__notes__", None):  # of lingua.parallel.tensor_parallel
                raise UserError("\n".join((str(error), *notes))) from error
            raise


def empty_batch(args: DataArgs, rows: int) -> MicroBatch:
    """A micro-batch of the shapes that the loader gives."""
    shape, masked = (rows, args.seq_len), args.document_mask != "none"
    return MicroBatch(
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros((args.n_views - 1, *shape), dtype=torch.int64),
        torch.zeros((rows, DOCUMENTS), dtype=torch.int64) if masked else None,
        step=1,
    )
