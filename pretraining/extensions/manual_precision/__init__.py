"""precision=manual: the dtypes of NxD Training's settings of that name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import Needs
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class ManualPrecisionConfig(TrainConfig):
    """A configuration whose dtypes may be chosen one by one."""

    # ---- Precision
    master_weights: Annotated[bool | None, Needs("precision", "manual")] = None
    """True: parameters and optimizer state in fp32. False: in bf16. None: True."""
    fp32_grad_acc: Annotated[bool | None, Needs("precision", "manual")] = None
    """True: sum the gradients of micro-batches in fp32. False: in bf16. None: True. Elsewhere:
    accumulate_allreduce_grads_in_fp32."""
    stochastic_rounding: Annotated[bool | None, Needs("precision", "manual")] = None
    """True: round to bf16 stochastically, which is exact on average; deterministic, and the same on every mesh. False:
    round to nearest. None: False."""

    def own_precision(self, mode: str) -> Any:
        """See TrainConfig."""
        if mode != "manual":
            return super().own_precision(mode)
        from pretraining.optim.precision import BF16, FP32, Precision

        master = BF16 if self.has_bf16_weights else FP32
        gradients = FP32 if self.fp32_grad_acc is not False else BF16
        return Precision(BF16, BF16, master, gradients, master, stochastic_rounding=bool(self.stochastic_rounding))

    @property
    def has_bf16_weights(self) -> bool:
        """See TrainConfig."""
        return super().has_bf16_weights or self.master_weights is False


EXTENSION = Extension(configuration=ManualPrecisionConfig)
