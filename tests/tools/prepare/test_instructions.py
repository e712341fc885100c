"""Instruction data: which tokens are trained, chat templates as transformers renders them, rows of whole examples."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece

pytest.importorskip("pretraining.extensions.shard_formats")
pytest.importorskip("pretraining.extensions.tokenizers")

from main_training import configure
from pretraining.config.errors import UserError
from pretraining.data import IGNORED, open_stream
from pretraining.extensions.tokenizers.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    open_tokenizer,
    train,
)
from pretraining.tools import inspect_data
from pretraining.tools.convert.export_tokenizer import export_tokenizer
from pretraining.tools.prepare import prepare
from pretraining.tools.prepare.chat import ChatTemplate, TemplateSource, check_tokens, find_template
from pretraining.tools.prepare.instructions import Example, InstructionOptions, PackedRow, Packer, Reader
from pretraining.tools.prepare.text import divide, read_records
from tests.data.corpora import notes_on, settings, write_instructions, write_table
from tests.tokenizer_files import write_byte_level

LENGTH = 16
HEADER = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
ANSWER = "{{ message['content'] | trim + '<|eot_id|>' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
# Llama 3's format; the second form marks what transformers counts as the assistant's
LLAMA3 = f"{{{{ bos_token }}}}{{% for message in messages %}}{HEADER}{ANSWER}{{% endfor %}}{PROMPT}"
MARKED = LLAMA3.replace(
    ANSWER,
    "{% if message['role'] == 'assistant' %}{% generation %}" + ANSWER + "{% endgeneration %}"
    "{% else %}" + ANSWER + "{% endif %}",
)
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 漢字 😀? "},
    {"role": "assistant", "content": "Letters, 😀\n of é kind."},
    {"role": "user", "content": "And <b>?"},
    {"role": "assistant", "content": " A tag. "},
]
EMPTY: dict[str, Any] = {"role": "assistant", "content": None}


PLAIN = InstructionOptions(None, False, LENGTH, True, "refuse", 1)
PARTS = [{"type": "text", "text": "What is it?"}]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json with Llama 3's special tokens, and its tokenizer_config.json with the template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(folder / "tokenizer.json", [message["content"] for message in CHAT] * 20, 400, SPECIAL)
    named = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}, "chat_template": LLAMA3}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def options(folder: Path, template: str | TemplateSource = "", **changes: Any) -> InstructionOptions:
    source = find_template("", str(folder / "tokenizer.json"), {})
    assert source
    source = template if isinstance(template, TemplateSource) else source._replace(text=template or source.text)
    return PLAIN._replace(template=source, **changes)


def chat_template(folder: Path, text: str) -> ChatTemplate:
    source = options(folder, text).template
    assert source
    return ChatTemplate(source)


def processed(folder: Path, processor: Any) -> Tokenizer:
    """A byte-level tokenizer with this post-processor."""
    model = write_byte_level(folder / "tokenizer.json", ["It is 4 x"] * 20, 300, SPECIAL)
    model.post_processor = processor
    model.save(str(folder / "tokenizer.json"))
    return open_tokenizer(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("template", [LLAMA3, MARKED])
def test_chats_have_the_tokens_and_the_mask_of_transformers(tokenizer_folder: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = str(tokenizer_folder / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=path, bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    want = theirs.apply_chat_template(
        CHAT, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    got = Reader(options(tokenizer_folder, template), open_tokenizer(path)).example({"messages": CHAT}, "here")
    assert got.tokens == want["input_ids"]
    assert got.trained == [bool(trained) for trained in want["assistant_masks"]]
    assert 0 < sum(got.trained) < len(got.trained)
    # as TRL does with a prompt and a completion: what follows the prompt is trained
    before = theirs.apply_chat_template(CHAT[:4], chat_template=MARKED, add_generation_prompt=True)["input_ids"]
    record = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    last = Reader(options(tokenizer_folder, template), open_tokenizer(path)).example(record, "here")
    assert last.tokens == got.tokens
    assert last.trained == [number >= len(before) for number in range(len(last.tokens))]


# What a template may name besides roles and texts: tools, tokens of the tokenizer, JSON in a certain form, absent keys
NAMING = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}{% endfor %}"
    "{% for message in messages %}{{ sep_token + message.role + image_token }}{{ message.content }}"
    "{% if message.tool_calls is defined %}{{ message.tool_calls | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ sep_token + 'assistant' + image_token }}{% endif %}"
)
CALLS = [{"name": "f", "arguments": {"b": 1, "a": "é"}}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> é"}}]
TOOL_CHAT = [
    {"role": "user", "content": "x?", "tool_calls": None},  # as the rows of Parquet have it
    {"role": "assistant", "content": "", "tool_calls": CALLS},
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None, ""])
def test_a_template_is_given_the_names_and_filters_of_transformers(
    tokenizer_folder: Path, tmp_path: Path, tools: Any
) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tokenizer_folder / "tokenizer.json"
    names: Any = {"bos_token": SPECIAL[0], "sep_token": SPECIAL[2], "extra_special_tokens": {"image_token": SPECIAL[3]}}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), **names)
    theirs.save_pretrained(tmp_path)
    want = theirs.apply_chat_template(TOOL_CHAT, tools=TOOLS if tools else None, chat_template=NAMING, tokenize=False)
    (tmp_path / "chat_template.jinja").write_text(NAMING)
    source = find_template("", str(tmp_path / "tokenizer.json"), {})
    assert source and "é" in want and SPECIAL[2] in want and SPECIAL[3] in want
    record = {"messages": TOOL_CHAT} | ({} if tools is None else {"tools": tools})
    tokenizer = open_tokenizer(str(path))
    got = Reader(options(tokenizer_folder, template=source), tokenizer).example(record, "here")
    assert got.tokens == tokenizer.encode([want])[0]


def test_prompts_are_not_trained_and_completions_end_with_the_separator(tokenizer_folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer((tokenizer_folder / "tokenizer.json").read_bytes())
    reader = Reader(options(tokenizer_folder), tokenizer)
    records: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 =", " 4"),
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, "Add.\n\n2 2\n\n", "4"),
        ({"instruction": "Add.", "input": "", "output": "4"}, "Add.\n\n", "4"),
        ({"input": "2 + 2 =", "output": " 4"}, "2 + 2 =", " 4"),
    ]
    for record, prompt, completion in records:
        tokens, trained = reader.example(record, "here")
        learned = [token for token, is_trained in zip(tokens, trained, strict=True) if is_trained]
        assert tokenizer.decode(tokens) == prompt + completion
        assert tokenizer.decode(learned) == completion and learned[-1] == 1 == tokens[-1]
    templated = Reader(options(tokenizer_folder, is_for_prompts=True), tokenizer)
    as_chat = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": " 4"}]
    assert templated.example(records[0][0], "here") == reader.example({"messages": as_chat}, "here")


@pytest.mark.parametrize(
    ("prompt", "completion"), [("2 + 2 = ", "7"), ("2 + 2 =", " "), ("say:  ", " It is\n "), (" ", "q")]
)
def test_spaces_are_those_of_their_text_where_a_tokenizer_trims_them(
    tmp_path: Path, prompt: str, completion: str
) -> None:
    """GPT-2's and GPT-NeoX's trim spaces from the characters that a token stands for."""
    from tokenizers import processors

    tokenizer = processed(tmp_path, processors.ByteLevel(trim_offsets=True))
    tokens, trained = Reader(PLAIN, tokenizer).example({"prompt": prompt, "completion": completion}, "here")
    want = tokenizer.encode([prompt, completion])
    assert tokens == [*want[0], *want[1], 1]
    assert trained == [False] * len(want[0]) + [True] * (len(want[1]) + 1)


def test_plain_texts_have_the_tokens_that_the_tokenizer_puts_before_a_text_and_one_end(tmp_path: Path) -> None:
    """As TRL prepares prompts and completions."""
    from tokenizers import processors

    begin, end = SPECIAL[:2]
    processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer = processed(tmp_path, processor)
    reader = Reader(PLAIN, tokenizer)
    for prompt, completion in (("2 + 2 =", " 4"), ("2 + 2 =", " 4" + end), ("", "4"), (begin + "2 =", " 4"), (end, "")):
        tokens, trained = reader.example({"prompt": prompt, "completion": completion}, "here")
        text = prompt.removeprefix(begin) + completion.removesuffix(end)
        assert tokens == [0, *tokenizer.encode([text])[0], 1]
        assert trained == [at >= 1 + len(tokenizer.encode([text.removesuffix(completion.removesuffix(end))])[0])
                           for at in range(len(tokens))]  # fmt: skip
    chat = Reader(PLAIN._replace(template=TemplateSource("{{ messages[0].content }}", {}, "own")), tokenizer)
    assert chat.example({"messages": [{"role": "user", "content": "x"}]}, "here").tokens == tokenizer.encode(["x"])[0]


def test_a_sentencepiece_model_takes_special_tokens_of_a_template_as_tokens(tmp_path: Path) -> None:
    train(["question and answer, é 漢 " * 3] * 50, 300, tmp_path / "m.model", 1)
    tokenizer = open_tokenizer(str(tmp_path / "m.model"))
    text = "<s>answer é漢😀</s> and"
    ids, spans = tokenizer.trace(text)
    assert ids[0] == 1 and ids.count(2) == 1 and tokenizer.decode(ids) == "answer é漢😀 and"
    assert "".join(text[start:stop] for start, stop in spans) == text
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["question and answer, é 漢 " * 3] * 50), model_writer=(model := io.BytesIO()),
        vocab_size=300, model_type="bpe", byte_fallback=True, bos_id=-1, eos_id=-1, add_dummy_prefix=False,
        minloglevel=2,
    )  # fmt: skip
    without = SentencePieceTokenizer(model.getvalue())
    assert without.trace("question <s>").ids == without.encode_prompt("question <s>")


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_of_a_chat_that_a_sentencepiece_model_lacks_are_named(tmp_path: Path, file: str) -> None:
    path = str(tmp_path / "tokenizer.model")
    train(["question and answer, é 漢 " * 3] * 50, 300, Path(path), 1)
    added: Any = {"<|im_start|>": 300, "<s>": 1, "<|elsewhere|>": 301}
    if file != "added_tokens.json":
        added = {"added_tokens_decoder": {id: {"content": name} for name, id in added.items()}}
    (tmp_path / file).write_text(json.dumps(added))
    (tmp_path / "chat_template.jinja").write_text("<s>{{ '<|im_start|>' }}")
    source, tokenizer = find_template("", path, {}), open_tokenizer(path)
    assert source
    with pytest.raises(UserError, match=r"has no token <\|im_start\|>, which .*give a tokenizer.json"):
        check_tokens(source, path, tokenizer.find_token)
    check_tokens(source._replace(text="<s>"), path, tokenizer.find_token)


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_a_chat_has_the_tokens_of_a_prompt_where_a_model_adds_a_space_to_a_text(normalization: str) -> None:
    """Llama 2's model: the space is added to the beginning of a text, not after each special token in it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["question and answer, [INST] é 漢 " * 3] * 50), model_writer=model, vocab_size=310,
        model_type="bpe", byte_fallback=True, normalization_rule_name=normalization, remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(model.getvalue())
    assert tokenizer.adds_space()
    for text in ("<s>[INST] question [/INST] answer</s>", "and<s> é</s>\nand</s></s>", "question"):
        ids, spans = tokenizer.trace(text)
        assert ids == tokenizer.encode_prompt(text)
        assert "".join(text[start:stop] for start, stop in spans) == text


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "x"}, "its fields are text"),
        ({"instruction": "x", "input": ["y"], "output": "z"}, "not both text"),
        ({"messages": [{"role": "user", "content": PARTS}]}, "the content of message 0 is a list, which .* as it is"),
        ({"prompt": "x", "completion": None}, "not both text"),
        ({"prompt": [{"role": "user", "content": "x"}], "completion": "y"}, "not both text"),
        ({"prompt": CHAT, "completion": []}, "completion is not a list of objects"),
        ({"messages": "x"}, "not a list of objects with role and content"),
        ({"messages": [{"role": "user"}]}, "not a list of objects with role and content"),
        ({"messages": [*CHAT, {**EMPTY, "tool_calls": []}]}, "message 5 of messages, assistant's, has neither content"),
        ({"prompt": CHAT, "completion": [{**EMPTY, "name": "model", "id": "m1", "weight": 1}]}, "neither content nor"),
        ({"messages": [*CHAT[:-1], CHAT[-1] | {"weight": 0}]}, "message 4 has weight 0, which .* does not read: give"),
        ({"messages": CHAT, "tools": "f()"}, "tools is not a list of objects"),
        ({"messages": CHAT, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is not followed"),
    ],
)
def test_a_record_that_is_no_example_is_named(tokenizer_folder: Path, record: Mapping[str, Any], expected: str) -> None:
    reader = Reader(options(tokenizer_folder), HuggingFaceTokenizer((tokenizer_folder / "tokenizer.json").read_bytes()))
    with pytest.raises(UserError, match=f"^a.jsonl, byte 7: .*{expected}"):
        reader.example(record, "a.jsonl, byte 7")


