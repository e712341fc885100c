"""The torch engine on one GPU beside transformers' Llama: speed, both MFUs and peak memory.

    python -m benchmarks.gpu [--models=llama3_194m_4k,llama2_1.4b,llama3_3.2b_4k] [--steps=20] [--batch_sizes=8,8,4]
    python -m benchmarks.gpu --profile=llama2_1.4b      where the time of three steps goes, by kernel
    python -m benchmarks.gpu --models=tiny --steps=2 --device=cpu      the script itself, anywhere

Both train the same model on the same tokens at sequence 4096: fp32 parameters, bf16 products, gradients clipped,
torch.compile and fused AdamW. transformers runs as its Trainer would (autocast, SDPA), and once more with parameters
and moments in bf16, which is less memory and less precision than ours. Each contender has a process to itself, one
after the other; the time is the median of its steps, each waited for.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.models.init import build_model
from pretraining.monitor.flops import Meter, flops_per_token, peak_of
from pretraining.optim.adamw import build_optimizer
from pretraining.parallel import accelerator
from pretraining.parallel.torch_engine import TorchEngine

DEFAULTS = {
    "models": "llama3_194m_4k,llama2_1.4b,llama3_3.2b_4k",
    "batch_sizes": "8,8,4",  # what transformers still fits beside its fp32 logits in 139 GiB
    "steps": "20",
    "device": "cuda",
    "contenders": "ours,ours cudnn,transformers,transformers bf16",
    "profile": "",
}
WARM_UP = 5
Step = Callable[[], None]


def config_of(model: str, batch_size: int, device: str) -> TrainConfig:
    """The run that both contenders make."""
    length = min(4096, model_shape(TrainConfig(model_variant=model)).max_position_embeddings)
    return TrainConfig(
        model_variant=model,
        seq_length=length,
        batch_size=batch_size,
        use_dummy_dataset=True,
        device=device,
        low_cpu_fsdp=True,
        sharding_strategy="fsdp",
    )


def tokens_of(config: TrainConfig) -> np.ndarray:
    """Random tokens [rows, length + 1]: zeros would run faster than text does."""
    vocabulary = model_shape(config).vocab_size
    shape = (config.batch_size, config.seq_length + 1)
    return np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)


def ours(config: TrainConfig) -> Step:
    """One step of the engine."""
    engine = TorchEngine(config)
    model = engine.place(build_model(config))
    optimizer = build_optimizer(config, model.named_parameters(), **engine.optimizer_options)
    engine.prepare(optimizer)
    rows = tokens_of(config)
    batch = {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}

    def step() -> None:
        engine.train_step(model, optimizer, batch, 3e-4).read()

    return step


def theirs(config: TrainConfig, dtype: torch.dtype) -> Step:
    """One step of transformers' LlamaForCausalLM; with fp32 parameters under autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, device = model_shape(config), torch.device(config.device)
    with device:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_attention_heads,
                num_key_value_heads=shape.num_kv_heads,
                intermediate_size=shape.intermediate_size,
                max_position_embeddings=shape.max_position_embeddings,
                tie_word_embeddings=False,
                attn_implementation="sdpa",
                use_cache=False,
            )
        ).to(dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.from_numpy(tokens_of(config)[:, :-1]).long().to(device)
    compiled = torch.compile(model) if device.type == "cuda" else model
    mixed = dtype == torch.float32 and device.type == "cuda"

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


CONTENDERS: dict[str, Callable[[TrainConfig], Step]] = {
    "ours": ours,
    "ours cudnn": ours,  # the same with cuDNN's attention before the flash kernel
    "transformers": lambda config: theirs(config, torch.float32),
    "transformers bf16": lambda config: theirs(config, torch.bfloat16),
}


def attention_of(contender: str) -> contextlib.AbstractContextManager[Any]:
    """Which attention kernels come first."""
    if "cudnn" not in contender:
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def measure(contender: str, config: TrainConfig, steps: int) -> dict[str, float | None]:
    """Median seconds of a step and peak bytes, in this process."""
    step = CONTENDERS[contender](config)
    times = []
    with attention_of(contender):
        for number in range(WARM_UP + steps):
            began = time.perf_counter()
            step()
            if number >= WARM_UP:
                times.append(time.perf_counter() - began)
    device = torch.device(config.device)
    return {
        "seconds": statistics.median(times),
        "spread": max(times) / min(times),
        "bytes": accelerator.peak_bytes(device),
    }


def matmul_peak(device: str, size: int, repeats: int = 30) -> float:
    """FLOP/s of the fastest of many [size, size] bf16 products, random data."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        accelerator.synchronize(a.device)
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        accelerator.synchronize(a.device)
        best = min(best, (time.perf_counter() - began) / 4)
    return 2 * size**3 / best


def in_own_process(options: dict[str, str], **changed: str) -> dict[str, Any]:
    """`measure` with a fresh allocator; {"failed": why} where it does not get through."""
    words = [f"--{name}={value}" for name, value in {**options, **changed}.items()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:160]}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def row(model: str, contender: str, config: TrainConfig, measured: dict[str, Any], name: str) -> str:
    """A line of the table."""
    if "failed" in measured:
        return f"| {model} | {contender} | {measured['failed']} |"
    shape, tokens = model_shape(config), config.batch_size * config.seq_length
    meter = Meter(tokens, 1, flops_per_token(shape, config.seq_length), peak_of(name))
    speed = meter.speed(measured["seconds"])
    shares = [f"{speed[kind]:.1%}" if speed[kind] is not None else "n/a" for kind in ("mfu", "mfu_causal")]
    memory = f"{(measured['bytes'] or 0) / 2**30:.1f} GiB"
    cells = [model, contender, f"{tokens / measured['seconds']:,.0f}", *shares, memory, f"{measured['spread']:.2f}"]
    return f"| {' | '.join(cells)} |"


def profile(config: TrainConfig) -> None:
    """Where three steps of ours spend the device's time."""
    step = ours(config)
    for _ in range(WARM_UP):
        step()
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as trace:
        for _ in range(3):
            step()
    order = "self_cpu_time_total" if config.device == "cpu" else "self_device_time_total"
    print(trace.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=80))


def main() -> None:
    """See the module."""
    options = DEFAULTS | dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    models = options["models"].split(",")
    sizes = dict(zip(models, map(int, options["batch_sizes"].split(",")), strict=False))
    device = options["device"]
    if "only" in options:
        config = config_of(models[0], sizes[models[0]], device)
        print(json.dumps(measure(options["only"], config, int(options["steps"]))))
        return
    if options["profile"]:
        profile(config_of(options["profile"], sizes[models[0]], device))
        return
    name = accelerator.device_name(torch.device(device))
    size = 8192 if device == "cuda" else 256
    print(
        f"{name}, torch {torch.__version__}: {matmul_peak(device, size) / 1e12:.1f} TFLOP/s in {size}^3 bf16 products"
    )
    print("| model | contender | tokens/s | MFU 6N + 12LdS | MFU causal | peak memory | slowest / fastest step |")
    print("|---|---|---|---|---|---|---|")
    for model in models:
        config = config_of(model, sizes[model], device)
        for contender in options["contenders"].split(","):
            chosen = {"models": model, "batch_sizes": str(sizes[model]), "only": contender}
            measured = in_own_process(options, **chosen)
            print(row(model, contender, config, measured, name), flush=True)


if __name__ == "__main__":
    main()
