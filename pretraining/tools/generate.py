"""Sample text from a run, in plain PyTorch on the CPU, whatever engine and mesh trained it.

    python -m pretraining.tools.generate RUN_DIR --prompt=TEXT [--max_new_tokens=N] [--temperature=T] [--top_k=K]
        [--seed=S] [--use_ema] [--chat]

There is no cache of keys and values: every token recomputes its context, which is fast enough for models of a size
that a CPU trains, and keeps the model free of code that training does not need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from main_training import CONFIGURATION
from pretraining.checkpoint.compatibility import saved_config
from pretraining.checkpoint.manifest import HEAD, Checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.config.errors import UserError
from pretraining.config.script import exit_with
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.origin import check_origin
from pretraining.data.state import TOKENIZER
from pretraining.extensions.checkpoints import (
    ALLOW_REMOTE,
    open_any_checkpoint,
    open_newest,
    read_tensors,
    refuse_remote,
    separator_of,
)
from pretraining.models.init import build_model
from pretraining.models.llama import Llama
from pretraining.storage import location
from pretraining.tools.arguments import ArgumentParser, at_least, ends_on_mistakes, storable_location
from pretraining.tools.prepare.chat import ChatTemplate, TemplateSource, end_of_turn, find_template

if TYPE_CHECKING:
    from pretraining.extensions.tokenizers.tokenizer import Tokenizer

COLDEST = 1e-30  # temperature below which a logit divided by it may be infinite, and the likeliest token is certain
INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of a character to


@ends_on_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation as it is drawn. Returns exit code 2 on a mistake of the user."""
    flags = parse(arguments)
    for piece in generate(flags):
        print(piece, end="", flush=True)
    print()
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ArgumentParser(prog="python -m pretraining.tools.generate", allow_abbrev=False)
    add_checkpoint(parser)
    parser.add_argument("--prompt", type=unicode_text, default="", help="text to continue; empty: a new document")
    parser.add_argument("--max_new_tokens", type=at_least(1), default=100, help="tokens to add at most")
    parser.add_argument("--temperature", type=at_least(0, float), default=0.8, help="0 takes the likeliest token")
    parser.add_argument(
        "--top_k", type=at_least(0), default=50, help="choose among the k likeliest tokens; 0: among all"
    )
    parser.add_argument("--seed", type=at_least(0, below=2**64), default=0, help="the same seed gives the same text")
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt, a user's message in the chat template of the tokenizer"
    )
    return parser.parse_args(arguments)


def add_checkpoint(parser: ArgumentParser) -> None:
    """Add the flags that `open_model` reads."""
    parser.add_argument(
        "run_dir", type=storable_location, help="the run's folder, its checkpoints' folder, or one checkpoint"
    )
    parser.add_argument("--use_ema", action="store_true", help="take the moving averages of the weights (ema_decay)")
    parser.add_argument(
        "--tokenizer_path", default="", help="sentencepiece model or tokenizer.json (default: the run's)"
    )
    parser.add_argument("--allow_remote", action="store_true", help=ALLOW_REMOTE)


def unicode_text(text: str) -> str:
    """Read a text. Bytes that are not UTF-8 are halves of surrogates, which no tokenizer takes."""
    text.encode()
    return text


def generate(flags: argparse.Namespace) -> Iterator[str]:
    """Yield the prompt and its continuation, in pieces. Raises UserError if there is no checkpoint or no tokenizer."""
    model, tokenizer, config = open_model(flags)
    template = find_template("", flags.tokenizer_path or config.tokenizer_path, tokenizer.special)
    before, end = document_borders(config, tokenizer)
    ends = {end, end_of_turn(template, tokenizer.find_token) if template else end}
    if flags.chat:  # which begins a row, as the examples of instruction data do
        before, prompt = [], tokenizer.trace(chat_prompt(template, flags.prompt)).ids
    else:
        prompt = tokenizer.encode_prompt(flags.prompt, surrounded=False)
    source = torch.Generator().manual_seed(flags.seed)
    choose = partial(sample_token, temperature=flags.temperature, top_k=flags.top_k, generator=source)
    context = before + prompt
    if note := beyond_context(len(context), flags.max_new_tokens, config.seq_length):
        print(note, file=sys.stderr, flush=True)
    drawn = sample(model, context, tokenizer.vocab_size, config.seq_length, choose)
    added = takewhile(lambda token: token not in ends, islice(drawn, flags.max_new_tokens))
    yield from islice(decoded(tokenizer, prompt, added), 1 if flags.chat else 0, None)  # an answer without the prompt


def chat_prompt(template: TemplateSource | None, message: str) -> str:
    """Return a user's message in the chat template, up to where the answer begins. Raises UserError."""
    if template is None:
        remedy = "prepare --sft --chat_template=FILE writes one there"
        raise UserError(f"--chat: there is no chat template next to the tokenizer: {remedy}")
    return ChatTemplate(template).prompt([{"role": "user", "content": message}])


def document_borders(config: TrainConfig, tokenizer: Tokenizer) -> tuple[list[int], int | None]:
    """Return the ids before a document in the run's data, and the id that ends one: the run's, or the tokenizer's.

    config: of `open_model`, whose sep_token is the separator that the run read.
    """
    end = tokenizer.separator if config.sep_token is None else config.sep_token
    return [id for id in (end, config.bos_token) if id is not None], end


def beyond_context(before: int, added: int, window: int) -> str:
    """Return what to say of a text that is longer than the context; "" if it is not. before, added: tokens."""
    if before + added <= window:
        return ""
    what = f"the prompt has {before:,}" if before > window else f"the text may have {before + added:,}"
    limit = f"the context of this model is {window:,} (seq_length of its training)"
    return f"note: {what} tokens, and {limit}: each token follows from the {window:,} before it alone"