def test_a_template_may_read_content_in_parts(tokenizer_folder: Path) -> None:
    template = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    rendered = chat_template(tokenizer_folder, template).render([{"role": "user", "content": PARTS}])
    assert rendered.text == "What is it?"


LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + "
    "' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_rows_of_parquet_have_the_keys_of_their_own_objects(tmp_path: Path) -> None:
    calls = [{"arguments": {name: 1}} for name in ("a", "content")]
    rows = [{"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]
    write_table(tmp_path / "a.parquet", pa.Table.from_pylist(rows), "parquet")
    (shard,) = divide([tmp_path / "a.parquet"], [])
    assert [record for record, _ in read_records(shard)] == rows


# Without a prompt for an answer; of messages in parts and with calls of tools
UNPROMPTED = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}{{ message['tool_calls'] or '' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
)


def test_a_template_whose_answers_cannot_be_told_must_mark_them(tokenizer_folder: Path) -> None:
    """Without a prompt for an answer, the name of its role belongs to what follows the messages before it."""
    with pytest.raises(UserError, match="not a chat template"):
        chat_template(tokenizer_folder, "{% for %}")
    (file := tokenizer_folder / "latin1.jinja").write_bytes(b"{{ '\xe4' }}")
    with pytest.raises(UserError, match=r"latin1\.jinja: not a chat template \(.*\): convert it to UTF-8"):
        find_template(str(file), str(tokenizer_folder / "tokenizer.json"), {})
    file.write_text("\ufeff" + LLAMA2)  # as editors of Windows write it
    marked = find_template(str(file), str(tokenizer_folder / "tokenizer.json"), {})
    assert marked and marked.text == LLAMA2
    for template, message in (
        ("{{ messages[-1]['content'] }}", "mark the assistant's part of the template with {% generation %}"),
        (LLAMA3.replace(PROMPT, ""), r"<\|start_header_id\|>assistant.* before message 2 would be trained, too: mark"),
    ):
        with pytest.raises(UserError, match=message):
            chat_template(tokenizer_folder, template).render(CHAT)
    for answer in ({"content": [{"type": "text", "text": "x"}]}, {"content": [], "tool_calls": [{"name": "f"}]}):
        with pytest.raises(UserError, match="'<assistant>' before message 0 would be trained, too: mark"):
            chat_template(tokenizer_folder, UNPROMPTED).render([{"role": "assistant", **answer}])
    unprompted = chat_template(tokenizer_folder, LLAMA2).render([*CHAT[1:4], {"role": "assistant", "content": ""}])
    trained = [unprompted.text[start:stop] for start, stop in unprompted.trained]
    assert trained == [f" {CHAT[2]['content']} {SPECIAL[1]}", f"  {SPECIAL[1]}"]


@pytest.mark.parametrize("is_folder", [True, False])
def test_tools_are_refused_where_transformers_takes_another_template_for_them(tmp_path: Path, is_folder: bool) -> None:
    templates = {"default": LLAMA2, "tool_use": "{{ tools }}" + LLAMA2}
    if is_folder:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
        (tmp_path / "chat_template.jinja").write_text(LLAMA2)
    else:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "own.jinja").write_text(LLAMA2)
    source = find_template("", str(tmp_path / "tokenizer.json"), {"bos_token": "<s>", "eos_token": "</s>"})
    own = find_template(str(tmp_path / "own.jinja"), str(tmp_path / "tokenizer.json"), source.special if source else {})
    assert source and own
    with pytest.raises(UserError, match=r"has another template, tool_use, for records with tools: .*--chat_template=F"):
        ChatTemplate(source).render(CHAT[1:3], {"tools": TOOLS})
    assert ChatTemplate(source).render(CHAT[1:3]) == ChatTemplate(own).render(CHAT[1:3], {"tools": TOOLS})


def test_a_template_that_is_no_text_or_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"default": LLAMA2}}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: its chat_template is of type dict, no text"):
        find_template("", str(tmp_path / "tokenizer.json"), {})
    config = {"chat_template": ["default", {"name": "default", "template": LLAMA2}], "bos_token": {"id": 1}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    source = find_template("", str(tmp_path / "tokenizer.json"), {})
    assert source and (source.text, source.special) == (LLAMA2, {})
    for text in ("{{ messages[0].content.index('</think>') }}", "{{ 1 / 0 }}", "{{ range(10 ** 9) | list }}"):
        with pytest.raises(UserError, match=r"^own cannot render the messages: "):
            ChatTemplate(TemplateSource(text, {}, "own")).render(CHAT[1:3])


def test_special_tokens_have_the_names_of_older_folders(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "tokenizer.json"
    write_byte_level(path, ["one two"], 300, SPECIAL)
    older = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[4]}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "chat_template": LLAMA2}
    for more in ({}, {"bos_token": SPECIAL[2], "added_tokens_decoder": {}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | more))
        source, theirs = find_template("", str(path), {}), AutoTokenizer.from_pretrained(tmp_path)
        assert source and source.special == {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}


