"""Evaluation during training: losses by dataset, bits per byte, and the same figures on every mesh."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("pretraining.extensions.held_out")
pytest.importorskip("pretraining.extensions.questions")
pytest.importorskip("pretraining.extensions.tokenizers")

from main_training import CONFIGURATION, EXTENSIONS, train
from pretraining import TrainConfig
from pretraining.checkpoint.compatibility import saved_config
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.config.extension import Extension, Watcher
from pretraining.data import IGNORED, open_stream
from pretraining.extensions.checkpoints import read_tensors
from pretraining.extensions.held_out.figures import HeldOut, held_out_figures
from pretraining.extensions.questions.choices import Request, request_batch
from pretraining.extensions.tokenizers.tokenizer import open_tokenizer
from pretraining.extensions.tokenizers.tokenizer import train as train_tokenizer
from pretraining.models.llama import BatchInputs, Llama
from pretraining.monitor.metrics import read_metrics
from pretraining.parallel.engine import Batch, StepResult
from pretraining.run.training_run import TrainingRun
from pretraining.tools.evaluate import Scorer, main
from pretraining.tools.generate import load_model
from tests.data.corpora import corpus
from tests.end_to_end.small import MODEL
from tests.parallel.launch import ALONE, environment, launched
from tests.processes import call, words

TEXT = "the quick brown fox jumps over a lazy dog and äts größe ßweets in cold winter nights"
WORDS = re.findall(r"\w+", TEXT)
DATASETS = {"prose": 60, "lists": 25}  # documents of each
SIZES: dict[str, Any] = {**MODEL, "vocab_size": 300, "global_batch_size": 8, "batch_size": 2, "num_steps": 4}


class Runs(NamedTuple):
    """A run by one process."""

    flags: dict[str, Any]
    model: Llama
    alone: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run over data of two datasets, validated with all of the held-out documents."""
    root = tmp_path_factory.mktemp("held_out")
    texts = {name: [sentence(name, n) for n in range(count)] for name, count in DATASETS.items()}
    train_tokenizer([text for some in texts.values() for text in some], 300, root / "tokenizer.model", 1)
    tokenizer = open_tokenizer(str(root / "tokenizer.model"))
    assert tokenizer.separator is not None
    for name, some in texts.items():
        corpus(root / "data", tokenizer.encode(some), name=name)
    flags = {
        **SIZES,
        "data_path": root / "data",
        "valid_data_path": root / "data",
        "index_dir": root / "index",
        "tokenizer_path": root / "tokenizer.model",
        "sep_token": tokenizer.separator,
        "learning_rate": 1e-2,
        "val_interval": 4,
        "val_steps": -1,
        "drop_last_val": False,
        "mixed_precision": False,
        "engine": "torch",
        "device": "cpu",
        "sharding_strategy": "fsdp",
        "report_interval": 1,
        "eval_tasks": root / "words.jsonl",
        "eval_interval": 4,
    }
    questions = [{"context": f"{a} {b}", "choices": [c, a, f"{b} {c}"], "answer": n % 3}
                 for n, (a, b, c) in enumerate(zip(WORDS, WORDS[1:], WORDS[2:], strict=False))]  # fmt: skip
    (root / "words.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    alone = train({**flags, "log_dir": root / "alone"})
    checkpoint = open_checkpoint(root / "alone" / "checkpoints" / "step_4")
    model = load_model(saved_config(checkpoint.facts.config, CONFIGURATION), read_tensors(checkpoint, is_weight))
    return Runs({name: str(value) for name, value in flags.items()}, model, alone.records, root)


def sentence(name: str, number: int) -> str:
    """A document of a dataset; they use different words."""
    return " ".join(
        WORDS[(number * 7 + place * (1 + number % 3)) % (16 if name == "prose" else 5)] for place in range(40)
    )


def validation(records: Sequence[dict[str, Any]], kind: str = "val_loss") -> dict[str, Any]:
    """The deterministic figures of the record that has this one."""
    (record,) = (record for record in records if kind in record)
    return {name: value for name, value in record.items() if not name.endswith("_seconds")}


def by_hand(runs: Runs, name: str, tokens: int) -> tuple[float, int]:
    """The summed loss of the first `tokens` trained tokens of a dataset, and the bytes of their text."""
    config = TrainConfig(**{**SIZES, "valid_datasets": name, "global_batch_size": 1, "drop_last_val": False,
        "data_path": runs.flags["data_path"], "valid_data_path": runs.flags["valid_data_path"],
        "index_dir": runs.flags["index_dir"], "sep_token": int(runs.flags["sep_token"])})  # fmt: skip
    stream, tokenizer = open_stream(config, split="valid"), open_tokenizer(runs.flags["tokenizer_path"])
    loss, count = 0.0, 0
    for step in range(tokens // config.seq_length):
        batch = {key: torch.from_numpy(value).long() for key, value in stream.batch(step).items()}
        with torch.no_grad():
            logits = runs.model(batch["tokens"])
        loss += torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="sum").item()
        text = tokenizer.decode([token for token in batch["labels"][0].tolist() if token != IGNORED])
        count += len(text.encode()) if "\ufffd" not in text else 0
    return loss, count


@pytest.mark.slow
def test_each_dataset_has_its_loss_and_the_total_is_weighted_by_tokens(runs: Runs) -> None:
    record = validation(runs.alone)
    total = 0.0
    for name in DATASETS:
        tokens = record[f"val_tokens/{name}"]
        loss, size = by_hand(runs, name, int(tokens))
        assert record[f"val_loss/{name}"] == pytest.approx(loss / tokens, rel=1e-5)
        assert record[f"val_bits_per_byte/{name}"] == pytest.approx(loss / math.log(2) / size, rel=0.01)
        total += loss
    assert record["val_tokens"] == sum(record[f"val_tokens/{name}"] for name in DATASETS)
    assert record["val_loss"] == pytest.approx(total / record["val_tokens"], rel=1e-5)
    assert abs(record["val_loss/prose"] - record["val_loss/lists"]) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "engine"), [(2, "torch"), (ALONE, "xla")])
