"""A minimal recipe that pretrains a Llama variant on TPUs, GPUs and plain CPUs.

>>> from pretraining import TrainConfig, train
>>> run = train(TrainConfig(model_variant="tiny", use_dummy_dataset=True, num_steps=10))
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from main_training import CONFIGURATION as TrainConfig
    from main_training import train

__all__ = ["TrainConfig", "train"]


def __getattr__(name: str) -> object:
    """Import a public name from the main script: torch is loaded with the first training."""
    if name in __all__:
        import main_training

        return main_training.CONFIGURATION if name == "TrainConfig" else main_training.train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
