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

from pretraining.config.training import TrainConfig
from pretraining.models.init import VOCABULARIES, initial_weight
from pretraining.models.llama import Llama
from pretraining.models.ops import IGNORED, next_token_loss
from pretraining.parallel.engine import Batch
from pretraining.parallel.mesh import kv_repeats, resolve_batch, resolve_mesh
from pretraining.parallel.precision import compute_dtype
from pretraining.parallel.recompute import block_mask
from pretraining.parallel.sharding import HEAD_ACTIVATIONS, TOKENS, Spec, layout_of, state_parts
from pretraining.parallel.xla_blocks import ScannedBlocks, place_activations, stack_layers
from pretraining.parallel.xla_state import LogicalTensor, Region, XlaShards, tensor_from_shards

STACK = "model.layers."  # parameters under it are [layers, ...]
MOMENTS = ("exp_avg", "exp_avg_sq")
SpecOf = Callable[[str], Spec]  # of a parameter's name: Layout.parameter, gradient or moment
HEALTH = ("updates", "refused", "first_refused")


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
    # The step count on the device, one plain kernel per parameter: torch's foreach refuses XLA tensors.
    optimizer_options: dict[str, Any] = {"capturable": True, "foreach": False}  # noqa: RUF012

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
        # A process feeds the rows of its own devices; where one rank spans several processes, they feed the same rows.
        self.data_size = min(self.process_count, self.mesh.data_ranks)
        self.data_rank = self.process_index * self.data_size // self.process_count
        self.host_copies = (
            self.local_devices / state_parts(config, self.mesh)["parameters"] if self.device_name == "CPU" else 0.0
        )
        self.xla_mesh = xs.Mesh(np.arange(devices), tuple(self.mesh), self.mesh._fields)
        self.config = config
        self.dtype = compute_dtype(config)
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
        self._names: dict[int, str] = {}  # of a placed parameter, by its identity
        for prefix, module in model.named_modules():
            for short, meta in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{short}"
                weight = nn.Parameter(self._placed(name, meta.shape, value))
                self._names[id(weight)] = name
                setattr(module, short, weight)
        torch_xla.sync(wait=True)
        mask = block_mask(self.config, layers)
        heads, repeats = model.shape.num_kv_heads, kv_repeats(self.config, model.shape)
        self.run_blocks = ScannedBlocks(model.model.layers, mask, self.xla_mesh, self.layout, heads, repeats)
        place_activations(model, HEAD_ACTIVATIONS, self.xla_mesh, self.layout)
        return model

    def _placed(self, name: str, shape: torch.Size, value: Callable[[str, torch.Size], Tensor]) -> Tensor:
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

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments like their parameters, before the first step: made during it, they would compile a second graph."""
        for weight in _weights(optimizer):
            optimizer.state[weight] = {
                "step": torch.zeros((), device=self.device),
                "exp_avg": self._zeros_like(weight, self.layout.moment),
                "exp_avg_sq": self._zeros_like(weight, self.layout.moment),
            }
            if self._accumulates:
                weight.grad = self._zeros_like(weight, self.layout.gradient)
        self._counters = [optimizer.state[weight]["step"] for weight in _weights(optimizer)]
        self.totals = torch.zeros(2, device=self.device)  # loss and trained tokens of this step so far
        self.health = torch.zeros(3, device=self.device)  # updates seen, updates refused, the first refused (from 1)
        torch_xla.sync(wait=True)
        if self.config.dump_sharding and self.process_index == 0:
            Path(self.config.dump_sharding).write_text(json.dumps(self._sharding(optimizer), indent=1) + "\n")

    def _sharding(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The mesh and, of every tensor of the state, its shape, what one device holds of it, and the axes that split
        each dimension. Blocks are stacked: their first dimension is the layer."""
        kinds = {"parameters": self.layout.parameter, "moments": self.layout.moment}
        found: dict[str, Any] = {"mesh": self.mesh._asdict(), **{kind: {} for kind in kinds}}
        for weight in _weights(optimizer):
            name = self._names[id(weight)]
            for kind, held in (("parameters", weight), ("moments", optimizer.state[weight]["exp_avg"])):
                axes = stacked(name, kinds[kind])
                facts = {"shape": list(held.shape), "dtype": str(held.dtype).removeprefix("torch."), "axes": axes}
                found[kind][name] = {**facts, "bytes_per_device": _device_bytes(held)}
        return found

    def _zeros_like(self, weight: Tensor, kind: SpecOf) -> Tensor:
        zeros = torch.zeros(weight.shape, dtype=weight.dtype, device=self.device)
        self._pin(zeros, weight, kind)
        return zeros

    def _pin(self, tensor: Tensor, weight: Tensor, kind: SpecOf) -> None:
        """Shard `tensor`, something of `weight`, as its kind is; left alone, layouts leak from one into another."""
        xs.mark_sharding(tensor, self.xla_mesh, stacked(self._names[id(weight)], kind))

    # ---- Running

    @property
    def _accumulates(self) -> bool:
        return (self.config.gradient_accumulation_steps or 1) > 1

    def train_step(
        self, model: Llama, optimizer: torch.optim.Optimizer, batch: Batch, learning_rate: float
    ) -> XlaResult:
        """See engine.Engine. One graph; with accumulation, one per micro-batch (the same each time) and one more."""
        rate = torch.tensor(learning_rate).to(self.device)  # data, not a constant: another value compiles nothing
        for group in optimizer.param_groups:
            group["lr"] = rate
        for inputs in self._feed(batch):
            loss, count = self._loss(model, inputs)
            loss.backward()
            self.totals += torch.stack((loss.detach(), count))
            if self._accumulates:
                torch_xla.sync()
        result = self._update(optimizer)
        torch_xla.sync()
        return result

    def _feed(self, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """This process's rows as micro-batches on the devices, split as TOKENS says."""
        for start in range(0, len(batch["tokens"]), self.rows):
            rows = {name: torch.from_numpy(array[start : start + self.rows]) for name, array in batch.items()}
            yield {name: self._sent(tensor) for name, tensor in rows.items()}

    def _sent(self, rows: Tensor) -> Tensor:
        """A [rows, tokens] array of the whole mesh, of which `rows` is what this process's devices need."""
        first = self.data_rank * self.rows
        shape = torch.Size((self.rows * self.data_size, rows.shape[1]))

        def make(regions: list[Region]) -> list[Tensor]:
            return [rows[part.start - first : part.stop - first, tokens].contiguous() for part, tokens in regions]

        return tensor_from_shards(shape, self.xla_mesh, self.layout.activation(TOKENS), make, self.device)

    def _loss(self, model: Llama, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Summed loss and number of trained tokens of one micro-batch."""
        positions, segments, labels = inputs.get("positions"), inputs.get("segments"), inputs["labels"]
        tokens = self._for_lookup(inputs["tokens"])
        logits = model.padded_logits(tokens, positions, segments, self.dtype, self.run_blocks)  # [B, T, V]
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

    def _update(self, optimizer: torch.optim.Optimizer) -> XlaResult:
        """Mean gradients, clip, step; refuse the update on the device if anything is not finite."""
        weights = _weights(optimizer)
        loss, count = self.totals[0] / self.totals[1], self.totals[1]
        for weight in weights:
            assert weight.grad is not None
            weight.grad.div_(count)
            self._pin(weight.grad, weight, self.layout.moment)
        norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None], foreach=False)
        if self.config.grad_clip_thresh:
            nn.utils.clip_grads_with_norm_(weights, self.config.grad_clip_thresh, norm, foreach=False)
        accepted = self._judge(torch.isfinite(loss) & torch.isfinite(norm))
        self._guarded_step(optimizer, weights, accepted)
        self.totals.zero_()
        for weight in weights:
            if self._accumulates:
                weight.grad.zero_()  # type: ignore[union-attr]
                self._pin(weight.grad, weight, self.layout.gradient)  # type: ignore[arg-type]
            else:
                weight.grad = None
        return XlaResult(("loss", "grad_norm", *HEALTH), torch.cat((torch.stack((loss, norm)), self.health)))

    def _judge(self, finite: Tensor) -> Tensor:
        """Count this update; true if it may be applied. Too many refused, and none is ever applied again."""
        seen, refused, first = self.health.unbind()
        seen = seen + 1
        refused = refused + (~finite).float()
        first = torch.where((first == 0) & ~finite, seen, first)
        self.health.copy_(torch.stack((seen, refused, first)))
        return finite & (refused <= self.config.max_skipped_steps)

    def _guarded_step(self, optimizer: torch.optim.Optimizer, weights: list[Tensor], accepted: Tensor) -> None:
        kept = [[weight, *optimizer.state[weight].values()] for weight in weights]
        before = [[t.detach().clone() for t in tensors] for tensors in kept]
        optimizer.step()
        with torch.no_grad():
            for weight, tensors, olds in zip(weights, kept, before, strict=True):
                for tensor, old in zip(tensors, olds, strict=True):
                    tensor.copy_(torch.where(accepted, tensor, old))
                    if tensor.dim():
                        self._pin(tensor, weight, self.layout.parameter if tensor is weight else self.layout.moment)

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

    def state(self, model: Llama, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """See engine.Engine."""
        torch_xla.sync(wait=True)
        named = [(name, weight, "") for name, weight in model.named_parameters()]
        logical: dict[str, Any] = {}
        if optimizer is not None:
            for moment in MOMENTS:
                named += [
                    (name, optimizer.state[weight][moment], f"optimizer.{moment}.")
                    for name, weight in model.named_parameters()
                ]
            first = next(iter(_weights(optimizer)))
            logical["optimizer.step"] = LogicalTensor(XlaShards(optimizer.state[first]["step"]))
        for name, tensor, prefix in named:
            shards = XlaShards(tensor.detach())
            if name.startswith(STACK):
                layers = range(tensor.shape[0])
                logical |= {prefix + layer_name(name, i): LogicalTensor(shards, i) for i in layers}
            else:
                padded = name.split(".")[-2] in VOCABULARIES and len(tensor) > model.shape.vocab_size
                logical[prefix + name] = LogicalTensor(shards, rows=model.shape.vocab_size if padded else None)
        return logical

    def commit(self, state: dict[str, Any]) -> None:
        """See engine.Engine."""
        for shards in {id(tensor.shards): tensor.shards for tensor in state.values()}.values():
            shards.commit()
        if "optimizer.step" in state:  # held once in a checkpoint, counted by every parameter here
            count = state["optimizer.step"].shards.tensor
            for counters in self._counters:
                counters.copy_(count)
        torch_xla.sync(wait=True)

    # ---- Figures

    def bytes_per_device(self, model: Llama, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """See engine.Engine: measured on the live shards, not computed from the table."""
        moments = [optimizer.state[weight][moment] for weight in _weights(optimizer) for moment in MOMENTS]
        groups = {"parameters": list(model.parameters()), "moments": moments}
        return {name: sum(_device_bytes(tensor) for tensor in tensors) for name, tensors in groups.items()}

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


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


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
