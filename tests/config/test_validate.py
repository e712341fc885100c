"""What is refused whatever the machine, and what each refusal names."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from main_training import CHECKS, CONFIGURATION
from pretraining.checkpoint.compatibility import check_resume, saved_config
from pretraining.config.declaration import Above, AtLeast, OneOf, Resume, Setting, settings_of
from pretraining.config.errors import ConfigError
from pretraining.config.flags import read_values
from pretraining.config.grammar import parse_selective
from pretraining.config.validate import problems
from pretraining.config.variants import VARIANTS, model_shape
from tests.selection import needs

SETTINGS = settings_of(CONFIGURATION)

CUSTOM: dict[str, Any] = {"model_variant": "custom", "num_layers": 4, "hidden_size": 64, "intermediate_size": 160}
CUSTOM |= {"num_attention_heads": 8, "vocab_size": 512, "seq_length": 64}
COSINE: dict[str, Any] = {"lr_schedule": "cosine", "num_steps": 100, "learning_rate": 1e-3}
HEADS: dict[str, Any] = {**CUSTOM, "head_dim": 8}
STAGES: dict[str, Any] = {**HEADS, "pipeline_parallel_size": 4, "gradient_accumulation_steps": 8, "num_layers": 8}
RECOMPUTED: dict[str, Any] = {"fsdp_activation_checkpointing": True}


def found(**settings: Any) -> list[str]:
    """The problems of a dummy run with these settings, one text each."""
    config = CONFIGURATION(**{"use_dummy_dataset": True, **settings})
    return [f"{problem.subject} {problem.remedy}" for problem in problems(config, CHECKS)]


def test_every_variant_a_custom_model_and_a_run_that_ends_in_its_warm_up_are_valid() -> None:
    for variant, shape in VARIANTS.items():
        assert not found(model_variant=variant, seq_length=min(4096, shape.max_position_embeddings))
    assert not found(**CUSTOM) and not found(**CUSTOM, run_name="n" * 255)
    schedule = {"lr_schedule": "cosine", "lr_warmup_steps": 10, "lr_decay_steps": 100}
    assert not found(model_variant="tiny", seq_length=64, num_steps=4, **schedule)
    assert not found(checkpoint_interval=2, checkpoint_seconds=60, ckpt_load_path="/", load_weights_only=True)


NUMBERS = [setting for setting in SETTINGS.values() if setting.kind in (int, float)]
CHOICES = [setting for setting in SETTINGS.values() if isinstance(setting.constraint, OneOf)]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_every_number_has_a_range_and_one_outside_is_one_problem_that_names_it(setting: Setting) -> None:
    assert isinstance(setting.constraint, AtLeast | Above)
    (problem,) = found(**{setting.name: setting.kind(-2)})
    assert problem == f"--{setting.name}={setting.kind(-2)} must be {setting.constraint.requirement}"


@pytest.mark.slow
@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_a_number_far_above_any_run_is_refused_as_a_flag_and_in_a_file(setting: Setting) -> None:
    values: list[Any] = [2**63 if setting.kind is int else 10**30, 10**30, -(10**30), "9" * 5000, math.inf]
    values += ["1e300", "-1e308", "inf", "-inf", "nan"]
    for value in [*values, 10**9] if setting.resume is Resume.SHAPE else values:
        (problem, *_) = read_values({"use_dummy_dataset": True, setting.name: value}, CHECKS, CONFIGURATION)[1]
        assert problem.subject.startswith(f"--{setting.name}="), problem
        assert len(max(str(ConfigError([problem])).splitlines(), key=len)) < 600
        is_saved = setting.resume in (Resume.SHAPE, Resume.FUNCTION)
        if is_saved and isinstance(value, int | float) and math.isfinite(value):
            with pytest.raises(ConfigError, match=f"--{setting.name}=.* in the checkpoint: must be"):
                saved_config({setting.name: setting.kind(value)}, CONFIGURATION)


@pytest.mark.parametrize("setting", CHOICES, ids=lambda setting: setting.name)
def test_an_unknown_choice_is_one_problem_that_lists_the_choices(setting: Setting) -> None:
    (problem,) = found(**{setting.name: "foo"})
    assert f"--{setting.name}=foo" in problem
    assert isinstance(setting.constraint, OneOf)
    assert all(choice in problem for choice in setting.constraint.choices)


# Settings that contradict, and what the message must name: both fields, and the way out.
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"eval_tasks": "q.jsonl", "tokenizer_path": "t.model"}, "--eval_tasks=q.jsonl .*--eval_interval"),
    ({"eval_tasks": "q.jsonl", "eval_interval": 5}, "--eval_tasks=q.jsonl .*--tokenizer_path"),
    ({"num_kv_heads": 5}, "--num_kv_heads=5 .*num_attention_heads=32.* 16 or 32"),
    ({"num_attention_heads": 7, "num_kv_heads": 7}, "--num_attention_heads=7 .*hidden_size=4096.*--head_dim"),
    ({**CUSTOM, "hidden_size": 24}, "--num_attention_heads=8 .*hidden_size=24 .*even"),
    ({"seq_length": 5000}, "--seq_length=5000 .*max_position_embeddings=4096"),
    ({"seq_length": 4096, "max_position_embeddings": 4000}, "--seq_length=4096 .*max_position_embeddings=4000"),
    ({"rope_scaling_type": "llama3", "rope_low_freq_factor": 4.0}, "rope_high_freq_factor.*rope_low_freq_factor"),
    ({"global_batch_size": 7}, "--global_batch_size=7 .*batch_size=2; use 6 or 8"),
    ({"global_batch_size": 6, "gradient_accumulation_steps": 4}, "=6 .*batch_size=2 x .*_steps=4 = 8; use 8"),
    ({"precision": "mixed_bf16", "mixed_precision": False}, "--precision.*mixed_precision=False"),
    ({"precision": "fp32", "mixed_precision": True}, "--precision=fp32 .*--mixed_precision=False"),
    ({"engine": "xla", "device": "cuda"}, "--device=cuda .*PJRT_DEVICE.*--engine=torch"),
    ({"engine": "xla", "cpu_offload": True}, "--cpu_offload.*engine=xla"),
    ({"device": "cpu", "cpu_offload": True}, "--cpu_offload.*torch on cpu"),
    ({"datasets": "a,b", "weights": "1"}, "--weights=1 .*datasets=a,b has 2"),
    ({"weights": "1,2"}, "--weights=1,2 .*datasets is not set; set it too"),
    ({"weights": "1,-2", "datasets": "a,b"}, "--weights=1,-2 .*above 0"),
    ({"sep_token": 5, "eos_token": 6}, "--eos_token=6 .*another name of sep_token=5"),
    ({"selective_checkpointing": "0"}, "--selective_checkpointing=0 .*every k-th block.*1/3"),
    ({**RECOMPUTED, "selective_checkpointing": "33"}, "--selective_checkpointing=33 .*num_layers=32"),
    ({**RECOMPUTED, "selective_checkpointing": "1/65"}, "--selective_checkpointing=1/65 .*num_layers=32"),
    ({**CUSTOM, "norm_bias": True}, "norm_bias.*norm_type=layernorm"),
    ({**CUSTOM, "position_embedding_type": "none", "rotary_percentage": 0.5}, "rotary_percentage.*position_embedding"),
    ({**CUSTOM, "rotary_percentage": 0.01}, "rotary_percentage.*head_dim=8 .*use 0.25 or more"),
    ({**CUSTOM, "head_dim": 22, "rotary_percentage": 0.09}, "rotary_percentage.*head_dim=22 .*use 0.091 or more"),
    ({**COSINE, "lr_warmup_steps": 5, "lr_warmup_ratio": 0.1}, "lr_warmup_ratio.*lr_warmup_steps"),
    ({**COSINE, "min_lr": 1.0}, "min_lr.*learning_rate"),
    ({**COSINE, "lr_warmup_steps": 100}, "lr_warmup_steps.*num_steps"),
    ({**COSINE, "lr_warmup_steps": 9, "lr_constant_steps": 91}, "lr_constant_steps=91 .*lr_warmup_steps=9 .*num_steps"),
    ({"lr_power": 0.5}, "lr_power.*lr_schedule=fms_cosine.*poly"),
    ({**COSINE, "training_stage": "annealing"}, "lr_schedule.*training_stage"),
    ({"run_name": "n" * 256}, "--run_name=nnn.* at most 255 bytes.*--log_dir"),
    ({"log_dir": "~/runs/one"}, r"--log_dir=~/runs/one .*begins with ~.*\$HOME.*\./~"),
    ({"model_variant": "custom"}, "--vocab_size.*--hidden_size.*--num_layers.*--intermediate_size"),
    ({"use_dummy_dataset": False}, "--data_path.*--use_dummy_dataset.*bash scripts/train.sh"),
    # ranks that cannot share the model
    ({**HEADS, "tensor_parallel_size": 4, "num_attention_heads": 6}, "_size=4 .*num_attention_heads=6"),
    ({**HEADS, "tensor_parallel_size": 8, "intermediate_size": 100}, "_size=8 .*intermediate_size=100"),
    ({**HEADS, "context_parallel_size": 4, "seq_length": 62}, "=62 .*context_parallel_size=4; use 60 or 64"),
    ({**HEADS, "sequence_parallel": True, "tensor_parallel_size": 2, "seq_length": 63}, "=63 .*_size=2 .*use 62 or 64"),
    ({**HEADS, "sharding_strategy": "fsdp", "sharding_group_size": 4}, "_group_size=4 .*sharding_strategy=hsdp"),
    # stages
    ({**HEADS, "pipeline_parallel_size": 2}, "=2 needs --gradient_accumulation_steps: a multiple of 2, such as 8"),
    ({**STAGES, "gradient_accumulation_steps": 6}, "=6 .*multiple of pipeline_parallel_size=4; use 4 or 8"),
    ({**STAGES, "num_layers": 3}, "--pipeline_parallel_size=4 is more than num_layers=3"),
    ({**STAGES, "virtual_pipeline_size": 3}, "x virtual_pipeline_size=3 = 12 is more than num_layers=8"),
    ({**STAGES, "pipeline_cuts": "1,3"}, "8 layers into 4 pieces; use 3 numbers below 7, such as 1,3,5"),
    ({**STAGES, "pipeline_cuts": "1,3,7"}, "8 layers into 4 pieces"),
    ({**STAGES, "pipeline_cuts": "3,1,5"}, "--pipeline_cuts=3,1,5 must be ascending layer numbers"),
    ({**STAGES, "pipeline_balance": True, "pipeline_cuts": "1,3,5"}, "--pipeline_balance=True .* pipeline_cuts"),
    ({**STAGES, "pipeline_balance": True, "num_layers": 5}, "first or the last of 4 pieces .* at least 6"),
    ({**STAGES, "pipeline_schedule": "GPipe", "engine": "xla"}, "=GPipe is not supported by engine=xla"),
    ({**STAGES, "pipeline_schedule": "1F1B", "virtual_pipeline_size": 2}, "virtual_pipeline_size=2; use Interl"),
    ({**STAGES, "pipeline_schedule": "Interleaved1F1B"}, "needs --virtual_pipeline_size of at least 2; or"),
    ({**STAGES, **RECOMPUTED, "selective_checkpointing": "4"}, "=4 recomputes none of the 2 layers of a piece"),
]


def test_a_name_is_no_path() -> None:
    names = {"run_name": "~", "tracker_project_name": "~team/models", "tracker_run_id": "a://b"}
    assert not any(SETTINGS[name].fault(text) for name, text in names.items() if name in SETTINGS)


@pytest.mark.parametrize(("settings", "words"), [row for row in CONTRADICTIONS if row[0].keys() <= SETTINGS.keys()])
def test_a_contradiction_is_one_problem_that_names_both_sides(settings: dict[str, Any], words: str) -> None:
    (problem,) = found(**settings)
    assert re.search(words, problem), problem


@needs("pipeline")
def test_far_more_stages_than_layers_are_refused_without_a_list_of_them() -> None:
    refused = found(**{**STAGES, **RECOMPUTED, "pipeline_parallel_size": 10**12})
    assert any(problem.startswith("--pipeline_parallel_size=1000000000000 is more than") for problem in refused)


def test_problems_that_do_not_depend_on_each_other_are_all_told() -> None:
    assert len(found(batch_size=0, num_kv_heads=5, weights="1", sharding_strategy="foo")) == 4


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_a_model_that_passes_can_be_built(heads: int, kv_heads: int, hidden: int) -> None:
    settings = {**CUSTOM, "num_attention_heads": heads, "num_kv_heads": kv_heads, "hidden_size": hidden}
    fits = heads % kv_heads == 0 and hidden % heads == 0 and hidden // heads % 2 == 0
    assert (not found(**settings)) == fits
    if fits:
        shape = model_shape(CONFIGURATION(**settings))
        assert shape.num_attention_heads * shape.head_dim == shape.hidden_size


@given(st.integers(1, 64), st.integers(1, 512))
@example(7, 33)
@example(4, 36)
def test_the_heads_a_message_offers_are_valid(heads: int, hidden: int) -> None:
    settings = {**CUSTOM, "num_kv_heads": 1, "num_attention_heads": heads, "hidden_size": hidden}
    for problem in found(**settings):
        assert problem.endswith("set --head_dim")
        assert not found(**settings, head_dim=8)
        for number in re.findall(r"\d+", problem.partition("; use ")[2]):
            assert not found(**{**settings, "num_attention_heads": int(number)})


@given(st.integers(1, 8), st.integers(1, 64), st.none() | st.integers(1, 8))
def test_the_batch_sizes_a_message_offers_are_valid(batch: int, total: int, passes: int | None) -> None:
    settings = {"batch_size": batch, "global_batch_size": total, "gradient_accumulation_steps": passes}
    for problem in found(**settings):
        offered = problem.partition("; use ")[2].partition(",")[0]
        for text in offered.split(" or "):
            assert not found(**{**settings, "global_batch_size": int(text)})


@pytest.mark.parametrize(
    ("mistake", "consequence"),
    [
        pytest.param({"gradient_accumulation_steps": "maybe"}, {"pipeline_parallel_size": 2}, marks=needs("pipeline")),
        ({"optimizer": "adamx"}, {"lr_schedule": "cosine", "min_lr": 1.0}),
        ({"learning_rate": -1.0}, {"lr_schedule": "cosine", "min_lr": 1.0}),
        ({"optimizer_args": "x"}, {"learning_rate": 1.0}),
        ({"engine": "tpu"}, {"cpu_offload": True}),
        pytest.param({"lora_rank": -1}, {"lora_alpha": 3.0}, marks=needs("lora")),
        pytest.param(
            {"num_kv_heads": 0}, {"kv_replication": 3, "tensor_parallel_size": 2}, marks=needs("kv_replication")
        ),
        ({"model_variant": "lama"}, {"num_kv_heads": 5, "tensor_parallel_size": 3}),
    ],
)
def test_what_follows_from_a_mistake_is_not_a_second_problem(mistake: dict[str, Any], consequence: Any) -> None:
    given = {"use_dummy_dataset": True, **mistake, **consequence}
    (problem,) = read_values(given, CHECKS, CONFIGURATION)[1]
    assert [problem.subject] == [f"--{name}={value}" for name, value in mistake.items()]


def test_a_mistake_hides_no_problem_that_does_not_depend_on_it() -> None:
    given = {"use_dummy_dataset": True, "adam_beta1": 2, "min_lr": 1, "sharding_group_size": -1, "engine": "xla"}
    found = read_values({**given, "cpu_offload": True, "num_kv_heads": 5}, CHECKS, CONFIGURATION)[1]
    names = [problem.subject.partition("=")[0] for problem in found]
    assert {"--adam_beta1", "--cpu_offload", "--min_lr", "--num_kv_heads", "--sharding_group_size"} == set(names)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIGURATION().num_steps = 3


@pytest.mark.parametrize("setting", [s for s in SETTINGS.values() if s.needs], ids=lambda setting: setting.name)
def test_a_setting_without_the_one_that_it_needs_is_refused(setting: Setting) -> None:
    assert setting.needs
    texts = ("mlp", "3", "4,4,9", "val_loss/a")
    values: tuple[Any, ...] = {bool: (not setting.default,), int: (3,), float: (0.25, 1.5), str: texts}[setting.kind]
    value = next((each for each in values if not setting.fault(each)), None)
    if isinstance(setting.constraint, OneOf):
        value = next(choice for choice in setting.constraint.choices if choice not in ("", setting.default))
    others = {"sharding_strategy": "fsdp", "use_dummy_dataset": True}
    problems = read_values({**others, setting.name: value}, CHECKS, CONFIGURATION)[1]
    assert any(problem.remedy.startswith(f"needs --{setting.needs.name}") for problem in problems)


def test_settings_of_a_rope_scaling_that_is_not_chosen_are_refused() -> None:
    given = {"use_dummy_dataset": True, "rope_scaling_factor": 4.0, "rope_low_freq_factor": 2.0}
    problems = read_values(given, CHECKS, CONFIGURATION)[1]
    assert {problem.subject for problem in problems} == {"--rope_scaling_factor=4.0", "--rope_low_freq_factor=2.0"}
    assert all("a run that was saved with it continues without it; give its folder" in it.remedy for it in problems)


def test_a_run_that_was_saved_with_a_setting_without_effect_continues_without_it() -> None:
    scaled: dict[str, Any] = {"rope_scaling_factor": 4.0}
    check_resume(vars(CONFIGURATION(**scaled)), CONFIGURATION())
    for scaling in ("linear", "llama3"):
        for before, now in ((scaled, {}), ({}, scaled)):
            with pytest.raises(ConfigError, match=r"rope_scaling_factor=.* the checkpoint was trained with"):
                saved = CONFIGURATION(rope_scaling_type=scaling, **before)
                check_resume(vars(saved), CONFIGURATION(rope_scaling_type=scaling, **now))
    for old, new in (("none", "linear"), ("linear", "none")):
        with pytest.raises(ConfigError, match=r"rope_scaling_type=.* the checkpoint was trained with"):
            check_resume(vars(CONFIGURATION(rope_scaling_type=old, **scaled)), CONFIGURATION(rope_scaling_type=new))


# ---- selective_checkpointing


THIRD, HALF = Fraction(1, 3), Fraction(1, 2)
SELECTIVE = {"1": 1, "3": 3, "1.0": 1, "3/3": 1, "1/3": THIRD, "2/6": THIRD, "0.5": HALF, ".5": HALF}
SELECTIVE["0.1"] = Fraction(1, 10)  # the decimal, not the float


@pytest.mark.parametrize(("text", "value"), SELECTIVE.items())
def test_a_choice_of_blocks_is_read_exactly(text: str, value: int | Fraction) -> None:
    choice = parse_selective(text)
    assert choice == value and type(choice) is type(value)


NO_CHOICE = ["0", "0/3", "0.0", "-1", "-1/3", "5/3", "1.5", "1/0", "1/-3", "1e-1", "nan", "1//3", "1/3/2", "all", "2.0"]


@pytest.mark.parametrize("text", ["", *NO_CHOICE, "__import__('os').getpid() and 0.5"])  # text is never evaluated
def test_no_other_text_is_a_choice_of_blocks(text: str) -> None:
    with pytest.raises(ValueError, match="fraction"):
        parse_selective(text)


@given(st.integers(1, 99), st.integers(1, 99))
def test_every_fraction_up_to_one_is_its_own_value(numerator: int, denominator: int) -> None:
    if numerator <= denominator:
        assert parse_selective(f"{numerator}/{denominator}") == Fraction(numerator, denominator)
