"""The settings that name configuration files, and say how to read them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pretraining.config.declaration import COMMON, PER_HOST, AtLeast, Needs
from pretraining.config.settings import STEPS
from pretraining.config.training import TrainConfig

_OVERRIDE = re.compile(r"(--|\+{0,2})[A-Za-z]\w*(\.\w+)+=")  # Hydra's, with a + where the file lacks the key
_RECOMPUTE = re.compile(r"--recompute[-_](?=(granularity|modules|num[-_]layers)(=|$))")  # Megatron's names
# fms-fsdp's defaults, which its launch scripts spell out
_FMS = {
    "--tracker=None": "--tracker=",
    "--tracker_run_id=None": "",
    "--file_type=hf_parquet": "--file_type=parquet",
    **dict.fromkeys(("--resuming_dataset=False", "--resuming_dataset=false"), ""),
}


@dataclass(frozen=True)
class FileConfig(TrainConfig):
    """A configuration whose values may come from files."""

    # ---- Configuration files
    model_config_path: str = ""
    """Hugging Face's config.json of a Llama, Mistral, Qwen 2, Qwen 3 or GPT-NeoX, or its folder, from which dimensions,
    rotary settings and norm_eps are read; flags and the keys of import_config override it. Empty: that of
    ckpt_load_path, if it is a folder in Hugging Face's format."""
    config_file: Annotated[str, COMMON, PER_HOST] = ""
    """File of settings with these names, overridden by the flags of the command line: TOML, YAML, or the config.json of
    a run. Empty: none."""
    import_config: Annotated[str, COMMON, PER_HOST] = ""
    """Configuration file of NxD Training, NeMo Megatron or GPT-NeoX to train with, overridden by the flags of the
    command line; several files of GPT-NeoX are comma-separated. A report of every key is printed first. Empty: none."""
    import_overrides: Annotated[str, Needs("import_config"), PER_HOST] = ""
    """Keys of import_config with other values, key=value, one a line. Words of the command line such as
    trainer.max_steps=10 and --trainer.max_steps=10, as NeMo's users write them, are added to it. Empty: none."""
    import_format: Annotated[Literal["auto", "nxdt", "nemo", "neox"], Needs("import_config")] = "auto"
    """Format of import_config; "auto" recognizes it by its keys."""
    import_strict: Annotated[bool, Needs("import_config")] = True
    """True: keys of import_config that this recipe does not support stop the run. False: each is a warning, and
    training ignores it."""
    import_only: bool = False
    """Print the resolved configuration and the report of import_config, and stop; paths and devices are not opened."""
    import_report: Annotated[str, Needs("import_config"), PER_HOST] = ""
    """File that the report of import_config is written to, as JSON. Empty: none."""
    import_lr_steps: Annotated[str, STEPS, Needs("import_config")] = ""
    """Steps, counted from 0 and comma-separated, whose learning rate the report of import_config lists. Empty: the
    first, the end of the warm-up, the middle and the last."""
    import_pp: Annotated[Literal["keep", "fold"], Needs("import_config")] = "keep"
    """Pipeline stages of import_config: "keep" them, or "fold" their devices into data parallelism, which does not
    change the loss."""
    source_world_size: Annotated[int | None, AtLeast(1), Needs("import_config")] = None
    """Devices that import_config was written for, from which the global batch of a GPT-NeoX file follows. None: what
    the file says."""
    neox_era: Annotated[Literal["auto", "2022", "2023", "head"], Needs("import_config")] = "auto"
    """Release of GPT-NeoX whose defaults and learning rates a file means: "2022" (before August 2023), "2023" (today's
    learning rates, the defaults of before 2023-12-26), "head" (today), or "auto", recognized by the file's keys."""
    neox_gated_ffn: Annotated[Literal["auto", "head", "legacy"], Needs("import_config")] = "auto"
    """Feed-forward width of a GPT-NeoX file with a gated activation: "auto" and "head" use today's two thirds, "legacy"
    the width as written before September 2024."""

    @classmethod
    def rewrite(cls, words: Sequence[str]) -> Sequence[str]:
        """See TrainConfig: keys of import_config with dots, fms-fsdp's spellings of what is so here anyway, the rank
        that torch.distributed.launch passes besides the variable, and Megatron's names of recomputation, which is
        called a checkpoint here."""
        overrides = [word for word in words if _OVERRIDE.match(word)]
        ranks = [f"--local{dash}rank={os.environ['LOCAL_RANK']}" for dash in "-_" if "LOCAL_RANK" in os.environ]
        others = [_FMS.get(word, word) for word in super().rewrite(words) if word not in [*overrides, *ranks]]
        others = [_RECOMPUTE.sub("--checkpoint_", word) for word in others]
        keys = "\n".join(word.lstrip("-+") for word in overrides)
        return [*filter(None, others), *([f"--import_overrides={keys}"] if keys else [])]

    @property
    def reads_data(self) -> bool:
        """See TrainConfig: import_only opens neither data nor paths."""
        return super().reads_data and not self.import_only