@pytest.mark.exhaustive
def test_other_meshes_and_engines_report_the_same_figures(
    runs: Runs, processes: int, engine: str, tmp_path: Path
) -> None:
    """Of two processes that shard the parameters, and of four devices of the other engine."""
    settings = {**runs.flags, "engine": engine, "log_dir": tmp_path} | ({"device": None} if engine == "xla" else {})
    command = launched(processes, "main_training.py", *words(settings))
    call(command, env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4"))
    records = read_metrics(tmp_path / "metrics.jsonl")
    for kind in ("val_loss", "eval_acc/words"):
        alone, other = (validation(of, kind) for of in (runs.alone, records))
        assert other.keys() == alone.keys()
        for name, value in alone.items():
            assert other[name] == pytest.approx(value, rel=1e-4), name


class Stop(Watcher):
    """Sends SIGTERM after a step, before what follows it, or in a batch of an evaluation, by its number."""

    def __init__(self, step: int, number: int, run: TrainingRun) -> None:
        self._step = step
        evaluate, numbers = run.trainee.evaluate, count(1)

        def evaluate_batch(batch: Batch) -> StepResult:
            if next(numbers) == number:
                terminate()
            return evaluate(batch)

        run.trainee.evaluate = evaluate_batch  # type: ignore[method-assign]

    def after_step(self, step: int) -> None:
        if step == self._step:
            terminate()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # a thread takes note of it


@pytest.mark.slow
def test_a_signal_ends_what_follows_a_step_and_the_next_start_makes_it(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {**runs.flags, "val_interval": 2, "eval_interval": 2, "test_steps": 4, "checkpoint_interval": 10}
    flags |= {"test_data_path": flags["valid_data_path"], "val_sanity_steps": -1, "val_steps": 4}
    whole = train({**flags, "log_dir": tmp_path / "whole"}).records
    # In the validation before the first step; after two steps; in the validation of the next start; after four;
    # in the validation, and in the test, of a complete run
    for steps, number, validations in ((0, 4, 0), (2, 0, 1), (2, 3, 1), (4, 0, 2), (4, 1, 2), (4, 6, 3)):
        stop = Extension(watch=partial(Stop, steps, number))
        stopped = train({**flags, "log_dir": tmp_path}, extensions=(stop, *EXTENSIONS))
        assert stopped.code == 128 + signal.SIGTERM
        plan = "leaving" if number else "saving and leaving"  # what no step came before is saved already
        assert f"SIGTERM: {plan}; again" in capsys.readouterr().err
        assert [record["step"] for record in stopped.records if "val_loss" in record] == [0, 2, 4][:validations]
        assert [record["step"] for record in stopped.records if "loss" in record] == list(range(1, steps + 1))
        assert not any("test_loss" in record for record in stopped.records)
    if (history := tmp_path / "starts.jsonl").exists():  # an extension's
        assert [json.loads(line)["step"] for line in history.read_text().splitlines()] == [0, 2, 2]
    ended = train({**flags, "log_dir": tmp_path})
    assert ended.code == 0
    for kind in ("loss", "val_loss", "eval_acc/words", "test_loss"):
        expected, actual = ([(record["step"], record[kind]) for record in of if kind in record]
                            for of in (whole, ended.records))  # fmt: skip
        assert actual == expected


@pytest.mark.slow
def test_questions_have_the_accuracies_of_the_checkpoint(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs.folder / "alone"), f"--tasks={runs.flags['eval_tasks']}", "--device=cpu"]) == 0
    printed = dict(line.split()[1:] for line in capsys.readouterr().out.splitlines())
    record = validation(runs.alone, "eval_acc/words")
    expected = {"step": 4, **{f"eval_{name}/words": float(value) for name, value in printed.items()}}
    assert record == pytest.approx(expected, abs=1e-5)
    assert 0 < record["eval_acc/words"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"reset_attention_mask": True, "reset_position_ids": True}])
