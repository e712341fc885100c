"""Collectives and products read from the text of a program. The texts are excerpts of what the compiler writes."""

from __future__ import annotations

from collections import Counter

import pytest

from pretraining.tools.plan.hbm import hbm_bytes
from pretraining.tools.plan.program import kernel_flops, product_flops, program_collectives

# A loop of four turns in steps of two that passes a part on, as a TPU's compiler writes a gathered product: the counter
# is not noted, the collective in the fusion is spread over two instructions of one channel.
WINDOWED = """
%windowed_dot_general_body_ag.1 (param: (bf16[8,256], u32[])) -> (bf16[8,256], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %param = (bf16[8,256]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %part = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%param), index=0
  %count = u32[]{:T(128)} get-tuple-element(%param), index=1
  %start = (bf16[8,256]{1,0}, bf16[8,256]{1,0}, u32[], u32[]) collective-permute-start(%part), channel_id=1
  %done = bf16[8,256]{1,0} collective-permute-done(%start)
  %first = f32[4,16]{1,0} fusion(%part), kind=kOutput, calls=%fused.1
  %next = u32[]{:T(128)} add(%count, %two)
  ROOT %out = (bf16[8,256]{1,0}, u32[]{:T(128)}) tuple(%done, %next)
}

%fused.1 (p: bf16[8,256]) -> f32[4,16] {
  %a = bf16[2,4,32]{2,1,0} parameter(0)
  %b = bf16[2,32,16]{2,1,0} parameter(1)
  %all-gather.1 = bf16[16,256]{1,0} all-gather(%p), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %product = f32[2,4,16]{2,1,0} convolution(%a, %b), window={size=2 stride=1 lhs_dilate=2}, dim_labels=0bf_0io->0bf
}

%fused.2 (zeros: bf16[16,256], p: bf16[8,256]) -> bf16[16,256] {
  ROOT %laid-out = bf16[16,256]{1,0} dynamic-update-slice(%zeros, %p, %here, %here)
}

%cond.1 (param: (bf16[8,256], u32[])) -> pred[] {
  %bound = u32[]{:T(128)} constant(8)
  %param.1 = (bf16[8,256]{1,0}, u32[]{:T(128)}) parameter(0)
  %turn = u32[]{:T(128)} get-tuple-element(%param.1), index=1
  ROOT %less = pred[]{:T(512)} compare(%turn, %bound), direction=LT
}

ENTRY %main.1 (x: bf16[8,256]) -> f32[4] {
  %x = bf16[8,256]{1,0} parameter(0)
  %begin = u32[] constant(0)
  %all-gather.2 = bf16[16,256]{1,0} all-gather(%x), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
  %tuple = (bf16[8,256]{1,0}, u32[]) tuple(%x, %begin)
  %while.1 = (bf16[8,256]{1,0}, u32[]) while(%tuple), condition=%cond.1, body=%windowed_dot_general_body_ag.1
  %sum = f32[64]{0} all-reduce(%x), channel_id=3, replica_groups=[2,2]<=[4], to_apply=%add
  %cut = f32[64]{0} all-reduce(%x), channel_id=4, replica_groups=[1,4]<=[4], to_apply=%add
  %slice = f32[16]{0} dynamic-slice(%cut, %begin), dynamic_slice_sizes={16}
  %place = bf16[16,256]{1,0} fusion(%zeros, %x), kind=kLoop, calls=%fused.2
  %laid = bf16[16,256]{1,0} all-reduce(%place), channel_id=7, replica_groups={{0,1,2,3}}, to_apply=%add
  %scattered = f32[16]{0} reduce-scatter(%x), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  ROOT %swapped = bf16[8,256]{1,0} all-to-all(%x), channel_id=6, replica_groups={{0,1},{2,3}}, dimensions={0}
}
"""


def test_loops_count_their_iterations_and_instructions_of_one_channel_count_once() -> None:
    part, gathered = 8 * 256 * 2, 16 * 256 * 2
    sent: Counter[str] = Counter()
    for collective in program_collectives(WINDOWED):
        sent[collective.purpose] += collective.bytes
    assert sent == {
        # of the loop's four turns, of the channel in two instructions, and of the sum of parts, each in its place
        "all-gather": 4 * part + 2 * gathered * 3 // 4,
        "all-reduce": 2 * 64 * 4 // 2,  # over two
        "reduce-scatter": 2 * 64 * 4 * 3 // 4,  # the one that is cut at once, and the one that says so
        "all-to-all": part // 2,
    }


