from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pretraining.extensions.tokenizers")

from main_training import configure
from pretraining.config.errors import UserError
from pretraining.data import open_stream
from pretraining.data.datasets import open_datasets
from pretraining.data.files import file_hash
from pretraining.data.opening import check_data
from pretraining.extensions.tokenizers.tokenizer import open_tokenizer, train
from pretraining.storage import FolderLock
from pretraining.tools import inspect_data
from pretraining.tools.inspect_data import verify_dataset, whole_corpus
from pretraining.tools.prepare import prepare
from pretraining.tools.prepare.shards import ShardWriter
from pretraining.tools.prepare.text import FileRange, divide, find_files, read_documents
from tests.data.corpora import notes_on, rows
from tests.faults.damage import flip_bit_at
from tests.processes import Refusal, call, words
from tests.tokenizer_files import write_byte_level
from tests.waiting import wait_until
from tests.warm import python

ROOT = Path(__file__).parents[3]
TEXT = """the quick brown fox jumps over one lazy dog while seven wizards box quietly again and again around every
	corner of rhyme é 漢 without knowing which hour has come"""
WORDS = TEXT.split(" ")


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents with beginnings of their own."""
    drawn = np.random.default_rng(seed)
    return [f"{seed}-{number}: " + " ".join(drawn.choice(WORDS, drawn.integers(3, 60))) for number in range(count)]


def as_lines(texts: list[str], key: str = "text") -> str:
    """Documents as lines of JSON."""
    return "".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts)


def write_inputs(folder: Path) -> list[str]:
    """The same kind of text in every form; what was written."""
    parts = [texts(300, seed) for seed in range(5)]
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text(as_lines(parts[0]))
    (folder / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(as_lines(parts[1]).encode()))
    with pa.OSFile(str(folder / "c.jsonl.zst"), "wb") as file, pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(as_lines(parts[2]).encode())
    pq.write_table(pa.table({"text": parts[3]}), folder / "d.parquet", row_group_size=70)
    for ending, compress in ("bz2", bz2.compress), ("xz", lzma.compress):  # in two streams, as pbzip2 and pixz write
        streams = [compress(as_lines(part).encode()) for part in (parts[4][20:50], parts[4][50:70])]
        (folder / f"e.jsonl.{ending}").write_bytes(b"".join(streams))
    for number, text in enumerate(parts[4][:20]):
        (folder / "deep" / f"{number:02d}.txt").write_text(text)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    (folder / "again").symlink_to("deep")
    return [text for part in parts[:4] for text in part] + parts[4][:70] + parts[4][20:70]


def run(folder: Path, *more: str) -> int:
    """The command, in this process."""
    size = [] if any(flag.startswith("--tokenizer=") for flag in more) else ["--vocab_size=400"]
    return prepare.main([f"--input={folder / 'in'}", f"--output={folder / 'out'}", *size, *more])


def write_input(folder: Path, name: str, content: str | bytes) -> None:
    """Write the only file that `run` reads."""
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def delivered(folder: Path) -> list[str]:
    """Every document of the shards, decoded, in order."""
    tokenizer = open_tokenizer(str(folder / "out" / "tokenizer.model"))
    shards = sorted((folder / "out").glob("*/*.arrow"))
    found = [pa.ipc.open_file(pa.OSFile(str(shard))).read_all()["tokens"].to_pylist() for shard in shards]
    return [tokenizer.decode(ids) for part in found for ids in part]


class Prepared(NamedTuple):
    """Texts in every form, prepared once for the tests of this file; they may not change it."""

    folder: Path  # "in" and "out"
    texts: list[str]
    printed: str

    @property
    def tokenizer(self) -> str:
        """The flag that names the trained tokenizer."""
        return f"--tokenizer={self.folder / 'out' / 'tokenizer.model'}"

    def flags(self) -> list[str]:
        """The flags that preparation printed."""
        return (self.folder / "out" / "flags.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("prepared")
    written = write_inputs(folder / "in")
    with redirect_stdout(io.StringIO()) as printed:
        assert run(folder, "--valid_every=10") == 0
    return Prepared(folder, written, printed.getvalue())


def test_every_document_of_every_form_is_there_once_and_reads_back_exactly(prepared: Prepared, tmp_path: Path) -> None:
    assert sorted(delivered(prepared.folder)) == sorted(prepared.texts)
    assert "ignored: 1 file ending in .png" in prepared.printed
    assert f"ignored: 1 link to folders or to nothing, such as {prepared.folder}/in/again" in prepared.printed
    flags = dict(line[2:].split("=", 1) for line in prepared.flags())
    data = {"data_path", "valid_data_path", "tokenizer_path", "vocab_size"}
    assert set(flags) == {*data, "val_interval", "val_steps", "drop_last_val"}
    config = configure({**flags, "seq_length": 32, "index_dir": str(tmp_path / "index"), "batch_size": 1})
    counts = [open_stream(config, split=split).facts["datasets"][0]["documents"] for split in ("train", "valid")]
    assert sum(counts) == len(prepared.texts) and 0.05 < counts[1] / sum(counts) < 0.2
    assert 2 in np.concatenate(rows(open_stream(config), 20))  # the tokenizer's separator, without a flag


@pytest.mark.slow
def test_a_split_without_documents_is_named(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path, "a.jsonl", as_lines(texts(20)))
    assert run(tmp_path, prepared.tokenizer, "--valid_every=1000") == 0
    assert "valid: none. --valid_every=1000 holds out each document with a probability of" in capsys.readouterr().out
    (tmp_path / "one").mkdir()
    write_input(tmp_path / "one", "a.txt", TEXT)  # the first document of a text, which one in 3 holds out
    assert run(tmp_path / "one", prepared.tokenizer, "--valid_every=3") == 2
    assert "every document is held out by --valid_every=3; change that" in capsys.readouterr().err
    assert not (tmp_path / "one" / "out" / "flags.txt").exists()


def test_the_same_command_again_does_nothing_and_another_is_refused(prepared: Prepared, refusal: Refusal) -> None:
    folder, source = prepared.folder, f"--input={prepared.folder / 'in'}"
    stamps = {file: file.stat().st_mtime_ns for file in (folder / "out").rglob("*")}
    assert run(folder, "--valid_every=10") == 0
    assert stamps == {file: file.stat().st_mtime_ns for file in (folder / "out").rglob("*")}
    assert "prepared from something else (settings changed" in refusal(run, folder, "--valid_every=3")
    assert "not empty and not prepared by this command" in refusal(prepare.main, [source, f"--output={folder}"])
    file = folder / "out" / "plan.json"
    assert f"{file}: not a folder: choose another --output" in refusal(prepare.main, [source, f"--output={file}"])


def test_a_text_key_that_was_wrong_can_be_corrected(prepared: Prepared, tmp_path: Path, refusal: Refusal) -> None:
    wanted = texts(20)
    write_input(tmp_path, "a.jsonl", as_lines(wanted, key="body"))
    error = refusal(run, tmp_path)
    assert "no text in field 'text': choose the field with --text_key" in error
    assert "--vocab_size" not in error  # whose tokenizer was being trained
    assert run(tmp_path, prepared.tokenizer, "--text_key=body") == 0
    assert delivered(tmp_path) == wanted


def has_ended(group: int) -> bool:
    """Return whether no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