def open_model(flags: argparse.Namespace) -> tuple[Llama, Tokenizer, TrainConfig]:
    """Return model, tokenizer and configuration of the newest checkpoint of `run_dir`, as the flags ask.

    The configuration's sep_token is the separator of the run's data; None: they had none, or it is not known. Raises
    UserError.
    """
    checkpoint = open_newest(flags.run_dir, flags.allow_remote)
    if flags.use_ema:
        from pretraining.extensions.moving_average.checkpoint import with_moving_averages

        checkpoint = with_moving_averages(checkpoint)
    # No rows that only a mesh needs: checkpoints have none of them.
    saved = saved_config(checkpoint.facts.config, CONFIGURATION)
    separator = separator_of(checkpoint.facts, saved, flags.tokenizer_path or saved.tokenizer_path)
    config = replace(saved, make_vocab_size_divisible_by=1, tensor_parallel_size=1, sep_token=separator)
    if not flags.allow_remote:
        _refuse_remote_inputs(flags, config)
    tokenizer = load_tokenizer(flags.tokenizer_path or config.tokenizer_path, checkpoint)
    if tokenizer.vocab_size > (rows := model_shape(config).vocab_size):
        has = f"{tokenizer.vocab_size:,} ids, but the model's vocabulary is {rows:,}"
        raise UserError(f"the tokenizer has {has}: give --tokenizer_path=FILE, the tokenizer of the run's data")
    weights = {**base_weights(checkpoint, config), **read_tensors(checkpoint, is_weight)}
    return load_model(config, weights), tokenizer, config


def _refuse_remote_inputs(flags: argparse.Namespace, config: TrainConfig) -> None:
    """Raise UserError if a path in the configuration, or in that of the run which it names, is in object storage."""
    if not flags.tokenizer_path:
        refuse_remote("tokenizer_path", config.tokenizer_path, flags.run_dir)
    if not config.saves_frozen and config.ckpt_load_path:
        refuse_remote("ckpt_load_path", config.ckpt_load_path, flags.run_dir)
        if location(config.ckpt_load_path).exists():  # base_weights names it otherwise
            open_any_checkpoint(location(config.ckpt_load_path), allow_remote=False)


def decoded(tokenizer: Tokenizer, prompt: list[int], added: Iterable[int]) -> Iterator[str]:
    """Yield the text of `prompt`, then what each token of `added` appends; together the text of all of them."""
    tokens, shown = list(prompt), tokenizer.decode(prompt)
    yield shown
    for token in added:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith(INCOMPLETE):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(tokens)[len(shown) :]


def load_tokenizer(path: str, checkpoint: Checkpoint) -> Tokenizer:
    """Open the tokenizer at `path`. Raises UserError if there is none, or the run's data were made with another."""
    if not path:
        raise UserError(
            "no tokenizer in the run's configuration: give --tokenizer_path=FILE, the tokenizer of its data"
        )
    from pretraining.extensions.tokenizers.tokenizer import open_tokenizer

    mixture = (checkpoint.facts.data or {}).get("mixture", {})
    check_origin(path, {f"dataset {name} of the run": entry.get(TOKENIZER, "") for name, entry in mixture.items()})
    return open_tokenizer(path)


def base_weights(checkpoint: Checkpoint, config: TrainConfig) -> dict[str, Tensor]:
    """Return the frozen weights of a checkpoint that has only adapters: ckpt_load_path's, or the initial ones.

    Raises UserError if ckpt_load_path has other weights than the adapters were trained on, or none.
    """
    if config.saves_frozen:
        return {}
    if config.ckpt_load_path:
        from pretraining.extensions.other_weights.checks import check_base

        if not location(config.ckpt_load_path).exists():
            gone = f"the weights that the adapters of {checkpoint.path} were trained on are not there"
            raise UserError(f"ckpt_load_path={config.ckpt_load_path}: {gone}; put them back")
        check_base(checkpoint.path, checkpoint.facts, config, "put those there")
        tied = model_shape(config).tie_word_embeddings  # Hugging Face's format is read with a head of its own
        base = open_any_checkpoint(location(config.ckpt_load_path))
        return read_tensors(base, lambda name: is_weight(name) and not (tied and name == HEAD))
    return {name: weight.detach() for name, weight in build_model(config).named_parameters()}


def load_model(config: TrainConfig, weights: dict[str, Tensor]) -> Llama:
    """Return the model with these weights, in fp32 and without a second copy of them."""
    with torch.device("meta"):
        model = Llama(replace(config, precision="auto"))  # the norms of autocast round their results to bf16
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    if wrong := sorted(n for n in {*shapes, *weights} if n not in weights or shapes.get(n) != weights[n].shape):
        raise UserError(f"the checkpoint has another {', '.join(wrong[:5])} than the model of its configuration")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    return model.eval()


@torch.inference_mode()
def sample(
    model: Llama, context: Sequence[int], vocabulary: int, window: int, choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yield tokens after `context` without end, from its last `window` tokens and with ids below `vocabulary`."""
    tokens, device = list(context), next((weight.device for weight in model.parameters()), None)
    while True:
        logits = model(torch.tensor([tokens[-window:]], device=device))[0, -1, :vocabulary]  # [V]
        tokens.append(choose(logits))
        yield tokens[-1]


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw a token from logits [V]: the likeliest at temperature 0, else from the softmax over the top k (0: all)."""
    if temperature < COLDEST:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
    return int(ids[chosen])


if __name__ == "__main__":
    exit_with(main)
