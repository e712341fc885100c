"""What the compiler made of the sharding table: read from the program that it compiled for 8 devices."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.hlo import HIDDEN, LAYERS, LENGTH, ROWS, loops, program, results, saved_for_backward
from tests.parallel.toy import TOY

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.slow


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


@functools.cache
def saved_in(folder: Path, case: str) -> list[tuple[int, ...]]:
    return saved_for_backward(program(folder / case, num_kv_heads=4, batch_size=ROWS // 8, **RECOMPUTED[case]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def test_neither_scores_of_attention_nor_copies_of_weights_wait_for_the_backward_pass(folder: Path) -> None:
    shapes = saved_in(folder, "nothing")
    width = TOY["intermediate_size"]
    assert any(math.prod(shape) == ROWS // 8 * LENGTH * width for shape in shapes)  # the feed-forward's, which do
    assert not any(sorted(shape) in ([HIDDEN, width], [HIDDEN, HIDDEN], [HIDDEN // 2, HIDDEN]) for shape in shapes)
    assert not any(shape[-2:] in ((LENGTH // 2, LENGTH // 2), (LENGTH // 2, LENGTH)) for shape in shapes)


def test_each_named_module_frees_what_it_kept_and_whole_blocks_free_most(folder: Path) -> None:
    sizes = {case: sum(math.prod(shape) for shape in saved_in(folder, case)) for case in RECOMPUTED}
    assert sizes["blocks"] < sizes["mlp"] < sizes["nothing"]
    assert sizes["norm"] < sizes["nothing"]
    assert sizes["mlp_activation"] <= sizes["nothing"]  # what the min-cut recomputes anyway
