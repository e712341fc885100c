"""Data on a real S3 server, and on a GCS server: the same tokens, whatever happens to the requests."""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from pretraining import train
from pretraining.config.errors import ConfigError, UserError
from pretraining.data import Prefetcher, open_stream
from pretraining.data.layouts import FLAGS, RECORDS
from pretraining.data.prefetch import AHEAD
from pretraining.extensions.object_storage import objects
from pretraining.extensions.object_storage.ahead import FETCH_AHEAD, FETCH_BYTES, RequestedAhead
from pretraining.extensions.object_storage.objects import RETRIES, ObjectPath
from pretraining.extensions.object_storage.ranges import RangeCache
from pretraining.extensions.object_storage.store import OBJECTS
from pretraining.run.configure import configure
from pretraining.storage import StorageError, location, stamp_of
from tests.data.corpora import numbered, rows, settings, write_flat, write_lists, write_megatron, write_parquet
from tests.end_to_end.small import ONE_PROCESS, ROOT
from tests.object_storage import KEYS, FaultProxy, GoogleStorage, upload
from tests.processes import Refusal, call
from tests.waiting import PATIENCE, wait_until
from tests.warm import python

LENGTHS = [40, 3, 0, 700, 25, 9, 61, 1, 130, 5] * 30
WRITERS = {"flat": write_flat, "lists": write_lists, "parquet": write_parquet, "megatron": write_megatron}


def local_and_remote(
    tmp_path: Path,
    proxy: FaultProxy | GoogleStorage,
    store: str,
    name: str,
    shards: int = 2,
    scheme: str = "s3",
    **fields: Any,
) -> tuple[Any, ...]:
    """Write a corpus, upload it, and return the configurations that read either."""
    folder = tmp_path / "data" / "set"
    for number in range(shards):
        WRITERS[store](folder / f"s{number}", numbered(LENGTHS, 2 + 100_000 * number))
    (folder / "README.md").write_text("a companion")
    config = settings(tmp_path / "data", **fields)
    uri = upload(tmp_path / "data", name, proxy.server, scheme)
    return config, replace(config, data_path=uri, index_dir=str(tmp_path / "index"))


@pytest.mark.slow
@pytest.mark.parametrize("store", WRITERS)
def test_the_order_of_the_data_does_not_depend_on_where_they_are(tmp_path: Path, proxy: FaultProxy, store: str) -> None:
    local, remote = local_and_remote(
        tmp_path, proxy, store, f"order-{store}", reset_attention_mask=True, strip_tokens="2,41"
    )
    ours, theirs = open_stream(local), open_stream(remote)
    for step in (*range(12), 3000):  # a later epoch, too
        for name, value in ours.batch(step).items():
            assert np.array_equal(value, theirs.batch(step)[name])
    state = ours.state(12)  # a checkpoint of the one continues with the other
    again = open_stream(remote, state=state)
    assert np.array_equal(again.batch(0)["tokens"], ours.batch(12)["tokens"])


@pytest.mark.slow
def test_data_in_google_storage_are_read_in_the_version_that_was_opened(tmp_path: Path, google: GoogleStorage) -> None:
    local, remote = local_and_remote(tmp_path, google, "lists", "order", scheme="gs", verify_data="off", sep_token=1)
    stream = open_stream(remote)
    assert np.array_equal(rows(stream, 100), rows(open_stream(local), 100))
    reads = [line for line in google.requests() if "alt=media" in line]
    assert reads and all("generation=" in line for line in reads)
    for path in location(remote.data_path).rglob("*"):
        path.unlink()
    with pytest.raises(UserError, match=r"^gs://bucket/order: "):
        open_stream(remote)


