"""Attention in pieces is attention, for every length, grouping and packing of documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretraining.models.chunked import MAX_CHUNK, MIN_CHUNKS, AttentionMask, chunk_bounds, chunked_attention
from tests.models.reference import reference


@settings(max_examples=25)
@given(
    st.integers(1, 50),
    st.sampled_from([(1, 1), (4, 4), (6, 3), (8, 1)]),
    st.booleans(),
    st.sampled_from([None, 1, 7, 33, 100]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1.0, 0.5, 0.1]),
    st.integers(0, 10**6),
)
def test_values_and_gradients_are_those_of_torchs_attention(
    length: int, heads: tuple[int, int], packed: bool, window: int | None, rate: float, part: float, seed: int
) -> None:
    """Also of the last queries of the rows, a part of them, alone."""
    torch.manual_seed(seed)
    q = torch.randn(2, heads[0], length, 8, requires_grad=True)
    k, v = (torch.randn(2, heads[1], length, 8, requires_grad=True) for _ in range(2))
    segments = torch.randint(0, 3, (2, length)).sort(1).values if packed else None
    noise = torch.randint(-(2**31), 2**31, (2, length), dtype=torch.int32) if rate else None
    mask = AttentionMask(segments, window, noise, rate)
    last = slice(min(int(length * (1 - part)), length - 1), None)
    expected, got = reference(q, k, v, mask)[:, :, last], chunked_attention(q[:, :, last], k, v, mask)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), direction)
    for gradient, want in zip(torch.autograd.grad(got, (q, k, v), direction), wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=2e-5, rtol=1e-4)


@given(st.integers(1, 10**5))
def test_the_chunks_cover_every_query_once(length: int) -> None:
    cuts = chunk_bounds(length)
    assert [query for first, last in cuts for query in (first, last)][1:-1:2] == [first for first, _ in cuts[1:]]
    assert (cuts[0][0], cuts[-1][1]) == (0, length)
    assert max(last - first for first, last in cuts) <= MAX_CHUNK
    assert len(cuts) >= min(MIN_CHUNKS, length)


@pytest.mark.parametrize("length", [2048])
def test_the_backward_pass_keeps_nothing_that_grows_with_the_square_of_the_length(length: int) -> None:
    kept: list[int] = []
    q, k, v = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_attention(q, k, v, AttentionMask())
    assert 0 < max(kept) <= 2 * length * 4
