"""Dtypes that are chosen one by one; tests/parallel/test_optimizers.py trains with them."""

from __future__ import annotations

from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.config.support import unsupported
from tests.config.test_validate import found
from tests.monitor.test_facts import facts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "parameters fp32, gradients fp32, optimizer state fp32"),
        ({"fp32_grad_acc": False}, "parameters fp32, gradients bf16, optimizer state fp32"),
        (
            {"master_weights": False, "stochastic_rounding": True},
            "parameters bf16, gradients fp32, optimizer state bf16; rounded stochastically",
        ),
    ],
)
def test_every_dtype_is_the_one_that_is_asked_for(fields: dict[str, Any], expected: str) -> None:
    described = facts(precision="manual", **fields)["precision"]
    assert described == f"manual: activations bf16, products bf16, {expected}"


def test_a_dtype_needs_the_precision_that_reads_it() -> None:
    (problem,) = found(master_weights=False)
    assert "--master_weights=False" in problem and "needs --precision=manual" in problem


@pytest.mark.parametrize(
    ("dtype", "fields", "refused"),
    [
        ("bf16", {"master_weights": False}, False),
        ("fp32", {"master_weights": False}, True),
        ("fp32", {}, False),
        ("bf16", {}, False),
    ],
)
def test_the_xla_engine_reduces_in_bf16_what_it_multiplies_in_bf16(dtype: Any, fields: Any, refused: bool) -> None:
    config = CONFIGURATION(reduce_dtype=dtype, precision="manual", **fields)
    assert bool(list(unsupported(config, "xla"))) == refused
