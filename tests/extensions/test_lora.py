"""Adapters: what has one and is trained; a run that stops, continues and is exported; PEFT's format both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("pretraining.extensions.huggingface")
pytest.importorskip("pretraining.extensions.other_weights")

from main_training import CONFIGURATION, configure, train
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.checkpoint.store import is_weight
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.extensions.checkpoints import newest_checkpoint, open_any_checkpoint, read_tensors
from pretraining.extensions.lora.adapter import MODEL
from pretraining.extensions.lora.targets import adapted, is_adapter
from pretraining.models.init import build_model
from pretraining.models.ops import next_token_loss
from pretraining.run.start import parameter_shapes
from pretraining.tools.convert.convert import ADAPTER, to_huggingface
from pretraining.tools.generate import base_weights, load_model
from tests.end_to_end import small

SIZES: dict[str, Any] = {**small.MODEL, "vocab_size": 61, "intermediate_size": 48, "seq_length": 24}
LORA: dict[str, Any] = {**SIZES, "lora_rank": 4}


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("", ["q_proj", "v_proj"]),
        ("up_proj", ["up_proj"]),
        ("self_attn.k_proj,down_proj", ["k_proj", "down_proj"]),
        (r".*\.(gate|up)_proj", ["gate_proj", "up_proj"]),
        (r"model\.layers\.\d+\.self_attn\.o_proj", ["o_proj"]),
    ],
)
def test_targets_are_names_their_last_parts_or_a_regular_expression(targets: str, found: list[str]) -> None:
    config = CONFIGURATION(**LORA, lora_target_modules=targets)
    assert [name.rpartition(".")[2] for name in adapted(config)] == found


@pytest.mark.parametrize("init", ["default", "gaussian"])
def test_a_new_adapter_changes_nothing_and_alone_takes_gradients(init: Any) -> None:
    plain, wide = build_model(CONFIGURATION(**SIZES)), build_model(CONFIGURATION(**LORA, lora_init=init))
    tokens = torch.randint(0, 61, (2, 24))
    assert torch.equal(plain(tokens), wide(tokens))
    trained = {name: weight for name, weight in wide.named_parameters() if weight.requires_grad}
    assert all(map(is_adapter, trained))
    # r (inputs + outputs) of q_proj [32, 32] and v_proj [16, 32], in two layers
    assert sum(weight.numel() for weight in trained.values()) == 2 * 4 * ((32 + 32) + (32 + 16))
    wide(tokens).square().mean().backward()
    assert all(weight.grad is not None for weight in trained.values())
    assert all(weight.grad is None for name, weight in wide.named_parameters() if name not in trained)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"lora_bias": "lora_only"}, {"q_proj.bias", "v_proj.bias"}),
        ({"lora_bias": "all"}, {f"{n}_proj.bias" for n in ("q", "k", "v", "o", "gate", "up", "down")}),
        ({"lora_modules_to_save": "lm_head,model.norm"}, {"lm_head.weight", "norm.weight"}),
        ({"lora_modules_to_save": "norm"}, {f"{n}norm.weight" for n in ("", "input_layer", "post_attention_layer")}),
    ],
)
def test_biases_and_whole_modules_are_trained_if_asked(fields: dict[str, Any], expected: set[str]) -> None:
    config = CONFIGURATION(**LORA, attn_bias=True, mlp_bias=True, **fields)
    weights = {name: weight for name, weight in build_model(config).named_parameters() if weight.requires_grad}
    assert {".".join(name.split(".")[-2:]) for name in weights if not is_adapter(name)} == expected
    count, _, listed = config.facts["trained"].partition(": ")
    assert count.startswith(f"{sum(weight.numel() for weight in weights.values()):,} of ")
    assert "no effect" not in listed
    adapters = {"q_proj (rank 4)", "v_proj (rank 4)"}
    assert {*listed.split(", ")} == adapters | {name.removesuffix(".weight") for name in expected}


@pytest.mark.parametrize("fields", [{"lora_bias": "all"}, {"lora_bias": "lora_only", "mlp_bias": True}])
def test_the_overview_names_lora_bias_of_a_model_without_such_biases(fields: dict[str, Any]) -> None:
    note = f"; lora_bias={fields['lora_bias']}: no effect on a model without such biases"
    assert CONFIGURATION(**LORA, **fields).facts["trained"].endswith(f"q_proj (rank 4), v_proj (rank 4){note}")


# ---- Adapters that PEFT writes, and what it makes of ours

RUN = {**SIZES, "use_dummy_dataset": True, "engine": "torch", "device": "cpu", "mixed_precision": False}
RUN |= {"batch_size": 2, "num_steps": 1, "report_interval": 1, "norm_eps": 1e-6}
TARGETS = ["q_proj", "v_proj", "down_proj"]
LEARNING = {"num_steps": 8, "batch_size": 4, "checkpoint_interval": 4, "learning_rate": 0.01, "lr_schedule": "constant"}


def trained(log_dir: Path, **fields: Any) -> dict[int, float]:
    """Train in a folder, or continue there; return the losses by step."""
    done = train({**RUN, "log_dir": log_dir, **fields})
    assert done.code == 0
    return done.losses


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the newest checkpoint of a run."""
    return read_tensors(newest_checkpoint(run), is_weight)


