"""A loop of one's own: docs/library.md on both engines and on two processes, and what it saves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pretraining import train
from pretraining.config.errors import UserError
from pretraining.tools.library import Training
from tests.processes import run_together

ROOT = Path(__file__).parents[2]
CODE = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL))
DEFINITIONS = CODE.partition("before, _ =")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the names of the page stand for after its code has run, in the folder `folder`."""
    names: dict[str, Any] = {"folder": tmp_path_factory.mktemp("page")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(names["folder"])
        exec(CODE, names)
    return names


def test_the_loop_of_the_page_has_the_losses_of_the_script_and_continues(page: dict[str, Any], tmp_path: Path) -> None:
    settings = {**page["settings"], "engine": "torch", "report_interval": 1, "log_dir": str(tmp_path)}
    assert {**page["before"], **page["after"]} == train(settings).losses
    assert list(page["before"]) == [*range(1, 9)] and list(page["after"]) == [*range(9, 13)]
    assert page["lowest"] == min({**page["before"], **page["after"]}.values())
    assert sorted(path.name for path in (page["folder"] / "checkpoints").iterdir()) == ["step_12", "step_8"]


def test_a_step_of_the_folder_is_loaded_and_an_empty_folder_holds_none(page: dict[str, Any], tmp_path: Path) -> None:
    folder = str(page["folder"] / "checkpoints")
    with Training({**page["settings"], "engine": "torch"}) as training:
        assert training.load(str(tmp_path)) is None
        assert training.load(folder, step=4) is None
        loaded = training.load(folder, step=8)
        assert loaded and loaded.step == 8
        assert training.train_step(9).read()["loss"] == page["after"][9]
        with pytest.raises(UserError, match="user_content of step 9 is no JSON value"):
            training.save(str(tmp_path), 9, user_content={"model": object()})


def losses_of(folder: Path, code: str, processes: int = 1) -> list[dict[int, float]]:
    """Return the losses that processes print which run the page's definitions and then `code` in `folder`."""
    program = f"import json\n{DEFINITIONS}\nprint(json.dumps({code}))"
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    results = run_together("-c", program, processes=processes, cwd=folder, **variables)
    assert [code for code, _ in results] == [0] * processes
    return [{int(step): loss for step, loss in json.loads(lines[-1]).items()} for _, lines in results]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_loop_runs_on_two_processes_and_its_checkpoint_continues_on_the_other_engine(
    page: dict[str, Any], tmp_path: Path
) -> None:
    for losses in losses_of(tmp_path, "run(8)[0]", processes=2):
        assert losses == pytest.approx(page["before"], rel=1e-5)
    pytest.importorskip("torch_xla")
    assert losses_of(tmp_path, "run(12, 'xla')[0]") == [pytest.approx(page["after"], rel=1e-5)]
