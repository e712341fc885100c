"""The engine protocol, on which the loop and the checkpoints depend. Implementations: xla/ and torch/."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pretraining.config.training import TrainConfig
from pretraining.parallel.layout import Layout
from pretraining.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

Batch = dict[str, np.ndarray]  # int32 [rows of this process, tokens] each; see data.stream.Stream.batch
OPTIMIZER = "optimizer."  # names of the logical state that begin so are optimizer state, all others are weights
# What only some runs have, and begin anew without: fp16's loss scale, the figures of the last steps.
LOSS_SCALE, RECENT_FIGURES = f"{OPTIMIZER}loss_scale", f"{OPTIMIZER}recent_figures"
OPTIONAL = {LOSS_SCALE, RECENT_FIGURES}


class LostPeerError(RuntimeError):
    """Another process of the run ended or did not answer in time, so this one cannot continue."""


def with_token_ids(config: TrainConfig, batch: Batch, data_rank: int) -> Batch:
    """Return the batch; with dropout, also "global_token_index": each token's index in the global batch, int32."""
    if not config.has_dropout:
        return batch
    rows, tokens = batch["tokens"].shape
    first = data_rank * rows * tokens
    index = np.arange(first, first + rows * tokens, dtype=np.int32).reshape(rows, tokens)
    return {**batch, "global_token_index": index}


@contextmanager
def raise_lost_peer_error(process: int, timeout: int) -> Iterator[None]:
    """Raise LostPeerError instead of gloo's errors, which describe a socket.

    NCCL raises nothing: its watchdog ends a process whose peers do not answer.
    """
    try:
        yield
    except RuntimeError as error:
        causes = (error, error.__cause__)  # torch's pipelines wrap what a stage raises
        lost = next((cause for cause in causes if "gloo" in str(cause).lower()), None)
        if lost is None:
            raise
        message = f"process {process} lost another one of the run, which ended or gave no answer in {timeout} s"
        raise LostPeerError(f"{message} (collective_timeout): {str(lost).splitlines()[0]}") from error


class StepResult:
    """Scalars of one optimizer step, or of an evaluation, which stay on the device until they are read."""

    def __init__(self, names: tuple[str, ...], values: Tensor) -> None:
        self._names, self._values = names, values

    def read(self) -> dict[str, float]:
        """Wait for the device and return the scalars, in one transfer.

        Of a step: "loss" (mean over every trained token of the global batch), "grad_norm" (before clipping),
        "updates", "refused" and "first_refused" (optimizer steps of this process so far, how many were refused
        because loss or gradient was not finite, and the first of those, from 1; 0: none), with fp16 "loss_scale", with
        skip_step_deviations "outliers" (updates skipped for that reason).
        Of an evaluation: "loss" and "tokens" (trained positions); both 0 where there is none.
        """
        return dict(zip(self._names, self._values.tolist(), strict=True))


class TrainingState(Mapping[str, Any]):
    """Logical tensors of a placed model and its optimizer, by unsharded name; a load fills them and commits them once.

    Parameters have Hugging Face's names, moments are `optimizer.<moment>.<name>` with the moments of the optimizer's
    rule (exp_avg, exp_avg_sq), the update count is `optimizer.step`. Values are Tensors, DTensors or tensors with DCP's
    checkpointable protocol. Several of them may share one host copy (the layers of a stack), so a load takes all its
    tensors from one handle.
    """

    def __init__(self, tensors: dict[str, Any], put_back: Callable[[bool], None]) -> None:
        """`put_back` writes what was loaded to the devices; its argument restarts the optimizer's state."""
        self._tensors, self._put_back = tensors, put_back
        self._is_committed = False

    def __getitem__(self, name: str) -> Any:
        assert not self._is_committed, "this state is committed: take another from the engine"
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def commit(self, *, restart_optimizer: bool = False) -> None:
        """Put what was loaded on the devices. With `restart_optimizer`, the optimizer's state starts from zero."""
        assert not self._is_committed, "a state is committed once"
        self._is_committed = True
        self._put_back(restart_optimizer)
        self._tensors = {}


class Trainee(Protocol):
    """A model on the mesh with its optimizer: runs steps, reads and writes the logical state."""

    model: Any  # whose parameters are sharded

    def train_step(self, batch: Batch, learning_rate: float) -> StepResult:
        """Run one optimizer step on this process's rows of the global batch, accumulated over micro-batches."""

    def evaluate(self, batch: Batch) -> StepResult:
        """Compute the loss on this process's rows of a global batch without changing any state."""

    def state(self) -> TrainingState:
        """Return a handle on the live state, for one save or for one load. A commit makes older handles invalid."""

    def bytes_per_device(self) -> dict[str, int]:
        """Return the bytes of "parameters" and of "moments" (all optimizer state) on one device."""


class Engine(Protocol):
    """Opens the mesh, and places a model on it.

    Of the R rows of every global batch, a process feeds the R / data_size from data_rank x R / data_size on. Where
    process_count is above 1, torch.distributed's default group is initialised, so collectives of objects and barriers
    work.
    """

    config: TrainConfig  # with global_batch_size and gradient_accumulation_steps resolved
    name: str  # "xla" or "torch"
    compiles: bool
    mesh: Mesh
    device_name: str  # as in the table of peaks: "NVIDIA H200", "TPU v5p", "CPU"
    attention: str  # how it is computed, and why; empty on the torch engine, which leaves it to the device
    remarks: list[str]  # printed with the choice of the engine
    process_index: int
    process_count: int
    data_rank: int
    data_size: int
    rows: int  # of this process in the smallest batch that `evaluate` takes
    host_devices: int  # whose state is in this host's memory; 0 where devices have their own
    host_processes: int  # of this run, on this host
    linked: str  # which devices have fast links between all of them; a group of hsdp is as large

    @property
    def layout(self) -> Layout:
        """How parameters, gradients and optimizer state are sharded over the mesh."""

    def place(self, model: Any) -> Trainee:
        """Shard every parameter of `model` and its optimizer's state over the mesh, as the layout says."""

    def compilations(self) -> int:
        """Return the number of graphs compiled so far; constant after the first step."""

    def memory_bytes(self) -> int | None:
        """Return the peak bytes in use on this process's busiest device; None where the device does not report it."""

    def close(self) -> None:
        """Leave the process group, if this engine joined one."""
