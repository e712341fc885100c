"""Single rules against numbers that were worked out by hand or published."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pretraining.extensions.schedules")  # GPT-NeoX's are among them
pytest.importorskip("pretraining.extensions.optimizers")

import main_training
from main_training import CHECKS, CONFIGURATION
from pretraining.config.errors import Problem
from pretraining.config.flags import read, read_values
from pretraining.config.support import unsupported as limits
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.optim.schedule import learning_rate
from pretraining.tools.document import MIGRATING
from pretraining.tools.importing.foreign import ForeignConfig
from pretraining.tools.importing.neox import era_of
from pretraining.tools.importing.neox_model import feed_forward
from pretraining.tools.importing.resolve import ImportResult, import_foreign, settings
from pretraining.tools.library import Training
from tests.processes import words
from tests.selection import complete, runs_all
from tests.tools.importing.files import drop, put, tree, write

TABLES = tomllib.loads(Path(__file__).with_name("behaviours.toml").read_text())
SHARED = ("nxdt", "nemo") if runs_all() else ("nxdt",)  # whose mappings are the same
SECTIONS = {"data.tokenizer.": "model.tokenizer.", "data.": "model.data.", "distributed_strategy.": "model."}  # NeMo's
OF_FMS = TABLES.pop("fms")
BEHAVIOURS = [
    (kind, row) for name, rows in TABLES.items() for kind in (SHARED if name == "shared" else (name,)) for row in rows
]
NAMES = [f"{kind}-{next(iter(row['item']))}" for kind, row in BEHAVIOURS]
ENOUGH = {"vocab_size": "100", "use_dummy_dataset": "True", "import_only": "True"}


def read_tree(node: dict[str, Any], folder: Path, **flags: object) -> ImportResult:
    return import_foreign({"import_config": write(folder, node), **ENOUGH, **flags}, (), CONFIGURATION)


def config(node: dict[str, Any], folder: Path, **flags: object) -> TrainConfig:
    imported = read_tree(node, folder, **flags)
    assert not [*imported.problems, *imported.config_problems]
    return imported.config


def name_of(key: str, kind: str) -> str:
    """Return the key of a row in a file of this kind."""
    section = next((name for name in SECTIONS if kind == "nemo" and key.startswith(name)), "")
    return SECTIONS.get(section, "") + key.removeprefix(section)


def with_keys(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The small file with the keys of a row."""
    node = tree(kind)
    for key, value in changes.items():
        name = name_of(key, kind)
        put(node, name, None if value == "null" else value)
        if value == "absent":
            drop(node, name)
    return node


def outcome(kind: str, changes: dict[str, Any], flags: dict[str, Any], folder: Path) -> ImportResult:
    path = write(folder, with_keys(kind, changes))
    return import_foreign({"import_config": path, **ENOUGH, **flags}, CHECKS, CONFIGURATION)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The settings of a row's file without the row's own keys."""
    folder = tmp_path_factory.mktemp("before")
    known: dict[str, dict[str, Any]] = {}

    def resolved(kind: str, file: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
        name = f"{kind} {file} {flags}"
        if name not in known:
            known[name] = settings(outcome(kind, file, flags, folder).config)
        return known[name]

    return resolved


def assert_answer(row: dict[str, Any], problems: list[Problem]) -> None:
    """Assert that a row is refused or not, as it says, for the reason that it gives."""
    why = row.get("why", "")
    assert bool(problems) == (row["answer"] == "refused") and all(why in found.remedy for found in problems), problems


def assert_settings(row: dict[str, Any], resolved: dict[str, Any], before: dict[str, Any]) -> None:
    """Assert that the settings of a row follow from it, and that every other one stays as it was."""
    expected = {name: None if value == "null" else value for name, value in row.get("here", {}).items()}
    assert {name: resolved[name] for name in expected} == expected
    assert {name for name, value in before.items() if value != resolved[name]} <= expected.keys()


@pytest.mark.slow
@complete
@pytest.mark.parametrize(("kind", "row"), BEHAVIOURS, ids=NAMES)
def test_every_listed_behaviour_is_that_of_the_importer(
    kind: str, row: dict[str, Any], before: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file, flags, keys, why = row.get("file", {}), row.get("flags", {}), row["item"], row.get("why", "")
    imported = outcome(kind, {**file, **keys}, flags, tmp_path)
    problems = [*imported.problems, *imported.config_problems]
    assert_answer(row, problems)
    if problems:
        values = {key: None if value in ("null", "absent") else value for key, value in (file | keys).items()}
        names = {f"{name_of(key, kind)}={value}" for key, value in values.items()}
        assert {found.subject for found in problems} <= names | set(row.get("named", []))
        return
    assert_settings(row, settings(imported.config), before(kind, file, flags))
    reports = [*imported.keys, *imported.defaults]
    own = {report.status for report in reports if report.source_key in {name_of(key, kind) for key in keys}}
    assert ("different" in own) == (row["answer"] == "different")
    assert not why or sum(why in report.note for report in reports) >= len(keys), [str(report) for report in reports]


def flagged(flags: dict[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The settings of a command line, and what is wrong with it."""
    given = {"use_dummy_dataset": "True", **{name: value for name, value in flags.items() if value != "absent"}}
    line = read(words(given), CONFIGURATION)
    config, problems = read_values(line.flags, CHECKS, CONFIGURATION)
    return settings(config), [*line.problems, *problems]


