"""Train with MaxText on prepared batches, as benchmarks.peers.train does for each peer.

    .venv-maxtext/bin/python -m benchmarks.peers.maxtext_run MODEL_FOLDER BATCHES.npz STEPS LOSSES.json

AdamW, a constant learning rate of 1e-3 and clipping to 1, in fp32 on the CPU, layers as a scan, nothing recomputed.
Writes the loss of every step. MaxText folds 1 / sqrt(head_dim) into the query's weights, which AdamW then updates as if
they were that much larger: only the first loss is that of the other contenders.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import maxtext
import numpy as np
from flax import nnx
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils
from safetensors.numpy import load_file

ATTENTION, LAYER = "self_attention", "model.layers.{}."
# MaxText's name of a weight of all layers -> Hugging Face's of one layer's
LAYERS = {
    ("pre_self_attention_layer_norm", "scale"): "input_layernorm",
    ("post_self_attention_layer_norm", "scale"): "post_attention_layernorm",
    (ATTENTION, "query", "kernel"): "self_attn.q_proj",
    (ATTENTION, "key", "kernel"): "self_attn.k_proj",
    (ATTENTION, "value", "kernel"): "self_attn.v_proj",
    (ATTENTION, "out", "kernel"): "self_attn.o_proj",
    ("mlp", "wi_0", "kernel"): "mlp.gate_proj",
    ("mlp", "wi_1", "kernel"): "mlp.up_proj",
    ("mlp", "wo", "kernel"): "mlp.down_proj",
}
OTHERS = {
    ("token_embedder", "embedding"): "model.embed_tokens",
    ("decoder", "decoder_norm", "scale"): "model.norm",
    ("decoder", "logits_dense", "kernel"): "lm_head",
}


def batches(path: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield what MaxText's loaders yield: rows of one document each."""
    arrays = np.load(path)
    for tokens, labels in zip(arrays["tokens"].astype(np.int32), arrays["labels"].astype(np.int32), strict=True):
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        batch = {"inputs": tokens, "targets": labels}
        for name in ("inputs", "targets"):
            batch |= {f"{name}_position": positions, f"{name}_segmentation": np.ones_like(tokens)}
        yield batch


def weight_of_layer(weights: dict[str, np.ndarray], path: tuple[str, ...], number: int, head_dim: int) -> np.ndarray:
    """Return a weight of one layer, with the inputs first."""
    weight = weights[f"{LAYER.format(number)}{LAYERS[path]}.weight"]
    return weight.T / (math.sqrt(head_dim) if path[1] == "query" else 1.0)


def fill(state: Any, weights: dict[str, np.ndarray], layers: int, head_dim: int) -> None:
    """Replace the initial weights of a training state."""
    for path, variable in nnx.to_flat_state(nnx.state(state.model, nnx.Param)):
        old = variable.get_value()
        if path[:2] == ("decoder", "layers"):
            name = tuple(path[2:])
            several = [weight_of_layer(weights, name, number, head_dim) for number in range(layers)]
            shape = (old.shape[0], *old.shape[2:])  # the layers are the second axis
            new = np.stack([weight.reshape(shape) for weight in several], axis=1)
        else:
            weight = weights[f"{OTHERS[tuple(path)]}.weight"]
            new = weight.T if path[-1] == "kernel" else weight
        variable.set_value(jax.device_put(new.reshape(old.shape).astype(old.dtype), old.sharding))


def main(folder: str, batches_path: str, steps: str, losses_path: str) -> None:
    """Train and write the losses."""
    model = json.loads((Path(folder) / "config.json").read_text())
    rows, length = np.load(batches_path)["tokens"].shape[1:]
    weights, prepare_state = load_file(f"{folder}/model.safetensors"), maxtext_utils.setup_training_state

    def prepare_with_weights(*arguments: Any, **settings: Any) -> Any:
        prepared = prepare_state(*arguments, **settings)
        fill(prepared[0], weights, model["num_hidden_layers"], model["head_dim"])
        return prepared

    maxtext_utils.setup_training_state = prepare_with_weights
    input_pipeline_interface.create_data_iterator = lambda config, mesh: (batches(batches_path), None)
    with tempfile.TemporaryDirectory() as work:
        settings = {
            "run_name": "peer",
            "base_output_directory": work,
            "metrics_file": f"{work}/metrics.jsonl",
            "hardware": "cpu",
            "skip_jax_distributed_system": True,
            "decoder_block": "llama2",
            "base_emb_dim": model["hidden_size"],
            "base_mlp_dim": model["intermediate_size"],
            "base_num_decoder_layers": model["num_hidden_layers"],
            "base_num_query_heads": model["num_attention_heads"],
            "base_num_kv_heads": model["num_key_value_heads"],
            "head_dim": model["head_dim"],
            "vocab_size": model["vocab_size"],
            "normalization_layer_epsilon": model["rms_norm_eps"],
            "rope_max_timescale": int(model["rope_parameters"]["rope_theta"]),
            "mlp_activations": '["silu","linear"]',
            "max_target_length": length,
            "per_device_batch_size": rows,
            "dtype": "float32",
            "attention": "dot_product",
            "remat_policy": "none",
            "steps": steps,
            "learning_rate": 1e-3,
            "learning_rate_final_fraction": 1.0,
            "warmup_steps_fraction": 0.0,
            "adam_b2": 0.95,
            "adamw_mask": '[".*scale"]',
            "dataset_type": "synthetic",
            "packing": False,
            "enable_checkpointing": False,
            "enable_tensorboard": False,
        }
        base = Path(maxtext.__path__[0]) / "configs/base.yml"
        train.main(["maxtext", str(base), *(f"{name}={value}" for name, value in settings.items())])
        lines = [json.loads(line) for line in Path(settings["metrics_file"]).read_text().splitlines()]
    Path(losses_path).write_text(json.dumps([line["learning/loss"] for line in lines if "learning/loss" in line]))


if __name__ == "__main__":
    main(*sys.argv[1:])
