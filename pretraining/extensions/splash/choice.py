"""Where splash attention runs. Does not depend on torch or on devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pretraining.config.attention import AttentionChoice
from pretraining.config.errors import Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem
from pretraining.config.variants import model_shape
from pretraining.extensions.packages import install_command
from pretraining.parallel.mesh import Mesh, kv_repeats, uneven_rows

if TYPE_CHECKING:
    from pretraining.models.ops import AttentionKernel


@dataclass(frozen=True)
class SplashConfig(TrainConfig):
    """A configuration whose attention_impl may be splash."""

    def attention_on(self, platform: str) -> AttentionChoice:
        """See TrainConfig. A CPU runs the kernel interpreted, only where it is asked for."""
        if self.attention_impl == "chunked":
            return super().attention_on(platform)
        is_asked_for = self.attention_impl == "splash"
        is_interpreted = platform == "CPU"
        from pretraining.optim.precision import BF16, precision_of  # torch, which a configuration does not need

        reasons = list(obstacles(self))
        if platform not in ("TPU", "CPU") or (is_interpreted and not is_asked_for):
            reasons.insert(0, f"splash attention is a kernel for TPUs, not for {platform}")
        elif not is_interpreted and precision_of(self).compute != BF16:
            reasons.append("splash attention multiplies in bf16, and the products of this run are fp32")
        elif importlib.util.find_spec("jax") is None:
            reasons.append(f"splash attention needs jax to be lowered: {install_command('tpu-aot')}")
        if reasons and is_asked_for:
            raise UserError(f"--attention_impl=splash: {reasons[0]}; use --attention_impl=auto, or chunked")
        if reasons:
            return AttentionChoice(reasons[0])
        name = "splash (interpreted)" if is_interpreted else "splash"
        kernel = partial(open_kernel, is_interpreted=is_interpreted)
        return AttentionChoice("--attention_impl" if is_asked_for else "jax is installed", name, kernel)


def open_kernel(mesh: Mesh, xla_mesh: object, *, is_interpreted: bool) -> AttentionKernel:
    """Return the kernel of tensors that are sharded over a mesh, which torch-xla has as `xla_mesh`."""
    from pretraining.extensions.splash.kernel import SplashAttention

    return SplashAttention(mesh, xla_mesh, is_interpreted=is_interpreted)


def obstacles(config: TrainConfig) -> Iterator[str]:
    """Yield every reason why the kernel cannot compute the attention of `config` on any device."""
    shape = model_shape(config)
    if config.attention_dropout:
        yield f"splash attention has no dropout, and attention_dropout is {config.attention_dropout}"
    for length in uneven_rows(config):
        chunks = 2 * config.context_parallel_size
        yield f"splash attention needs {chunks} equal chunks of a row for context ranks, and one has {length} tokens"
    if shape.num_kv_heads * kv_repeats(config, shape) % config.tensor_parallel_size:
        yield f"splash attention needs a shard of the key/value heads, and kv_replication is {config.kv_copies}"


def check_attention(config: SplashConfig) -> Iterator[Problem]:
    """Splash attention can compute what the configuration asks for."""
    if config.attention_impl == "splash":
        for obstacle in obstacles(config):
            yield problem(config, "attention_impl", f"cannot run: {obstacle}; use auto, or chunked")


CHECKS = (check_attention,)
