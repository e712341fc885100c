"""The configuration of a run: the settings, and what the core asks of them. Extensions override the answers.

Knows nothing of torch, devices or files, so a mistake is reported before any of them is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining.config.attention import AttentionChoice
from pretraining.config.batches import GlobalBatches
from pretraining.config.declaration import Resume, settings_of
from pretraining.config.division import Division
from pretraining.config.errors import Problem, UserError
from pretraining.config.grammar import parse_modules
from pretraining.config.optimizers import FLAGS, OPTIMIZERS, Hyperparameters
from pretraining.config.schedules import SCHEDULES, Schedule
from pretraining.config.settings import Settings
from pretraining.config.variants import VARIANTS


@dataclass(frozen=True)
class TrainConfig(Settings):
    """The settings, and what the core asks of them; a subclass of an extension adds settings and answers."""

    @classmethod
    def rewrite(cls, words: Sequence[str]) -> Sequence[str]:
        """Return the words of a command line with an extension's other spellings of flags replaced."""
        return words

    @classmethod
    def help_page(cls, word: str) -> str:
        """Return the page of `--help=word`: every setting with its default, unless an extension documents them."""
        return "\n".join(f"--{name}={setting.default}" for name, setting in settings_of(cls).items())

    @classmethod
    def meant_by(cls, word: str) -> list[str]:
        """Return the settings that `word`, which is no setting, may stand for, as far as an extension knows."""
        return []

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch, of the largest where they grow.

        global_batch_size must be known, as it is once an engine is open.
        """
        assert self.global_batch_size is not None
        return self.global_batch_size * self.seq_length

    @property
    def sequences_of_run(self) -> int:
        """Sequences of all num_steps global batches; global_batch_size must be known."""
        assert self.global_batch_size is not None
        return self.global_batches(self.global_batch_size).trained(self.num_steps)

    def device_kind(self, name: str) -> Any:
        """Return the extensions.devices.DeviceKind of a device that its runtime calls `name`; None: unknown."""
        return None

    def reports_at(self, step: int) -> bool:
        """Return whether the run reports after the update `step`."""
        return step in (1, self.num_steps) or step % self.report_interval == 0

    def saves_at(self, step: int) -> bool:
        """Return whether a run that saves does so after the update `step`, to ckpt_save_path."""
        return step == self.num_steps or (step > 0 and step % self.checkpoint_interval == 0)

    def kept_steps(self, steps: Sequence[int]) -> Collection[int]:
        """Return the steps, of those of the committed checkpoints, newest first, whose checkpoints are kept."""
        return steps[: self.keep_last_n_checkpoints or None]

    @property
    def run_folder(self) -> Path:
        """Folder that this run writes to: log_dir, or runs/<run_name>."""
        return Path(self.log_dir or f"runs/{self.run_name or self.default_run_name}")

    @property
    def default_run_name(self) -> str:
        """Name that a command shares with every command that can continue its run.

        The hash covers the settings whose change is refused on resuming, except the learning rate, which a flag allows
        to change. A dummy run cannot be continued: every setting counts, so that two benchmarks have two folders.
        """
        settings = settings_of(type(self))
        names = settings if self.use_dummy_dataset else self.matching_settings
        changed = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != settings[name].default]
        digest = hashlib.sha256("\n".join(changed).encode(errors="surrogateescape")).hexdigest()[:6]
        return f"{self.model_variant}-{digest}" if changed else self.model_variant

    @property
    def matching_settings(self) -> list[str]:
        """Settings whose change is refused on resuming, in the order of the hash, without the learning rate's."""
        must_match = (Resume.SHAPE, Resume.FUNCTION, Resume.STATE)
        return [name for name, setting in settings_of(type(self)).items() if setting.resume in must_match]

    @property
    def reads_data(self) -> bool:
        """Whether the run gets as far as opening data and paths."""
        return True

    @property
    def trains(self) -> bool:
        """Whether the run gets as far as a step."""
        return self.reads_data

    # Tables to which extensions add: they override these methods, and add to super()'s.

    def output_folders(self) -> tuple[str, ...]:
        """Return the settings that name folders which the run writes."""
        return ("ckpt_save_path", "compile_cache_dir")

    @classmethod
    def optimizers(cls) -> Mapping[str, Hyperparameters]:
        """Return the defaults of every optimizer by name."""
        return OPTIMIZERS

    @classmethod
    def schedules(cls) -> Mapping[str, Schedule]:
        """Return every learning rate schedule by name."""
        return SCHEDULES

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """Return the rows of config/support.py about settings of extensions."""
        return ()

    def update_rule(self, name: str) -> Any:
        """Return the update rule (optim.rules.UpdateRule) of the parameter of this name; None: Adam's or AdamW's."""
        return None

    def full_tensor_updates(self, shards: Any, parameters: Any, gradients: Any, step: Any, rate: Any) -> Any:
        """Return the new shards of the torch engine's parameters of a group whose rule needs full tensors.

        shards: parallel.torch.state.LocalShards; see parallel.step.OptimizerStep.compute_updates for the others.
        """
        raise NotImplementedError("no rule of the core needs full tensors")

    def own_rate(self, step: int) -> float | None:
        """Return the learning rate of the 0-based update `step` if the optimizer has its own; None: lr_schedule's."""
        return None

    def followers(self) -> Mapping[str, Callable[[Any, Any], Any]]:
        """Return what is kept with the optimizer state of each trained weight: name -> function that gives the new
        value of the old one and of the updated weight, of which the first value is a copy."""
        return {}

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The defaults of the optimizer with everything that is given laid over them."""
        defaults = self.optimizers()[self.optimizer]
        flags = {name: getattr(self, field) for name, field in FLAGS.items() if getattr(self, field) is not None}
        return defaults._replace(
            learning_rate=defaults.learning_rate if self.learning_rate is None else self.learning_rate,
            weight_decay=defaults.weight_decay if self.weight_decay is None else self.weight_decay,
            arguments={**defaults.arguments, **flags},
        )

    def attention_on(self, platform: str) -> AttentionChoice:
        """Return how the xla engine computes attention on `platform`, PJRT's name of a type of device. Opens no device.

        Raises UserError where attention_impl=splash cannot run.
        """
        if self.attention_impl == "splash":
            raise _missing_extension("splash", "--attention_impl=splash", "; use --attention_impl=auto, or chunked")
        return AttentionChoice("--attention_impl" if self.attention_impl == "chunked" else "no kernel is there")

    def accelerator(self, kind: str) -> Any:
        """Return the row of parallel/accelerator.py for a type of device that the core does not have.

        Raises UserError if there is none.
        """
        raise _missing_extension("accelerators", f"--device={kind}", "; use --device=cpu")

    def transformation_on(self, device: Any) -> Callable[[Any], None]:
        """Return what changes a model before the torch engine places it on `device`, a torch.device.

        Raises UserError where precision=fp8 cannot run.
        """
        return lambda model: None

    # Batches that an extension changes in the course of a run: it overrides these methods.

    def global_batches(self, rows: int, consumed: int = 0) -> GlobalBatches:
        """Return the global batches of training, the largest of `rows` sequences, after `consumed` ones."""
        return GlobalBatches(rows, consumed)

    def batch_problems(self, largest: int, factor: int) -> Iterable[Problem]:
        """Return why global batches cannot grow to `largest` in multiples of `factor`, a valid global batch.

        factor: the sequences of one micro-batch of every data-parallel rank, times the pipeline's stages.
        """
        return ()

    def row_length(self, step: int) -> int:
        """Return the tokens of the rows that the sequences of `step` are cut into, counted from 1."""
        return self.seq_length

    @property
    def row_lengths(self) -> list[int]:
        """Every length of rows; each is a program of its own."""
        return [self.seq_length]

    @property
    def batch_changes(self) -> str:
        """How the batches change, as the end of a sentence about the largest; empty if they do not."""
        return ""

    # Layers that an extension divides over devices: it overrides these methods, and calls super()'s.

    @property
    def division(self) -> Division:
        """Which layers a device has."""
        return Division(self)

    @property
    def kv_copies(self) -> int:
        """Copies of each key/value head in use if tensor ranks do not divide them; 0: as few as possible."""
        return 0

    def recomputed_modules(self, block: Any) -> list[str]:
        """Return the modules of a chosen block that checkpoint_modules names, none inside another; none for whole
        blocks. "core_attention" adds none: see parallel.recompute.block_mask."""
        if self.checkpoint_granularity == "full":
            return []
        chosen = parse_modules(self.checkpoint_modules)
        named = {"attention": "self_attn", "mlp": "mlp", "mlp_activation": "mlp.act_fn"}
        paths = [path for name, path in named.items() if name in chosen]
        if "norm" in chosen:
            paths += [path for path, _ in block.named_modules() if path.endswith("norm")]
        return [path for path in paths if path.rpartition(".")[0] not in paths]

    def engine_class(self, name: str) -> Any:
        """Return the class of the engine "xla" or "torch" that runs this configuration; None: the core's."""
        return None

    def own_precision(self, mode: str) -> Any:
        """Return the dtypes, an optim.precision.Precision, of a mode that the core does not have.

        Raises UserError if there is no such extension.
        """
        folder = "manual_precision" if mode == "manual" else mode
        raise _missing_extension(folder, f"--precision={mode}", "; use mixed_bf16")

    @property
    def has_bf16_weights(self) -> bool:
        """Whether the parameters are in bf16, without an fp32 copy."""
        return self.precision_mode == "bf16_sr"

    def loss_scale_on(self, device: Any) -> Any:
        """Return the loss scale of precision=fp16, which extensions/fp16 describes; None: there is none.

        Raises UserError where precision=fp16 cannot run.
        """
        return None

    def recent_figures_on(self, device: Any) -> Any:
        """Return what finds outliers among the steps, which extensions/skip_step describes; None: no update is one."""
        return None

    @property
    def has_dropout(self) -> bool:
        """Whether a training step drops values."""
        return any((self.hidden_dropout, self.attention_dropout, self.ffn_dropout))

    # Parameters that an extension adds, freezes or scales: it overrides these methods, and calls super()'s.

    def extend_model(self, model: Any) -> None:
        """Change a new model, whose parameters have no values yet."""

    def initial_value(self, name: str, shape: Any, generator: Any) -> Any:
        """Return the initial value of a parameter that extend_model added; None for any other parameter."""
        return None

    def initial_deviation(self, name: str, sizes: tuple[float, ...], rule: Callable[..., float]) -> float:
        """Return the standard deviation of an initial weight: what `rule` makes of hidden_size, outputs and inputs."""
        return rule(*sizes)

    def rate_scale(self, name: str) -> float:
        """Return the factor of a parameter's learning rate; its weight decay per step does not depend on it."""
        return 1.0

    def folded_scale(self, name: str) -> float:
        """Return the factor that a parameter takes over in a format that has no factors of its own."""
        return 1.0

    def is_added(self, name: str) -> bool:
        """Whether extend_model added a parameter. A checkpoint of another run need not have it."""
        return False

    def is_trained(self, name: str) -> bool:
        """Whether the parameter of this name takes gradients."""
        return True

    @property
    def saves_frozen(self) -> bool:
        """Whether checkpoints have the parameters that are not trained; if not, they are ckpt_load_path's."""
        return True

    def start(self, folder: Any) -> Any:
        """Return how a run with checkpoints in `folder` starts, a checkpoint.restoring.Start; None: from initial
        weights. Raises UserError."""
        for name, path in self.load_paths.items():
            if path:
                raise _missing_extension("other_weights", f"--{name}={path}")
        if not self.saves_frozen:
            remedy = "needs pretraining/extensions/other_weights, which is not there"
            raise UserError(f"a checkpoint without the frozen weights {remedy}")
        return None

    def block_check(self, description: Mapping[str, Any]) -> Any:
        """Return what compares blocks of a dataset with what they were (data.corpus.BlockCheck); None: nothing does.

        description: contents of its meta.json, {} without one.
        """
        return None

    def begin_mixture(
        self, previous: Mapping[str, Any], order: dict[str, Any], mixture: Any, changes: list[str]
    ) -> dict[str, Any] | None:
        """Return the state (data/state.py) of data that begin where a run on other data stopped; None: that is refused.

        previous: its state. changes: what is not as before, in words.
        """
        return None

    def held_out_splits(self) -> list[str]:
        """Return the splits that the run evaluates, "valid" and "test". Raises UserError if no extension does so."""
        name = "val_interval" if self.val_interval else "test_steps"
        if value := getattr(self, name):
            raise _missing_extension("held_out", f"--{name}={value}")
        return []

    def text_bytes(self, special: Collection[int]) -> Any:
        """Return what counts the bytes of text that tokens stand for (data.stream.TextBytes); None: they are not known.

        special: ids that stand for no text. Raises UserError.
        """
        return None

    def background_saves(self, peers: Any) -> Any:
        """Return what writes checkpoints while training goes on, which extensions/async_checkpointing describes; None:
        training waits for them. peers: a checkpoint.peers.Peers."""
        return None

    def checkpoint_places(self) -> list[Any]:
        """Return the places (checkpoint.folder.Place) in which a run saves besides ckpt_save_path."""
        return []

    @property
    def load_paths(self) -> dict[str, str]:
        """Weights that a new run starts from: setting -> path, empty if there are none."""
        return {"ckpt_load_path": self.ckpt_load_path}

    def resolved(self) -> dict[str, object]:
        """Return the settings that stand for another value, which is compared when a run continues."""
        return {}

    def accepts(self, name: str, before: object) -> bool:
        """Whether a run may continue that was trained with another value `before` of a setting: it has no effect."""
        return bool((needs := settings_of(type(self))[name].needs) and not needs.is_met(self))

    @property
    def facts(self) -> dict[str, str]:
        """Further facts to print before the first step: name, of at most 14 letters -> text."""
        return {}

    def printed(self, text: str, record: Mapping[str, Any] | None = None) -> str:
        """Return `text` as the run prints it. record: of metrics.jsonl, if `text` is its line."""
        return text

    @property
    def precision_mode(self) -> str:
        """`precision`, with "auto" resolved by mixed_precision."""
        if self.precision != "auto":
            return self.precision
        return "mixed_bf16" if self.mixed_precision else "fp32"

    def __post_init__(self) -> None:
        """Replace defaults that stand for another value; a frozen dataclass has no other way to."""
        # fms-fsdp documents FSDP and HSDP
        derived: dict[str, object] = {"sharding_strategy": str(self.sharding_strategy).lower()}
        if self.checkpoint_interval == -1:
            derived["checkpoint_interval"] = 0 if self.use_dummy_dataset else 10_000
        if self.seq_length == 0:
            shape = VARIANTS.get(self.model_variant)
            longest = self.max_position_embeddings or (shape.max_position_embeddings if shape else 4096)
            derived["seq_length"] = min(longest, 4096) if isinstance(longest, int) and longest > 0 else 4096
        vars(self).update(derived)


def _missing_extension(folder: str, flag: str, remedy: str = "") -> UserError:
    """Return the error that the extension `folder`, which `flag` needs, is not there."""
    return UserError(f"{flag}: needs pretraining/extensions/{folder}, which is not there{remedy}")


SETTINGS = settings_of(TrainConfig)