# Prepares in two processes, and is killed by one of them when it has written its fourth shard since the start.
KILLED = """
import os, signal, sys, pretraining.tools.prepare.prepare as prepare
prepare.SHARD_BYTES, write, written = 10_000, prepare.write_atomically, []
def write_and_kill(path, content):
    write(path, content)
    written.extend([path] if path.parent.name == ".parts" else [])
    if len(written) == 4:
        os.kill(os.getppid(), signal.SIGKILL)
prepare.write_atomically = write_and_kill
if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_preparation_killed_anywhere_goes_on_without_losing_or_repeating_a_document(tmp_path: Path) -> None:
    wanted = texts(1600)
    for number in range(0, 1600, 100):  # 16 shards
        write_input(tmp_path, f"{number:04d}.jsonl", as_lines(wanted[number : number + 100]))
    (tmp_path / "killed.py").write_text(KILLED)
    flags = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--vocab_size=400", "--processes=2"]
    command, codes = [sys.executable, str(tmp_path / "killed.py"), *flags], list[int]()
    while 0 not in codes and len(codes) < 10:
        variables = {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL, start_new_session=True)
        codes.append(process.wait())
        wait_until(partial(has_ended, process.pid))
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0] and len(codes) > 2
    assert (tmp_path / "out" / "flags.txt").is_file()
    assert sorted(delivered(tmp_path)) == sorted(wanted)


@pytest.mark.slow
def test_a_second_preparation_of_a_folder_waits_for_the_first(tmp_path: Path, refusal: Refusal) -> None:
    """Both would remove each other's files, and one's tokenizer would stand next to the other's shards."""
    write_input(tmp_path, "a.jsonl", as_lines(texts(200)))
    output = tmp_path / "out"
    command = ["-m", "pretraining.tools.prepare", f"--input={tmp_path / 'in'}", f"--output={output}", "--processes=1"]
    first = FolderLock(output / ".parts")  # the claim of a preparation that has written nothing yet
    with (tmp_path / "printed").open("w") as printed:
        started = [*python(), *command, "--vocab_size=320"]
        second = subprocess.Popen(started, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT)
    wait_until(lambda: f"waiting: {output}/.parts: used by process {os.getpid()}" in written(tmp_path), second)
    assert [path.name for path in output.iterdir()] == [".parts"]
    first.release()
    assert second.wait() == 0, written(tmp_path)
    error = refusal(prepare.main, [*command[2:], "--vocab_size=400"])
    assert "prepared from something else (settings changed" in error


