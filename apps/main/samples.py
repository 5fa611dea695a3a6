"""What a model writes: held-out text of every source, continued from a few places of it."""

import json
import logging
from pathlib import Path

import torch.distributed as dist

from apps.main.run import Run
from lingua.inference.generate import Completion, Request, generate
from lingua.inference.sampling import SamplingArgs

# Pieces of text a source, tokens generated for each, tokens that each begins with.
SAMPLES, SAMPLE_TOKENS, PROMPT_TOKENS = 2, 200, 64

logger = logging.getLogger(__name__)


def check_samples(run: Run) -> None:
    """Generate one token before the first step, so that a model that cannot generate is known then.
    Training goes on all the same. Called by every rank."""
    try:
        for name in list(run.data.held_out)[:1]:
            _continue(run, name, 1, max_tokens=1)
    except Exception as error:  # a fork's model may raise anything
        logger.warning(
            f"the model of {run.app.path} cannot generate, so the run will write no samples: "
            f"{type(error).__name__}: {error}"
        )


def write_samples(run: Run) -> None:
    """Append the samples of this step to samples.jsonl and log them; a failure is logged. Called by
    every rank."""
    try:
        for name in run.data.held_out:
            for before, result in _continue(run, name, SAMPLES, SAMPLE_TOKENS):
                line = {"step": run.progress.step, "source": name, "prompt": before}
                if dist.get_rank() == 0:
                    with (Path(run.args.dump_dir) / "samples.jsonl").open(
                        "a", encoding="utf-8"
                    ) as f:
                        f.write(json.dumps(line | {"text": result.text}, ensure_ascii=False) + "\n")
                rows = f"{before} >>> {result.text}".splitlines()
                shown = "\n".join(f"  | {row}" for row in rows)
                logger.info(f"held-out text of {name} >>> as the model continues it:\n{shown}")
    except Exception as error:  # the run is done and saved: nothing may fail it now
        logger.error(f"the samples could not be written: {type(error).__name__}: {error}")


def _continue(run: Run, name: str, n: int, max_tokens: int) -> list[tuple[str, Completion]]:
    """(prompt, completion) of `n` pieces of a source's held-out text, or of all there are."""
    windows = run.data.held_out[name].tokens
    seq_len = windows.shape[1]
    n_prompt = max(1, min(PROMPT_TOKENS, 2 * seq_len // 3))
    n_tokens = max(1, min(max_tokens, seq_len - n_prompt))
    settings = SamplingArgs(temperature=0.8, max_gen_tokens=n_tokens, stop_tokens=[])
    places = range(len(windows) // (2 * n), len(windows), -(-len(windows) // n))
    prompts = [windows[i, :n_prompt].tolist() for i in places]
    requests = [Request(prompt, settings, run.args.seed) for prompt in prompts]
    results = generate(run.model, requests, run.tokenizer, run.mesh, len(requests))
    return [
        (run.tokenizer.decode(prompt), result)
        for prompt, result in zip(prompts, results, strict=True)
    ]
