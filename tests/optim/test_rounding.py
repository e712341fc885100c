"""Stochastic rounding: exact in the mean, on the grid, the same wherever an element lies."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.noise import name_hashes, random_bits
from pretraining.optim.precision import round_stochastically

ORDINARY = st.floats(2.0**-100, 2.0**100, width=32)


def bits_of(shape: tuple[int, ...], update: float = 1.0, name: str = "a") -> torch.Tensor:
    return random_bits(name_hashes(0, [name])[0], torch.tensor(update), torch.Size(shape))


def test_the_probability_of_rounding_up_is_exact() -> None:
    grid = torch.arange(65536, dtype=torch.int32)
    for part in (0, 1, 17, 32768, 65535):
        # 65536ths of the way from 1 to its neighbour 1 + 2^-7
        x = torch.full((65536,), 1 + part / 65536 * 2**-7)
        up = round_stochastically(x, grid) > 1
        assert int(up.sum()) == part


@given(ORDINARY, st.integers(0, 65535), st.sampled_from([1, -1]))
def test_the_result_is_one_of_bf16_s_two_neighbours(size: float, bits: int, sign: int) -> None:
    x = torch.tensor(sign * size)
    y = round_stochastically(x, torch.tensor(bits))
    assert y.bfloat16().float() == y
    cut = (x.view(torch.int32) & -65536).view(torch.float32)  # towards zero
    away = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert y in (cut, away)
    assert (y == away) == (bits < int(x.view(torch.int32) & 0xFFFF))


@given(st.integers(-(2**14), 2**14), st.integers(-40, 40), st.integers(0, 65535))
def test_bf16_values_are_not_changed(mantissa: int, exponent: int, bits: int) -> None:
    x = torch.tensor(float(mantissa) * 2.0**exponent).bfloat16().float()
    assert round_stochastically(x, torch.tensor(bits)) == x


def test_updates_below_bf16_s_spacing_arrive_in_the_mean() -> None:
    weights = torch.ones(100_000)
    moved = round_stochastically(weights + 2**-9, bits_of((100_000,)))
    assert abs(float(moved.mean()) - (1 + 2**-9)) < 5e-5
    assert (weights.bfloat16() + 2**-9 == 1).all()  # what rounding to nearest makes of it


def test_random_bits_are_uniform_and_uncorrelated() -> None:
    first = bits_of((512, 512)).double()
    assert abs(float(first.mean()) - 32767.5) < 150
    assert abs(float(first.std()) - 65536 / 12**0.5) < 150
    others = [bits_of((512, 512), update=2.0), bits_of((512, 512), name="b"), first.roll(1, 0), first.roll(1, 1)]
    for other in others:
        both = torch.stack((first.flatten(), other.double().flatten()))
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.01


@given(st.integers(0, 30), st.integers(0, 20))
def test_a_shard_has_the_random_bits_of_its_position(row: int, column: int) -> None:
    whole = bits_of((40, 30))
    part = random_bits(name_hashes(0, ["a"])[0], torch.tensor(1.0), torch.Size((10, 10)), (row, column))
    assert torch.equal(part, whole[row : row + 10, column : column + 10])


def test_a_stack_has_the_random_bits_of_each_layer() -> None:
    key = name_hashes(3, ["x.0", "x.1"])
    stack = random_bits(key.view(2, 1, 1), torch.tensor(5.0), torch.Size((4, 6)))
    assert stack.shape == (2, 4, 6)
    assert torch.equal(stack[1], random_bits(key[1], torch.tensor(5.0), torch.Size((4, 6))))
