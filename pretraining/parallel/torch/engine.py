"""The torch engine: one process per device, FSDP2 over a device mesh, collectives by torch.distributed.

Runs on the devices of accelerator.ACCELERATORS, and of extensions. Started by torchrun, or alone as a single process. A
step waits for the device only where its result is read.
"""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import Shard

from pretraining.config.errors import ConfigError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.models.dropout import dropout_noise
from pretraining.models.init import initial_weight
from pretraining.models.llama import BatchInputs, Embedding, Head, Llama, loss_options
from pretraining.models.ops import IGNORED, Kernel, LossAndGradient, document_mask, loss_and_gradient
from pretraining.optim.optimizer import Optimizer, build_optimizer
from pretraining.optim.precision import precision_of
from pretraining.parallel import accelerator
from pretraining.parallel.accelerator import HOST, Accelerator
from pretraining.parallel.engine import Batch, StepResult, TrainingState, with_token_ids
from pretraining.parallel.layout import shard_dimension, torch_layout, uneven_shards
from pretraining.parallel.mesh import resolve_batch, resolve_mesh
from pretraining.parallel.processes import START, Processes, raise_process_error, read_processes
from pretraining.parallel.torch import tensor as torch_tensor
from pretraining.parallel.torch.blocks import TorchBlocks
from pretraining.parallel.torch.context import ContextRanks
from pretraining.parallel.torch.state import WEIGHT, LocalShards, to_local
from pretraining.parallel.torch.step import TorchStep, reduce_over_processes

# Names of the groups of processes that this one joins.
GROUPS = (f"start {START} group {number}" for number in itertools.count())


class TorchEngine:
    """See engine.Engine."""

    name = "torch"
    # Of the device mesh. Tensor ranks are consecutive processes; FSDP shards a tensor rank's shard, hence the order.
    axes: tuple[str, ...] = ("replica", "tensor", "shard")

    def __init__(self, config: TrainConfig) -> None:
        # Everything that the number of processes rules out is refused before a device is opened
        processes = read_processes()
        self.process_index, self.process_count = processes.rank, processes.world_size
        self.host_processes = processes.local_world_size
        self.accelerator = accelerator.accelerator_of(config, accelerator.device_type(config.device))
        linked, self.linked = self.accelerator.linked(processes)
        self.mesh = resolve_mesh(config, self.process_count, linked)
        self.layout = torch_layout(config, self.mesh)
        if problems := list(uneven_shards(config, self.mesh)):
            raise ConfigError(problems)
        self.config = config = resolve_batch(config, self.mesh.data_ranks)
        self.device = accelerator.open_device(config)
        self.device_name = accelerator.device_name(self.device)
        self.home = HOST if config.cpu_offload else self.device  # of shards, gradients and moments
        self.host_devices = self.host_processes if self.home == HOST else 0
        self.data_size, self.rows = self.mesh.data_ranks, config.batch_size
        # Every context rank is fed the same rows, and takes its tokens of them
        self.data_rank = self.process_index // (self.mesh.context * self.mesh.tensor) % self.data_size
        self.precision = precision_of(config)
        self.compiles = accelerator.chooses_compile(self.accelerator, self.device, config.use_torch_compile)
        self.transform = config.transformation_on(self.device)
        accelerator.set_matmul_precision(self.accelerator, self.precision.compute)
        kernel = self.accelerator.kernel_of(self.precision.compute, model_shape(config).head_dim)
        self.kernel: Kernel = kernel if config.attention_impl == "auto" else "chunked"
        self.attention, self.remarks = "", list[str]()
        self._joined, self.context = False, None
        self.device_mesh = self._open_mesh(processes)
        if self.mesh.context > 1:
            self.kernel = self.context = ContextRanks(self._open_context(), self.kernel)
        self.tensor_ranks = self.device_mesh["tensor"] if self.device_mesh and self.mesh.tensor > 1 else None

    def _open_mesh(self, processes: Processes) -> DeviceMesh | None:
        """Return the grid of all processes; None for a single process on the CPU, where FSDP would only copy."""
        if not processes.is_launched and self.device == HOST:
            return None
        with raise_process_error(processes, self.config.collective_timeout):
            if not dist.is_initialized():
                self._join(processes)
            *outer, tensor, shard = (getattr(self.layout.grid, axis) for axis in self.axes)
            grid = torch.arange(self.process_count).view(*outer, shard, tensor).transpose(-2, -1)
            return self._device_mesh(grid, self.axes)

    def _open_context(self) -> DeviceMesh:
        """Return the processes that share this one's rows."""
        grid = torch.arange(self.process_count).view(-1, self.mesh.context, self.mesh.tensor)
        return self._device_mesh(grid, ("rows", "context", "heads"))["context"]

    def _device_mesh(self, grid: Tensor, axes: tuple[str, ...]) -> DeviceMesh:
        mesh = DeviceMesh(self.device.type, grid, mesh_dim_names=axes)
        for group in mesh.get_all_groups():  # which have torch's default, 10 or 30 minutes
            set_group_timeout(timedelta(seconds=self.config.collective_timeout), group)
        return mesh

    def _join(self, processes: Processes) -> None:
        """Join the process group, which `close` leaves; torchrun's environment names the other processes."""
        timeout = timedelta(seconds=self.config.collective_timeout)
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        if processes.is_launched:
            store, *_ = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
        # torchrun's store outlives a group and a start: without a prefix the next one would look for their processes.
        store = dist.PrefixStore(next(GROUPS), store)  # type: ignore[attr-defined]
        options: dict[str, Any] = {"store": store, "rank": processes.rank, "world_size": processes.world_size}
        # torch 2.9 looks up the bound device in every group, also in those of gloo, which has none for other devices.
        if self.device.index is not None and self.device.type in dist.Backend.backend_capability["gloo"]:
            options["device_id"] = self.device
        dist.init_process_group(accelerator.backend_of(self.accelerator, self.device), timeout=timeout, **options)
        self._joined = True

    def place(self, model: Llama) -> TorchTrainee:
        """See engine.Engine."""
        return TorchTrainee(self, model)

    # ---- Figures

    def compilations(self) -> int:
        """Return the number of graphs that torch.compile made; 0 where it is not used."""
        if not self.compiles:
            return 0
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def memory_bytes(self) -> int | None:
        """See engine.Engine."""
        return accelerator.peak_bytes(self.device)

    def close(self) -> None:
        """See engine.Engine."""
        if self._joined:
            dist.destroy_process_group()