def test_a_collective_overlaps_if_a_product_runs_between_its_start_and_its_end() -> None:
    assert [one.operation for one in program_collectives(WINDOWED) if one.overlaps] == []
    lines = WINDOWED.splitlines()
    done = next(number for number, line in enumerate(lines) if "%done =" in line)
    lines[done], lines[done + 1] = lines[done + 1], lines[done]  # the product, and then the end
    assert [one.times for one in program_collectives("\n".join(lines)) if one.overlaps] == [4]
    fused = program_collectives(WINDOWED.replace("fused.1", "async_collective_fusion.1"))
    assert [one.dtype for one in fused if one.overlaps] == ["bf16"]


# A fusion that reads a slice of an operand and writes a part of it in place, ten times; one array is in on-chip memory.
MEMORY = """
%body (carried: (f32[100,8], u32[])) -> (f32[100,8], u32[]) {
  %carried = (f32[100,8]{1,0}, u32[]) parameter(0)
  %stack = f32[100,8]{1,0} get-tuple-element(%carried), index=0
  %near = f32[100,8]{1,0:T(8,128)S(1)} copy(%stack)
  ROOT %next = f32[100,8]{1,0} fusion(%stack, %near), kind=kLoop, calls=%update
}

%update (a: f32[100,8], b: f32[100,8]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[100,8]{1,0} parameter(1)
  %row = f32[1,8]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %out = f32[100,8]{1,0} dynamic-update-slice(%a, %row, %i, %i)
}

%condition (carried: (f32[100,8], u32[])) -> pred[] {
  ROOT %yes = pred[] constant(1)
}

ENTRY %main (x: f32[100,8]) -> f32[100,8] {
  %x = f32[100,8]{1,0} parameter(0)
  ROOT %loop = (f32[100,8]{1,0}, u32[]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""  # noqa: E501


def test_slices_updates_in_place_and_on_chip_memory_count_what_moves() -> None:
    stack, row = 100 * 8 * 4, 8 * 4
    moved = stack + 2 * row  # a copy to the chip; a row that is read, and one that is written
    assert hbm_bytes(MEMORY) == 10 * moved


def test_a_batched_product_written_as_a_convolution_counts_its_products() -> None:
    assert product_flops(WINDOWED) == 4 * 2 * (2 * 4 * 16 * 32)


# Kernels of attention as a TPU's compiler writes them: forward, backward of q, of k and v, and torch_tpu's of q.
SPLASH = """
ENTRY %main (x: bf16[8,64,16]) -> bf16[8,64,16] {
  %one = (f32[64,128]{1,0}, bf16[8,64,16]{2,1,0S(1)}, f32[8,64,128]{2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,1,1]{2,1,0}, bf16[8,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, s32[64,128]{1,0}}, metadata={source_file="splash_attention_kernel.py"}
  %two = (f32[64,128]{1,0}, bf16[8,64,16]{2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, f32[8,1,64]{2,1,0}, bf16[8,64,16]{2,1,0}}, metadata={source_file="splash_attention_kernel.py"}
  %three = (bf16[2,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}) custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, bf16[8,64,16]{2,1,0}}, metadata={source_file="splash_attention_kernel.py"}
  %torch_tpu = bf16[8,64,16]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, bf16[2,64,16]{2,1,0}, bf16[8,64,16]{2,1,0}, f32[8,1,64]{2,1,0}, f32[8,1,64]{2,1,0}, bf16[8,64,16]{2,1,0}}
}
"""  # noqa: E501


def test_the_products_of_attention_kernels_are_counted_from_their_operands() -> None:
    assert kernel_flops(SPLASH, visible=0.5) == (2 + 3 + 4 + 3) * 2 * 8 * 64 * 64 * 16 * 0.5
    assert product_flops(SPLASH) == 0


def test_a_loop_without_a_counter_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a counter"):
        program_collectives(WINDOWED.replace("direction=LT", "direction=NE"))
