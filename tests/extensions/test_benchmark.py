"""The summary of a benchmark, how often it reports, and the folder that it gets."""

from __future__ import annotations

import re
from typing import Any

import pytest

from main_training import CONFIGURATION, train
from pretraining.config.variants import VARIANTS, model_shape
from pretraining.extensions.benchmark.watch import summary
from pretraining.extensions.devices import kind_of
from pretraining.extensions.flops import Meter, flops_per_token
from tests.end_to_end.small import MODEL
from tests.selection import needs

DUMMY: dict[str, Any] = {"use_dummy_dataset": True, "model_variant": "tiny", "seq_length": 16, "engine": "torch"}
SMALL: dict[str, Any] = {**MODEL, "seq_length": 16, "use_dummy_dataset": True, "engine": "torch", "device": "cpu"}


def meter(device: str) -> Meter:
    return Meter(4096, 8, flops_per_token(VARIANTS["llama3_194m_4k"], 512), kind_of(device))


def test_the_summary_has_percentiles_of_the_steps_that_did_not_compile() -> None:
    text = summary(meter("NVIDIA H200"), [2.0, 90.0, 1.0], 7 * 2**30, 12.0, compiles=True)
    assert re.search(r"step time +2 s \(p10 1, p90 90\) over 3 reports", text)
    assert "2,048 on 8 devices" in text
    assert "256\n" in text
    assert "10.0 s (first step 12.0 s)" in text
    assert "7.00 GiB of 140.00 GiB, 5.0%" in text
    assert "989.50 TFLOP/s, H200 SXM" in text
    flops = meter("CPU").flops
    assert f"{256 * flops.full / 1e12:.4g} ({256 * flops.causal / 1e12:.4g} causal)" in text


def test_the_summary_says_n_a_for_what_nobody_knows_and_invents_nothing() -> None:
    text = summary(meter("CPU"), [2.0], None, 12.0, compiles=False)
    assert text.count("n/a") == 3  # both MFUs and the memory
    assert "compile time      none (first step 12.0 s)" in text
    single = summary(meter("NVIDIA H200"), [], None, 12.0, compiles=True)
    assert "n/a (no step after the first)" in single and "tokens/s" not in single


@needs("mfu")
def test_a_peak_that_is_given_makes_an_mfu_and_is_named(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = train({**SMALL, "num_steps": 21, "peak_tflops": 0.5, "log_dir": str(tmp_path)})
    printed = capsys.readouterr().out
    reports = [record for record in result.records if "mfu" in record]
    assert [record["step"] for record in reports] == [1, *range(2, 21, 2), 21]
    flops = flops_per_token(model_shape(result.config), 16).full
    for record in reports:
        assert record["mfu"] == pytest.approx(record["tokens_per_second_per_device"] * flops / 0.5e12)
    assert "of 500.00 GFLOP/s, --peak_tflops" in printed and "over 11 reports" in printed
    assert "compiling" not in printed  # the torch engine compiles nothing on CPUs
    assert "compile time      none" in printed and "compilation included" not in printed
    assert re.search(r"step  1/21 .* ETA n/a", printed)
    assert "complete: 21 steps\n" in printed  # a run without data is never continued


def test_benchmarks_that_differ_have_folders_of_their_own_and_a_run_keeps_its_own() -> None:
    changes: list[dict[str, Any]] = [{}, {"engine": "xla"}, {"batch_size": 4}, {"sharding_strategy": "ddp"}]
    names = {CONFIGURATION(**{**DUMMY, **change}).default_run_name for change in changes}
    assert len(names) == len(changes)
    runs = [CONFIGURATION(model_variant="tiny", engine=engine) for engine in ("torch", "xla")]
    assert len({run.default_run_name for run in runs}) == 1  # either engine continues it
