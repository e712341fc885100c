"""The walk-throughs of docs/journeys run from a fresh copy of the tree. The laptop's is the README (test_readme.py)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.data.corpora import write_lists, write_megatron
from tests.end_to_end.checkout import run
from tests.parallel.launch import needs
from tests.tools.importing.files import put, tree, write

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@needs("torch_xla", "jax", "libtpu")
def test_a_planner_finds_a_mesh_and_has_it_checked_by_the_compiler(checkout: Path) -> None:
    output = run("bash docs/journeys/planner.sh tiny v6e 2x2 --seq_length=128 --global_batch_size=16", checkout)
    ranking = output[output.index("== The meshes") : output.index("== The best mesh")]
    assert "configurations fit; the fastest:" in ranking
    assert "compiled       for v6e:2x2" in output[output.index("== The best mesh") :]


@pytest.mark.parametrize("kind", ["nxdt", "neox"])
def test_a_migrant_imports_plans_trains_and_exports(checkout: Path, tmp_path: Path, kind: str) -> None:
    file = tree(kind)
    if kind == "nxdt":  # what Neuron's users have: the script trains without tensor ranks and stages
        put(put(file, "distributed_strategy.tensor_model_parallel_size", 2), "model.num_kv_heads", 2)
        put(file, "distributed_strategy.pipeline_model_parallel_size", 2)
    path = write(tmp_path, file, f"{kind}.yaml")
    output = run(f"bash docs/journeys/migrant.sh {shlex.quote(path)} --vocab_size=128", checkout)
    assert "complete: 3 steps" in output
    exported = output[output.index("== Exported") :]
    assert "config.json" in exported
    assert "model.safetensors" in exported


def test_an_owner_of_data_trains_on_text_and_on_stores_of_others(checkout: Path, tmp_path: Path) -> None:
    documents = [[3 + (17 * place + number) % 1000 for place in range(40 + number)] for number in range(60)]
    write_lists(tmp_path / "lists" / "shard", documents)
    write_megatron(tmp_path / "megatron" / "shard", documents)
    stores = [f"--data_path={tmp_path}/{name} --sep_token=2" for name in ("lists", "megatron")]
    output = run(f"bash docs/journeys/data_owner.sh {shlex.join(stores)}", checkout)
    assert "In transformers" in output
    assert "complete: 20 steps" in output
    assert output.count("complete: 3 steps") == len(stores)


@needs("torch_xla", "plotly")
def test_a_benchmarker_compares_three_meshes_on_two_engines(checkout: Path) -> None:
    flags = "--num_steps=2 --num_layers=2 --seq_length=32 --global_batch_size=4 --batch_size=1"
    output = run(f"bash docs/journeys/benchmarker.sh {flags}", checkout)
    assert output.count("Benchmark summary") == output.count("complete: 2 steps") == 6
    losses = re.findall(r"step 2/2 .* loss +([\d.]+)", output)
    assert len(losses) == 6 and len(set(losses)) == 1
    (page,) = (checkout / "runs").glob("benchmark-*/report.html")
    assert "Speed: medians" in page.read_text()
