"""One checkpoint: what is saved comes back bit for bit, whole or in pieces, and only once it is committed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pretraining import storage
from pretraining.checkpoint import files
from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.store import is_weight, load
from pretraining.config.errors import UserError
from pretraining.extensions.checkpoints import read_tensors
from pretraining.parallel.engine import OPTIONAL
from tests.checkpoint.saving import save
from tests.faults.damage import fill_disk, flip_bit_at

FACTS = Facts(step=3, tokens_seen=96, data={"position": 12}, config={"seed": 1}, engine="xla", mesh={"shard": 8})

Cut = tuple[int, int]  # into rows and columns
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))
CUTS = st.tuples(st.integers(1, 4), st.integers(1, 4))
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets and sizes of each


class Pieces(Tensor):
    """A tensor that offers itself in given boxes through DCP's checkpointable protocol, as an engine's does."""

    whole: Tensor
    boxes: Boxes

    @staticmethod
    def __new__(cls: type[Pieces], whole: Tensor, boxes: Boxes) -> Pieces:
        made = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)
        made.whole, made.boxes = whole, boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.size()),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        sizes = next(sizes for offsets, sizes in self.boxes if offsets == tuple(index.offset or ()))
        cuts = zip(index.offset or (), sizes, strict=True)
        return self.whole[tuple(slice(start, start + size) for start, size in cuts)]


def grid(shape: tuple[int, int], rows: int, columns: int) -> Boxes:
    """`shape` cut into about rows x columns boxes, the last ones smaller."""
    high, wide = -(-shape[0] // rows), -(-shape[1] // columns)
    return [
        ((top, left), (min(high, shape[0] - top), min(wide, shape[1] - left)))
        for top in range(0, shape[0], high)
        for left in range(0, shape[1], wide)
    ]


def sample() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(64, 32),
        "model.norm.weight": torch.randn(32).bfloat16(),
        "empty": torch.zeros(0, 3),
        "optimizer.step": torch.tensor(257.0),
        "optimizer.exp_avg.model.norm.weight": torch.randn(32),
    }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def test_what_is_saved_comes_back_bit_for_bit_from_json_and_ordinary_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, sample(), FACTS)
    assert path == tmp_path / "step_3"
    assert_equal(read_tensors(path), sample())
    assert open_checkpoint(path).facts == FACTS
    weights = {name: tensor for name, tensor in sample().items() if is_weight(name)}
    for read in (read_tensors(path, is_weight), load_file(path / "weights-00000.safetensors")):
        assert_equal(read, weights)
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json", ""}  # nothing is a pickle
    assert json.loads((path / "facts.json").read_text())["tokens_seen"] == 96


@settings(max_examples=40)
@given(shape=SHAPES, saved=CUTS, loaded=CUTS, block=st.sampled_from([4, 12, 64]))
def test_pieces_of_any_cut_load_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, shape: Cut, saved: Cut, loaded: Cut, block: int
) -> None:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("files", "shards", "manifest"):  # small blocks: reads begin and end inside them
            patch.setattr(f"pretraining.checkpoint.{module}.BLOCK", block)
        path = save(tmp_path_factory.mktemp("c"), {"w": Pieces(whole, grid(shape, *saved))}, FACTS)
        target = torch.zeros(shape)
        load(open_checkpoint(path), {"w": Pieces(target, grid(shape, *loaded))})
    assert torch.equal(target, whole)


def test_a_tensor_in_pieces_reads_whole_and_its_pieces_carry_their_offsets(tmp_path: Path) -> None:
    whole = torch.randn(8, 6)
    path = save(tmp_path, {"w": Pieces(whole, grid((8, 6), 2, 1))}, FACTS)
    assert torch.equal(read_tensors(path)["w"], whole)
    assert set(load_file(path / "weights-00000.safetensors")) == {"w@0,0", "w@4,0"}


def test_a_tensor_that_is_not_wholly_written_is_never_committed(tmp_path: Path) -> None:
    """torch-xla's own planner offers no piece at all of a partially replicated tensor, and reports success."""
    incomplete: list[Boxes] = [[], [((0, 0), (4, 6))]]
    for boxes in incomplete:
        with pytest.raises(RuntimeError, match=r"(24 of 48 elements|nothing) of w w(ere|as) written"):
            save(tmp_path, {"w": Pieces(torch.randn(8, 6), boxes), "v": torch.ones(2)}, FACTS)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 8])
def test_the_files_do_not_depend_on_the_number_of_threads(tmp_path: Path, workers: int) -> None:
    path = save(tmp_path / str(workers), sample(), FACTS, workers=workers)
    reference = save(tmp_path / "reference", sample(), FACTS, workers=3)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {p.name: p.read_bytes() for p in reference.iterdir()}


