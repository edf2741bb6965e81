"""Checkpoints whose checksums are right and whose numbers are not, opened by the public calls."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import model, training

import bcp
from bcp.format.container import digest, encode_table, read_table, seal
from bcp.format.metadata import COMMIT, decode_metadata, encode_layout, encode_metadata, receipt_key
from bcp.format.receipt import Blocks, FileReceipt, Receipt, decode_receipt, encode_receipt, receipt_digest
from bcp.runtime.staging import Lease

GIB = 1 << 30
ZLIB = bcp.extend.Codec("zlib", zlib.compress, zlib.decompress)


def forge(
    path: Path,
    receipt: Callable[[Receipt], Receipt] = lambda found: found,
    layout: Callable[[Any], Any] = lambda found: found,
    commit: Callable[[Any], Any] = lambda found: found,
) -> None:
    """Change what a checkpoint of one rank says, and make all checksums right again."""
    file = path / "metadata.arrow"
    found = decode_metadata(file.read_bytes(), "here")
    key = path / receipt_key(0, found.commit.operation)
    data = encode_receipt(receipt(decode_receipt(key.read_bytes(), "here")))
    key.write_bytes(data)
    changed = replace(commit(found.commit), receipts=receipt_digest(data))
    file.write_bytes(encode_metadata(encode_layout(layout(found.layout)), changed))


def data_file(change: Callable[[FileReceipt], FileReceipt], kind: int = 0) -> Callable[[Receipt], Receipt]:
    """Change the file of a kind in a receipt."""

    def changed(receipt: Receipt) -> Receipt:
        return replace(receipt, files=[change(file) if file.kind == kind else file for file in receipt.files])

    return changed


def one_block(extra: int, stored: int | None = None) -> Callable[[FileReceipt], FileReceipt]:
    """Claim that a file is longer by so many bytes, and one block."""

    def changed(file: FileReceipt) -> FileReceipt:
        nbytes = file.nbytes + extra
        length = nbytes if stored is None else stored
        blocks = Blocks.build([length], [nbytes], [file.blocks.checksum[0]])
        return replace(file, nbytes=nbytes, stored_nbytes=length, blocks=blocks)

    return changed


def header_of(nbytes: int) -> Callable[[FileReceipt], FileReceipt]:
    """Claim that a file has a header of so many bytes, and one block."""
    return lambda file: replace(one_block(nbytes - file.data_start)(file), data_start=nbytes)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Write down the staging memory that is asked for, and give none that is large."""
    sizes: list[int] = []
    take = Lease.take

    def noted(lease: Lease, nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return take(lease, min(nbytes, 1 << 24))

    monkeypatch.setattr(Lease, "take", noted)
    return sizes


@pytest.mark.parametrize("nbytes", [4 * GIB, 64 * GIB, 1 << 45, 1 << 61])
def test_a_block_that_its_file_cannot_hold_takes_no_memory(tmp_path: Path, taken: list[int], nbytes: int) -> None:
    bcp.save(tmp_path, model())
    forge(tmp_path, data_file(header_of(nbytes)))
    with pytest.raises(
        bcp.CorruptError, match=rf"model/\S+ is too short, its receipt says {nbytes + 4000} bytes, .*block 0"
    ):
        bcp.load(tmp_path, model(0))
    assert max(taken, default=0) < 1 << 20


@pytest.mark.parametrize("nbytes", [4 * GIB, 1 << 61])
def test_an_extra_that_its_file_cannot_hold_takes_no_memory(tmp_path: Path, taken: list[int], nbytes: int) -> None:
    states = {"extra_states": {"step": 7}}
    bcp.save(tmp_path, states)
    forge(tmp_path, data_file(header_of(nbytes), kind=3))
    with pytest.raises(bcp.CorruptError, match=r"extra_states/\S+ is too short, its receipt says \d+ bytes, .*block 0"):
        bcp.load(tmp_path, states)
    assert max(taken, default=0) < 1 << 20


def test_a_file_that_is_gone_is_named_before_memory_is_taken(tmp_path: Path, taken: list[int]) -> None:
    bcp.save(tmp_path, model())
    forge(tmp_path, data_file(header_of(4 * GIB)))
    (file,) = (tmp_path / "model").iterdir()
    file.unlink()
    with pytest.raises(bcp.CorruptError, match=rf"{file.name} is missing, its receipt says"):
        bcp.load(tmp_path, model(0))
    assert max(taken, default=0) < 1 << 20


MIB = 1 << 20


def cut(lengths: Sequence[int]) -> Callable[[FileReceipt], FileReceipt]:
    """Claim other blocks of the same bytes; the last one takes what is left."""

    def changed(file: FileReceipt) -> FileReceipt:
        sizes = [*lengths, file.nbytes - sum(lengths)]
        return replace(file, blocks=Blocks.build(sizes, sizes, [b"x" * 16] * len(sizes)))

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut([]), r"has 1 blocks, and 4194304 bytes of data in blocks of 1048576 bytes are 4"),
        (cut([4096 + 2 * MIB, MIB, 1000]), r"block 0 has 2101248 bytes instead of 1052672"),
        (cut([4096 + MIB, MIB - 16, MIB]), r"block 1 has 1048560 bytes instead of 1048576"),
        (cut([4096 + MIB, MIB, MIB, MIB // 2]), r"has 5 blocks, and 4194304 bytes"),
    ],
)
def test_blocks_of_other_sizes_than_the_formats_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    bcp.save(tmp_path, model(count=MIB))
    forge(tmp_path, data_file(change))
    with pytest.raises(bcp.CorruptError, match=rf"the receipt of model/\S+ (says that )?{message}"):
        bcp.load(tmp_path, model(0, count=MIB))


def test_a_part_that_claims_to_decode_to_terabytes_takes_no_memory(tmp_path: Path) -> None:
    """The metadata claims a tensor that large as well, which a load may leave out."""
    states = {"model": {"a": torch.ones(1000), "b": torch.ones(1000)}}
    bcp.save(tmp_path, states, options=bcp.SaveOptions(codecs=[ZLIB]))
    huge = 1 << 39

    def tensors(layout: Any) -> Any:
        table = layout.tensors
        shape, length = table.shape.copy(), layout.length.copy()
        shape[1], length[1] = huge // 4, huge // 4
        line = layout.segments.line.copy()
        line[-1] = line[-2] + huge // 4
        nbytes = layout.file_nbytes + huge - 4000
        segments = replace(layout.segments, line=line)
        return replace(
            layout, tensors=replace(table, shape=shape), length=length, segments=segments, file_nbytes=nbytes
        )

    def claim(file: FileReceipt) -> FileReceipt:
        return one_block(huge - 4000, file.stored_nbytes)(file)

    forge(tmp_path, data_file(claim), tensors, lambda commit: replace(commit, part_bytes=1 << 40))
    tracemalloc.start()
    try:
        with pytest.raises(bcp.CorruptError, match=rf"decoded part 0 to \d+ bytes, {huge + 8096} were encoded"):
            bcp.load(
                tmp_path, {"model": {"a": torch.zeros(1000)}}, strict=False, options=bcp.LoadOptions(codecs=[ZLIB])
            )
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("saved", [(), (ZLIB,)])
@pytest.mark.parametrize("kind", ["model", "extra_states"])
def test_codecs_of_which_the_commit_record_knows_nothing_are_refused(
    tmp_path: Path, kind: str, saved: Sequence[bcp.extend.Codec]
) -> None:
    states = {"model": {"w": torch.ones(8)}} if kind == "model" else {"extra_states": {"step": 7}}
    bcp.save(tmp_path, states, options=bcp.SaveOptions(codecs=saved))
    forge(tmp_path, data_file(lambda file: replace(file, codecs=("brotli",)), kind=0 if kind == "model" else 3))
    words = rf"{kind}/\S+ went through codecs \['brotli'\], the commit record {re.escape(str([c.name for c in saved]))}"
    with pytest.raises(bcp.CorruptError, match=words):
        bcp.load(tmp_path, states, options=bcp.LoadOptions(codecs=[ZLIB]))


def test_a_codec_that_the_commit_record_names_has_to_be_passed(tmp_path: Path) -> None:
    bcp.save(tmp_path, model())
    forge(
        tmp_path,
        data_file(lambda file: replace(file, codecs=("brotli",))),
        commit=lambda commit: replace(commit, codecs=("brotli",)),
    )
    with pytest.raises(bcp.MissingCodecError, match="'brotli'"):
        bcp.load(tmp_path, model(0))


def test_honest_parts_and_headers_of_any_size_load(tmp_path: Path) -> None:
    """Reads of 1 MiB, parts of 8 MiB, and a header of 3 MB."""
    many = {f"{'x' * 9000}.{row:04}": torch.tensor([float(row)]) for row in range(300)}
    states = {"model": {**many, "w": torch.arange(3 * MIB, dtype=torch.float32)}, "extra_states": {"a": np.ones(MIB)}}
    options = bcp.LoadOptions(read_bytes=MIB, codecs=[ZLIB])
    for name, codecs in (("plain", []), ("encoded", [ZLIB])):
        bcp.save(tmp_path / name, states, options=bcp.SaveOptions(codecs=codecs, part_bytes=8 * MIB))
        target: dict[str, Any] = {
            "model": {key: torch.zeros_like(tensor) for key, tensor in states["model"].items()},
            "extra_states": {},
        }
        bcp.load(tmp_path / name, target, options=options)
        assert all(torch.equal(tensor, states["model"][key]) for key, tensor in target["model"].items())
        assert (target["extra_states"]["a"] == 1).all()


def value_of(path: str, text: str) -> Callable[[Receipt], Receipt]:
    """Change the value of the leaves whose path ends like that."""

    def changed(receipt: Receipt) -> Receipt:
        return replace(
            receipt, objects={key: text if key[1].endswith(path) else old for key, old in receipt.objects.items()}
        )

    return changed


def test_an_integer_of_millions_of_digits_is_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, training())
    forge(tmp_path, value_of("0.weight.weight_decay", json.dumps({"int": "0x" + "f" * 20_000_000})))
    with pytest.raises(bcp.CheckpointError, match=r"0\.weight\.weight_decay cannot be .* 20000002 hexadecimal digits"):
        bcp.load(tmp_path, training(seed=1))


