"""The parts of a run for a loop of one's own: see docs/library.md.

`Training` opens what main_training.py opens, in the same order: a model with its optimizer, placed on the mesh, and its
data. Its checkpoints are those of every run, so other meshes, engines and tools read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, Self, cast

from main_training import EXTENSIONS, configure
from pretraining.checkpoint.checkpoints import DTYPES_ON_DISK, saved_part
from pretraining.checkpoint.compatibility import changes
from pretraining.checkpoint.folder import find_checkpoints, keep_steps
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.restoring import Restoring, Start
from pretraining.checkpoint.store import PendingSave
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data.opening import refuse_unread
from pretraining.data.stream import Rows, cut_rows
from pretraining.extensions.async_checkpointing.saves import HostBuffer, stage
from pretraining.models.init import build_model
from pretraining.models.llama import Llama
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.engine import Batch, StepResult
from pretraining.parallel.processes import read_processes
from pretraining.parallel.select import open_engine
from pretraining.run.configure import compare_processes
from pretraining.run.start import open_streams
from pretraining.storage import location
from pretraining.tools.library.own_model import OwnModel

__all__ = ["OwnModel", "Training"]


class Loaded(NamedTuple):
    """What a checkpoint holds besides its tensors."""

    step: int  # updates done
    user_content: Any  # what `save` was given


class Training:
    """A model with its optimizer and data. Every method is collective over the processes; a context manager."""

    def __init__(
        self,
        settings: TrainConfig | Mapping[str, object],
        *,
        data: Mapping[str, Rows] | None = None,
        build: Callable[[TrainConfig], Llama] | None = None,
        model: OwnModel | None = None,
    ) -> None:
        """Open everything, as `pretraining.train` does with the same arguments.

        model: instead of a Llama. Raises UserError with every mistake, before a device is opened, but for those of a
        model that `build` returns.
        """
        read_processes()  # raises UserError
        extensions = (*EXTENSIONS, model.extension()) if model else EXTENSIONS
        config = configure(settings, report=False, own_data=bool(data), extensions=extensions)
        for name, path in config.load_paths.items():
            if path:
                remedy = "a loop of your own does not read it: call Training.load with a folder of checkpoints"
                raise UserError(f"--{name}={path}: {remedy}")
        refuse_unread(config, data or {})
        compare_processes(config, {}, extensions)
        self.engine = open_engine(config)
        self.config, self.streams = open_streams(self.engine, None, data or {}, {})
        self.trainee = self.engine.place((model.build if model else build or build_model)(self.config))
        self._peers, self._buffer = Peers(timeout=self.config.collective_timeout), HostBuffer()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the last save; close the data and the engine."""
        self._writer.shutdown()
        for stream in self.streams.values():
            stream.close()
        self.engine.close()

    def batch(self, step: int, split: str = "train") -> Batch:
        """Return this process's rows of the global batch of a step, counted from 1: int32 [rows, seq_length] each.

        Those of training have the length that seq_length_stages gives to the step. Raises UserError for a step below 1.
        """
        if step < 1:
            raise UserError(f"step={step}: steps are counted from 1")
        batch = self.streams[split].batch(step - 1)
        return cut_rows(batch, self.config.row_length(step)) if split == "train" else batch

    def learning_rate(self, step: int) -> float:
        """Return the rate that the configured schedule has for a step, counted from 1."""
        return learning_rate(self.config, step - 1)

    def train_step(self, step: int, batch: Batch | None = None, rate: float | None = None) -> StepResult:
        """Update the model; batch and rate are the configured ones of the step unless they are given."""
        batch = self.batch(step) if batch is None else batch
        return self.trainee.train_step(batch, self.learning_rate(step) if rate is None else rate)

    def evaluate(self, batch: Batch) -> StepResult:
        """Return "loss" and "tokens" of a batch, without a change of any state."""
        return self.trainee.evaluate(batch)

    def save(
        self, folder: str, step: int, *, user_content: Any = None, keep: int = 0, in_background: bool = False
    ) -> Future[None]:
        """Save model, optimizer and `user_content` to `folder`/step_N; the result is done when it is committed.

        What is saved, and how, is what checkpoint_dtype, save_optimizer and ckpt_io_workers say.
        user_content: a JSON value. keep: remove all but so many of the newest checkpoints and this one, 0: none.
        in_background: training may go on, while a thread writes a copy in the host's memory; the next save or load
        waits for it. Raises OSError where it cannot be written, in_background as the result, which is printed, too;
        UserError where user_content is no JSON value.
        """
        try:
            json.dumps(user_content, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"user_content of step {step} is no JSON value: {error}") from error
        self._wait()
        mesh, stream = self.engine.mesh._asdict(), self.streams["train"]
        data = {**stream.state(step), "user_content": user_content}  # so that the script continues it, too
        tokens = stream.trained(step) * self.config.seq_length
        facts = Facts(step, tokens, data, asdict(self.config), self.engine.name, mesh)
        state, dtype = saved_part(self.trainee.state(), self.config), DTYPES_ON_DISK[self.config.checkpoint_dtype]
        workers = self.config.ckpt_io_workers
        pending = PendingSave(location(folder), state, facts, self._peers, dtype=dtype, workers=workers)
        if in_background:
            stage(pending, self._buffer)
        saving = self._writer.submit(self._write, pending, folder, step, keep)
        if in_background:  # perhaps nobody asks for the result
            saving.add_done_callback(partial(self._report, f"step {step} was not saved to {folder}"))
        else:
            saving.result()
        return saving

    def _write(self, pending: PendingSave, folder: str, step: int, keep: int) -> None:
        pending.write()
        if keep:
            self._peers.lead(lambda: keep_steps(location(folder), lambda steps: [*steps[:keep], step]))

    def _report(self, failure: str, saved: Future[None]) -> None:
        if error := saved.exception():
            self._peers.say(f"{failure}: {error}")

    def _wait(self) -> None:
        """Wait for the last save: it reads the host's copy, and its thread communicates with the other processes."""
        self._writer.submit(int).result()

    def load(self, folder: str, step: int | None = None) -> Loaded | None:
        """Load model and optimizer from a step of `folder`, None: the newest. Returns None if there is no checkpoint.

        The checkpoint may be of another mesh, engine or run; settings of the model and the optimizer that differ are
        printed. Without an optimizer's state in it, moments start at zero. Raises UserError if it does not fit or is
        damaged.
        """
        self._wait()
        found = self._peers.lead(lambda: find_checkpoints(location(folder)).committed)
        paths = [path for path in found if step is None or path.name == f"step_{step}"]
        if not paths:
            return None
        checkpoint = self._peers.each(partial(open_checkpoint, paths[0]))
        restoring = Restoring(self.config, self._peers, self.trainee.state(), Start())
        restart = restoring.lacks_moments(checkpoint)
        names = restoring.names_to_continue(checkpoint, weights_only=restart)
        restoring.load(checkpoint, names)
        for name, part in cast(Any, self.trainee).step.parts.items():
            if name not in names:  # a run without fp16 has saved it: no loss scale is left of steps before the load
                part.restart()
        restoring.state.commit(restart_optimizer=restart)
        config, differing = self.config, changes(checkpoint.facts.config, self.config)
        refused = [each for each in differing if each.field in config.matching_settings]  # by the script
        if changed := [str(each) for each in refused if not config.accepts(each.field, each.before)]:
            self._peers.say(f"changed since {checkpoint.path.name}: {', '.join(changed)}")
        return Loaded(checkpoint.facts.step, (checkpoint.facts.data or {}).get("user_content"))
