from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from main_training import CONFIGURATION, configure
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.flags import read
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.optim.schedule import learning_rate
from pretraining.tools.document import ROOT
from pretraining.tools.importing.flags import flags_from_files
from pretraining.tools.importing.formats import FORMATS
from pretraining.tools.importing.reading import leaves, read_mapping
from pretraining.tools.importing.report import as_data, as_text
from pretraining.tools.importing.resolve import FIXED, ORIGIN, ImportResult, import_foreign
from pretraining.tools.importing.resolve import settings as settings_of
from tests.parallel.launch import run_on_torch
from tests.processes import call
from tests.selection import complete, needs
from tests.tools.importing.files import FILES, LLAMA, SETTINGS, drop, put, tree, write

KINDS = tuple(FILES)
ENOUGH = {"vocab_size": "100", "use_dummy_dataset": "True"}  # what none of the files says


def resolved(node: dict[str, Any], folder: Path, name: str = "config.json", **flags: object) -> ImportResult:
    return import_foreign({"import_config": write(folder, node, name), **ENOUGH, **flags}, (), CONFIGURATION)


def from_flags(flags: Mapping[str, object]) -> TrainConfig:
    return configure(flags, report=False)


def config(node: dict[str, Any], folder: Path, **flags: object) -> TrainConfig:
    return from_flags({"import_config": write(folder, node), **ENOUGH, **flags})


def refusal(node: dict[str, Any], folder: Path, **flags: object) -> str:
    with pytest.raises(ConfigError) as error:
        config(node, folder, **flags)
    return str(error.value)


# ---- what files come to


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_training_in_three_formats_is_one_configuration(kind: str, tmp_path: Path) -> None:
    result = settings_of(config(tree(kind), tmp_path))
    assert {name: result[name] for name in SETTINGS} == SETTINGS


def test_nemo_and_the_nxdt_file_made_of_it_differ_only_where_the_report_says_so(tmp_path: Path) -> None:
    nemo, nxdt = (settings_of(config(tree(kind), tmp_path)) for kind in ("nemo", "nxdt"))
    differences = {name for name in nemo if nemo[name] != nxdt[name]}
    assert differences == {"sharding_strategy", "log_grad_norm"}  # see SOURCES in nxdt.py


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_the_learning_rate_and_the_size_are_reported_once(kind: str, tmp_path: Path) -> None:
    result = resolved(tree(kind), tmp_path)
    assert result.format.name == kind
    assert sorted(row.source_key for row in result.keys) == sorted(key for key, _ in leaves(tree(kind)))
    assert {row.status for row in result.keys} <= {"mapped", "implied", "different", "ignored"}
    assert all(row.note for row in result.keys if row.status in ("implied", "different", "ignored"))
    report = as_data(result, "0,5,11")
    # embedding and head 2 x 100 x 32; a block: q and o 2 x 32^2, k and v 2 x 32 x 16, 3 x 32 x 64, two norms of 32
    assert report["parameters"] == 2 * 100 * 32 + 32 + 2 * (2 * 32**2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
    assert report["learning_rate"] == {str(step): learning_rate(result.config, step) for step in (0, 5, 11)}
    assert list(as_data(result)["learning_rate"]) == ["0", "3", "6", "11"]
    assert report["learning_rate"]["0"] == pytest.approx(1e-3 if kind == "neox" else 3e-3 / 4)
    assert sum(report["summary"].values()) == len(report["keys"]) == len(list(leaves(tree(kind))))
    assert "unsupported" in as_text(result, report)


# ---- metamorphic


def shuffled(node: Any, seed: int) -> Any:
    if not isinstance(node, dict):
        return node
    names = list(node)
    random.Random(seed).shuffle(names)
    return {name: shuffled(node[name], seed) for name in names}


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS))
def test_the_order_of_keys_does_not_matter(seed: int, kind: str, tmp_path: Path) -> None:
    assert config(shuffled(tree(kind), seed), tmp_path) == config(tree(kind), tmp_path)


