"""Dropout drops the share it is told, anew in every place, and the same whenever that place is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretraining.config.training import TrainConfig
from pretraining.models.dropout import ATTENTION_OUTPUT, DropoutNoise, dropout, dropout_noise
from pretraining.models.init import build_model
from pretraining.models.llama import BatchInputs, Llama

RATES = {"hidden_dropout": 0.2, "attention_dropout": 0.1, "ffn_dropout": 0.3}
ROWS, TOKENS = 4, 24


def model(**fields: Any) -> Llama:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return build_model(TrainConfig(**{"model_variant": "custom", "seq_length": TOKENS, **sizes, **fields}))


def token_index(first: int = 0, rows: int = ROWS) -> torch.Tensor:
    count = rows * TOKENS
    return torch.arange(first * TOKENS, first * TOKENS + count, dtype=torch.int32).view(rows, TOKENS)


def noise(update: float = 0.0, **place: int) -> DropoutNoise:
    return dropout_noise(7, torch.tensor(update), token_index(**place))


def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    y = dropout(torch.ones(ROWS, TOKENS, 4096), rate, noise(), site=1)
    assert abs(float((y == 0).float().mean()) - rate) < 0.003
    assert abs(float(y.mean()) - 1) < 0.02
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - rate))}
    x = torch.randn(ROWS, TOKENS, 4096).bfloat16()
    y = dropout(x, rate, noise(), site=1)
    assert y.dtype == x.dtype
    assert float((y / x.double())[y != 0].mean()) == pytest.approx(1 / (1 - rate), rel=1e-4)


def test_updates_blocks_sites_and_tokens_are_dropped_independently() -> None:
    x = torch.ones(ROWS, TOKENS, 512)
    first = dropout(x, 0.5, noise(), 1)
    others = [dropout(x, 0.5, noise(1.0), 1), dropout(x, 0.5, noise().next_block(), 1), dropout(x, 0.5, noise(), 2)]
    others += [first.roll(1, dim) for dim in range(3)]
    for other in others:
        both = torch.stack((first.flatten(), other.flatten()))
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02


def test_the_tokens_of_a_tensor_rank_are_dropped_as_in_the_whole_residual_stream() -> None:
    x, rank = torch.ones(ROWS, TOKENS, 512), noise()._replace(tensor_rank=1)
    part = dropout(x[:, TOKENS // 2 :], 0.5, rank, ATTENTION_OUTPUT)
    assert torch.equal(part, dropout(x, 0.5, rank, ATTENTION_OUTPUT)[:, TOKENS // 2 :])


@pytest.mark.parametrize("name", RATES)
def test_every_kind_of_dropout_acts_only_in_training(name: str) -> None:
    plain, thinned = model(), model(**{name: RATES[name]})
    assert torch.equal(plain(tokens()), thinned(tokens()))
    assert not torch.equal(plain.hidden(tokens()), thinned.hidden(tokens(), BatchInputs(noise=noise())))


def test_dropout_of_some_rows_equals_that_of_the_global_batch() -> None:
    live = model(**RATES)
    whole = live.hidden(tokens(), BatchInputs(noise=noise()))
    part = live.hidden(tokens()[1:3], BatchInputs(noise=noise(first=1, rows=2)))
    torch.testing.assert_close(part, whole[1:3], atol=1e-6, rtol=1e-6)
