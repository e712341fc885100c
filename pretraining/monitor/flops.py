"""How much arithmetic a token costs, and how much a device could do: the two sides of MFU.

Pure arithmetic on the shape and a table of peaks by device name. MFU (model FLOPs utilisation, PaLM, Chowdhery et al.
2022, appendix B) counts what the model needs, never what activation checkpointing computes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pretraining.config.variants import ModelShape


class FlopsPerToken(NamedTuple):
    """Floating-point operations of a forward and backward pass, per token, in the two conventions."""

    full: int  # attention over the whole sequence: 6 N + 12 L d S (PaLM, nanoGPT, fms-fsdp); "mfu"
    causal: int  # only the half of it that a causal mask leaves: 6 N + 6 L d S; "mfu_causal"


def flops_per_token(shape: ModelShape, seq_length: int) -> FlopsPerToken:
    """FLOPs of training on one token of a sequence of `seq_length`.

    6 N: two per weight in the forward pass, four in the backward. N is every parameter except the input embedding,
    which is a lookup (torchtitan and nanochat leave it out too; fms-fsdp's published figures leave it in, 2 % more at
    7 B). The output head is in. 12 L d S: the scores and their product with the values in L layers, where d is
    heads x head_dim and S the sequence length.
    """
    lookup = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    weights = shape.parameters - lookup
    attention = 12 * shape.num_layers * shape.num_attention_heads * shape.head_dim * seq_length
    return FlopsPerToken(6 * weights + attention, 6 * weights + attention // 2)


class Peak(NamedTuple):
    """The most that a device is specified to do."""

    name: str  # as it is shown beside an MFU
    flops: float  # dense bf16 operations per second, of one device as the engine counts devices


# Words that must all stand in the device's name (in any case) -> its peak. First match wins, so the special ones come
# first. NVIDIA's data sheets print figures with 2:4 sparsity; these are half of them. Google counts chips, and from v4
# on a chip is one device. A Neuron device is a core, not a chip.
PEAKS: tuple[tuple[tuple[str, ...], Peak], ...] = (
    (("tpu", "v6e"), Peak("TPU v6e", 918e12)),  # cloud.google.com/tpu/docs/v6e
    (("tpu", "v6 lite"), Peak("TPU v6e", 918e12)),  # PJRT's name of the same
    (("tpu", "v5p"), Peak("TPU v5p", 459e12)),  # cloud.google.com/tpu/docs/v5p
    (("tpu", "v5e"), Peak("TPU v5e", 197e12)),  # cloud.google.com/tpu/docs/v5e
    (("tpu", "v5lite"), Peak("TPU v5e", 197e12)),  # TPU_ACCELERATOR_TYPE's name of the same
    (("tpu", "v5 lite"), Peak("TPU v5e", 197e12)),  # PJRT's
    (("tpu", "v4"), Peak("TPU v4", 275e12)),  # cloud.google.com/tpu/docs/v4
    # awsdocs-neuron: Trainium, 190 TFLOP/s on two NeuronCores; Trainium2, 667 on eight, two to a device (LNC=2).
    (("trn1",), Peak("trn1 NeuronCore", 95e12)),
    (("trn2",), Peak("trn2 logical NeuronCore (LNC=2)", 166.75e12)),
    (("gb200",), Peak("GB200", 2500e12)),  # NVIDIA GB200 NVL72 data sheet, per GPU
    (("b200",), Peak("B200", 2250e12)),  # NVIDIA Blackwell data sheet, DGX B200
    (("h200", "nvl"), Peak("H200 NVL", 835.5e12)),  # NVIDIA H200 data sheet
    (("gh200",), Peak("GH200", 990e12)),  # NVIDIA GH200 data sheet
    (("h200",), Peak("H200 SXM", 989.5e12)),  # NVIDIA H200 data sheet
    (("h100", "nvl"), Peak("H100 NVL", 835.5e12)),  # NVIDIA H100 data sheet
    (("h100", "pcie"), Peak("H100 PCIe", 756.5e12)),  # NVIDIA H100 data sheet
    (("h100",), Peak("H100 SXM", 989.5e12)),  # NVIDIA H100 data sheet
    (("a100",), Peak("A100", 312e12)),  # NVIDIA A100 data sheet: SXM and PCIe alike
)


def peak_of(device_name: str) -> Peak | None:
    """The peak of a device by its name, None where the table does not know it: no MFU is better than a wrong one."""
    name = device_name.lower()
    return next((peak for words, peak in PEAKS if all(word in name for word in words)), None)


@dataclass(frozen=True)
class Meter:
    """Turns the time of a step into throughput. What it holds does not change during a run."""

    tokens_per_step: int  # of the global batch
    devices: int
    flops: FlopsPerToken
    peak: Peak | None

    def speed(self, step_time: float) -> dict[str, float | None]:
        """The timing keys of metrics.jsonl for a step of `step_time` seconds, above 0. MFUs are shares of 1."""
        tokens = self.tokens_per_step / step_time
        return {
            "step_time": step_time,
            "tokens_per_second": tokens,
            "tokens_per_second_per_device": tokens / self.devices,
            "mfu": self._utilisation(tokens, self.flops.full),
            "mfu_causal": self._utilisation(tokens, self.flops.causal),
        }

    def _utilisation(self, tokens_per_second: float, flops_per_token: int) -> float | None:
        if self.peak is None:
            return None
        return tokens_per_second * flops_per_token / (self.peak.flops * self.devices)
