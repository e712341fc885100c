"""Kinds of devices that can be planned for: their links, their hosts, and what a slice of TPUs consists of.

- link: towards devices of the same host (GPUs, Trainium) or slice (TPUs), one direction. NVIDIA's data sheets give both
  directions of NVLink 3, 4 and 5 together. TPUs: both directions together of the interconnect's first figures, which
  count what one collective along one axis of the torus uses.
- network: towards other hosts, or other slices of TPUs. GPUs: one InfiniBand port per GPU, HDR 200, NDR 400 and XDR 800
  Gbit/s, as in the DGX of the generation. TPUs: the data centre's network, per chip: v5p 50 Gbit/s, v5e and v6e
  6.4 and 25.6 Tbit/s of 256 chips (docs.cloud.google.com/tpu/docs/v5p, v5e, v6e); v4 as v5p.
- efficiency: what published runs of Llamas reach, counting every operation that is run: recomputation included, the
  half of attention that a causal mask leaves out excluded. a100 and h100: fms-fsdp's README, Llama 2 7B on 128 and 96
  GPUs, 4,550 and 9,600 tokens/s; b200 as h100. tpu-v5p, tpu-v5e, tpu-v6e: MaxText's tables, 70B on 512 chips 65 % MFU,
  16B on 256 chips 61 %, 8B on 256 chips 46 %. tpu-v4: PyTorch's blog on Llama 2, 70B, 53 %. trn1: awsdocs-neuron, Llama
  3.1 8B on 32 hosts, 20 %; trn2 as trn1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pretraining.config.errors import counted
from pretraining.extensions.devices import DEVICE_KINDS, DeviceKind

# Chips of a slice -> chips along each axis, as docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e list them.
SLICES_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SLICES_V4 = {
    **{4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"},
    **{1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"},
}
SLICES_V5P = {**SLICES_V4, 6144: "16x16x24"}
ONE_HOST = 8  # chips of a v5e or v6e that one host may have; the hosts of a larger slice have 4 chips each


class PlanKind(NamedTuple):
    """One kind of device with its surroundings."""

    device: DeviceKind
    link: float  # bytes per second
    network: float  # bytes per second
    per_host: int  # devices of one host; of a slice of several hosts
    efficiency: float  # share of peak_flops that a step's operations reach while nothing waits
    engine: Literal["torch", "xla"] = "torch"  # that --engine=auto chooses
    slices: Mapping[int, str] = {}  # of a TPU; empty: none
    memory_rate: float = 0  # bytes per second between the device and its memory; 0: nothing reads it

    @property
    def topology_axes(self) -> int:
        """Axes of a TPU slice; 0: not a TPU."""
        return next((topology.count("x") + 1 for topology in self.slices.values()), 0)


class Island(NamedTuple):
    """Devices with fast links between all of them: a host, or a slice of TPUs."""

    devices: int
    hosts: int
    topology: str = ""  # of a slice

    def describe(self, devices: int) -> str:
        """Return of what so many devices consist."""
        count, each = -(-devices // self.devices), counted(self.devices // self.hosts, "device")
        if not self.topology:
            return f"{counted(count, 'host')} of {each}"
        return f"{counted(count, 'slice')} of {self.topology}: {counted(count * self.hosts, 'host')} of {each}"


_DEVICES = {kind.name: kind for kind in DEVICE_KINDS}
# fmt: off
PLAN_KINDS = {
    name: PlanKind(_DEVICES[name], *figures)
    for name, *figures in (
        # name, link, network, per_host, efficiency, engine, slices, memory_rate
        ("tpu-v4", 150e9, 6.25e9, 4, 0.55, "xla", SLICES_V4, 1228e9),
        ("tpu-v5e", 100e9, 3.125e9, 4, 0.65, "xla", SLICES_2D, 819e9),
        ("tpu-v5p", 300e9, 6.25e9, 4, 0.70, "xla", SLICES_V5P, 2765e9),
        ("tpu-v6e", 224e9, 12.5e9, 4, 0.50, "xla", SLICES_2D, 1640e9),
        # awsdocs-neuron: NeuronLink-v2 768 GB/s a chip; trn1.32xlarge has 800 Gbit/s for 32 cores. Trainium2 1.28 TB/s;
        # trn2.48xlarge 3.2 Tbit/s. AWS's PyTorch does not support GSPMD.
        ("trn1", 192e9, 3.1e9, 32, 0.25),
        ("trn2", 160e9, 6.25e9, 64, 0.25),
        ("b200", 900e9, 100e9, 8, 0.42),
        ("h200", 450e9, 50e9, 8, 0.42),
        ("h100", 450e9, 50e9, 8, 0.42),
        ("a100-80", 300e9, 25e9, 8, 0.63),
        ("a100-40", 300e9, 25e9, 8, 0.63),
    )
}
# fmt: on


def island_of(kind: PlanKind, devices: int, topology: str = "") -> Island:
    """Return the host, or the slice of `topology`, of which `devices` consist.

    Without a topology it is the largest slice that Google lists whose chips divide `devices`.
    """
    if not kind.slices:
        return Island(min(kind.per_host, devices), 1)
    fitting = [chips for chips in kind.slices if devices % chips == 0]
    chips = math.prod(map(int, topology.split("x"))) if topology else max(fitting, default=devices)
    single = kind.topology_axes == 2 and chips <= ONE_HOST
    topology = topology or kind.slices.get(chips, f"{chips} chips")
    return Island(chips, 1 if single else max(1, chips // kind.per_host), topology)
