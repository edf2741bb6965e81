"""Hostile metadata over files of another library: the checksum is right, and keys, sizes and places are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from samples import sample

import bcp
from bcp.backends import LocalBackend
from bcp.format.container import digest, seal
from bcp.format.foreign_files import FOREIGN_MAGIC, ForeignFiles, unread
from bcp.format.metadata import METADATA_KEY, Metadata, as_stored, decode_metadata, encode_foreign, encode_layout
from bcp.plan.layout import Layout
from bcp.testing.storage_fakes import CountingBackend

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
TIMES = sample([40, 1000], 40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An imported folder of two files, beside a secret."""
    save_file({"secret": torch.full((12,), 7.0)}, tmp_path / "secret.safetensors")
    (tmp_path / "there" / "deep").mkdir(parents=True)
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / "there" / f"{name}.safetensors")
    bcp.tools.import_files(tmp_path / "there", copy=False)
    return tmp_path / "there"


def forge(
    folder: Path, change: Callable[[ForeignFiles], ForeignFiles], of_layout: Callable[[Layout], Layout] | None = None
) -> None:
    """Replace the stored metadata by others, whose checksum is right."""
    found = decode_metadata((folder / METADATA_KEY).read_bytes(), "")
    assert found.foreign is not None
    layout = found.layout if of_layout is None else of_layout(found.layout)
    data = encode_foreign(encode_layout(layout), found.commit, change(found.foreign))
    (folder / METADATA_KEY).write_bytes(as_stored(data))


def refused(folder: Path, words: str, error: type[bcp.CheckpointError] = bcp.CorruptError) -> None:
    """See that nothing opens the folder, and that nothing but the metadata is read."""
    target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    for look in (lambda at: bcp.Checkpoint(at).names(), lambda at: bcp.load(at, {"model": target})):
        backend = CountingBackend(LocalBackend(folder))
        with pytest.raises(error, match=words):
            look(backend)
        assert set(backend.read) <= {METADATA_KEY}


def first_key(key: str) -> Callable[[ForeignFiles], ForeignFiles]:
    return lambda files: replace(files, key=[key, *files.key[1:]])


UPWARDS = ["../secret.safetensors", "deep/../../secret.safetensors", "..\\secret", "deep/.."]


@pytest.mark.parametrize("key", [*UPWARDS, "/etc/passwd", "a\0b", "", ".", "a//b", "deep/", "/"])
def test_a_key_outside_of_the_folder(folder: Path, key: str) -> None:
    forge(folder, first_key(key))
    refused(folder, "leaves the folder")


@pytest.mark.parametrize("key", ["missing.safetensors", "deep", "link.safetensors", "linked/secret.safetensors"])
def test_a_key_that_is_no_file_of_the_folder(folder: Path, key: str) -> None:
    (folder / "link.safetensors").symlink_to(folder.parent / "secret.safetensors")
    (folder / "linked").symlink_to(folder.parent)
    forge(folder, first_key(key))
    refused(folder, f"{key} is missing or a link")


@pytest.mark.parametrize("key", [METADATA_KEY, "model/00000-0123456789abcdef.safetensors"])
def test_a_key_that_is_a_name_of_bcp(folder: Path, key: str) -> None:
    forge(folder, first_key(key))
    refused(folder, "name of bcp's own files")


def grown(files: ForeignFiles, base: Any, nbytes: Any) -> ForeignFiles:
    return replace(files, base=files.base + np.array([base, 0]), nbytes=files.nbytes + np.array([nbytes, 0]))


def first_row(files: ForeignFiles) -> ForeignFiles:
    return replace(files, key=files.key[:1], base=files.base[:1], nbytes=files.nbytes[:1])


def in_layout(nbytes: int) -> Callable[[Layout], Layout]:
    return lambda layout: replace(layout, file_nbytes=layout.file_nbytes + np.array([nbytes, 0]))


@pytest.mark.parametrize(
    ("change", "layout", "words"),
    [
        (lambda files: grown(files, 0, 8), in_layout(8), "bytes, and had"),
        (lambda files: files, in_layout(8), "not that of the layout"),
        (lambda files: grown(files, -8 - int(files.base[0]), 0), None, "at byte -8 of"),
        (lambda files: grown(files, 10**6, 0), None, "at byte 10000"),
        (lambda files: replace(files, base=np.array([2**63 - 1, 0]), nbytes=files.nbytes), None, "at byte 9223"),
        (lambda files: replace(files, ranks=0), None, "of 0 ranks"),
        (lambda files: replace(files, is_file=True), None, "stands for one file"),
        (first_row, None, "1 files"),
        (lambda files: replace(files, values={("model", "more"): "1"}), None, "values that are not"),
    ],
)
def test_numbers_that_do_not_fit(
    folder: Path,
    change: Callable[[ForeignFiles], ForeignFiles],
    layout: Callable[[Layout], Layout] | None,
    words: str,
) -> None:
    forge(folder, change, layout)
    refused(folder, words)


def test_a_file_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    bcp.tools.import_files(tmp_path, copy=False)
    forge(tmp_path, lambda files: replace(files, key=["a.safetensors"] * 2))
    refused(tmp_path, "a file twice")


def test_objects_that_files_of_another_library_do_not_have(folder: Path) -> None:
    """They are looked for in receipts, and there are none."""
    values = {("dataloader", "train/"): "[0,24]"}
    objects = {"objects": tuple(values), "object_rank": np.zeros(1, np.int64)}
    forge(folder, lambda files: replace(files, values=values), lambda layout: replace(layout, **objects))
    refused(folder, "opaque objects")


