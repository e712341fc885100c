"""Seconds per training step of whole programs: this one on both engines, and what people would use instead.

    python -m benchmarks.peers.train [--steps=24] [--turns=5] [--contenders="torch engine;compiled loop"]

All start from one Hugging Face folder of the `tiny` shape and train on the same batches of 16 x 256 tokens, in fp32 on
all cores, with AdamW and clipping; the losses of every step must agree within 1e-4, of MaxText the first one. In every
turn each program runs for one step, which is the cold start to a first loss with empty caches of compiled programs, and
for 1 + steps; the difference is the time of the further steps with everything that the program does beside the model.
Prints medians and the ratio of each to the best peer. Peers whose environment is not there are left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.turns import (
    ROOT,
    Figures,
    Spent,
    options_of,
    print_facts,
    print_table,
    run_program,
    take_turns,
    versions,
)
from main_training import configure
from pretraining.config.variants import model_shape
from pretraining.data import open_stream
from pretraining.monitor.metrics import read_metrics

ROWS, LENGTH, VOCABULARY = 16, 256, 4096
OURS: dict[str, tuple[str, ...]] = {
    "torch engine": ("--engine=torch", "--device=cpu"),
    "torch engine, compiled": ("--engine=torch", "--device=cpu", "--use_torch_compile=True"),
    "xla engine": ("--engine=xla",),
}
PEERS = {  # interpreter, module of this folder and its first arguments
    "transformers' Trainer": (sys.executable, "hf_loop", "trainer"),
    "loop": (sys.executable, "hf_loop", "loop"),
    "compiled loop": (sys.executable, "hf_loop", "compiled"),
    "litgpt": (".venv-peers/bin/python", "litgpt_run"),
    "MaxText": (".venv-maxtext/bin/python", "maxtext_run"),
}
TOLERANCE = 1e-4  # largest difference of a loss from that of the first contender
ONLY_FIRST = ("MaxText",)  # of whose losses; maxtext_run.py says why


def flags(work: Path, steps: int) -> dict[str, object]:
    """Return the settings of our runs."""
    return {
        "model_variant": "tiny",
        "vocab_size": VOCABULARY,
        "seq_length": LENGTH,
        "batch_size": ROWS,
        "global_batch_size": ROWS,
        "mixed_precision": False,
        "num_steps": steps,
        "lr_schedule": "constant",
        "learning_rate": 1e-3,
        "data_path": str(work / "data"),
        "index_dir": str(work / "index"),
        "shuffle": "none",
        "sep_token": -1,
        "ckpt_load_path": str(work / "weights"),
        "checkpoint_interval": 0,
        "report_interval": 1,
        "tensorboard": False,  # the peers write no events, and requirements.txt does not install it
    }


def prepare(work: Path, steps: int) -> None:
    """Write weights, token shards, and the batches that our loader makes of them."""
    (work / "data").mkdir()
    ids = np.random.default_rng(0).zipf(1.2, (steps + 1) * ROWS * (LENGTH + 1)) % VOCABULARY
    table = pa.table({"tokens": pa.array([ids.astype(np.uint32)])})
    with pa.ipc.new_file(str(work / "data/tokens.arrow"), table.schema) as writer:
        writer.write_table(table)
    described = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **dimensions())
    LlamaForCausalLM(described).save_pretrained(work / "weights")
    stream = open_stream(configure(flags(work, steps)))
    batches = [stream.batch(step) for step in range(steps)]
    tokens, labels = (np.stack([batch[name] for batch in batches]) for name in ("tokens", "labels"))
    np.savez(work / "batches.npz", tokens=tokens, labels=labels)


def dimensions() -> dict[str, object]:
    """Return what Hugging Face's configuration says of the `tiny` shape."""
    config = configure({"model_variant": "tiny", "use_dummy_dataset": True})
    shape = model_shape(config)
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
    }


def run(name: str, work: Path, steps: int) -> tuple[Spent, list[float]]:
    """Run one contender; return what it took, and its losses."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        losses = Path(folder) / "losses.json"
        if name in OURS:
            settings = {**flags(work, steps), "log_dir": f"{folder}/run"}
            flags_of_run = [f"--{key}={value}" for key, value in settings.items()]
            command = [sys.executable, "main_training.py", *flags_of_run, *OURS[name]]
        else:
            python, module, *kind = PEERS[name]
            files = [str(work / "weights"), str(work / "batches.npz"), str(steps), str(losses)]
            command = [python, "-m", f"benchmarks.peers.{module}", *kind, *files]
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
        spent, _ = run_program(command, **variables, TORCHINDUCTOR_CACHE_DIR=f"{folder}/compiled")
        if name in OURS:
            return spent, [line["loss"] for line in read_metrics(Path(folder) / "run/metrics.jsonl") if "loss" in line]
        return spent, json.loads(losses.read_text())


def compare(names: list[str], steps: int, turns: int, work: Path) -> None:
    """Run the contenders in turns, and print the table."""
    prepare(work, 1 + steps)
    reference: list[float] = []

    def measure(name: str) -> Figures:
        start, _ = run(name, work, 1)
        whole, losses = run(name, work, 1 + steps)
        reference[:] = reference or losses
        compared = 1 if name in ONLY_FIRST else len(losses)
        worst = float(np.abs(np.subtract(losses[:compared], reference[:compared])).max())
        if worst > TOLERANCE:
            sys.exit(f"{name}: a loss differs by {worst:.2g} from that of {names[0]}")
        cpu, clock = ((several - one) / steps for several, one in zip(whole, start, strict=True))
        figures = {"step, CPU s": cpu, "step, s": clock, "first loss and end, CPU s": start.cpu}
        return figures | {"first loss and end, s": start.clock, "loss differs by": worst}

    print_table(take_turns(names, turns, measure), PEERS)


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = options_of(__doc__, python=False)
    parser.add_argument("--steps", type=int, default=24)
    present = [name for name, (python, *_) in PEERS.items() if (ROOT / python).exists()]
    parser.add_argument("--contenders", default=";".join([*OURS, *present]))
    options = parser.parse_args()
    packages = versions(["torch", "torch_xla", "transformers", "accelerate"])
    packages |= versions(["litgpt"], PEERS["litgpt"][0]) | versions(["maxtext", "jax"], PEERS["MaxText"][0])
    print_facts(packages)
    with tempfile.TemporaryDirectory() as work:
        compare(options.contenders.split(";"), options.steps, options.turns, Path(work))


if __name__ == "__main__":
    main()
