"""A minimal recipe that pretrains a Llama variant on TPUs, GPUs and plain CPUs.

>>> from pretraining import TrainConfig, train
>>> run = train(TrainConfig(model_variant="tiny", use_dummy_dataset=True, num_steps=10))
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from main_training import train
    from pretraining.config.training import TrainConfig

__all__ = ["TrainConfig", "train"]


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it: torch is loaded with the first training."""
    if name == "TrainConfig":
        from pretraining.config.training import TrainConfig

        return TrainConfig
    if name == "train":
        from main_training import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