# ---- Packing


def packed(examples: list[Example], **changes: Any) -> tuple[list[PackedRow], dict[str, int]]:
    rows: list[PackedRow] = []
    packer = Packer(PLAIN._replace(**changes), rows.append)
    for number, example in enumerate(examples):
        packer.add(example, f"record {number}")
    packer.close()
    return rows, dict(packer.counts)


def drawn(count: int, longest: int) -> list[Example]:
    """Examples of numbered tokens with a trained second half."""
    sizes = np.random.default_rng(3).integers(2, longest + 1, count).tolist()
    ends = np.cumsum(sizes) + 10
    return [
        Example(list(range(end - size, end)), [place >= (size + 1) // 2 for place in range(size)])
        for end, size in zip(ends.tolist(), sizes, strict=True)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_whole_in_one_row_and_begins_at_position_0(packing: bool) -> None:
    examples = drawn(500, LENGTH)
    rows, counts = packed(examples, packing=packing)
    assert rows == packed(examples, packing=packing)[0]  # deterministic
    assert {len(column) for row in rows for column in (row.tokens, row.labels, row.positions)} == {LENGTH}
    found = []
    for row in rows:
        begins = [place for place, position in enumerate(row.positions) if position == 0]
        for first, last in zip(begins, [*begins[1:], LENGTH], strict=True):
            assert row.positions[first:last] == list(range(last - first))
            labels = row.labels[first:last]
            if row.tokens[first:last] != [1] * (last - first):  # the rest of a row
                found.append(Example(row.tokens[first:last], [label != IGNORED for label in labels]))
            else:
                assert set(labels) == {IGNORED}
    assert sorted(found) == examples
    tokens = sum(len(example.tokens) for example in examples)
    assert len(rows) == len(examples) if not packing else len(rows) * LENGTH < 1.05 * tokens
    assert counts == {"examples in rows": 500, "trained tokens": sum(sum(example.trained) for example in examples)}


def test_longer_examples_are_refused_split_or_dropped_and_counted() -> None:
    examples = drawn(40, 3 * LENGTH)
    longer = [example for example in examples if len(example.tokens) > LENGTH]
    with pytest.raises(UserError, match=r"record \d+: \d+ tokens, more than a row of 16: raise --seq_length, or give"):
        packed(examples)
    rows, counts = packed(examples, longer="drop")
    assert counts["examples longer than a row: drop"] == len(longer)
    assert counts["examples in rows"] == 40 - len(longer)
    rows, counts = packed(examples, longer="split")
    trained = {token for row in rows for token in row.labels} - {IGNORED}
    assert counts["examples longer than a row: split"] == len(longer)
    # of a piece, the first token has nothing that predicts it
    firsts = {example.tokens[at] for example in longer for at in range(LENGTH, len(example.tokens), LENGTH)}
    assert trained == {t for e in examples for t, is_trained in zip(*e, strict=True) if is_trained} - firsts
    assert "examples or pieces without a trained token left out" in counts


# ---- Shards with labels


@pytest.mark.parametrize("store", ["arrow", "stream", "parquet"])
@pytest.mark.parametrize("name", ["labels", "loss_mask"])
def test_labels_are_those_of_the_column_one_place_earlier(tmp_path: Path, store: str, name: str) -> None:
    random.seed(4)
    tokens = [[random.randrange(2, 60_000) for _ in range(LENGTH)] for _ in range(20)]
    masks = [[int(place > 3 and random.random() < 0.5) for place in range(LENGTH)] for _ in range(20)]
    labels = [[t if m else IGNORED for t, m in zip(*row, strict=True)] for row in zip(tokens, masks, strict=True)]
    columns = {"tokens": pa.array(tokens, pa.list_(pa.uint16())), name: masks if name == "loss_mask" else labels}
    write_table(tmp_path / "data" / "s0.shard", pa.table(columns), store, rows=3)
    stream = open_stream(settings(tmp_path / "data", seq_length=LENGTH, sep_token=-1, global_batch_size=5))
    want = dict(zip(map(tuple, tokens), labels, strict=True))
    for step in range(8):
        batch = stream.batch(step)
        for row, got in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
            assert got == [*want[tuple(row)][1:], IGNORED]  # nothing predicts the first token of the next row
    trained = sum(map(sum, masks)) / (20 * LENGTH)
    note = f"data: {trained:.1%} of the tokens are trained, examples continue in the next row"
    assert note in notes_on(stream)


def test_labels_of_examples_of_any_length_survive_the_cutting_into_rows(tmp_path: Path) -> None:
    lengths = [3, 40, 1, 7, 16, 25] * 10
    documents = [
        list(range(first, first + size)) for first, size in zip(range(100, 60_000, 100), lengths, strict=False)
    ]
    masks = [[int(token % 3 == 0) for token in document] for document in documents]
    write_table(tmp_path / "data" / "s.arrow", pa.table({"tokens": documents, "loss_mask": masks}))
    stream = open_stream(settings(tmp_path / "data", seq_length=LENGTH, bos_token=3, reset_attention_mask=True))
    for step in range(200):
        batch = stream.batch(step)
        for label, following in zip(batch["labels"][0], [*batch["tokens"][0, 1:], None], strict=True):
            assert label in (IGNORED, following) or following is None
            if following is not None:  # 1 is the separator, 3 the token before every document
                is_trained = following > 3 and following % 3 == 0 and following % 100 > 0
                assert (label != IGNORED) == (following == 1 or is_trained)


def test_boundaries_of_packed_examples_are_segments_and_resuming_repeats_them(tmp_path: Path) -> None:
    drawn_sizes = np.random.default_rng(1).integers(2, 8, (12, 2))
    rows = [[(list(range(2, 2 + size)), 1) for size in sizes] for sizes in drawn_sizes.tolist()]
    write_instructions(tmp_path / "data", rows, LENGTH)
    asked = {"reset_attention_mask": True, "reset_position_ids": True, "sep_token": -1, "global_batch_size": 4}
    config = settings(tmp_path / "data", seq_length=LENGTH, **asked)
    stream = open_stream(config)
    for step in range(6):
        batch = stream.batch(step)
        columns = (batch[name] for name in ("tokens", "segments", "positions"))
        for tokens, segments, positions in zip(*columns, strict=True):
            sizes = np.bincount(segments)[1:]
            assert sizes.tolist() in [[*each, LENGTH - sum(each)] for each in drawn_sizes.tolist()]
            assert positions.tolist() == [place for size in sizes for place in range(size)]
            assert (tokens[positions == 0][:2] == 2).all()
    resumed = open_stream(config, state=stream.state(3))
    halves = [open_stream(config, rank, 2) for rank in range(2)]
    for step in range(3):
        for name, array in stream.batch(step + 3).items():
            assert np.array_equal(array, resumed.batch(step)[name])
            assert np.array_equal(array, np.concatenate([half.batch(step + 3)[name] for half in halves]))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"labels": [[5, 6, 7, 8]]}, "labels are not shifted"),
        ({"labels": [[4, 5, 6]]}, "not one entry for each token"),
        ({"labels": [[4, 5, 6, None]]}, "nulls"),
        ({}, "no column of labels, but other shards"),
    ],
)
def test_labels_that_do_not_belong_to_their_tokens_are_refused(
    tmp_path: Path, columns: dict[str, Any], expected: str
) -> None:
    for name, more in (("a", {"labels": [[4, 5, 6, 7]]}), ("s", columns)):
        write_table(tmp_path / "data" / f"{name}.arrow", pa.table({"tokens": [[4, 5, 6, 7]], **more}))
    with pytest.raises(UserError, match=f"s.arrow: .*{expected}"):
        open_stream(settings(tmp_path / "data"))