@pytest.mark.slow
def test_a_cache_of_data_that_are_local_is_said_to_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lists(tmp_path / "data" / "s0", [list(range(2, 42))] * 60)
    flags = {**ONE_PROCESS, "data_path": tmp_path / "data", "index_dir": tmp_path / "index", "sep_token": -1}
    flags |= {"num_steps": 1, "log_dir": tmp_path / "run", "data_cache_dir": tmp_path / "cache", "data_cache_gib": 2}
    train(flags)
    output = capsys.readouterr().out
    assert all(f"\n{name}: no effect without data in" in output for name in ("data_cache_dir", "data_cache_gib"))
    local = settings(tmp_path / "data", data_cache_gib=2.0)
    remote: Any
    for remote in (replace(local, data_path="s3://bucket/data"), replace(local, valid_data_path="gs://bucket/data")):
        assert remote.data_in_object_storage


@pytest.mark.parametrize("fields", [{}, {"verify_data": "off", "data_cache_gib": 1e-5}])
def test_reading_ahead_and_a_small_cache_change_nothing(
    tmp_path: Path, proxy: FaultProxy, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, remote = local_and_remote(tmp_path, proxy, "flat", f"ahead-{len(fields)}", **fields)
    expected = rows(open_stream(local), 80)
    stream, fetched = open_stream(remote), list[int]()
    fetch = stream.fetch

    def recorded(step: int) -> int:
        fetched.append(step)
        return fetch(step)

    monkeypatch.setattr(stream, "fetch", recorded)
    prefetcher = Prefetcher(stream, 1)  # of two threads, either may begin
    assert np.array_equal([prefetcher.batch(step)["tokens"][0] for step in range(80)], expected)
    prefetcher.close()
    assert fetched == list(range(len(fetched))) and len(fetched) >= 80


def test_reading_ahead_waits_for_no_answer(tmp_path: Path, proxy: FaultProxy) -> None:
    local, remote = local_and_remote(tmp_path, proxy, "flat", "answers", shards=6, sep_token=1, shuffle="documents")
    stream, answer, answered = open_stream(remote), Event(), list[int]()
    before = len(proxy.requests)
    proxy.plan = lambda number, method, path: answered.append(number) or "" if answer.wait(PATIENCE) else "503"  # type: ignore[func-returns-value]
    assert sum(stream.fetch(step) for step in range(20)) > 0
    assert not answered and len(proxy.requests) - before <= 6  # nothing is read before it is opened
    answer.set()
    assert np.array_equal(rows(stream, 20), rows(open_stream(local), 20))


class Requested:
    """A stream of which every batch is a MiB, and `size` bytes are requested for each."""

    batch_bytes = 1 << 20

    def __init__(self, size: int) -> None:
        self.size, self.steps = size, list[int]()
        self.ahead = RequestedAhead(RangeCache("", 0))

    def read_ahead(self, first: int, length: int) -> None:
        """See Stream."""
        self.ahead.follow(self.fetch, first, length)

    def fetch(self, step: int) -> int:
        """See Stream."""
        self.steps.append(step)
        return self.size

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """See Stream."""
        return {"tokens": np.array([step])}


@pytest.mark.parametrize(("size", "ahead"), [(0, FETCH_AHEAD), (FETCH_BYTES // 4, 4)])
def test_what_is_requested_ahead_is_bounded(size: int, ahead: int) -> None:
    stream = Requested(size)
    prefetcher = Prefetcher(stream, 1)  # type: ignore[arg-type]
    for step in range(3 * FETCH_AHEAD):
        assert prefetcher.batch(step)["tokens"] == step
        assert max(stream.steps) < step + AHEAD + ahead
    prefetcher.batch(1)  # a step out of order
    prefetcher.close()
    assert stream.steps[: 3 * FETCH_AHEAD] == list(range(3 * FETCH_AHEAD)) and stream.steps.count(1) == 2


def test_a_cache_folder_makes_the_second_run_local_and_stays_within_its_size(tmp_path: Path, proxy: FaultProxy) -> None:
    local, remote = local_and_remote(tmp_path, proxy, "flat", "folder", sep_token=1)
    cache = tmp_path / "cache"
    local = replace(local, seq_length=256)
    remote = replace(remote, seq_length=256, data_cache_dir=str(cache))
    epoch = 2 * (sum(LENGTHS) + len(LENGTHS)) // 256
    expected = rows(open_stream(local), epoch)
    assert np.array_equal(rows(open_stream(remote), epoch), expected)
    before = len(proxy.requests)
    again = open_stream(remote)
    assert np.array_equal(rows(again, epoch), expected)
    requests = [request for request in proxy.requests[before:] if request[0] == "GET" and request[2] > 10_000]
    assert not requests  # listings and first bytes only
    small = replace(remote, data_cache_dir=str(tmp_path / "small"), data_cache_gib=100_000 / 2**30)
    assert np.array_equal(rows(open_stream(small), epoch), expected)
    assert 0 < sum(file.stat().st_size for file in (tmp_path / "small").iterdir()) <= 100_000


def test_indexing_reads_the_headers_of_large_batches_only(tmp_path: Path, proxy: FaultProxy) -> None:
    folder = tmp_path / "data" / "set"
    file = write_lists(folder / "s", numbered([5000] * 600), batch=200)
    config = settings(tmp_path / "data", sep_token=1, vocab_size=1 << 24)
    uri = upload(tmp_path / "data", "headers", proxy.server)
    remote = replace(config, data_path=uri, index_dir=str(tmp_path / "index"))
    read = len(proxy.requests)
    theirs = open_stream(remote)
    size = file.stat().st_size
    assert sum(count for _, _, count in proxy.requests[read:]) < size / 10
    assert np.array_equal(rows(theirs, 3), rows(open_stream(config), 3))


@pytest.mark.slow
def test_prepared_data_are_moved_to_object_storage_and_complete_with_their_flags(
    tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    pytest.importorskip("pretraining.extensions.tokenizers")
    from pretraining.tools.convert.export_tokenizer import export_tokenizer
    from pretraining.tools.prepare import prepare

    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    words = "which text is it that a tokenizer of so few ids can learn from and divide again"
    for name in "abcdefgh":  # of which some are for validation
        lines = (f"{name} {number} {words[number % 60 :]}" for number in range(60))
        (tmp_path / "in" / f"{name}.txt").write_text("\n".join(lines))
    command = [f"--input={tmp_path}/in", "--vocab_size=300", "--processes=1", "--valid_every=2"]
    there = "s3://bucket/prepared/new"
    proxy.plan = lambda number, method, path: "403" if method == "PUT" and "tokenizer" in path else ""
    assert prepare.main([*command, f"--output={there}"]) == 2  # the upload ends in its middle
    assert not (location(there) / "flags.txt").is_file()
    proxy.plan = lambda number, method, path: ""
    program = [*python(), "-m", "pretraining.tools.prepare", *command, f"--output={there}"]
    call(program, folder=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert prepare.main([*command, f"--output={there}"]) == 0  # there is nothing to do
    assert prepare.main([*command, f"--output={tmp_path}/local"]) == 0
    local = {str(path.relative_to(tmp_path / "local")): path for path in (tmp_path / "local").rglob("*")}
    files = {name: path for name, path in local.items() if path.is_file() and path.parent.name != RECORDS}
    assert {str(path)[len(there) + 1 :] for path in location(there).rglob("*") if path.is_file()} == files.keys()
    same = {name: path for name, path in files.items() if name != FLAGS}
    assert all((location(there) / name).read_bytes() == path.read_bytes() for name, path in same.items())
    assert f"--valid_data_path={there}/valid" in (location(there) / FLAGS).read_text()
    for folder in (location(there), location(f"{tmp_path}/local")):
        (folder / "tokenizer_config.json").write_bytes(b'{"chat_template": "{{ messages[0].content }}"}')
    exported = export_tokenizer(f"{there}/tokenizer.model")
    assert exported == export_tokenizer(f"{tmp_path}/local/tokenizer.model")
    assert b"chat_template" in exported[1]["tokenizer_config.json"]
    assert not list((tmp_path / "data").iterdir())
    error = refusal(prepare.main, [*command, "--text_key=other", f"--output={there}"])
    assert f"{there}: prepared from something else (settings changed" in error


@pytest.mark.slow
def test_another_start_makes_one_request_for_each_shard(tmp_path: Path, proxy: FaultProxy) -> None:
    counts = []
    for shards in (2, 6):
        _, remote = local_and_remote(tmp_path / str(shards), proxy, "flat", f"starts-{shards}", shards, sep_token=1)
        open_stream(remote)
        before = len(proxy.requests)
        open_stream(remote)
        counts.append(len(proxy.requests) - before)
    assert counts[1] - counts[0] == 4


@pytest.mark.slow
# "slow" comes first: what the others read ahead may be repeated after their end, which the same counter counts.
@pytest.mark.parametrize("fault", ["slow", "cut", "500", "503", "truncate"])
def test_a_passing_network_error_is_repeated_and_counted(tmp_path: Path, proxy: FaultProxy, fault: str) -> None:
    local, remote = local_and_remote(tmp_path, proxy, "flat", f"passing-{fault}", shards=1)
    expected, before = rows(open_stream(local), 10), RETRIES.count
    proxy.plan = lambda number, method, path: fault if number % 6 == 0 else ""
    with closing(open_stream(remote)) as stream:
        assert np.array_equal(rows(stream, 10), expected)
    assert RETRIES.count > before or fault == "slow"  # which a busy machine may make slow enough for a repetition


@pytest.mark.slow
def test_while_storage_is_away_process_0_says_what_is_waited_for(
    tmp_path: Path, proxy: FaultProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "RETRIES", objects.Retries())  # an earlier test may have printed one just now
    for rank, printed in (("1", 0), ("0", 1)):
        _, remote = local_and_remote(tmp_path / rank, proxy, "flat", f"waited-for-{rank}", shards=1)
        monkeypatch.setenv("RANK", rank)
        # Five failures of the object that is looked for first, by one thread: the last pause is over a second long.
        left = iter(["503"] * 5)
        proxy.plan = lambda number, method, path, left=left: next(left, "") if "plan.json" in path else ""  # type: ignore[misc]
        with closing(open_stream(remote)):
            lines = capsys.readouterr().out.splitlines()
        assert len(lines) == printed, lines
        assert all(
            re.match(r"waiting: s3://bucket/waited-for.* cannot be reached \(.*\), tried until ", x) for x in lines
        )


def test_storage_that_stays_away_is_one_error_that_names_the_object(
    tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, remote = local_and_remote(tmp_path, proxy, "flat", "away", shards=1)
    stream = open_stream(remote)
    monkeypatch.setattr(objects, "RETRY_FOR", 0.5)
    proxy.plan = lambda number, method, path: "503"
    with pytest.raises(StorageError, match=r"^s3://bucket/away/set/s0.arrow: cannot .*check the network") as away:
        stream.batch(0)
    assert away.value.code == 5  # scripts/train.sh starts the run again
    proxy.plan = lambda number, method, path: ""
    stream.batch(0)


def test_an_object_that_is_truncated_changed_or_gone_is_one_error_that_names_it(
    tmp_path: Path, proxy: FaultProxy
) -> None:
    _, remote = local_and_remote(tmp_path, proxy, "flat", "changed", shards=1, verify_data="off", data_cache_gib=1e-6)
    shard = tmp_path / "data" / "set" / "s0.arrow"
    content = shard.read_bytes()
    for change in (content[: len(content) // 2], content[::-1]):
        stream = open_stream(remote)
        stream.batch(0)
        shard.write_bytes(change)
        upload(tmp_path / "data", "changed", proxy.server)
        with pytest.raises(UserError, match=r"s3://bucket/changed/set/s0.arrow: (changed while|truncated)"):
            rows(stream, 100)
        shard.write_bytes(content)
        upload(tmp_path / "data", "changed", proxy.server)
    stream = open_stream(remote)
    ObjectPath("s3://bucket/changed/set/s0.arrow").request(lambda client, name: client.delete_file(name))
    with pytest.raises(UserError, match=r"s3://bucket/changed/set/s0.arrow: (no such object|.*NO_SUCH_KEY)"):
        rows(stream, 100)


def test_one_request_for_the_version_proves_all_ranges_that_were_read_before_it(
    tmp_path: Path, proxy: FaultProxy
) -> None:
    (tmp_path / "object").write_bytes(content := bytes(range(250)) * 40)
    uri = f"{upload(tmp_path, 'versions', proxy.server)}/object"
    file, cache = OBJECTS.open(uri, stamp_of(uri)), RangeCache("", 1 << 20)

    def answered(method: str) -> int:
        return sum(request[0] == method and request[2] >= (method == "GET") for request in proxy.requests)

    def read(ranges: list[tuple[int, int]]) -> None:
        data = cache.read(file, ranges)
        assert all(data.read_at(start, stop - start) == content[start:stop] for start, stop in ranges)

    ranges = [(start, start + 100) for start in range(0, 9000, 100)]
    cache.begin(file, ranges[:30])
    read(ranges[:30])
    assert answered("HEAD") == 3  # for the stamp, when the object is opened, when it is read
    cache.begin(file, ranges[30:60])
    wait_until(lambda: not cache.begin(file, ranges[:30]) and answered("HEAD") > 3)  # before the ranges are needed
    read(ranges[:60])
    cache.begin(file, ranges[60:])
    wait_until(lambda: answered("GET") == 90)  # nothing proves these before the object is replaced
    (tmp_path / "object").write_bytes(content[:5000])
    upload(tmp_path, "versions", proxy.server)
    read(ranges[:60])
    for unproved in (ranges[60:], [(9000, 10_000)], [(9990, 10_000)]):  # the last are requested now, and not there
        with pytest.raises(StorageError, match=f"^{uri}: changed while it is read"):
            read(unproved)


def test_refused_credentials_are_an_error_that_does_not_show_them(
    tmp_path: Path, proxy: FaultProxy, capfd: pytest.CaptureFixture[str]
) -> None:
    proxy.plan = lambda number, method, path: "403"
    with pytest.raises(UserError, match=r"s3://bucket/secret.*: refused .*check the credentials") as error:
        open_stream(settings(tmp_path, data_path="s3://bucket/secret"))
    printed = "".join(capfd.readouterr()) + str(error.value)
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in printed
    proxy.plan = lambda number, method, path: ""
    with pytest.raises(UserError, match=r"refused .*: check the name of the bucket, none-of-this-name, and its region"):
        location("s3://none-of-this-name/x").write_bytes(b"1")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("data_path", "s3://me:password@bucket/x", r"=s3://\*\*\*@bucket/x +must be the bucket .*environment"),
        ("data_path", "s3://bucket/x?secret_key=password", r"must be the bucket and the name alone"),
        ("data_path", "http://host/x", "must be a local path, or begin with s3:// or gs://"),
        ("data_path", "s3://", "names no bucket"),
        ("log_dir", "s3://bucket/run", r"--log_dir=s3://bucket/run +must be a local path"),
    ],
)
def test_a_uri_that_cannot_be_used_is_refused_without_its_password(flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        configure({flag: value})
    assert "password" not in str(error.value)


def test_a_missing_folder_suggests_the_nearest_one(tmp_path: Path, proxy: FaultProxy) -> None:
    _, remote = local_and_remote(tmp_path, proxy, "flat", "near/here", shards=1)
    with pytest.raises(UserError, match=r"s3://bucket/near/hare: no such folder; did you mean here\?"):
        open_stream(replace(remote, data_path=remote.data_path.replace("here", "hare")))
