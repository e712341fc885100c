"""The lines of the overview on the data, from what a stream knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretraining.config.errors import counted
from pretraining.data.datasets import Dataset, SpecialTokens


def data_lines(facts: Mapping[str, Any]) -> str:
    """Return one line per dataset and per note on how they are read. facts: see data.stream.Stream."""
    return "\n".join(f"{'data':<14} {line}" for line in [*map(_dataset, facts["datasets"]), *data_notes(facts)])


def _dataset(dataset: Mapping[str, Any]) -> str:
    if dataset["tokens"] is None:
        return "counters, deterministic (use_dummy_dataset)" if dataset["name"] == "dummy" else dataset["name"]
    counts = ", ".join(counted(dataset[f"{noun}s"], noun) for noun in ("token", "document", "shard"))
    epochs = "" if dataset["epochs"] is None else f", {dataset['epochs']:.3g} epochs in this run"
    return f"{dataset['name']}: {counts}, {dataset['share']:.1%} of the mixture{epochs}"


def data_notes(facts: Mapping[str, Any]) -> list[str]:
    """Return lines on how the data are read; none for data of one's own and for counters."""
    if "opened" not in facts:
        return []
    lines = [facts["source"].note, _describe_separator(facts["special"])]
    for dataset in facts["opened"]:
        lines += [_describe_vocabulary(dataset, facts["vocabulary"]), _describe_labels(dataset)]
    return list(filter(None, lines))


def _describe_vocabulary(dataset: Dataset, rows: int) -> str:
    """Return a line if the model's vocabulary has ids that the tokenizer of the data does not have; otherwise ""."""
    size = dataset.description.get("vocab_size")
    if not isinstance(size, int) or size >= rows:
        return ""
    return f"{dataset.name}: its tokenizer has {size:,} ids, the model's vocabulary {rows:,}: the rest is never trained"


def _describe_labels(dataset: Dataset) -> str:
    """Return a line with the share of trained tokens; empty for a dataset without labels."""
    if all(shard.trained is None for shard in dataset.shards):
        return ""
    trained = sum(shard.trained or 0 for shard in dataset.shards) / sum(shard.token_count for shard in dataset.shards)
    rows = "in rows of whole examples" if "seq_length" in dataset.description else "examples continue in the next row"
    return f"{dataset.name}: {trained:.1%} of the tokens are trained, {rows}"


def _describe_separator(special: SpecialTokens) -> str:
    """Return a line with the separator and what set it."""
    token = "no separator between documents" if special.eos is None else f"separator {special.eos} after every document"
    return f"{token} ({special.origin})"
