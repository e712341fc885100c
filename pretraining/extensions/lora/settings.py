"""The settings of low-rank adaptation, and what they change in the model and in its checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pretraining.config.declaration import Above, AtLeast, Needs, Resume
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.extensions.lora.targets import adapted, is_adapter, is_trained

SCALE = ("lora_alpha", "lora_use_rslora")


@dataclass(frozen=True)
class LoraConfig(TrainConfig):
    """A configuration with adapters."""

    # ---- Adapters
    lora_rank: Annotated[int, AtLeast(0, below=2**16), Resume.STATE] = 0
    """Rank r of an adapter for each of lora_target_modules: y = W x + s B A x, where only A and B are trained and W
    keeps the values of ckpt_load_path (or of the seed). 0: none, everything is trained."""
    lora_alpha: Annotated[float, Above(0), Needs("lora_rank"), Resume.FUNCTION] = 8.0
    """Scale of the adapter: s = lora_alpha / lora_rank."""
    lora_use_rslora: Annotated[bool, Needs("lora_rank"), Resume.FUNCTION] = False
    """s = lora_alpha / sqrt(lora_rank) (Kalajdzievski 2023)."""
    lora_dropout: Annotated[float, AtLeast(0, below=1), Needs("lora_rank")] = 0.0
    """Dropout probability of the input of an adapter."""
    lora_target_modules: Annotated[str, Needs("lora_rank"), Resume.STATE] = ""
    """Projections with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, comma-separated, or a
    regular expression for their paths, such as .*(q|v)_proj. Empty: q_proj,v_proj."""
    lora_bias: Annotated[Literal["none", "all", "lora_only"], Needs("lora_rank"), Resume.STATE] = "none"
    """Biases that are trained too: "none", "all", or "lora_only" (those of projections with an adapter)."""
    lora_modules_to_save: Annotated[str, Needs("lora_rank"), Resume.STATE] = ""
    """Modules that are trained in full, comma-separated ends of their names, as in PEFT: lm_head, embed_tokens, norm
    (every norm), model.norm (the last one), input_layernorm."""
    lora_init: Annotated[Literal["default", "gaussian"], Needs("lora_rank")] = "default"
    """Initial values of A: "default" (uniform within 1 / sqrt(inputs)) or "gaussian" (standard deviation 1 /
    lora_rank). B starts at 0."""
    lora_save_mode: Annotated[Literal["adapter", "base_and_adapter", "merged"], Needs("lora_rank"), Resume.STATE] = (
        "adapter"
    )
    """"adapter": checkpoints have only what is trained, and a resumed run reads the other weights from ckpt_load_path.
    "base_and_adapter", "merged": checkpoints have all weights; python -m pretraining.tools.convert then writes
    PEFT's files and the base model, or W + s B A in Hugging Face's format."""
    lora_load_path: Annotated[str, Needs("lora_rank")] = ""
    """Folder of an adapter in PEFT's format (adapter_model.safetensors) to start from. Its rank, scale, projections,
    biases and modules are taken over where no flag gives them. Empty: a new one."""
    lora_load_tag: Annotated[str, Needs("lora_load_path")] = ""
    """Sub-folder of lora_load_path. Empty: none."""

    @property
    def has_dropout(self) -> bool:
        """See TrainConfig."""
        return super().has_dropout or self.lora_dropout > 0

    def extend_model(self, model: Any) -> None:
        """See TrainConfig: projections get adapters, and the other parameters are frozen."""
        super().extend_model(model)
        if self.lora_rank:
            from pretraining.extensions.lora.model import adapt

            adapt(self, model)

    @property
    def facts(self) -> dict[str, str]:
        """See TrainConfig."""
        if not self.lora_rank:
            return super().facts
        from pretraining.extensions.lora.model import describe_trained

        return super().facts | {"trained": describe_trained(self)}

    def initial_value(self, name: str, shape: Any, generator: Any) -> Any:
        """See TrainConfig."""
        if not is_adapter(name):
            return super().initial_value(name, shape, generator)
        from pretraining.extensions.lora.model import initial_value

        return initial_value(self, name, shape, generator)

    def is_added(self, name: str) -> bool:
        """See TrainConfig."""
        return super().is_added(name) or is_adapter(name)

    def is_trained(self, name: str) -> bool:
        """See TrainConfig."""
        return super().is_trained(name) and is_trained(self, name)

    @property
    def saves_frozen(self) -> bool:
        """See TrainConfig."""
        return super().saves_frozen and not (self.lora_rank > 0 and self.lora_save_mode == "adapter")

    def check_trained(self, checkpoint: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See OtherWeightsConfig."""
        from pretraining.extensions.lora.adapter import check_trained

        check_trained(checkpoint, self, shapes)

    def open_added(self) -> Any:
        """See OtherWeightsConfig: the adapter in lora_load_path, in PEFT's format."""
        if not self.adapter_folder:
            return None
        from pretraining.extensions.lora.adapter import open_adapter

        return open_adapter(self.adapter_folder, self)

    @property
    def adapter_folder(self) -> Path | None:
        """Folder of the adapter to start from; None if --lora_load_path is not set."""
        return Path(self.lora_load_path) / self.lora_load_tag if self.lora_load_path else None

    @property
    def load_paths(self) -> dict[str, str]:
        """See TrainConfig."""
        return super().load_paths | {"lora_load_path": str(self.adapter_folder or "")}

    def resolved(self) -> dict[str, object]:
        """See TrainConfig: targets are compared by what they name."""
        return super().resolved() | {"lora_target_modules": ",".join(name.rpartition(".")[2] for name in adapted(self))}

    def accepts(self, name: str, before: object) -> bool:
        """See TrainConfig. The last norm was norm, which is every norm now, as in PEFT."""
        if name != "lora_modules_to_save":
            return super().accepts(name, before)
        now = [word.replace("model.norm", "norm") for word in comma_separated(self.lora_modules_to_save)]
        return now == comma_separated(str(before))

    @property
    def matching_settings(self) -> list[str]:
        """See TrainConfig: a change of the scale was once accepted, and runs keep their names."""
        return [name for name in super().matching_settings if name not in SCALE]