@complete
@pytest.mark.parametrize("row", OF_FMS, ids=lambda row: "-".join(row["item"]))
def test_every_listed_flag_of_fms_fsdp_is_that_of_the_command_line(row: dict[str, Any]) -> None:
    resolved, problems = flagged({**row.get("file", {}), **row["item"]})
    assert_answer(row, problems)
    if not problems:
        assert_settings(row, resolved, flagged(row.get("file", {}))[0])


@complete
def test_the_fields_and_the_calls_that_the_tables_written_by_hand_name_are_there() -> None:
    by_hand = MIGRATING.read_text().partition("<!-- end migration -->")[2]
    rows = [line.split(" | ") for line in by_hand.splitlines() if line.startswith("| `")]
    named = {name for _, fields, _ in rows for name in re.findall(r"`(\w+)`", fields)}
    assert len(named) > 60 and named <= set(settings(CONFIGURATION()))
    calls = re.findall(r"`(training|pretraining)\.(\w+)", by_hand)
    owners = {"training": Training, "pretraining": main_training}
    assert calls and all(callable(getattr(owners[owner], name)) for owner, name in calls)


# ---- GPT-NeoX


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 64, 256]))
def test_a_gated_width_is_about_a_third_of_the_written_one(written: int, multiple: int) -> None:
    leaves = {"hidden_size": 64, "activation": "geglu", "intermediate_size": written, "mlp_multiple_of": multiple}
    reading = feed_forward(ForeignConfig(leaves))
    if reading.status != "unsupported":
        width = reading.values["intermediate_size"]
        assert width % multiple == 0
        assert abs(width - written / 3) <= 2 * multiple + 1


@pytest.mark.parametrize(
    ("leaves", "era"),
    [
        ({"save_interval": 1}, "2022"),
        ({"train_iters": 143_000}, "2022"),
        ({"mlp_multiple_of": 1}, "head"),
        ({"mlp_multiple_of": 256, "eval_batch_size": 8}, "2022"),  # StableLM's
        ({"rope_fusion": True}, "head"),
        ({"te_fp8_margin": 0}, "head"),
    ],
)
def test_the_era_follows_from_the_keys(leaves: dict[str, Any], era: str) -> None:
    assert era_of({"checkpoint_factor": 10, **leaves}, "auto")[0] == era
    assert era_of(leaves, "2023")[0] == "2023"


OPEN_ERA = {"activation": "gelu", "intermediate_size": 64}  # checkpoint_factor is in files of all three eras