def test_a_batch_of_one_request_has_its_likelihood(runs: Runs, fields: dict[str, bool]) -> None:
    config = TrainConfig(**{**SIZES, **fields})
    request = Request([5, 6, 7], [8, 9])
    batch = {name: torch.from_numpy(array).long() for name, array in request_batch(config, request, 3).items()}
    inputs = BatchInputs(batch.get("positions"), batch.get("segments"))
    with torch.no_grad():
        loss = runs.model.loss(batch["tokens"], batch["labels"], inputs)
    tokenizer = open_tokenizer(runs.flags["tokenizer_path"])
    ((likelihood, _),) = Scorer(runs.model, tokenizer, 1).score([request])
    assert -loss.item() == pytest.approx(likelihood, rel=1e-5)
    assert (request_batch(config, None, 3)["labels"] == IGNORED).all()


def test_a_dataset_without_trained_tokens_has_no_figures() -> None:
    figures = held_out_figures("val", {"a": HeldOut(6.0, 2.0, 3), "b": HeldOut(0.0, 0.0, 0), "c": HeldOut(2.0, 2.0, 1)})
    assert figures == pytest.approx({
        "val_loss": 2.0, "val_bits_per_byte": 2 / math.log(2), "val_tokens": 4.0,
        "val_loss/a": 3.0, "val_bits_per_byte/a": 2 / math.log(2), "val_tokens/a": 2.0,
        "val_loss/c": 1.0, "val_bits_per_byte/c": 2 / math.log(2), "val_tokens/c": 2.0,
    })  # fmt: skip
    assert held_out_figures("test", {"a": HeldOut(6.0, 2.0, None)}) == {"test_loss": 3.0}
