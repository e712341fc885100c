"""The values of a run come from flags and files: what a person types, and what is printed before a device is opened."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from main_training import CHECKS, CONFIGURATION, main, train
from pretraining.config.errors import UserError
from pretraining.config.flags import run
from pretraining.run.configure import describe_settings
from tests.selection import needs
from tests.tools.importing.files import LLAMA, put, tree, write

Typed = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in Hugging Face's format, as far as settings are concerned."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Returns what `python main_training.py --import_only` and further words print."""

    def type_in(*words: str, code: int = 0) -> str:
        assert run(main, ["--import_only", *words], CHECKS, configuration=CONFIGURATION) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return type_in


def settings(printed: str) -> dict[str, str]:
    """Return the settings in the output, which are those that are not the default."""
    lines = [line.strip() for line in printed.splitlines()]
    return dict(line.removeprefix("--").split("=", 1) for line in lines if line.startswith("--"))


@needs("huggingface")
@pytest.mark.parametrize("flag", ["ckpt_load_path", "model_config_path"])
def test_a_hugging_face_folder_alone_gives_the_dimensions(
    flag: str, folder: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        "model_variant": "custom",
        "vocab_size": "90",
        "hidden_size": "32",
        "num_layers": "3",
        "num_attention_heads": "4",
        "num_kv_heads": "2",
        "intermediate_size": "48",
        "max_position_embeddings": "64",
        "seq_length": "64",
        "norm_eps": "1e-06",
        "rope_theta": "10000.0",
    }
    named = f"--{flag}={folder}"
    assert settings(printed := typed(named)).items() >= expected.items()
    assert "note:" not in printed
    # The variant of scripts/train.sh, which the user did not name, does not count
    monkeypatch.setenv("SCRIPT_SETTINGS", "--model_variant=tiny")
    assert settings(typed("--model_variant=tiny", named)).items() >= expected.items()


@needs("huggingface")
def test_flags_win_over_a_hugging_face_folder_and_each_difference_is_printed(folder: Path, typed: Typed) -> None:
    printed = typed(f"--ckpt_load_path={folder}", "--num_layers=2", "--norm_eps=1e-5", "--hidden_size=32")
    notes = [line for line in printed.splitlines() if line.startswith("note:")]
    assert notes == [
        f"note: --norm_eps=1e-5: replaces rms_norm_eps=1e-06 in {folder}/config.json",
        f"note: --num_layers=2: replaces num_hidden_layers=3 in {folder}/config.json",
    ]
    assert settings(printed)["num_layers"] == "2"
    printed = typed(f"--ckpt_load_path={folder}", "--model_variant=tiny", "--vocab_size=90")
    assert settings(printed).keys() & {"hidden_size", "num_layers", "vocab_size"} == {"vocab_size"}
    assert f"note: --model_variant=tiny: has num_layers=6 instead of num_hidden_layers=3 in {folder}" in printed
    assert "vocab_size=4096" not in printed


@needs("huggingface")
def test_a_folder_that_this_recipe_cannot_follow_is_refused_and_that_of_a_run_says_nothing_of_the_model(
    folder: Path, typed: Typed
) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "made_by": "x"}))
    note = f"note: {folder}/config.json: not read, as in transformers: made_by"
    assert note in typed(f"--ckpt_load_path={folder}")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gemma"}))
    assert "config.json: model_type=gemma" in typed(f"--ckpt_load_path={folder}", code=2)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))  # a run's
    assert settings(typed(f"--ckpt_load_path={folder}")).keys() == {"ckpt_load_path"}


@pytest.mark.parametrize(("name", "text"), [("a.toml", "[model]\n{} = {}"), ("a.yaml", "model:\n  {}: {}")])
def test_a_section_in_a_configuration_file_is_explained(name: str, text: str, tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / name
    path.write_text(text.format("num_layers", 2))
    error = typed(f"--config_file={path}", code=2)
    assert f"[model] in {path}  is a section, and settings have none: remove this line, and keep num_layers" in error
    assert error.startswith("1 problem ")
    path.write_text(text.format("num_layer", 2))  # what is wrong in a section is reported, too
    assert f"did you mean --num_layers? [from num_layer=2 in {path}]" in typed(f"--config_file={path}", code=2)


def test_a_mistake_in_a_configuration_file_names_the_file(tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / "own.toml"
    path.write_text('seed = 5\nbatch_size = "two"\nnum_attention_heads = 5')
    error = typed(f"--config_file={path}", "--hidden_size=64", code=2)
    assert f"[from batch_size=two in {path}]" in error
    assert f"[from num_attention_heads=5 in {path}]" in error
    path.write_text("seed = 5")
    assert f"note: --seed=6: replaces seed=5 in {path}\n" in typed(f"--config_file={path}", "--seed=6")
    other = path.rename(tmp_path / "own.conf")
    for text, fault in (("seed = 5", "has no keys"), ("[model]\nnum_layers = 2", "cannot be read")):
        other.write_text(text)
        error = typed(f"--config_file={other}", code=2)
        assert f"{other}: {fault} as YAML (the name of a TOML file ends in .toml, of a JSON file in .json)" in error


def test_a_notebook_prints_the_message_of_a_mistake_and_no_traceback() -> None:
    with pytest.raises(UserError) as mistake:
        train({"num_layer": 2})
    lines = mistake.value._render_traceback_()  # which IPython calls
    assert lines[0].startswith("ConfigError: 1 problem with") and "did you mean --num_layers?" in lines[1]
    assert len(lines) == 2


def test_an_import_report_begins_with_what_is_unsupported_and_what_is_different(tmp_path: Path, typed: Typed) -> None:
    path = write(tmp_path, put(tree("nxdt"), "model.unheard", 1))
    printed = typed(f"--import_config={path}", "--vocab_size=100", "--import_strict=False")
    lines = printed.partition("Settings that differ")[0].splitlines()
    assert (lines[0], lines[1]) == ("Imported from NxD Training", "Unsupported:")
    assert "model.unheard=1" in lines[2]
    order = [re.findall(r" {2}(unsupported|different|implied|mapped|ignored)(?: |$)", line)[:1] for line in lines]
    places = [{"unsupported": 0, "different": 1, "implied": 2}.get(status[0], 3) for status in order if status]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}


def test_a_long_value_does_not_push_the_origins_of_all_others_away() -> None:
    # PEFT writes the path of every projection into an adapter, 30 characters for each of a model's hundreds
    flags = {"tokenizer_path": "x" * 200, "seq_length": 64}
    lines = describe_settings(CONFIGURATION(**flags), flags, {}, "command line")
    assert f"--tokenizer_path={'x' * 200}  command line" in lines
    assert "--seq_length=64".ljust(80) + "  command line" in lines