@pytest.mark.slow
def test_a_second_job_of_a_part_is_refused_and_another_part_is_not(prepared: Prepared, tmp_path: Path) -> None:
    """Both would write the same shards."""
    output = tmp_path / "out"
    command = [*python(), "-m", "pretraining.tools.prepare", f"--input={prepared.folder / 'in'}", f"--output={output}"]
    command += ["--processes=1", prepared.tokenizer]
    assert "part 2/2 is complete" in call([*command, "--part=2/2"]).stdout
    first = FolderLock(output / ".parts" / "1-of-2")
    refused = call([*command, "--part=1/2"], code=2).stderr
    assert f".parts/1-of-2: used by process {os.getpid()} on " in refused
    assert "stop it, or set another --part" in refused
    for other in (["--part=2/3"], []):  # 2/3 has shards of 1/2, too
        refused = call([*command, *other], code=2).stderr
        assert f".parts/1-of-2: used by process {os.getpid()} on " in refused
    first.release()
    whole = FolderLock(output / ".parts")  # of a preparation without --part
    with (tmp_path / "printed").open("w") as printed:
        part = subprocess.Popen([*command, "--part=1/2"], cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT)
    wait_until(lambda: f"waiting: {output}/.parts: used by process {os.getpid()}" in written(tmp_path), part)
    whole.release()
    assert part.wait() == 0 and "prepared in" in written(tmp_path)


def written(folder: Path) -> str:
    """What a process has printed so far."""
    return (folder / "printed").read_text()