@settings(max_examples=10)
@given(dashed=st.sets(st.sampled_from(sorted(FILES["neox"]))))
def test_neox_keys_may_have_dashes(dashed: set[str], tmp_path: Path) -> None:
    node = {name.replace("_", "-") if name in dashed else name: value for name, value in tree("neox").items()}
    assert config(node, tmp_path) == config(tree("neox"), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_and_json_are_the_same(kind: str, tmp_path: Path) -> None:
    node = read_mapping(Path(write(tmp_path, tree(kind))))  # numbers that are numbers in JSON too
    as_yaml, as_json = resolved(node, tmp_path, "config.yaml"), resolved(node, tmp_path, "config.json")
    assert as_yaml.flags == as_json.flags
    assert as_yaml.keys == as_json.keys


@pytest.mark.parametrize("kind", KINDS)
def test_ignored_keys_do_not_matter(kind: str, tmp_path: Path) -> None:
    before = resolved(tree(kind), tmp_path)
    rules = {row.source_key: FORMATS[kind].mapping_of(row.source_key) for row in before.keys if row.status == "ignored"}
    free = [key for key, rule in rules.items() if rule and rule.description.startswith("ignored")]
    assert len(free) >= 2
    assert config(tree(kind, dict.fromkeys(free, "something else")), tmp_path) == before.config


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_typo_is_unsupported_and_the_key_is_suggested(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    excluded = ("num_layers", "model.micro_batch_size", "model.encoder_seq_length", "model.tensor_model_parallel_size")
    known = [key for key, _ in leaves(tree(kind)) if key not in excluded]  # those name the format or are referred to
    key = data.draw(st.sampled_from(known))
    node = drop(tree(kind), key)
    report = refusal(put(node, f"{key}x", 1), tmp_path)
    assert f"{key}x=1" in report
    assert f"did you mean {key}?" in report


JUNK: list[Any] = [None, True, False, "x", "", "1.0e_8", "???", -1, 0, 1, 3, 0.5, 1e30, float("inf"), float("nan")]
JUNK += [[], [1, "a"], {"z": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_no_value_of_any_key_leads_to_anything_but_a_report_or_an_error_for_the_user(
    kind: str, data: st.DataObject, tmp_path: Path
) -> None:
    keys = [key for key in FORMATS[kind].mappings if "*" not in key]
    chosen = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True))
    node = tree(kind)
    for key in chosen:
        put(node, key, deepcopy(data.draw(st.sampled_from(JUNK))))  # the next key may be inside this one
    try:
        result = resolved(node, tmp_path)
    except UserError:
        return
    assert len(result.keys) == len(list(leaves(node)))
    json.dumps(as_data(result), default=str)
    as_text(result, as_data(result))


# ---- what is refused, each with its key, value and reason


@pytest.mark.parametrize(("kind", "key"), [("nemo", "model.moe.top_k"), ("nxdt", "x.y"), ("neox", "no_such_key")])
def test_an_unknown_key_stops_the_run_unless_it_is_allowed(kind: str, key: str, tmp_path: Path) -> None:
    node = put(tree(kind), key, 1)
    assert f"{key}=1" in refusal(node, tmp_path)
    result = resolved(node, tmp_path, import_strict="False")
    assert not [*result.problems, *result.config_problems]
    assert [row.status for row in result.keys if row.source_key == key] == ["unsupported"]
    assert f"warning: {key}=1" in as_text(result, as_data(result))


@needs("lora")
def test_a_fine_tuning_file_trains_on_the_shards_that_were_prepared_from_its_records(tmp_path: Path) -> None:
    instructions: dict[str, Any] = {"packing": True, "seq_length": 16, "dev_choose_samples": 100}
    instructions |= {"use_sft_style_data_module": True, "data_impl": "mmap"}  # which that module does not read
    instructions |= {"train_dir": "/records/training.jsonl", "val_dir": "/records/validation.jsonl"}
    node = merged(tree("nxdt"), {"data": instructions, "model": {"fusions": {"ring_attention": True}}})
    node["model_alignment_strategy"] = {"sft": {"packing": True}, "peft": {"lora_rank": 4, "merge_sharded_lora": False}}
    given = config(node, tmp_path, data_path="/shards")
    assert (given.data_path, given.col_name, given.seq_length, given.max_samples) == ("/shards", "tokens", 16, None)
    assert (given.max_position_embeddings, given.file_type, vars(given)["lora_rank"]) == (32, "auto", 4)
    node["data"]["train_dir"] = "/rows"
    assert config(node, tmp_path, data_path="/shards").max_samples == 100


def test_the_schedule_of_nxdt_s_page_is_read_although_it_is_not_indented(tmp_path: Path) -> None:
    path = Path(write(tmp_path, tree("nxdt"), "page.yaml"))
    indented = path.read_text()
    path.write_text(re.sub(r"(?<=sched:\n)(      .*\n){4}", lambda lines: lines[0].replace("      ", "    "), indented))
    assert "    sched:\n    name: CosineAnnealing\n" in path.read_text()
    assert from_flags({"import_config": str(path), **ENOUGH}) == config(tree("nxdt"), tmp_path)


@needs("trackers")
def test_keys_of_the_file_are_overridden_as_in_hydra(tmp_path: Path) -> None:
    path = write(tmp_path, tree("nemo"))
    words = ["trainer.max_steps=20", "--model.optim.lr=1e-3", "++model.data.data_prefix=[.5,/c/a,.5,/c/b]"]
    words += ["--tracker=None", "--resuming_dataset=False", f"--import_config={path}", "--vocab_size=100"]
    line = read(words, CONFIGURATION)
    assert not line.problems
    imported = from_flags(line.flags)
    assert (imported.num_steps, imported.learning_rate, imported.datasets) == (20, 1e-3, "a.idx,b.idx")
    with pytest.raises(UserError, match="is no value of YAML"):
        from_flags({**line.flags, "import_overrides": "trainer.max_steps=[1"})
    alone = read(["--model_variant=tiny", "--use_dummy_dataset", "trainer.max_steps=20"], CONFIGURATION)
    with pytest.raises(ConfigError, match=r"import_overrides=trainer\.max_steps=20 .*import_config"):
        from_flags(alone.flags)


@pytest.mark.parametrize("key", ["trainer.max_steps", "training.trainer.max_steps"])
@pytest.mark.parametrize("is_composed", [False, True])
def test_a_key_of_the_launcher_s_file_is_overridden_under_both_its_names(
    is_composed: bool, key: str, tmp_path: Path
) -> None:
    node = {"run": {"name": "small"}, **tree("nemo")}
    result = resolved({"training": node} if is_composed else node, tmp_path, import_overrides=f"{key}=7")
    assert (result.config.num_steps, result.config.num_layers) == (7, 2)


def test_an_override_replaces_the_key_in_the_file_that_has_it(tmp_path: Path) -> None:
    first, second = {"optimizer": tree("neox")["optimizer"]}, drop(tree("neox"), "optimizer")
    paths = ",".join(write(tmp_path, node, f"{name}.json") for name, node in (("a", first), ("b", second)))
    overrides = "optimizer.params.lr=1e-2\nzero_optimization.stage=1"
    imported = from_flags({"import_config": paths, **ENOUGH, "import_overrides": overrides})
    assert (imported.learning_rate, imported.sharding_strategy) == (1e-2, "zero1")


def test_megatron_s_names_of_recomputation_are_flags() -> None:
    line = read(["--recompute-num-layers=2", "--recompute_granularity", "full", "--recompute_method=x"], CONFIGURATION)
    assert line.flags == {"checkpoint_num_layers": "2", "checkpoint_granularity": "full"}
    assert [problem.subject for problem in line.problems] == ["--recompute_method=x"]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    node = put(put(tree("nemo"), "model.fp8", True), "model.num_layer", 3)
    report = refusal(node, tmp_path, learning_rate="fast", optimiser_eps="1e-9")
    for subject in ("model.fp8=True", "model.num_layer=3", "--learning_rate=fast", "--optimiser_eps=1e-9"):
        assert subject in report


def test_a_batch_that_nemo_would_refuse_on_the_file_s_devices_is_one_for_other_devices(tmp_path: Path) -> None:
    """The launcher's files have devices that their batches do not divide over: its users give their own."""
    node = put(tree("nemo"), "model.global_batch_size", 40)
    assert config(node, tmp_path).global_batch_size == 40
    (warning,) = resolved(node, tmp_path).warnings
    assert warning.subject == "model.global_batch_size=40" and "use 32 or 48" in warning.remedy


# ---- flags


def test_flags_win_over_the_file_and_the_report_says_so(tmp_path: Path) -> None:
    result = resolved(tree("nemo"), tmp_path, learning_rate="1e-3")
    assert result.config.learning_rate == 1e-3
    (row,) = (row for row in result.keys if row.source_key == "model.optim.lr")
    assert "overridden by command line: --learning_rate=1e-3" in row.note
    assert row.values == {"learning_rate": "1e-3"}


@complete
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("nemo", {"model.optim.sched.warmup_steps": 50}),
        ("nemo", {"model.optim.sched": {"name": "WarmupHoldPolicy", "hold_ratio": 0.25}}),
        (
            "nemo",
            {"trainer.val_check_interval": 50, "trainer.limit_val_batches": 2, "model.data.splits_string": "8,1,1"},
        ),
        ("neox", {"lr_decay_fraction": 0.5, "lr_decay_style": "linear"}),
        ("neox", {"eval_interval": 50, "data_path": "/c/text"}),
        ("neox", {"optimizer.type": "OneBitAdam"}),
    ],
    ids=str,
)
def test_what_follows_from_the_steps_follows_from_those_of_the_flag(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    key = {"nemo": "trainer.max_steps", "neox": "train_iters"}[kind]
    flagged = resolved(tree(kind, changes), tmp_path, num_steps="100").config
    assert settings_of(flagged) == settings_of(resolved(tree(kind, {**changes, key: 100}), tmp_path).config)


def test_a_flag_takes_its_companion_with_it(tmp_path: Path) -> None:
    assert config(tree("nemo"), tmp_path, precision="mixed_bf16").mixed_precision is True
    assert config(tree("neox"), tmp_path, lr_warmup_steps="2").lr_warmup_ratio is None


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_resolved_configuration_reads_back_as_itself(kind: str, suffix: str, tmp_path: Path) -> None:
    before = config(tree(kind), tmp_path)
    path = tmp_path / f"dump.{suffix}"
    dump = json.dumps if suffix == "json" else yaml.safe_dump
    path.write_text(dump(settings_of(before)))
    assert from_flags({"config_file": str(path)}) == before


@pytest.mark.slow
def test_files_with_stages_train_with_them_to_the_losses_without(tmp_path: Path) -> None:
    neox = tree("neox", {"pipe_parallel_size": 2, "zero_optimization.stage": 1})
    nxdt = tree("nxdt", {"distributed_strategy.pipeline_model_parallel_size": 2})
    flags = {"engine": "torch", "device": "cpu", "num_steps": 3, "lr_warmup_steps": 1}
    cases = {
        f"{kind} {import_pp}": asdict(config(node, tmp_path, import_pp=import_pp, **flags))
        for kind, node in (("neox", neox), ("nxdt", nxdt))
        for import_pp in ("keep", "fold")
    }
    outcomes = run_on_torch(2, cases)
    for kind in ("neox", "nxdt"):
        assert [cases[f"{kind} {name}"]["pipeline_parallel_size"] for name in ("keep", "fold")] == [2, 1]
        for figure in ("loss", "grad_norm"):
            kept, folded = (outcomes[f"{kind} {name}"][figure] for name in ("keep", "fold"))
            assert kept == pytest.approx(folded, rel=1e-6) and len(kept) == 3


def test_a_toml_file_of_our_own_names_is_read_under_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model_variant = "tiny"\nuse_dummy_dataset = true\nseq_length = 64\ncheckpoint_interval = 9\n'
        "learning_rate = 1e-3\nstrip_tokens = [1, 2]\n"
    )
    result = from_flags({"config_file": str(path), "learning_rate": "2e-3"})
    assert (result.model_variant, result.use_dummy_dataset, result.learning_rate) == ("tiny", True, 2e-3)
    assert result.strip_tokens == "1,2"


