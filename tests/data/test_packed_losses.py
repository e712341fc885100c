from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pretraining.config.training import TrainConfig
from pretraining.data import IGNORED, open_stream
from pretraining.models.init import build_model
from pretraining.models.llama import BatchInputs, Llama
from tests.data.corpora import SEPARATOR, corpus, settings


def losses(model: Llama, **inputs: torch.Tensor) -> torch.Tensor:
    """Loss of every position, 0 where it is not trained."""
    with torch.no_grad():
        logits = model(inputs["tokens"], BatchInputs(inputs.get("positions"), inputs.get("segments")))
    labels = inputs["labels"].long()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")


@pytest.fixture
def tiny() -> TrainConfig:
    return TrainConfig(model_variant="tiny", num_layers=2, vocab_size=500, seq_length=64)


def test_packed_documents_have_the_losses_they_have_alone(tmp_path: Path, tiny: TrainConfig) -> None:
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(2, 500, size).tolist() for size in drawn.integers(1, 40, 60)]
    corpus(tmp_path / "data", documents)
    asked = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    stream = open_stream(settings(tmp_path / "data", seq_length=64, vocab_size=500, global_batch_size=2, **asked))
    model = build_model(tiny)
    for step in range(2):
        batch = {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in stream.batch(step).items()}
        packed = losses(model, **batch).view(2, 64)
        for row, segments in enumerate(batch["segments"]):
            for segment in segments.unique():
                inside = segments == segment
                alone = losses(model, tokens=batch["tokens"][row : row + 1, inside],
                               labels=batch["labels"][row : row + 1, inside])  # fmt: skip
                assert torch.allclose(packed[row, inside], alone, atol=1e-5)
        ends = batch["tokens"] == SEPARATOR
        assert (packed[ends] == 0).all() and (packed[~ends] > 0).all()


def test_without_boundaries_the_losses_differ(tmp_path: Path, tiny: TrainConfig) -> None:
    """The comparison above can fail: documents that see their neighbours have other losses."""
    corpus(tmp_path / "data", [[7, 8, 9, 10] * 3] * 40)
    fields = {"seq_length": 64, "vocab_size": 500, "reset_attention_mask": True, "sep_token": 1}
    batch = open_stream(settings(tmp_path / "data", **fields)).batch(0)
    tokens, labels, segments = (torch.from_numpy(np.ascontiguousarray(rows)) for rows in batch.values())
    model = build_model(tiny)
    apart = losses(model, tokens=tokens, labels=labels, segments=segments)
    together = losses(model, tokens=tokens, labels=labels)
    assert not torch.allclose(apart, together, atol=1e-3)
