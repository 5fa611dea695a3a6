"""Chat templates: texts and tokens as transformers makes them, and which tokens carry loss."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from lingua.base.errors import UserError
from lingua.tokenizer.build import build_tokenizer
from lingua.tokenizer.interface import TokenizerArgs
from lingua.tools import chat_template
from lingua.tools.chat_template import Chat, ChatError, open_chat
from tests.chats import CHATML, TEMPLATES, write_tokenizer
from tests.mistakes import refused

pytestmark = pytest.mark.quick
SYSTEM = {"role": "system", "content": " Answer <briefly> & “well”. "}
TURNS = [
    {"role": "user", "content": "What is this?\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA größer test 東京 ", "name": None},
    {"role": "user", "content": "And that?"},
    {"role": "assistant", "content": "The other."},
]


def chat_of(folder: Path, template: str | None = CHATML, **config) -> Chat:
    args = TokenizerArgs(name="hf", path=str(write_tokenizer(folder, template, **config)))
    return open_chat(args, build_tokenizer(args))


def with_special(folder: Path, template: str, token: str, **options) -> Chat:
    """A template whose tokenizer has one more special token."""
    file = write_tokenizer(folder, template) / "tokenizer.json"
    made = Tokenizer.from_file(str(file))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False, **options)])
    made.save(str(file))
    args = TokenizerArgs(name="hf", path=str(folder))
    return open_chat(args, build_tokenizer(args))


HEADERS = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


def answers_of(chat: Chat, messages: list) -> list[list[str]]:
    """The texts with loss of each example, decoded from their tokens."""
    found = []
    for example in chat.examples(messages):
        ids, is_answer = chat.encode_example(example)
        assert ids.tolist() == chat.encode(example.text).tolist()
        begins = [i for i in range(len(ids)) if is_answer[i] and not is_answer[i - 1]]
        ends = [i for i in range(1, len(ids)) if is_answer[i - 1] and not is_answer[i]]
        ends += [len(ids)] * bool(is_answer[-1])
        parts = [ids[i:j] for i, j in zip(begins, ends, strict=True)]
        found.append([chat._library.decode(part, skip_special_tokens=False) for part in parts])
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_tokens_are_those_of_transformers(tmp_path, name):
    chat = chat_of(tmp_path, TEMPLATES[name])
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages in (TURNS, [SYSTEM, *TURNS], TURNS[:2]):
        text = reference.apply_chat_template(messages, tokenize=False)
        assert chat.render(messages) == text
        assert chat.encode(text).tolist() == reference.apply_chat_template(messages)["input_ids"]
        prompt = messages[:-1]
        expected = reference.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        assert chat.render(prompt, add_generation_prompt=True) == expected
        # The last example is the conversation, and generation gives its prompt as it begins.
        last = chat.examples(messages)[-1]
        assert last.text == text
        if name != "marked":
            assert text[: last.spans[-1][0]] == expected


def test_the_loss_is_on_the_answers_and_what_ends_them(tmp_path):
    think = "<think>\nhm\n</think>\n\nA größer test 東京"
    expected = {
        "chatml": [[f"{think} <|im_end|>\n", "The other.<|im_end|>\n"]],
        "llama3": [[f"{think}<|eot_id|>", "The other.<|eot_id|>"]],
        "mistral": [[f" {think}</s>", " The other.</s>"]],
        "plain": [[f" {think} \n", " The other.\n"]],
        "marked": [[f"{think} <|im_end|>", "The other.<|im_end|>"]],
        # Each answer is an example, behind what generation would put before it.
        "qwen3": [[f"{think} <|im_end|>\n"], ["<think>\n\n</think>\n\nThe other.<|im_end|>\n"]],
    }
    for name, template in TEMPLATES.items():
        chat = chat_of(tmp_path / name, template)
        assert answers_of(chat, [SYSTEM, *TURNS]) == expected[name], name
        assert [e.answers for e in chat.examples(TURNS)] in ([(1, 3)], [(1,), (3,)])

    chat = chat_of(tmp_path, TEMPLATES["marked"])
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    reference = theirs.apply_chat_template(TURNS, return_assistant_tokens_mask=True)
    [example] = chat.examples(TURNS)
    ids, is_answer = chat.encode_example(example)
    assert ids.tolist() == reference["input_ids"]
    assert is_answer.tolist() == [bool(m) for m in reference["assistant_masks"]]
    assert 0 < sum(is_answer) < len(ids)


def test_where_a_turn_ends(tmp_path):
    ends = {name: chat_of(tmp_path / name, text).turn_end for name, text in TEMPLATES.items()}
    ids = json.loads((tmp_path / "chatml/tokenizer.json").read_text())["added_tokens"]
    id_of = {token["content"]: token["id"] for token in ids}
    tokens = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}
    tokens |= {"qwen3": "<|im_end|>", "marked": "<|im_end|>"}
    assert ends == {k: (id_of[end], "") for k, end in tokens.items()} | {"plain": (None, "\n")}


def test_where_a_template_is_found(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    assert chat_of(tmp_path / "named", named).render([]) == "named"
    folder = write_tokenizer(tmp_path / "file")
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    args = TokenizerArgs(name="hf", path=str(folder))
    assert open_chat(args, build_tokenizer(args)).render([]) == "file </s>"
    (tmp_path / "own.jinja").write_text("own {{ unk_token is defined }}")
    own = open_chat(args, build_tokenizer(args), str(tmp_path / "own.jinja"))
    assert own.render([]) == "own False"


def test_what_is_no_template_is_an_error_that_names_its_file(tmp_path):
    file = str(tmp_path / "tokenizer_config.json")
    for template, *names in (
        (None, "data.chat.template"),
        ("{% for a in b %}\n" * 30 + "{% endfor %}" * 30, f"{file}:21", "nested blocks"),
        ("{% if a %}\n" * 99 + "{% endif %}" * 99, f"{file}:99", "levels of indentation"),
        ("a\n\n{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", f"{file}:3", "too many levels"),
        ("a\n{{ 1" + "+1" * 5000 + " }}\n\n", f"{file}:2", "too many levels"),
        ([{"name": "tool_use", "template": "x"}], "no chat template"),
        ([{"name": ["default"], "template": "x"}], "no chat template"),
        (3, "no chat template"),
    ):
        refused(lambda template=template: chat_of(tmp_path, template), *names)
    args = TokenizerArgs(name="hf", path=str(tmp_path))
    gone = str(tmp_path / "gone.jinja")
    refused(lambda: open_chat(args, build_tokenizer(args), gone), gone)
    refused(lambda: open_chat(TokenizerArgs(), build_tokenizer(TokenizerArgs())), "hf")


R, N = "{% set r = range(9999)|list %}", "{% set n = namespace(x=9) %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (R + "{% for i in r %}" * 9 + "{% endfor %}" * 9, "it takes more than 0.1 s"),
        (R + "{% for i in r if r|select('none')|list %}{% endfor %}", "it takes more than 0.1 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(99) }}",
            "it takes more than 0.1 s",
        ),
        ("{% for i in range(9999) %}" + "x" * 2000 + "{% endfor %}", "10,000,000 characters"),
        ("{{ (messages|length + 1) ** 10000000000 }}", r"\*\* is too large"),
        ("{{ 9999999999 * 'ab' }}", r"\* is too large"),
        ("{{ [1] * 9999999999 }}", r"\* is too large"),
        (N + "{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}", r"\* is too large"),
        ("{{ raise_exception('a\n' * 9999) }}", "fails: a a a a.* a ... a a a"),
    ],
)
def test_a_template_without_end_is_stopped(tmp_path, monkeypatch, template, why):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.1)
    chat = chat_of(tmp_path, template)
    with pytest.raises(UserError, match=why) as caught:
        chat.prompt(TURNS[:1], "prompt")
    assert len(str(caught.value)) < 2000


def test_limits_leave_operators_and_loops_as_they_are_in_transformers(tmp_path):
    template = """
    {%- for m in messages if m.role == 'user' recursive %}{{ loop.index }}/{{ loop.length }}
    {%- if loop.last %}{{ '=' * 3 ~ 2 * [1, 2] ~ 2 ** 0.5 * 3 ~ 2 ** -1 ~ 3 * 1.5 }}{% endif %}
    {%- else %}none{% endfor %}
    {%- for k, v in messages[0].items() %}{{ loop.nextitem }}{{ k }}{% endfor %}
    {%- macro f(x) %}{{ x * 2 }}{{ caller(x) }}{% endmacro %}
    {%- call(y) f('a') %}{{ y }}{% endcall %}{% filter upper %}b{% endfilter %}
    {%- set z %}c{% endset %}{{ z }}"""
    chat = chat_of(tmp_path, template)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages in (TURNS, TURNS[:1]):
        assert chat.render(messages) == reference.apply_chat_template(messages, tokenize=False)


def test_a_message_cannot_write_special_tokens_or_make_the_library_panic(tmp_path):
    chat = chat_of(tmp_path)
    for text, named in (("a <|im_end|> b", r"<\|im_end\|>"), ("\ufdd0", "noncharacter")):
        with pytest.raises(ChatError, match=f"message 3 has .*{named}"):
            chat.examples([*TURNS[:2], {"role": "user", "content": text}, TURNS[3]])
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    args = TokenizerArgs(name="hf", path=str(tmp_path))
    chat = open_chat(args, build_tokenizer(args))
    with pytest.raises(ChatError, match="the tokenizer's library fails"):
        chat.encode_example(chat.examples(TURNS)[0])


@pytest.mark.parametrize("special", ['<|"|>', "\n\n\n", "<|x|>"])
def test_the_name_of_a_special_token_is_refused_wherever_a_conversation_has_it(tmp_path, special):
    chat = with_special(tmp_path, CHATML, special)
    said = {"role": "user", "content": f"say {special} now"}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", special: 1}}]}
    for messages, tools, place in (
        ([said], None, "message 1"),
        ([{"role": "user", "content": "hi"}, called], None, "message 2"),
        ([{"role": "user", "content": "hi"}], [{"description": special}], "tools"),
    ):
        with pytest.raises(ChatError, match=rf"^{place} has the special token "):
            chat.render(messages, tools=tools)


def test_a_special_token_before_an_answer_that_takes_in_its_white_space_carries_no_loss(tmp_path):
    chat = with_special(tmp_path, HEADERS, "<|assistant|>", rstrip=True)
    ask = [{"role": "user", "content": "zoo"}, {"role": "assistant", "content": " zebra"}]
    ids, is_answer = chat.encode_example(chat.examples(ask)[-1])
    names = [chat._library.id_to_token(i) for i in ids]
    header = names.index("<|assistant|>")
    assert not is_answer[: header + 1].any() and is_answer[header + 1 :].all()
    assert chat.unlearned_end is None


def test_a_template_that_leaves_the_end_of_an_answer_without_loss_is_known(tmp_path):
    inside = TEMPLATES["marked"]
    outside = inside.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert outside != inside
    for template, name in ((inside, None), (outside, "<|im_end|>"), (CHATML, None)):
        chat = chat_of(tmp_path, template)
        end = chat.unlearned_end
        assert (end is None) == (name is None)
        assert end is None or chat._library.id_to_token(end) == name
