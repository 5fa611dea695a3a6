"""Chat templates in the shapes that published models have, and a small tokenizer for them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|head|>", "<|/head|>"]
# By name, those of tests/chat_templates: ChatML; Llama 3 (bos, headers, content trimmed, a date, a
# system prompt that is always there); Mistral (no generation prompt, the system prompt in the first
# user message, checks of roles); Qwen3 (reasoning in the last answer alone); one without a special
# token, with loops that break; and one that marks its answers.
FILES = sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))
TEMPLATES = {file.stem: file.read_text() for file in FILES}
CHATML = TEMPLATES["chatml"]


def write_tokenizer(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """A byte-level BPE of a few merges, in the files of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
    )
    made.train_from_iterator(["the user and the assistant talk\n\nabout this and that\n"], trainer)
    made.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        fields["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | config), encoding="utf-8")
    return folder