def test_an_integer_that_no_load_would_accept_is_refused_by_the_save(tmp_path: Path) -> None:
    largest = (1 << 4 * 65536) - 1
    bcp.save(tmp_path / "a", {"model": {"w": torch.ones(2), "n": largest, "m": -largest}})
    target = {"model": {"w": torch.ones(2), "n": 0, "m": 0}}
    bcp.load(tmp_path / "a", target)
    assert target["model"]["n"] == largest == -target["model"]["m"]
    with pytest.raises(bcp.StateError, match="n is an integer of 262145 bits, more than 262144"):
        bcp.save(tmp_path / "b", {"model": {"w": torch.ones(2), "n": largest + 1}})
    assert not (tmp_path / "b").exists()


def test_hyper_parameters_that_python_does_not_print_are_compared_all_the_same(tmp_path: Path) -> None:
    bcp.save(tmp_path, training())
    forge(tmp_path, value_of("0.weight.weight_decay", json.dumps({"int": hex(10**5000)})))
    with pytest.raises(bcp.MismatchError, match="weight_decay=a int with an integer of very many digits"):
        bcp.load(tmp_path, training(seed=1))


def test_a_commit_record_of_nested_brackets_is_corrupt(tmp_path: Path) -> None:
    bcp.save(tmp_path, model())
    file = tmp_path / "metadata.arrow"
    payload = file.read_bytes()[:-24]
    table, layout = read_table(payload, COMMIT)
    data = encode_table(COMMIT, [table.column("digest").to_pylist()], commit="[" * 200_000) + bytes(layout)
    file.write_bytes(seal(data, b"BCPMETA"))
    with pytest.raises(bcp.CorruptError, match=r"metadata\.arrow is corrupt: maximum recursion depth"):
        bcp.load(tmp_path, model())


