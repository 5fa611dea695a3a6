"""Chat templates in the shapes that published models have, and a small tokenizer for them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|head|>", "<|/head|>"]
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    # Llama 3: bos, headers, content trimmed, a date, a system prompt that is always there
    "llama3": """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}""",
    # Mistral: no generation prompt, the system prompt in the first user message, checks of roles
    "mistral": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"]|trim + eos_token }}{%- endif %}
{%- endfor %}""",
    # Qwen3: reasoning is in the last answer alone
    "qwen3": """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set content = message.content %}{%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    # no special token at all; loops that break, tojson, the text of an empty system prompt
    "plain": """\
{%- for message in messages %}
    {%- if loop.index0 > 40 %}{%- break %}{%- endif %}
    {%- if message.role == "system" %}{{- "### " + message|tojson + "\\n" }}
    {%- elif message.role == "user" %}{{- "### User: " + message.content + "\\n### Bot:" }}
    {%- else %}{{- " " + message.content + "\\n" }}{%- endif %}
{%- endfor %}""",
    # marks its answers
    "marked": """\
{% for message in messages %}
{% if message.role == "assistant" %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
}


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