def test_a_mistake_names_the_key_and_the_file_that_it_came_from(tmp_path: Path) -> None:
    node = put(tree("neox"), "log_interval", 0)
    own = write(tmp_path, {"num_workers": 0, "import_config": write(tmp_path, node)}, "own.json")
    with pytest.raises(ConfigError) as error:
        from_flags({"config_file": own, "seq_length": "-1", "batch_size": "two", **ENOUGH})
    problems = {problem.subject: problem.remedy for problem in error.value.problems}
    assert problems["--num_workers=0"].endswith(f"[from num_workers=0 in {own}]")
    assert problems["--report_interval=0"].endswith(f"[from log_interval=0 in {tmp_path / 'config.json'}]")
    assert "[from" not in problems["--seq_length=-1"] + problems["--batch_size=two"]  # the command line's


def test_every_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    open_text = Path.read_text

    def read_text(path: Path, **words: str) -> str:
        read.append(path.name)
        return open_text(path, **words)

    monkeypatch.setattr(Path, "read_text", read_text)
    node = put(tree("nxdt"), "model.model_config", write(tmp_path, LLAMA, "model.json"))
    own = write(tmp_path, {"import_config": write(tmp_path, node)}, "own.json")
    configure({"config_file": own, **ENOUGH})
    assert sorted(read) == ["config.json", "model.json", "own.json"]