def config_of(run: Path) -> TrainConfig:
    """Return the configuration with which a run has trained."""
    return CONFIGURATION(**json.loads((run / "config.json").read_text()))


def logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return what the base computes with the adapter of a run's newest checkpoint."""
    config, checkpoint = config_of(run), open_checkpoint(newest_checkpoint(run))
    return load_model(config, {**base_weights(checkpoint, config), **weights(run)})(tokens)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of transformers with the small model and random weights."""
    return write_base(tmp_path_factory.mktemp("base"))


def write_base(folder: Path, **settings: Any) -> Path:
    """Write the small model with random weights as transformers does; return its folder."""
    transformers = pytest.importorskip("transformers")
    names = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}
    names["seq_length"] = "max_position_embeddings"
    sizes = {names.get(name, name): value for name, value in SIZES.items() if name != "model_variant"}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.3, **settings))
    model.save_pretrained(folder)
    return folder


def write_peft(base: Path, folder: Path, **settings: Any) -> Any:
    """Write an adapter whose parameters are all random, with PEFT; return its model."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    settings = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), peft.LoraConfig(**settings)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


def start(base: Path, adapter: Path, log_dir: Path, **fields: Any) -> tuple[TrainConfig, float]:
    """Train a step from PEFT's adapter, with no other flag of it; return the configuration and the loss of the step."""
    losses = trained(log_dir, ckpt_load_path=base, lora_load_path=adapter, **fields)
    return config_of(log_dir), losses[1]


def loss_of(model: Any, config: TrainConfig) -> float:
    """Return the loss that a model of transformers has on the first global batch."""
    batch = {name: torch.from_numpy(array).long() for name, array in open_stream(config).batch(0).items()}
    with torch.no_grad():
        return next_token_loss(model(batch["tokens"]).logits, batch["labels"]).item() / batch["labels"].numel()


