"""Chat messages to text through a Jinja template, and which characters of it the assistant wrote.

A template that marks them with `{% generation %}`, as transformers' do, is followed. Of another one, an answer begins
where the messages before it end, rendered with the prompt for an answer, and ends where the rendered answer ends.
Templates are rendered in Jinja's sandbox, without the time of day, so that preparing again gives the same shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pretraining.config.errors import UserError
from pretraining.data.layouts import read_dataset_json
from pretraining.extensions.files import write_atomically
from pretraining.storage import Location, location

NOTHING: Mapping[str, Any] = MappingProxyType({})
CONFIG = "tokenizer_config.json"
TOOL_USE = "tool_use"  # transformers' name of a template
Message = Mapping[str, Any]  # "role" and "content", and what else the template reads
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # around what the assistant wrote; Unicode keeps both out of text


class TemplateSource(NamedTuple):
    """A template and what it may name: strings, which a worker process receives."""

    text: str
    special: Mapping[str, str]  # "bos_token" and others
    origin: str  # for messages
    has_tool_use: bool = False  # whether transformers takes another template, "tool_use", for records with tools


class RenderedChat(NamedTuple):
    """A text and the characters [start, stop) of it that are trained."""

    text: str
    trained: list[tuple[int, int]]


def find_template(file: str, tokenizer: str, special: Mapping[str, str]) -> TemplateSource | None:
    """Return the template in `file`, or without one the tokenizer's own; None if it has none.

    The own one is chat_template.jinja or a key of tokenizer_config.json, next to the tokenizer. special: the tokens
    that the tokenizer itself names.
    """
    folder = location(tokenizer).parent
    config = _tokenizer_config(folder)
    special = {**special, **named_tokens(tokenizer)}
    path = location(file) if file else folder / "chat_template.jinja"
    if path.is_file():
        has_tool_use = not file and (folder / "additional_chat_templates" / f"{TOOL_USE}.jinja").is_file()
        try:
            return TemplateSource(path.read_text().removeprefix("\ufeff"), special, str(path), has_tool_use)
        except ValueError as error:
            raise UserError(f"{path}: not a chat template ({error}): convert it to UTF-8") from error
    if file:
        raise UserError(f"--chat_template={file}: no such file")
    own, has_tool_use = config.get("chat_template"), False
    if isinstance(own, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in own if isinstance(entry, dict)}
        own, has_tool_use = named.get("default"), TOOL_USE in named
    if not isinstance(own, str | None):
        raise UserError(f"{folder / CONFIG}: its chat_template is of type {type(own).__name__}, no text: correct it")
    return TemplateSource(own, special, str(folder / CONFIG), has_tool_use) if own else None


def named_tokens(tokenizer: str) -> dict[str, str]:
    """Return the special tokens, such as "bos_token", that transformers' files next to a tokenizer name."""
    folder = location(tokenizer).parent
    config, older = _tokenizer_config(folder), folder / "special_tokens_map.json"
    has_older = older.is_file() and "added_tokens_decoder" not in config  # as transformers reads it
    groups = [config, config.get("extra_special_tokens"), config.get("model_specific_special_tokens")]
    groups += [read_dataset_json(older)] if has_older else []
    tokens = {name: value for group in groups if isinstance(group, dict) for name, value in group.items()
              if name.endswith("_token") and isinstance(value, str | dict)}  # fmt: skip
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: value for name, value in contents.items() if isinstance(value, str) and value}


def _tokenizer_config(folder: Location) -> dict[str, Any]:
    path = folder / CONFIG
    return read_dataset_json(path) if path.is_file() else {}


def write_template(folder: Path, source: TemplateSource) -> None:
    """Write a template next to the folder's tokenizer, as transformers does, where `find_template` finds it."""
    content = {**source.special, "chat_template": source.text}
    write_atomically(folder / CONFIG, json.dumps(content, indent=2) + "\n")


def check_tokens(source: TemplateSource, path: str, find_token: Callable[[str], int | None]) -> None:
    """Raise UserError if a template writes tokens that transformers adds to the tokenizer at `path`.

    A sentencepiece model is often one of them: added_tokens.json and tokenizer_config.json have the tokens of a chat.
    """
    folder, names = location(path).parent, list[str]()
    for file, key in (("added_tokens.json", ""), (CONFIG, "added_tokens_decoder")):
        content = read_dataset_json(folder / file) if (folder / file).is_file() else {}
        added = content.get(key) if key else content
        for name, value in (added if isinstance(added, dict) else {}).items():
            names.append(value.get("content", "") if isinstance(value, dict) else name)
    if missing := sorted({name for name in names if name and name in source.text and find_token(name) is None}):
        reason = f"has no token {', '.join(missing)}, which {source.origin} writes and transformers adds to it"
        remedy = "give a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes one"
        raise UserError(f"--tokenizer={path}: {reason}: {remedy}")


