"""Break the source in one place after the other, and see whether the default tests notice.

    python -m tests.mutants [NAME ...]

Each mutant is a copy of the tree with one wrong line. Of the tests that `scripts/test.sh` runs without arguments,
those of the listed paths run there until the first fails. Exits with 1 if a mutant survives.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.end_to_end.checkout import copy_checkout

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """One place of the source, and what stands there instead."""

    path: str  # in pretraining/
    right: str  # occurs once
    wrong: str
    tests: str  # paths in tests/


MUTANTS = {
    # optim
    "weights do not decay": Mutant(
        "optim/rules.py", "weight * (1 - context.rate * context.decay)\n        elif", "weight\n        elif", "optim"
    ),
    "no bias correction": Mutant(
        "optim/rules.py", "(second / one_minus_power(self.beta2, context.step)).sqrt()", "second.sqrt()", "optim golden"
    ),
    "Muon does not scale": Mutant(
        "extensions/optimizers/rules.py",
        "0.2 * math.sqrt(max(",
        "0.2 * math.sqrt(min(",
        "extensions/test_optimizers.py",
    ),
    "Lion mixes with the other beta": Mutant(
        "extensions/optimizers/rules.py",
        "(self.beta1 * first + (1 - self.beta1) * grad).sign()",
        "first.sign()",
        "extensions/test_optimizers.py",
    ),
    "the rate is a step late": Mutant(
        "config/schedules.py", "    done = step + 1\n", "    done = step\n", "optim golden"
    ),
    "warm-up is a step late": Mutant(
        "config/schedules.py",
        "return s.peak * (step + 1) / (s.warmup + 1)\n        return rate(step, s)",
        "return s.peak * step / (s.warmup + 1)\n        return rate(step, s)",
        "optim",
    ),
    # steps
    "clipping is off": Mutant(
        "parallel/step.py", "if (limit := self.config.grad_clip_thresh)", "if (limit := 0)", "golden"
    ),
    "the norm is a rank's": Mutant(
        "parallel/torch/step.py", "        reduce_over_processes(sums)\n", "", "parallel golden"
    ),
    "gradients are a sum": Mutant(
        "parallel/torch/step.py", "count / mesh.data_ranks *", "1 / mesh.data_ranks *", "golden"
    ),
    "tensor ranks count twice": Mutant("parallel/torch/step.py", "trained / mesh.tensor  #", "trained  #", "parallel"),
    "xla divides by rows": Mutant(
        "parallel/xla/step.py",
        "self._pop_gradient(parameter).float() / count",
        "self._pop_gradient(parameter).float()",
        "golden",
    ),
    "a row of the table is transposed": Mutant(
        "parallel/sharding.py", 'Row("*.[qkv]_proj.bias", ("tensor",))', 'Row("*.[qkv]_proj.bias", (None,))', "parallel"
    ),
    "context ranks have other chunks": Mutant(
        "parallel/mesh.py", "(rank, 2 * ranks - 1 - rank)]", "(rank, ranks + rank)]", "parallel"
    ),
    "another block is recomputed": Mutant(
        "parallel/recompute.py", "block % choice == 0", "block % choice == 1", "parallel models golden"
    ),
    # models
    "attention sees the future": Mutant("models/ops.py", "v, is_causal=True,", "v, is_causal=False,", "models golden"),
    "documents see each other": Mutant(
        "models/ops.py", "is_near & (segments[row, query] == segments[row, key])", "is_near", "models data parallel"
    ),
    "padding is predicted": Mutant(
        "models/ops.py", "logits.masked_fill(columns >= vocabulary, -torch.inf)", "logits", "models"
    ),
    "no epsilon": Mutant(
        "models/llama.py", "pow(2).mean(-1, keepdim=True) + self.eps", "pow(2).mean(-1, keepdim=True)", "models golden"
    ),
    # data
    "labels are not shifted": Mutant(
        "data/stream.py",
        "tokens, labels = rows[:, :-1], rows[:, 1:]",
        "tokens, labels = rows[:, :-1], rows[:, :-1]",
        "data golden",
    ),
    "the separator is trained": Mutant(
        "data/stream.py",
        "[place - 1 for place in places if place > 0]",
        "[place for place in places if 0 < place < labels.shape[1]]",
        "data",
    ),
    "an epoch has the order of the one before": Mutant(
        "data/corpus.py", "key_of(*self._order.key, number)", "key_of(*self._order.key, 0)", "data golden"
    ),
    "a lane is off by one": Mutant(
        "data/lanes.py", "turn * self.stride % self.lanes if", "(turn + 1) * self.stride % self.lanes if", "data golden"
    ),
    "a sequence is lost on resuming": Mutant(
        "data/stream.py",
        '"sequences": self._batches.sequences(step).start}',
        '"sequences": self._batches.sequences(step).start + 1}',
        "data golden run end_to_end",
    ),
    "changed data are not noticed": Mutant("data/state.py", "    if not changes:\n", "    if True:\n", "data"),
    "a checksum is not compared": Mutant(
        "data/corpus.py", "                if not block.is_verified:\n", "                if False:\n", "data"
    ),
    # checkpoints
    "no fsync of files": Mutant(
        "storage.py", "        os.fsync(self._descriptor)\n", "        pass\n", "checkpoint faults"
    ),
    "no fsync of folders": Mutant(
        "storage.py", "            os.fsync(opened)\n", "            pass\n", "checkpoint faults"
    ),
    "a header is not checked": Mutant(
        "checkpoint/shards.py", "if digest(header) != expected.header:", "if False:", "checkpoint"
    ),
    "the oldest checkpoint is the newest": Mutant(
        "checkpoint/folder.py", "key=step_of, reverse=True)", "key=step_of)", "checkpoint"
    ),
    "elements are not counted": Mutant(
        "checkpoint/store.py",
        "        _verify_tensors(self._partial, manifest, self._names)\n",
        "        pass\n",
        "checkpoint",
    ),
    # run, config
    "lines after the checkpoint stay": Mutant(
        "monitor/metrics.py", "(lines := _lines(path))[: len(lines) - later]", "_lines(path)", "monitor end_to_end"
    ),
    "restarts never give up": Mutant(
        "tools/launch/restarts.py", "        if futile > patience:\n", "        if False:\n", "scripts run"
    ),
    "two separators are accepted": Mutant(
        "data/checks.py",
        "if config.sep_token is not None and config.eos_token not in",
        "if False and config.eos_token not in",
        "config data",
    ),
    "an update is not refused": Mutant("run/loop.py", "    if skipped <= limit:\n", "    if True:\n", "run end_to_end"),
}


def survives(mutant: Mutant) -> bool:
    """Return whether the tests pass with this mutant."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_checkout(Path(temporary) / "tree")
        source = folder / "pretraining" / mutant.path
        text = source.read_text()
        assert text.count(mutant.right) == 1, f"{mutant.path} has changed: write this mutant again"
        source.write_text(text.replace(mutant.right, mutant.wrong))
        paths = [f"tests/{path}" for path in mutant.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *paths]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(*(f"    {line[:160]}" for line in failed), sep="\n", flush=True)
        return done.returncode == 0


def main(names: list[str]) -> int:
    """See the module's docstring."""
    survivors = []
    for name in names or MUTANTS:
        began = time.monotonic()
        survivors += [name] if survives(MUTANTS[name]) else []
        print(f"{name}: {'SURVIVED' if name in survivors else 'found'} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(survivors)} of {len(names or MUTANTS)} mutants survived")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
