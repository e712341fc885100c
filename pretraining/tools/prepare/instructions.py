"""Examples of instruction data: records to tokens with trained completions, and whole examples packed into rows.

A row has a fixed length, so the data that training reads are rows like any other documents: their order is a function
of the seed and the step, and nothing of the packing remains to be done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.data.stores.labels import IGNORED
from pretraining.tools.prepare.chat import ChatTemplate, RenderedChat, TemplateSource

if TYPE_CHECKING:
    from pretraining.extensions.tokenizers.tokenizer import Tokenizer

# Rows that are filled at the same time. Of lengths drawn like those of chats, 64 leave 1 % of the tokens to padding.
_WINDOW = 64
LONGER = ("refuse", "split", "drop")
_WHO = ("role", "name", "id", "weight")  # of a message, whose other fields are what it says


class InstructionOptions(NamedTuple):
    """How the records of instruction data become rows."""

    template: TemplateSource | None
    is_for_prompts: bool  # whether the template is also for records without messages
    length: int  # tokens of a row
    packing: bool  # False: one example per row
    longer: str  # what becomes of examples longer than a row: one of LONGER
    separator: int  # after a completion without a template, and in the rest of a row


class Example(NamedTuple):
    """One example."""

    tokens: list[int]
    trained: list[bool]  # per token; never the first, which nothing predicts


@dataclass
class PackedRow:
    """Examples one after the other."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # in the example

    def add(self, example: Example) -> None:
        self.tokens += example.tokens
        self.labels += [token if is_trained else IGNORED for token, is_trained in zip(*example, strict=True)]
        self.positions += range(len(example.tokens))


class Packer:
    """Rows of whole examples, by first fit among the rows that are open: deterministic, in one pass."""

    def __init__(self, options: InstructionOptions, write: Callable[[PackedRow], None]) -> None:
        """write: called with every row when it is full, or the oldest one of too many."""
        self._options, self._write = options, write
        self._open: list[PackedRow] = []
        self.counts: Counter[str] = Counter()  # what is to be reported, and how often

    def add(self, example: Example, place: str) -> None:
        """Place an example. UserError if it is longer than a row and that is refused."""
        length, pieces = self._options.length, [example]
        if len(example.tokens) > length:
            if self._options.longer == "refuse":
                tokens = f"{len(example.tokens):,} tokens, more than a row of {length:,}"
                raise UserError(f"{place}: {tokens}: raise --seq_length, or give --longer=drop or --longer=split")
            self.counts[f"examples longer than a row: {self._options.longer}"] += 1
            pieces = list(_split(example, length)) if self._options.longer == "split" else []
        for piece in pieces:
            if any(piece.trained):
                self._place(piece)
            else:
                self.counts["examples or pieces without a trained token left out"] += 1

    def close(self) -> None:
        """Write the rows that are still open."""
        for row in self._open:
            self._finish(row)

    def _place(self, example: Example) -> None:
        length, size = self._options.length, len(example.tokens)
        self.counts["examples in rows"] += 1
        self.counts["trained tokens"] += sum(example.trained)
        row = next((row for row in self._open if len(row.tokens) + size <= length), None)
        if row is None:
            row = PackedRow()
            self._open.append(row)
        row.add(example)
        if len(row.tokens) == length or not self._options.packing:
            self._finish(row)
            self._open.remove(row)
        elif len(self._open) > _WINDOW:
            self._finish(self._open.pop(0))

    def _finish(self, row: PackedRow) -> None:
        """Fill the rest of a row with tokens that are not trained, and write it."""
        rest = self._options.length - len(row.tokens)
        row.add(Example([self._options.separator] * rest, [False] * rest))
        self._write(row)


def _split(example: Example, length: int) -> Iterator[Example]:
    for start in range(0, len(example.tokens), length):
        places = slice(start, start + length)
        yield Example(example.tokens[places], [False, *example.trained[places][1:]])


