"""Saves a random state on every mesh of this many virtual devices, then loads the states of others on every mesh.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 python mesh_driver.py FOLDER

Also loads an adapter into new models of LORA_MESHES, commits an outdated state, and saves a tensor of the device.

Prints JSON: "meshes": by "SAVED LOADED", the tensors that are not bit for bit the saved ones, how many were compared,
and on TRAINED meshes the loss of the next step; "adapters": by mesh, the tensors that are not the adapter's;
"outdated": whether the outdated state was refused; "device_tensor": whether the tensor came back. Every mesh loads the
states of `sources`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
from safetensors.torch import save_file

from main_training import CONFIGURATION
from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.store import load
from pretraining.extensions.checkpoints import read_tensors
from pretraining.extensions.lora.adapter import CONFIG, MODEL, PREFIX, adapter_config
from pretraining.models.init import build_model
from pretraining.parallel.select import engine_class
from tests.checkpoint.saving import save

DEVICES = int(os.environ["CPU_NUM_DEVICES"])
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding_strategy": "ddp"},
    "fsdp": {"sharding_strategy": "fsdp"},
    "hsdp2x4": {"sharding_strategy": "hsdp", "sharding_group_size": 4},
    "hsdp4x2": {"sharding_strategy": "hsdp", "sharding_group_size": 2},
    "zero1": {"sharding_strategy": "zero1"},
    # The vocabulary is padded from 50 to 64 rows, of which a checkpoint knows nothing.
    "tensor": {"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "make_vocab_size_divisible_by": 32},
    "context": {"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "context_parallel_size": 2},
    # Three layers for two stages: one is padded, of which a checkpoint knows nothing.
    "stages": {"sharding_strategy": "fsdp", "pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
}
TRAINED = ("fsdp", "context") if DEVICES > 1 else ("ddp",)
LORA_MESHES = ("ddp", "fsdp")
LORA = {"lora_rank": 2, "lora_target_modules": "q_proj,down_proj"}
ROWS, LENGTH, VOCABULARY = 8, 16, 50  # 50 rows and a width of 20 over 8 devices: uneven splits
Run = tuple[Any, Any, Any]  # engine, trainee, configuration


def open_mesh(name: str, **more: Any) -> Run:
    """An engine with a small model and its optimizer on this mesh."""
    fields = {**MESHES[name], **more}
    inner = fields.get("tensor_parallel_size", 1) * fields.get("context_parallel_size", 1)
    config = CONFIGURATION(
        model_variant="custom",
        vocab_size=VOCABULARY,
        hidden_size=20,
        num_layers=3,
        num_attention_heads=2,
        intermediate_size=44,
        seq_length=LENGTH,
        num_steps=10,
        mixed_precision=False,
        batch_size=ROWS * inner // DEVICES,
        **fields,
    )
    engine = engine_class(config, "xla")(config)
    return engine, engine.place(build_model(config)), config


def train(run: Run, step: int) -> float:
    """One update on the global batch of `step`; the loss."""
    _, trainee, _ = run
    rows = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    return trainee.train_step({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, 1e-3).read()["loss"]


def fill(run: Run, seed: int, folder: Path) -> None:
    """Fill the run's state with random values."""
    _, trainee, _ = run
    state, generator = trainee.state(), torch.Generator().manual_seed(seed)
    values = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    values = {name: value.abs() if "exp_avg_sq" in name else value for name, value in values.items()}
    values["optimizer.step"] = torch.tensor(2.0)
    load(open_checkpoint(save(folder, values, Facts(seed, 0, {}, {}, "", {}))), state)
    state.commit()


def save_run(run: Run, folder: Path) -> Path:
    """Save the run's state as it is."""
    engine, trainee, config = run
    return save(folder, trainee.state(), Facts(2, 0, {}, asdict(config), "xla", engine.mesh._asdict()))