# ---- Hugging Face's config.json

CONTRADICTING = tree("nxdt", {"data.seq_length": 64})
DEEPSPEEDS = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}  # whose keys NeoX's file has, too
UNINDENTED = tree("nxdt", {"model.optim.sched": None, "model.optim.warmup_steps": 3})


@needs("huggingface")
@pytest.mark.parametrize(
    ("flag", "node", "words"),
    [
        ("import_config", {"lr": 1}, "format is unknown"),
        ("import_config", {"model_type": "llama", "hidden_size": 8}, "use --model_config_path"),
        ("import_config", CONTRADICTING, "model.encoder_seq_length=32  contradicts data.seq_length=64"),
        ("import_config", UNINDENTED, "indent model.optim.warmup_steps under it"),
        ("model_config_path", {**LLAMA, "hidden_sise": 32}, "hidden_sise=32"),
        *(("config_file", tree(kind), f"file of {FORMATS[kind].title}: use --import_config") for kind in KINDS),
        ("config_file", {"training": "x"}, r"--training=x +no such flag"),
        ("import_config", {"training": "x"}, "format is unknown"),
        ("import_config", DEEPSPEEDS, "format is unknown"),
        ("config_file", DEEPSPEEDS, r"--train_micro_batch_size_per_gpu=4 +no such flag"),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(flag: str, node: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, ConfigError), match=words):
        from_flags({flag: write(tmp_path, node), **ENOUGH})


def test_an_nxdt_file_takes_the_dimensions_it_leaves_out_from_its_model_config(tmp_path: Path) -> None:
    changes = {"model_source": "hf", "model.model_config": "model.json"}
    node = drop(drop(tree("nxdt", changes), "model.ffn_hidden_size"), "model.num_kv_heads")
    assert "model.model_config=model.json" in refusal(node, tmp_path)
    path = write(tmp_path, LLAMA, "model.json")
    own = config(node, tmp_path)
    assert (own.num_layers, own.intermediate_size, own.num_kv_heads) == (2, 48, 2)  # 2 layers: the file's own
    other = put(deepcopy(node), "model.layernorm_epsilon", 1e-5)  # which NxD Training reads from config.json alone
    replaced = {notice.remedy.split()[1] for notice in resolved(other, tmp_path).warnings}
    assert replaced == {"num_hidden_layers=3", "max_position_embeddings=64", "rms_norm_eps=1e-06"}
    put(node, "model.model_config", "/elsewhere/model.json")
    assert config(node, tmp_path, model_config_path=path) == own
    sized = put(deepcopy(node), "model.hidden_size", 64)
    for width in (8, 16):  # which NxD Training does not read
        headed = write(tmp_path, {**LLAMA, "head_dim": width}, "headed.json")
        wide = config(sized, tmp_path, model_config_path=headed)
        assert (wide.hidden_size, model_shape(wide).head_dim) == (64, 16)
        warnings = resolved(sized, tmp_path, model_config_path=headed).warnings
        assert any("replaces head_dim=" in notice.remedy for notice in warnings) == (width != 16)
    llama3 = model_shape(config(node, tmp_path, model_variant="llama3_8b", num_kv_heads="2"))
    assert (llama3.num_layers, llama3.intermediate_size) == (2, 14336)


# ---- formats


def test_neox_files_are_merged_in_any_order_and_a_key_in_two_of_them_is_an_error(tmp_path: Path) -> None:
    node = tree("neox")
    rest = {key: node.pop(key) for key in ("train_iters", "optimizer")}
    model, run = write(tmp_path, node, "a.yml"), write(tmp_path, rest, "b.json")
    for paths in (f"{model},{run}", f"{run},{model}"):
        assert from_flags({"import_config": paths, **ENOUGH}) == config(tree("neox"), tmp_path)
    write(tmp_path, {**rest, "seq_length": 16}, "b.json")
    with pytest.raises(UserError, match=r"seq_length: is both in .*a\.yml and in .*b\.json"):
        import_foreign({"import_config": f"{model},{run}", **ENOUGH}, (), CONFIGURATION)


def test_of_two_spellings_of_a_neox_key_the_later_file_counts(tmp_path: Path) -> None:
    model = write(tmp_path, tree("neox"), "a.json")
    later = write(tmp_path, {"seq-length": 16, "log-interval": 3}, "b.json")
    both = from_flags({"import_config": f"{model},{later}", **ENOUGH})
    assert (both.seq_length, both.report_interval) == (16, 3)
    notices = import_foreign({"import_config": f"{model},{later}", **ENOUGH}, (), CONFIGURATION).warnings
    assert {notice.subject for notice in notices} == {f"seq_length=32 in {model}", f"log_interval=1 in {model}"}
    assert all(later in notice.remedy for notice in notices)
    assert from_flags({"import_config": f"{later},{model}", **ENOUGH}).seq_length == 32


# ---- NeMo's launcher

LAUNCHER: dict[str, Any] = {
    "run": {"name": "small", "results_dir": "${base_results_dir}/${.name}", "time_limit": "0-01:30:00"},
    "exp_manager": {"explicit_log_dir": "${training.run.results_dir}/results"},
    "model": {
        "activations_checkpoint_method": "block",
        "activations_checkpoint_num_layers": 0,
        "rampup_batch_size": None,
        "data": {"data_prefix": [1.0, "${data_dir}/text_document"]},
        "tokenizer": {"model": "${data_dir}/tokenizer.model"},
        "ffn_hidden_size": "${multiply:${training.model.num_attention_heads},16}",
    },
    "trainer": {"max_time": "05:23:30:00"},
}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(below.get(key, {}), value) if isinstance(value, dict) else value for key, value in above.items()
    }
    return {**below, **both}


