"""Attention in pieces is attention, for every length, grouping and packing of documents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pretraining.models.chunked import MOST, PIECES, chunked_attention, pieces


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.sampled_from([(1, 1), (4, 4), (6, 3), (8, 1)]), st.booleans(), st.integers(0, 10**6))
def test_values_and_gradients_are_those_of_torchs_attention(
    length: int, heads: tuple[int, int], packed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(2, heads[0], length, 8, requires_grad=True)
    k, v = (torch.randn(2, heads[1], length, 8, requires_grad=True) for _ in range(2))
    segments = torch.randint(0, 3, (2, length)).sort(1).values if packed else None
    expected, got = reference(q, k, v, segments), chunked_attention(q, k, v, segments)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), direction)
    for gradient, want in zip(torch.autograd.grad(got, (q, k, v), direction), wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=2e-5, rtol=1e-4)


@given(st.integers(1, 10**5))
def test_the_pieces_cover_every_query_once(length: int) -> None:
    cuts = pieces(length)
    assert [query for first, last in cuts for query in (first, last)][1:-1:2] == [first for first, _ in cuts[1:]]
    assert (cuts[0][0], cuts[-1][1]) == (0, length)
    assert max(last - first for first, last in cuts) <= MOST
    assert len(cuts) >= min(PIECES, length)


@pytest.mark.parametrize("length", [2048])
def test_the_backward_pass_keeps_nothing_that_grows_with_the_square_of_the_length(length: int) -> None:
    kept: list[int] = []
    q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_attention(q, k, v)
    assert 0 < max(kept) <= 2 * length * 4