def test_an_era_that_the_keys_leave_open_is_asked_for_where_it_matters(tmp_path: Path) -> None:
    node = drop(tree("neox", OPEN_ERA), "use_bias_in_mlp")
    (problem,) = read_tree(node, tmp_path).problems
    assert problem.subject == "--neox_era=auto"
    assert {"neox2022_cosine", "neox_cosine", "2022", "2023", "head"} <= set(re.split(r"[^\w]", problem.remedy))
    assert "weight_decay" not in problem.remedy  # the file gives it
    for chosen in ({"neox_era": "2022"}, {"lr_schedule": "cosine"}):
        assert not read_tree(node, tmp_path, **chosen).problems
    assert not read_tree(put(node, "lr_decay_style", "constant"), tmp_path).problems
    (problem,) = read_tree(drop(node, "weight_decay"), tmp_path).problems
    assert "weight_decay=0.01" in problem.remedy and "0.1 since" in problem.remedy


@pytest.mark.parametrize(("type", "asked"), [("Adam", True), ("SM3", False), ("OneBitAdam", False)])
def test_an_era_is_not_asked_for_because_of_a_default_that_the_optimizer_does_not_read(
    type: str, asked: bool, tmp_path: Path
) -> None:
    """SM3 has no weight decay, and DeepSpeed reads OneBitAdam's from optimizer.params alone."""
    node = drop(drop(tree("neox", {**OPEN_ERA, "lr_decay_style": "constant"}), "use_bias_in_mlp"), "weight_decay")
    node["optimizer"] |= {"type": type} | ({"params": {"lr": 1e-3}} if type == "SM3" else {})
    assert [problem.subject for problem in read_tree(node, tmp_path).problems] == ["--neox_era=auto"] * asked


@pytest.mark.parametrize("kind", ["nxdt", "neox"])
def test_the_devices_of_the_source_are_read_like_every_other_flag(kind: str, tmp_path: Path) -> None:
    assert config(tree(kind), tmp_path, source_world_size="0.8e1").global_batch_size == 32
    report = read_tree(tree(kind), tmp_path, tensor_parallel_size="two")
    (problem,) = [*report.problems, *report.config_problems]
    assert problem.subject == "--tensor_parallel_size=two"


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("nemo", "model.data.data_impl", "mmap"), ("nemo", "model.data.data_impl", "mock"), ("neox", "data_impl", "mmap")],
)
def test_shards_of_the_command_line_need_not_be_of_the_files_kind(
    kind: str, key: str, value: str, tmp_path: Path
) -> None:
    flags = {"import_config": write(tmp_path, put(tree(kind), key, value)), "vocab_size": "100", "import_only": "True"}
    imported = import_foreign({**flags, "data_path": "/mine"}, (), CONFIGURATION)
    assert (imported.config.file_type, imported.config.use_dummy_dataset) == ("auto", False)
    (row,) = (row for row in imported.keys if row.source_key == key)
    assert (row.values, "left out because of other flags" in row.note) == ({}, True)
    flags |= {"data_path": "/mine", "file_type": "parquet"}
    assert import_foreign(flags, (), CONFIGURATION).config.file_type == "parquet"


def test_a_corpus_without_a_share_for_validation_is_not_validated(tmp_path: Path) -> None:
    node = tree("neox", {"data_path": "/c/text", "split": "1, 0.0, 0", "eval_interval": 4})
    flags = {"import_config": write(tmp_path, node), "vocab_size": "100", "import_only": "True"}
    imported = import_foreign(flags, (), CONFIGURATION)
    assert (imported.config.val_interval, imported.config.val_steps, imported.config.test_steps) == (0, 0, 0)


def test_stablelm_s_keys_are_read(tmp_path: Path) -> None:
    """Those of StableLM 2 12B, whose feed-forward layer is 13,824 wide."""
    node: dict[str, Any] = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 32, "seq_length": 4096}
    node |= {"attention_head_type": "groupedquery", "num_kv_heads": 8, "qk_norm": True, "rotary_interleaved": False}
    node |= {"mlp_multiple_of": 256, "mlp_type": "gated", "activation": "silu", "no_weight_tying": True}
    node |= {"gpt_j_residual": True, "gpt_j_tied": True, "pos_emb": "rotary", "rotary_pct": 0.25, "train_iters": 9}
    node |= dict.fromkeys(("use_bias_in_norms", "use_bias_in_qk_norm", "use_bias_in_attn_linear"), False)
    node |= {"use_bias_in_mlp": False, "max_position_embeddings": 4096, "train_micro_batch_size_per_gpu": 1}
    node |= {"full_precision_lm_cross_entropy": True, "eval_batch_size": 1, "wandb_name": "", "cooldown": 0.0}
    imported = config(node, tmp_path, vocab_size="100352")
    shape = model_shape(imported)
    assert (shape.intermediate_size, shape.num_kv_heads, imported.activation) == (13_824, 8, "swiglu")
    assert imported.shared_norm and imported.qk_norm and not imported.norm_bias


