"""Samples of a run: held-out text of every source, continued by the model from a few places."""

import logging
from functools import partial

from lingua.base.dump_dir import SAMPLES
from lingua.data import IGNORE
from lingua.monitor.metrics import cut_back
from lingua.parallel.mesh import on_rank_0
from lingua.run.run import Run

# Samples of a source, tokens generated for each, tokens of each prompt.
N_SAMPLES, SAMPLE_TOKENS, PROMPT_TOKENS = 2, 200, 64

logger = logging.getLogger(__name__)


def check_samples(run: Run) -> None:
    """Generate two tokens before the first step, to warn early of a model that cannot generate,
    with a cache or without. Training continues then. Called by every rank."""
    try:
        for name in list(run.data.held_out)[:1]:
            _continue(run, name, 1, max_tokens=2)
    except Exception as error:  # a fork's model may raise anything
        logger.warning(
            f"the model of {run.app.path} cannot generate, so the run will write no samples: "
            f"{type(error).__name__}: {error}"
        )


def write_samples(run: Run) -> None:
    """Report the samples of this step and log them; a failure is logged. Called by every rank."""
    try:
        # Of the last step, a process that was killed may have left some.
        step, path = run.progress.step, run.args.folder / SAMPLES
        on_rank_0(partial(cut_back, path, step - 1, run.report.may_write))
        for name in run.data.held_out:
            pairs = _continue(run, name, N_SAMPLES, SAMPLE_TOKENS)
            run.report.samples(step, name, pairs)
            for prompt, text in pairs:
                rows = f"{prompt} >>> {text}".splitlines()
                shown = "\n".join(f"  | {row}" for row in rows)
                logger.info(f"held-out text of {name} >>> as the model continues it:\n{shown}")
    except Exception as error:  # no text is worth the run
        logger.error(f"the samples could not be written: {type(error).__name__}: {error}")


def _continue(run: Run, name: str, n: int, max_tokens: int) -> list[tuple[str, str]]:
    """(prompt, generated text) for at most `n` places of a source's held-out text, or of its
    conversations, each before an answer."""
    from lingua.model.generate import Request, generate
    from lingua.model.sampling import SamplingArgs

    held_out = run.data.held_out[name]
    windows, seq_len = held_out.tokens, held_out.tokens.shape[1]
    chosen = range(len(windows) // (2 * n), len(windows), -(-len(windows) // n))
    lengths = [max(1, min(PROMPT_TOKENS, 2 * seq_len // 3))] * len(chosen)
    if held_out.documents is not None:
        lengths = [int((held_out.targets[i] != IGNORE).argmax()) + 1 for i in chosen]
    n_tokens = max(1, min(max_tokens, seq_len - max(lengths)))
    # Text goes on, an answer ends.
    stop_tokens: list[int] | None = [] if held_out.documents is None else None
    settings = SamplingArgs(temperature=0.8, max_gen_tokens=n_tokens, stop_tokens=stop_tokens)
    prompts = [windows[i, :length].tolist() for i, length in zip(chosen, lengths, strict=True)]
    requests = [Request(prompt, settings, run.args.seed) for prompt in prompts]
    n_rows = 1 if run.args.exact else len(requests)  # shapes that do not depend on the mesh
    results = generate(run.model, requests, run.tokenizer, run.mesh, n_rows)
    return [(run.tokenizer.decode(p), r.text) for p, r in zip(prompts, results, strict=True)]
