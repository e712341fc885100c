"""Evaluate a checkpoint on tasks, in plain PyTorch, whatever engine and mesh trained it.

    python -m pretraining.tools.evaluate RUN_DIR --tasks=hellaswag,own.jsonl [--num_fewshot=N] [--limit=N]
        [--output=FILE] [--include_path=FOLDER] [--batch_size=N] [--device=cuda] [--tokenizer_path=FILE] [--use_ema]

A task that ends with .jsonl is a file of multiple-choice questions (extensions/questions). Any other is a task of
EleutherAI's lm-evaluation-harness, which `pip install lm_eval==0.4.13` installs; its numbers are those that the harness
computes for the model that pretraining.tools.convert exports.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from main_training import CONFIGURATION
from pretraining.config.errors import UserError, counted
from pretraining.config.grammar import comma_separated
from pretraining.config.script import exit_with
from pretraining.config.training import SETTINGS
from pretraining.models.llama import Llama
from pretraining.parallel.accelerator import open_device
from pretraining.tools.arguments import ArgumentParser, at_least, ends_on_mistakes
from pretraining.tools.generate import add_checkpoint, document_borders, open_model, sample

if TYPE_CHECKING:
    from pretraining.extensions.questions.choices import Request
    from pretraining.extensions.tokenizers.tokenizer import Tokenizer

HARNESS = "lm_eval==0.4.13"
OWN = ".jsonl"
OF_HARNESS = ("num_fewshot", "limit", "include_path")  # flags that questions of one's own do not read
NO_TOKEN = "the tokenizer has no token for a context or an answer of a task, such as one of spaces: leave that out"
Results = dict[str, dict[str, float]]  # task -> metric -> value


@ends_on_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each metric of each task. Returns exit code 2 on a mistake of the user."""
    flags = parse(arguments)
    results = evaluate(flags)
    for task, metrics in results.items():
        for name, value in metrics.items():
            print(f"{task}  {name}  {value:.6g}")
    if flags.output:
        try:
            flags.output.write_text(json.dumps(results, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--output={flags.output}: cannot be written: {error.strerror}") from error
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog="python -m pretraining.tools.evaluate", allow_abbrev=False)
    parser.add_argument("--tasks", required=True, help="files *.jsonl and tasks of the harness, comma-separated")
    parser.add_argument(
        "--num_fewshot", type=int, help="examples before a question of the harness (default: the task's)"
    )
    parser.add_argument("--limit", type=at_least(1), help="questions of each task of the harness (default: all)")
    parser.add_argument("--include_path", help="folder with tasks of the harness of one's own, YAML")
    parser.add_argument("--batch_size", type=at_least(1), default=8, help="sequences at a time")
    parser.add_argument("--device", choices=SETTINGS["device"].constraint.choices, default="auto")  # type: ignore[union-attr]
    add_checkpoint(parser)
    parser.add_argument("--output", type=Path, help="file that the results are written to, as JSON")
    return parser.parse_args(arguments)


def evaluate(flags: argparse.Namespace) -> Results:
    """Return the metrics of every task. Raises UserError."""
    from pretraining.extensions.questions.choices import accuracies, open_tasks
    from pretraining.extensions.tokenizers.tokenizer import begin_texts

    if not (names := comma_separated(flags.tasks)):
        raise UserError(
            f"--tasks={flags.tasks}: names no task; give files of questions (*{OWN}) or the harness's tasks"
        )
    files = [name for name in names if name.endswith(OWN)]
    others = [name for name in names if not name.endswith(OWN)]
    given = [f"--{name}={value}" for name in OF_HARNESS if (value := getattr(flags, name)) is not None]
    if given and not others:
        raise UserError(f"{given[0]}: is for tasks of the harness, and --tasks names none; leave it out")
    if others:
        import_harness(others)
    model, tokenizer, config = open_model(flags)
    begin_texts(tokenizer, config.bos_token, print)
    end = document_borders(config, tokenizer)[1]
    scorer = Scorer(model.to(open_device(CONFIGURATION(device=flags.device))), tokenizer, flags.batch_size, end)
    results: Results = {}
    for name, task in open_tasks(",".join(files), tokenizer, scorer.longest, model.shape.vocab_size).items():
        scores = iter(scorer.score([request for choices in task.requests for request in choices]))
        results[name] = accuracies(task, [[next(scores)[0] for _ in choices] for choices in task.requests])
    if others:
        results |= run_harness(
            scorer, others, flags, harness_tokens(tokenizer, flags.tokenizer_path or config.tokenizer_path)
        )
    return results


class Scorer:
    """Log-likelihoods of texts under a model. end: an id that ends a text besides the tokenizer's separator, if any."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, batch_size: int, end: int | None = None) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.device = next(model.parameters()).device
        self.longest = model.shape.max_position_embeddings  # tokens that the model sees at a time
        self.truncated = 0  # requests of which it did not see the beginning
        self.ends = {tokenizer.separator, end}  # as eos_token_id of the export

    @torch.inference_mode()
    def score(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether its tokens are the likeliest ones.

        Of a request that is too long, the last tokens are seen. Raises UserError if not all of a continuation is.
        """
        if (most := max((len(request.continuation) for request in requests), default=0)) > self.longest:
            raise UserError(f"a task asks for {most} tokens at once, but the model sees {self.longest}: shorten them")
        if not all(request.context and request.continuation for request in requests):
            raise UserError(NO_TOKEN)
        rows = [(*request.context, *request.continuation)[-self.longest - 1 :] for request in requests]
        self.truncated += sum(
            len(row) < len(request.context) + len(request.continuation)
            for row, request in zip(rows, requests, strict=True)
        )
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            width = len(rows[chosen[0]]) - 1
            padded = [[*rows[number][:-1], *[0] * (width + 1 - len(rows[number]))] for number in chosen]
            logits = self.model(torch.tensor(padded, device=self.device))  # [B, T, V]
            for row, number in zip(logits, chosen, strict=True):
                results[number] = _likelihood(row, rows[number], len(requests[number].continuation))
        return results

    def continue_text(self, tokens: list[int], until: Sequence[str], count: int) -> str:
        """Return the text of the likeliest tokens after `tokens`, at most `count`, until one of the texts `until`.

        Names of special tokens may be such a text. Raises UserError if there is no text, or no room for it.
        """
        if count >= self.longest:
            remedy = "give a smaller max_gen_toks in its generation_kwargs"
            raise UserError(f"a task generates {count} tokens, but the model sees {self.longest}: {remedy}")
        if not (tokens := tokens[-(self.longest - count) :]):
            raise UserError(NO_TOKEN)
        added: list[int] = []
        likeliest = sample(self.model, tokens, self.tokenizer.vocab_size, self.longest, lambda row: int(row.argmax()))
        for token in likeliest:
            if token in self.ends or len(added) == count:
                break
            added.append(token)
            text = self.tokenizer.decode(added, named=True)
            if any(stop in text for stop in until):
                break
        written = self.tokenizer.decode(added)
        return min((written.split(stop)[0] for stop in until), key=len, default=written)


def _likelihood(logits: Tensor, row: Sequence[int], count: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last `count` tokens of `row`, and whether they are likeliest; logits [T, V]."""
    predicted = logits[len(row) - 1 - count : len(row) - 1].float()  # [count, V]
    target = torch.tensor(row[-count:], device=logits.device)
    chosen = predicted.log_softmax(-1).gather(-1, target[:, None])
    return chosen.sum().item(), bool((predicted.argmax(-1) == target).all())


# ---- lm-evaluation-harness


def import_harness(tasks: Iterable[str]) -> Any:
    """Return the package lm_eval. Raises UserError if it is not installed."""
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        remedy = f"pip install {HARNESS}, or give files of questions (*{OWN})"
        raise UserError(f"--tasks={','.join(tasks)} needs lm-evaluation-harness: {remedy}") from error
    return lm_eval


def harness_tokens(tokenizer: Tokenizer, path: str) -> dict[str, int]:
    """Return the ids of the exported tokenizer's "bos_token" and "eos_token", if it has them."""
    from pretraining.tools.prepare.chat import find_template, named_tokens

    template = find_template("", path, tokenizer.special)  # whose names the export has
    names = template.special if template else tokenizer.special
    ids = {name: tokenizer.find_token(names[name]) for name in ("bos_token", "eos_token") if name in names}
    if "bos_token" not in ids and (start := named_tokens(path).get("bos_token")):
        id = tokenizer.find_token(start)
        ids |= {"bos_token": id} if id in tokenizer.named else {}
    ids |= {} if tokenizer.start is None else {"bos_token": tokenizer.start}
    return {name: id for name, id in ({"eos_token": tokenizer.separator} | ids).items() if id is not None}


def run_harness(scorer: Scorer, tasks: list[str], flags: argparse.Namespace, special: Mapping[str, int]) -> Results:
    """Return the metrics of tasks of lm-evaluation-harness. Raises UserError for a task that it does not have."""
    lm_eval = import_harness(tasks)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=flags.include_path)
    if missing := [name for name in tasks if not manager.match_tasks([name])]:
        raise UserError(f"--tasks={','.join(missing)}: lm-evaluation-harness has no such task; see --include_path")
    found = lm_eval.simple_evaluate(
        model=harness_model(scorer, special),
        tasks=tasks,
        num_fewshot=flags.num_fewshot,
        limit=flags.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
    )
    if scorer.truncated:
        print(f"note: {counted(scorer.truncated, 'request')} longer than {scorer.longest} tokens: the last were read")
    results: Mapping[str, Mapping[str, Any]] = found["results"]
    return {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in results.items()
    }


def harness_model(scorer: Scorer, special: Mapping[str, int]) -> Any:
    """Return the model as the harness calls it. special: see `harness_tokens`."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    from pretraining.extensions.questions.choices import Request

    end = special.get("eos_token")
    start = special.get("bos_token", end)
    start_name, end_name = ("" if id is None else scorer.tokenizer.decode([id], named=True) for id in (start, end))

    class CheckpointModel(TemplateLM):  # type: ignore[misc]
        """Follows the harness's own class for exported models, HFLM."""

        eot_token_id = end
        prefix_token_id = start
        tokenizer_name = "run"

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            has_start = bool(start_name) and string.startswith(start_name)
            return scorer.tokenizer.encode_prompt(string, surrounded=add_special_tokens is not False and not has_start)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return scorer.score([Request(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                tokens = self.tok_encode(request.args[0])
                windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, scorer.longest, context_len=1)
                pairs = [Request(*utils.make_disjoint_window(window)) for window in windows]
                totals.append(sum(likelihood for likelihood, _ in scorer.score(pairs)))
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts = []
            for request in requests:
                context, options = request.args[0], normalize_gen_kwargs(request.args[1])
                if options["do_sample"] and options.get("temperature", 1.0) > 0:
                    raise UserError("a task samples its answers; only those with the likeliest tokens can be evaluated")
                stops = [stop for stop in (*options["until"], end_name) if stop]
                # HFLM knows the beginning of this text by the tokenizer's bos_token alone
                tokens = self.tok_encode(context) if "bos_token" in special else scorer.tokenizer.encode_prompt(context)
                texts.append(scorer.continue_text(tokens, stops, options["max_gen_toks"]))
            return texts

    return CheckpointModel()


if __name__ == "__main__":
    exit_with(main)