def test_stable_lm_2_s_schedule_is_that_of_its_report(tmp_path: Path) -> None:
    """Of its 1.6 B file: 9720 steps of warm-up, a cosine to a quarter of 540,000, then an inverse square root."""
    schedule = {"lr_decay_style": "hybrid_cosine_inv_sqrt_2", "train_iters": 540_000, "lr_decay_iters": 540_000}
    schedule |= {"warmup": 0.018, "cooldown": 0.0, "min_lr": 1e-4, "optimizer.params.lr": 1e-3}
    imported = config(tree("neox", schedule), tmp_path)
    rates = {step: learning_rate(imported, step) for step in (0, 4860, 9720, 135_000, 400_000)}
    assert rates == pytest.approx({0: 0, 4860: 5e-4, 9720: 9.9713e-4, 135_000: 5.5e-4, 400_000: 2.23688e-4}, rel=1e-4)
    cooled = config(tree("neox", {**schedule, "cooldown": 0.1}), tmp_path)
    assert learning_rate(cooled, 513_000) == pytest.approx(learning_rate(imported, 486_000) / 2)


def test_gpt_neox_at_its_defaults_is_pythia_160m(tmp_path: Path) -> None:
    """162,322,944 parameters with 50304 rows, as published: biases, LayerNorm, GELU and an untied head."""
    node: dict[str, Any] = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048}
    node |= {"max_position_embeddings": 2048, "pos_emb": "rotary", "no_weight_tying": True, "rope_fusion": False}
    node |= {"train_iters": 100, "train_micro_batch_size_per_gpu": 4}
    assert model_shape(config(node, tmp_path, vocab_size="50304")).parameters == 162_322_944


# ---- fp8


FP8: dict[str, Any] = {
    "trainer.precision": "bf16",
    "model.transformer_engine": True,
    "model.fp8": True,
    "model.fp8_e4m3": False,
    "model.fp8_hybrid": True,
    "model.fp8_wgrad": True,
}


def test_fp8_of_nemo_is_ours_but_for_the_factors_and_the_report_says_so(tmp_path: Path) -> None:
    pytest.importorskip("pretraining.extensions.fp8")
    imported = read_tree(tree("nemo", FP8), tmp_path)
    assert not [*imported.problems, *imported.config_problems]
    assert (imported.config.precision_mode, imported.config.mixed_precision) == ("fp8", True)
    (note,) = (row.note for row in imported.keys if row.source_key == "model.fp8")
    assert "instead of earlier ones" in note
    assert [problem.subject for problem in limits(imported.config, "xla")] == ["--precision=fp8"]
    assert config(tree("nemo", FP8), tmp_path, precision="mixed_bf16").precision_mode == "mixed_bf16"


@pytest.mark.parametrize(
    ("key", "value", "remains"),
    [
        ("trainer.precision", 32, "fp32"),
        ("model.transformer_engine", False, "mixed_bf16"),
        ("model.fp8_e4m3", True, "mixed_bf16"),
        ("model.fp8_hybrid", False, "mixed_bf16"),
        ("model.fp8_wgrad", False, "mixed_bf16"),
        ("model.fp8_multi_head_attention", True, "fp8"),
    ],
)
def test_another_fp8_is_refused(key: str, value: Any, remains: str, tmp_path: Path) -> None:
    node = tree("nemo", {**FP8, key: value})
    (problem,) = read_tree(node, tmp_path).problems
    assert "fp8" in problem.subject
    assert config(node, tmp_path, import_strict="False").precision_mode == remains
    if problem.subject.startswith("model.fp8="):
        assert config(node, tmp_path, precision="fp8").precision_mode == "fp8"
    assert not read_tree(put(node, "model.fp8", False), tmp_path).problems