def test_a_dtype_that_torch_does_not_know_is_named_before_the_target_is_touched(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.ones(9), "b": torch.ones(9, dtype=torch.float64)}})
    forge(
        tmp_path,
        layout=lambda found: replace(found, tensors=replace(found.tensors, dtype=("float32", '{"float99": 1}'))),
    )
    target = {"model": {"a": torch.zeros(9), "b": torch.zeros(9, dtype=torch.float64)}}
    for cast, words in ((True, "which torch .* does not know"), (False, "pass LoadOptions.cast=True")):
        with pytest.raises(bcp.DtypeMismatchError, match=f"model: b is .*float99.* in the checkpoint, .*{words}"):
            bcp.load(tmp_path, target, options=bcp.LoadOptions(cast=cast))
        assert not target["model"]["a"].any()


def with_extra(path: Path, data: bytes) -> None:
    """Replace the object of ``extra_states`` by other bytes, less than a block."""
    (file,) = (path / "extra_states").iterdir()
    whole = file.read_bytes()[:4096] + data
    file.write_bytes(whole)
    blocks = Blocks.build([len(whole)], [len(whole)], [digest(whole)])
    forge(path, data_file(lambda old: replace(old, nbytes=len(whole), stored_nbytes=len(whole), blocks=blocks), kind=3))


def test_an_archive_that_inflates_to_gigabytes_is_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"extra_states": {"step": 7}})
    small, large = io.BytesIO(), io.BytesIO()
    torch.save({"value": {"step": torch.zeros(10)}}, small)
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(large, "w", zipfile.ZIP_DEFLATED) as made:
        for name in source.namelist():
            made.writestr(name, bytes(64 << 20) if name.endswith("data/0") else source.read(name))
    assert len(large.getvalue()) < 100_000
    with_extra(tmp_path, large.getvalue())
    with pytest.raises(bcp.CheckpointError, match=r"extra_states/\S+ cannot be read: .* would unpack to 671\d+ bytes"):
        bcp.load(tmp_path, {"extra_states": {}})


def test_an_object_that_contains_one_list_in_many_places_is_refused_at_once(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"extra_states": {"step": 7}})
    laugh: Any = [0]
    for _ in range(60):
        laugh = [laugh, laugh]
    data = io.BytesIO()
    torch.save({"value": {"laugh": laugh}}, data)
    with_extra(tmp_path, data.getvalue())
    with pytest.raises(bcp.CheckpointError, match=r"cannot be read: .* name more values than they can hold"):
        bcp.load(tmp_path, {"extra_states": {}})