def test_lines_that_cross_the_border_of_ranges_are_read_once(tmp_path: Path) -> None:
    wanted, path = texts(20), tmp_path / "a.jsonl"
    path.write_text(as_lines(wanted))
    size = path.stat().st_size
    for cut in (1, 7, 100, 1000):
        ranges = [FileRange(str(path), "jsonl", at, min(at + cut, size)) for at in range(0, size, cut)]
        read = list(read_documents(tuple(ranges), "text"))
        assert [document.text for document in read] == wanted
        assert [str(document.place) for document in read] == [f"{path}, line {number}" for number in range(1, 21)]


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        *(([f"--{name}=-2"], f"--{name}=-2: use 0 or more") for name in ("vocab_size", "valid_every", "processes")),
        (["--skip_bad=-2"], "--skip_bad=-2: use 0 or more"),
        (["--sft", "--tokenizer=t", "--seq_length=0"], "--seq_length=0: use 2 or more"),
        (["--separator=-2"], "--separator=-2: use -1 or more"),
        (["--valid_every=1"], "--valid_every=1: holds out every document; use 2 or more, or 0"),
        (["--separator=40000"], "--separator=40000: use an id below --vocab_size=32000"),
        (["--tokenizer=m.model", "--vocab_size=400"], "--vocab_size=400: is of a tokenizer to train; leave it out"),
        *(([f"--part={part}", "--tokenizer=t"], "write I/N") for part in ("4/3", "0/3", "2")),
        (["--part=1/3"], "--part needs --tokenizer"),
        *(([f"--{flag}"], f"--{flag}: needs --sft") for flag in ("packing=False", "seq_length=64", "chat_template=x")),
        (["--output=~/mine"], "argument --output: ~/mine begins with ~, which the shell leaves as it is"),
        (["--output=az://b/x"], "argument --output: az://b/x must be a local path, or begin with s3:// or gs://"),
        (["--input=a,~me/b"], "argument --input: ~me/b begins with ~"),
        (["--part=1/3", "--tokenizer=t", "--output=s3://b/x"], "a folder that all parts share"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(refusal: Refusal, flags: list[str], remedy: str) -> None:
    assert remedy in refusal(prepare.main, ["--input=x", "--output=y", *flags])


def test_another_tokenizer_than_that_of_the_data_is_refused(
    prepared: Prepared, tmp_path: Path, refusal: Refusal
) -> None:
    """The checkpoint records it, because the data may be gone when a text is generated."""
    out = prepared.folder / "out"
    (tmp_path / "other.model").write_bytes((out / "tokenizer.model").read_bytes() + b"\x0a\x00")
    (tmp_path / "copy.model").write_bytes((out / "tokenizer.model").read_bytes())
    flags = {"data_path": str(out), "index_dir": str(tmp_path), "vocab_size": 410, "seq_length": 16, "batch_size": 1}
    wrong = {**flags, "tokenizer_path": str(tmp_path / "other.model")}
    message = rf"--tokenizer_path={tmp_path}/other.model: {out}/train was prepared with another tokenizer"
    with pytest.raises(UserError, match=message):
        check_data(configure(wrong))
    assert re.search(message, refusal(inspect_data.main, words(wrong)))
    stream = open_stream(configure({**flags, "tokenizer_path": str(tmp_path / "copy.model")}))
    assert stream.state(0)["mixture"]["train"]["tokenizer_sha256"] == file_hash(out / "tokenizer.model")
    line = "train: its tokenizer has 400 ids, the model's vocabulary 410: the rest is never trained"
    assert line in notes_on(stream)
    assert not any("ids" in note for note in notes_on(open_stream(configure({**flags, "vocab_size": 400}))))
    with pytest.raises(UserError, match=r"400 ids, but the model's vocabulary is 300: .*--vocab_size=400"):
        open_stream(configure({**flags, "vocab_size": 300}))


def test_inspect_shows_the_datasets_and_the_text_of_a_step(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    shutil.copytree(prepared.folder / "out" / "train", tmp_path / "train")
    flags = [*prepared.flags(), f"--data_path={tmp_path / 'train'}", f"--index_dir={tmp_path / 'index'}"]
    more = ["--seq_length=64", "--global_batch_size=2", "--num_steps=100", "--step=3", "--verify"]
    assert inspect_data.main([*flags, *more]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"train +1 +1,\d{3} +0 ", shown) and "16 to 31" in shown
    assert "1 file unchanged" in shown and "---- step 3, row 1: 64 tokens" in shown
    assert sum(word in shown for word in ("quick", "brown", "lazy", "wizards")) == 4
    for step, epochs, steps in ((-1, [], "0"), (10**6, ["--num_epochs=1", *more[:2]], r"0 to \d+")):
        error = refusal(inspect_data.main, [*flags, *epochs, f"--step={step}"])
        assert re.search(rf"--step={step}: the train data have steps from {steps}$", error.strip())
    shard = next((tmp_path / "train").glob("*.arrow"))
    flip_bit_at(shard, shard.stat().st_size // 2)
    assert f"{shard}: its checksum is not the recorded one" in refusal(inspect_data.main, [*flags, "--verify"])
    assert "--use_dummy_dataset=True: these are counters" in refusal(inspect_data.main, ["--use_dummy_dataset=True"])


def test_the_output_folder_is_recognised_as_training_and_validation_data(prepared: Prepared, tmp_path: Path) -> None:
    out = prepared.folder / "out"
    flags = {"data_path": str(out), "vocab_size": 400, "seq_length": 32, "batch_size": 1, "index_dir": str(tmp_path)}
    named = {**flags, "data_path": str(out / "train"), "valid_data_path": str(out / "valid")}
    for split in ("train", "valid"):
        stream = open_stream(configure({**flags, "val_interval": 10, "val_steps": -1}), split=split)
        assert notes_on(stream) == [
            f"{out} is a prepared folder: train from train/, valid from valid/",
            "separator 2 after every document (meta.json)",
        ]
        assert np.array_equal(rows(stream, 20), rows(open_stream(configure(named), split=split), 20))


def test_the_folder_alone_implies_tokenizer_vocabulary_and_validation_and_flags_override(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = prepared.printed.split("train on it with:\n")[1].replace("\\\n", " ")
    assert shlex.split(command) == ["bash", "scripts/train.sh", f"--data_path={prepared.folder / 'out'}"]
    shutil.copytree(prepared.folder / "out", out := tmp_path / "moved")
    more = {"seq_length": 256, "global_batch_size": 16, "index_dir": str(tmp_path)}
    config = configure({"data_path": str(out), **more})
    assert "--vocab_size=400 " in (told := capsys.readouterr().out) and f"vocab_size of {out}" in told
    by_name = dict(line.removeprefix("--").split("=", 1) for line in prepared.flags())
    paths = {"data_path": str(out), "valid_data_path": "", "tokenizer_path": str(out / "tokenizer.model")}
    assert config == configure({**by_name, **paths, **more})
    check_data(config)
    assert config.held_out_splits() == ["valid"] and config.val_interval == 50
    other = configure({"data_path": str(out), "vocab_size": "500", "val_interval": "0", **more})
    assert (other.vocab_size, other.val_interval, other.tokenizer_path) == (500, 0, config.tokenizer_path)
    assert configure({"data_path": str(out), "split": "9,1,0", **more}).val_interval == 0
    assert configure({"data_path": str(out / "train"), **more}).vocab_size is None
    # the settings of scripts/train.sh are below those of the folder
    (out / "flags.txt").write_text("--seq_length=64\n--ckpt_save_path=elsewhere\n")
    monkeypatch.setenv("SCRIPT_SETTINGS", "--seq_length=256")
    config = configure({"data_path": str(out), **more})
    assert config.seq_length == 64 and not config.ckpt_save_path
    assert f"seq_length of {out}" in capsys.readouterr().out


def test_a_vocabulary_that_is_too_large_can_be_lowered_in_the_same_folder(tmp_path: Path, refusal: Refusal) -> None:
    write_input(tmp_path, "a.txt", TEXT)
    for size, remedy in ((30000, r"at most (\d+) ids; use \1 or less"), (100, r"needs (\d+) ids .*; use \1 or more")):
        assert re.search(rf"--vocab_size={size}: .* {remedy}", refusal(run, tmp_path, f"--vocab_size={size}"))
    assert run(tmp_path, "--vocab_size=320", "--processes=1") == 0
    inside = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'in' / 'out'}", "--vocab_size=320", "--processes=1"]
    assert [prepare.main(inside), prepare.main(inside)] == [0, 0]  # the second does not read flags.txt of the first


@pytest.mark.parametrize("ending", [".json", ".csv", ".pdf", ".arrow"])
def test_a_named_file_that_is_no_text_is_refused_with_the_remedy(tmp_path: Path, refusal: Refusal, ending: str) -> None:
    path, target = tmp_path / f"data{ending}", f"--output={tmp_path / 'out'}"
    path.write_text(TEXT)
    printed = refusal(prepare.main, [f"--input={path}", target])
    assert str(path) in printed and f"--endings=.txt,.md,{ending}" in printed
    printed = refusal(prepare.main, [f"--input={tmp_path}", target])
    assert "no text, .jsonl or .parquet files" in printed and ("to_parquet()" in printed) == (ending == ".arrow")
    error = refusal(prepare.main, [f"--input={tmp_path},", target])  # and the working directory
    assert "an empty name: leave a comma out" in error
    assert not (tmp_path / "out").exists()


def test_truncation_and_padding_of_a_tokenizer_json_are_switched_off(tmp_path: Path) -> None:
    """The tokenizers package saves the settings of its last use in the file."""
    model = write_byte_level(tmp_path / "plain.json", texts(200), 500, ["</s>"])
    model.enable_truncation(max_length=4)
    model.enable_padding(length=4)
    model.save(str(tmp_path / "cut.json"))
    plain, cut = (open_tokenizer(str(tmp_path / f"{name}.json")) for name in ("plain", "cut"))
    for text in ("a", TEXT):
        assert cut.encode([text]) == plain.encode([text]) and cut.encode_prompt(text) == plain.encode_prompt(text)
        assert cut.trace(text) == plain.trace(text)
    assert len(cut.encode([TEXT])[0]) > 20


@pytest.mark.slow
def test_names_of_special_tokens_in_texts_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer.json makes separators of them in the middle of a document, as in transformers."""
    write_byte_level(tmp_path / "plain.json", texts(200), 500, ["<unk>", "</s>"])
    for name, text in {"a": "of the end </s> of a text", "b": "</s>", "c": "< /s>"}.items():
        write_input(tmp_path, f"{name}.txt", text)
    assert run(tmp_path, f"--tokenizer={tmp_path / 'plain.json'}", "--valid_every=0") == 0
    assert "\n2 documents with names of special tokens in their text, which became these" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "train" / "meta.json").read_text())["separator"] == 1
    train(texts(200), 400, tmp_path / "sp.model", threads=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "in").rename(tmp_path / "other" / "in")
    assert run(tmp_path / "other", f"--tokenizer={tmp_path / 'sp.model'}", "--valid_every=0") == 0
    assert "special tokens" not in capsys.readouterr().out  # sentencepiece takes them for text


def test_ids_of_a_tokenizer_json_may_have_gaps(tmp_path: Path) -> None:
    """As after tokens were removed from it: its vocabulary ends with its largest id."""
    write_byte_level(tmp_path / "plain.json", texts(200), 500, ["</s>"])
    content = json.loads((tmp_path / "plain.json").read_text())
    vocabulary = content["model"]["vocab"]
    (id,) = open_tokenizer(str(tmp_path / "plain.json")).encode(["a"])[0]
    vocabulary[next(token for token, number in vocabulary.items() if number == id)] = 70_000
    (tmp_path / "gaps.json").write_text(json.dumps(content))
    tokenizer = open_tokenizer(str(tmp_path / "gaps.json"))
    assert tokenizer.vocab_size == 70_001 and tokenizer.encode(["a"]) == [[70_000]]
    write_input(tmp_path, "a.txt", "a a a")
    assert run(tmp_path, f"--tokenizer={tmp_path / 'gaps.json'}", "--valid_every=0") == 0
    described = json.loads((tmp_path / "out" / "train" / "meta.json").read_text())
    assert described["vocab_size"] == 70_001


# Content of a file of plain text -> what is read, or what the refusal says.
ENCODED = {
    "utf16.txt": (TEXT.encode("utf-16"), TEXT),
    "utf16be.txt": (b"\xfe\xff" + TEXT.encode("utf-16-be"), TEXT),
    "utf32.txt": (TEXT.encode("utf-32"), TEXT),
    "signed.txt": (TEXT.encode("utf-8-sig"), TEXT),
    "plain.txt": (TEXT.encode(), TEXT),
    "trace.txt": (b"a" * 2000 + b"\xff", "a" * 2000 + "\ufffd"),
}
UNREADABLE = {
    "unmarked.txt": (TEXT.encode("utf-16-le"), "has NUL bytes"),
    "image.txt": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256)) * 4, "has NUL bytes"),
    "latin.txt": ("déjà vu à Orléans, où l'été a été très doux".encode("latin-1"), r"\d+ of 43 char.* not UTF-8"),
    "half.txt.bz2": (bz2.compress(os.urandom(1000).hex().encode())[:500], "truncated or damaged"),
    "half.txt.xz": (lzma.compress(os.urandom(1000).hex().encode())[:500], "truncated or damaged"),
    "no.txt.xz": (b"text", "truncated or damaged"),
    "second.txt.xz": (lzma.compress(b"a") + lzma.compress(b"b")[1:], "truncated or damaged"),
    "half.jsonl.gz": (gzip.compress(b"{}" * 999, mtime=0)[:-9], "cannot be read, it is truncated or damaged"),
    "e.parquet": (b"PAR1 not really", "not a complete Parquet file"),
    "half.txt.gz": (gzip.compress(os.urandom(1000).hex().encode())[:500], "truncated or damaged"),
}


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_columns_of_text_may_have_any_type_of_text(tmp_path: Path, kind: str) -> None:
    texts = ["é 漢", "", "b", "é 漢"] * 3
    column = pa.array(texts).dictionary_encode() if kind == "dictionary" else pa.array(texts, pa.type_for_alias(kind))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=5)
    shards = divide([tmp_path / "a.parquet"], ())
    assert [text for shard in shards for text, _ in read_documents(shard, "text")] == texts


def test_files_that_spark_has_not_finished_and_logs_of_delta_are_no_documents(tmp_path: Path) -> None:
    others = ["_temporary/0/task/part-0.parquet", ".spark-staging-1/lang=en/part-0.parquet", "_delta_log/1.parquet"]
    for name in ["part-0.parquet", *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": ["one"]}), tmp_path / name)
    assert find_files([str(tmp_path)], ()) == (
        [tmp_path / "part-0.parquet"],
        sorted(tmp_path / name for name in others),
    )
    assert find_files([str(tmp_path / "_temporary")], ())[0] == [tmp_path / others[0]]  # asked for
    actions = [{"commitInfo": {}}, {"remove": {"path": "part-0.parquet"}}]  # a reader of plain Parquet still finds it
    (tmp_path / "_delta_log" / "2.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    with pytest.raises(UserError, match=r"part-0\.parquet: its Delta table has removed it"):
        find_files([str(tmp_path)], ())
    for text in ("{", "1", '{"remove": 1}'):
        (tmp_path / "_delta_log" / "2.json").write_text(text)
        with pytest.raises(UserError, match=r"2\.json: not a log of a Delta table \(.*\): copy the table again"):
            find_files([str(tmp_path)], ())


def test_a_link_to_a_missing_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "link.txt").symlink_to("a.txt")
    assert len(find_files([str(tmp_path)], [".txt"])[0]) == 2
    (tmp_path / "gone.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: a link to nothing: restore what it names, or remove it"):
        find_files([str(tmp_path)], [".txt"])


def test_a_folder_at_a_url_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "_temporary" / "v1.5"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").touch()
    for url in (f"file://{folder}", f"file://{folder}/"):
        files, ignored = find_files([url], ())
        assert (list(map(str, files)), ignored) == ([f"file://{folder}/a.jsonl"], [])
    assert list(map(str, find_files([f"file://{folder}/a.jsonl"], ())[0])) == [f"file://{folder}/a.jsonl"]


# Lines of JSON, or rows of Parquet -> which of them cannot be read, and why.
ROWS = (
    '{"text": "one"}\r\n\n{"text": \n{"body": "x"}\n{"text": ""}\n{"text": "one"}\n{"text": "\\ud83d\\ude00 \\ud83d"}\n'
)
BAD_ROWS = {
    "a.jsonl, line 3": "not a line of JSON",
    "a.jsonl, line 4": "no text in field 'text'",
    "a.jsonl, line 7": "has '.ud83d', half of a character",
    "b.parquet, row 2": "null in column 'text'",
    "b.parquet, row 5": "null in column 'text'",
    "c.parquet": "no single column 'text' among body",
    "d.parquet": "no single column 'text' among text, text",
}


def test_all_input_is_looked_at_first_and_what_cannot_be_read_is_named_together_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, (raw, expected) in ENCODED.items():
        (folder / name).write_bytes(raw)
        (shard,) = divide([folder / name], (".txt",))
        assert [text for text, _ in read_documents(shard, "text")] == [expected], name
    for name, (raw, _) in UNREADABLE.items():
        (folder / name).write_bytes(raw)
    (folder / "a.jsonl").write_text(ROWS, newline="")
    pq.write_table(pa.table({"text": ["x" + TEXT, None, "two", "three", None]}), folder / "b.parquet", row_group_size=2)
    pq.write_table(pa.table({"body": ["x"] * 4}), folder / "c.parquet", row_group_size=2)
    pq.write_table(pa.table([pa.array(["x"])] * 2, names=["text", "text"]), folder / "d.parquet")
    (folder / "empty.txt").write_text("")
    (folder / "lines.txt").write_text("with\r\nCRLF " + TEXT, newline="")
    reasons = {name: reason for name, (_, reason) in UNREADABLE.items()} | BAD_ROWS
    told = refusal(run, tmp_path, f"--skip_bad={len(reasons) - 1}")
    for place, reason in reasons.items():
        assert re.search(f"{place}: .*{reason}", told), place
    assert f"{len(reasons)} problems with the input" in told and f"out with --skip_bad={len(reasons)}" in told
    assert not any(name in told for name in ENCODED) and not list((tmp_path / "out").glob("tokenizer*"))
    assert run(tmp_path, "--vocab_size=300", "--valid_every=0", f"--skip_bad={len(reasons)}") == 0
    told = capsys.readouterr().out
    for note in (
        "trace.txt: 1 character not UTF-8, replaced by U+FFFD",
        f"without text, left out:\n  {folder}/empty.txt\n",
        f"CRLF, which stays:\n  {folder}/lines.txt\n",
        f"{folder}/utf32.txt: 1 document, such as one of {folder}/plain.txt",
        f"  {folder}/a.jsonl, line 1, 3 tokens in 3 characters: o|n|e",
        f"files and rows left out because of --skip_bad: {len(reasons)}, see {tmp_path}/out/left_out.txt",
    ):
        assert note in told, note
    listed = (tmp_path / "out" / "left_out.txt").read_text()
    assert all(f"{place}: " in listed for place in reasons) and listed.count("\n") == len(reasons)
    contents = [*(text for _, text in ENCODED.values()), "with\r\nCRLF " + TEXT, "x" + TEXT]
    assert sorted(delivered(tmp_path)) == sorted([*contents, "one", "one", "two", "three"])


def test_lines_in_utf_16_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    """Python's parser of JSON guesses the encoding of each line, and all but the first are shifted by a byte."""
    write_input(tmp_path, "a.jsonl", as_lines(["one", "two", "three"]).encode("utf-16-le"))
    assert "4 problems with the input" in refusal(run, tmp_path)


def test_much_text_makes_larger_shards_and_not_more(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(2**36)  # sparse
    for count, expected in ((0, 2**24), (1, 2**24), (2**4, 2**28), (2**10, 2**30)):
        assert prepare.shard_bytes([tmp_path / "a.jsonl"] * count) == expected


def test_a_preparation_with_shards_of_another_size_is_not_continued(
    prepared: Prepared, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "SHARD_BYTES", 1_000)
    monkeypatch.setattr(prepare, "_SHARDS", 4)
    monkeypatch.setattr(prepare, "_workers", lambda processes: ThreadPoolExecutor(1))
    command = [f"--input={prepared.folder / 'in'}", f"--output={tmp_path / 'out'}", prepared.tokenizer]
    assert prepare.main(command) == 0
    assert len(list((tmp_path / "out" / "train").glob("*.arrow"))) <= 2 * 4
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan.pop("shard_bytes") > 1_000
    (tmp_path / "out" / "plan.json").write_text(json.dumps(plan))  # as of a version with shards of one size
    assert "prepared from something else (shard_bytes changed" in refusal(prepare.main, command)


def test_parts_prepared_by_jobs_of_their_own_are_merged_by_the_last_and_equal_one_preparation(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge opens no shard: those of the other parts are not there."""
    monkeypatch.setattr(prepare, "SHARD_BYTES", 20_000)
    command = [f"--input={prepared.folder / 'in'}", "--processes=1", "--valid_every=10", prepared.tokenizer]
    one, many = tmp_path / "one", tmp_path / "many"
    monkeypatch.setattr(prepare, "_workers", lambda processes: ThreadPoolExecutor(1))
    assert prepare.main([*command, f"--output={one}"]) == 0
    for part in (2, 1):
        assert prepare.main([*command, f"--output={many}", f"--part={part}/3"]) == 0
        assert f"part {part}/3 is complete" in capsys.readouterr().out
    with pytest.raises(UserError, match="its preparation is not complete: run the same prepare command again"):
        open_stream(configure({"data_path": str(many)}))
    (many / "train").rename(tmp_path / "elsewhere")
    (many / "train").mkdir()
    assert prepare.main([*command, f"--output={many}", "--part=3/3"]) == 0
    for shard in (tmp_path / "elsewhere").iterdir():
        shard.rename(many / "train" / shard.name)
    names = {str(path.relative_to(one)) for path in one.rglob("*") if path.is_file() and path.name != "lock"}
    merged = {str(path.relative_to(many)) for path in many.rglob("*") if path.is_file() and path.name != "lock"}
    assert len(names) > 12 and names == merged
    for name in names:
        texts_of_both = [(folder / name).read_text("latin-1").replace(str(many), str(one)) for folder in (one, many)]
        assert texts_of_both[0] == texts_of_both[1], name
    config = configure({"data_path": str(many), "index_dir": str(tmp_path / "index")})
    for dataset in open_datasets(config, "train"):
        whole = whole_corpus(dataset.shards, dataset.description)
        assert whole.verify_all() == 0  # the loader's own sums of its blocks
        assert verify_dataset(dataset, config)[1] == 0
    next((many / "train").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match=r"missing, but meta\.json lists it"):
        open_stream(config)
    assert prepare.main([*command, f"--output={many}", "--part=1/2", "--text_key=body"]) == 2
    assert "prepared from something else (settings changed" in capsys.readouterr().err


class RangeHandler(SimpleHTTPRequestHandler):
    """Files by HTTP, and ranges of them."""

    names_dates = False

    def send_header(self, keyword: str, value: str) -> None:
        if self.names_dates or keyword != "Last-Modified":
            super().send_header(keyword, value)

    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if not path.is_file() or not wanted:
            super().do_GET()
            return
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        raw = path.read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{min(last, len(raw) - 1)}/{len(raw)}")
        self.send_header("Content-Length", str(len(raw[first : last + 1])))
        self.end_headers()
        self.wfile.write(raw[first : last + 1])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.slow
def test_files_at_urls_are_read_through_fsspec(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(RangeHandler, directory=prepared.folder / "in")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}"
        command = [prepared.tokenizer, f"--output={tmp_path / 'out'}"]
        names = ("d.parquet", "a.jsonl", "deep/b.jsonl.gz")
        for flag, text in (("--text_key=body", "d.parquet: no single column 'body' among"), ("--text_key=text", "")):
            code = prepare.main([*command, f"--input={','.join(f'{site}/{name}' for name in names)}", flag])
            assert (code, text in capsys.readouterr().err) == (2 if text else 0, True)
        assert prepare.main([*command, f"--input={site}/missing.parquet"]) == 2
        assert f"{site}/missing.parquet: cannot be read (FileNotFoundError" in capsys.readouterr().err
        small = [prepared.tokenizer, f"--output={tmp_path / 'small'}", f"--input={site}/a.jsonl"]
        again = [(prepare.main(small), "names no version of it" in capsys.readouterr().out) for _ in range(2)]
        assert again == [(0, False), (0, True)]
        monkeypatch.setattr(RangeHandler, "names_dates", True)
        assert prepare.main(small) == 2 and "(input changed" in capsys.readouterr().err
        server.shutdown()
    assert sorted(delivered(tmp_path)) == sorted(text for seed in (0, 1, 3) for text in texts(300, seed))
    assert prepare.main([*command, "--input=gopher://host/a.parquet"]) == 2
    assert "gopher://host/a.parquet: " in capsys.readouterr().err


def test_the_time_for_a_terabyte_follows_from_the_speed_of_a_process() -> None:
    assert "2.00 MB/s of text per process" in (line := prepare.describe_speed(20_000_000, 10.0))
    assert "1 TB takes 139 core-hours, for example 2.2 hours on 64 cores" in line


def test_a_shard_that_the_system_refuses_to_write_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = ShardWriter(tmp_path / "part-00000.arrow", vocab_size=64, columns=("tokens",))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*part-00000\.arrow'") as refused:
            writer.write([[[1] * 9_999]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.filename == str(tmp_path / "part-00000.arrow")
