"""What the compiler made of the sharding table: read from the program that it compiled for 8 devices."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.toy import TOY

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, HIDDEN, LAYERS = TOY["global_batch_size"], TOY["seq_length"], TOY["hidden_size"], TOY["num_layers"]


def program(folder: Path, **fields: Any) -> str:
    """The optimised HLO of the toy's training step."""
    case = {"the case": {"sharding_strategy": "ddp", "batch_size": ROWS, "num_kv_heads": 8, "num_steps": 1, **fields}}
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    driver = Path(__file__).with_name("xla_driver.py")
    subprocess.run(
        [sys.executable, driver, json.dumps(case)], env=environment, check=True, capture_output=True, timeout=600
    )
    return max((path.read_text() for path in folder.glob("*after_optimizations.txt")), key=len)


def results(text: str, operation: str) -> list[tuple[int, ...]]:
    """The shapes that every `operation` of the program gives."""
    shapes = re.findall(rf"= \w+\[([\d,]*)\]\S* {operation}\(", text)
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


def loops(text: str) -> list[str]:
    """The types of what every loop carries, stacked weights and activations among it."""
    return re.findall(r"= (\(.*?\)) while\(", text)


def test_eight_tensor_ranks_gather_no_weights(tmp_path: Path) -> None:
    text = program(tmp_path, tensor_parallel_size=8)
    assert results(text, "all-gather") == []  # neither weights nor heads
    assert (ROWS * LENGTH, HIDDEN) in results(text, "all-reduce")  # partial sums of the stream are added up instead
    carried = " ".join(loops(text))
    assert f"[{LAYERS},1,{HIDDEN // 8},{HIDDEN}]" in carried  # a rank's own heads of q_proj
    assert f"[{LAYERS},1,{HIDDEN},{HIDDEN}]" not in carried


def test_sequence_parallelism_splits_the_residual_stream_over_tensor_ranks(tmp_path: Path) -> None:
    text = program(tmp_path, tensor_parallel_size=8, sequence_parallel=True)
    assert set(results(text, "all-gather")) == {(ROWS, LENGTH, HIDDEN)}  # the stream, where a matrix takes it
    carried = " ".join(loops(text))
    assert f"[{ROWS},{LENGTH // 8},{HIDDEN}]" in carried
    assert f"[{ROWS},{LENGTH},{HIDDEN}]" not in carried


RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "blocks": {"fsdp_activation_checkpointing": True},
    **{
        module: {
            **{"fsdp_activation_checkpointing": True, "checkpoint_granularity": "selective"},
            "checkpoint_modules": module,
        }
        for module in ("mlp", "norm", "mlp_activation")
    },
}


def kept(text: str) -> list[tuple[int, ...]]:
    """The shapes, without their layers, of what the largest loop stacks for the backward pass.

    Weights and their gradients are [layers, blocks of a body, ..]: nothing else has a 1 there.
    """
    stacks = re.findall(rf"f32\[{LAYERS},([\d,]*)\]", max(loops(text), key=len))
    shapes = [tuple(map(int, stack.split(","))) for stack in stacks]
    return [shape for shape in shapes if shape[0] != 1]


@functools.cache
def kept_in(folder: Path, case: str) -> list[tuple[int, ...]]:
    return kept(program(folder / case, num_kv_heads=4, batch_size=ROWS // 8, **RECOMPUTED[case]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def test_neither_scores_of_attention_nor_copies_of_weights_wait_for_the_backward_pass(folder: Path) -> None:
    shapes = kept_in(folder, "nothing")
    width = TOY["intermediate_size"]
    assert any(math.prod(shape) == ROWS // 8 * LENGTH * width for shape in shapes)  # the feed-forward's, which do
    assert not any(sorted(shape) in ([HIDDEN, width], [HIDDEN, HIDDEN], [HIDDEN // 2, HIDDEN]) for shape in shapes)
    assert not any(shape[-2:] in ((LENGTH // 2, LENGTH // 2), (LENGTH // 2, LENGTH)) for shape in shapes)


def test_each_named_module_frees_what_it_kept_and_whole_blocks_free_most(folder: Path) -> None:
    sizes = {case: sum(math.prod(shape) for shape in kept_in(folder, case)) for case in RECOMPUTED}
    assert sizes["blocks"] < sizes["mlp"] < sizes["nothing"]
    assert sizes["norm"] < sizes["nothing"]
    assert sizes["mlp_activation"] <= sizes["nothing"]  # what the min-cut recomputes anyway
