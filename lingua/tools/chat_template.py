"""Conversations as tokens, by the chat template of a model's tokenizer.

    chat = open_chat(TokenizerArgs(name="hf", path="Qwen3-0.6B"))
    chat.encode(chat.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True))

A template is a Jinja program in the files of the tokenizer. It runs in Jinja's sandbox, with the
names and filters that transformers gives it (transformers.utils.chat_template_utils). One that goes
on for ever, or writes without end, is stopped; what it keeps in memory besides has no limit.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
import jinja2.ext
import numpy as np
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lingua.base.errors import UserError
from lingua.config.values import NO_TEXT, is_text
from lingua.data.chat import find_template, special_names
from lingua.tokenizer.interface import Tokenizer, TokenizerArgs
from lingua.tokenizer.library import library_errors

if TYPE_CHECKING:  # it imports torch
    from lingua.model.sampling import SamplingArgs

Message = Mapping[str, Any]  # role, content, and what else the template reads
Settings = TypeVar("Settings", bound="SamplingArgs")
# The day that templates are given which write one: rows must not depend on when they were made. It
# is the one that Llama 3's template has for programs without a clock.
DAY = datetime(2024, 7, 26)
# Noncharacters of Unicode, which no text has: around what a template puts between its tags
# `generation` and `endgeneration`.
BEGIN, END = "\ufdd0", "\ufdd1"
MAX_RENDER_S = 10.0  # processor time of one rendering, which takes less than a millisecond
MAX_CHARS = 10_000_000  # of a rendering; also characters or items of a product in it
MAX_BITS = 1 << 14  # of a number; Python writes none that is larger


class ChatError(ValueError):
    """The template cannot render a conversation, or not so that its answers can be found."""


@dataclass(frozen=True)
class Example:
    """A rendered conversation, or a part of it."""

    text: str
    spans: tuple[tuple[int, int], ...]  # (begin, end) characters of the answers that carry loss
    answers: tuple[int, ...]  # numbers, from 0 on, of their messages


class Chat:
    """A chat template with its tokenizer."""

    def __init__(self, template: str, where: str, tokenizer: Tokenizer, names: dict[str, str]):
        """`names` are the special tokens that the template may write, such as eos_token. Raises
        UserError, which begins with `where`, for a template that is not valid."""
        self.source = template
        self._environment = environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            optimized=False,  # nothing of a template is computed before it is rendered
        )
        # As transformers' filter: Jinja's own writes HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {"raise_exception": _raise, "strftime_now": DAY.strftime}
        self._template = _compile(template, where, environment, names)
        self._library = type(tokenizer.library).from_buffer(tokenizer.content)
        self._library.no_padding()
        self._library.no_truncation()
        added = self._library.get_added_tokens_decoder()
        self._special = {t.content: i for i, t in added.items() if t.special}
        self._any_special = re.compile("|".join(map(re.escape, self._special)) or "(?!)")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` as far as the answer that
        follows. Raises ChatError."""
        return re.sub(f"[{BEGIN}{END}]", "", self._render(messages, add_generation_prompt, tools))

    def _render(
        self, messages: Sequence[Message], prompt: bool, tools: Sequence[Any] | None
    ) -> str:
        places: dict[str, Any] = {f"message {i}": m for i, m in enumerate(messages, 1)}
        for place, value in (places | {"tools": tools}).items():
            for text in _texts(value):
                if match := self._any_special.search(text):
                    raise ChatError(f"{place} has the special token {match[0]} in its text")
                if BEGIN in text or END in text:
                    raise ChatError(f"{place} has a noncharacter of Unicode, U+FDD0 or U+FDD1")
        plain = [{k: v for k, v in m.items() if v is not None} for m in messages]
        with library_errors(lambda why: ChatError(f"the chat template fails: {why}")):
            parts, n = [], 0
            self._environment.ends_at = time.process_time() + MAX_RENDER_S
            for part in self._template.generate(
                messages=plain, tools=tools, documents=None, add_generation_prompt=prompt
            ):
                parts.append(part)
                if (n := n + len(part)) > MAX_CHARS:
                    raise ChatError(f"it writes more than {MAX_CHARS:,} characters")
            text = "".join(parts)
            text.encode()  # raises at half a surrogate pair
        return text

    def examples(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[Example]:
        """The conversation as texts to train on, each with its answers. Raises ChatError.

        Where the template marks answers, with the tag `generation`, these are the spans. Otherwise
        an answer is what follows its prompt: the conversation is rendered up to each answer, with
        and without it. Such a rendering need not be how the next one begins (Qwen3 writes the last
        answer in another way than those before it): it is an example of its own then, so that each
        answer is trained on behind exactly the text that generation puts before it.
        """
        numbers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if re.search(r"{%-?\s*generation\s*-?%}", self.source):
            return [_marked(self._render(messages, False, tools), numbers)]
        examples: list[Example] = []
        for i in numbers:
            prompt = self.render(messages[:i], True, tools)
            text = self.render(messages[: i + 1], False, tools)
            if not text.startswith(prompt) or len(text) == len(prompt):
                raise ChatError(
                    f"message {i + 1}: the chat template writes another text before an answer than "
                    "before it is given, so that the answer cannot be found"
                )
            spans: tuple[tuple[int, int], ...] = ((len(prompt), len(text)),)
            answers: tuple[int, ...] = (i,)
            if examples and text.startswith(examples[-1].text):
                last = examples.pop()
                spans, answers = last.spans + spans, last.answers + answers
            examples.append(Example(text, spans, answers))
        return examples

    def encode(self, text: str) -> np.ndarray:
        """Ids of a rendered text, int64 [n]: what it has of special tokens becomes these. Raises
        ChatError."""
        return np.array(self._encode(text).ids, np.int64)

    def _encode(self, text: str) -> Any:
        fails = "the tokenizer's library fails at its text"
        with library_errors(lambda why: ChatError(f"{fails}: {why}")):
            return self._library.encode(text, add_special_tokens=False)

    def encode_example(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], whether they carry loss bool [n]): a token does that has a character of
        an answer. Raises ChatError."""
        encoded = self._encode(example.text)
        ids = np.array(encoded.ids, np.int64)
        begins, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        is_answer = np.zeros(len(begins), bool)
        is_special = np.isin(ids, list(self._special.values()))
        for begin, end in example.spans:
            # The special token before an answer may take in white space of it.
            is_header = is_special & (begins < begin)
            is_answer |= (ends > begin) & (begins < end) & ~is_header
        return ids, is_answer

    def prompt(self, messages: Sequence[Message], where: str) -> list[int]:
        """The tokens before the next answer. Raises UserError, which begins with `where`."""
        try:
            return self.encode(self.render(messages, add_generation_prompt=True)).tolist()
        except ChatError as error:
            raise UserError(f"{where}: {error}") from None

    def until_turn_end(self, settings: Settings, ends: list[int]) -> Settings:
        """The settings, with the end of an answer among what ends the result. Raises UserError."""
        try:
            token, text = self.turn_end
        except ChatError as error:
            raise UserError(f"chat: {error}") from None
        if text:
            return replace(settings, stop=[*settings.stop, text])
        if settings.stop_tokens is None:
            return replace(settings, stop_tokens=[*ends, *([] if token is None else [token])])
        return settings

    @cached_property
    def turn_end(self) -> tuple[int | None, str]:
        """(special token, text) with which an answer ends: the token, or else the text, which is
        empty where the template puts nothing behind an answer."""
        content = "zebra"
        ask = [{"role": "user", "content": "zoo"}]
        text = self.render([*ask, {"role": "assistant", "content": content}])
        end = text.rpartition(content)[2]
        first = next(iter(self.encode(end).tolist()), None)
        return (first, "") if first in self._special.values() else (None, end)

    @cached_property
    def unlearned_end(self) -> int | None:
        """The special token that ends an answer, where the template marks answers without it."""
        ask = [{"role": "user", "content": "zoo"}, {"role": "assistant", "content": "zebra"}]
        ids, is_answer = self.encode_example(self.examples(ask)[-1])
        end, _ = self.turn_end
        return end if end in ids and end not in ids[is_answer] else None


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of JSON, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which whatever may be repeated ends: the bodies of loops and macros look
    at the clock, and operators whose result a few characters can make endless at its size."""

    intercepted_binops = frozenset(("*", "**"))
    ends_at = 0.0  # of time.process_time

    def check_time(self) -> bool:
        if time.process_time() > self.ends_at:
            raise jinja2.TemplateError(f"it takes more than {MAX_RENDER_S:g} s")
        return True

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match left, right:
            case int(), int():
                times = right if operator == "**" else 1 + right.bit_length()
                is_endless = left.bit_length() * times > MAX_BITS
            case (Sized(), int()) | (int(), Sized()):
                sizes = (len(v) if isinstance(v, Sized) else v for v in (left, right))
                is_endless = math.prod(sizes) > MAX_CHARS
            case _:
                is_endless = False
        if is_endless:
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def limit(self, tree: nodes.Template) -> nodes.Template:
        """The program with a look at the clock in everything that has a body."""

        def look(node: nodes.Node) -> Any:
            check = nodes.EnvironmentAttribute("check_time")
            return nodes.Call(check, [], [], None, None).set_lineno(node.lineno)

        node: Any
        for node in list(tree.find_all(nodes.Stmt)):
            if "body" in node.fields:
                node.body.insert(0, nodes.ExprStmt(look(node)).set_lineno(node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(look(node), node.test).set_lineno(node.lineno)
        return tree


def _compile(
    template: str, where: str, environment: _Environment, names: dict[str, str]
) -> jinja2.Template:
    """Raises UserError, which names the line of the template: where Jinja, or Python with what
    Jinja makes of it, refuses it or gives up."""

    def refusal(line: int, why: object) -> UserError:
        return UserError(f"{where}:{line}: is no chat template ({why})")

    try:
        parser = Parser(environment, template)
        try:
            tree = parser.parse()
        except RecursionError:
            raise refusal(parser.stream.current.lineno, "too many levels") from None
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str) and not is_text(constant.value):
                raise refusal(constant.lineno, f"{constant.value!a}: {NO_TEXT}")
        return environment.from_string(environment.limit(tree), globals=names)
    except jinja2.TemplateSyntaxError as error:
        raise refusal(error.lineno, error) from None
    except SyntaxError as error:
        python: str = environment.compile(tree, raw=True)
        raise refusal(_template_line(python, error.lineno or 1), error.msg) from None
    except (RecursionError, MemoryError):
        raise refusal(_deepest(tree).lineno, "too many levels") from None


def _template_line(python: str, line: int) -> int:
    """The line of a template that a line of Jinja's code for it is about."""
    lines = re.findall(r"(\d+)=(\d+)", python.rpartition("debug_info = ")[2])
    return max((int(mine) for mine, of_code in lines if int(of_code) <= line), default=1)


def _deepest(tree: nodes.Node) -> nodes.Node:
    level = [tree]
    while inner := [child for node in level for child in node.iter_child_nodes()]:
        level = inner
    return level[0]


def open_chat(args: TokenizerArgs, tokenizer: Tokenizer, template: str | None = None) -> Chat:
    """The chat template of a tokenizer, or that in the file `template`. Raises UserError."""
    text, where = find_template(args, template)
    return Chat(text, where, tokenizer, special_names(args, tokenizer))


def _marked(rendered: str, answers: Sequence[int]) -> Example:
    """The example of a rendering whose answers are between BEGIN and END."""
    text, spans = "", []
    for part in re.split(f"{BEGIN}", rendered):
        answer, end, rest = part.partition(END)
        if end:
            spans.append((len(text), len(text) + len(answer)))
        text += answer + rest
    if not any(begin < end for begin, end in spans):
        raise ChatError("the chat template marks no answer")
    return Example(text, tuple(spans), tuple(answers))


class _Generation(jinja2.ext.Extension):
    """The tags `generation` and `endgeneration`, with which templates mark answers."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