def end_of_turn(source: TemplateSource, find_token: Callable[[str], int | None]) -> int | None:
    """Return the id of the token that ends a message, tokenizer_config.json's eos_token; None if it names none."""
    return find_token(source.special.get("eos_token", ""))


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: TemplateSource) -> None:
        """UserError if it is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._source, self._marks = source, bool(re.search(r"\{%-?\s*generation\b", source.text))
        try:
            self._template = environment.from_string(source.text)
        except TemplateError as error:
            raise UserError(f"{source.origin}: not a chat template ({error})") from error

    def render(self, messages: Sequence[Message], more: Mapping[str, Any] = NOTHING, first: int = 0) -> RenderedChat:
        """Return the text of a chat and what is trained of it: the assistant's messages. UserError without a place.

        more: what else the template may name, such as "tools". first: the messages before it are not trained. Keys of
        messages without a value, which the columns of Parquet have, are left out, as transformers does.
        """
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        text = self._text(messages, False, more)
        for number, message in enumerate(messages):
            content, is_trained = message.get("content"), number >= first and message["role"] == "assistant"
            if is_trained and message.get("weight") == 0 and "weight" not in self._source.text:  # OpenAI's: not trained
                problem = f"message {number} has weight 0, which {self._source.origin} does not read"
                raise UserError(f"{problem}: give the messages up to it as prompt, and those that follow as completion")
            if isinstance(content, list | dict) and str(content) in text:
                problem = f"the content of message {number} is a {type(content).__name__}, which {self._source.origin}"
                raise UserError(f"{problem} writes as it is: join its texts, or give a template that reads its parts")
        if self._source.has_tool_use and more.get("tools"):
            remedy = f"give the template for all records as --chat_template=FILE, {TOOL_USE} if it renders all of them"
            raise UserError(f"{self._source.origin} has another template, {TOOL_USE}, for records with tools: {remedy}")
        if self._marks:
            whole, prompt = _unmarked(text), _unmarked(self._text(messages[:first], False, more) if first else "")
            return RenderedChat(whole.text, whole.trained[len(prompt.trained) :])
        trained = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            before = self._text(messages[:number], True, more)
            after = self._text(messages[: number + 1], False, more)
            problem = ""
            if not (after.startswith(before) and text.startswith(after)):
                problem = f"what it makes of message {number} depends on other messages"
            elif before == self._text(messages[:number], False, more):  # add_generation_prompt has no effect
                mark: Any = [{"type": "text", "text": _OPEN}] if isinstance(message.get("content"), list) else _OPEN
                answer = self._text([*messages[:number], {"role": "assistant", "content": mark}], False, more)
                if header := answer[len(before) :].partition(_OPEN)[0].strip():
                    problem = f"without add_generation_prompt, {header!r} before message {number} would be trained, too"
            if problem:
                remedy = "mark the assistant's part of the template with {% generation %} and {% endgeneration %}"
                raise UserError(f"{self._source.origin}: {problem}: {remedy}")
            trained.append((len(before), len(after)))
        return RenderedChat(text, trained)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat up to where the assistant's next message begins. Raises UserError."""
        return self._text(messages, True, NOTHING)

    def _text(self, messages: Sequence[Message], prompts: bool, more: Mapping[str, Any]) -> str:
        try:
            names = {"tools": None, "documents": None, **self._source.special, **more}
            return self._template.render(messages=list(messages), add_generation_prompt=prompts, **names)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{self._source.origin} cannot render the messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: the output between the two gets a mark on each side."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable of jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_mark` with the block's output."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _unmarked(text: str) -> RenderedChat:
    """Return a text without its marks; marked parts are trained."""
    parts, trained, at = re.split(f"[{_OPEN}{_CLOSE}]", text), [], 0
    for number, part in enumerate(parts):
        if number % 2:
            trained.append((at, at + len(part)))
        at += len(part)
    return RenderedChat("".join(parts), trained)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML, with the parameters of transformers' filter."""
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "sort_keys": sort_keys}
    return json.dumps(value, separators=separators, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
