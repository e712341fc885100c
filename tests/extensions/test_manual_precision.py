"""Dtypes that are chosen one by one; tests/parallel/test_optimizers.py trains with them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts import facts


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
