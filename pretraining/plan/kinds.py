"""What devices hold and how fast they talk, as their makers specify it. Peaks of arithmetic are monitor/flops.py's.

Figures are per device as the engine counts devices. GiB of memory as the device reports them; link: bytes per second
that leave a device towards its neighbours within a host (GPUs) or a slice (TPUs), one direction; network: towards
other hosts, where a slice ends or a host does. Efficiency is what published runs of Llamas come to, in operations that
are run (recomputation counts, the half of attention that a mask leaves out does not):

- a100, h100: fms-fsdp's README, Llama 2 7B on 128 and 96 GPUs, 4,550 and 9,600 tokens/s; b200 as h100.
- tpu-v5p, tpu-v5e, tpu-v6e: MaxText's tables, 70B on 512 chips 65 % MFU, 16B on 256 chips 61 %, 8B on 256 chips 46 %.
- tpu-v4: PyTorch's blog on Llama 2, 70B, 53 %. trn1: awsdocs-neuron, Llama 3.1 8B on 32 hosts, 20 %; trn2 as trn1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from pretraining.monitor.flops import Peak, peak_of

GIB = 2**30


class Kind(NamedTuple):
    """One kind of device."""

    name: str
    memory: float  # bytes
    link: float  # bytes a second
    network: float
    per_host: int  # devices of one host
    efficiency: float  # share of the peak that a step's operations reach while nothing is waited for

    @property
    def peak(self) -> Peak:
        """Its arithmetic."""
        found = peak_of(self.name.replace("-", " "))
        assert found is not None
        return found


KINDS = {
    kind.name: kind
    for kind in (
        # NVIDIA's data sheets: NVLink 3, 4 and 5 are specified as both directions together. Networks: one InfiniBand
        # port per GPU, HDR 200, NDR 400 and XDR 800 Gbit/s, as in the DGX of the generation.
        Kind("a100-40", 40 * GIB, 300e9, 25e9, 8, 0.63),
        Kind("a100-80", 80 * GIB, 300e9, 25e9, 8, 0.63),
        Kind("h100", 80 * GIB, 450e9, 50e9, 8, 0.42),
        Kind("h200", 140 * GIB, 450e9, 50e9, 8, 0.42),
        Kind("b200", 180 * GIB, 900e9, 100e9, 8, 0.42),
        # cloud.google.com/tpu/docs: HBM and inter-chip interconnect of a chip, Gbit/s both directions together.
        Kind("tpu-v4", 32 * GIB, 150e9, 150e9, 4, 0.55),
        Kind("tpu-v5e", 16 * GIB, 100e9, 100e9, 8, 0.65),
        Kind("tpu-v5p", 95 * GIB, 300e9, 300e9, 4, 0.70),
        Kind("tpu-v6e", 32 * GIB, 224e9, 224e9, 8, 0.50),
        # awsdocs-neuron: Trainium (32 GiB, two NeuronCores, NeuronLink-v2 768 GB/s a chip; trn1.32xlarge has 800
        # Gbit/s for 32 cores) and Trainium2 (96 GiB, four logical NeuronCores, 1.28 TB/s; trn2.48xlarge 3.2 Tbit/s).
        Kind("trn1", 16 * GIB, 192e9, 3.1e9, 32, 0.25),
        Kind("trn2", 24 * GIB, 160e9, 6.25e9, 64, 0.25),
    )
}


def laid_out(kind: str, extents: Sequence[int], width: int) -> int:
    """Bytes that a tensor of values `width` bytes wide takes in the memory of a device.

    A TPU keeps the two innermost dimensions in tiles of up to 8 x 128 values, and its compiler orders the dimensions so
    that the tiles waste least; two rows of bf16 lie in one, and a single dimension in pieces of 512 bytes to 1024
    values. So the layouts of libtpu
    0.0.21 have it for v5e, v5p and v6e, in fp32 and bf16 (tests/plan/test_compiled.py).
    """
    if not kind.startswith("tpu"):
        return math.prod(extents) * width
    if len(extents) == 1:
        piece = min(1024, max(512 // width, _power_of_two(extents[0])))
        return _whole(extents[0], piece) * width
    values = math.prod(extents)
    return width * min(
        values // (rows * columns) * _whole(rows, min(8, max(4 // width, _power_of_two(rows)))) * _whole(columns, 128)
        for rows, columns in permutations(extents, 2)
    )


def _whole(extent: int, piece: int) -> int:
    return -(-extent // piece) * piece


def _power_of_two(extent: int) -> int:
    return 1 << (extent - 1).bit_length()
