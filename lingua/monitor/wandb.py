"""Weights & Biases, imported by a run that logs to it (`logging.wandb`)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

from lingua.base.dump_dir import EVALUATION, SAMPLES, VALIDATION, WANDB_ID
from lingua.base.errors import UserError, import_optional
from lingua.monitor.args import WandbArgs

logger = logging.getLogger(__name__)


class WandbLog:
    """The wandb run of a dump dir, which gets the lines that a Reporter writes. Where its client
    fails, the run goes on without it."""

    def __init__(
        self, args: WandbArgs, name: str, config: Mapping[str, Any], dump_dir: Path
    ) -> None:
        """Raises UserError as start_wandb."""
        self.run: Any = start_wandb(args, name, config, dump_dir)

    def log(self, file: str, line: Mapping[str, Any]) -> None:
        """Log a line of a .jsonl file of the dump dir, which has a `step`."""
        if values := wandb_values(file, line):
            self._log({"step": line["step"], **values})

    def samples(self, step: int, source: str, pairs: Sequence[tuple[str, str]]) -> None:
        """Log samples as a table, a row for each (prompt, text)."""
        import wandb

        table = wandb.Table(columns=["prompt", "text"], data=[list(pair) for pair in pairs])
        self._log({"step": step, f"samples/{source}": table})

    def finish(self) -> None:
        if self.run is not None:
            self._attempt(self.run.finish)

    def _log(self, values: dict[str, Any]) -> None:
        if self.run is not None:
            self._attempt(lambda: self.run.log(values))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # of its own process, or of the system
            self.run = None
            logger.warning(
                f"logging.wandb: the client has failed ({type(error).__name__}: {error}); nothing "
                "more is sent, and the files of the dump dir have everything"
            )


def start_wandb(args: WandbArgs, name: str, config: Mapping[str, Any], dump_dir: Path) -> Any:
    """The wandb run of this dump dir: a new one, or the run that `<dump_dir>/wandb_id` names,
    resumed. Lines of metrics.jsonl are logged as they are: `run.log(line)`.

    `step` is a metric and the x-axis of the others: wandb's own step cannot go back, which a
    resumed run does. Raises UserError where wandb is not installed or does not start.
    """
    wandb = import_optional("wandb", "logging.wandb")
    id_file = Path(dump_dir) / WANDB_ID
    settings = asdict(args) | {"name": args.name or name, "dir": args.dir or str(dump_dir)}
    try:
        run_id = id_file.read_text().strip() if id_file.exists() else None
        run = wandb.init(
            **settings, config=dict(config), allow_val_change=True, id=run_id, resume="allow"
        )
        id_file.write_text(run.id + "\n")
    except Exception as error:  # wandb.Error, and errors of its own process or of the system
        raise UserError(f"logging.wandb: wandb did not start: {error}") from None
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def wandb_values(file: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a line of a .jsonl file, without its step, by wandb's names. Names for
    a source, a task or an event begin with its name, such as `validation/wiki/nats_per_byte`; an
    event gives its numbers alone: `gradients/norms/output.weight`."""
    values = {key: value for key, value in line.items() if key != "step"}
    if file == SAMPLES:
        return {}  # a table has them all
    if "event" in values:
        return _numbers(values.pop("event"), values)
    prefix = ""
    if file == VALIDATION:
        prefix = f"validation/{values.pop('source')}/"
    elif file == EVALUATION:
        prefix = f"eval/{values.pop('task')}/"
    return {prefix + key: value for key, value in values.items()}


def _numbers(path: str, value: Any) -> dict[str, Real]:
    """{path: number} of those in nested mappings."""
    if isinstance(value, Mapping):
        parts = [_numbers(f"{path}/{key}", inner) for key, inner in value.items()]
        return {path: number for part in parts for path, number in part.items()}
    return {path: value} if isinstance(value, Real) else {}
