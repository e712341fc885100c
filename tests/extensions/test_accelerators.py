"""The devices that packages register with torch. TorchTPU itself trains in tests/parallel/test_emulated_tpu.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # registers FSDP2's operations
from torch.fx import GraphModule, symbolic_trace

from main_training import CONFIGURATION
from pretraining.config.errors import UserError
from pretraining.config.training import SETTINGS, TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.accelerators import table
from pretraining.extensions.accelerators.flat import chunk_cat
from pretraining.extensions.accelerators.table import linked_chips
from pretraining.extensions.accelerators.tpu_compile import return_arguments
from pretraining.parallel import accelerator
from pretraining.parallel.mesh import Mesh, resolve_mesh
from pretraining.parallel.processes import Processes
from pretraining.parallel.select import choose_engine
from pretraining.parallel.torch.engine import TorchEngine


def test_the_choices_of_a_device_are_the_rows_of_both_tables() -> None:
    choices = SETTINGS["device"].constraint.choices  # type: ignore[union-attr]
    assert {"auto", *accelerator.ACCELERATORS, *table.ACCELERATORS} == set(choices)


def test_the_choice_of_a_device_says_what_it_was_not_run_on() -> None:
    assert "not run on TPU hardware" in choose_engine(CONFIGURATION(engine="torch", device="tpu"))[1]
    assert choose_engine(CONFIGURATION(device="neuron")) == ("torch", "--device=neuron, untested on hardware")


@pytest.mark.parametrize(
    ("device", "words"),
    [("tpu", "needs the package torch_tpu"), ("neuron", "needs the package torch_neuronx: docs/clusters.md")],
)
def test_a_missing_package_is_one_sentence(device: str, words: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    with pytest.raises(UserError, match=words):
        TorchEngine(CONFIGURATION(model_variant="tiny", seq_length=64, device=device))


@pytest.mark.parametrize(
    ("device", "dtype", "width", "kernel"),
    [
        ("tpu", torch.bfloat16, 128, "contiguous"),
        ("tpu", torch.bfloat16, 160, "chunked"),
        ("tpu", torch.float16, 64, "chunked"),
        ("neuron", torch.bfloat16, 128, "chunked"),
    ],
)
def test_attention_is_chunked_where_the_device_has_no_kernel(
    device: str, dtype: torch.dtype, width: int, kernel: str
) -> None:
    assert table.ACCELERATORS[device].kernel_of(dtype, width) == kernel


def test_through_torchtpu_a_group_is_the_slice_and_elsewhere_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretraining.extensions.overview.lines import notes

    processes = Processes(world_size=32, local_world_size=4)
    assert linked_chips(processes) == (4, "a host has 4 processes")
    assert linked_chips(processes._replace(local_world_size=1)) == (1, "a host has 1 process")
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "4,4,1")
    linked, reason = linked_chips(processes)
    assert (linked, reason) == (16, "a TPU slice has 16 chips")
    config = TrainConfig(sharding_strategy="hsdp")
    mesh = resolve_mesh(config, 32, linked)
    assert mesh == Mesh(1, 2, 16)
    line = "hsdp: 2 groups of 16, because a TPU slice has 16 chips; see --sharding_group_size"
    assert line in notes(config, model_shape(config), mesh, "torch", reason)
    assert not notes(replace(config, sharding_group_size=16), model_shape(config), mesh, "torch", reason)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_laid_out_as_fsdp2_does_and_padded_where_ranks_do_not_divide_them(
    ranks: int, dtype: torch.dtype
) -> None:
    gradients = [torch.randn(shape) for shape in ((5, 3), (8, 2, 2), (7,), (3, 4))]
    columns = sum(-(-len(gradient) // ranks) * gradient[0].numel() for gradient in gradients)
    ours, expected = (torch.empty(ranks, columns, dtype=dtype) for _ in range(2))
    chunk_cat(gradients, 0, ranks, ours)
    torch.ops.fsdp.chunk_cat(gradients, 0, ranks, out=expected)
    assert torch.equal(ours, expected)


def test_results_that_are_arguments_are_not_computed_and_are_the_caller_s_tensors() -> None:
    computed: list[Any] = []

    def compile_graph(name: str, graph: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        def run(given: list[Any]) -> Any:
            tensors = list(given)
            given.clear()
            computed.append(graph(*tensors))
            return computed[-1]

        return run

    graph = symbolic_trace(lambda x, weight: (x @ weight, weight, None, x, x + 1))
    x, weight = torch.randn(2, 3), torch.randn(3, 3)
    product, same_weight, nothing, same_x, more = return_arguments(compile_graph, "forward", graph, [x, weight])(
        [x, weight]
    )
    assert len(computed[0]) == 3  # two tensors, and the None
    assert same_weight is weight and same_x is x and nothing is None
    assert torch.equal(product, x @ weight) and torch.equal(more, x + 1)