class TorchTrainee:
    """See engine.Trainee."""

    def __init__(self, engine: TorchEngine, model: Llama) -> None:
        """Place `model`. Parameters on the meta device are initialised shard by shard.

        FSDP2 gathers a block's parameters before it runs, so any dimension may be sharded: the first one, which needs
        no copy besides the collective, or with tensor ranks the table's.
        """
        self.engine, self.config, self.model = engine, engine.config, model
        values = {name: weight.detach() for name, weight in model.named_parameters() if not weight.is_meta}
        self.blocks = TorchBlocks(self.config, engine.tensor_ranks)
        engine.transform(model)
        self.blocks.recompute_modules(model)
        model.to("meta").to(engine.precision.parameters)
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        for module in (module for module in model.modules() if isinstance(module, Embedding)):
            module.is_wide = engine.accelerator.widens_lookups
        compiled = compile_alike(model, engine.accelerator) if engine.compiles else lambda function: function
        # Eagerly, all [T, T] pairs of a row exist at once: 1 GiB and several times that in between at 32768 tokens.
        self._loss_and_gradient, self._document_mask = compiled(loss_and_gradient), compiled(document_mask)
        if engine.tensor_ranks:
            self._loss_and_gradient = torch_tensor.shard_over_tensor_ranks(
                model, engine.tensor_ranks, engine.layout, self.config.sequence_parallel
            )
        self.roots = self.divide()
        for root, blocks in self.roots.items():
            if engine.device_mesh:
                self._shard(engine.device_mesh, root, blocks)
        # As to_empty, whose empty_like imports sympy for a plain tensor on meta: 0.6 CPU s of a start.
        model._apply(lambda weight: weight.new_empty(weight.shape, device=engine.home))
        for root in (root for root in self.roots if isinstance(root, fsdp.FSDPModule)):
            # torch 2.9 replaces uneven shards here, which would otherwise happen after the optimizer has taken them.
            root._get_fsdp_state()._lazy_init()
        grid = engine.device_mesh[TorchEngine.axes] if engine.device_mesh else None
        self.shards = LocalShards(model, shapes, engine.layout, grid, engine.process_index)
        self._fill(values)
        values.clear()  # before there are moments
        self.step = self.open_step(build_optimizer(self.config, model.named_parameters()))

    def divide(self) -> dict[nn.Module, Iterable[nn.Module]]:
        """Return the modules that this process runs whole, each with its blocks: the model."""
        return {self.model: self.model.model.layers}

    def _shard(self, grid: DeviceMesh, root: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Apply FSDP2 to each block of `root`, one of the modules that run whole, and to the embedding and the head.

        The head is gathered from its forward to its backward pass, the rest, a tied embedding included, while `root`
        runs. The backward pass of an embedding needs no weight.
        """
        layout, precision = self.engine.layout, self.engine.precision
        dtype = None if precision.activations == torch.float32 else precision.activations
        # The rotary table is an input, and stays fp32
        policy = fsdp.MixedPrecisionPolicy(dtype, precision.gradient_reduction, cast_forward_inputs=False)
        offload = fsdp.CPUOffloadPolicy() if self.config.cpu_offload else fsdp.OffloadPolicy()
        options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
        options["mesh"] = grid["shard"] if layout.grid.replica == 1 else grid["replica", "shard"]
        if layout.mesh.tensor > 1:
            dims = {weight: shard_dimension(name) for name, weight in self.model.named_parameters()}
            options["shard_placement_fn"] = lambda weight: Shard(dims[weight])
        freed = layout.reshards_after_forward
        for block in blocks:
            fsdp.fully_shard(block, reshard_after_forward=freed, **options)
        for module in () if self.config.tie_word_embeddings else list(root.modules()):
            if isinstance(module, nn.Embedding):
                fsdp.fully_shard(module, reshard_after_forward=freed, **options).set_unshard_in_backward(not freed)
            elif isinstance(module, Head):
                fsdp.fully_shard(module, reshard_after_forward=False, **options)
                fsdp.register_fsdp_forward_method(module, "loss")
        fsdp.fully_shard(root, reshard_after_forward=False, **options)
        if root is self.model:
            fsdp.register_fsdp_forward_method(root, "loss")
        self.engine.accelerator.after_sharding(root)

    def _fill(self, values: dict[str, Tensor]) -> None:
        """Write this process's shards of `values`, or where there are none, of the initial weights."""
        shards = self.shards

        def fill(name: str) -> None:
            value = values[name] if values else initial_weight(self.config, name, shards.shapes[name])
            shards.local(name).copy_(shards.slice_of(name, value))

        # torch's generator releases the interpreter lock
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // self.engine.host_processes)) as pool:
            list(pool.map(fill, shards.weights))

    def open_step(self, optimizer: Optimizer) -> TorchStep:
        """Return the optimizer step on this process's shards."""
        return TorchStep(self.config, optimizer, self.engine.home, self.shards, self.engine.tensor_ranks)

    # ---- Running

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """See engine.Trainee.

        Gradients are reduce-scattered in a shard group after every micro-batch and all-reduced over its replicas
        (across hosts) after the last. With zero1 they are reduced after the last only, and parameters are gathered
        once per step.
        """
        with self.engine.accelerator.fuse():
            self.accumulate(with_token_ids(self.config, batch, self.engine.data_rank))
            return StepResult(self.step.figures, self.step.apply(learning_rate))

    def accumulate(self, batch: Batch) -> None:
        """Add up the loss and the gradients of all micro-batches of a step."""
        for micro_batch, is_last in self._micro_batches(batch):
            self.choose_collectives(self.model, is_last)
            loss, count = self._loss(micro_batch)
            loss.backward()
            self.step.add_loss(loss, count)
            self.step.add_gradients()

    def choose_collectives(self, module: nn.Module, is_last: bool) -> None:
        """Let FSDP communicate in a backward pass of `module`, its last of the step or not, as the strategy asks."""
        if isinstance(module, fsdp.FSDPModule) and self.engine.layout.gathers_once:
            module.set_requires_gradient_sync(is_last)
            module.set_reshard_after_backward(is_last)
        elif isinstance(module, fsdp.FSDPModule):
            module.set_requires_all_reduce(is_last)

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Yield this process's rows as micro-batches on the device, and whether each is the last."""
        count, length = batch["tokens"].shape
        rows = self.config.batch_size * self.config.seq_length // length
        for start in range(0, count, rows):
            yield self.to_device({name: x[start : start + rows] for name, x in batch.items()}), start + rows >= count

    def to_device(self, batch: Batch) -> dict[str, Tensor]:
        host = {name: torch.from_numpy(array) for name, array in batch.items()}
        if self.engine.accelerator.pins_memory:
            host = {name: tensor.pin_memory() for name, tensor in host.items()}
        on_device = {name: tensor.to(self.engine.device, non_blocking=True) for name, tensor in host.items()}
        return self.engine.context.split(on_device) if self.engine.context else on_device

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of trained tokens of one micro-batch."""
        inputs, chunk_loss = self.read_inputs(batch)
        loss = self.model.loss(batch["tokens"], batch["labels"].long(), inputs, self.blocks, chunk_loss)
        return loss, trained_tokens(batch)

    def read_inputs(self, batch: dict[str, Tensor]) -> tuple[BatchInputs, LossAndGradient]:
        """Return what the model reads of a micro-batch besides tokens and labels, and how its loss is computed."""
        noise = None
        chunk_loss = partial(self._loss_and_gradient, options=loss_options(self.config))
        if self.step.loss_scale:
            chunk_loss = partial(chunk_loss, factor=self.step.loss_factor().to(self.engine.device))
        if "global_token_index" in batch:
            updates = self.step.optimizer.updates.to(self.engine.device)
            noise = dropout_noise(self.config.seed, updates, batch["global_token_index"])
            noise = noise._replace(tensor_rank=self.engine.process_index % self.engine.mesh.tensor)
        dtype, kernel = self.engine.precision.activations, self.engine.kernel
        return BatchInputs(batch.get("positions"), self._mask(batch), noise, dtype, kernel=kernel), chunk_loss

    def _mask(self, batch: dict[str, Tensor]) -> Any:
        """Return the segments of a micro-batch; where a compiled kernel skips empty blocks of a mask, those blocks."""
        engine, segments, window = self.engine, batch.get("segments"), self.config.sliding_window
        is_skipping = engine.compiles and engine.accelerator.skips_masked_blocks and not self.config.attention_dropout
        if not is_skipping or self.config.attention_impl != "auto" or (segments is None and not window):
            return segments
        if segments is None:
            segments = torch.zeros_like(batch["labels"]).repeat(1, engine.mesh.context)
        if engine.context is None:
            return self._document_mask(segments, window)
        ends, length = engine.context.ends(segments.shape[1]), segments.shape[1] // engine.context.chunks
        return tuple(self._document_mask(segments[:, :end], window, length) for end in ends)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> StepResult:
        """See engine.Trainee."""
        totals = torch.zeros(2, device=self.engine.device)
        for micro_batch, _ in self._micro_batches(batch):
            totals += self.evaluated(micro_batch)
        reduce_over_processes(totals)
        for module in (module for root in self.roots for module in root.modules()):
            if isinstance(module, fsdp.FSDPModule):  # without a backward pass, what was gathered stays gathered
                module.reshard()
        mean, tokens = totals[0] / totals[1].clamp(min=1), totals[1] / self.engine.mesh.tensor
        return StepResult(("loss", "tokens"), torch.stack((mean, tokens)))

    def evaluated(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one micro-batch and its trained tokens, [2], as this process counts them."""
        return torch.stack(self._loss(batch))

    # ---- Logical state

    def state(self) -> TrainingState:
        """See engine.Trainee: the live tensors."""
        trained = {parameter.name: parameter for parameter in self.step.optimizer.parameters}
        tensors = {}
        for prefix, name, tensor in self.step.tensors(self.model):
            spec = trained[name].moment_specs()[prefix.split(".")[1]] if prefix else WEIGHT
            tensors[prefix + name] = self.shards.checkpoint_tensor(name, to_local(tensor), spec)
        return TrainingState({**tensors, **self.step.small_tensors()}, self.step.finish_loading)

    def bytes_per_device(self) -> dict[str, int]:
        """See engine.Trainee: measured on this process's shards."""
        return self.step.bytes_per_device(self.model, lambda tensor: to_local(tensor).nbytes)


def compile_alike(model: Llama, device: Accelerator) -> Callable[[Any], Any]:
    """Compile one function for all blocks that run alike, so that compile time does not grow with depth.

    Only `forward` is compiled: FSDP's hooks stay outside, and parameters keep their names. Returns what compiles other
    functions in the same way.
    """
    compiled: Callable[[Any], Any] = cache(partial(torch.compile, **(device.compile or {})))
    for module in (*model.model.layers, model.model.norm):
        module.forward = types.MethodType(compiled(module.forward.__func__), module)
    return compiled


def trained_tokens(batch: dict[str, Tensor]) -> Tensor:
    """Return the number of positions that the loss counts."""
    return (batch["labels"] != IGNORED).sum().float()