@pytest.mark.slow
def test_an_adapter_alone_is_trained_and_saved_continues_bit_for_bit_with_dropout_and_merges(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    base, stopped, whole = (tmp_path / name for name in ("base", "stopped", "whole"))
    trained(base, **{**LEARNING, "num_steps": 4})
    fields = {**LEARNING, "lora_rank": 4, "lora_target_modules": ",".join(TARGETS), "lora_dropout": 0.1}
    fields["ckpt_load_path"] = base
    losses = trained(stopped, **{**fields, "num_steps": 4}) | trained(stopped, **fields)
    assert losses == trained(whole, **fields, lora_save_mode="merged")
    plain, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(to_huggingface(open_any_checkpoint(run), run / "hf")).float()
        for run in (base, whole)
    )
    assert losses[1] == pytest.approx(loss_of(plain, config_of(base)), abs=1e-6)
    assert loss_of(merged, config_of(base)) < losses[1] - 0.01
    frozen, adapters, saved = weights(base), weights(stopped), weights(whole)
    assert adapters and all(map(is_adapter, adapters))
    assert saved.keys() == frozen.keys() | adapters.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in (frozen | adapters).items())
    sizes = [sum(file.stat().st_size for file in run.glob("checkpoints/step_*/*")) for run in (stopped, base)]
    assert sizes[0] < sizes[1]  # moments and manifests included
    tokens = torch.randint(0, 61, (2, 20))
    torch.testing.assert_close(merged(tokens).logits, logits(stopped, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_trained_biases_load_in_peft_and_back(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def exported(name: str, **fields: Any) -> Path:
        trained(tmp_path / name, attn_bias=True, **{**LEARNING, **fields})
        return to_huggingface(open_any_checkpoint(tmp_path / name), tmp_path / f"{name}_exported")

    base = exported("base", num_steps=1)
    lora = {"lora_rank": 2, "lora_bias": "all", "ckpt_load_path": base}
    adapter = exported("tuned", **lora)
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), str(adapter))
    tokens, ours = torch.randint(0, 61, (2, 20)), weights(tmp_path / "tuned")
    expected = logits(tmp_path / "tuned", tokens)
    torch.testing.assert_close(theirs.float().eval()(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    exported("again", num_steps=1, learning_rate=1e-30, lora_load_path=adapter, **lora)
    assert all(torch.equal(tensor, ours[name]) for name, tensor in weights(tmp_path / "again").items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lora_alpha": 16}, {"lora_alpha": 16.0, "lora_rank": 4, "lora_target_modules": "down_proj,q_proj,v_proj"}),
        ({"lora_alpha": 16, "use_rslora": True}, {"lora_use_rslora": True}),
        (
            {"target_modules": "all-linear", "modules_to_save": ["norm", "lm_head"]},  # PEFT writes every path
            {"lora_modules_to_save": "lm_head,norm"},
        ),
        (
            {"target_modules": r".*\.(q|up)_proj", "modules_to_save": ["model.norm"]},
            {"lora_target_modules": r".*\.(q|up)_proj"},
        ),
    ],
)
def test_an_adapter_of_peft_is_the_same_function_without_further_flags(
    settings: dict[str, Any], expected: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    theirs = write_peft(base, tmp_path / "adapter", **settings)
    config, loss = start(base, tmp_path / "adapter", tmp_path / "run", checkpoint_interval=1, learning_rate=1e-30)
    assert {name: getattr(config, name) for name in expected} == expected
    assert loss == pytest.approx(loss_of(theirs, config), abs=2e-5)
    # And back: what the run saved is PEFT's function, all trained norms included
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    exported = to_huggingface(open_any_checkpoint(tmp_path / "run"), tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(model, str(exported)).eval()
    assert loss_of(again, config) == pytest.approx(loss, abs=2e-5)
    assert load_file(exported / MODEL).keys() == load_file(tmp_path / "adapter" / MODEL).keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["adapter", "base_and_adapter"])
def test_a_trained_embedding_that_is_the_head_too_is_both_in_peft(mode: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = write_base(tmp_path / "base", tie_word_embeddings=True)
    settings = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    theirs = write_peft(base, tmp_path / "adapter", **settings)
    fields = {"checkpoint_interval": 1, "learning_rate": 1e-30, "lora_save_mode": mode}
    config, loss = start(base, tmp_path / "adapter", tmp_path / "run", **fields)
    assert loss == pytest.approx(loss_of(theirs, config), abs=2e-5)
    exported = to_huggingface(open_any_checkpoint(tmp_path / "run"), tmp_path / "exported")
    whole, adapter = (base, exported) if mode == "adapter" else (exported, exported / ADAPTER)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    assert loss_of(again, config) == pytest.approx(loss, abs=2e-5)
    for words in ({}, {"lora_modules_to_save": "embed_tokens"}):  # of the run; PEFT's file has lm_head, too
        assert start(base, adapter, tmp_path / f"again{len(words)}", **words)[1] == loss


@pytest.mark.parametrize("mode", ["adapter", "base_and_adapter", "merged"])
def test_an_export_says_that_peft_cannot_load_the_adapters_of_gpt_neox(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    neox = {"norm_type": "layernorm", "activation": "gelu", "num_kv_heads": 4}
    neox |= dict.fromkeys(("norm_bias", "attn_bias", "mlp_bias"), True)
    trained(tmp_path / "run", **neox, lora_rank=2, lora_save_mode=mode, checkpoint_interval=1)
    to_huggingface(open_any_checkpoint(tmp_path / "run"), tmp_path / "exported")
    assert ("note: adapters have Llama's names, and" in capsys.readouterr().err) == (mode != "merged")


@pytest.mark.slow
@pytest.mark.parametrize("modules", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_an_adapter_with_an_embedding_apart_from_the_head_needs_a_head_apart(
    modules: list[str], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", tie_word_embeddings=True)
    theirs = write_peft(base, tmp_path / "adapter", modules_to_save=modules)
    with pytest.raises(ConfigError, match=r"modules_to_save=.* and the head apart; --tie_word_embeddings=False"):
        start(base, tmp_path / "adapter", tmp_path / "tied")
    config, loss = start(base, tmp_path / "adapter", tmp_path / "apart", tie_word_embeddings=False)
    assert loss == pytest.approx(loss_of(theirs, config), abs=2e-5)


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"use_dora": True}, {}, "use_dora=True"),
        ({"alpha_pattern": {"q_proj": 4}}, {}, r"alpha_pattern=\{'q_proj': 4\}"),
        ({"rank_pattern": {"q_proj": 2}}, {}, r"rank_pattern=\{'q_proj': 2\}"),
        ({"lora_bias": True}, {}, "lora_bias=True"),
        ({"layers_to_transform": [1]}, {}, r"layers_to_transform=\[1\]"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights=pissa"),
        ({"lora_alpha": 16}, {"lora_alpha": 8}, "--lora_alpha=8.0 .*has 16.0; use that"),
        ({}, {"lora_use_rslora": True}, "--lora_use_rslora=True .*has False; use that"),
        ({}, {"lora_rank": 2}, "--lora_rank=2 .*has 4; use that"),
        ({"modules_to_save": ["norm"]}, {"lora_modules_to_save": "model.norm"}, "lora_modules_to_save=model.norm"),
    ],
)
def test_an_adapter_that_this_recipe_does_not_have_is_refused(
    settings: dict[str, Any], fields: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    write_peft(base, tmp_path / "adapter", **settings)
    flags = {**RUN, "ckpt_load_path": str(base), "lora_load_path": str(tmp_path / "adapter"), **fields}
    config = configure(flags, report=False)
    with pytest.raises(ConfigError, match=message):
        check_starting_point(config, tmp_path / "run", parameter_shapes(config))


def test_tensors_of_an_adapter_are_exactly_those_that_are_trained(base: Path, tmp_path: Path) -> None:
    write_peft(base, tmp_path / "adapter")
    flags = {**RUN, "ckpt_load_path": str(base), "lora_load_path": str(tmp_path / "adapter")}
    config, file = configure(flags, report=False), tmp_path / "adapter" / MODEL
    tensors = load_file(file)
    name = next(iter(tensors))
    more = tensors | {"base_model.model.lm_head.weight": torch.ones(61, 32)}
    for changed, message in (
        ({other: tensors[other] for other in tensors if other != name}, "which this run trains"),
        (more, "has lm_head.weight, which this run does not"),
        (tensors | {name: tensors[name][:, :5].contiguous()}, "has shape"),
    ):
        save_file(changed, file)
        with pytest.raises(UserError, match=message):
            check_starting_point(config, tmp_path / "run", parameter_shapes(config))
