"""The XLA engine: one process per host, GSPMD over every device of the mesh, one compiled graph per step.

Parameters carry the sharding table's annotations and the compiler inserts the collectives. Nothing here waits for
the device except reading a result, saving and loading.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

# XLA logs a deprecation notice of GSPMD at every compilation; errors still show. An exported value wins.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
import torch_xla.debug.profiler as xp
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from pretraining.config.errors import ConfigError, Problem
from pretraining.config.training import TrainConfig
from pretraining.models.dropout import noise_of
from pretraining.models.init import VOCABULARIES, initial_weight
from pretraining.models.llama import Llama
from pretraining.models.ops import IGNORED, next_token_loss
from pretraining.noise import keys, noise
from pretraining.optim.optimizer import Optimizer, Slot
from pretraining.optim.precision import precision_of
from pretraining.optim.rounding import rounded
from pretraining.optim.rules import Moment, State
from pretraining.parallel.engine import Batch, TrainingState, numbered
from pretraining.parallel.health import HEALTH, judge
from pretraining.parallel.layout import layout_of
from pretraining.parallel.mesh import kv_repeats, resolve_batch, resolve_mesh
from pretraining.parallel.recompute import block_mask, recomputed_modules, scan_plan
from pretraining.parallel.sharding import HEAD_ACTIVATIONS, TOKENS, Spec
from pretraining.parallel.xla_blocks import ScannedBlocks, place_activations, stack_layers
from pretraining.parallel.xla_state import LogicalTensor, Region, XlaShards, tensor_from_shards

STACK = "model.layers."  # parameters under it are [layers, ...]
SpecOf = Callable[[str], Spec]  # of a parameter's name: Layout.parameter, gradient or moment


class XlaResult:
    """Scalars of one step, still on the device."""

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        self._names, self._values = names, values

    def read(self) -> dict[str, float]:
        """One transfer for all of them."""
        return dict(zip(self._names, self._values.tolist(), strict=True))


class XlaEvaluation(XlaResult):
    """Summed loss and trained tokens; divided on the host, which saves a graph."""

    def read(self) -> dict[str, float]:
        sums = super().read()
        return {"loss": sums["loss"] / sums["tokens"], "tokens": sums["tokens"]}


class XlaEngine:
    """See engine.Engine."""

    name = "xla"

    def __init__(self, config: TrainConfig) -> None:
        if config.compile_cache_dir:
            xr.initialize_cache(config.compile_cache_dir)
        xr.use_spmd()
        self.device = torch_xla.device()
        self.device_name = _device_name()
        self.process_index, self.process_count = xr.process_index(), xr.process_count()
        self.local_devices = xr.addressable_runtime_device_count()
        devices = xr.global_runtime_device_count()
        self.mesh = resolve_mesh(config, devices, self.local_devices)
        self.layout = layout_of(config, self.mesh)
        resolve_batch(config, self.mesh.data_ranks)
        refuse_what_is_for_torch(config)
        # A process feeds the rows of its own devices; where one rank spans several processes, they feed the same rows.
        self.data_size = min(self.process_count, self.mesh.data_ranks)
        self.data_rank = self.process_index * self.data_size // self.process_count
        self.host_devices = self.local_devices if self.device_name == "CPU" else 0
        self.host_processes = 1
        self.xla_mesh = xs.Mesh(np.arange(devices), tuple(self.mesh), self.mesh._fields)
        self._commits = 0
        self.config = config
        self.precision = precision_of(config)
        self.rows = config.batch_size * self.mesh.data_ranks // self.data_size  # of one micro-batch, in this process
        if self.process_count > 1:
            torch.distributed.init_process_group("gloo", init_method="xla://")

    # ---- Placing

    def place(self, model: Llama) -> Llama:
        """`model` with its layers stacked, every parameter on the mesh; a meta parameter is made shard by shard."""
        given = {name: weight for name, weight in model.named_parameters() if not weight.is_meta}
        layers = model.shape.num_layers

        def value(name: str, shape: torch.Size) -> Tensor:
            return given[name].detach() if given else initial_weight(self.config, layers, name, shape)

        stack_layers(model)
        for prefix, module in model.named_modules():
            for short, meta in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{short}"
                placed = self.placed(name, meta.shape, value)
                if self.precision.stored != placed.dtype:
                    placed = placed.to(self.precision.stored)
                    self._pin(placed, name, self.layout.parameter)
                setattr(module, short, nn.Parameter(placed, requires_grad=meta.requires_grad))
        self.sync(wait=True)
        groups = scan_plan(block_mask(self.config, layers), self.config.checkpoint_num_layers)
        modules = recomputed_modules(self.config, model.model.layers)
        heads, repeats = model.shape.num_kv_heads, kv_repeats(self.config, model.shape)
        self.run_blocks = ScannedBlocks(model.model.layers, groups, modules, self.xla_mesh, self.layout, heads, repeats)
        place_activations(model, HEAD_ACTIVATIONS, self.xla_mesh, self.layout)
        return model

    def placed(self, name: str, shape: torch.Size, value: Callable[[str, torch.Size], Tensor]) -> Tensor:
        """The parameter `name` on the mesh, fp32; `value` gives what it holds, of a stack layer by layer."""

        def make(regions: list[Region]) -> list[Tensor]:
            if not name.startswith(STACK):
                whole = value(name, shape)
                return [whole[region].contiguous() for region in regions]
            buffers = [torch.empty([cut.stop - cut.start for cut in region]) for region in regions]

            def fill(layer: int) -> None:
                whole = value(layer_name(name, layer), shape[1:])
                for buffer, region in zip(buffers, regions, strict=True):
                    buffer[layer] = whole[region[1:]]

            with ThreadPoolExecutor(os.cpu_count()) as pool:  # torch's generator leaves the interpreter free
                list(pool.map(fill, range(shape[0])))
            return buffers

        return tensor_from_shards(shape, self.xla_mesh, stacked(name, self.layout.parameter), make, self.device)

    def prepare(self, optimizer: Optimizer) -> None:
        """State like its parameters, before the first step: made during it, it would compile a second graph."""
        self._optimizer = optimizer
        for slot in optimizer.slots:
            slot.begin(self._moment)
        self._copies = {slot.name: self._copy(slot) for slot in optimizer.slots} if self.precision.copies else {}
        self._sums = {slot.name: self._sum(slot) for slot in optimizer.slots} if self._accumulates else {}
        optimizer.updates = torch.zeros((), device=self.device)
        self.totals = torch.zeros(2, device=self.device)  # loss and trained tokens of this step so far
        self.health = torch.zeros(len(HEALTH), device=self.device)
        self.sync(wait=True)
        if self.config.dump_sharding and self.process_index == 0:
            Path(self.config.dump_sharding).write_text(json.dumps(self._sharding(optimizer), indent=1) + "\n")

    def _sharding(self, optimizer: Optimizer) -> dict[str, Any]:
        """The mesh and, of every tensor of the state, its shape, what one device holds of it, and the axes that split
        each dimension. Blocks are stacked: their first dimension is the layer."""
        found: dict[str, Any] = {"mesh": self.mesh._asdict(), "parameters": {}, "moments": {}}
        for slot in optimizer.slots:
            found["parameters"][slot.name] = _described(slot.weight, stacked(slot.name, self.layout.parameter))
            # Of an optimizer's several, the first: all of them are split alike
            for held in list(slot.state.values())[:1]:
                found["moments"][slot.name] = _described(held, self._moment_spec(slot, held))
        return found

    def _moment(self, slot: Slot, shape: torch.Size, moment: Moment) -> Tensor:
        if moment.initial is None:
            held = slot.weight.detach().to(self.precision.state).clone()
        else:
            held = torch.full(shape, moment.initial, dtype=self.precision.state, device=self.device)
        xs.mark_sharding(held, self.xla_mesh, self._moment_spec(slot, held))
        return held

    def _moment_spec(self, slot: Slot, held: Tensor) -> Spec:
        """The layout's, but whole along dimensions where the moment has one value for all."""
        spec = stacked(slot.name, self.layout.moment)
        return tuple(axis if extent > 1 else None for axis, extent in zip(spec, held.shape, strict=True))

    def _copy(self, slot: Slot) -> Tensor:
        """What the model runs on where the products read a rounded copy; the slot keeps the parameter itself."""
        weight = slot.weight
        slot.weight = weight.detach().clone()
        self._pin(slot.weight, slot.name, self.layout.parameter)
        return weight

    def _sum(self, slot: Slot) -> Tensor:
        """Where gradients of micro-batches are added up."""
        zeros = torch.zeros(slot.weight.shape, dtype=self.precision.gradients, device=self.device)
        self._pin(zeros, slot.name, self.layout.gradient)
        return zeros

    def _pin(self, tensor: Tensor, name: str, kind: SpecOf) -> None:
        """Shard `tensor`, something of the parameter `name`, as its kind is; left alone, layouts leak from one into
        another."""
        xs.mark_sharding(tensor, self.xla_mesh, stacked(name, kind))

    # ---- Running

    @property
    def _accumulates(self) -> bool:
        return (self.config.gradient_accumulation_steps or 1) > 1

    def train_step(self, model: Llama, optimizer: Optimizer, batch: Batch, learning_rate: float) -> XlaResult:
        """See engine.Engine. One graph; with accumulation, one per micro-batch (the same each time) and one more."""
        # Data, not a constant: another value compiles nothing. Not a scalar: one that equals a constant of the graph
        # (1e-5: norm_eps) torch-xla makes one input with it, which is another graph.
        rate = torch.tensor([learning_rate]).to(self.device)[0]
        for inputs in self._feed(numbered(self.config, batch, self.data_rank)):
            loss, count = self._loss(model, inputs)
            loss.backward()
            self.totals += torch.stack((loss.detach(), count))
            if self._accumulates:
                self._accumulate()
                self.sync()
        result = self._update(optimizer, rate)
        self.sync()
        return result

    def sync(self, wait: bool = False) -> None:
        """Run what has been traced."""
        torch_xla.sync(wait=wait)

    def _accumulate(self) -> None:
        for slot in self._optimizer.slots:
            total = self._sums[slot.name]
            total += self._taken_gradient(slot).to(total.dtype)
            self._pin(total, slot.name, self.layout.gradient)

    def _taken_gradient(self, slot: Slot) -> Tensor:
        """The gradient that the backward pass left, which is gone then."""
        weight = self._copies.get(slot.name, slot.weight)
        grad, weight.grad = weight.grad, None
        assert grad is not None
        return grad

    def _feed(self, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """This process's rows as micro-batches on the devices, split as TOKENS says."""
        for start in range(0, len(batch["tokens"]), self.rows):
            rows = {name: torch.from_numpy(array[start : start + self.rows]) for name, array in batch.items()}
            yield {name: self.sent(tensor) for name, tensor in rows.items()}

    def sent(self, rows: Tensor) -> Tensor:
        """A [rows, tokens] array of the whole mesh, of which `rows` is what this process's devices need."""
        first = self.data_rank * self.rows
        shape = torch.Size((self.rows * self.data_size, rows.shape[1]))

        def make(regions: list[Region]) -> list[Tensor]:
            return [rows[part.start - first : part.stop - first, tokens].contiguous() for part, tokens in regions]

        return tensor_from_shards(shape, self.xla_mesh, self.layout.activation(TOKENS), make, self.device)

    def _loss(self, model: Llama, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Summed loss and number of trained tokens of one micro-batch."""
        positions, segments, labels = inputs.get("positions"), inputs.get("segments"), inputs["labels"]
        tokens, dtype, noise = self._for_lookup(inputs["tokens"]), self.precision.stream, None
        if "cells" in inputs:
            noise = noise_of(self.config.seed, self._optimizer.updates, inputs["cells"])
        logits = model.padded_logits(tokens, positions, segments, dtype, self.run_blocks, noise)  # [B, T, V]
        return next_token_loss(logits, labels, model.shape.vocab_size), (labels != IGNORED).sum().float()

    def _for_lookup(self, tokens: Tensor) -> Tensor:
        """`tokens` as the lookup in a split embedding wants them: every column needs all tokens of its replica.

        With tokens split along `context` the compiler would take the split of the rows for that of the result, and
        replicate the whole activation to come from the columns there ("involuntary full rematerialization").
        """
        if self.mesh.context == 1:
            return tokens
        gathered = tokens + 0
        xs.mark_sharding(gathered, self.xla_mesh, self.layout.activation(("replica", None)))
        return gathered

    @torch.no_grad()
    def _update(self, optimizer: Optimizer, rate: Tensor) -> XlaResult:
        """Mean gradients, clip, step; refuse the update on the device if anything is not finite."""
        loss, count = self.totals[0] / self.totals[1], self.totals[1]
        gradients = {slot.name: self._mean_gradient(slot, count) for slot in optimizer.slots}
        kind = self.config.grad_clip_norm_type or math.inf
        norm = nn.utils.get_total_norm(list(gradients.values()), kind, foreach=False)
        if limit := self.config.grad_clip_thresh:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            gradients = {name: gradient * scale for name, gradient in gradients.items()}
        accepted = judge(self.health, torch.isfinite(loss) & torch.isfinite(norm), self.config.max_skipped_steps)
        step = optimizer.updates + 1
        for slot in optimizer.slots:
            weight, state = slot.updated(gradients[slot.name], step, rate)
            self._keep(slot, weight, state, accepted, step)
        optimizer.updates.copy_(torch.where(accepted, step, optimizer.updates))
        self.totals.zero_()
        return XlaResult(("loss", "grad_norm", *HEALTH), torch.cat((torch.stack((loss, norm)), self.health)))

    def _mean_gradient(self, slot: Slot, count: Tensor) -> Tensor:
        """In fp32 and split like the moments; what micro-batches have added up begins anew."""
        if self._accumulates:
            total = self._sums[slot.name]
            mean = total.float() / count
            total.zero_()
            self._pin(total, slot.name, self.layout.gradient)
        else:
            mean = self._taken_gradient(slot).float() / count
        self._pin(mean, slot.name, self.layout.moment)
        return mean

    def _keep(self, slot: Slot, weight: Tensor, state: State, accepted: Tensor, step: Tensor) -> None:
        """Write an accepted update where its tensors are, rounded as the precision says."""
        for name, new in state.items():
            held = slot.state[name]
            held.copy_(torch.where(accepted, self._narrowed(new, held.dtype, slot, f"{name}.", step), held))
            xs.mark_sharding(held, self.xla_mesh, self._moment_spec(slot, held))
        new = torch.where(accepted, self._narrowed(weight, slot.weight.dtype, slot, "", step), slot.weight)
        slot.weight.copy_(new)
        self._pin(slot.weight, slot.name, self.layout.parameter)
        if self._copies:
            self._round_copy(slot, step)

    def _narrowed(self, new: Tensor, dtype: torch.dtype, slot: Slot, prefix: str, step: Tensor) -> Tensor:
        if dtype == new.dtype or not self.precision.rounds:
            return new.to(dtype)
        return rounded(new, self._noise(slot, prefix, new.shape, step)).to(dtype)

    def _noise(self, slot: Slot, prefix: str, shape: torch.Size, step: Tensor) -> Tensor:
        """Of each tensor by its own name: that of every layer, where they are stacked."""
        if not slot.name.startswith(STACK):
            return noise(keys(self.config.seed, [prefix + slot.name])[0].to(self.device), step, shape)
        names = [prefix + layer_name(slot.name, layer) for layer in range(shape[0])]
        key = keys(self.config.seed, names).to(self.device).view(-1, *(1,) * (len(shape) - 1))
        return noise(key, step, shape[1:])

    def _round_copy(self, slot: Slot, step: Tensor) -> None:
        copy = self._copies[slot.name]
        copy.copy_(rounded(slot.weight, self._noise(slot, "", slot.weight.shape, step)))
        self._pin(copy, slot.name, self.layout.parameter)

    @torch.no_grad()
    def evaluate(self, model: Llama, batch: Batch) -> XlaResult:
        """See engine.Engine; reads {"loss": mean, "tokens": trained tokens}."""
        total = torch.zeros(2).to(self.device)
        for inputs in self._feed(batch):
            total = total + torch.stack(self._loss(model, inputs))
            torch_xla.sync()
        return XlaEvaluation(("loss", "tokens"), total)

    @torch.no_grad()
    def parameter_norm(self, model: Llama) -> float:
        """See engine.Engine. A graph of its own, compiled at the first call."""
        norm = nn.utils.get_total_norm(list(model.parameters()), foreach=False)
        torch_xla.sync()
        return norm.item()

    # ---- Logical state

    def state(self, model: Llama, optimizer: Optimizer) -> TrainingState:
        """See engine.Engine."""
        torch_xla.sync(wait=True)
        logical: dict[str, LogicalTensor] = {}
        for name, weight in self._kept(model).items():
            logical |= self._logical(model, name, weight, "")
        for slot in optimizer.slots:
            for moment, held in slot.state.items():
                logical |= self._logical(model, slot.name, held, f"optimizer.{moment}.")
        logical["optimizer.step"] = LogicalTensor(XlaShards(optimizer.updates))
        return TrainingState(logical, partial(self._put_back, logical, self._commits))

    def _kept(self, model: Llama) -> dict[str, Tensor]:
        """Every parameter itself, and not the rounded copy that the model may run on."""
        return {**dict(model.named_parameters()), **{slot.name: slot.weight for slot in self._optimizer.slots}}

    def _logical(self, model: Llama, name: str, tensor: Tensor, prefix: str) -> dict[str, LogicalTensor]:
        """`tensor`, something of the parameter `name`: by layer where they are stacked, and without padding."""
        shards = XlaShards(tensor.detach())
        if name.startswith(STACK):
            return {prefix + layer_name(name, i): LogicalTensor(shards, i) for i in range(tensor.shape[0])}
        padded = name.split(".")[-2] in VOCABULARIES and len(tensor) > model.shape.vocab_size
        return {prefix + name: LogicalTensor(shards, rows=model.shape.vocab_size if padded else None)}

    @torch.no_grad()
    def _put_back(self, logical: dict[str, LogicalTensor], commits: int, restart_optimizer: bool) -> None:
        """Write the host copies that a load has filled to the devices; see engine.TrainingState."""
        assert commits == self._commits, "another state was committed since: its layers would be overwritten"
        self._commits += 1
        for shards in {id(tensor.shards): tensor.shards for tensor in logical.values()}.values():
            shards.put_back()
        for slot in self._optimizer.slots:
            if restart_optimizer:
                slot.begin(self._moment)  # one may be a copy of the weight
            if self._copies:
                self._round_copy(slot, self._optimizer.updates)
        torch_xla.sync(wait=True)

    # ---- Figures

    def bytes_per_device(self, model: Llama, optimizer: Optimizer) -> dict[str, int]:
        """See engine.Engine: measured on the live shards, not computed from the table."""
        parameters = [*self._kept(model).values(), *self._copies.values()]
        groups = {"parameters": parameters, "moments": [t for slot in optimizer.slots for t in slot.state.values()]}
        return {name: sum(_device_bytes(tensor) for tensor in tensors) for name, tensors in groups.items()}

    def held(self) -> Iterator[tuple[Tensor, Spec]]:
        """Every tensor that lives from one step to the next, and how it is split."""
        for slot in self._optimizer.slots:
            weight = stacked(slot.name, self.layout.parameter)
            yield slot.weight, weight
            if slot.name in self._copies:
                yield self._copies[slot.name], weight
            if slot.name in self._sums:
                yield self._sums[slot.name], stacked(slot.name, self.layout.gradient)
            yield from ((moment, self._moment_spec(slot, moment)) for moment in slot.state.values())
        yield from (
            (scalars, (None,) * scalars.dim()) for scalars in (self._optimizer.updates, self.totals, self.health)
        )

    def compilations(self) -> int:
        """Graphs compiled so far."""
        data = xla_metrics.metric_data("CompileTime")
        return data[0] if data else 0

    def memory_bytes(self) -> int | None:
        """The process's peak on a CPU host; torch-xla does not tell under SPMD."""
        if xr.device_type() == "CPU":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return None

    def start_trace(self, folder: str) -> None:
        """See engine.Engine."""
        xp.start_trace(folder)

    def stop_trace(self) -> None:
        """See engine.Engine."""
        torch_xla.sync(wait=True)
        xp.stop_trace()

    def close(self) -> None:
        """See engine.Engine."""
        if self.process_count > 1:
            torch.distributed.destroy_process_group()


def refuse_what_is_for_torch(config: TrainConfig) -> None:
    """ConfigError where gradients would be added up over devices in another dtype than asked for, and for fp16."""
    if config.precision == "fp16":
        raise ConfigError([Problem("--precision=fp16", "the xla engine has none; use mixed_bf16, or --engine=torch")])
    stored = {torch.float32: "fp32", torch.bfloat16: "bf16"}[precision_of(config).stored]
    if config.reduce_dtype not in ("auto", stored):
        remedy = f"the xla engine adds gradients up in the parameters' dtype, {stored} here; leave it out"
        raise ConfigError([Problem(f"--reduce_dtype={config.reduce_dtype}", f"{remedy}, or --engine=torch")])


def _described(tensor: Tensor, axes: Spec) -> dict[str, Any]:
    facts = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "axes": axes}
    return {**facts, "bytes_per_device": _device_bytes(tensor)}


def layer_name(stacked: str, layer: int) -> str:
    """model.layers.mlp.up_proj.weight -> model.layers.3.mlp.up_proj.weight"""
    return f"{STACK}{layer}.{stacked.removeprefix(STACK)}"


def stacked(name: str, kind: SpecOf) -> Spec:
    """The sharding of a parameter of the stacked model, or of something of it: layers are never split."""
    return (None, *kind(name)) if name.startswith(STACK) else kind(name)


def _device_bytes(tensor: Tensor) -> int:
    replica_and_cuts = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor.detach()])[0]
    cuts = replica_and_cuts[0][1]
    sizes = tensor.shape if cuts is Ellipsis else [cut.stop - cut.start for cut in cuts]
    return math.prod(sizes) * tensor.element_size()


def _device_name() -> str:
    """ "CPU", or the TPU's type as its metadata gives it ("TPU v5litepod-16"), or PJRT's name of the device."""
    kind = xr.device_type() or "unknown"
    return f"TPU {os.environ.get('TPU_ACCELERATOR_TYPE', '')}".strip() if kind == "TPU" else kind