def test_other_ranks(folder: Path) -> None:
    forge(folder, lambda files: files, lambda layout: replace(layout, world_size=5))
    refused(folder, "for 2 of the layout")


def test_a_framework_of_bcp_does_not_lead_to_receipts(folder: Path) -> None:
    found = decode_metadata((folder / METADATA_KEY).read_bytes(), "")
    data = rebuilt(replace(found, commit=replace(found.commit, framework="dcp")))
    (folder / METADATA_KEY).write_bytes(data)
    assert set(bcp.dcp.StorageReader(folder).read_metadata().state_dict_metadata)
    assert bcp.Checkpoint(folder).names() == ["a", "b"]


def rebuilt(found: Metadata) -> bytes:
    assert found.foreign is not None
    return as_stored(encode_foreign(encode_layout(found.layout), found.commit, found.foreign))


def test_a_value_that_says_it_cannot_be_read(folder: Path) -> None:
    values = {("model", "x"): unread("because")}
    objects = {"objects": tuple(values), "object_rank": np.zeros(1, np.int64)}
    forge(folder, lambda files: replace(files, values=values), lambda layout: replace(layout, **objects))
    with pytest.raises(bcp.CheckpointError, match="because"):
        _ = bcp.Checkpoint(folder).values
    assert torch.equal(bcp.Checkpoint(folder).read("a"), TENSORS["a"])


def test_the_form_that_is_sent_between_ranks_is_not_stored(folder: Path) -> None:
    data = (folder / METADATA_KEY).read_bytes()
    (folder / METADATA_KEY).write_bytes(seal(data[:-24], FOREIGN_MAGIC))
    refused(folder, "not written by a save of bcp", bcp.NotACheckpointError)


def test_hostile_metadata_can_be_removed(folder: Path) -> None:
    forge(folder, first_key("../secret.safetensors"))
    result = bcp.tools.remove(folder)
    assert (result.files, result.kept) == (1, ("a.safetensors", "b.safetensors"))
    assert (folder.parent / "secret.safetensors").exists()


# -- bytes that were changed ---------------------------------------------------------------------------


def loaded(folder: Path) -> Mapping[str, bytes]:
    """Read all that there is, by a load and by a checkpoint."""
    ckpt = bcp.Checkpoint(folder)
    _ = ckpt.values, repr(ckpt), ckpt.verify(), ckpt.user_metadata
    with suppress(bcp.CorruptError):
        _ = ckpt.created
    target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    bcp.load(folder, {"model": target})
    return {name: ckpt.read(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in ckpt.names()}


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("sealed", [False, True])
def test_changed_bytes_end_in_errors_of_bcp(folder: Path, times: int, *, sealed: bool) -> None:
    """Bytes change below the checksum, or the checksum is made right again. Then they load what the file has."""
    data, dice = (folder / METADATA_KEY).read_bytes(), random.Random(11)  # noqa: S311 -- no secret
    everything = b"".join(file.read_bytes() for file in folder.glob("*.safetensors"))
    outcomes = set()
    for _ in range(times):
        changed = bytearray(data)
        for _ in range(dice.choice([1, 1, 2, 8])):
            changed[dice.randrange(len(changed) - 24 * sealed)] ^= dice.randrange(1, 256)
        if sealed:
            changed[-24:-8] = digest(bytes(changed[:-24]))
        (folder / METADATA_KEY).write_bytes(changed)
        try:
            found = loaded(folder)
        except bcp.BcpError as error:
            outcomes.add(type(error).__name__)
            continue
        outcomes.add("loaded")
        assert all(part in everything for part in found.values())
    assert "CorruptError" in outcomes
    assert ("loaded" in outcomes) is sealed


@pytest.mark.parametrize("times", TIMES)
def test_every_cell_of_the_tables_may_be_hostile(folder: Path, times: int) -> None:
    """Cells of the tables before the layout get numbers and texts that nobody would write."""
    numbers = [-(2**63), -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1]
    texts = ["", "..", "/", "a.safetensors", "b.safetensors", METADATA_KEY, "é" * 9, "x" * 5000, "a.safetensors/"]
    original = (folder / METADATA_KEY).read_bytes()
    found = decode_metadata(original, "")
    expected = loaded(folder)
    files, dice, outcomes = found.foreign, random.Random(3), set()  # noqa: S311 -- no secret
    assert files is not None
    for _ in range(times):
        base, nbytes, key = files.base.copy(), files.nbytes.copy(), list(files.key)
        for _ in range(dice.choice([1, 1, 2])):
            column, at = dice.choice([base, nbytes, key]), dice.randrange(2)
            column[at] = dice.choice([column[at], *(texts if column is key else numbers)])
        ranks = dice.choice(numbers) if dice.random() < 0.2 else 1
        changed = replace(files, key=key, base=base, nbytes=nbytes, ranks=ranks)
        (folder / METADATA_KEY).write_bytes(rebuilt(replace(found, foreign=changed)))
        try:
            values = loaded(folder)
        except bcp.CheckpointError:
            outcomes.add("refused")
            continue
        outcomes.add("loaded")
        assert values == expected
    assert outcomes == {"loaded", "refused"}
    (folder / METADATA_KEY).write_bytes(original)
    assert anyio.run(bcp.tools.aremove, folder).files == 1