def load_run(run: Run, path: Path, scratch: Path, trains: bool) -> dict[str, Any]:
    """Load a state, save it again, compare the two, and train on if `trains`."""
    _, trainee, _ = run
    state = trainee.state()
    load(open_checkpoint(path), state)
    state.commit()
    saved, loaded = read_tensors(path), read_tensors(save_run(run, scratch))
    return {
        "differ": [name for name in saved if not torch.equal(saved[name], loaded[name])],
        "compared": len(saved.keys() & loaded.keys()),
        "loss": train(run, 2) if trains else None,
    }


def load_adapter(name: str, folder: Path) -> list[str]:
    """Start a run from a random adapter; the names of its tensors that are not the adapter's."""
    run = open_mesh(name, **LORA, lora_load_path=str(folder), log_dir=str(folder / "run"), checkpoint_interval=0)
    _, trainee, config = run
    shapes = {key: tensor.shape for key, tensor in trainee.state().items() if ".lora_" in key}
    adapter = {key: torch.randn(shape) for key, shape in shapes.items() if not key.startswith("optimizer.")}
    assert len(adapter) == 12  # two matrices for each of two projections in three layers
    folder.mkdir()
    save_file({PREFIX + key: tensor for key, tensor in adapter.items()}, folder / MODEL)
    (folder / CONFIG).write_text(json.dumps(adapter_config(config)))
    Checkpoints(config, folder / "run").restore(trainee)
    loaded = read_tensors(save_run(run, folder / "saved"))
    return [key for key, tensor in adapter.items() if not torch.equal(tensor, loaded[key])]


def refuses_outdated_state(run: Run, path: Path) -> bool:
    """Whether a state that was taken before another one was committed can no longer be committed."""
    _, trainee, _ = run
    states = [trainee.state() for _ in range(2)]
    for state in states:
        load(open_checkpoint(path), state)
    states[1].commit()
    try:
        states[0].commit()
    except AssertionError:
        return True
    return False


def device_tensor_comes_back(folder: Path) -> bool:
    """Save a tensor of the device that is no shard, as the torch engine hands them over, and load it there."""
    tensor = torch.arange(6.0).to(torch_xla.device())
    loaded = {"model.norm.weight": torch.zeros_like(tensor)}
    path = save(folder, {"model.norm.weight": tensor}, Facts(1, 0, {}, {}, "torch", {}))
    load(open_checkpoint(path), loaded)
    return torch.equal(loaded["model.norm.weight"].cpu(), torch.arange(6.0))


def sources(name: str) -> set[str]:
    """The states that mesh `name` loads: its own, the next one's and that of the third after it; of eight, all."""
    names, place = list(MESHES), list(MESHES).index(name)
    others = {f"{names[(place + distance) % len(names)]}_{DEVICES}" for distance in (0, 1, 3)}
    return others if DEVICES > 1 else {*(f"{other}_8" for other in names), f"{name}_1"}


def main() -> None:
    """See the module's docstring."""
    root = Path(sys.argv[1])
    runs = {name: open_mesh(name) for name in MESHES if DEVICES > 1 or name == "ddp"}
    for seed, (name, run) in enumerate(runs.items()):
        fill(run, seed, root / "random" / str(DEVICES))
        save_run(run, root / f"{name}_{DEVICES}")
    meshes = {
        f"{source.parent.name} {name}_{DEVICES}": load_run(
            run, source, root / "scratch" / f"{source.parent.name}_{name}", name in TRAINED
        )
        for name, run in runs.items()
        for source in sorted(root.glob("*/step_2"))
        if source.parent.name in sources(name)
    }
    names = [name for name in LORA_MESHES if DEVICES > 1]
    adapters = {name: load_adapter(name, root.parent / f"adapter_{name}") for name in names}
    outdated = refuses_outdated_state(runs["ddp"], root / f"ddp_{DEVICES}" / "step_2")
    report = {"meshes": meshes, "adapters": adapters, "outdated": outdated}
    print(json.dumps({**report, "device_tensor": device_tensor_comes_back(root / "tensor")}), flush=True)


if __name__ == "__main__":
    main()
