"""Whether an optimizer step may be applied, decided on the device: no step waits for the host to look."""

from __future__ import annotations

import torch
from torch import Tensor

HEALTH = ("updates", "refused", "first_refused")  # what the three numbers of `health` count; see engine.StepResult


def judge(health: Tensor, finite: Tensor, max_skipped: int) -> Tensor:
    """Count this step in `health` [3]; true if it may be applied. Too many refused, and none is ever applied again."""
    seen, refused, first = health.unbind()
    seen = seen + 1
    refused = refused + (~finite).float()
    first = torch.where((first == 0) & ~finite, seen, first)
    health.copy_(torch.stack((seen, refused, first)))
    return finite & (refused <= max_skipped)
