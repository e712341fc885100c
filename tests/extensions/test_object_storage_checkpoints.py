"""Checkpoints on a real S3 server: committed or invisible, whatever happens to the requests."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.checkpoint.checkpoints import SaveFailedError
from pretraining.checkpoint.folder import find_checkpoints
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.config.errors import UserError
from pretraining.extensions.checkpoints import newest_checkpoint, read_tensors
from pretraining.extensions.object_storage import objects
from pretraining.storage import location
from tests.checkpoint.small_run import small_config, train
from tests.end_to_end import small
from tests.object_storage import FaultProxy
from tests.selection import needs


def run(folder: Path, **fields: Any) -> dict[int, float]:
    """The losses of the steps that this run did."""
    losses: dict[int, float] = {}
    train(small_config(folder, **fields), losses.__setitem__)
    return losses


@needs("other_weights")
@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "there"), [("proxy", "s3://bucket/run"), ("google", "gs://bucket/run")])
def test_a_run_saves_to_object_storage_keeps_the_newest_and_continues(
    tmp_path: Path, fixture: str, there: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(fixture)
    expected = run(tmp_path / "local")
    remote = {"ckpt_save_path": there, "keep_last_n_checkpoints": 2}
    assert run(tmp_path / "a", num_steps=4, **remote) == {step: expected[step] for step in range(1, 5)}
    assert run(tmp_path / "a", **remote) == {step: expected[step] for step in range(5, 9)}
    folder = location(there)
    assert [path.name for path in find_checkpoints(folder).committed] == ["step_8", "step_6"]
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "step_6", "step_8"]
    found = find_checkpoints(folder)
    assert pickle.loads(pickle.dumps(found)) == found  # process 0 sends it to the others
    saved, stored = (read_tensors(newest_checkpoint(path)) for path in (tmp_path / "local", folder))
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in saved)
    convert = pytest.importorskip("pretraining.tools.convert.convert").main
    assert convert([there, str(tmp_path / "exported")]) == 0
    assert run(tmp_path / "b", num_steps=2, ckpt_load_path=f"{there}/step_6", load_weights_only=True)


@pytest.mark.slow
def test_a_save_that_ends_at_any_request_leaves_nothing_that_is_read(tmp_path: Path, proxy: FaultProxy) -> None:
    expected = run(tmp_path / "local", num_steps=4)
    run(tmp_path / "count", ckpt_save_path="s3://bucket/count", num_steps=4)
    count = len(proxy.requests)
    for last in range(6, count, max(1, count // 5)):
        first, name = len(proxy.requests), f"s3://bucket/killed-{last}"
        proxy.plan = lambda number, method, path, end=first + last: "403" if number >= end else ""  # type: ignore[misc]
        with pytest.raises((SaveFailedError, UserError)):
            run(tmp_path / name[5:], ckpt_save_path=name, ckpt_max_failures=1, num_steps=4)
        proxy.plan = lambda number, method, path: ""
        for path in find_checkpoints(location(name)).committed:
            open_checkpoint(path)
        losses = run(tmp_path / name[5:], ckpt_save_path=name, num_steps=4)
        assert losses == {step: expected[step] for step in losses}
        assert not find_checkpoints(location(name)).uncommitted


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "503"])
def test_a_save_survives_passing_network_errors_which_the_reports_count(
    tmp_path: Path, proxy: FaultProxy, fault: str
) -> None:
    proxy.plan = lambda number, method, path: fault if number % 9 == 4 else ""
    there = f"s3://bucket/passing-{fault}"
    small.train(tmp_path / "a", num_steps=3, checkpoint_interval=1, ckpt_save_path=there)
    assert len(find_checkpoints(location(there)).committed) == 3
    assert fault == "cut" or small.reports(tmp_path / "a")[3]["storage_retries"] > 0  # the client repeats a cut one


def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_it_is_taken(tmp_path: Path, proxy: FaultProxy) -> None:
    remote = {"ckpt_save_path": "s3://bucket/corrupt"}
    losses = run(tmp_path / "a", **remote)
    facts = location("s3://bucket/corrupt/step_8/facts.json")
    facts.write_bytes(facts.read_bytes().replace(b"plain", b"PLAIN"))
    assert run(tmp_path / "a", **remote) == {step: losses[step] for step in (7, 8)}


def test_storage_that_cannot_be_reached_is_no_corrupt_checkpoint(
    tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = {"ckpt_save_path": "s3://bucket/unreachable"}
    run(tmp_path / "a", num_steps=4, **remote)
    monkeypatch.setattr(objects, "RETRY_FOR", 0.3)
    proxy.plan = lambda number, method, path: "503" if path.endswith("manifest.json") else ""
    with pytest.raises(UserError, match=r"s3://bucket/unreachable/step_4/manifest.json: cannot be reached"):
        run(tmp_path / "a", **remote)
    proxy.plan = lambda number, method, path: ""
    assert len(find_checkpoints(location("s3://bucket/unreachable")).committed) == 2
