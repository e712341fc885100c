"""The torch engine whose step is one program. See gathering.py, blocks.py and program.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pretraining.extensions.one_program.blocks import LoopedBlocks
from pretraining.extensions.one_program.gathering import Ranks, gather_on_access, replaced
from pretraining.extensions.one_program.program import Compile, ProgramStep, TracedProgram
from pretraining.extensions.one_program.settings import OneProgramConfig
from pretraining.extensions.one_program.tpu import compile_whole
from pretraining.models.llama import Llama
from pretraining.optim.optimizer import Optimizer, build_optimizer
from pretraining.parallel.engine import Batch, StepResult, with_token_ids
from pretraining.parallel.layout import TorchLayout
from pretraining.parallel.recompute import model_mask
from pretraining.parallel.torch.engine import TorchEngine, TorchTrainee

COMPILERS: dict[str, Compile] = {"torch_tpu": compile_whole}  # by the package that registers the device


class OneProgramEngine(TorchEngine):
    """See engine.Engine. Where one program is not possible, or not asked for, the core's."""

    config: OneProgramConfig

    def __init__(self, config: OneProgramConfig) -> None:
        super().__init__(config)
        self.compile_graph = COMPILERS.get(self.accelerator.package)
        self.programs = 0
        is_asked = self.config.one_program == "always" or self.compile_graph is not None
        reason = obstacle(self.config, self.layout) if is_asked else ""
        self.is_whole = is_asked and not reason
        if reason:
            self.remarks.append(f"a step is several programs, between which FSDP2 communicates: {reason}")
        elif is_asked:
            self.remarks.append("a step is one program for each micro-batch, the last of them with the update")
            self.compiles = False  # no parts of it

    def place(self, model: Llama) -> TorchTrainee:
        """See engine.Engine."""
        return OneProgramTrainee(self, model) if self.is_whole else super().place(model)

    def compilations(self) -> int:
        """See TorchEngine."""
        return self.programs if self.is_whole else super().compilations()


def obstacle(config: OneProgramConfig, layout: TorchLayout) -> str:
    """Return why the step of `config` cannot be one program, or nothing."""
    is_whole = config.checkpoint_granularity == "full" and config.checkpoint_num_layers == 1
    if not (is_whole and all(model_mask(config))):
        return "not every block is recomputed by itself, and whole"
    if config.save_attention:
        return "save_attention keeps results of recomputed blocks"
    if layout.mesh.tensor * layout.mesh.context > 1:
        return "there are tensor or context ranks"
    if config.cpu_offload:
        return "cpu_offload keeps the parameters on the host"
    if layout.grid.shard > 1 and not layout.reshards_after_forward:
        return f"{config.sharding_strategy} keeps gathered parameters for the backward pass"
    with torch.device("meta"):
        model = Llama(config)
    if any(len(weight) % layout.grid.shard for weight in model.parameters()):
        return f"the rows of some parameters cannot be divided by {layout.grid.shard} processes"
    if any(
        parameter.rule.needs_full_tensor for parameter in build_optimizer(config, model.named_parameters()).parameters
    ):
        return f"{config.optimizer} reads whole matrices"
    return ""


class OneProgramTrainee(TorchTrainee):
    """See engine.Trainee."""

    engine: OneProgramEngine
    step: ProgramStep

    def __init__(self, engine: OneProgramEngine, model: Llama) -> None:
        precision = engine.precision
        self.ranks = Ranks(None, None, precision.activations, precision.gradient_reduction)
        super().__init__(engine, model)
        gather_on_access(self.model, self.ranks)
        self.blocks = LoopedBlocks(self.ranks)  # type: ignore[assignment]
        for name, live in self.step.model_weights().items():  # a step replaces them: everything must see the same
            if isinstance(weight := self.shards.weights[name], DTensor):
                weight._local_tensor = live
        self.programs: dict[Any, TracedProgram] = {}

    def _shard(self, grid: DeviceMesh, root: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Divide the rows of every parameter as FSDP2 does."""
        mesh = grid["replica", "shard"]
        shard, replica = (mesh.get_group(axis) if mesh[axis].size() > 1 else None for axis in ("shard", "replica"))
        self.ranks = self.ranks._replace(shard=shard, replica=replica)
        for name, weight in list(root.named_parameters()):
            module, _, short = name.rpartition(".")
            local = weight.detach().chunk(mesh["shard"].size())[0]
            placed = DTensor.from_local(local, mesh, (Replicate(), Shard(0)), run_check=False)
            setattr(root.get_submodule(module), short, nn.Parameter(placed, weight.requires_grad))

    def open_step(self, optimizer: Optimizer) -> ProgramStep:
        """See TorchTrainee."""
        return ProgramStep(self.config, optimizer, self.engine.home, self.shards, None)

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """See engine.Trainee. Replicas sum their gradients after the last micro-batch."""
        rate, sums = torch.tensor(learning_rate, device=self.engine.device), list[Tensor]()
        for micro_batch, is_last in self._micro_batches(with_token_ids(self.config, batch, self.engine.data_rank)):
            function = partial(self._micro_step, tuple(micro_batch), len(sums), is_last)
            sums = self._run(function, [*sums, *micro_batch.values(), rate], freed=len(sums))
        return StepResult(self.step.figures, sums[0])

    def _micro_step(self, names: tuple[str, ...], count: int, is_last: bool, *given: Tensor) -> list[Tensor]:
        """Return the gradients of all micro-batches up to this one; of the last, the step's figures.

        given: the `count` gradients of those before, the tensors of the micro-batch, the learning rate.
        """
        sums, tensors, rate = given[:count], given[count:-1], given[-1]
        loss, tokens = self._loss(dict(zip(names, tensors, strict=True)))
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        gradients: Iterable[Tensor] = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            self.step.add_loss(loss, tokens)
            gradients = [gradient.to(self.engine.precision.gradients) for gradient in gradients]
            if sums:
                gradients = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            if not is_last:
                return [gradient.clone() for gradient in gradients]  # those of blocks are views of all blocks'
            self.step.take_gradients(dict(zip(weights, map(self.ranks.mean, gradients), strict=True)))
            return [self.step.apply(rate)]

    def evaluated(self, batch: dict[str, Tensor]) -> Tensor:
        """See TorchTrainee."""
        (totals,) = self._run(partial(self._evaluated, tuple(batch)), list(batch.values()))
        return totals

    def _evaluated(self, names: tuple[str, ...], *tensors: Tensor) -> list[Tensor]:
        return [super().evaluated(dict(zip(names, tensors, strict=True)))]

    def _run(self, function: partial[list[Tensor]], given: list[Tensor], freed: int = 0) -> list[Tensor]:
        """Run `function`, which is traced once for tensors of these shapes."""
        state, key = self.step.changing(), (function.func.__name__, *function.args, *(x.shape for x in given))
        if key not in self.programs:
            self.programs[key] = TracedProgram(function, state, given, self._on, self.engine.compile_graph, freed)
            self.engine.programs += 1
        return self.programs[key](state, given)

    @contextmanager
    def _on(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Have the model and the step read and write `tensors` in place of this process's state."""
        own = self.step
        self.step = own.on(tensors)
        trained = {parameter.name for parameter in own.optimizer.parameters}
        weights = {name: x.detach().requires_grad_(name in trained) for name, x in self.step.model_weights().items()}
        try:
            with replaced(self.model, weights):
                yield
        finally:
            self.step = own
