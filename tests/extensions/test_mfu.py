"""FLOPs per token against a count of the model's own matrix products, and MFU against published figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS, model_shape
from pretraining.extensions.devices import DEVICE_KINDS, DeviceKind, kind_of
from pretraining.extensions.flops import Meter, flops_per_token, training_flops
from pretraining.models.llama import Llama


def counted_flops(config: TrainConfig) -> int:
    """Return the operations of the matrix products of a forward and a backward pass over a row."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Llama(config)(torch.zeros(1, config.seq_length, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("variant", ["tiny", "llama2_7b", "llama3_8b", "llama3_70b"])
@pytest.mark.parametrize(("positions", "tied"), [("rope", False), ("learned_absolute", True)])
def test_the_formula_equals_the_matrix_products_of_the_model(variant: str, positions: str, tied: bool) -> None:
    options: dict[str, Any] = {"position_embedding_type": positions, "tie_word_embeddings": tied}
    config = TrainConfig(model_variant=variant, num_layers=3, seq_length=256, **options)
    shape = model_shape(config)
    norms = 6 * shape.hidden_size * (2 * shape.num_layers + 1)  # in N, but no matrix product
    assert counted_flops(config) == 256 * (flops_per_token(shape, 256).full - norms)


def test_a_frozen_weight_below_adapters_takes_two_thirds_of_the_operations() -> None:
    pytest.importorskip("pretraining.extensions.lora")
    for positions, tied in (("rope", False), ("learned_absolute", True)):
        options: dict[str, Any] = {"position_embedding_type": positions, "tie_word_embeddings": tied}
        config = CONFIGURATION(model_variant="llama3_8b", num_layers=3, seq_length=256, lora_rank=1, **options)
        # The counter has the adapters, and no gradient of the input of the first block.
        assert counted_flops(config) == pytest.approx(256 * training_flops(config, 256).full, rel=0.02)


def test_fms_fsdps_published_mfu_of_7b_on_a100_is_met() -> None:
    # README of fms-fsdp: 4550 tokens/s on each A100 is an MFU of 0.68 with the embedding counted in N.
    shape = VARIANTS["llama2_7b"]
    meter = Meter(4550, 1, flops_per_token(shape, 4096), kind_of("NVIDIA A100-SXM4-80GB"))
    mfu = meter.speed(1.0)["mfu"]
    assert mfu is not None
    embedding = 6 * shape.vocab_size * shape.hidden_size * 4550 / 312e12
    assert mfu + embedding == pytest.approx(0.684, abs=5e-4)


def test_the_two_conventions_differ_by_11_percent_for_llama3_8b_at_8192() -> None:
    full, causal = flops_per_token(VARIANTS["llama3_8b"], 8192)
    # torchprime's formula: 57.9 and 51.5 GFLOP per token.
    assert (full / 1e9, causal / 1e9) == (pytest.approx(57.9, abs=0.1), pytest.approx(51.5, abs=0.1))


TITLES = {  # as its runtime names a device -> its title
    "TPU v4-8": "TPU v4",
    "TPU v5litepod-16": "TPU v5e",
    "TPU v5 lite": "TPU v5e",
    "TPU v5p-128": "TPU v5p",
    "TPU v6e-8": "TPU v6e",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "GeForce RTX 4090",
    "AMD Instinct MI300X": "MI300X",
    "trn1.32xlarge": "trn1 NeuronCore",
    "trn2.48xlarge": "trn2 logical NeuronCore (LNC=2)",
}


@pytest.mark.parametrize("device", TITLES)
def test_a_device_is_known_by_the_name_its_runtime_gives(device: str) -> None:
    kind = kind_of(device)
    assert kind is not None and kind.title == TITLES[device]


def test_in_fp8_the_peak_is_that_of_fp8_and_unknown_where_there_is_none() -> None:
    kind = kind_of("NVIDIA H100 80GB HBM3", "fp8")
    assert kind is not None
    assert (kind.peak_flops, kind.dtype) == (1979e12, "fp8")
    assert kind_of("NVIDIA H100 80GB HBM3", "mixed_bf16") == kind_of("NVIDIA H100 80GB HBM3")
    assert kind_of("NVIDIA A100-SXM4-80GB", "fp8") is None


UNKNOWN = [
    *("CPU", "", "NVIDIA T4", "TPU", "NEURON", "NVIDIA GeForce RTX 3090", "AMD Instinct MI250X"),
    # Names in which those of other devices are
    *("NVIDIA RTX A1000", "NVIDIA A10M", "NVIDIA L40G", "NVIDIA GeForce RTX 4090 D"),
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100-SXM-64GB"),
]


@pytest.mark.parametrize("device", UNKNOWN)
def test_an_unknown_device_has_no_peak_and_no_mfu(device: str) -> None:
    speed = Meter(1000, 1, flops_per_token(VARIANTS["tiny"], 64), kind_of(device)).speed(0.5)
    assert speed["mfu"] is None
    assert speed["mfu_causal"] is None
    assert speed["tokens_per_second"] == 2000


def test_no_row_of_the_table_is_hidden_by_one_above_it() -> None:
    rows = [(alias, kind.name) for kind in DEVICE_KINDS for alias in kind.aliases]
    for i, (words, name) in enumerate(rows):
        assert not any(all(any(w in word for word in words) for w in above) for above, _ in rows[:i]), name
    assert len({kind.name for kind in DEVICE_KINDS}) == len(DEVICE_KINDS)


@given(st.integers(1, 10**6), st.integers(1, 64), st.floats(1e-3, 1e3))
def test_the_keys_of_a_step_agree_with_each_other(tokens: int, devices: int, seconds: float) -> None:
    meter = Meter(tokens, devices, flops_per_token(VARIANTS["tiny"], 512), DeviceKind("", "a device", (), 1e12))
    speed = meter.speed(seconds)
    assert speed["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert speed["tokens_per_second_per_device"] == pytest.approx(tokens / seconds / devices)
    assert speed["mfu"] is not None
    assert speed["mfu_causal"] is not None
    assert 0 < speed["mfu_causal"] < speed["mfu"]
    assert speed["mfu"] * 1e12 == pytest.approx(tokens / seconds / devices * meter.flops.full)
