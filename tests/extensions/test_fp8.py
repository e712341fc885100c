"""precision=fp8: rounding and products are plain arithmetic, and the losses follow those of bf16 on any mesh."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from main_training import CONFIGURATION, train
from pretraining.config.errors import UserError
from pretraining.extensions.fp8 import linear
from pretraining.extensions.fp8.linear import E4M3, E5M2, Float8, float8_linear, quantize, use_float8
from pretraining.models.init import on_meta
from pretraining.parallel.layout import torch_layout
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.torch.tensor import shard_over_tensor_ranks
from tests.end_to_end.small import ONE_PROCESS
from tests.parallel.launch import ALONE, assert_resumed, run_on_torch
from tests.parallel.toy import TOY
from tests.selection import Outcomes, chosen

Fields = dict[str, Any]
# Small, because a CPU takes ten times as long for fp8's products as for bf16's
BF16: Fields = {"mixed_precision": True, "num_layers": 2, "seq_length": 32, "global_batch_size": 8}
FP8: Fields = {**BF16, "precision": "fp8"}
LORA: Fields = {"lora_rank": 4, "lora_target_modules": ".*_proj", "lora_init": "gaussian", "learning_rate": 1e-2}
RECOMPUTE: Fields = {"fsdp_activation_checkpointing": True, "batch_size": 1}
CASES: dict[int, dict[str, Fields]] = {
    ALONE: {"fp8": FP8, "bf16": BF16, "lora": {**FP8, **LORA}, "bf16, lora": {**BF16, **LORA}},
    2: {
        "fsdp": {**FP8, "sharding_strategy": "fsdp"},
        "fsdp, recomputed, accumulated": {**FP8, **RECOMPUTE, "sharding_strategy": "fsdp"},
        "tensor, sequence": {**FP8, "tensor_parallel_size": 2, "sequence_parallel": True, "sharding_strategy": "fsdp"},
        "stages": {**FP8, "pipeline_parallel_size": 2, "sharding_strategy": "ddp"},
        "context": {**FP8, "context_parallel_size": 2, "sharding_strategy": "fsdp"},
    },
}
# Bits after the leading one, and the spacing of the smallest numbers
FORMATS = {E4M3: (3, 2.0**-9), E5M2: (2, 2.0**-16)}


def plain(x: Float8) -> torch.Tensor:
    return x.values.double() * x.inverse.double()


@pytest.mark.parametrize("dtype", FORMATS)
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20), st.integers(-90, 90))
def test_rounding_is_to_nearest_with_the_largest_power_of_two_that_fits(
    dtype: torch.dtype, numbers: list[float], exponent: int
) -> None:
    x = torch.tensor(numbers) * 2.0**exponent
    rounded, (bits, spacing) = quantize(x, dtype), FORMATS[dtype]
    inverse, largest = rounded.inverse.item(), torch.finfo(dtype).max
    assert math.frexp(inverse)[0] == 0.5
    peak = x.abs().max().item() / inverse
    assert peak <= largest and (peak * 2 > largest or x.abs().max() < 2.0**-99)
    errors = (plain(rounded) - x.double()).abs()
    assert (errors <= torch.clamp(x.double().abs() * 2.0 ** -(bits + 1), min=spacing / 2 * inverse)).all()


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_stay_so(number: float) -> None:
    x = torch.ones(16, 16)
    x[3, 5] = number
    assert not float8_linear(x, torch.ones(16, 16)).isfinite().all()


@pytest.mark.parametrize("rows", [(32,), (2, 16)])
def test_the_three_products_are_those_of_the_rounded_matrices(rows: tuple[int, ...]) -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 48, generator=drawn).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(64, 48, generator=drawn)).requires_grad_()
    grad = (1e-6 * torch.randn(*rows, 64, generator=drawn)).bfloat16()
    y = float8_linear(x, weight)
    y.backward(grad)
    x8, weight8 = plain(quantize(x.detach(), E4M3)).flatten(0, -2), plain(quantize(weight.detach().bfloat16(), E4M3))
    grad8 = plain(quantize(grad, E5M2)).flatten(0, -2)
    assert x.grad is not None and weight.grad is not None
    for got, expected, tolerance in (
        (y, x8 @ weight8.t(), 2**-8),
        (x.grad, grad8 @ weight8, 2**-8),
        (weight.grad, grad8.t() @ x8, 1e-5),  # fp32, as the weight is
    ):
        scale = expected.abs().max()
        assert (got.detach().double().flatten(0, -2) - expected).abs().max() <= tolerance * scale
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.slow
def test_a_traced_product_is_the_eager_one() -> None:
    x, weight = torch.randn(32, 48).bfloat16(), torch.randn(64, 48).bfloat16()
    traced = torch.compile(float8_linear, backend="aot_eager", fullgraph=True)
    results = []
    for function in (float8_linear, traced):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(*leaves)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize("heads", [1, 3])
def test_the_key_value_heads_that_a_tensor_rank_takes_of_all_are_multiplied_in_float8(heads: int) -> None:
    fields = {"num_attention_heads": 6, "num_kv_heads": heads, "head_dim": 16, "tensor_parallel_size": 2}
    config = CONFIGURATION(**{**TOY, **FP8, **fields})
    model, ranks = on_meta(config), DeviceMesh("cpu", [0, 1])
    use_float8(model)
    shard_over_tensor_ranks(model, ranks, torch_layout(config, Mesh(tensor=2)), sequence_parallel=False)
    block: Any = model.model.layers[0]
    projection, weight, x = block.self_attn.k_proj, torch.randn(heads * 16, 64), torch.randn(2, 16, 64).bfloat16()
    projection.weight = torch.nn.Parameter(weight)
    chosen = {1: [0], 3: [1, 2, 2]}[heads]
    expected = float8_linear(x, torch.cat([weight.chunk(heads)[head] for head in chosen]))
    assert torch.equal(projection(x), expected)


@functools.cache
def outcome(processes: int) -> dict[str, Any]:
    cases = CASES[processes]
    if processes == ALONE:
        cases = chosen({**cases, "fp8": {**FP8, "halfway": f"{tempfile.mkdtemp()}/run"}}, ("fp8",))
    return Outcomes(run_on_torch(processes, cases))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reference", "tolerance"), [("fp8", "bf16", 0.02), ("lora", "bf16, lora", 0.1)]
)  # of gradient norms: adapters multiply gradients by frozen matrices of random numbers
@pytest.mark.exhaustive
def test_losses_are_within_a_hundredth_of_those_of_bf16(case: str, reference: str, tolerance: float) -> None:
    got, expected = outcome(ALONE)[case], outcome(ALONE)[reference]
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-2) and got["loss"] != expected["loss"]
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
    assert got["loss"][-1] < got["loss"][0] - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[2])
@pytest.mark.exhaustive
def test_losses_on_two_processes_are_those_of_one(case: str) -> None:
    reference, got = outcome(ALONE)["fp8"], outcome(2)[case]
    # Rounding to 3 bits turns the last bit of a sum into a step of 1/16: 1.0e-3 on an Intel, less on an AMD
    assert got["loss"] == pytest.approx(reference["loss"], abs=2e-3)
    assert got["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-2)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    assert_resumed(outcome(ALONE)["fp8"])


def test_a_gpu_without_float8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UserError, match=r"--precision=fp8 needs .* 8.9.* this is NVIDIA A100.*; use mixed_bf16"):
        linear.require_float8(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    linear.require_float8(torch.device("cuda", 0))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", pytest.param("mixed_bf16", marks=pytest.mark.exhaustive)])
def test_a_cpu_which_has_no_float8_units_is_named_before_the_first_step(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: Fields = {**ONE_PROCESS, "mixed_precision": True, "precision": precision, "num_layers": 1, "num_steps": 1}
    train({**flags, "seq_length": 16, "use_dummy_dataset": True, "log_dir": tmp_path})
    before = capsys.readouterr().out.partition("first step:")[0]
    assert ("--precision=fp8: a CPU has no float8 units" in before) == (precision == "fp8")