class Reader:
    """Records to examples."""

    def __init__(self, options: InstructionOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer
        self._template = ChatTemplate(options.template) if options.template else None

    def example(self, record: Mapping[str, Any], place: str) -> Example:
        """Return the example of a record: `messages`, `prompt` and `completion`, or `instruction`, `input`, `output`.

        Prompt and completion are both texts, or both messages.

        UserError with its place if the record is none of these, or the template cannot render it.
        """
        try:
            chat, is_plain = self._chat(record)
            ids, spans = self._tokenizer.trace(chat.text)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        # a token that stands for no character of its own is one of several for the next character
        trained = [any(first < stop and max(last, first + 1) > begin for begin, stop in chat.trained)
                   for first, last in spans]  # fmt: skip
        if is_plain:  # a template writes its own tokens around a text
            begin, end = [*self._tokenizer.beginning], [self._options.separator]
            begin = [] if ids[: len(begin)] == begin else begin
            end = [] if trained[-1:] == [True] and ids[-1:] == end else end
            ids, trained = begin + ids + end, [False] * len(begin) + trained + [True] * len(end)
        return Example(ids, [False, *trained[1:]])

    def has_names(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record's own text has the name of a special token, which becomes this token there.

        At the end of a completion, that of the separator is meant.
        """
        if messages := _messages(record):
            text = json.dumps(messages, ensure_ascii=False, default=str)
        else:
            text = "".join(_texts(record)).removesuffix(self._tokenizer.find_name(self._options.separator) or "")
        return any(name in text for name in self._tokenizer.names)

    def _chat(self, record: Mapping[str, Any]) -> tuple[RenderedChat, bool]:
        """Return the text of a record, and whether it is without a template."""
        if messages := _messages(record):
            if self._template is None:
                raise UserError("messages need a template: give --chat_template=FILE, because the tokenizer has none")
            first = 0 if "messages" in record else len(record["prompt"])
            return self._template.render(messages, _template_names(record), first), False
        prompt, gap, completion = _texts(record)
        if self._template and self._options.is_for_prompts:
            texts = {"user": prompt, "assistant": completion}
            return self._template.render([{"role": role, "content": text} for role, text in texts.items()]), False
        before = len(prompt + gap)
        return RenderedChat(prompt + gap + completion, [(before, before + len(completion))]), True


def check_record(record: Mapping[str, Any]) -> None:
    """Raise UserError, without a place, if a record is no example."""
    if _messages(record):
        _template_names(record)
    else:
        _texts(record)


def _messages(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages of a chat; none for a record of texts."""
    chat: list[Mapping[str, Any]] = []
    for name in ("messages",) if "messages" in record else ("prompt", "completion"):
        value = record.get(name)
        if name != "messages" and not isinstance(value, list):
            return []
        objects = value if isinstance(value, list) else []
        if not objects or not all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in objects):
            raise UserError(f"{name} is not a list of objects with role and content")
        for number, each in enumerate(objects):
            if each["content"] is None and not any(value for key, value in each.items() if key not in _WHO):
                raise UserError(f"message {number} of {name}, {each['role']}'s, has neither content nor tool_calls")
        chat += objects
    return chat


def _template_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a template may name besides the messages: lists of objects, or the JSON of one, as TRL reads them."""
    names = {}
    for name in ("tools", "documents"):
        value = record.get(name)
        with suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) and value else value
        if value and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
            raise UserError(f"{name} is not a list of objects")
        names[name] = value or None
    if record.get("chat_template_kwargs"):
        raise UserError("chat_template_kwargs is not followed: set what it says in the file of --chat_template")
    return names


def _texts(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return prompt, gap and completion of a record without messages. An instruction is a paragraph of its own."""
    if "completion" in record:
        prompt, gap, completion = record.get("prompt"), "", record["completion"]
    elif "output" in record:
        parts = [record[name] for name in ("instruction", "input") if record.get(name)]
        prompt = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else None
        completion = record["output"]
        gap = "\n\n" if record.get("instruction") else ""
    else:
        names = ", ".join(record) or "none"
        raise UserError(f"no messages, prompt and completion, or instruction and output: its fields are {names}")
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        raise UserError("prompt and completion are not both text, or both lists of messages")
    return prompt, gap, completion
