"""Records of conversations -> examples, and examples -> rows.

A record has `messages`, a list of {"role": ..., "content": ...}, or a `prompt` and a `completion`.
The tokenizer's chat template makes a text of it; messages of the assistant are its answers. A pair
has `chosen` and `rejected`, lists of messages or what follows the `prompt`: it is one example, of
two documents that each have their last answer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from lingua.data.args import DataArgs
from lingua.data.chat import ANSWER, CONTEXT, FIRST, pack, padding
from lingua.tokenizer.interface import Tokenizer
from lingua.tools.chat_template import Chat, ChatError, Example, open_chat
from lingua.tools.prepare.records import Examples, SourceRecord, Wrong, text_keys

# The roles that may follow a role; None: at the begin.
NEXT: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def open_conversations(args: DataArgs, tokenizer: Tokenizer, source: str) -> Examples | None:
    """Returns the function that makes the examples of a record of `source`; None where sources are
    text. Raises UserError."""
    if args.chat is None:
        return None
    chat = open_chat(args.tokenizer, tokenizer, args.chat.template)
    (key,) = text_keys(args, source)
    cut = args.chat.on_long_example == "cut"
    made = _Conversations(chat, key, tokenizer.vocab_size, args.row_tokens, cut)
    return made.pair if args.chat.pairs else made.examples


def unlearned_end(args: DataArgs, tokenizer: Tokenizer) -> str | None:
    """A line about a template that leaves the end of an answer without loss; None where it does
    not, or sources are text. Raises UserError."""
    if args.chat is None:
        return None
    try:
        token = open_chat(args.tokenizer, tokenizer, args.chat.template).unlearned_end
    except ChatError:  # it needs other messages
        return None
    if token is None:
        return None
    name = tokenizer.library.id_to_token(token)
    return (
        f"no end of an answer carries loss, since the template has {name} outside of its tag "
        "`generation`: the model does not learn to end its answers"
    )


@dataclass(frozen=True)
class _Conversations:
    chat: Chat
    key: str  # key of the messages in a record
    vocab_size: int
    row_tokens: int
    cut: bool  # cut a longer example, in place of an error

    def examples(self, number: int, record: dict[str, Any]) -> list[SourceRecord]:
        """Returns each example as a record with its tokens. All have the hash of the conversation,
        so all are held out or none."""
        messages, tools = self._messages(record), _tools(record)
        _check_messages(messages)
        hashed = _hash([messages, tools])
        return [
            SourceRecord(number, "", n_bytes, hashed, hashed, None, tokens, is_cut)
            for example in self._render(messages, tools)
            for tokens, is_cut in [self._tokens([example])]
            for n_bytes in [sum(_answer_bytes(messages[i]) for i in example.answers)]
        ]

    def pair(self, number: int, record: dict[str, Any]) -> list[SourceRecord]:
        """A pair as one record, the chosen answer first. Of a prompt, all pairs are held out or
        none."""
        both, tools = _pair_messages(record), _tools(record)
        chosen, rejected = both.values()
        for key, messages in both.items():
            try:
                _check_messages(messages)
            except Wrong as fault:
                raise Wrong(fault.kind, f"{key}: {fault.detail}") from None
        if chosen[:-1] != rejected[:-1]:
            raise Wrong("no pair", "chosen and rejected differ before their last message")
        if chosen == rejected:
            raise Wrong("no pair", "chosen and rejected are equal")
        last = [self._render(messages, tools)[-1] for messages in both.values()]
        tokens, is_cut = self._tokens([replace(e, spans=e.spans[-1:]) for e in last])
        n_bytes = sum(_answer_bytes(messages[-1]) for messages in both.values())
        hashed, draw = _hash([chosen, rejected, tools]), _hash([chosen[:-1], tools])
        return [SourceRecord(number, "", n_bytes, hashed, draw, None, tokens, is_cut)]

    def _messages(self, record: dict[str, Any]) -> Any:
        messages = record.get(self.key)
        if messages is None and record.get("prompt") is not None and "completion" in record:
            pair = (("user", record["prompt"]), ("assistant", record["completion"]))
            return [{"role": role, "content": content} for role, content in pair]
        if messages is None:
            need = (
                f"neither {self.key} nor prompt and completion, but {', '.join(record) or 'none'}"
            )
            raise Wrong("no conversation", need, lacks_key=True)
        if not isinstance(messages, list) or not messages:
            raise Wrong("no conversation", f"{self.key} must be a list of messages")
        return messages

    def _render(self, messages: list[dict[str, Any]], tools: Any) -> list[Example]:
        try:
            return self.chat.examples(messages, tools)
        except ChatError as error:
            raise Wrong("cannot be rendered", str(error)) from None

    def _tokens(self, examples: Sequence[Example]) -> tuple[np.ndarray, bool]:
        """(stored numbers [n] of examples that stay together, whether they are cut, all to the same
        length)."""
        try:
            encoded = [self.chat.encode_example(example) for example in examples]
        except ChatError as error:
            raise Wrong("cannot be tokenized", str(error)) from None
        n = sum(len(ids) for ids, _ in encoded)
        is_long = n > self.row_tokens
        if is_long and not self.cut:
            raise Wrong(
                "longer than a row",
                f"{n:,} tokens, a row has {self.row_tokens:,}: raise data.seq_len, or set "
                "data.chat.on_long_example=cut",
            )
        room = self.row_tokens // len(examples) if is_long else self.row_tokens
        stored = []
        for ids, is_answer in encoded:
            kinds = np.where(is_answer, ANSWER, CONTEXT)[:room]
            kinds[:1] = FIRST
            if not (kinds == ANSWER).any():
                raise Wrong("no answer", f"none in the {len(kinds):,} tokens of a row")
            stored.append(ids[:room] + self.vocab_size * kinds)
        return np.concatenate(stored), is_long


def _pair_messages(record: dict[str, Any]) -> dict[str, list[Any]]:
    """The messages of the chosen and of the rejected conversation, by these names."""
    prompt, conversations = record.get("prompt"), {}
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    for key in ("chosen", "rejected"):
        messages = record.get(key)
        if messages is None:
            raise Wrong("no pair", f"no key {key}, but {', '.join(record) or 'none'}")
        if isinstance(messages, str):
            messages = [{"role": "assistant", "content": messages}]
        if not isinstance(messages, list) or not messages or not isinstance(prompt, list):
            need = f"prompt and {key} must be texts or lists of messages"
            raise Wrong("no pair", need)
        first = messages[0]
        is_answer = isinstance(first, dict) and first.get("role") == "assistant"
        conversations[key] = [*prompt, *messages] if is_answer else messages
    return conversations


def _tools(record: dict[str, Any]) -> Any:
    tools = record.get("tools")
    if not isinstance(tools, list | None):
        raise Wrong("no conversation", "tools must be a list")
    return tools


def _hash(content: Any) -> int:
    """64 bits."""
    text = json.dumps(content, sort_keys=True, default=str)
    return xxhash.xxh3_64_intdigest(text.encode())


def _check_messages(messages: list[Any]) -> None:
    """Raises Wrong where they are no conversation that ends with an answer."""
    before = None
    for i, message in enumerate(messages, 1):
        _check_message(i, message, before)
        before = message["role"]
    if before != "assistant":
        need = f"the last message is of {before}; must be of assistant"
        raise Wrong("roles out of order", need)


def _check_message(i: int, message: Any, before: str | None) -> None:
    """Raises Wrong."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise Wrong("no conversation", f"message {i} must be an object with a role and a content")
    if role not in NEXT[before]:
        after = "" if before is None else f" after {before}"
        need = f"message {i} is of {role}{after}; must be of {' or '.join(NEXT[before])}"
        raise Wrong("roles out of order", need)
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise Wrong("content is not a string", f"that of message {i}")
    if role == "assistant" and not (content or "").strip() and not calls:
        raise Wrong("empty answer", f"message {i}")
    try:
        (content or "").encode()
    except UnicodeEncodeError:
        raise Wrong("not UTF-8", f"half a surrogate pair in message {i}") from None


def _answer_bytes(message: dict[str, Any]) -> int:
    """Bytes of what an answer says, in UTF-8."""
    calls = message.get("tool_calls")
    text = json.dumps(calls, default=str) if calls else ""
    return len(((message.get("content") or "") + text).encode())


def packed(
    records: Iterator[SourceRecord], row_tokens: int, vocab_size: int, below: int
) -> Iterator[tuple[SourceRecord, list[np.ndarray]]]:
    """Yields each example with its stored numbers, in the order in which they are written: in rows,
    with the padding of a row behind its last one; then those of a draw `below` this, held out."""

    def tokens(record: SourceRecord) -> np.ndarray:
        assert record.tokens is not None
        return record.tokens

    def trained() -> Iterator[SourceRecord]:
        for record in records:
            if record.draw < below:
                held_out.append(record)
            else:
                yield record

    held_out: list[SourceRecord] = []
    for row in pack(trained(), row_tokens, lambda record: len(tokens(record))):
        free = row_tokens - sum(len(tokens(record)) for record in row)
        for record in row[:-1]:
            yield record, [tokens(record)]
        yield row[-1], [tokens(row[-1]), padding(free, vocab_size)]
    for record in held_out:
        yield record, [tokens(record)]
