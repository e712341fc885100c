"""The same loss on every mesh and with every way of recomputing, on virtual devices of the CPU."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_options import EVERYTHING
from tests.parallel.launch import (
    ALONE,
    HAS_SHARDING_REPORT,
    HAS_SPLASH,
    assert_resumed,
    assert_same,
    dump_of,
    run,
    run_on_torch,
    run_on_xla,
)
from tests.parallel.toy import POISONED, RAMP, instruction_cases
from tests.selection import Outcomes, chosen, needs_xla, runs_all
from tests.warm import python

pytestmark = [needs_xla, pytest.mark.slow]

Fields = dict[str, Any]
DDP: Fields = {"sharding_strategy": "ddp"}
FSDP: Fields = {"sharding_strategy": "fsdp"}
HSDP: Fields = {"sharding_strategy": "hsdp", "sharding_group_size": 4}
HSDP_2: Fields = {**HSDP, "sharding_group_size": 2}
ZERO1: Fields = {"sharding_strategy": "zero1"}
STRATEGIES: dict[str, Fields] = {"ddp": DDP, "fsdp": FSDP, "hsdp": HSDP}
# Options of the model, all that differ from Llama's
OPTIONS: Fields = {**EVERYTHING, "shared_norm": True, "z_loss": 1e-2, "logit_softcap": 10.0, "scale_embeddings": True}
WINDOWED: Fields = {"sliding_window": 20, "position_embedding_type": "learned_absolute"}
# Frozen projections have no gradient, and with it no marker in the backward pass
ADAPTERS: Fields = {"lora_rank": 4, "lora_target_modules": "q_proj,up_proj", "lora_init": "gaussian"}
ADAPTERS |= {"learning_rate": 3e-2}
# Of the model, by the first words of their cases' names
FORMS = {"options": OPTIONS, "window and positions": WINDOWED, "adapters": ADAPTERS}
TENSOR: Fields = {"tensor_parallel_size": 2, "batch_size": 4}
STAGES: Fields = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4, "batch_size": 1}
UNEVEN: Fields = {**STAGES, "pipeline_cuts": "2", "gradient_accumulation_steps": 2, "batch_size": 2}
PIECES: Fields = {**STAGES, "virtual_pipeline_size": 2, "sequence_parallel": True}
SEQUENCE: Fields = {"tensor_parallel_size": 4, "sequence_parallel": True}
ALL_BLOCKS: Fields = {"fsdp_activation_checkpointing": True}
EVERY_SECOND: Fields = {**ALL_BLOCKS, "selective_checkpointing": "2"}
A_THIRD: Fields = {**ALL_BLOCKS, "selective_checkpointing": "1/3"}
RECOMPUTED: dict[str, Fields] = {"none": {}, "all": ALL_BLOCKS, "every second": EVERY_SECOND, "a third": A_THIRD}
CONTEXT: Fields = {"context_parallel_size": 2}
MODULES: Fields = {"checkpoint_granularity": "selective", "checkpoint_modules": "attention,mlp,norm,core_attention"}
MODULES |= EVERY_SECOND
TOGETHER: Fields = {**ALL_BLOCKS, "checkpoint_num_layers": 3}  # of 4: a remainder
SPLASHED: Fields = {"attention_impl": "splash"}  # the TPU's kernel, interpreted
WITH_SPLASH: dict[str, Fields] = {
    "splash, fsdp x tensor, a third": {**FSDP, **TENSOR, **A_THIRD, **SPLASHED, "save_attention": True},
    "splash, stages x context, all": {**FSDP, **STAGES, **ALL_BLOCKS, **CONTEXT, "batch_size": 2, **SPLASHED},
    "splash, context x tensor": {**FSDP, **TENSOR, **CONTEXT, "batch_size": 4, **SPLASHED},
}
SPLASH = WITH_SPLASH if HAS_SPLASH else {}
# Every strategy with every way of recomputing once, and not every pair of them
PAIRS = (
    *((strategy, "none") for strategy in STRATEGIES),
    ("fsdp", "all"),
    ("hsdp", "every second"),
    ("ddp", "a third"),
)
CASES: dict[int, dict[str, Fields]] = {
    1: {"fsdp, a third": {**FSDP, **A_THIRD}},
    4: {"ddp": DDP, "fsdp, a third": {**FSDP, **A_THIRD}, "hsdp": HSDP_2},
    8: {
        **{f"{strategy}, {blocks}": {**STRATEGIES[strategy], **RECOMPUTED[blocks]} for strategy, blocks in PAIRS},
        "modules": {**FSDP, **MODULES},
        "together": {**DDP, **TOGETHER},
        "zero1": ZERO1,
        "zero2": {"sharding_strategy": "zero2", "batch_size": 1},  # accumulated, so that split gradients are kept
        "tensor 2": {**DDP, "tensor_parallel_size": 2, "batch_size": 4},
        "tensor 4": {**DDP, "tensor_parallel_size": 4, "batch_size": 8},
        "tensor 8, fewer key/value heads": {**DDP, "tensor_parallel_size": 8, "batch_size": 16},
        "tensor 8, whole key/value heads": {**DDP, "tensor_parallel_size": 8, "kv_replication": 1, "batch_size": 16},
        "tensor and sequence": {**FSDP, **SEQUENCE, **A_THIRD, "batch_size": 8},
        "fsdp x tensor, padded": {**FSDP, **TENSOR, "make_vocab_size_divisible_by": 384},
        "hsdp x tensor": {**HSDP_2, **TENSOR},
        "window and positions, context x tensor": {**FSDP, **TENSOR, **WINDOWED, **CONTEXT, "batch_size": 8},
        "context 2": {**FSDP, **CONTEXT, "batch_size": 4},
        "context 4": {"sharding_strategy": "ddp", "context_parallel_size": 4, "batch_size": 8},
        "fsdp x context x tensor": {**FSDP, **ALL_BLOCKS, **TENSOR, **CONTEXT, "batch_size": 8},
        # An average of a weight is sharded, where the weight is not
        "accumulated": {**ZERO1, **TENSOR, "ema_decay": 0.9, "batch_size": 1, "gradient_accumulation_steps": 4},
        "built first": {**FSDP, "low_cpu_fsdp": False},
        "options, fsdp x tensor": {**FSDP, **TENSOR, **OPTIONS, **A_THIRD},
        # Both stages have blocks of both kinds where a third is recomputed: 18.6 CPU s, and not 9.6
        "options, uneven stages": {**HSDP_2, **UNEVEN, **OPTIONS, **(A_THIRD if runs_all() else ALL_BLOCKS)},
        "adapters, tensor 8": {**DDP, "tensor_parallel_size": 8, "batch_size": 16, **ADAPTERS, **A_THIRD},
        "4 stages, all": {**FSDP, **STAGES, "pipeline_parallel_size": 4, "batch_size": 2, **ALL_BLOCKS},
        "2 stages of 2 pieces x tensor x context": {**FSDP, **TENSOR, **PIECES, **CONTEXT, **A_THIRD, "batch_size": 4},
        **SPLASH,
        "poisoned": {**FSDP, **POISONED},
    },
}
if not runs_all():
    CASES = {8: CASES[8]}
CASES[8] = chosen(
    CASES[8],
    (
        "ddp, none",
        "zero2",
        "tensor and sequence",
        "tensor 8, fewer key/value heads",
        "fsdp x context x tensor",
        "2 stages of 2 pieces x tensor x context",
        "options, uneven stages",
        "poisoned",
    ),
)
# Evaluated with --all only: their layouts and options are those of other cases that are
UNEVALUATED: tuple[str, ...] = ("zero2", "tensor and sequence", "tensor 8, fewer key/value heads")
UNEVALUATED = () if runs_all() else (*UNEVALUATED, "options, uneven stages", "poisoned")
CASES[8] |= {case: {**CASES[8][case], "evaluates": False} for case in UNEVALUATED}
DUMPED = "tensor and sequence"


def instructions(devices: int) -> dict[str, Fields]:
    """Packed examples; on 8 devices, each micro-batch and device has another number of trained tokens."""
    sizes = {1: {"batch_size": 16}, 8: {"batch_size": 1, **A_THIRD}}
    packed = {**FSDP, **instruction_cases()["packed"]}
    cases = {"instructions": {**packed, **sizes[devices]}} if devices in sizes else {}
    if devices == 8 and SPLASH:
        cases["instructions, context"] = {**packed, "batch_size": 2, **CONTEXT, **SPLASHED}
    return cases


def ramps(devices: int) -> dict[str, Fields]:
    """A growing global batch; on 8 devices of one micro-batch and then two, with stages of two and then four."""
    if devices != 8:
        return {"ramp": {**RAMP, "batch_size": 4}} if devices == 1 else {}
    staged = {**RAMP, "pipeline_parallel_size": 2, "sharding_strategy": "zero1"}
    return {"ramp": {**RAMP, "halfway": f"{tempfile.mkdtemp()}/run"}, "ramp, stages": staged}


@functools.cache
def outcome(devices: int) -> tuple[dict[str, Any], str]:
    """Every case on this many devices, and stderr. Level 0 lets warnings of XLA through, so that silence is absence."""
    if devices not in CASES:
        return Outcomes(), ""
    cases = {**CASES[devices], **chosen({**instructions(devices), **ramps(devices)}, ())}
    if devices == 8 and HAS_SHARDING_REPORT:
        cases[DUMPED] = {**cases[DUMPED], "dump_sharding": dump_of(DUMPED)}
    outcomes, errors = run_on_xla(devices, cases, TF_CPP_MIN_LOG_LEVEL="0")
    return Outcomes(outcomes), errors


def reference() -> dict[str, Any]:
    plain: dict[str, Any] = outcome(8)[0]["ddp, none"]
    return plain


SAME = [(devices, case, case.split(",")[0]) for devices, cases in CASES.items() for case in cases if case != "poisoned"]


@pytest.mark.parametrize(("devices", "case", "form"), SAME)
def test_losses_and_gradient_norms_are_those_of_plain_data_parallelism(devices: int, case: str, form: str) -> None:
    """Of the Llama on this engine, and of a model with options on one process of the other one."""
    got, alone = outcome(devices)[0][case], one_process()[form] if form in FORMS else reference()
    # Norms of the models with options reach 3, and are summed in another order
    assert_same(got, alone, relative=2e-5 if form in FORMS else None)
    assert alone["loss"][-1] < alone["loss"][0] - (0.0 if form in FORMS else 0.3)


@functools.cache
def one_process() -> dict[str, Any]:
    """Cases on the torch engine."""
    padded = {**instruction_cases()["padded"], "batch_size": 8}
    forms = {"ddp": DDP, "poisoned": POISONED, **FORMS}
    cases = {**{form: {**fields, "batch_size": 4} for form, fields in forms.items()}, "ramp": {**RAMP, "batch_size": 2}}
    cases = chosen({**cases, "instructions, padded": padded}, ("ddp", "poisoned", "options"))
    return Outcomes(run_on_torch(ALONE, cases))


def test_both_engines_give_the_same_losses_and_gradient_norms() -> None:
    alone = one_process()["ddp"]
    assert_same(alone, reference())


@pytest.mark.parametrize("devices", CASES)
def test_nothing_compiles_after_the_first_step(devices: int) -> None:
    # A resumed run, on 8 devices "ramp", is a new start. With stages, all micro-batches of a step are one program.
    expected = {"ramp": {0, 1}, "ramp, stages": {0, 1}} if devices == 8 else {}
    for case, got in outcome(devices)[0].items():
        assert set(got["compilations"]) == expected.get(case, {0}), case
        if case not in UNEVALUATED:
            assert got["late_compilations"] == 0, case  # a second validation, a look at the state, another step


@pytest.mark.parametrize("devices", CASES)
@pytest.mark.parametrize("figure", ["unread_fetches", "traced", "meshes"])
def test_a_step_fetches_nothing_unread_and_is_traced_once_and_an_evaluation_leaves_no_mesh(
    figure: str, devices: int
) -> None:
    """torch-xla keeps each mesh that a mark makes: a long run would end without memory."""
    figures = {case: got[figure] for case, got in outcome(devices)[0].items() if case not in UNEVALUATED}
    assert {case: count for case, count in figures.items() if count} == {}


@pytest.mark.parametrize("devices", CASES)
def test_the_compiler_reports_no_involuntary_rematerialization(devices: int) -> None:
    assert "nvoluntary full rematerialization" not in outcome(devices)[1]


@pytest.mark.skipif(not HAS_SHARDING_REPORT, reason="needs the extension sharding_report")
def test_dump_sharding_names_the_axes_and_bytes_of_every_parameter() -> None:
    held = outcome(8)[0][DUMPED]["bytes"]
    written = json.loads(Path(dump_of(DUMPED)).read_text())
    assert written["mesh"]["tensor"] == 4
    query = written["parameters"]["model.layers.self_attn.q_proj.weight"]
    assert (query["shape"], query["axes"]) == ([4, 64, 64], [None, "tensor", "shard"])
    for kind, copies in (("parameters", 1), ("moments", 2)):
        assert copies * sum(tensor["bytes_per_device"] for tensor in written[kind].values()) == held[kind]


def test_a_second_program_in_flight_has_a_thread_for_every_device() -> None:
    """Of pairs of programs with collectives some hung without; see pretraining/parallel/xla/__init__.py."""
    count = """
