"""Kinds of devices: how a runtime names them, how fast they compute and what they hold. Imports nothing of ours.

The one declaration of these facts, for MFU and for the plan (tools/plan/devices.py adds links and hosts). Figures are
per device as the engine counts devices: a TPU chip (from v4 on), a NeuronCore, a GPU. peak_flops: dense bf16 with fp32
sums; NVIDIA's data sheets print figures with 2:4 sparsity, these are half of them. From Ada Lovelace and Hopper on
dense fp8 has twice as many.
"""

from __future__ import annotations

import re
from typing import NamedTuple

GIB = 2**30


class DeviceKind(NamedTuple):
    """One kind of device."""

    name: str  # as --plan_device_kind takes it
    title: str  # as it is printed with an MFU
    aliases: tuple[tuple[str, ...], ...]  # words that end in a reported name, in any case; all of one alias
    peak_flops: float  # operations per second
    memory: int = 0  # bytes
    float8_speed: int = 0  # dense fp8 operations per bf16 operation; 0: no fp8
    dtype: str = "bf16"  # of the operations that peak_flops counts


# The first kind that matches a reported name is the device's, so the special ones come first.
DEVICE_KINDS = (
    # docs.cloud.google.com/tpu/docs: v4, v5e, v5p, v6e. TPU_ACCELERATOR_TYPE says "v5litepod", PJRT "v5 lite" and
    # "v6 lite".
    DeviceKind("tpu-v4", "TPU v4", (("tpu", "v4"),), 275e12, 32 * GIB),
    DeviceKind("tpu-v5e", "TPU v5e", (("tpu", "v5e"), ("tpu", "v5litepod"), ("tpu", "v5 lite")), 197e12, 16 * GIB),
    DeviceKind("tpu-v5p", "TPU v5p", (("tpu", "v5p"),), 459e12, 95 * GIB),
    DeviceKind("tpu-v6e", "TPU v6e", (("tpu", "v6e"), ("tpu", "v6 lite")), 918e12, 32 * GIB),
    # awsdocs-neuron: Trainium (190 TFLOP/s and 32 GiB on two NeuronCores), Trainium2 (667 TFLOP/s and 96 GiB on eight
    # NeuronCores, two to a device (LNC=2)).
    DeviceKind("trn1", "trn1 NeuronCore", (("trn1",),), 95e12, 16 * GIB),
    DeviceKind("trn2", "trn2 logical NeuronCore (LNC=2)", (("trn2",),), 166.75e12, 24 * GIB),
    # NVIDIA's data sheets: GB200 NVL72 (per GPU), Blackwell (DGX B200), H200, GH200, H100, A100 (SXM and PCIe alike),
    # L40S, L40, L4, A10, A10G; RTX 4090: "NVIDIA Ada GPU Architecture", appendix A.
    DeviceKind("gb200", "GB200", (("gb200",),), 2500e12, 186 * GIB, 2),
    DeviceKind("b200", "B200", (("b200",),), 2250e12, 180 * GIB, 2),
    DeviceKind("h200-nvl", "H200 NVL", (("h200", "nvl"),), 835.5e12, 140 * GIB, 2),
    DeviceKind("gh200", "GH200", (("gh200",),), 990e12, 0, 2),  # 96 or 144 GB
    DeviceKind("h200", "H200 SXM", (("h200",),), 989.5e12, 140 * GIB, 2),
    DeviceKind("h100-nvl", "H100 NVL", (("h100", "nvl"),), 835.5e12, 94 * GIB, 2),
    DeviceKind("h100-pcie", "H100 PCIe", (("h100", "pcie"),), 756.5e12, 80 * GIB, 2),
    DeviceKind("h100", "H100 SXM", (("h100",),), 989.5e12, 80 * GIB, 2),
    DeviceKind("a100-80", "A100", (("a100", "80gb"),), 312e12, 80 * GIB),
    DeviceKind("a100-40", "A100", (("a100",),), 312e12, 40 * GIB),
    DeviceKind("l40s", "L40S", (("l40s",),), 362e12, 48 * GIB, 2),
    DeviceKind("l40", "L40", (("l40",),), 181e12, 48 * GIB, 2),
    DeviceKind("l4", "L4", (("nvidia l4",),), 121e12, 24 * GIB, 2),
    DeviceKind("a10g", "A10G", (("a10g",),), 70e12, 24 * GIB),
    DeviceKind("a10", "A10", (("nvidia a10",),), 125e12, 24 * GIB),
    DeviceKind("rtx-4090", "GeForce RTX 4090", (("rtx 4090",),), 165.2e12, 24 * GIB, 2),
    DeviceKind("mi300x", "MI300X", (("mi300x",),), 1307.4e12, 192 * GIB, 2),  # AMD's data sheet
)
# Devices, or parts of them, that have the name of another one in theirs: RTX 4090 Laptop GPU, A100 MIG 1g.10gb, and
# A100-SXM-64GB and H100 64GB, each made for one customer: other clocks, and less memory than the H100 of the table
OTHERS = re.compile(r"\b(laptop|max-q|mig|4090 d|64gb)\b")


def kind_of(device_name: str, precision: str = "") -> DeviceKind | None:
    """Return the kind of a device by its reported name ("NVIDIA H200"); None where the table does not know it.

    precision: TrainConfig.precision_mode. With "fp8", peak_flops is that of fp8, although attention and head multiply
    bf16; None where the table does not know it.
    """
    name = device_name.lower()
    known = (kind for kind in DEVICE_KINDS if any(all(_ends(word, name) for word in alias) for alias in kind.aliases))
    kind = None if OTHERS.search(name) else next(known, None)
    if kind is None or precision != "fp8":
        return kind
    return kind._replace(peak_flops=kind.float8_speed * kind.peak_flops, dtype="fp8") if kind.float8_speed else None


def _ends(word: str, name: str) -> bool:
    """Return whether the name contains the word, and no letter or digit after it: an RTX A1000 is no A100."""
    return re.search(f"{word}(?![a-z0-9])", name) is not None
