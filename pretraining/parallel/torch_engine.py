"""The torch engine: one process per device, FSDP2 over a device mesh, collectives by torch.distributed.

Runs on the devices of accelerator.ACCELERATORS. Started by torchrun, or alone as a single process. A step
waits for the device only where its result is read.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.profiler import profile, supported_activities, tensorboard_trace_handler
from torch.utils.checkpoint import checkpoint

from pretraining.config.errors import ConfigError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.models.dropout import dropout_noise
from pretraining.models.init import initial_weight
from pretraining.models.llama import BatchInputs, Block, Llama
from pretraining.models.ops import IGNORED, document_mask, loss_and_gradient
from pretraining.optim.optimizer import Optimizer
from pretraining.optim.precision import precision_of
from pretraining.parallel import accelerator, torch_tensor
from pretraining.parallel.accelerator import ACCELERATORS, HOST
from pretraining.parallel.engine import LOSS_SCALE, Batch, TrainingState, with_token_ids
from pretraining.parallel.layout import TorchLayout, shard_dimension, uneven_columns
from pretraining.parallel.mesh import resolve_batch, resolve_mesh
from pretraining.parallel.processes import Processes, raise_process_error, read_processes
from pretraining.parallel.recompute import block_mask, recomputed_modules
from pretraining.parallel.step import DeviceScalars
from pretraining.parallel.torch_state import LocalShards, to_local
from pretraining.parallel.torch_step import TorchStep, sum_over_processes

# Arguments of torch.utils.checkpoint. Dropout is a hash, so there is no random state to preserve.
RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class TorchEngine:
    """See engine.Engine."""

    name = "torch"

    def __init__(self, config: TrainConfig) -> None:
        # Everything that the number of processes rules out is refused before a device is opened
        processes = read_processes()
        self.process_index, self.process_count = processes.rank, processes.world_size
        self.host_processes = processes.local_world_size
        self.mesh = resolve_mesh(config, self.process_count, self.host_processes)
        self.layout = TorchLayout(self.mesh, config.sharding_strategy)
        if problems := list(uneven_columns(config, self.mesh)):
            raise ConfigError(problems)
        self.config = config = resolve_batch(config, self.mesh.data_ranks)
        self.device = accelerator.open_device(config.device)
        self.device_name, self.accelerator = accelerator.device_name(self.device), ACCELERATORS[self.device.type]
        self.home = HOST if config.cpu_offload else self.device  # of shards, gradients and moments
        self.host_devices = self.host_processes if self.home == HOST else 0
        self.data_rank, self.data_size = self.process_index // self.mesh.tensor, self.mesh.data_ranks
        self.precision = precision_of(config)
        self.compiles = config.use_torch_compile and self.accelerator.compile is not None
        accelerator.set_matmul_precision(self.device, self.precision.compute)
        self.kernel = accelerator.kernel_of(self.device, self.precision.compute, model_shape(config).head_dim)
        self._joined = False
        self.device_mesh = self._open_mesh(processes)
        self.tensor_ranks = self.device_mesh["tensor"] if self.device_mesh and self.mesh.tensor > 1 else None

    def _open_mesh(self, processes: Processes) -> DeviceMesh | None:
        """Return the grid of all processes; None for a single process on the CPU, where FSDP would only copy."""
        if not processes.is_launched and self.device == HOST:
            return None
        with raise_process_error(processes, self.config.collective_timeout):
            if not dist.is_initialized():
                self._join(processes)
            # Tensor ranks are consecutive processes; FSDP shards a tensor rank's shard, hence the order of the axes.
            grid = torch.arange(self.process_count).view(self.mesh.replica, self.mesh.shard, self.mesh.tensor)
            return DeviceMesh(self.device.type, grid.transpose(1, 2), mesh_dim_names=("replica", "tensor", "shard"))

    def _join(self, processes: Processes) -> None:
        """Join the process group, which `close` leaves; torchrun's environment names the other processes."""
        options: dict[str, Any] = {}
        if not processes.is_launched:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        if self.device.index is not None:
            options["device_id"] = self.device
        timeout = timedelta(seconds=self.config.collective_timeout)
        dist.init_process_group(accelerator.backend_of(self.device), timeout=timeout, **options)
        self._joined = True

    # ---- Placing

    def place(self, model: Llama) -> Llama:
        """See engine.Engine. Initialises parameters on the meta device shard by shard.

        FSDP2 gathers a block's parameters before it runs, so any dimension may be sharded: the first one, which needs
        no copy besides the collective, or with tensor ranks the table's.
        """
        values = {name: weight.detach() for name, weight in model.named_parameters() if not weight.is_meta}
        layers = model.shape.num_layers
        self._recomputed = block_mask(self.config, layers)
        self._recompute_modules(model)
        model.to("meta").to(self.precision.parameters)
        shards = self.shards = LocalShards(model, self.mesh, self.device_mesh, self.process_index)
        self._loss_and_gradient: Callable[..., tuple[Tensor, Tensor]] = loss_and_gradient
        if self.compiles:
            self._compile(model)
        if self.device_mesh is not None:
            if self.tensor_ranks:
                torch_tensor.shard_over_tensor_ranks(model, self.tensor_ranks, self.config.sequence_parallel)
                head = torch_tensor.VocabularyParallelLoss(self.tensor_ranks)
                model.model.norm.register_forward_hook(lambda _, __, x: head.copy_input(x))
                self._loss_and_gradient = head
            self._shard(model, self.device_mesh)
        model.to_empty(device=self.home)
        shards.bind(model)

        def fill(name: str) -> None:
            value = values[name] if values else initial_weight(self.config, layers, name, shards.shapes[name])
            shards.local(name).copy_(shards.slice_of(name, value))

        # torch's generator releases the interpreter lock
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // self.host_processes)) as pool:
            list(pool.map(fill, shards.weights))
        return model

    def _shard(self, model: Llama, grid: DeviceMesh) -> None:
        """Apply FSDP2 to each block; embedding, final norm and head are gathered together, for the whole step."""
        activations = self.precision.activations
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=None if activations == torch.float32 else activations,
            reduce_dtype=self.precision.gradient_reduction,
            cast_forward_inputs=False,  # the rotary table stays fp32
        )
        offload = fsdp.CPUOffloadPolicy() if self.config.cpu_offload else fsdp.OffloadPolicy()
        options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
        options["mesh"] = grid["shard"] if self.mesh.replica == 1 else grid["replica", "shard"]
        if self.mesh.tensor > 1:
            dims = {weight: shard_dimension(name) for name, weight in model.named_parameters()}
            options["shard_placement_fn"] = lambda weight: Shard(dims[weight])
        for block in model.model.layers:
            fsdp.fully_shard(block, reshard_after_forward=self.layout.reshards_after_forward, **options)
        fsdp.fully_shard(model, reshard_after_forward=False, **options)
        fsdp.register_fsdp_forward_method(model, "loss")

    def _compile(self, model: Llama) -> None:
        """Compile one function for all blocks, so that compile time does not grow with depth.

        Only `forward` is compiled: FSDP's hooks stay outside, and parameters keep their names.
        """
        compiled = partial(torch.compile, **(self.accelerator.compile or {}))
        run_block, run_norm = compiled(Block.forward), compiled(type(model.model.norm).forward)
        for block in model.model.layers:
            block.forward = types.MethodType(run_block, block)
        model.model.norm.forward = types.MethodType(run_norm, model.model.norm)
        self._loss_and_gradient = compiled(loss_and_gradient)
        # Eagerly, all [T, T] pairs of a row exist at once: 1 GiB and several times that in between at 32768 tokens.
        self._document_mask = compiled(document_mask)

    def prepare(self, optimizer: Optimizer) -> None:
        """See engine.Engine."""
        self.step = TorchStep(self.config, optimizer, self.home, self.shards, self.tensor_ranks)

    # ---- Running

    def train_step(self, model: Llama, optimizer: Optimizer, batch: Batch, learning_rate: float) -> DeviceScalars:
        """See engine.Engine.

        Gradients are reduce-scattered in a shard group after every micro-batch and all-reduced over its replicas
        (across hosts) after the last. With zero1 they are reduced after the last only, and parameters are gathered
        once per step.
        """
        for micro_batch, is_last in self._micro_batches(with_token_ids(self.config, batch, self.data_rank)):
            if isinstance(model, FSDPModule) and self.layout.gathers_once:
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            elif isinstance(model, FSDPModule):
                model.set_requires_all_reduce(is_last)
            loss, count = self._loss(model, micro_batch)
            loss.backward()
            self.step.accumulate(loss, count)
        return self.step.apply(learning_rate)

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Yield this process's rows as micro-batches on the device, and whether each is the last."""
        count, rows = len(batch["tokens"]), self.config.batch_size
        for start in range(0, count, rows):
            host = {name: torch.from_numpy(array[start : start + rows]) for name, array in batch.items()}
            if self.accelerator.pins_memory:
                host = {name: tensor.pin_memory() for name, tensor in host.items()}
            local = {name: tensor.to(self.device, non_blocking=True) for name, tensor in host.items()}
            yield local, start + rows >= count

    def _loss(self, model: Llama, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of trained tokens of one micro-batch."""
        labels, noise = batch["labels"].long(), None
        chunk_loss = self._loss_and_gradient
        if self.step.loss_scale:
            chunk_loss = partial(chunk_loss, factor=self.step.loss_factor().to(self.device))
        if self.config.z_loss and torch.is_grad_enabled():
            chunk_loss = partial(chunk_loss, z_loss=self.config.z_loss)
        if "global_token_index" in batch:
            updates = self.step.optimizer.updates.to(self.device)
            noise = dropout_noise(self.config.seed, updates, batch["global_token_index"])
            noise = noise._replace(tensor_rank=self.process_index % self.mesh.tensor)
        inputs = BatchInputs(
            batch.get("positions"), batch.get("segments"), noise, self.precision.activations, kernel=self.kernel
        )
        loss = model.loss(batch["tokens"], labels, inputs, self._run_blocks, chunk_loss)
        return loss, (labels != IGNORED).sum().float()

    def _recompute_modules(self, model: Llama) -> None:
        """Checkpoint the modules of selected blocks, where modules are recomputed and not whole blocks."""
        for block, is_selected in zip(model.model.layers, self._recomputed, strict=True):
            for path in recomputed_modules(self.config, block) if is_selected else []:
                module = block.get_submodule(path)
                module.forward = partial(checkpoint, module.forward, **RECOMPUTE)
        if self.config.checkpoint_granularity == "selective":
            self._recomputed = (False,) * len(self._recomputed)

    def _run_blocks(self, blocks: Iterable[nn.Module], x: Tensor, inputs: BatchInputs) -> Tensor:
        """See llama.RunBlocks. Recomputes checkpoint_num_layers blocks together."""
        window = self.config.sliding_window
        is_masked = isinstance(inputs.segments, Tensor) or bool(window)
        skips_blocks = self.compiles and self.accelerator.skips_masked_blocks
        if skips_blocks and not self.config.attention_dropout and is_masked:
            segments = inputs.segments if isinstance(inputs.segments, Tensor) else x.new_zeros(x.shape[:2])
            inputs = inputs._replace(segments=self._document_mask(segments, window))

        def run(x: Tensor, inputs: BatchInputs, *chosen: nn.Module) -> Tensor:
            for block in chosen:
                x = block(x, inputs)
                inputs = inputs.next_block()
            return x

        group = self.tensor_ranks.get_group() if self.tensor_ranks and self.config.sequence_parallel else None
        x = torch_tensor.scatter_to_sequence(x, group) if group else x
        layers, size = list(blocks), self.config.checkpoint_num_layers
        for first in range(0, len(layers), size):
            chosen = layers[first : first + size]
            is_recomputed = self._recomputed[first]
            x = checkpoint(run, x, inputs, *chosen, **RECOMPUTE) if is_recomputed else run(x, inputs, *chosen)
            for _ in chosen:
                inputs = inputs.next_block()
        return torch_tensor.gather_from_sequence(x, group) if group else x

    @torch.no_grad()
    def evaluate(self, model: Llama, batch: Batch) -> DeviceScalars:
        """See engine.Engine."""
        totals = torch.zeros(2, device=self.device)
        for micro_batch, _ in self._micro_batches(batch):
            totals += torch.stack(self._loss(model, micro_batch))
        sum_over_processes(totals)
        for module in model.modules():  # without a backward pass, parameters gathered for the step stay gathered
            if isinstance(module, FSDPModule):
                module.reshard()
        return DeviceScalars(("loss", "tokens"), torch.stack((totals[0] / totals[1], totals[1] / self.mesh.tensor)))

    @torch.no_grad()
    def parameter_norm(self, model: Llama) -> float:
        """See engine.Engine."""
        square = self.step.power_sum({name: self.shards.local(name) for name in self.shards.weights})
        sum_over_processes(square)
        return square.sqrt().item()

    # ---- Logical state

    def state(self, model: Llama, optimizer: Optimizer) -> TrainingState:
        """See engine.Engine: the live tensors."""
        tensors = {
            prefix + name: self.shards.checkpoint_tensor(name, to_local(tensor))
            for prefix, name, tensor in self.step.tensors(model)
        }
        tensors["optimizer.step"] = optimizer.updates
        if self.step.loss_scale:
            tensors[LOSS_SCALE] = self.step.loss_scale.state
        return TrainingState(tensors, self.step.finish_loading)

    # ---- Figures

    def bytes_per_device(self, model: Llama, optimizer: Optimizer) -> dict[str, int]:
        """See engine.Engine: measured on this process's shards."""
        return self.step.bytes_per_device(model, lambda tensor: to_local(tensor).nbytes)

    def compilations(self) -> int:
        """Return the number of graphs that torch.compile made; 0 where it is not used."""
        if not self.compiles:
            return 0
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def memory_bytes(self) -> int | None:
        """See engine.Engine."""
        return accelerator.peak_bytes(self.device)

    def start_trace(self, folder: str) -> None:
        """See engine.Engine."""
        worker, self._trace_folder = f"process_{self.process_index}", Path(folder)
        handler = tensorboard_trace_handler(folder, worker_name=worker)
        self._trace = profile(activities=supported_activities(), on_trace_ready=handler)
        self._trace.start()
        if self.config.memory_profiling:
            accelerator.record_memory()

    def stop_trace(self) -> None:
        """See engine.Engine."""
        accelerator.synchronize(self.device)
        self._trace.stop()
        if self.config.memory_profiling:
            accelerator.dump_memory(self._trace_folder / f"memory_{self.process_index}.pickle")

    def close(self) -> None:
        """See engine.Engine."""
        if self._joined:
            dist.destroy_process_group()