def test_bfloat16_on_disk_halves_the_bytes_and_keeps_the_step_count_and_the_figures_of_steps(tmp_path: Path) -> None:
    figures = {name: 2.5 + torch.randn(2, 128) / 500 for name in OPTIONAL}  # all of them are 2.5 in bfloat16
    state = {"w": torch.randn(256, 64), "optimizer.step": torch.tensor(257.0), **figures}
    path = save(tmp_path, state, FACTS, dtype=torch.bfloat16)
    read = read_tensors(path)
    assert read["optimizer.step"] == 257.0  # 256 in bfloat16
    assert all(torch.equal(read[name], tensor) for name, tensor in figures.items())
    assert torch.equal(read["w"], state["w"].bfloat16())
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(open_checkpoint(path), target)
    assert torch.equal(target["w"], state["w"].bfloat16().float())


def test_a_model_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, sample(), FACTS)
    target = {"model.embed_tokens.weight": torch.zeros(64, 16), "other": torch.zeros(1)}
    target["model.norm.weight"] = torch.zeros(32)
    message = r"other is missing; model.embed_tokens.weight has shape \[64, 32\], .* needs \[64, 16\]"
    with pytest.raises(UserError, match=message):
        load(open_checkpoint(path), target)
    assert not target["model.norm.weight"].any()


def test_a_folder_without_its_marker_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, sample(), FACTS)
    (path / "COMMITTED").unlink()
    with pytest.raises(UnreadableError, match="never finished"):
        read_tensors(path)


def test_a_save_sets_aside_what_stands_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "step_3.partial").mkdir()
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "notes").write_text("a person's")
    path = save(tmp_path, {"w": torch.ones(4)}, FACTS)
    assert torch.equal(read_tensors(path)["w"], torch.ones(4))
    assert {p.name for p in tmp_path.iterdir()} == {"step_3", "step_3.damaged"}
    assert (tmp_path / "step_3.damaged" / "notes").read_text() == "a person's"


def test_digests_cover_every_block(tmp_path: Path) -> None:
    state = {"w": torch.zeros(files.BLOCK // 2 + 1)}  # fp32: two blocks and four bytes
    entry = open_checkpoint(save(tmp_path, state, FACTS)).manifest.tensors["w"]
    assert len(entry.pieces[0].digests) == 3


def test_exchanged_words_and_a_lost_page_are_found() -> None:
    block = bytes(torch.randn(4096, generator=torch.Generator().manual_seed(0)).view(torch.uint8).numpy())
    lost = block[:4096] + bytes(4096) + block[8192:]
    for damaged in (block[8:16] + block[:8] + block[16:], lost, block[4096:8192] * 4):
        assert not files.is_intact(memoryview(damaged), files.checksum(block))


def test_a_damaged_checkpoint_of_format_1_is_refused(tmp_path: Path) -> None:
    """It has SHA-256 of every block; tests/golden continues from it undamaged."""
    path = copytree(Path(__file__).parents[1] / "golden" / "checkpoint" / "step_4", tmp_path / "step_4")
    file = path / "weights-00000.safetensors"
    read_tensors(path)
    flip_bit_at(file)
    with pytest.raises(UnreadableError, match="differ from what was saved"):
        read_tensors(path)


def test_an_error_of_a_flush_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretraining.storage.UNSYNCED", 1000)
    monkeypatch.setattr("os.fdatasync", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, sample(), FACTS)
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_folder_is_synced_before_the_checkpoint_appears_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut, unlike a kill, loses what was written and not synced."""
    events: list[str] = []

    def watch(name: str) -> None:
        call = getattr(os, name)

        def watched(target: Any, *rest: Any, **named: Any) -> Any:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
            events.append(f"{name} {path.name}")
            return call(target, *rest, **named)

        monkeypatch.setattr(os, name, watched)

    for name in ("pwrite", "fsync", "rename"):
        watch(name)
    path = save(tmp_path, sample(), FACTS)
    appeared = events.index("rename step_3.partial")
    for file in path.iterdir():
        last_write = max(i for i, event in enumerate(events) if event == f"pwrite {file.name}")
        assert last_write < events.index(f"fsync {file.name}") < appeared
    assert events.index("fsync COMMITTED") > max(events.index(f"fsync {f.name}") for f in path.iterdir() if f.suffix)
    assert events[appeared - 1 :] == ["fsync step_3.partial", "rename step_3.partial", f"fsync {tmp_path.name}"]


def test_who_may_write_to_a_checkpoint_and_its_lock_is_the_umask_s_choice(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        storage.DISK.lock(tmp_path, "run_name").release()
        storage.DISK.write_file(tmp_path / "weights", b"")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / storage.LOCK, tmp_path / "weights")] == [0o664] * 2
