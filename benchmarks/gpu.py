"""Compare the torch engine on one GPU with transformers' Llama: tokens/s, MFU in both conventions, peak memory.

    python -m benchmarks.gpu --models=llama2_1.4b --contenders=all --output=FOLDER       about 6 minutes
    python -m benchmarks.gpu --models=llama3_194m_4k,llama3_3.2b_4k --output=FOLDER      about 6 minutes
    python -m benchmarks.gpu --profile=llama2_1.4b --output=FOLDER                       about 2 minutes
    python -m pytest -p no:cacheprovider tests/parallel/test_cuda.py                     about 3 minutes
    python -m benchmarks.gpu --models=tiny --steps=2 --device=cpu                        test of the script, no GPU

All contenders train the same model on the same tokens, 4096 per sequence, with clipped gradients, torch.compile and
fused AdamW. `transformers` runs as its Trainer does: fp32 parameters, autocast to bf16, SDPA. `transformers_bf16` keeps
parameters and moments in bf16, which takes less memory and is less precise than `ours`. `ours_cudnn` prefers cuDNN's
attention kernel to the flash kernel. `ours_fp8` is --precision=fp8, whose MFU is a share of the bf16 peak, too. Each
contender runs in its own process, one after the other. Times are medians of steps, each of which waits for its loss.
The tables go to stdout, and the figures as JSON to FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.devices import kind_of
from pretraining.extensions.flops import Meter, flops_per_token
from pretraining.models.init import build_model
from pretraining.parallel import accelerator
from pretraining.parallel.torch.engine import TorchEngine

# The largest batches with which transformers fits in 139 GiB; it materialises the logits of the whole batch. Half of
# them on a GPU with less.
BATCH_SIZES = {"llama3_194m_4k": 8, "llama2_1.4b": 8, "llama3_3.2b_4k": 4, "tiny": 2}
LIMIT = 270  # s, maximum of one contender, including compilation
WARM_UP = 5
Step = Callable[[], None]


def config_of(model: str, device: Any) -> TrainConfig:
    """Return the configuration that all contenders run."""
    length = min(4096, model_shape(TrainConfig(model_variant=model)).max_position_embeddings)
    is_small = device == "cuda" and torch.cuda.get_device_properties(0).total_memory < 130 * 2**30
    config: TrainConfig = CONFIGURATION(
        model_variant=model, seq_length=length, batch_size=BATCH_SIZES[model] // (2 if is_small else 1),
        use_dummy_dataset=True, device=device, low_cpu_fsdp=True, sharding_strategy="fsdp",
    )  # fmt: skip
    return config


def tokens_of(config: TrainConfig) -> np.ndarray:
    """Return random tokens [rows, length + 1]; zeros would run faster than text."""
    vocabulary = model_shape(config).vocab_size
    shape = (config.batch_size, config.seq_length + 1)
    return np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32)


def engine_step(config: TrainConfig) -> Step:
    """Return a training step of the torch engine."""
    engine = TorchEngine(config)
    trainee = engine.place(build_model(config))
    rows = tokens_of(config)
    batch = {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}

    def step() -> None:
        trainee.train_step(batch, 3e-4).read()

    return step


def transformers_step(config: TrainConfig, dtype: torch.dtype) -> Step:
    """Return a training step of transformers' LlamaForCausalLM, under autocast if the parameters are fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, device = model_shape(config), torch.device(config.device)
    llama = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads, num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size, max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with device:
        model = LlamaForCausalLM(llama).to(dtype)
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
    "ours": engine_step,
    "ours_cudnn": engine_step,  # see attention_of
    "ours_fp8": lambda config: engine_step(replace(config, precision="fp8")),
    "transformers": lambda config: transformers_step(config, torch.float32),
    "transformers_bf16": lambda config: transformers_step(config, torch.bfloat16),
}


