"""The table of what an engine does not support."""

from __future__ import annotations

from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.config.declaration import settings_of
from pretraining.config.errors import UserError
from pretraining.config.support import limits_of, unsupported
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problems
from pretraining.optim.precision import precision_of
from pretraining.parallel.checks import CHECKS

SETTINGS, LIMITS = settings_of(CONFIGURATION), limits_of(CONFIGURATION)

PLACES = [("xla", None), ("torch", "cpu"), ("torch", "tpu"), ("torch", "cuda")]
# One configuration with the values of each row.
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("device", {"device": "cuda"}),
    ("reduce_dtype", {"reduce_dtype": "bf16", "mixed_precision": False}),
    ("collective_timeout", {"collective_timeout": 5}),
    ("cpu_offload", {"cpu_offload": True}),
    ("attention_impl", {"attention_impl": "splash"}),
    ("save_attention", {"save_attention": True, "checkpoint_num_layers": 2}),
    ("compile_cache_dir", {"compile_cache_dir": "there"}),
    ("pipeline_balance", {"pipeline_parallel_size": 2, "pipeline_balance": True}),
    ("pipeline_schedule", {"pipeline_parallel_size": 2, "pipeline_schedule": "GPipe"}),
    ("kv_replication", {"kv_replication": 2}),
    ("precision", {"precision": "fp8"}),
    ("precision", {"precision": "fp16"}),
    ("memory_profiling", {"memory_profiling": True}),
    ("one_program", {"one_program": "always"}),
]
VALUES = {limit.values for limit in LIMITS}
EXAMPLES = [  # of extensions that are there
    (setting, fields)
    for setting, fields in EXAMPLES
    if setting in SETTINGS and (setting != "precision" or fields[setting] in VALUES)
]


def test_every_row_has_an_example_and_no_default_is_unsupported() -> None:
    assert [limit.setting for limit in LIMITS] == [setting for setting, _ in EXAMPLES]
    assert settings_of(CONFIGURATION).keys() >= {setting for setting, _ in EXAMPLES}
    for engine, device in PLACES:
        assert list(unsupported(CONFIGURATION(), engine, device)) == []


def test_a_kernel_whose_extension_is_not_there_is_refused_and_none_is_needed() -> None:
    with pytest.raises(UserError, match=r"--attention_impl=splash: needs pretraining/extensions/splash, .*use --att"):
        TrainConfig(attention_impl="splash").attention_on("TPU")
    assert str(TrainConfig().attention_on("TPU")) == "chunked, no kernel is there"
    assert str(TrainConfig(attention_impl="chunked").attention_on("TPU")) == "chunked, --attention_impl"


@pytest.mark.parametrize("precision", ["fp8", "fp16", "manual"])
def test_a_precision_whose_extension_is_not_there_is_refused(precision: Any) -> None:
    name = "manual_precision" if precision == "manual" else precision
    message = f"--precision={precision}: needs pretraining/extensions/{name}, .*use mixed_bf16"
    with pytest.raises(UserError, match=message):
        precision_of(TrainConfig(precision=precision))


@pytest.mark.parametrize(("limit", "fields"), [(limit, row[1]) for limit, row in zip(LIMITS, EXAMPLES, strict=True)])
def test_a_value_is_refused_where_its_row_says_and_nowhere_else(limit: Any, fields: dict[str, Any]) -> None:
    config = CONFIGURATION(**fields)
    for engine, device in PLACES:
        refused = [problem.subject for problem in unsupported(config, engine, device)]
        missing = {engine, f"{engine} on {device}"} & set(limit.missing_on)
        assert refused == [f"--{limit.setting}={getattr(config, limit.setting)}"] * bool(missing)


@pytest.mark.parametrize(
    ("dtype", "fields", "refused"),
    [
        ("fp32", {}, False),
        ("bf16", {}, False),
        ("bf16", {"mixed_precision": False}, True),
        ("bf16", {"pipeline_parallel_size": 2}, True),
        ("fp32", {"precision": "bf16_sr"}, True),
        ("bf16", {"precision": "bf16_sr"}, False),
        *(("bf16", {"precision": "manual", **fields}, False) for fields in ({"master_weights": False}, {})),
        ("fp32", {"precision": "manual", "master_weights": False}, True),
        ("fp32", {"precision": "manual"}, False),
    ],
)
def test_the_xla_engine_reduces_in_bf16_what_it_multiplies_in_bf16(dtype: Any, fields: Any, refused: bool) -> None:
    config = CONFIGURATION(reduce_dtype=dtype, **fields)
    assert bool(list(unsupported(config, "xla"))) == refused


def test_flags_that_name_the_engine_or_its_device_are_validated_against_the_table() -> None:
    for fields in ({"engine": "xla"}, {"engine": "torch", "device": "cpu"}, {"device": "cpu"}):
        config = CONFIGURATION(cpu_offload=True, **fields)
        assert [problem.subject for problem in problems(config, CHECKS)] == ["--cpu_offload=True"]
    assert problems(CONFIGURATION(cpu_offload=True), CHECKS) == []  # known when the engine is chosen
