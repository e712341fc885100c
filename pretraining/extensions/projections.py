"""The matrices of a block, which map hidden states to hidden states."""

from __future__ import annotations

from fnmatch import fnmatchcase

# By their path in the block; mlp.gate_proj with a gated activation only
PROJECTIONS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def is_hidden_matrix(name: str) -> bool:
    """Return whether the parameter of this name is one of them."""
    return fnmatchcase(name, "model.layers.*_proj.weight")
