"""Kinds of devices: how a runtime names them, how fast they compute, what they hold and how fast they communicate.

The one declaration of these facts: MFU, validation, the plan and the ahead-of-time compilation read it here. Imports
nothing of ours. Figures are per device as the engine counts devices: a TPU chip (from v4 on), a NeuronCore, a GPU.

- peak_flops: dense bf16. NVIDIA's data sheets print figures with 2:4 sparsity; these are half of them. From Hopper on
  dense fp8 has twice as many.
- link: towards devices of the same host (GPUs, Trainium) or slice (TPUs), one direction. NVIDIA's data sheets give both
  directions of NVLink 3, 4 and 5 together.
- network: towards other hosts. GPUs: one InfiniBand port per GPU, HDR 200, NDR 400 and XDR 800 Gbit/s, as in the DGX of
  the generation.
- efficiency: what published runs of Llamas reach, counting every operation that is run: recomputation included, the
  half of attention that a causal mask leaves out excluded. a100 and h100: fms-fsdp's README, Llama 2 7B on 128 and 96
  GPUs, 4,550 and 9,600 tokens/s; b200 as h100. tpu-v5p, tpu-v5e, tpu-v6e: MaxText's tables, 70B on 512 chips 65 % MFU,
  16B on 256 chips 61 %, 8B on 256 chips 46 %. tpu-v4: PyTorch's blog on Llama 2, 70B, 53 %. trn1: awsdocs-neuron, Llama
  3.1 8B on 32 hosts, 20 %; trn2 as trn1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

GIB = 2**30


class DeviceKind(NamedTuple):
    """One kind of device. Without `memory` it is recognised for MFU, and cannot be planned for."""

    name: str  # as --plan_device_kind takes it
    title: str  # as it is printed with an MFU
    aliases: tuple[tuple[str, ...], ...]  # words that a reported name contains, in any case; all of one alias
    peak_flops: float  # operations per second
    memory: int = 0  # bytes
    link: float = 0  # bytes per second
    network: float = 0  # bytes per second
    per_host: int = 0  # devices of one host
    efficiency: float = 0  # share of peak_flops that a step's operations reach while nothing waits
    engine: Literal["torch", "xla"] = "torch"  # that --engine=auto chooses
    topology_axes: int = 0  # of a TPU slice; 0: not a TPU
    memory_rate: float = 0  # bytes per second between the device and its memory; 0: nothing reads it
    float8_speed: int = 0  # dense fp8 operations per bf16 operation; 0: no fp8
    dtype: str = "bf16"  # of the operations that peak_flops counts


# The first kind that matches a reported name is the device's, so the special ones come first.
# fmt: off
DEVICE_KINDS = (
    # name, title, aliases, peak_flops, memory, link, network, per_host, efficiency, engine, topology_axes, memory_rate
    #
    # cloud.google.com/tpu/docs: v6e, v5p, v5e, v4; bandwidth of a chip's interconnect, both directions together, and of
    # its HBM.
    # TPU_ACCELERATOR_TYPE says "v5litepod", PJRT "v5 lite" and "v6 lite".
    DeviceKind("tpu-v4", "TPU v4", (("tpu", "v4"),), 275e12, 32 * GIB, 150e9, 150e9, 4, 0.55, "xla", 3,
               1228e9),
    DeviceKind("tpu-v5e", "TPU v5e", (("tpu", "v5e"), ("tpu", "v5lite"), ("tpu", "v5 lite")),
               197e12, 16 * GIB, 100e9, 100e9, 8, 0.65, "xla", 2, 819e9),
    DeviceKind("tpu-v5p", "TPU v5p", (("tpu", "v5p"),), 459e12, 95 * GIB, 300e9, 300e9, 4, 0.70, "xla", 3,
               2765e9),
    DeviceKind("tpu-v6e", "TPU v6e", (("tpu", "v6e"), ("tpu", "v6 lite")),
               918e12, 32 * GIB, 224e9, 224e9, 8, 0.50, "xla", 2, 1640e9),
    # awsdocs-neuron: Trainium (190 TFLOP/s and 32 GiB on two NeuronCores, NeuronLink-v2 768 GB/s a chip; trn1.32xlarge
    # has 800 Gbit/s for 32 cores), Trainium2 (667 TFLOP/s and 96 GiB on eight NeuronCores, two to a device (LNC=2),
    # 1.28 TB/s; trn2.48xlarge 3.2 Tbit/s). AWS's PyTorch does not support GSPMD.
    DeviceKind("trn1", "trn1 NeuronCore", (("trn1",),), 95e12, 16 * GIB, 192e9, 3.1e9, 32, 0.25),
    DeviceKind("trn2", "trn2 logical NeuronCore (LNC=2)", (("trn2",),),
               166.75e12, 24 * GIB, 160e9, 6.25e9, 64, 0.25),
    # NVIDIA's data sheets: GB200 NVL72 (per GPU), Blackwell (DGX B200), H200, GH200, H100, A100 (SXM and PCIe alike).
    DeviceKind("gb200", "GB200", (("gb200",),), 2500e12, float8_speed=2),
    DeviceKind("b200", "B200", (("b200",),), 2250e12, 180 * GIB, 900e9, 100e9, 8, 0.42, float8_speed=2),
    DeviceKind("h200-nvl", "H200 NVL", (("h200", "nvl"),), 835.5e12, float8_speed=2),
    DeviceKind("gh200", "GH200", (("gh200",),), 990e12, float8_speed=2),
    DeviceKind("h200", "H200 SXM", (("h200",),), 989.5e12, 140 * GIB, 450e9, 50e9, 8, 0.42, float8_speed=2),
    DeviceKind("h100-nvl", "H100 NVL", (("h100", "nvl"),), 835.5e12, float8_speed=2),
    DeviceKind("h100-pcie", "H100 PCIe", (("h100", "pcie"),), 756.5e12, float8_speed=2),
    DeviceKind("h100", "H100 SXM", (("h100",),), 989.5e12, 80 * GIB, 450e9, 50e9, 8, 0.42, float8_speed=2),
    DeviceKind("a100-80", "A100", (("a100", "80"),), 312e12, 80 * GIB, 300e9, 25e9, 8, 0.63),
    DeviceKind("a100-40", "A100", (("a100",),), 312e12, 40 * GIB, 300e9, 25e9, 8, 0.63),
)
# fmt: on

PLAN_KINDS = {kind.name: kind for kind in DEVICE_KINDS if kind.memory}


def kind_of(device_name: str, precision: str = "") -> DeviceKind | None:
    """Return the kind of a device by its reported name ("NVIDIA H200"); None where the table does not know it.

    precision: TrainConfig.precision_mode. With "fp8", peak_flops is that of fp8, although attention and head multiply
    bf16; None where the table does not know it.
    """
    name = device_name.lower()
    known = (kind for kind in DEVICE_KINDS if any(all(word in name for word in alias) for alias in kind.aliases))
    kind = next(known, None)
    if kind is None or precision != "fp8":
        return kind
    return kind._replace(peak_flops=kind.float8_speed * kind.peak_flops, dtype="fp8") if kind.float8_speed else None