@needs("clock")
@pytest.mark.parametrize("is_composed", [False, True])
def test_a_launcher_s_file_is_read_raw_and_composed(is_composed: bool, tmp_path: Path) -> None:
    node = merged(tree("nemo"), LAUNCHER)
    node["model"]["max_position_embeddings"] = "${training.model.encoder_seq_length}"
    outside = {"stages": ["training"], "cluster": {"partition": "${cluster.nothing}"}} if is_composed else {}
    result = resolved({**outside, "training": node} if is_composed else node, tmp_path)
    assert not [*result.problems, *result.config_problems]
    assert result.format.name == "nemo"
    assert (result.config.max_position_embeddings, result.config.intermediate_size) == (32, 64)
    status = {row.source_key: (row.status, row.note) for row in result.keys}
    for key, field in (("exp_manager.explicit_log_dir", "log_dir"), ("model.data.data_prefix", "data_path")):
        assert status[key][0] == "ignored"
        assert f"--{field}" in status[key][1]
    assert {status[key][0] for key in ("run.results_dir", "model.activations_checkpoint_num_layers")} == {"ignored"}
    assert set(status) == {key for key, _ in leaves(node)} | {key for key, _ in leaves(outside)}


def test_data_that_a_file_leaves_open_are_asked_for_by_the_run(tmp_path: Path) -> None:
    node = put(tree("nemo"), "model.data.data_prefix", "???")
    with pytest.raises(ConfigError, match="--data_path"):
        from_flags({"import_config": write(tmp_path, node), "vocab_size": "100"})