# ---- The command


@pytest.mark.slow
def test_prepared_chats_train_their_answers_alone(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    drawn_words = random.Random(2)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(200):
            answer = " ".join(drawn_words.choices(words, k=drawn_words.randrange(1, 6)))
            asked = f"ask {number}" + " <|eot_id|>" * (number in (3, 5))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"say {answer}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    flags = [f"--input={tmp_path / 'chats.jsonl'}", f"--tokenizer={tokenizer_folder / 'tokenizer.json'}", "--sft"]
    flags += [f"--output={tmp_path / 'out'}", "--seq_length=128", "--valid_every=10", "--processes=1"]
    assert prepare.main(flags) == 0
    printed = capsys.readouterr().out
    assert "200 examples in rows" in printed and "note: " not in printed
    assert "\n2 examples with names of special tokens in their text, which became these tokens\n" in printed
    given = (tmp_path / "out" / "flags.txt").read_text().split()
    chosen = {**dict(word[2:].split("=", 1) for word in given), "index_dir": str(tmp_path / "index")}
    batch = open_stream(configure({**chosen, "global_batch_size": 2})).batch(0)
    tokenizer = open_tokenizer(str(tokenizer_folder / "tokenizer.json"))
    for row in range(2):
        for segment in range(1, batch["segments"][row].max()):  # the last one fills the row
            labels = batch["labels"][row, batch["segments"][row] == segment]
            assert tokenizer.decode(labels[labels != IGNORED].tolist()).startswith("say ")
    command = [*given, f"--index_dir={tmp_path / 'index'}"]
    assert inspect_data.main([*command, "--step=0", "--rows=1", "--global_batch_size=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(">>>say ") == shown.count("<<<") == shown.count("ask ") > 1
    with pytest.raises(UserError, match="rows of 128 tokens, not seq_length=64: give --seq_length=128"):
        open_stream(configure({**chosen, "seq_length": "64"}))
    with pytest.raises(UserError, match="rows of whole examples have no place for --bos_token"):
        open_stream(configure({**chosen, "bos_token": 3}))
    other = [flags[1], f"--output={tmp_path / 'documents'}", "--processes=1"]
    assert prepare.main([flags[0], *other, "--sft", "--seq_length=4"]) == 2  # an example is longer
    (tmp_path / "a.txt").write_text("one two three\n" * 100)
    assert prepare.main([f"--input={tmp_path / 'a.txt'}", *other]) == 0
    assert not (tmp_path / "documents" / "tokenizer_config.json").exists()  # whose template those chats had


def test_the_exported_tokenizer_has_the_template_that_the_data_were_prepared_with(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (template := tmp_path / "own.jinja").write_text(LLAMA3)
    flags = [f"--input={tmp_path / 'chats.jsonl'}", f"--tokenizer={tokenizer_folder / 'tokenizer.json'}", "--sft"]
    flags += [f"--output={tmp_path / 'out'}", "--seq_length=256", "--processes=1", f"--chat_template={template}"]
    flags += ["--separator=4"]
    assert prepare.main(flags) == prepare.main(flags) == 0
    template.write_text(MARKED)  # the same command, which would not prepare the same
    assert prepare.main(flags) == 2
    assert "prepared from something else (template changed" in capsys.readouterr().err
    ids, files = export_tokenizer(str(tmp_path / "out" / "tokenizer.json"))
    (tmp_path / "exported").mkdir()
    for name, content in files.items():
        (tmp_path / "exported" / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    reader = Reader(options(tokenizer_folder), open_tokenizer(str(tokenizer_folder / "tokenizer.json")))
    assert theirs.apply_chat_template(CHAT)["input_ids"] == reader.example({"messages": CHAT}, "here").tokens
    assert ids["eos_token_id"] == theirs.eos_token_id
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[4], "chat_template": LLAMA3}  # as Llama 3's chat models
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(config))
    ids, _ = export_tokenizer(str(tmp_path / "out" / "tokenizer.json"))
    assert ids["eos_token_id"] == [1, 4]  # transformers ends an answer at either
