"""The XLA engine: one process per host, GSPMD over every device of the mesh, one compiled graph per step.

Parameters carry the sharding table's annotations and the compiler inserts the collectives. Only reading results,
saving and loading wait for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.models.dropout import dropout_noise
from pretraining.models.init import VOCABULARIES, initial_weight
from pretraining.models.llama import BatchInputs, Llama, RunBlocks, loss_options
from pretraining.models.ops import IGNORED, Kernel, next_token_loss
from pretraining.optim.optimizer import build_optimizer
from pretraining.optim.precision import precision_of
from pretraining.parallel.accelerator import HOST, peak_bytes
from pretraining.parallel.engine import Batch, StepResult, TrainingState, with_token_ids
from pretraining.parallel.layout import STACK, xla_layout
from pretraining.parallel.mesh import resolve_batch, resolve_mesh, token_order
from pretraining.parallel.sharding import LOGITS, NORM_ACTIVATIONS, REPLICAS, TOKENS
from pretraining.parallel.xla import has_own_flags
from pretraining.parallel.xla.blocks import ScannedBlocks, grouped, multiply, narrowed, place_activations, stack_layers
from pretraining.parallel.xla.graph import GraphCache, wait_for_all
from pretraining.parallel.xla.state import Region, XlaLogicalTensor, XlaShards, tensor_from_shards
from pretraining.parallel.xla.step import XlaStep, device_bytes, layer_name

# LLVM's level of optimization: the quickstart's first loss takes 40 CPU seconds, at XLA's default 105; steps are alike.
# The emitters of fusions write a whole stack of layers where a block updates its part of it: steps grow with the square
# of the layers, and 6 layers take 1.4 times as long.
CPU_FLAGS = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"


class EvaluationSums(StepResult):
    """Summed loss and trained tokens; divided on the host, which saves a graph."""

    def read(self) -> dict[str, float]:
        sums = super().read()
        return {"loss": sums["loss"] / max(sums["tokens"], 1), "tokens": sums["tokens"]}


class XlaEngine:
    """See engine.Engine."""

    name, compiles = "xla", True

    def __init__(self, config: TrainConfig) -> None:
        choice = config.attention_on(self.kernel_platform())
        self.attention = str(choice)
        self.remarks = _choose_for_cpu(config) if self.kernel_platform() == "CPU" else []
        if (cache := config.compile_cache_dir) and cache != os.environ.get("XLA_PERSISTENT_CACHE_PATH"):
            if torch_xla._XLAC._xla_computation_cache_is_initialized():
                remedy = "this process has compiled without it, or with another; start another process, or leave it out"
                raise UserError(f"--compile_cache_dir={cache}: {remedy}")
            xr.initialize_cache(cache)
        xr.use_spmd()
        self.device = torch_xla.device()
        self.device_name = _device_name()
        self.process_index, self.process_count = xr.process_index(), xr.process_count()
        devices = xr.global_runtime_device_count()
        linked, self.linked = _linked_devices()
        self.mesh = resolve_mesh(config, devices, linked)
        self.layout = xla_layout(config, self.mesh)
        # A kernel is told the positions of its queries; the chunked form takes rows in their order.
        self.reorders_tokens = choice.kernel is not None and self.mesh.context > 1
        self.config = config = resolve_batch(config, self.mesh.data_ranks)
        # A process feeds the rows of its own devices; where one rank spans several processes, they feed the same rows.
        self.data_size = min(self.process_count, config.division.stages * self.mesh.data_ranks)
        self.data_rank = self.process_index * self.data_size // self.process_count
        self.host_devices = xr.addressable_runtime_device_count() if self.device_name == "CPU" else 0
        self.host_processes = 1
        self.xla_mesh = xs.Mesh(np.arange(devices), tuple(self.mesh), self.mesh._fields)
        self.kernel: Kernel = choice.kernel(self.mesh, self.xla_mesh) if choice.kernel else "chunked"
        self.precision = precision_of(config)
        rows = config.batch_size * self.mesh.data_ranks * self.micro_batches_per_graph
        self.rows = rows // self.data_size  # of one graph, in this process
        if self.process_count > 1:
            torch.distributed.init_process_group("gloo", init_method="xla://")

    @property
    def micro_batches_per_graph(self) -> int:
        """Micro-batches of a data-parallel rank that one graph runs."""
        return 1

    def kernel_platform(self) -> str:
        """Return PJRT's name of the type of device that kernels are made for. Opens no device."""
        return xr.device_type() or "unknown"

    def place(self, model: Llama) -> XlaTrainee:
        """See engine.Engine."""
        return self.trainee_class(self, model)

    @property
    def trainee_class(self) -> type[XlaTrainee]:
        """What `place` returns."""
        return XlaTrainee

    # ---- Figures

    def compilations(self) -> int:
        """See engine.Engine."""
        data = xla_metrics.metric_data("CompileTime")
        return data[0] if data else 0

    def memory_bytes(self) -> int | None:
        """Return the process's peak on a CPU host; under SPMD torch-xla does not report that of devices."""
        return peak_bytes(HOST) if xr.device_type() == "CPU" else None

    def close(self) -> None:
        """See engine.Engine."""
        if self.process_count > 1:
            torch.distributed.destroy_process_group()


