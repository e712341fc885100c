"""A step as one program: the losses of FSDP2's step, on any number of processes, and what it leaves to FSDP2."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

from pretraining.parallel.layout import torch_layout
from pretraining.parallel.mesh import resolve_mesh
from tests.parallel.launch import ALONE, run_on_torch
from tests.parallel.toy import ADAPTERS, DROPOUT, TOY, instruction_cases
from tests.selection import needs, runs_all

pytestmark = needs("one_program")
Fields = dict[str, Any]
RECOMPUTED: Fields = {"fsdp_activation_checkpointing": True, "num_steps": 4, "num_layers": 2}
FSDP: Fields = {"sharding_strategy": "fsdp"}
HSDP: Fields = {"sharding_strategy": "hsdp", "sharding_group_size": 2}
TIED: Fields = {"tie_word_embeddings": True, "qk_norm": True, "z_loss": 1e-2, "logit_softcap": 5.0}
# A kind of dropout takes 3 CPU s of tracing in each process
PACKED: Fields = DROPOUT if runs_all() else {"hidden_dropout": 0.1, "mlp_bias": True}
FORMS: dict[str, Fields] = {"plain": {}, "tied": TIED, "packed": PACKED, "adapters": ADAPTERS}
# Processes -> case -> its form, and its other fields
CASES: dict[int, dict[str, tuple[str, Fields]]] = {
    2: {
        "fsdp, accumulated": ("packed", {**FSDP, "batch_size": 2}),
        "ddp": ("tied", {"sharding_strategy": "ddp", "batch_size": 8}),
        "saved by FSDP2": ("plain", {**FSDP, "batch_size": 8, "one_program": "never"}),
        "taken up by one program": ("plain", {**FSDP, "batch_size": 8}),
    },
    4: {
        "fsdp": ("plain", {**FSDP, "batch_size": 4}),
        "hsdp, accumulated": ("tied", {**HSDP, "batch_size": 1}),
        "zero1, which FSDP2 runs": ("packed", {"sharding_strategy": "zero1", "batch_size": 2}),
    },
    1: {"adapters": ("adapters", {"batch_size": 16})},
}
if not runs_all():
    CASES = {2: CASES[2]}


@functools.cache
def outcomes(processes: int) -> dict[str, Any]:
    forms = {**FORMS, "packed": {**PACKED, **instruction_cases()["packed"]}}
    if processes == ALONE:
        used = {form for cases in CASES.values() for form, _ in cases.values()}
        return run_on_torch(ALONE, {form: {**RECOMPUTED, **forms[form]} for form in used})
    cases = {
        case: {"one_program": "always", **RECOMPUTED, **forms[form], **fields}
        for case, (form, fields) in CASES[processes].items()
    }
    folder = tempfile.mkdtemp()
    for case in ("saved by FSDP2", "taken up by one program"):
        if case in cases:
            cases[case]["halfway"] = f"{folder}/run"
    return run_on_torch(processes, cases)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "case"), [(count, case) for count, cases in CASES.items() for case in cases])
def test_the_losses_are_those_of_one_process_with_fsdp2(processes: int, case: str) -> None:
    form, _ = CASES[processes][case]
    reference, got = outcomes(ALONE)[form], outcomes(processes)[case]
    for figure in ("loss", "grad_norm", "evaluation"):
        assert got[figure] == pytest.approx(reference[figure], rel=1e-5), figure


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        (HSDP, ""),
        ({"sharding_strategy": "ddp"}, ""),
        ({"sharding_strategy": "zero1"}, "zero1 keeps gathered parameters"),
        ({"selective_checkpointing": "1/2"}, "not every block is recomputed"),
        ({"fsdp_activation_checkpointing": False}, "not every block is recomputed"),
        ({"checkpoint_num_layers": 2}, "not every block is recomputed by itself"),
        ({"save_attention": True}, "save_attention"),
        ({"tensor_parallel_size": 2}, "tensor or context ranks"),
        ({"cpu_offload": True}, "cpu_offload"),
        ({"vocab_size": 511}, "cannot be divided by 4 processes"),
        ({"optimizer": "muon"}, "muon reads whole matrices"),
    ],
)
def test_what_one_program_does_not_run_has_a_reason(fields: Fields, reason: str) -> None:
    from main_training import CONFIGURATION
    from pretraining.extensions.one_program.engine import obstacle

    config = CONFIGURATION(**{**TOY, **RECOMPUTED, **FSDP, **fields})
    found = obstacle(config, torch_layout(config, resolve_mesh(config, 4, 4)))
    assert (reason in found) if reason else not found


def test_the_gradient_of_a_lookup_is_that_of_a_lookup_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretraining.extensions.one_program import gathering
    from pretraining.models.llama import Embedding

    monkeypatch.setattr(gathering, "COLUMNS", 3)
    model, tokens = Embedding.from_pretrained(torch.randn(5, 8), freeze=False), torch.tensor([[1, 4] + [2] * 1024])
    plain = Embedding.from_pretrained(model.weight.bfloat16().float(), freeze=False)
    weight, towards = model.weight, torch.randn(*tokens.shape, 8)
    gathering.gather_on_access(model, gathering.Ranks(None, None, torch.bfloat16, torch.float32))
    for module in (model, plain):
        (module(tokens) * towards).sum().backward()
    assert model(tokens).equal(plain(tokens)) and weight.grad.equal(plain.weight.grad)


def test_a_loop_over_flipped_tensors_runs_in_reverse_instead() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from pretraining.extensions.one_program.blocks import scan
    from pretraining.extensions.one_program.tpu import run_in_reverse

    def add(total: Tensor, x: Tensor) -> list[Tensor]:
        return [total + x, total * x]

    def loops(x: Tensor) -> list[Tensor]:
        first = scan(add, x[0], [x], [])
        return [*first, *scan(add, first[0], [first[1]], [], reverse=True)]

    x = torch.arange(6.0).view(3, 2)
    graph = make_fx(loops, tracing_mode="fake")(x)
    total, products, last, results = graph(x)
    assert total.equal(x[0] + x.sum(0)) and last.equal(total + products.sum(0))
    assert results[2].equal(total * products[2]) and results[0].equal((last - products[0]) * products[0])
    run_in_reverse(graph, "mark")
    forward, backward = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert backward.args[2] == [node for node in forward.users if node.args[1] == 1]
    bodies: list[Any] = [graph.get_submodule(loop.args[0].target) for loop in (forward, backward)]
    marked = [{bool(node.meta.get("custom")) for node in body.graph.nodes} for body in bodies]
    assert marked == [{False}, {True}]
    (output,) = graph.graph.find_nodes(op="output")
    assert output.args[0][3].args[0] is backward