# ---- tables


@complete
@pytest.mark.parametrize("kind", KINDS)
def test_every_target_is_a_field_and_every_default_has_a_rule(kind: str) -> None:
    known = {field.name for field in fields(CONFIGURATION)}
    assert {name for rule in FORMATS[kind].mappings.values() for name in rule.fields} <= known | FIXED.keys()
    assert FORMATS[kind].defaults.keys() <= FORMATS[kind].mappings.keys() and set(ORIGIN) <= known


# ---- the command

SCRIPT = (sys.executable, str(ROOT / "main_training.py"), "--import_only")


def test_import_only_prints_and_writes_the_report_also_of_what_it_refuses_and_touches_nothing(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    path = write(tmp_path, put(tree("nemo"), "model.data.data_prefix", ["1.0", "/no/such/corpus"]))
    done = call([*SCRIPT, f"--import_config={path}", f"--import_report={target}", "--import_lr_steps=0,3"])
    assert done.stderr == ""
    report = json.loads(target.read_text())
    assert set(report) >= {"config", "parameters", "learning_rate", "keys", "summary"}
    assert list(report["learning_rate"]) == ["0", "3"]
    assert report["parameters"] is None  # no vocabulary was given
    assert f"{len(report['keys'])} keys:" in done.stdout
    path = write(tmp_path, put(tree("nemo"), "model.fp8", True))
    done = call([*SCRIPT, f"--import_config={path}", f"--import_report={target}"], code=2)
    assert "model.fp8=True" in done.stderr
    assert json.loads(target.read_text())["summary"]["unsupported"] == 1


def test_nothing_is_printed_without_a_foreign_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags_from_files({"model_variant": "tiny"}, CONFIGURATION)
    assert capsys.readouterr().out == ""
