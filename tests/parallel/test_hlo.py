"""The compiled and traced programs of 8 devices: collectives, activations kept for the backward pass, and dtypes.

One process compiles all of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pretraining.tools.plan.program import product_flops, program_collectives
from tests.parallel.hlo import (
    HIDDEN,
    LAYERS,
    LENGTH,
    ROWS,
    compile_cases,
    loops,
    read_program,
    results,
    saved_for_backward,
)
from tests.parallel.launch import HAS_SPLASH
from tests.parallel.toy import TOY
from tests.selection import Outcomes, chosen, needs_xla

pytestmark = [needs_xla, pytest.mark.slow]

BLOCKS: dict[str, Any] = {"fsdp_activation_checkpointing": True}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "blocks": BLOCKS,
    **{
        module: {**BLOCKS, "checkpoint_granularity": "selective", "checkpoint_modules": module}
        for module in ("mlp", "norm", "mlp_activation")
    },
}
FSDP: dict[str, Any] = {"sharding_strategy": "fsdp", "batch_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 8},
    "sequence": {"tensor_parallel_size": 8, "sequence_parallel": True},
    **{name: {"num_kv_heads": 4, "batch_size": ROWS // 8, **fields} for name, fields in RECOMPUTED.items()},
    "fp32": {**FSDP, "precision": "fp32"},
    "fp32 blocks": {**FSDP, "precision": "fp32", **BLOCKS},
    "muon": {**FSDP, "precision": "fp32", **BLOCKS, "optimizer": "muon"},
    "bf16": {**FSDP, "mixed_precision": True},
    "bf16_sums": {**FSDP, "mixed_precision": True, "reduce_dtype": "bf16"},
    "stages": {
        "pipeline_parallel_size": 4,
        "gradient_accumulation_steps": 4,
        "num_kv_heads": 4,
        "batch_size": ROWS // 8,
    },
}
CONTEXT: dict[str, Any] = {
    **FSDP,
    **BLOCKS,
    "context_parallel_size": 2,
    "batch_size": ROWS // 4,
    "num_kv_heads": 4,
    "attention_impl": "splash",
}
if HAS_SPLASH:
    CASES["context"] = CONTEXT


@functools.cache
def compiled(folder: Path) -> dict[str, str]:
    cases = compile_cases(folder, chosen(CASES, ("fp32 blocks", "muon", "fp32", "bf16")))
    return Outcomes({name: case["program"] for name, case in cases.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.exhaustive
def test_eight_tensor_ranks_gather_no_weights(folder: Path) -> None:
    text = compiled(folder)["tensor"]
    assert results(text, "all-gather") == []  # neither weights nor heads
    assert (ROWS * LENGTH, HIDDEN) in results(text, "all-reduce")  # partial sums of the residual stream are reduced
    carried = " ".join(loops(text))
    assert f"[{LAYERS},1,{HIDDEN // 8},{HIDDEN}]" in carried  # a rank's heads of q_proj
    assert f"[{LAYERS},1,{HIDDEN},{HIDDEN}]" not in carried


def test_sequence_parallelism_shards_the_residual_stream_over_tensor_ranks(folder: Path) -> None:
    text = compiled(folder)["sequence"]
    assert set(results(text, "all-gather")) == {(ROWS, LENGTH, HIDDEN)}  # the stream, as the input of a matrix
    carried = " ".join(loops(text))
    assert f"[{ROWS},{LENGTH // 8},{HIDDEN}]" in carried
    assert f"[{ROWS},{LENGTH},{HIDDEN}]" not in carried
    kept = saved_for_backward(text)
    assert kept.count((ROWS, LENGTH // 8, HIDDEN)) >= 2  # both inputs of matrices are gathered again
    assert kept.count((ROWS, LENGTH, HIDDEN)) <= 1  # the second one's norm, which a CPU's compiler replicates


@pytest.mark.parametrize("case", ["fp32", "fp32 blocks"])
def test_collectives_of_a_step_with_sharded_parameters(folder: Path, case: str) -> None:
    found = program_collectives(compiled(folder)[case])
    assert Counter((one.purpose, one.times) for one in found if one.shapes != [()]) == {
        ("all-gather", LAYERS): 7 + 7,  # a block's matrices, once per pass
        ("reduce-scatter", LAYERS): 7,
        ("all-reduce", LAYERS): 2,  # norms
        ("all-gather", 1): 2 + 3,  # the head, and the lookup's tokens
        ("all-to-all", 1): 2,  # the looked-up activations and their gradient
        ("reduce-scatter", 1): 1,
        ("all-reduce", 1): 1,
    }


def test_muon_moves_each_layer_to_one_device_and_back(folder: Path) -> None:
    muon, adamw = (Counter(moved(compiled(folder)[case])) for case in ("muon", "fp32 blocks"))
    assert set((muon - adamw).keys()) == {"all-to-all"} and muon["all-to-all"] == adamw["all-to-all"] + 2 * 7


def moved(text: str) -> list[str]:
    """The collectives of a step, as often as they run, without those of scalars."""
    found = [one for one in program_collectives(text) if one.shapes != [()]]
    return [one.purpose for one in found for _ in range(one.times)]


@pytest.mark.skipif("context" not in CASES, reason="needs jax and the extension")
def test_context_ranks_send_keys_and_values_and_no_other_activations_of_a_block(folder: Path) -> None:
    rows = CONTEXT["batch_size"]
    found = [one for one in program_collectives(compiled(folder)["context"]) if one.times == LAYERS]
    of_tokens = [one for one in found if any(shape[:1] == (rows,) for shape in one.shapes)]
    keys = rows * LENGTH * HIDDEN // 2 * 4  # bytes of the keys, half as wide as the stream, in fp32
    sent: Counter[str] = Counter()
    for one in of_tokens:
        sent[one.purpose] += one.bytes
    halves = LAYERS * 2 * keys // 2  # a rank has the half of keys and values
    assert sent == {"all-gather": 2 * halves, "reduce-scatter": halves}  # gathered again for the backward pass


def test_neither_attention_scores_nor_weight_copies_are_saved_for_the_backward_pass(folder: Path) -> None:
    shapes = saved_for_backward(compiled(folder)["nothing"])
    width = TOY["intermediate_size"]
    assert any(math.prod(shape) == ROWS // 8 * LENGTH * width for shape in shapes)  # the feed-forward's, which do
    assert not any(sorted(shape) in ([HIDDEN, width], [HIDDEN, HIDDEN], [HIDDEN // 2, HIDDEN]) for shape in shapes)
    assert not any(shape[-2:] in ((LENGTH // 2, LENGTH // 2), (LENGTH // 2, LENGTH)) for shape in shapes)


def test_recomputing_a_module_saves_memory_and_recomputing_blocks_saves_most(folder: Path) -> None:
    saved = {case: saved_for_backward(compiled(folder)[case]) for case in RECOMPUTED}
    sizes = {case: sum(map(math.prod, shapes)) for case, shapes in saved.items()}
    assert sizes["blocks"] < sizes["mlp"] < sizes["nothing"]
    assert sizes["norm"] < sizes["nothing"]
    assert sizes["mlp_activation"] <= sizes["nothing"]  # what the min-cut recomputes anyway


def test_a_tick_sends_each_way_twice_and_computes_the_blocks_of_a_stage(folder: Path) -> None:
    text, plain = (compiled(folder)[case] for case in ("stages", "nothing"))
    stream = (1, ROWS // 8, LENGTH, HIDDEN)
    # The residual stream and the queue, forward and backward; and once more where the queue begins and ends
    assert results(text, "collective-permute") == 8 * [stream]
    of_head = 6 * (ROWS // 8) * LENGTH * HIDDEN * TOY["vocab_size"]
    blocks, blocks_of_stage = (product_flops(program) - of_head for program in (plain, text))
    assert blocks_of_stage / blocks == 1 + 3 / 4  # idle share: (stages - 1) / micro-batches


def traced(folder: Path, case: str) -> str:
    """The step as it is traced: a CPU's compiler would make fp32 of all products."""
    assert compiled(folder)[case]
    return read_program(folder / case, "before_optimizations")


def test_fp32_programs_contain_no_bf16(folder: Path) -> None:
    assert "bf16[" not in traced(folder, "fp32")


def test_mixed_precision_multiplies_in_bf16_and_stores_fp32(folder: Path) -> None:
    text = traced(folder, "bf16")
    by_weights = 3 * (7 + 1)  # seven projections and the head, forward and the gradients of both factors
    assert len(re.findall(r"= bf16\[[\d,]*\]\S* dot\(", text)) >= by_weights
    signature = next(line for line in text.splitlines() if "entry_computation_layout" in line)
    assert "bf16[" not in signature  # arguments and results of a step


def test_gradients_that_are_summed_in_bf16_are_products_in_bf16(folder: Path) -> None:
    products = {case: re.findall(r"= f32\[([\d,]*)\]\S* dot\(", traced(folder, case)) for case in ("bf16", "bf16_sums")}
    matrices = 7 + 1
    assert len(products["bf16"]) - len(products["bf16_sums"]) == matrices
    signature = next(line for line in traced(folder, "bf16_sums").splitlines() if "entry_computation_layout" in line)
    assert "bf16[" not in signature  # parameters and optimizer state are fp32 as before