import json, os, torch, torch_xla
%s
(torch.ones(1).to(torch_xla.device()) + 1).cpu()
print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}))
"""
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    alone, with_engine = (
        run([*python(), "-c", count % line], **variables)[0]["threads"]
        for line in ("", "import pretraining.parallel.xla.engine")
    )
    assert with_engine >= alone + 8


@pytest.mark.parametrize("devices", CASES)
def test_after_every_step_a_device_holds_what_the_layout_counts(devices: int) -> None:
    for case, got in outcome(devices)[0].items():
        assert got["bytes"] == {kind: got["counted"][kind] for kind in ("parameters", "moments")}, case


PACKED = [(1, "instructions"), (8, "instructions"), *([(8, "instructions, context")] if SPLASH else [])]


@pytest.mark.parametrize(("devices", "case"), PACKED)
def test_packed_examples_have_the_losses_of_the_same_examples_one_per_row(devices: int, case: str) -> None:
    padded, packed = one_process()["instructions, padded"], outcome(devices)[0][case]
    assert_same(packed, padded)
    assert packed["loss"][-1] < packed["loss"][0] - 0.3


@pytest.mark.parametrize(
    ("devices", "case", "compilations"),
    [(1, "ramp", [0] * 6), (8, "ramp", [0, 0, 0, 1, 1, 1]), (8, "ramp, stages", [0, 0, 0, 0, 1, 1])],
)
def test_a_growing_global_batch_has_the_same_losses_on_every_mesh_and_engine(
    devices: int, case: str, compilations: list[int]
) -> None:
    alone, got = one_process()["ramp"], outcome(devices)[0][case]
    assert_same(got, alone)
    assert got["compilations"] == compilations


def test_a_run_resumes_bitwise_while_the_global_batch_grows() -> None:
    assert_resumed(outcome(8)[0]["ramp"])


def test_training_continues_after_a_skipped_update_and_not_after_one_too_many() -> None:
    """As on the torch engine, where updates are counted: tests/parallel/test_torch.py."""
    alone, got = one_process()["poisoned"], outcome(8)[0]["poisoned"]
    assert got["refused"] == alone["refused"]
    assert got["loss"] == pytest.approx(alone["loss"], abs=1e-5, nan_ok=True)
