"""The facts that are printed before a run, for tests of what adds to them."""

from __future__ import annotations

from typing import Any

from main_training import CONFIGURATION
from pretraining.config.variants import VARIANTS
from pretraining.extensions.milestones import milestone_steps
from pretraining.optim.schedule import learning_rate

SIZE = VARIANTS["llama2_7b"].parameters


def facts(device_name: str = "NVIDIA A100-SXM4-80GB", **fields: Any) -> dict[str, str]:
    """Return the lines about a run on 8 devices, by name."""
    from pretraining.extensions.overview.lines import describe, describe_dtypes

    batch = {"batch_size": 2, "global_batch_size": 64, "gradient_accumulation_steps": 4}
    config = CONFIGURATION(**{"model_variant": "llama2_7b", "num_steps": 15_000, **batch, **fields})
    text = describe(
        config,
        mesh={"replica": 2, "shard": 4, "context": 1, "tensor": 1},
        per_device={"parameters": SIZE, "gradients": SIZE, "moments": 2 * SIZE},
        device_name=device_name,
        recompute=[False, True, False, False],
        dtypes=describe_dtypes(config),
        attention="chunked, --attention_impl",
        rates={step: learning_rate(config, step) for step in milestone_steps(config)},
    )
    return {line[:14].strip(): line[15:] for line in text.splitlines()}
