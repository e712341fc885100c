"""Settings of extensions that contradict others: one problem each, which names both sides and the way out."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.config.declaration import settings_of
from tests.config.test_validate import STAGES, found
from tests.end_to_end.small import MODEL

SETTINGS = settings_of(CONFIGURATION)
SEQUENCES: dict[str, Any] = {"tensor_parallel_size": 4, "sequence_parallel": True}
RAMPED: dict[str, Any] = {"global_batch_size": 16, "batch_size": 4}
SAVED: dict[str, Any] = {"checkpoint_interval": 100}
MANUAL: dict[str, Any] = {"precision": "manual", "master_weights": False}
SHAPE = {"hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 4, "head_dim": 8, "intermediate_size": 256}
FP8: dict[str, Any] = {"precision": "fp8", "model_variant": "tiny", **SHAPE}
FP8_RANKS: dict[str, Any] = {**FP8, "tensor_parallel_size": 4, "num_kv_heads": 8, "head_dim": 16}
FP16: dict[str, Any] = {"precision": "fp16"}
LORA: dict[str, Any] = {**MODEL, "lora_rank": 4}
HEAD = "contains lm_head, which ends the name of no module; the modules are "
LAYERS = "lora_target_modules=.* means other projections in layer 1 than in layer 0"
RELATIVE: dict[str, Any] = {"optimizer": "adafactor", "optimizer_args": "relative_step=True", "num_steps": 100}
SHORT: dict[str, Any] = {"num_steps": 100, "learning_rate": 1e-3}
HYBRID = {"lr_schedule": "hybrid_cosine_inv_sqrt", "lr_cooldown_steps": 95, "lr_warmup_steps": 9}
STORED: dict[str, Any] = {"use_dummy_dataset": False, "data_path": "x"}
BEST: dict[str, Any] = {"keep_best": 2, "keep_last_n_checkpoints": 1, "val_interval": 4, "val_steps": 1, **SAVED}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # batch_rampup
    ({"rampup_batch_size": "2,2,100"}, "--rampup_batch_size=2,2,100 .*needs --global_batch_size"),
    ({**RAMPED, "rampup_batch_size": "4,4"}, "=4,4 .*start,increment,samples.*16,16,100000"),
    ({**RAMPED, "rampup_batch_size": "16,4,9"}, "starts with 16.*global_batch_size=16"),
    ({**RAMPED, "rampup_batch_size": "6,2,9"}, "starts with 6.*multiple of 4.*use 4 or 8"),
    ({**RAMPED, "rampup_batch_size": "4,8,9"}, "grows by 8.*16 - 4.*use 4 or 12"),
    # best_checkpoints
    ({**BEST, "val_interval": 0}, "--keep_best=2 .*needs validations: give --val_interval=N"),
    ({**BEST, "keep_last_n_checkpoints": 0}, "--keep_best=2 .*give --keep_last_n_checkpoints=1"),
    ({**BEST, "checkpoint_interval": 0}, "--keep_best=2 .*checkpoint_interval=0, which never saves"),
    ({**BEST, "val_interval": 30, "num_steps": 300}, "--keep_best=2 .*checkpoint_interval=100.*val_interval=30"),
    ({**BEST, "keep_best_metric": "train_loss"}, "=train_loss .*must be val_loss or val_bits_per_byte"),
    ({**BEST, "keep_best_metric": "val_loss/"}, "--keep_best_metric=val_loss/ .*such as val_loss/NAME"),
    ({**BEST, "keep_best_metric": "val_bits_per_byte"}, "=val_bits_per_byte .*needs --tokenizer_path"),
    ({**BEST, "keep_best_metric": "val_loss/a"}, "=val_loss/a .*the dummy dataset has no parts; use val_loss"),
    ({"keep_best_metric": "val_loss/a"}, "=val_loss/a .*needs --keep_best"),
    # clock
    ({"checkpoint_seconds": 60}, "--checkpoint_seconds=60 .*checkpoint_interval=0"),
    # fp16, fp8
    ({**FP16, "loss_scale": 8.0, "loss_scale_window": 5}, "loss_scale_window=5 +is for the dynamic"),
    ({**FP16, "min_loss_scale": 9.0, "initial_scale_power": 3}, "=9.0 +is above the first.*initial_scale_power=3"),
    ({**FP8, "intermediate_size": 200}, "intermediate_size=200 +is not a multiple of 16.*use 192 or 208"),
    ({**FP8_RANKS, "intermediate_size": 160}, "=160 +is not a multiple of 64 = 16 x 4 ranks.*use 128 or 192"),
    ({**FP8, "num_kv_heads": 1}, "num_kv_heads=1 +x head_dim=8 = 8 is not a multiple of 16"),
    ({**FP8, "batch_size": 1, "seq_length": 40}, "batch_size=1 +x 40 tokens = 40 is not a mult.*use 32 or 48"),
    # held_out
    ({"val_interval": 10}, "--val_interval=10 .*--val_steps"),
    ({**STORED, "val_interval": 9, "val_steps": 1}, "--val_interval=9 .*--split"),
    ({**STORED, "test_steps": 1, "split": "9,1"}, "--test_steps=1 .*--test_data_path.*third share"),
    ({**STORED, "split": "8,1,1", "valid_data_path": "v"}, "--split=8,1,1 .*nothing reads.*valid_data_path=v"),
    # kv_replication
    ({"tensor_parallel_size": 8, "kv_replication": 3, "num_kv_heads": 2}, "=3 .*num_kv_heads=2.*use 4 or 8"),
    # length_stages
    ({"seq_length_stages": "64:9,128"}, "--seq_length_stages=64:9,128 .*LENGTH:STEP.*such as 1024:2000"),
    ({"seq_length_stages": "100:9", "seq_length": 256}, "rows of 100 tokens.*divide seq_length=256"),
    ({**SEQUENCES, "seq_length_stages": "6:9", "seq_length": 24}, "rows of 6 tokens.*a multiple of 4"),
    ({**STAGES, "seq_length_stages": "64:9", "seq_length": 256}, "seq_length_stages.*--pipeline_parallel_size=1"),
    # local_tier
    ({"ckpt_local_path": "s3://b/n", "checkpoint_interval": 9}, "--ckpt_local_path=s3://b/n .*a local path"),
    ({"ckpt_local_path": "fast"}, "--ckpt_local_path=fast .*give an interval in steps"),
    # lora
    ({**LORA, "lora_load_tag": "step_8"}, "--lora_load_tag=step_8 .*needs --lora_load_path"),
    ({**LORA, "lora_target_modules": "proj"}, "=proj .*matches no projection; .*q_proj, k_proj"),
    ({**LORA, "lora_target_modules": "q_pro"}, "=q_pro .*matches no projection"),
    ({**LORA, "lora_target_modules": "q_proj,typo"}, "=q_proj,typo .*contains typo, which matches no"),
    ({**LORA, "lora_target_modules": "q_proj,"}, "matches no projection"),
    ({**LORA, "lora_target_modules": "gate_proj", "activation": "gelu"}, "gate_proj, which matches no projection"),
    ({**LORA, "lora_target_modules": "layers.0.self_attn.q_proj"}, LAYERS),
    ({**LORA, "lora_target_modules": r"model\.layers\.1\..*q_proj"}, LAYERS),
    ({**LORA, "lora_target_modules": r"model\.layers\.0\..*q_proj"}, LAYERS),
    ({**LORA, "lora_modules_to_save": "lm_head,typo"}, "contains typo, which ends the name of no module"),
    ({**LORA, "lora_modules_to_save": "lm_head", "tie_word_embeddings": True}, f"{HEAD}model.embed_tokens, model.norm"),
    ({**LORA, "lora_modules_to_save": "layers.0.mlp.down_proj"}, "layers.0.mlp.down_proj, which ends the name of no"),
    ({**LORA, "lora_modules_to_save": "q_norm"}, "contains q_norm, which ends the name of no module"),
    ({**LORA, "lora_modules_to_save": "q_proj"}, "lora_modules_to_save=q_proj .*q_proj, which has an adapter"),
    # moving_average
    ({**MANUAL, "ema_decay": 0.9}, "--ema_decay=0.9 .*stochastic_rounding=True"),
    ({"ema_decay": 0.9, "save_optimizer": False}, "--ema_decay=0.9 .*give --save_optimizer=True"),
    # mup
    ({"mup_base_width": 256, "optimizer": "lion"}, "--mup_base_width=256 .*lion.*adamw or muon"),
    ({"mup_base_width": 256, "lora_rank": 8}, "--mup_base_width=256 .*adapters.*export"),
    # one_program
    ({**STAGES, "one_program": "always"}, "--one_program=always .*several programs"),
    # optimizers
    ({"optimizer": "sgd", "optimizer_args": "nesterov=True"}, "nesterov=True +has no effect with momentum=0.0; set"),
    ({"optimizer": "sgd", "optimizer_args": "dampening=0.1"}, "dampening=0.1 +has no effect with momentum=0.0"),
    ({"optimizer": "novograd", "optimizer_args": "luc_trust=0.1"}, "luc_trust=0.1 +has no effect with luc=False"),
    ({"optimizer": "adafactor", "optimizer_args": "min_step=0.1"}, "min_step=0.1 .*no effect with relative_step=False"),
    ({**RELATIVE, "lr_schedule": "wsd"}, "--lr_schedule=wsd .*relative_step=True, which computes its own rate"),
    ({**RELATIVE, "lr_decay_steps": 50}, "--lr_decay_steps=50 .*relative_step=True, which computes its own rate"),
    # profiler
    ({"use_profiler": True, "num_steps": 4}, "--profile_start_step=5 .*num_steps=4"),
    # save_schedule
    ({"checkpoint_interval": 1, "checkpoint_scale": "log"}, "--checkpoint_interval=1 .*scale=log.*use 2 or more"),
    ({"checkpoint_scale": "log"}, "--checkpoint_scale=log .*checkpoint_interval=0, which never saves"),
    ({"extra_checkpoint_steps": "1,2"}, "--extra_checkpoint_steps=1,2 .*checkpoint_interval=0"),
    ({**SAVED, "extra_checkpoint_steps": "1,x"}, "--extra_checkpoint_steps=1,x .*step numbers.*0,100,1000"),
    ({**SAVED, "extra_checkpoint_steps": "-1"}, "--extra_checkpoint_steps=-1 .*step numbers"),
    # schedules
    ({**SHORT, "lr_schedule": "noam"}, "lr_schedule.*lr_d_model"),
    ({**SHORT, "lr_schedule": "step", "lr_gamma": 0.5}, "lr_schedule.*lr_step_size"),
    ({**SHORT, "lr_gamma": 0.5}, "lr_gamma.*lr_schedule=fms_cosine.*exponential_lr"),
    ({**SHORT, **HYBRID}, "--lr_cooldown_steps=95 .*num_steps=100.*9 steps"),
    # trackers
    ({"tracker_run_id": "a1"}, "--tracker_run_id=a1 .*needs --tracker"),
]


def is_there(fields: dict[str, Any]) -> bool:
    """Return whether no setting or value of these is one of an extension whose folder was deleted."""
    has_fp8 = importlib.util.find_spec("pretraining.extensions.fp8") is not None
    precision_is_there = has_fp8 or fields.get("precision") != "fp8"
    optimizer_is_there = fields.get("optimizer", "adamw") in CONFIGURATION.optimizers()
    schedule_is_there = fields.get("lr_schedule", "cosine") in CONFIGURATION.schedules()
    has_held_out = importlib.util.find_spec("pretraining.extensions.held_out") is not None
    held_out_is_there = has_held_out or not fields.keys() & {"val_interval", "test_steps", "valid_data_path"}
    settings_are_there = held_out_is_there and fields.keys() <= SETTINGS.keys()
    return settings_are_there and precision_is_there and optimizer_is_there and schedule_is_there


REFUSED = [row for row in REFUSED if is_there(row[0])]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_contradiction_is_one_problem_that_names_both_sides(fields: dict[str, Any], words: str) -> None:
    (problem,) = found(**fields)
    assert re.search(words, problem), problem
