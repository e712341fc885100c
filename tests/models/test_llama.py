"""The model against Hugging Face's, and its initial weights against themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.models.chunked import AttentionMask
from pretraining.models.init import build_model, initial_weight
from pretraining.models.llama import BatchInputs, Embedding, Llama
from pretraining.models.ops import (
    IGNORED,
    Kernel,
    LossOptions,
    attention,
    document_mask,
    linear,
    loss_and_gradient,
    next_token_loss,
)
from tests.models import test_options

TINY: dict[str, Any] = {**test_options.TINY, "num_layers": 3, "num_kv_heads": 2, "seq_length": 256}
PUBLISHED = {  # of the published models; fms-fsdp's sizes computed from its configuration
    "llama2_1.4b": 1_288_800_256,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_34b": 33_743_970_304,
    "llama2_70b": 68_976_648_192,
    "llama3_194m_4k": 391_140_352,
    "llama3_1.8b": 1_884_391_424,
    "llama3_3.2b_4k": 3_204_074_496,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", [*PUBLISHED, "tiny", "mini"])
def test_a_variant_has_the_parameters_of_its_model_and_the_published_number(name: str) -> None:
    with torch.device("meta"):
        model = Llama(TrainConfig(model_variant=name))
    count = sum(weight.numel() for weight in model.parameters())
    assert VARIANTS[name].parameters == count == PUBLISHED.get(name, count)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 200), st.integers(1, 400))
def test_the_mask_of_blocks_is_the_definition(lengths: list[int], window: int, queries: int) -> None:
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    size, queries = segments.shape[1], min(queries, segments.shape[1])
    mask = document_mask(segments, window, queries)
    query, key = torch.arange(queries)[:, None], torch.arange(size)[None]
    position = query + size - queries
    expected = (key <= position) & (position - key < window) & (segments[0, position] == segments[0, key])
    zero = torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, query, key), expected)
    blocks = F.pad(expected, (0, -size % 128, 0, -queries % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))


def test_a_weight_is_initialised_bitwise_alone_and_in_the_model() -> None:
    config = TrainConfig(**TINY, seed=7)
    for name, weight in build_model(config).named_parameters():
        assert torch.equal(weight, initial_weight(config, name, weight.shape)), name


def test_layers_and_seeds_have_different_initial_weights() -> None:
    shape = torch.Size((64, 64))
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    made = [initial_weight(TrainConfig(**TINY, seed=seed), name, shape) for name in names for seed in (1, 2)]
    assert len({tuple(weight.flatten().tolist()) for weight in made}) == 6


def test_initial_spread_is_init_std_and_less_for_outputs_of_the_residual_stream() -> None:
    config = TrainConfig(**{**TINY, "num_layers": 8}, init_std=0.03)
    plain = initial_weight(config, "model.layers.0.mlp.up_proj.weight", torch.Size((400, 400)))
    output = initial_weight(config, "model.layers.0.mlp.down_proj.weight", torch.Size((400, 400)))
    assert plain.std().item() == pytest.approx(0.03, rel=0.02)
    assert output.std().item() == pytest.approx(0.03 / 4, rel=0.02)


def test_the_gradients_of_a_token_that_is_frequent_are_summed_in_fp32() -> None:
    embedding = Embedding.from_pretrained(torch.zeros(3, 4).bfloat16(), freeze=False)
    tokens = torch.ones(2, 1024, dtype=torch.int32)
    embedding(tokens).bfloat16().backward(torch.ones(2, 1024, 4).bfloat16())
    assert embedding.weight.grad is not None and embedding.weight.grad.tolist() == [[0.0] * 4, [2048.0] * 4, [0.0] * 4]


class Sums(TorchDispatchMode):
    """Notes the dtypes of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.sum:
            self.dtypes.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_no_sum_over_tokens_is_in_bf16(norm: str, weights: torch.dtype) -> None:
    # CPUs and GPUs sum bf16 in fp32; XLA in bf16, where the gradient of 8192 equal tokens was 0.66 of what it is
    options: dict[str, Any] = {"norm_type": norm, "norm_bias": norm == "layernorm", "qk_norm": True}
    model = build_model(TrainConfig(**TINY, **options, attn_bias=True, mlp_bias=True)).to(weights)
    tokens = torch.ones(2, 8, dtype=torch.int32)
    with Sums() as sums:
        model.loss(tokens, tokens.long(), BatchInputs(dtype=torch.bfloat16, kernel="chunked")).backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert sums.dtypes == {torch.float32}


def test_the_gradient_of_an_fp32_weight_is_not_rounded_to_bf16() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    weight = torch.randn(16, 32, requires_grad=True)
    linear(x, weight).backward(torch.ones(64, 16, dtype=torch.bfloat16))
    exact = x.double().sum(0).expand(16, 32)
    torch.testing.assert_close(weight.grad, exact.float(), atol=1e-5, rtol=1e-6)
    assert linear(x, weight).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["grouped", "repeated", "chunked"])
def test_the_last_queries_of_a_row_see_what_they_see_among_all(kernel: Kernel) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    segments = torch.randint(0, 3, (2, 16)).sort(1).values
    blocks = document_mask(segments, 7), document_mask(segments, 7, queries=4)
    with torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=False):  # of torch 2.9: 12 s of g++
        for whole, part in ((AttentionMask(), AttentionMask()), (AttentionMask(segments, 7),) * 2, blocks):
            want = attention(q, k, v, whole, kernel)[:, :, -4:]
            torch.testing.assert_close(attention(q[:, :, -4:], k, v, part, kernel), want)


@pytest.mark.parametrize("options", [LossOptions(z_loss=0.5, logit_softcap=2.0), LossOptions()])
def test_the_loss_has_a_cap_of_the_logits_and_the_squared_log_sum_exp_of_trained_tokens(options: LossOptions) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 16, requires_grad=True), torch.tensor([3, 0, IGNORED, 9, 1, IGNORED])
    trained, vocabulary, cap = labels != IGNORED, 11, options.logit_softcap  # the other columns are padding
    capped = cap * torch.tanh(logits[:, :vocabulary] / cap) if cap else logits[:, :vocabulary]
    plain = F.cross_entropy(capped, labels, reduction="sum")
    want = plain + options.z_loss * capped[trained].logsumexp(-1).square().sum()
    (want_gradient,) = torch.autograd.grad(want, logits)
    labels = labels.int()  # as a stream has them
    with_autograd = next_token_loss(logits, labels, vocabulary, options)
    results = [(with_autograd, torch.autograd.grad(with_autograd, logits)[0])]
    results.append(loss_and_gradient(logits.detach(), labels, vocabulary, options=options))
    with torch.inference_mode():
        results.append(loss_and_gradient(logits * 1, labels, vocabulary, options=options))
    for got, got_gradient in results:
        assert torch.allclose(got, want) and torch.allclose(got_gradient, want_gradient, atol=1e-6)
