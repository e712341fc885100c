"""Optimizer states of NeMo's checkpoints with megatron_amp_O2, by the names of the parameters.

NeMo numbers them, in the order of its parameter groups. But its optimizer has an fp32 copy of every parameter, and that
copy, rounded, is the parameter bit for bit, which gives the number its name. Where there is no such copy, or two
parameters are equal, nothing says which is which, and the states are left out. Layout: NeMo 1.14's
MainParamsOptimizerWrapper around Apex's FusedAdam or torch's AdamW.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretraining.parallel.engine import OPTIMIZER

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = f"{OPTIMIZER}step"


class States(NamedTuple):
    """What one rank's optimizer holds."""

    updates: int
    tensors: dict[str, dict[str, Tensor]]  # prefix of our names, "" for the parameter -> its name there -> fp32 tensor


def named_states(loaded: Mapping[str, Any]) -> States | None:
    """Return the optimizer's state in one rank's checkpoint, None where it has none whose parameters can be told."""
    wrapper: Mapping[str, Any] = next(iter(loaded.get("optimizer_states") or ()), {})
    optimizer = wrapper.get("optimizer") or {}
    groups, states = optimizer.get("param_groups") or [], optimizer.get("state") or {}
    copies = [copy for group in wrapper.get("fp32_from_fp16_params") or [] for copy in group]
    numbers = [number for group in groups for number in group.get("params") or []]
    if not copies or len(copies) != len(numbers):
        return None
    names = _names(loaded.get("state_dict") or {})
    dtypes = {dtype for dtype, _ in names}
    tensors: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in ("", *(f"{OPTIMIZER}{m}." for m in MOMENTS))}
    for number, copy in zip(numbers, copies, strict=True):
        state = states.get(number, {})
        found = [name for dtype in dtypes for name in names.get((dtype, _digest(copy.to(dtype))), [])]
        if len(found) != 1 or not all(isinstance(state.get(moment), Tensor) for moment in MOMENTS):
            return None
        for prefix, tensor in zip(tensors, (copy, *(state[moment] for moment in MOMENTS)), strict=True):
            tensors[prefix][found[0]] = tensor.detach()
    return States(int(groups[0].get("step") or states[numbers[0]].get("step") or 0), tensors)


def _names(model: Mapping[str, Any]) -> dict[tuple[torch.dtype, bytes], list[str]]:
    """Return the names of the model's tensors by dtype and content."""
    names: dict[tuple[torch.dtype, bytes], list[str]] = {}
    for name, tensor in model.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            names.setdefault((tensor.dtype, _digest(tensor)), []).append(name)
    return names


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of shape and bytes."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), key=str(tuple(tensor.shape)).encode()).digest()
