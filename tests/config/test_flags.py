"""The command line: every trap of fire is a promise kept here."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from main_training import CHECKS, CONFIGURATION, configure
from pretraining.config.declaration import COMMON, parse_value, settings_of
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.flags import read, run
from pretraining.config.grammar import path_fault
from pretraining.config.script import exit_with, refusal
from pretraining.config.validate import problems
from pretraining.config.variants import VARIANTS
from pretraining.storage import StorageError
from tests.processes import call
from tests.selection import needs

SETTINGS = settings_of(CONFIGURATION)

ROOT = Path(__file__).parents[2]
DUMMY = "--use_dummy_dataset"


def parse(*words: str) -> Any:
    """What `main` sees of a command line, through fire itself."""
    seen: list[Any] = []

    def main(**flags: str) -> None:
        seen.append(configure(flags))

    assert run(main, words, configuration=CONFIGURATION) == 0
    return seen[0]


def configured(**flags: str) -> None:
    """A program that does nothing else."""
    configure(flags)


def complaints(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What stderr says to a command line that is wrong."""
    assert run(configured, words, configuration=CONFIGURATION) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "Traceback" not in said.err
    return said.err


# ---- what is accepted


ACCEPTED: list[tuple[str, dict[str, Any]]] = [  # a command line -> fields
    *((words, {"batch_size": 4}) for words in ("--batch_size=4", "--batch_size 4", "--batch-size=4", "--batch-size 4")),
    *((f"--low_cpu_fsdp{text}", {"low_cpu_fsdp": True}) for text in ("", "=True", "=true", "=1")),
    *((f"--{text}", {"use_torch_compile": False}) for text in ("nouse_torch_compile", "no-use-torch-compile")),
    *((f"--{text}", {"use_torch_compile": False}) for text in ("no_use_torch_compile", "use_torch_compile=false")),
    ("--low_cpu_fsdp --batch_size 3", {"low_cpu_fsdp": True, "batch_size": 3}),  # no value of the first flag
    *((f"--run_name={text}", {"run_name": text}) for text in ("2026_08_01", "1e5", "1_000", "abc#1", "a=b", "None")),
    *((f"--run_name={text}", {"run_name": text}) for text in ("True", "[1]", "a,b", "-", "")),
    ("--norm_eps=1e-6 --norm_weight_decay", {"norm_eps": 1e-6, "norm_weight_decay": True}),  # "no" is no negation here
    *((f"--num_layers={text}", {"num_layers": value}) for text, value in (("none", None), ("None", None), ("4", 4))),
    ("--rope_theta=5e5", {"rope_theta": 500000.0}),
    *((f"--num_steps={text}", {"num_steps": 100_000}) for text in ("100000", "1e5", "100_000", "100000.0")),
    ("--sharding_strategy=FSDP", {"sharding_strategy": "fsdp"}),
    ("--checkpoint_interval 0 --log_dir -1", {"log_dir": "-1"}),
]


@pytest.mark.parametrize(("line", "fields"), ACCEPTED)
def test_flags_are_read_as_people_write_them(line: str, fields: dict[str, Any]) -> None:
    config = parse(DUMMY, *line.split(" "))
    read = {name: getattr(config, name) for name in fields}
    assert read == fields and [*map(type, read.values())] == [*map(type, fields.values())]


def test_the_rank_that_torch_distributed_launch_passes_is_that_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read(["--local-rank=1", "--local_rank=1", "--seed=3"], CONFIGURATION) == ({"seed": "3"}, [], [])
    assert read(["--local_rank=0"], CONFIGURATION).problems


@needs("trackers")
@settings(max_examples=30)  # of 50 ms: every one is parsed by fire and checked as a run
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")).filter(lambda text: not path_fault(text, True)))
def test_any_text_that_is_no_wrong_path_reaches_the_field_unchanged(text: str) -> None:
    assert parse(DUMMY, f"--tracker_project_name={text}").tracker_project_name == text


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives(number: int | float) -> None:
    assert parse_value(repr(number), type(number)) == number


@given(st.text(), st.sampled_from([int, float, bool]))
def test_reading_a_value_gives_its_type_or_a_value_error(text: str, kind: type) -> None:
    with suppress(ValueError):
        assert type(parse_value(text, kind)) is kind


