"""Ranks share the work of tools: the results are those of one rank, and a failure of one rank is a failure of all."""

from __future__ import annotations

import asyncio
import filecmp
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file
from tasks import on_ranks

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.errors import InputError, PeerError, StorageError
from bcp.read.shares import Share
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

COUNT = 3
BLOCK = 1 << 20


def model(fill: float = 0.0, mib: int = 2) -> dict[str, torch.Tensor]:
    """Return two tensors of some MiB, and one of a few bytes."""
    generator = torch.Generator().manual_seed(3)
    made = {f"w{n}": torch.rand(mib << 18, generator=generator) + fill for n in range(2)}
    return made | {"small": torch.rand(5, generator=generator)}


def saved(path: Path, ranks: int, tensors: dict[str, torch.Tensor], **states: Any) -> Path:
    """Save a checkpoint by so many ranks."""
    options = bcp.SaveOptions(record=False)

    async def save(_: int, coordinator: Any) -> None:
        await bcp.asave(path, {"model": tensors, **states}, options=options, coordinator=coordinator)

    assert on_ranks(ranks, save) == [None] * ranks
    return path


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("model/*"))


def flip(file: Path, at: int) -> None:
    """Damage a byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def read_of(backend: CountingBackend) -> int:
    """Return the bytes of data files that were read."""
    return sum(nbytes for key, nbytes in backend.read.items() if key.startswith("model/"))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same(one: Path, two: Path) -> bool:
    names = files(one)
    return names == files(two) and filecmp.cmpfiles(one, two, names, shallow=False) == (names, [], [])


# -- shares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 3, 8, 20])
def test_every_item_is_divided_once(items: int, readers: int) -> None:
    parts = [(item, part) for reader in range(readers) for item, part in Share(reader, readers).parts(range(items))]
    for item in range(items):
        own = [part for found, part in parts if found == item]
        assert sorted(each for part in own for each in part.of(range(20))) == list(range(20))
    assert sum(part == Share() for _, part in parts) == items - items % readers


# -- verify ------------------------------------------------------------------------------------------


def verified(path: Path, **keywords: Any) -> tuple[list[Any], list[CountingBackend]]:
    backends = [CountingBackend(LocalBackend(path)) for _ in range(COUNT)]

    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.averify(backends[rank], coordinator=ranks, **keywords)

    return [replace(found, seconds=0.0) for found in on_ranks(COUNT, call)], backends


@pytest.mark.parametrize(("savers", "mib"), [(1, 12), (2, 2), (3, 2), (4, 2)])
def test_ranks_verify_equal_shares(savers: int, mib: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", savers, model(mib=mib))
    expected = replace(bcp.Checkpoint(path).verify(), seconds=0.0)
    assert len(data_files(path)) == savers
    found, backends = verified(path)
    assert found == [expected] * COUNT
    read = [read_of(backend) for backend in backends]
    assert sum(read) == expected.nbytes
    if savers in (1, COUNT):  # files of 2 MiB are no equal shares otherwise
        assert max(read) <= expected.nbytes // COUNT + BLOCK
    assert verified(path, fast=True)[0] == [replace(bcp.Checkpoint(path).verify(fast=True), seconds=0.0)] * COUNT


@pytest.mark.parametrize("savers", [1, 4])
def test_damage_that_one_rank_finds_all_report(savers: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", savers, model())
    for number, file in enumerate(data_files(path)):
        for at in (BLOCK + number, file.stat().st_size - 1):
            flip(file, at)
    last = data_files(path)[-1]
    last.rename(last.with_suffix(".gone"))
    (receipt, *_) = sorted(path.glob("receipts/*"))
    if savers > 1:
        receipt.unlink()
    expected = replace(bcp.Checkpoint(path).verify(), seconds=0.0)
    assert len(expected.damage) == savers
    assert verified(path)[0] == [expected] * COUNT


def test_progress_of_a_verification_ends_at_its_bytes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = bcp.tools.verify(saved(tmp_path / "a", 1, model()), progress=lambda *pair: told.append(pair))
    assert told[-1] == (found.nbytes, found.nbytes)


# -- diff --------------------------------------------------------------------------------------------


def compared(one: Path, two: Path, **keywords: Any) -> tuple[list[Any], list[CountingBackend]]:
    backends = [CountingBackend(LocalBackend(path)) for path in [one, two] * COUNT]

    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.adiff(*backends[2 * rank : 2 * rank + 2], coordinator=ranks, **keywords)

    return on_ranks(COUNT, call), backends


@pytest.mark.parametrize(("first", "second", "mib"), [(1, 1, 12), (3, 3, 2), (4, 4, 2), (1, 4, 2)])
def test_ranks_compare_equal_shares(first: int, second: int, mib: int, tmp_path: Path) -> None:
    before, after = model(mib=mib), model(0.5, mib)
    before["w1"][0] = float("nan")
    after["small"] = before["small"]
    one = saved(tmp_path / "one", first, before, extra_states={"epoch": 1}, optimizer={"lr": 0.5, "same": 1})
    two = saved(tmp_path / "two", second, after, extra_states={"epoch": 2}, optimizer={"lr": 0.25, "same": 1})
    backends = [CountingBackend(LocalBackend(path)) for path in (one, two)]
    expected = bcp.tools.diff(*backends)
    assert {each.name: each.elements for each in expected.tensors} == dict.fromkeys(("w0", "w1"), mib << 18)
    assert [each.name for each in expected.values] == ["lr"]
    assert len(expected.objects) == max(first, second)
    assert [backend.calls["get"] for backend in backends] == [1 + first, 1 + second], "each receipt once"
    found, counted = compared(one, two)
    assert [repr(each) for each in found] == [repr(expected).replace(str(one), "CountingBackend")] * COUNT
    read = [read_of(backend) for backend in counted]
    if (first, second) != (4, 4):  # as above
        assert max(read) <= (2 * mib * BLOCK) // COUNT + 2 * BLOCK


def test_a_tie_that_the_other_checkpoint_lacks_hides_nothing(tmp_path: Path) -> None:
    shared = torch.ones(4)
    one = saved(tmp_path / "one", 1, {"a": shared, "b": shared, "c": shared})
    two = saved(tmp_path / "two", 1, {"a": torch.ones(4), "b": torch.zeros(4), "c": torch.ones(4)})
    for pair in ((one, two), (two, one)):
        assert [(each.name, each.elements) for each in bcp.tools.diff(*pair).tensors] == [("b", 4)]


def test_a_pattern_compares_what_it_names(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", 1, model(), optimizer={"w1.lr": 0.5, "w0.lr": 0.5}, extra_states={"epoch": 1})
    changed = model(1.0)
    two = saved(tmp_path / "two", 1, changed, optimizer={"w1.lr": 1.0, "w0.lr": 1.0}, extra_states={"epoch": 2})
    three = saved(tmp_path / "three", 2, changed, optimizer={"w1.lr": 1.0, "w0.lr": 1.0})
    for other in (two, three):
        backend = CountingBackend(LocalBackend(other))
        found = bcp.tools.diff(one, backend, glob="w1*")
        assert [each.name for each in found.tensors] == ["w1"]
        assert [each.name for each in found.values] == ["w1.lr"]
        assert (found.objects, found.equal) == ((), 0)
        assert 2 * BLOCK <= read_of(backend) < 4 * BLOCK + (64 << 10), "blocks at both ends have other tensors, too"
    with pytest.raises(bcp.FqnMismatchError, match="no tensor and no value that matches glob='nothing'"):
        bcp.tools.diff(one, two, glob="nothing")


def test_a_pattern_reads_the_receipts_that_it_needs(tmp_path: Path) -> None:
    paths = [
        saved(tmp_path / str(fill), COUNT, {f"w{n}": torch.full((9,), fill) for n in range(6)}) for fill in (0.0, 1.0)
    ]
    backends = [CountingBackend(LocalBackend(path)) for path in paths]
    (found,) = bcp.tools.diff(*backends, glob="w3").tensors
    assert (found.name, found.elements, found.largest) == ("w3", 9, 1.0)
    assert [backend.calls["get"] for backend in backends] == [1 + 1, 1 + 1]


# -- copy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("savers", [1, 2, 3, 4])
def test_ranks_copy_shares(savers: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", savers, model(), extra_states={"epoch": 3})
    older = saved(tmp_path / "b", 1, model(2.0))
    backends = [CountingBackend(LocalBackend(source)) for _ in range(COUNT)]
    targets = [CountingBackend(LocalBackend(older)) for _ in range(COUNT)]

    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.acopy(backends[rank], targets[rank], overwrite=True, coordinator=ranks)

    results = on_ranks(COUNT, call)
    assert {(result.files, result.nbytes) for result in results} == {
        (len(files(source)), sum(file.stat().st_size for file in source.glob("[em]*/*")))
    }
    assert same(source, older)
    read = [read_of(backend) for backend in backends]
    assert sum(read) == sum(file.stat().st_size for file in data_files(source))
    assert sorted(bool(nbytes) for nbytes in read) == [number < savers for number in (2, 1, 0)]
    assert [target.calls["put_if"] for target in targets] == [1, 0, 0]


@pytest.mark.parametrize("operation", ["open_write", "write_part", "put"])
@pytest.mark.parametrize("rank_at_fault", range(COUNT))
def test_a_rank_that_cannot_write_ends_the_copy_of_all(operation: str, rank_at_fault: int, tmp_path: Path) -> None:
    source, store = saved(tmp_path / "a", COUNT, {"w": torch.rand(3 << 18)}), MemoryBackend(str(tmp_path))

    async def call(rank: int, ranks: Any) -> Any:
        target = FaultyBackend(store, operation, StorageError("full"), nth=1 if rank == rank_at_fault else 1000)
        return await bcp.tools.acopy(source, target, coordinator=ranks)

    errors = on_ranks(COUNT, call)
    assert [isinstance(error, PeerError) for error in errors] == [rank != rank_at_fault for rank in range(COUNT)]
    assert all(error.rank == rank_at_fault for error in errors if isinstance(error, PeerError))
    assert all("full" in str(error) for error in errors)
    assert asyncio.run(store.list()) == [], "nothing is left"


def test_ranks_that_have_copied_wait_for_the_last_one(tmp_path: Path) -> None:
    """Two ranks are done when the third fails: rank 0 deletes their files."""
    source, store = saved(tmp_path / "a", COUNT, {"w": torch.rand(3 << 18)}), MemoryBackend(str(tmp_path))

    async def fail_late(_: str) -> None:
        while sum(info.key.startswith("receipts/") for info in await store.list()) < COUNT - 1:  # noqa: ASYNC110 -- the store tells nobody
            await anyio.sleep(0.01)
        raise StorageError("full")

    async def call(rank: int, ranks: Any) -> Any:
        target = FaultyBackend(store, "put", fail_late, nth=1 if rank == 1 else 1000)
        return await bcp.tools.acopy(source, target, coordinator=ranks)

    errors = on_ranks(COUNT, call)
    assert [getattr(error, "rank", None) for error in errors] == [1, None, 1]
    assert asyncio.run(store.list()) == []


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_whose_write_ends_after_the_failure_of_another_tells_that_failure(
    late_rank: int, tmp_path: Path
) -> None:
    """Rank 0 deletes the files of all ranks, also what a rank is just writing."""
    source, store = saved(tmp_path / "a", COUNT, {"w": torch.rand(3 << 18)}), MemoryBackend(str(tmp_path))

    async def be_swept(_: str) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            raise StorageError("the file was deleted meanwhile") from None

    async def call(rank: int, ranks: Any) -> Any:
        wrong = be_swept if rank == late_rank else StorageError("full")
        target = FaultyBackend(store, "put", wrong, nth=1 if rank in (late_rank, 2) else 1000)
        return await bcp.tools.acopy(source, target, coordinator=ranks)

    errors = on_ranks(COUNT, call)
    assert [getattr(error, "rank", None) for error in errors] == [2, 2, None]
    assert all("full" in str(error) for error in errors)
    assert asyncio.run(store.list()) == []


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_a_commit_that_is_not_answered_leaves_a_whole_checkpoint_or_none(is_carried_out: bool, tmp_path: Path) -> None:  # noqa: FBT001 -- a case
    source, target = saved(tmp_path / "a", COUNT, {"w": torch.rand(3 << 18)}), saved(tmp_path / "b", 1, model())
    late: list[Any] = []

    class Silent(CountingBackend):
        async def put_if(self, key: str, data: Any, expected: Any) -> Any:
            late.append((key, bytes(data), expected))
            if is_carried_out:
                await self.inner.put_if(*late[0])
            raise StorageError("no answer")

    async def call(_: int, ranks: Any) -> Any:
        return await bcp.tools.acopy(source, Silent(LocalBackend(target)), overwrite=True, coordinator=ranks)

    assert {type(error) for error in on_ranks(COUNT, call)} == {StorageError}
    assert len(late) == 1
    if not is_carried_out:
        assert asyncio.run(LocalBackend(target).put_if(*late[0])) is not None
    assert bcp.Checkpoint(target).verify()
    assert bcp.Checkpoint(target).operation == bcp.Checkpoint(source).operation


def test_damage_is_not_copied_by_any_rank(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", COUNT, {"w": torch.rand(3 << 18)})
    flip(data_files(source)[-1], BLOCK)

    async def call(_: int, ranks: Any) -> Any:
        return await bcp.tools.acopy(source, tmp_path / "b", coordinator=ranks)

    errors = on_ranks(COUNT, call)
    assert sorted(type(error).__name__ for error in errors) == ["CorruptError", "PeerError", "PeerError"]
    assert all(data_files(source)[-1].name in str(error) for error in errors)
    assert files(tmp_path / "b") == []


# -- arguments ---------------------------------------------------------------------------------------

Call = Callable[[Path, Any], Awaitable[Any]]
CALLS: Sequence[Call] = [
    lambda path, ranks: bcp.tools.averify(path, coordinator=ranks),
    lambda path, ranks: bcp.tools.adiff(path, path, coordinator=ranks),
    lambda path, ranks: bcp.tools.acopy(path, path.parent / "copy", coordinator=ranks),
    lambda path, ranks: bcp.tools.aexport_hf(path, path.parent / "copy", coordinator=ranks),
    lambda path, ranks: bcp.tools.aexport_torch(path, path.parent / "copy" / "model.pt", coordinator=ranks),
]


@pytest.mark.parametrize("tool", CALLS)
def test_ranks_with_other_paths_are_told_so(tool: Call, tmp_path: Path) -> None:
    one, other = [saved(tmp_path / name, 1, {"w": torch.ones(3)}) for name in "ab"]
    paths = [one, one, other]
    errors = on_ranks(COUNT, lambda rank, ranks: tool(paths[rank], ranks))
    assert {type(error) for error in errors} == {InputError}
    assert all(f"rank 2 has {other} of" in str(error) and f"rank 0 {one} of" in str(error) for error in errors)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("tool", CALLS)
def test_a_rank_without_the_checkpoint_is_named(tool: Call, tmp_path: Path) -> None:
    paths = [saved(tmp_path / "a", 1, {"w": torch.ones(3)})] * 2 + [tmp_path / "nothing"]
    errors = on_ranks(COUNT, lambda rank, ranks: tool(paths[rank], ranks))
    assert [type(error).__name__ for error in errors] == ["PeerError", "PeerError", "NotACheckpointError"]
    assert all("nothing is not a checkpoint" in str(error) for error in errors)


@pytest.mark.parametrize("tool", CALLS)
def test_no_checkpoint_is_the_same_error_on_all_ranks(tool: Call, tmp_path: Path) -> None:
    errors = on_ranks(COUNT, lambda _, ranks: tool(tmp_path / "nothing", ranks))
    assert [type(error).__name__ for error in errors] == ["NotACheckpointError"] * COUNT


def hub(folder: Path, count: int = 3) -> Path:
    """Write a folder of another library."""
    folder.mkdir()
    save_file({"w": torch.ones(count)}, folder / "model.safetensors")
    return folder


IMPORTS: Sequence[Call] = [
    lambda path, ranks: bcp.tools.aimport_files(path, copy=False, coordinator=ranks),
    lambda path, ranks: bcp.tools.aimport_files(path, path.parent / "copy", coordinator=ranks),
]


@pytest.mark.parametrize("tool", IMPORTS)
def test_imports_of_other_files_are_refused_on_all_ranks(tool: Call, tmp_path: Path) -> None:
    paths = [hub(tmp_path / "a"), hub(tmp_path / "b")]
    errors = on_ranks(2, lambda rank, ranks: tool(paths[rank], ranks))
    assert [type(error) for error in errors] == [InputError] * 2
    assert all(f"rank 1 has {paths[1]}" in str(error) and f"rank 0 {paths[0]}" in str(error) for error in errors)
    assert files(tmp_path) == ["a/model.safetensors", "b/model.safetensors"]


@pytest.mark.parametrize("at_fault", range(2))
@pytest.mark.parametrize("copy", [False, True])
def test_what_one_rank_cannot_import_no_rank_imports(copy: bool, at_fault: int, tmp_path: Path) -> None:  # noqa: FBT001 -- a case
    path, target = hub(tmp_path / "a"), tmp_path / "b"

    async def call(rank: int, ranks: Any) -> Any:
        goal = target if copy != (rank == at_fault) else None
        return await bcp.tools.aimport_files(path, goal, copy=copy, coordinator=ranks)

    errors = on_ranks(2, call)
    assert [type(error) for error in errors] == [InputError if rank == at_fault else PeerError for rank in range(2)]
    assert files(tmp_path) == ["a/model.safetensors"]


def test_ranks_that_see_other_files_under_one_path_are_told_so(tmp_path: Path) -> None:
    backends = [LocalBackend(hub(tmp_path / str(count), count)) for count in (3, 4)]

    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.aimport_files(backends[rank], tmp_path / "copy", coordinator=ranks)

    errors = on_ranks(2, call)
    assert all(
        isinstance(error, InputError) and "rank 1 has LocalBackend of operation" in str(error) for error in errors
    )
    assert not (tmp_path / "copy").exists()


def test_a_target_in_the_way_is_told_to_all(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", 1, {"w": torch.ones(3)})
    saved(tmp_path / "copy", 1, {"w": torch.ones(3)})
    assert {type(error) for error in on_ranks(COUNT, lambda _, ranks: CALLS[2](source, ranks))} == {bcp.ExistsError}
    assert bcp.Checkpoint(tmp_path / "copy").verify()


def test_other_tools_on_other_ranks_are_told_so(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", 1, {"w": torch.ones(3)})
    errors = on_ranks(2, lambda rank, ranks: CALLS[rank](path, ranks))
    assert all("verify" in str(error) and "diff" in str(error) for error in errors)
