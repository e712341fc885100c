"""What --plan=True prints, and that a change of the configuration moves the figures the way it should."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import main_training
from main_training import CONFIGURATION, configure
from pretraining.config.errors import ConfigError, UserError
from pretraining.extensions.units import flop
from pretraining.monitor.figures import duration
from pretraining.tools.plan.compiled import CompiledProgram, CompiledStep
from pretraining.tools.plan.devices import PLAN_KINDS
from pretraining.tools.plan.engines import engine_of
from pretraining.tools.plan.memory import stream_bytes
from pretraining.tools.plan.page import VARIED, as_json, compiled_page, flags_of, page, ranking
from pretraining.tools.plan.plan import USABLE, Plan, best_cuts, nearest_fit, plan_of, refusals, search
from pretraining.tools.plan.stages import planned_idle_share
from pretraining.tools.plan.traffic import ring
from tests.processes import call
from tests.selection import chosen
from tests.tools.importing.files import tree, write
from tests.warm import python

ROOT = Path(__file__).parents[3]


def config(**fields: Any) -> Any:
    base = {"model_variant": "llama3_8b", "sharding_strategy": "fsdp", "batch_size": 1, "seq_length": 4096}
    planned = {"plan": True, "plan_devices": 64, "plan_device_kind": "h100"}
    return CONFIGURATION(**{**base, **planned, **fields})


@pytest.mark.parametrize("stages", [1, 4])
def test_sums_of_gradients_are_compared_as_state_unless_stages_run_all_micro_batches_at_once(stages: int) -> None:
    fields = {"plan_device_kind": "tpu-v6e", "plan_devices": 16, "gradient_accumulation_steps": 4}
    plan = plan_of(config(**fields, pipeline_parallel_size=stages))
    state = plan.memory.parameters + plan.memory.moments + (plan.memory.gradients if stages == 1 else 0)
    compiled = CompiledStep("v6e:4x4", 0.0, [CompiledProgram("step", 1)], {}, {}, 0, 0, 0, 0, 0)
    (row,) = (line for line in compiled_page(plan, compiled).splitlines() if line.startswith("bytes of state"))
    assert row.split()[3] == f"{state:,}"


@pytest.mark.parametrize("name", PLAN_KINDS)
def test_a_kind_of_device_has_every_figure_and_is_planned_for_the_engine_that_runs_on_it(name: str) -> None:
    kind, is_tpu = PLAN_KINDS[name], name.startswith("tpu")
    assert min(kind.device.peak_flops, kind.device.memory, kind.link, kind.network) > 1e9
    assert kind.per_host > 1 and 0 < kind.efficiency < 1 and kind.network < kind.link
    assert engine_of(config(plan_device_kind=name)) == kind.engine == ("xla" if is_tpu else "torch")
    assert (kind.topology_axes > 0) == is_tpu
    for chips, topology in kind.slices.items():
        assert math.prod(map(int, topology.split("x"))) == chips


@pytest.mark.parametrize(
    ("kind", "devices", "topology", "parts", "group"),
    [
        ("tpu-v6e", 8, "", "1 slice of 2x4: 1 host of 8 devices", 8),
        ("tpu-v6e", 16, "", "1 slice of 4x4: 4 hosts of 4 devices", 16),
        ("tpu-v6e", 512, "", "2 slices of 16x16: 128 hosts of 4 devices", 256),
        ("tpu-v5e", 32, "2x4", "4 slices of 2x4: 4 hosts of 8 devices", 8),
        ("tpu-v5p", 8, "", "1 slice of 2x2x2: 2 hosts of 4 devices", 8),
        ("tpu-v4", 12, "", "3 slices of 2x2x1: 3 hosts of 4 devices", 4),
        ("h100", 32, "", "4 hosts of 8 devices", 8),
        ("trn1", 2, "", "1 host of 2 devices", 2),
    ],
)
def test_a_group_of_hsdp_is_a_slice_of_tpus_or_a_host(
    kind: str, devices: int, topology: str, parts: str, group: int
) -> None:
    fields = {"plan_device_kind": kind, "plan_devices": devices, "plan_topology": topology}
    plan = plan_of(config(sharding_strategy="hsdp", **fields))
    assert f"hosts          {parts}" in page(plan)
    assert (plan.mesh.replica, plan.mesh.shard) == (devices // group, group)


def test_8_billion_parameters_fit_the_chips_of_a_slice_and_not_of_one_of_its_hosts() -> None:
    # By the page of v6e a slice of 16 chips has 4 hosts of 4; 44.28 GiB were counted by hand for groups of 4.
    fields = {"plan_device_kind": "tpu-v6e", "plan_devices": 16, "sharding_strategy": "hsdp", "batch_size": 2}
    whole = plan_of(config(**fields, fsdp_activation_checkpointing=True))
    host = plan_of(config(**fields, fsdp_activation_checkpointing=True, sharding_group_size=4))
    assert whole.fits and not host.fits
    assert host.memory.total / 2**30 == pytest.approx(44.28, abs=0.01)


@pytest.mark.slow
def test_the_page_shows_everything_and_needs_neither_data_nor_devices(tmp_path: Path) -> None:
    flags = ["--plan", "--plan_devices=512", "--plan_device_kind=tpu-v5p", "--model_variant=llama3_70b"]
    flags += ["--sharding_strategy=fsdp", "--batch_size=1", "--fsdp_activation_checkpointing"]
    command = [*python(), "main_training.py", *flags, f"--plan_json={tmp_path / 'p'}"]
    page = call(command, env={**os.environ, "PJRT_DEVICE": "TPU"}).stdout
    assert "70,553,706,496 parameters" in page
    assert "model.layers.*.mlp.down_proj.weight" in page
    assert ": fits in" in page
    assert len(page.splitlines()) < 50
    written = json.loads((tmp_path / "p").read_text())
    assert written["fits"] is True
    assert sum(weight["bytes"] for weight in written["parameters"]) == written["bytes_per_device"]["parameters"]


def test_a_plan_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    from pretraining.tools.plan.show import show

    with pytest.raises(UserError, match=f"--plan_json={tmp_path}: cannot be written .*; give another file"):
        show(config(plan_devices=8, plan_device_kind="h100", plan_json=str(tmp_path)))


def test_what_does_not_fit_says_so_names_the_nearest_change_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    from pretraining.tools.plan.show import show

    big = config(model_variant="llama3_70b", plan_devices=16, plan_device_kind="tpu-v5e", sharding_strategy="ddp")
    assert show(big) == 0
    said = capsys.readouterr().out
    assert "does not fit" in said
    assert "nearest" in said
    asked = plan_of(config(batch_size=64, fsdp_activation_checkpointing=False))
    change = nearest_fit(asked)
    assert change is not None and plan_of(change).fits
    assert change.global_batch_size == asked.config.global_batch_size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plan_devices": 0}, "needs --plan_devices=N"),
        ({"plan_device_kind": ""}, "needs --plan_device_kind: one of"),
        ({"plan": False}, "--plan_devices=64.* needs --plan"),
        ({"plan_device_kind": "h1000"}, "must be one of"),
    ],
)
def test_a_plan_without_devices_or_their_kind_is_refused(fields: dict[str, Any], message: str) -> None:
    given = {"plan": True, "plan_devices": 64, "plan_device_kind": "h100", "use_dummy_dataset": True, **fields}
    with pytest.raises(ConfigError, match=message):
        configure(given)


PIPED: dict[str, Any] = {"model_variant": "llama3_70b", "sharding_strategy": "ddp", "tensor_parallel_size": 8}
PIPED |= {"batch_size": 1, "gradient_accumulation_steps": 16, "plan_devices": 256, "plan_device_kind": "tpu-v5p"}


@pytest.mark.slow
def test_a_pipeline_s_figures_follow_from_its_stages_and_ticks() -> None:
    whole, piped = plan_of(config(**PIPED)), plan_of(config(**PIPED, pipeline_parallel_size=8))
    blocks, of_stage = ([plan.bytes_of(w) for w in plan.weights if "proj" in w.name] for plan in (whole, piped))
    assert blocks == [8 * held for held in of_stage]
    assert planned_idle_share(piped.config) == 7 / 16
    assert 1.4 < 8 * piped.executed / whole.executed < 1 + 7 / 16  # of an eighth of the tokens; the head never idles
    (moved,) = (one for one in piped.collectives if one.axes == ("stage",))
    assert moved.bytes == 4 * (16 + 7 + 1) * stream_bytes(piped.config, piped.mesh)
    halves = plan_of(config(**PIPED, pipeline_parallel_size=8, virtual_pipeline_size=2))
    assert planned_idle_share(halves.config) == 7 / 32
    assert halves.executed < piped.executed
    assert "8 stages of 2 pieces of 5 layers in 39 ticks; idle for 21.9% of their work" in page(halves)
    padded = plan_of(config(**{**PIPED, "gradient_accumulation_steps": 32}, pipeline_parallel_size=32))
    assert {weight.tensors for weight in padded.weights if ".layers." in weight.name} == {3}
    assert "32 stages of 3 layers, 16 of which in all are padding" in page(padded)
    few = replace(config(**PIPED), model_variant="llama3_8b", plan_devices=8, tensor_parallel_size=1)
    assert {plan.mesh.stage for plan in search(few)} == {1, 2, 4, 8}


def test_stages_of_the_torch_engine_hold_and_wait_for_what_their_schedule_says() -> None:
    common = {**PIPED, "engine": "torch", "plan_device_kind": "h100", "plan_devices": 64, "pipeline_parallel_size": 4}

    def planned(**fields: Any) -> Plan:
        return plan_of(config(**common, **fields))

    whole, plain = plan_of(config(**{**common, "pipeline_parallel_size": 1})), planned()
    gpipe, halves = planned(pipeline_schedule="GPipe"), planned(virtual_pipeline_size=2)
    assert [planned_idle_share(plan.config) for plan in (gpipe, plain, halves)] == [3 / 16, 3 / 16, 3 / 32]
    held = [memory.activations for memory in plain.stage_memory]
    assert held[0] > held[1] > held[2] > held[3]  # 1F1B: 4, 3, 2 and 1 micro-batches
    assert gpipe.memory.activations > 3 * held[0]  # all 16
    parameters = [memory.parameters for memory in plain.stage_memory]
    assert sum(parameters) == whole.memory.parameters
    assert parameters[1] == parameters[2] < parameters[0] < parameters[3]  # embedding; final norm and head
    assert halves.stage_memory[3].logits and not halves.stage_memory[0].logits
    assert "4 stages of 20 layers in 2 pieces, Interleaved1F1B; idle for 9.4% of their work" in page(halves)
    assert halves.step_seconds < plain.step_seconds


@given(pieces_of_model=st.integers(2, 16), layers=st.integers(1, 100))
def test_a_balanced_pipeline_counts_embedding_and_head_as_layers(pieces_of_model: int, layers: int) -> None:
    layers = max(layers, 2 * pieces_of_model - 2)
    stages: dict[str, Any] = {"pipeline_parallel_size": pieces_of_model, "pipeline_balance": True}
    divided = config(num_layers=layers, engine="torch", **stages).division.pieces()
    assert [layer for piece in divided for layer in piece] == list(range(layers))
    lengths = [len(piece) for piece in divided]
    assert min(lengths) >= 1
    lengths[0] += 1
    lengths[-1] += 1
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.slow
def test_a_plan_names_the_cuts_with_the_shortest_step() -> None:
    fields: dict[str, Any] = {"pipeline_parallel_size": 4, "gradient_accumulation_steps": 16, "num_layers": 8}
    fields |= {"plan_devices": 8, "sharding_strategy": "zero1"}
    plan = plan_of(config(**fields))
    asked: Any = plan.config
    steps = {}
    for cuts in combinations(range(7), 3):
        other = plan_of(replace(asked, pipeline_cuts=",".join(map(str, cuts))))
        steps[vars(other.config)["pipeline_cuts"]] = other.step_seconds
    best = best_cuts(plan)
    assert best is not None and best.step_seconds == min(steps.values()) < plan.step_seconds
    assert f"best cuts      --pipeline_cuts={vars(best.config)['pipeline_cuts']}: " in page(plan)
    assert best_cuts(best) is None and "best cuts" not in page(best)
    assert [found for found in search(plan.config) if best_cuts(found)] == []
    uneven = plan_of(replace(asked, engine="xla", pipeline_cuts=vars(best.config)["pipeline_cuts"]))
    even = best_cuts(uneven)
    assert even is not None
    assert vars(even.config)["pipeline_cuts"] == ""  # the stages share the head, and pieces are padded


def test_sizes_that_do_not_divide_are_refused_as_they_are_in_training() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 .*does not divide the 12 devices"):
        plan_of(config(plan_devices=12, tensor_parallel_size=8))


@settings(max_examples=8)
@given(st.sampled_from(["ddp", "zero1", "fsdp", "hsdp"]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 32, 64]))
def test_splitting_never_holds_more_and_recomputing_never_keeps_more(split: str, tensor: int, devices: int) -> None:
    base = config(sharding_strategy=split, tensor_parallel_size=tensor, plan_devices=devices)
    plan, more = plan_of(base), plan_of(replace(base, plan_devices=2 * devices))
    assert more.memory.parameters <= plan.memory.parameters
    assert more.memory.moments <= plan.memory.moments
    again = plan_of(replace(base, fsdp_activation_checkpointing=True))
    assert again.memory.activations < plan.memory.activations
    assert again.compute_seconds > plan.compute_seconds
    assert 0 < plan.mfu < 1
    assert plan.fits == (plan.memory.total <= USABLE * plan.kind.device.memory)


def test_a_ring_moves_what_theory_says() -> None:
    assert ring(800, 8) == 700
    assert ring(800, 8, both=True) == 1400
    assert ring(800, 1) == 0


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_gradients_that_are_summed_in_bf16_send_half_the_bytes(strategy: str) -> None:
    sent = []
    for dtype in ("fp32", "bf16"):
        fields = {"sharding_strategy": strategy, "reduce_dtype": dtype, "plan_device_kind": "tpu-v6e"}
        plan = plan_of(config(**fields))
        by_purpose = {one.purpose: one.bytes for one in plan.collectives}
        sent.append((by_purpose.pop("gradients"), by_purpose))
    (fp32, others), (bf16, same_others) = sent
    assert bf16 == fp32 // 2
    assert others == same_others


BIG: dict[str, Any] = {"model_variant": "llama3_70b"}
RECOMPUTED: dict[str, Any] = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/2"}
SEQUENCE: dict[str, Any] = {"sharding_strategy": "ddp", "tensor_parallel_size": 2, "sequence_parallel": True}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "pipeline_cuts": "14", "gradient_accumulation_steps": 8}
SEARCHED: dict[str, dict[str, Any]] = {  # devices and their kind, which is read in any case -> what is asked for
    "8-h100": {},
    "8-A100-80": {},
    "8-tpu-v6e": {},
    "64-h100": BIG,
    "64-tpu-v5p": {**BIG, "batch_size": 4},
    "64-trn2": {"gradient_accumulation_steps": 4},
    "8-H100": {**SEQUENCE, **RECOMPUTED},
    "8-tpu-v5p": {**STAGES, "batch_size": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(SEARCHED, ("8-A100-80", "8-H100", "8-tpu-v5p")))
def test_the_flags_of_every_row_give_its_figures_and_train_on_its_engine(case: str) -> None:
    devices, _, kind = case.partition("-")
    asked = {"model_variant": "llama3_8b", "batch_size": 2, "seq_length": 4096, **SEARCHED[case], "plan": True}
    asked |= {"plan_devices": int(devices), "plan_device_kind": kind}
    base = configure(asked)
    plans = search(base)
    assert all(plan.fits for plan in plans) and len({plan.config.tokens_per_step for plan in plans}) == 1
    times = [plan.step_seconds for plan in plans]
    assert times == sorted(times)
    lines = ranking(plans, base).splitlines()
    assert max(map(len, lines[:-1])) <= 120
    assert lines[-1] == flags_of(plans[0].config, base)
    assert sum(" yours" in line for line in lines) == 1
    assert lines[1].split()[:2] == ["1", f"{plans[0].step_seconds:.3f}"]
    fixed = {name: value for name, value in asked.items() if name not in VARIED or name == "plan_devices"}
    for number, plan in enumerate(plans[:10]):
        flags = dict(flag.removeprefix("--").split("=") for flag in flags_of(plan.config, base).split())
        again = plan_of(configure({**(fixed if number % 2 else asked), **flags}))
        assert again.memory == plan.memory
        assert again.step_seconds == plan.step_seconds
        assert refusals(again) == []


@pytest.mark.slow
def test_a_plan_that_the_engine_refuses_says_so_and_a_search_leaves_it_out() -> None:
    refused = config(context_parallel_size=2, seq_length=4098)
    assert [problem.subject for problem in refusals(plan_of(refused))] == ["--context_parallel_size=2"]
    assert "refused        --context_parallel_size=2 " in page(plan_of(refused))
    assert {plan.config.context_parallel_size for plan in search(config(plan_devices=8, seq_length=4098))} == {1}


def test_the_page_shows_speed_duration_and_operations_that_agree() -> None:
    plan = plan_of(config(num_steps=10_000, plan_price=2.5))
    lines = {line[:15].strip(): line[15:] for line in page(plan).splitlines()}
    assert lines["speed"] == f"{plan.tokens_per_second:,.0f} tokens/s, {plan.tokens_per_second / 64:,.0f} per device"
    assert lines["run"].startswith(f"10,000 steps: {duration(10_000 * plan.step_seconds)}, 2.62 B tokens, ")
    assert lines["run"].endswith(flop(10_000 * plan.config.tokens_per_step * plan.flops))
    hours = 64 * 10_000 * plan.step_seconds / 3600
    assert lines["cost"] == f"{2.5 * hours:,.0f} at 2.5 per device and hour"
    longer = max(plan.compute_seconds, plan.overlapped_seconds)
    assert plan.step_seconds == pytest.approx(longer + plan.exposed_seconds)
    for fields, products in (({"mixed_precision": False}, "fp32"), ({"precision": "fp8"}, "fp8"), ({}, "")):
        note = f"assumed        bf16 products, although this run's are {products}: the time is that of bf16"
        assert (note in page(plan_of(config(**fields)))) == bool(products)


def test_a_run_whose_batches_grow_takes_as_long_on_the_page_as_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("pretraining.extensions.batch_rampup")
    plan = plan_of(config(num_steps=10_000, global_batch_size=256, rampup_batch_size="64,64,500_000"))
    assert plan.run_seconds == pytest.approx(plan.config.sequences_of_run / 256 * plan.step_seconds)
    assert plan.run_seconds < 0.9 * 10_000 * plan.step_seconds
    assert f"10,000 steps: {duration(plan.run_seconds)}, " in page(plan)
    assert as_json(plan)["run_seconds"] == plan.run_seconds


def test_steps_with_shorter_rows_count_as_plans_of_such_rows_do() -> None:
    pytest.importorskip("pretraining.extensions.length_stages")
    whole, short = (config(num_steps=10_000, batch_size=n, seq_length=length) for n, length in ((4, 4096), (16, 1024)))
    mixed = replace(whole, seq_length_stages="1024:4000,4096:6000,1024:7000")
    plans = [plan_of(whole), plan_of(short), plan_of(mixed)]
    seconds, operations = ([getattr(plan, name) for plan in plans] for name in ("run_seconds", "run_flops"))
    assert seconds[1] < seconds[2] == pytest.approx(0.5 * seconds[0] + 0.5 * seconds[1])
    assert operations[1] < operations[2] == (operations[0] + operations[1]) // 2
    assert f"10,000 steps: {duration(seconds[2])}, 10.49 B tokens, {flop(operations[2])}\n" in page(plans[2])
    assert plan_of(replace(whole, seq_length_stages="1024:20000")).run_flops == operations[1]


def test_a_plan_of_a_file_has_its_devices_unless_a_flag_names_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, tree("nxdt", {"trainer.devices": 8, "trainer.num_nodes": 2}))
    flags = {"import_config": path, "vocab_size": "1000", "plan": "True", "plan_device_kind": "trn1"}
    assert main_training.main(**flags) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1] == "Planned for the 16 devices of the file; --plan_devices=N plans for others"
    assert re.search(r"^devices +16 x ", printed, re.MULTILINE)
    assert main_training.main(**flags, plan_devices="4") == 0
    printed = capsys.readouterr().out
    assert "Planned for" not in printed and re.search(r"^devices +4 x ", printed, re.MULTILINE)