def attention_of(contender: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which the contender's preferred attention kernels come first."""
    if "cudnn" not in contender:
        return contextlib.nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def measure(contender: str, config: TrainConfig, steps: int) -> dict[str, float | None]:
    """Return the median step time, slowest / fastest, the time of the first step (s) and the peak memory (bytes)."""
    step = CONTENDERS[contender](config)
    with attention_of(contender):
        first, *later = (seconds(step) for _ in range(WARM_UP + steps))
    times = later[WARM_UP - 1 :]
    return {
        "seconds": statistics.median(times),
        "spread": max(times) / min(times),
        "first": first,
        "bytes": accelerator.peak_bytes(torch.device(config.device)),
    }


def seconds(step: Step) -> float:
    """Return the wall time of one step."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def matmul_peak(device: str, size: int, repeats: int = 30) -> float:
    """Return the FLOP/s of the fastest of many [size, size] bf16 products of random numbers (zeros run faster)."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(4):
            a @ b
        if a.is_cuda:
            torch.accelerator.synchronize()

    products()
    return 4 * 2 * size**3 / min(seconds(products) for _ in range(repeats))


def measure_in_new_process(model: str, contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `measure` with a fresh allocator, or {"failed": reason}."""
    words = [f"--models={model}", f"--steps={options.steps}", f"--device={options.device}", f"--only={contender}"]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"exceeded {LIMIT} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
        return {"failed": done.stderr.strip().splitlines()[-1][:160]}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def figures(config: TrainConfig, measured: dict[str, Any], device_name: str) -> dict[str, Any]:
    """Add tokens/s and both MFUs (fractions; None if the peak of the device is unknown)."""
    if "failed" in measured:
        return measured
    flops = flops_per_token(model_shape(config), config.seq_length)
    meter = Meter(config.batch_size * config.seq_length, 1, flops, kind_of(device_name))
    return measured | meter.speed(measured["seconds"])


def row(model: str, contender: str, measured: dict[str, Any]) -> str:
    """Format a row of the table."""
    if "failed" in measured:
        return f"| {model} | {contender} | {measured['failed']} |"
    shares = [f"{measured[kind]:.1%}" if measured[kind] is not None else "n/a" for kind in ("mfu", "mfu_causal")]
    speed, memory = f"{measured['tokens_per_second']:,.0f}", f"{(measured['bytes'] or 0) / 2**30:.1f} GiB"
    cells = [model, contender, speed, *shares, memory, f"{measured['spread']:.2f}", f"{measured['first']:.0f} s"]
    return f"| {' | '.join(cells)} |"


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every contender with every model, and print each row as soon as it is complete."""
    name = accelerator.device_name(torch.device(options.device))
    size = 8192 if options.device == "cuda" else 256
    peak = matmul_peak(options.device, size)
    print(f"{name}, torch {torch.__version__}: {peak / 1e12:.1f} TFLOP/s in {size}^3 bf16 products\n")
    print("| model | contender | tokens/s | MFU 6N + 12LdS | causal | peak memory | slowest / fastest | first step |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "matmul_flops": peak}
    contenders = list(CONTENDERS) if options.contenders == "all" else options.contenders.split(",")
    for model in options.models.split(","):
        for contender in contenders:
            measured = measure_in_new_process(model, contender, options)
            results[f"{model} {contender}"] = figures(config_of(model, options.device), measured, name)
            print(row(model, contender, results[f"{model} {contender}"]), flush=True)
    return results


def profile(config: TrainConfig) -> str:
    """Return a table of the device time of three steps of the torch engine by kernel."""
    step = engine_step(config)
    for _ in range(WARM_UP):
        step()
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as trace:
        for _ in range(3):
            step()
    order = "self_cpu_time_total" if config.device == "cpu" else "self_device_time_total"
    return trace.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)


def arguments() -> argparse.Namespace:
    """Parse the command line; see the module's docstring."""
    parser = argparse.ArgumentParser("benchmarks.gpu")
    parser.add_argument("--models", default=",".join(name for name in BATCH_SIZES if name != "tiny"))
    parser.add_argument("--contenders", default="ours,transformers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument(
        "--profile", choices=BATCH_SIZES, help="print the kernels of this model instead of the comparison"
    )
    parser.add_argument("--only", choices=CONTENDERS, help="measure only this contender, in this process")
    return parser.parse_args()


def main() -> None:
    """Measure and print; see the module's docstring."""
    options = arguments()
    if options.only:
        print(json.dumps(measure(options.only, config_of(options.models, options.device), options.steps)))
        return
    if options.profile:
        name, text = f"profile-{options.profile}.txt", profile(config_of(options.profile, options.device))
        print(text)
    else:
        name, text = f"{options.models.replace(',', '-')}.json", json.dumps(compare(options), indent=1)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / name).write_text(text)


if __name__ == "__main__":
    main()