class XlaTrainee:
    """See engine.Trainee."""

    def __init__(self, engine: XlaEngine, model: Llama) -> None:
        """Stack the layers of `model`, and place it. A parameter on the meta device is initialised shard by shard."""
        self.engine, self.config, self.model = engine, engine.config, model
        self._commits = 0
        values = {name: weight for name, weight in model.named_parameters() if not weight.is_meta}
        parameters = engine.precision.parameters

        def value(name: str, shape: torch.Size) -> Tensor:
            return values[name].detach() if values else initial_weight(self.config, name, shape)

        stack_layers(model, len(self.config.division.stack()))
        for prefix, module in model.named_modules():
            for short, meta in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{short}"
                placed = self.place_parameter(name, meta.shape, value)
                if parameters != placed.dtype:
                    placed = placed.to(parameters)
                    xs.mark_sharding(placed, engine.xla_mesh, engine.layout.stacked(name, engine.layout.parameter))
                setattr(module, short, nn.Parameter(placed, requires_grad=meta.requires_grad))
        self.sync()
        values.clear()  # before there are moments
        self.run_blocks: RunBlocks = self.open_blocks()
        place_activations(model, NORM_ACTIVATIONS, engine.xla_mesh, engine.layout)
        # State created during the first step would compile a second graph
        optimizer, mesh, layout = build_optimizer(self.config, model.named_parameters()), engine.xla_mesh, engine.layout
        accumulates = (self.config.gradient_accumulation_steps or 1) > engine.micro_batches_per_graph
        self.step = XlaStep(self.config, optimizer, engine.device, mesh, layout, accumulates)
        self.graphs = GraphCache()
        self.sync()

    def place_parameter(self, name: str, shape: torch.Size, value: Callable[[str, torch.Size], Tensor]) -> Tensor:
        """Return the parameter `name` on the mesh, fp32; `value` returns its content, of a stack layer by layer."""

        def make(regions: list[Region]) -> list[Tensor]:
            if not name.startswith(STACK):
                full = value(name, shape)
                return [full[region].contiguous() for region in regions]
            buffers = [torch.zeros([extent.stop - extent.start for extent in region]) for region in regions]
            layers = self.config.division.stack()
            local = {position for region in regions for position in range(region[0].start, region[0].stop)}

            def fill(position: int) -> None:
                full = value(layer_name(name, layers[position]), shape[1:])
                for buffer, (stack, *region) in zip(buffers, regions, strict=True):
                    if stack.start <= position < stack.stop:
                        buffer[position - stack.start] = full[tuple(region)]

            with ThreadPoolExecutor(os.cpu_count()) as pool:  # torch's generator releases the interpreter lock
                list(pool.map(fill, (position for position in local if layers[position] is not None)))
            return buffers

        spec = self.engine.layout.stacked(name, self.engine.layout.parameter)
        return tensor_from_shards(shape, self.engine.xla_mesh, spec, make, self.engine.device)

    def open_blocks(self) -> RunBlocks:
        """Return what runs the stacked blocks of the model."""
        engine = self.engine
        return ScannedBlocks(self.config, self.model, engine.xla_mesh, engine.layout, engine.kernel)

    # ---- Running

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """See engine.Trainee. One graph; with accumulation, one per micro-batch (the same each time) and one more."""

        def accumulate(**inputs: Tensor) -> list[Tensor]:
            loss, count = self._loss(inputs)
            loss.backward()
            self.step.accumulate(loss, count)
            return []

        def update(rate: Tensor, **inputs: Tensor) -> list[Tensor]:
            if inputs:
                accumulate(**inputs)
            return [self.step.apply(rate[0])]

        # Sent as [1], because torch-xla merges a scalar with an equal constant of the graph (1e-5: norm_eps).
        last = {"rate": torch.tensor([learning_rate]).to(self.engine.device)}
        for inputs in self._micro_batches(with_token_ids(self.config, batch, self.engine.data_rank)):
            if self.step.accumulates:
                self.run_graph("micro-batch", accumulate, inputs)
            else:
                last |= inputs
        name = "update" if self.step.accumulates else "step"
        return StepResult(self.step.figures, *self.run_graph(name, update, last))

    def run_graph(self, name: str, function: Callable[..., list[Tensor]], arguments: dict[str, Tensor]) -> list[Tensor]:
        """Return the results of a part of a training step, which is traced once for each shape of its arguments."""
        frozen = (weight for weight in self.model.parameters() if not weight.requires_grad)
        state = (tensor for tensor, _ in self.step.persistent_tensors())
        return self.graphs.run(name, function, arguments, (*state, *frozen))

    def sync(self) -> None:
        """Run the traced operations, and wait for all graphs."""
        wait_for_all()

    def _micro_batches(self, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """Yield this process's rows on the devices, those of one graph at a time, sharded as TOKENS says."""
        count, length = batch["tokens"].shape
        rows_of_graph = self.engine.rows * self.config.seq_length // length
        if self.engine.reorders_tokens:
            order = token_order(length, self.engine.mesh.context)
            batch = {name: array[:, order] for name, array in batch.items()}
        for start in range(0, count, rows_of_graph):
            rows = {name: torch.from_numpy(array[start : start + rows_of_graph]) for name, array in batch.items()}
            yield {name: self.send(tensor) for name, tensor in rows.items()}

    def send(self, rows: Tensor) -> Tensor:
        """Return the [rows, tokens] array of the whole mesh; `rows` is the part that this process's devices need."""
        engine = self.engine
        first = engine.data_rank * len(rows)
        shape = torch.Size((len(rows) * engine.data_size, rows.shape[1]))

        def make(regions: list[Region]) -> list[Tensor]:
            return [rows[row.start - first : row.stop - first, tokens].contiguous() for row, tokens in regions]

        return tensor_from_shards(shape, engine.xla_mesh, engine.layout.activation(TOKENS), make, engine.device)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of trained tokens of the rows of one graph."""
        noise, engine = None, self.engine
        if "global_token_index" in batch:
            noise = dropout_noise(self.config.seed, self.step.optimizer.updates, batch["global_token_index"])
        positions = batch.get("positions")
        if engine.reorders_tokens and positions is None:
            positions = torch.tensor(token_order(batch["tokens"].shape[1], engine.mesh.context), device=engine.device)
        inputs = BatchInputs(positions, batch.get("segments"), noise, engine.precision.activations)
        hidden = self.model.hidden(self._for_lookup(batch["tokens"]), inputs, self.run_blocks)
        loss = self.head_loss(hidden, batch["labels"])
        return loss, (batch["labels"] != IGNORED).sum().float()

    def head_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss, given the input of the output head."""
        engine, model = self.engine, self.model
        weight = grouped(narrowed(model.lm_head.weight, engine.precision.gradient_reduction), engine.layout)
        logits = multiply(hidden, weight)  # [B, T, V], with columns of padding
        logits = xs.mark_sharding_with_gradients(logits, engine.xla_mesh, engine.layout.activation(LOGITS))
        return next_token_loss(logits, labels, model.shape.vocab_size, loss_options(self.config))

    def _for_lookup(self, tokens: Tensor) -> Tensor:
        """Gather `tokens` along `context`: each shard of an embedding's columns looks up all tokens of its replica.

        With tokens sharded along `context` the compiler would shard the result by rows, and replicate the whole
        activation to move from columns to rows ("involuntary full rematerialization").
        """
        if self.engine.mesh.context == 1:
            return tokens
        gathered = tokens + 0
        xs.mark_sharding(gathered, self.engine.xla_mesh, self.engine.layout.activation((REPLICAS, None)))
        return gathered

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> StepResult:
        """See engine.Trainee."""
        total = torch.zeros(2).to(self.engine.device)
        for inputs in self._micro_batches(batch):
            total = total + torch.stack(self._loss(inputs))
            torch_xla.sync()
        return EvaluationSums(("loss", "tokens"), total)

    # ---- Logical state

    def state(self) -> TrainingState:
        """See engine.Trainee."""
        self.sync()
        logical: dict[str, XlaLogicalTensor] = {}
        for prefix, name, tensor in self.step.tensors(self.model):
            logical |= self._logical(name, tensor, prefix)
        logical |= {name: XlaLogicalTensor(XlaShards(tensor)) for name, tensor in self.step.small_tensors().items()}
        return TrainingState(logical, partial(self._put_back, logical, self._commits))

    def _logical(self, name: str, tensor: Tensor, prefix: str) -> dict[str, XlaLogicalTensor]:
        """`tensor`, a value or moment of the parameter `name`, layer by layer and without padding."""
        shards = XlaShards(tensor.detach())
        if name.startswith(STACK):
            layers = enumerate(self.config.division.stack())
            return {prefix + layer_name(name, n): XlaLogicalTensor(shards, i) for i, n in layers if n is not None}
        used = self.model.shape.vocab_size
        padded = name.split(".")[-2] in VOCABULARIES and len(tensor) > used
        return {prefix + name: XlaLogicalTensor(shards, rows=used if padded else None)}

    @torch.no_grad()
    def _put_back(self, logical: dict[str, XlaLogicalTensor], commits: int, restart_optimizer: bool) -> None:
        """Write the host copies that a load has filled to the devices; see engine.TrainingState."""
        assert commits == self._commits, "another state was committed since: its layers would be overwritten"
        self._commits += 1
        for shards in {id(tensor.shards): tensor.shards for tensor in logical.values()}.values():
            shards.put_back()
        self.step.finish_loading(restart_optimizer)
        self.sync()

    def bytes_per_device(self) -> dict[str, int]:
        """See engine.Trainee: measured on the live shards, not computed from the table."""
        return self.step.bytes_per_device(self.model, device_bytes)


def _choose_for_cpu(config: TrainConfig) -> list[str]:
    """Set the options of XLA's CPU compiler unless the user set some, before a client reads them; return remarks."""
    remarks = []
    if not has_own_flags:
        if CPU_FLAGS not in (given := os.environ.get("XLA_FLAGS", "")):
            os.environ["XLA_FLAGS"] = f"{given} {CPU_FLAGS}"
        remarks += [f"XLA_FLAGS={CPU_FLAGS}: compiles in a quarter of the time, with faster steps"]
    if config.engine == "auto":
        remarks += ["--engine=torch compiles nothing: first loss of the quickstart after 6 s, here after 14 (2 cores)"]
    return remarks


def _device_name() -> str:
    """ "CPU", or the TPU's type as its metadata gives it ("TPU v5litepod-16"), or PJRT's name of the device."""
    kind = xr.device_type() or "unknown"
    return f"TPU {os.environ.get('TPU_ACCELERATOR_TYPE', '')}".strip() if kind == "TPU" else kind


def _linked_devices() -> tuple[int, str]:
    """Return how many devices have fast links between all of them, and why: those of a TPU slice, or else of a host.

    Several slices are joined by the data centre's network; the runtime numbers their devices one slice after another.
    """
    if xr.device_type() != "TPU":
        devices = xr.addressable_runtime_device_count()
        return devices, f"a host has {devices} devices"
    slices = {facts.get("slice_index", 0) for facts in xr.global_runtime_device_attributes()}
    chips = xr.global_runtime_device_count() // len(slices)
    return chips, f"a TPU slice has {chips} chips"
