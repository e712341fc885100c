from __future__ import annotations

from pathlib import Path

import numpy as np
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


def test_packed_documents_have_the_losses_they_have_alone_and_others_where_they_see_their_neighbours(
    tmp_path: Path,
) -> None:
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(2, 500, size).tolist() for size in drawn.integers(1, 40, 60)]
    corpus(tmp_path / "data", documents)
    asked = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    stream = open_stream(settings(tmp_path / "data", seq_length=64, vocab_size=500, global_batch_size=2, **asked))
    model = build_model(TrainConfig(model_variant="tiny", num_layers=2, vocab_size=500, seq_length=64))
    for step in range(2):
        batch = {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in stream.batch(step).items()}
        packed = losses(model, **batch).view(2, 64)
        together = losses(model, tokens=batch["tokens"], labels=batch["labels"]).view(2, 64)
        assert not torch.allclose(packed, together, atol=1e-3)
        for row, segments in enumerate(batch["segments"]):
            for segment in segments.unique():
                inside = segments == segment
                alone = losses(model, tokens=batch["tokens"][row : row + 1, inside],
                               labels=batch["labels"][row : row + 1, inside])  # fmt: skip
                assert torch.allclose(packed[row, inside], alone, atol=1e-5)
        ends = batch["tokens"] == SEPARATOR
        assert (packed[ends] == 0).all() and (packed[~ends] > 0).all()
