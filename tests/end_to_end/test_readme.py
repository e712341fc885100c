"""The commands of the README do what it says. Its second one, scripts/test.sh, runs this test."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from tests.end_to_end.checkout import run
from tests.end_to_end.small import ROOT, figures

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
ITSELF = "bash scripts/test.sh"


def commands() -> list[str]:
    """Return every line of the shell blocks of the README, without its comment."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def shown_lines() -> list[str]:
    """Return the lines that the README shows of the quickstart, up to the sample of the model."""
    (block,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for line in block.partition("\n\n")[0].splitlines() if line != "..."]


def without_numbers(line: str) -> str:
    """Return the words of a line: numbers, their units and the spaces differ from run to run."""
    return re.sub(r"(\d[\d.,e+-]*|nan)(ms|m|s|h)?(\d+s)?", "#", " ".join(line.split()))


def test_every_command_of_the_readme_succeeds_and_the_quickstart_learns(checkout: Path) -> None:
    pytest.importorskip("torch_xla", reason="the settings of scripts/train.sh are for the xla engine")
    listed = commands()
    assert ITSELF in listed
    outputs = {command: run(command, checkout) for command in listed if command != ITSELF}
    quickstart = outputs["bash scripts/train.sh"]
    if "engine: xla on CPU" in quickstart:  # the README shows a host without accelerator
        printed = {without_numbers(line) for line in quickstart.splitlines()}
        assert {without_numbers(line) for line in shown_lines()} <= printed
    lines = figures(checkout / "runs" / "quickstart")
    last = max(step for step, _ in lines)
    reached = statistics.mean(
        lines[step, "loss"]["loss"] for step in range(last - 9, last + 1)
    )  # batches differ by 0.3
    assert reached < lines[1, "loss"]["loss"] - 4.0  # nats
    assert lines[last, "val_loss"]["val_loss"] == pytest.approx(reached, abs=1.0)
    for what in ("metrics.jsonl", "checkpoints", "pretraining.tools.report", "def main("):  # the last is the sample
        assert what in quickstart.partition("complete:")[2]
    assert "complete:" in run("bash scripts/train.sh", checkout)
    (sample,) = (text for command, text in outputs.items() if "generate runs/mine" in command)
    assert "The " in sample
    assert any("Benchmark summary" in text and "tokens/s" in text for text in outputs.values())
    settings = checkout / "pretraining" / "config" / "settings.py"  # the second way to use it
    source = settings.read_text()
    edited = re.sub(r"(    num_steps: .* = )1_000_000\n", r"\g<1>2\n", source)
    assert edited != source
    settings.write_text(edited)
    dummy = "--use_dummy_dataset --model_variant=tiny --seq_length=64 --batch_size=1 --engine=torch --device=cpu"
    assert "complete: 2 steps" in run(f".venv/bin/python main_training.py {dummy} --mixed_precision=False", checkout)
    settings.write_text(source)