def test_python_values_mean_what_their_text_means() -> None:
    config = configure({"use_dummy_dataset": True, "datasets": ("a", "b"), "num_layers": None, "seed": 3})
    assert (config.datasets, config.num_layers, config.seed) == ("a,b", None, 3)
    for name, value, expected in (("seed", [3], "whole number"), ("run_name", None, "text; leave it out")):
        with pytest.raises(ConfigError, match=rf"--{name}={re.escape(str(value))} .*expected a? ?{expected}"):
            configure({"use_dummy_dataset": True, name: value})
    settings: dict[str, Any] = {"datasets": "a,b", "weights": "1,2", "sharding_strategy": "HSDP"}
    assert (CONFIGURATION(**settings).datasets, CONFIGURATION(**settings).sharding_strategy) == ("a,b", "hsdp")


def test_the_last_of_a_repeated_flag_wins_with_a_note_naming_both(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(DUMMY, "--batch_size=4", "--batch-size", "8", "--low_cpu_fsdp", "--nolow_cpu_fsdp")
    assert (config.batch_size, config.low_cpu_fsdp) == (8, False)
    notes = capsys.readouterr().err
    assert "--batch_size=4 is overridden by the later --batch_size=8" in notes
    assert "--low_cpu_fsdp=True is overridden by the later --low_cpu_fsdp=False" in notes
    parse(DUMMY, "--batch_size=4", "--batch_size=4")  # the same value needs no note
    assert not capsys.readouterr().err


SECRET = "s3://KEY:SEC/RET@bucket"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("data_path", [SECRET, "s3://KEY:SECRET2@bucket"]),  # the note about a repeated flag, and the refusal
        ("data_path", [f"{SECRET}/a?token=SECRET"]),
        ("eval_tasks", [f"a.jsonl,{SECRET}"]),  # a list of paths: no setting of its own, and printed as it stands
        *((name, [SECRET]) for name in ("batch_sise", "batch_size", "file_type", "config_file", "import_config")),
        *((name, [SECRET]) for name in ("model_config_path", "ckpt_load_path")),
    ],
)
def test_a_secret_in_a_flag_is_never_printed(name: str, values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(configured, [DUMMY, *(f"--{name}={value}" for value in values)])
    printed = "".join(capsys.readouterr())
    assert "***@bucket" in printed and not re.search("SEC|RET", printed)


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp/x", "..", ".", "a\nb"])
def test_the_name_of_a_run_is_one_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a name without a slash, .*; --log_dir may be any folder"):
        configure({"use_dummy_dataset": True, "run_name": name})


# ---- what is refused


MEANT = {"lr": "learning_rate", "learningrate": "learning_rate", "max-grad-norm": "grad_clip_thresh"}
MEANT |= {"save_steps": "checkpoint_interval", "gbs": "global_batch_size", "num_step": "num_steps"}
MEANT |= {"tensor_parallel": "tensor_parallel_size", "num_heads": "num_attention_heads or --num_kv_heads"}
MEANT |= {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp_size": "context_parallel_size"}
MEANT |= {"betas": "adam_beta1 or --adam_beta2", "dropout": "hidden_dropout or --attention_dropout"}
REFUSED: list[tuple[str, str]] = [  # a command line, and what is said of it
    ("--batch_sise=4", "--batch_sise=4  no such flag; did you mean --batch_size"),
    ("--batch_sise 4", "--batch_sise=4  no such flag; did you mean --batch_size"),
    ("--Batch_Size=4", "did you mean --batch_size"),
    ("--zzzz", "--zzzz  no such flag; --help lists them all"),
    *((f"--{name} 1", f"--{name}=1  no such flag; did you mean --{meant}?\n") for name, meant in MEANT.items()),
    *((line, "no such flag") for line in ("--=3", "--self=1", "--nolow_cpu_fsdp=True")),
    ("--nobatch_size", "no such flag; did you mean --batch_size"),
    ("--batch_size=two", "--batch_size=two  expected a whole number, such as 2"),
    *((f"--batch_size={text}", "expected a whole number") for text in ("2.5", "", "True")),
    ("--batch_size", "--batch_size  needs a value"),
    (f"--run_name {DUMMY}", "--run_name  needs a value"),
    ("--num_layers=few", "expected a whole number or none"),
    *((f"--learning_rate={text}", "expected a number") for text in ("nan", "1e999")),
    ("--low_cpu_fsdp=maybe", "expected True or False"),
    ("--low_cpu_fsdp 3.5", "--low_cpu_fsdp=3.5  expected True or False"),
    ("-b 3", "-b 3  has a single dash"),
    ("-batch_size=3", "did you mean --batch_size"),
    ("train", "train  belongs to no flag"),
    ("--", "belongs to no flag"),
    ("-- --trace", "--trace"),
    ("--batch_size=4 5", "5  belongs to no flag"),
    ("--model_variant=llama3-8b", "; did you mean llama3_8b?"),
    ("--optimizer=adam_w", "; did you mean adamw?"),
]


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_what_is_no_flag_or_no_value_of_its_type_is_refused(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert said in complaints(capsys, *line.split(" "), DUMMY)


def test_a_mistake_and_its_consequences_are_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaints(capsys, "--data_pth=x").startswith("1 problem ")
    assert complaints(capsys, DUMMY, "--model_variant=tiny", "--seq_length=two").startswith("1 problem ")
    assert complaints(capsys, DUMMY, "--num_kv_heads=0").startswith("1 problem ")


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.sampled_from(["--batch_size", "--low_cpu_fsdp", "--nolow_cpu_fsdp", "--x", "--", "-b", "3", "a=b"])))
def test_every_word_is_a_flag_or_a_problem(words: list[str]) -> None:
    line = read(words, CONFIGURATION)
    assert line.flags.keys() <= SETTINGS.keys()
    told = " ".join([*line.flags, *line.flags.values(), *line.notes, *(problem.subject for problem in line.problems)])
    assert all(word.replace("--no", "").strip("-") in told for word in words)


def test_all_mistakes_are_listed_at_once_before_torch_is_imported(tmp_path: Path) -> None:
    for package in ("torch", "numpy", "pyarrow"):
        (tmp_path / f"{package}.py").write_text(f"raise SystemExit('{package} was imported')")
    words = ["--batch_sise=4", "--num_heads=7", "--sharding_strategy=foo", "--seq_length=two"]
    ended = call([sys.executable, "main_training.py", *words], code=2, env={"PYTHONPATH": str(tmp_path)})
    first, *lines = ended.stderr.splitlines()
    assert (first, ended.stdout) == ("4 problems with the configuration:", "")
    assert sorted(line.split()[0] for line in lines) == sorted(words)
    assert "did you mean --batch_size" in ended.stderr


# ---- how it ends


def test_help_shows_the_common_settings_or_those_with_a_word_and_trains_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(**_: str) -> None:
        raise AssertionError("--help must not start anything")

    def page(*words: str) -> set[str]:
        assert run(main, words, configuration=CONFIGURATION) == 0
        return {
            line.strip().partition("=")[0][2:]
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("  --")
        }

    common = {name for name, setting in SETTINGS.items() if COMMON in setting.traits}
    assert 25 < len(common) < 40
    for words in (["--help"], ["-h"], ["--batch_size=4", "--help"], ["--batch_sise=4", "--help"]):
        assert page(*words) == common
    assert page("--help=all") == SETTINGS.keys()
    assert page("--help=topology") == {"plan_devices", "plan_compile", "plan_topology"}
    assert page("--help=rotary-percentage") == {"rotary_percentage"}
    assert page("--help=no such word") == set()


@pytest.mark.parametrize("code", [0, 3, 143])
def test_the_code_of_main_is_the_code_of_the_process_which_each_rank_leaves_in_a_file(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXIT_CODES", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    assert run(lambda **_: code, [DUMMY]) == code
    assert not capsys.readouterr().out  # fire would print it
    assert (tmp_path / "1").read_text() == str(code)


def test_a_mistake_found_later_ends_the_same_way_and_our_own_keep_their_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(**flags: str) -> None:
        raise UserError("/data/igloo: no such folder") if "seed" in flags else ValueError("ours")  # no error of gloo

    assert run(main, [DUMMY, "--seed=1"]) == 2
    assert capsys.readouterr().err == "/data/igloo: no such folder\n"
    with pytest.raises(ValueError, match="ours"):
        run(main, [DUMMY])


def test_only_the_first_rank_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not complaints(capsys, "--batch_sise=4")
    monkeypatch.setenv("RANK", "0")
    assert complaints(capsys, "--batch_sise=4")


def test_an_edited_default_of_another_type_is_one_problem() -> None:
    edited: dict[str, Any] = {"learning_rate": "1e-4", "num_steps": 10.0, "seed": None, "log_grad_norm": "yes"}
    found = problems(CONFIGURATION(**edited, use_dummy_dataset=True), CHECKS)
    assert [problem.subject for problem in found] == [f"--{name}={value}" for name, value in edited.items()]
    assert found[0].remedy == "expected a number or none, not the str '1e-4'"


@pytest.mark.parametrize("variant", ["tiny", "llama2_34b", "custom"])
def test_a_variant_brings_its_own_sequence_length(variant: str) -> None:
    longest = VARIANTS[variant].max_position_embeddings if variant in VARIANTS else 4096
    assert CONFIGURATION(model_variant=variant).seq_length == min(longest, 4096)
    assert CONFIGURATION(model_variant=variant, max_position_embeddings=100).seq_length == 100
    assert CONFIGURATION(model_variant=variant, seq_length=7).seq_length == 7


TOOLS = ("document", "generate", "inspect_data", "report")
SCRIPTS = ["main_training.py", *(f"-m pretraining.tools.{name}" for name in TOOLS)]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reader_that_closes_the_pipe_ends_the_script_without_traceback(script: str) -> None:
    words = [] if "document" in script else ["--help"]
    command = [sys.executable, *script.split(), *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


def test_a_script_whose_streams_were_closed_gives_their_numbers_to_no_other_file() -> None:
    code = "import os; from pretraining.config.script import exit_with; " \
           "exit_with(lambda: print('text') or os.open('.', os.O_RDONLY) <= 2)"  # fmt: skip
    for closed in ("<&- >&- 2>&-", ">&-", "2>&-"):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, closed


def interrupted() -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("main", "code"), [(lambda: 3, 3), (interrupted, 128 + signal.SIGINT)])
def test_a_script_ends_with_its_code_in_a_notebook_whose_streams_are_its_own_and_after_ctrl_c(
    main: Any, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):  # ipykernel's have no encoding, and no reconfigure
        monkeypatch.setattr(sys, name, io.StringIO())
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # exit_with sets it
    with pytest.raises(SystemExit) as ended:
        exit_with(main)
    assert ended.value.code == code


def test_a_full_disk_has_the_documented_code_where_no_message_can_be_written_either() -> None:
    code = "from pretraining.config.script import exit_with; exit_with(lambda: print('text'))"
    for streams, told in ((">/dev/full", "the output cannot be written: "), (">/dev/full 2>&1", "")):
        command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", code]
        assert call(command, code=2).stderr.startswith(told), streams


def test_a_user_without_a_name_has_a_number() -> None:
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    code = "import getpass as a; from pretraining.config.script import exit_with; exit_with(lambda: print(a.getuser()))"
    assert call([sys.executable, "-c", code], env=environment).stdout == f"{os.getuid()}\n"


def test_development_mode_shows_where_an_error_of_the_system_was_raised() -> None:
    code = "from pretraining.config.script import exit_with; exit_with(lambda: open('nowhere'))"
    assert "lambda" in call([sys.executable, "-X", "dev", "-c", code], code=1).stderr
    assert call([sys.executable, "-c", code], code=2).stderr.startswith("nowhere: No such file or directory")


def test_an_error_of_the_system_is_named_by_its_file_and_the_program_s_own_by_its_words() -> None:
    assert refusal(FileNotFoundError(2, "No such file or directory", "a/b")) == "a/b: No such file or directory"
    assert refusal(OSError(28, "No space left on device")) == "a file or the output: No space left on device"
    assert refusal(StorageError("s3://b/c: cannot be reached")) == "s3://b/c: cannot be reached"
    assert refusal(ModuleNotFoundError("", name="jax")) is None
    with pytest.raises(RuntimeError) as homeless:
        Path("~no such user").expanduser()  # as Path.home() of a user of a container
    assert str(refusal(homeless.value)).startswith("this user has no home folder: set HOME")
    deleted = refusal(ModuleNotFoundError("", name="pretraining.extensions.lora"))
    assert deleted == "this needs the folder pretraining/extensions/lora, which is not there"


def test_every_script_that_prints_ends_in_the_shared_way() -> None:
    inner = {"compiler.py", "export.py", "lowering.py"}  # processes that plan and splash start
    for path in (ROOT / "main_training.py", *(ROOT / "pretraining").rglob("*.py")):
        _, main, end = path.read_text().partition('if __name__ == "__main__":\n')
        assert not main or path.name in inner or end.startswith("    exit_with("), path


def test_the_start_of_a_run_prints_each_setting_that_is_not_the_default_and_its_source(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("seed = 5")
    flags = {"model_variant": "tiny", "num_steps": "3", "use_dummy_dataset": "True"}
    code = f"from main_training import configure; configure({flags | {'config_file': f'{tmp_path}/own.toml'}})"
    environment = {**os.environ, "SCRIPT_SETTINGS": "--num_steps=3 --model_variant=mini"}
    printed = call([sys.executable, "-c", code], env=environment).stdout
    assert dict(line.split(maxsplit=1) for line in printed.splitlines()) == {
        "--model_variant=tiny": "command line",
        "--seq_length=512": "derived",
        "--num_steps=3": "scripts/train.sh",
        "--use_dummy_dataset=True": "command line",
        "--checkpoint_interval=0": "derived",
        "--seed=5": f"seed=5 in {tmp_path}/own.toml",
    }
