"""What a run will take, before it is launched: memory, traffic, time and checkpoints.

    python -m lingua plan config=apps/main/configs/llama_7B.yaml nodes=2 ngpu=8 gpu=h100
    python -m lingua plan config=my.yaml ngpu=64 gpu=my_gpu.yaml tokens=100e9 model.vocab_size=32000

It takes one step of the run's own model and layout on tensors without memory, as rank 0 of ranks
that do not exist. It needs no device and no data, and no tokenizer where model.vocab_size is given.
Keys that are not listed here are those of the run.
"""

import json
from pathlib import Path

from lingua.base.errors import UserError
from lingua.config.help import print_help_if_asked


def main(argv: list[str]) -> None:
    # Imported here, since they import torch.
    from lingua.app import choose_app
    from lingua.tools.plan.choice import choice_as_json, choice_lines, choices
    from lingua.tools.plan.make import PlanArgs, make_plan, split_words
    from lingua.tools.plan.report import lines

    print_help_if_asked(PlanArgs, argv, __doc__)
    made, options = make_plan(argv)
    others = choices(choose_app(split_words(argv)[1]), made, options.choices)
    numbers = made.as_json() | {"choices": [choice_as_json(c) for c in others]}
    if options.json is not None:
        try:
            Path(options.json).write_text(json.dumps(numbers, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"json = {options.json}: cannot be written: {error}") from None
    print("\n".join(lines(made)))
    if others:
        print("\n".join(["", *choice_lines(others)]))
