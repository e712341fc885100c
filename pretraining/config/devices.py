"""Kinds of devices: how a runtime names them, how fast they compute, what they hold and how fast they communicate.

The one declaration of these facts: MFU, validation, the plan and the ahead-of-time compilation read it here. Imports
nothing of ours. Figures are per device as the engine counts devices: a TPU chip (from v4 on), a NeuronCore, a GPU.

- peak_flops: dense bf16. NVIDIA's data sheets print figures with 2:4 sparsity; these are half of them.
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


# The first kind that matches a reported name is the device's, so the special ones come first.
DEVICE_KINDS = (
    # cloud.google.com/tpu/docs: v6e, v5p, v5e, v4; bandwidth of a chip's interconnect, both directions together.
    # TPU_ACCELERATOR_TYPE says "v5litepod", PJRT "v5 lite" and "v6 lite".
    DeviceKind(
        name="tpu-v4", title="TPU v4", aliases=(("tpu", "v4"),), peak_flops=275e12,
        memory=32 * GIB, link=150e9, network=150e9, per_host=4, efficiency=0.55, engine="xla", topology_axes=3,
    ),
    DeviceKind(
        name="tpu-v5e", title="TPU v5e", aliases=(("tpu", "v5e"), ("tpu", "v5lite"), ("tpu", "v5 lite")),
        peak_flops=197e12,
        memory=16 * GIB, link=100e9, network=100e9, per_host=8, efficiency=0.65, engine="xla", topology_axes=2,
    ),
    DeviceKind(
        name="tpu-v5p", title="TPU v5p", aliases=(("tpu", "v5p"),), peak_flops=459e12,
        memory=95 * GIB, link=300e9, network=300e9, per_host=4, efficiency=0.70, engine="xla", topology_axes=3,
    ),
    DeviceKind(
        name="tpu-v6e", title="TPU v6e", aliases=(("tpu", "v6e"), ("tpu", "v6 lite")), peak_flops=918e12,
        memory=32 * GIB, link=224e9, network=224e9, per_host=8, efficiency=0.50, engine="xla", topology_axes=2,
    ),
    # awsdocs-neuron: Trainium (190 TFLOP/s and 32 GiB on two NeuronCores, NeuronLink-v2 768 GB/s a chip; trn1.32xlarge
    # has 800 Gbit/s for 32 cores), Trainium2 (667 TFLOP/s and 96 GiB on eight NeuronCores, two to a device (LNC=2),
    # 1.28 TB/s; trn2.48xlarge 3.2 Tbit/s). AWS's PyTorch does not support GSPMD.
    DeviceKind(
        name="trn1", title="trn1 NeuronCore", aliases=(("trn1",),), peak_flops=95e12,
        memory=16 * GIB, link=192e9, network=3.1e9, per_host=32, efficiency=0.25,
    ),
    DeviceKind(
        name="trn2", title="trn2 logical NeuronCore (LNC=2)", aliases=(("trn2",),), peak_flops=166.75e12,
        memory=24 * GIB, link=160e9, network=6.25e9, per_host=64, efficiency=0.25,
    ),
    # NVIDIA's data sheets: GB200 NVL72 (per GPU), Blackwell (DGX B200), H200, GH200, H100, A100 (SXM and PCIe alike).
    DeviceKind(name="gb200", title="GB200", aliases=(("gb200",),), peak_flops=2500e12),
    DeviceKind(
        name="b200", title="B200", aliases=(("b200",),), peak_flops=2250e12,
        memory=180 * GIB, link=900e9, network=100e9, per_host=8, efficiency=0.42,
    ),
    DeviceKind(name="h200-nvl", title="H200 NVL", aliases=(("h200", "nvl"),), peak_flops=835.5e12),
    DeviceKind(name="gh200", title="GH200", aliases=(("gh200",),), peak_flops=990e12),
    DeviceKind(
        name="h200", title="H200 SXM", aliases=(("h200",),), peak_flops=989.5e12,
        memory=140 * GIB, link=450e9, network=50e9, per_host=8, efficiency=0.42,
    ),
    DeviceKind(name="h100-nvl", title="H100 NVL", aliases=(("h100", "nvl"),), peak_flops=835.5e12),
    DeviceKind(name="h100-pcie", title="H100 PCIe", aliases=(("h100", "pcie"),), peak_flops=756.5e12),
    DeviceKind(
        name="h100", title="H100 SXM", aliases=(("h100",),), peak_flops=989.5e12,
        memory=80 * GIB, link=450e9, network=50e9, per_host=8, efficiency=0.42,
    ),
    DeviceKind(
        name="a100-80", title="A100", aliases=(("a100", "80"),), peak_flops=312e12,
        memory=80 * GIB, link=300e9, network=25e9, per_host=8, efficiency=0.63,
    ),
    DeviceKind(
        name="a100-40", title="A100", aliases=(("a100",),), peak_flops=312e12,
        memory=40 * GIB, link=300e9, network=25e9, per_host=8, efficiency=0.63,
    ),
)  # fmt: skip

PLAN_KINDS = {kind.name: kind for kind in DEVICE_KINDS if kind.memory}


def kind_of(device_name: str) -> DeviceKind | None:
    """Return the kind of a device by its reported name ("NVIDIA H200"); None where the table does not know it."""
    name = device_name.lower()
    known = (kind for kind in DEVICE_KINDS if any(all(word in name for word in alias) for alias in kind.aliases))
    return next(known, None)
