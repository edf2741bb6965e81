"""Loads that read straight into tensors and loads that do not: the same bits, the same words about what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from anyio import to_thread
from checkpoints import MIB, equal, flip, tensors, training
from tasks import on_ranks

import bcp
from bcp.backends import LocalBackend
from bcp.runtime import staging
from bcp.testing.storage_fakes import CountingBackend

ZSTD = bcp.extend.Codec(
    "zstd",
    encode=lambda data: zstandard.ZstdCompressor(level=1).compress(data),
    decode=lambda data: zstandard.ZstdDecompressor().decompress(data),
)
NOTE = "The target of rank 0 is half loaded"


class Scattering(CountingBackend):
    """Fills many buffers by one read, and remembers how many they were."""

    def __init__(self, root: Path, fault: BaseException | None = None) -> None:
        super().__init__(LocalBackend(root))
        self.buffers: list[int] = []
        self.fault = fault

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        self.buffers.append(len(outs))
        if self.fault is not None:
            raise self.fault
        whole = memoryview(bytearray(sum(map(len, outs))))
        await self.inner.read_into(key, start, whole)
        for out in outs:
            out[:], whole = whole[: len(out)], whole[len(out) :]


class Whole(CountingBackend):
    """Fills one buffer by one read, and cannot do more."""

    read_scattered = None

    def __init__(self, root: Path) -> None:
        super().__init__(LocalBackend(root))


WAYS = pytest.mark.parametrize("way", [Scattering, Whole])


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Have an empty pool of staging memory; yields the sizes of the buffers that are made."""
    made: list[int] = []
    allocate = staging._allocate

    def counted(nbytes: int, *, pinned: bool) -> torch.Tensor:
        made.append(nbytes)
        return allocate(nbytes, pinned=pinned)

    monkeypatch.setattr(staging, "_allocate", counted)
    staging.shared_pool(pinned=False).clear()
    yield made
    staging.shared_pool(pinned=False).clear()


def zoo() -> dict[str, torch.Tensor]:
    """Return tensors of all sorts, 5 MiB together."""
    torch.manual_seed(3)
    base = torch.randn(40, 30)
    return {
        "large": torch.randn(1 << 20),
        "bfloat16": torch.randn(300, 7).bfloat16(),
        "bool": torch.rand(1001) > 0.5,
        "complex": torch.randn(33, dtype=torch.complex64),
        "float8": torch.randn(77).to(torch.float8_e4m3fn),
        "bytes": torch.randint(0, 256, (12345,), dtype=torch.uint8),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 5),
        "transposed": base.t(),
        "every other": base[::2],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        **{f"small{n}": torch.full((n % 5 + 1,), float(n)) for n in range(300)},
    }


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    bits = (
        {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in each.items()} for each in (one, two)
    )
    return equal(next(bits), next(bits))


# -- the same bits ---------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("read_bytes", [MIB, 32 * MIB])
def test_tensors_of_all_sorts(tmp_path: Path, way: type, read_bytes: int) -> None:
    bcp.save(tmp_path, {"model": zoo()})
    target = blank(zoo())
    report = bcp.load(way(tmp_path), {"model": target}, options=bcp.LoadOptions(read_bytes=read_bytes))
    assert same(target, zoo())
    assert report.nbytes == sum(tensor.nbytes for tensor in target.values())


@WAYS
def test_a_network_and_its_optimizer(tmp_path: Path, way: type) -> None:
    bcp.save(tmp_path, {**training(), "extra_states": {"step": 1}})
    target = {**training(seed=1), "extra_states": {}}
    bcp.load(way(tmp_path), target)
    assert equal(tensors(target), tensors(training()))
    assert target["extra_states"] == {"step": 1}


@WAYS
def test_tied_tensors_are_filled_once_and_untied_ones_all(tmp_path: Path, way: type) -> None:
    weight = torch.randn(5, 4)
    bcp.save(tmp_path, {"model": {"a": weight, "b": weight}})
    tied, apart = torch.zeros(5, 4), {"a": torch.zeros(5, 4), "b": torch.zeros(5, 4)}
    bcp.load(way(tmp_path), {"model": {"a": tied, "b": tied}})
    bcp.load(way(tmp_path), {"model": apart})
    assert torch.equal(tied, weight)
    assert all(torch.equal(tensor, weight) for tensor in apart.values())


@WAYS
def test_a_part_of_what_was_saved(tmp_path: Path, way: type) -> None:
    bcp.save(tmp_path, {"model": zoo()})
    wanted = {name: zoo()[name] for name in ("bytes", "scalar", "small7", "transposed")}
    target = blank(wanted)
    bcp.load(way(tmp_path), {"model": target}, strict=False)
    assert same(target, wanted)


@WAYS
def test_dtypes_that_differ_are_converted_beside_others(tmp_path: Path, way: type) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.arange(1000.0), "b": torch.arange(1000.0)}})
    target = {"a": torch.zeros(1000, dtype=torch.float64), "b": torch.zeros(1000)}
    bcp.load(way(tmp_path), {"model": target}, options=bcp.LoadOptions(cast=True))
    assert all(tensor.tolist() == list(range(1000)) for tensor in target.values())


@WAYS
def test_encoded_files(tmp_path: Path, way: type) -> None:
    bcp.save(tmp_path, {"model": zoo()}, options=bcp.SaveOptions(codecs=[ZSTD], part_bytes=MIB))
    target, backend = blank(zoo()), way(tmp_path)
    bcp.load(backend, {"model": target}, options=bcp.LoadOptions(codecs=[ZSTD]))
    assert same(target, zoo())
    assert getattr(backend, "buffers", []) == []


# -- straight, or not ------------------------------------------------------------------------------


def test_plain_tensors_are_read_into_without_staging_memory(tmp_path: Path, staged: list[int]) -> None:
    state = {f"w{n}": torch.randn(1 << 18) for n in range(5)}
    bcp.save(tmp_path, {"model": state})
    staging.shared_pool(pinned=False).clear()
    staged.clear()
    target, backend = blank(state), Scattering(tmp_path)
    bcp.load(backend, {"model": target}, options=bcp.LoadOptions(read_bytes=2 * MIB))
    assert equal(target, state)
    assert backend.buffers == [2, 2, 2]  # the header and a tensor of 1 MiB; then two, and two
    assert backend.calls["read_into"] == 0
    assert staged == []


def test_other_tensors_share_buffers_that_stay_within_the_budget(tmp_path: Path, staged: list[int]) -> None:
    state = {f"w{n}": torch.randn(1 << 18, 2).t() for n in range(8)}
    bcp.save(tmp_path, {"model": state})
    staging.shared_pool(pinned=False).clear()
    staged.clear()
    target = {name: torch.zeros(1 << 18, 2).t() for name in state}
    bcp.load(Scattering(tmp_path), {"model": target}, options=bcp.LoadOptions(read_bytes=MIB, budget_bytes=5 * MIB))
    assert equal(target, state)
    assert 0 < sum(staged) <= 5 * MIB
    assert staging.shared_pool(pinned=False).free_nbytes == 0


def test_many_small_tensors_are_staged_and_copied_from_there(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((16,), float(n)) for n in range(2000)}
    bcp.save(tmp_path, {"model": state})
    target, backend = blank(state), Scattering(tmp_path)
    bcp.load(backend, {"model": target})
    assert equal(target, state)
    assert backend.buffers == []


def test_stages_that_the_caller_puts_in_see_the_bytes(tmp_path: Path) -> None:
    weight = torch.arange(1000, dtype=torch.int32)
    bcp.save(tmp_path, {"model": {"w": weight}})
    seen: list[bytes] = []

    async def look(loaded: Any) -> Any:
        seen.append(bytes(loaded.data.numpy()))
        return loaded

    target, backend = {"w": torch.zeros_like(weight)}, Scattering(tmp_path)
    options = bcp.LoadOptions(edit=lambda graph: graph.before("h2d", bcp.extend.Stage("look", look)))
    bcp.load(backend, {"model": target}, options=options)
    assert seen == [weight.numpy().tobytes()]
    assert torch.equal(target["w"], weight)
    assert backend.buffers == []


# -- what is wrong ---------------------------------------------------------------------------------


def saved(root: Path) -> Path:
    """Save a tensor of 3 MiB; return the data file."""
    bcp.save(root, {"model": {"w": torch.ones(3 * MIB // 4)}})
    (file,) = (root / "model").iterdir()
    return file


def refused(backend: Any, kind: type[Exception], match: str, **how: Any) -> Exception:
    with pytest.raises(kind, match=match) as caught:
        bcp.load(backend, {"model": {"w": torch.zeros(3 * MIB // 4)}}, **how)
    return caught.value


def test_a_flipped_bit_is_found_where_it_lies_and_the_target_is_called_half_loaded(tmp_path: Path) -> None:
    file = saved(tmp_path)
    start = len(file.read_bytes()) - 2 * MIB
    flip(file, start + 5)
    backend = Scattering(tmp_path)
    error = refused(backend, bcp.CorruptError, rf"{file.name} is corrupt: bytes {start} to {start + MIB} .*model: w")
    assert any(NOTE in note for note in error.__notes__)
    assert backend.buffers == [2]


def test_a_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    file = saved(tmp_path)
    flip(file, 20)
    refused(Scattering(tmp_path), bcp.CorruptError, rf"{file.name} is corrupt: bytes 0 to")


def test_without_verify_damage_goes_through(tmp_path: Path) -> None:
    flip(saved(tmp_path), -1, 7)
    target = {"w": torch.zeros(3 * MIB // 4)}
    bcp.load(Scattering(tmp_path), {"model": target}, options=bcp.LoadOptions(verify=False))
    assert target["w"][-1] == -1


class Checking(LocalBackend):
    """Says that it compares blocks with their checksums."""

    checks_blocks = True


def test_storage_that_checks_blocks_is_believed(tmp_path: Path) -> None:
    flip(saved(tmp_path), -1, 7)
    target = {"w": torch.zeros(3 * MIB // 4)}
    bcp.load(Checking(tmp_path), {"model": target})
    assert target["w"][-1] == -1


def test_blocks_that_were_checked_are_checked_again_where_they_may_change(tmp_path: Path) -> None:
    """Stages of the caller may change them, and so may the memory of a rank that sends them to others."""
    flip(saved(tmp_path), -1, 7)
    noted = bcp.LoadOptions(edit=lambda graph: graph.after("read", bcp.extend.Stage("note", unchanged)), record=False)
    refused(Checking(tmp_path), bcp.CorruptError, "is corrupt", options=noted)

    async def load(_: int, ranks: Any) -> None:
        options = bcp.LoadOptions(record=False)
        await bcp.aload(
            Checking(tmp_path), {"model": {"w": torch.zeros(3 * MIB // 4)}}, options=options, coordinator=ranks
        )

    errors = on_ranks(2, load)
    assert all(isinstance(error, bcp.BcpError) and "is corrupt" in str(error) for error in errors), errors


async def unchanged(stored: Any) -> Any:
    return stored


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    file = saved(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    error = refused(Scattering(tmp_path), bcp.CorruptError, file.name)
    assert any(NOTE in note for note in error.__notes__)


def test_a_missing_file_is_corruption(tmp_path: Path) -> None:
    file = saved(tmp_path)
    file.unlink()
    refused(Scattering(tmp_path), bcp.CorruptError, rf"{file.name} is missing, but the checkpoint names it")


def test_storage_that_fails_is_not_called_corruption(tmp_path: Path) -> None:
    file = saved(tmp_path)
    backend = Scattering(tmp_path, OSError(5, "Input/output error"))
    error = refused(backend, bcp.StageError, rf"stage 'read' failed on model/{file.name}.*Input/output error")
    assert isinstance(error.__cause__, OSError)
    assert any(NOTE in note for note in error.__notes__)


# -- beside a save ---------------------------------------------------------------------------------


class Interrupted(Scattering):
    """Calls back before every read."""

    def __init__(self, root: Path, call: Callable[[], None]) -> None:
        super().__init__(root)
        self.call = call

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        await to_thread.run_sync(self.call)
        await super().read_scattered(key, start, outs)


def test_what_is_being_loaded_is_not_saved(tmp_path: Path) -> None:
    states = {"large": zoo()["large"]}
    target, other = blank(states), {"w": torch.ones(3)}
    refused: list[str] = []

    def save() -> None:
        with pytest.raises(bcp.StateChangedError) as caught:
            bcp.save(tmp_path / "torn", {"model": {"part": target["large"][10:]}})
        refused.append(str(caught.value))
        bcp.save(tmp_path / f"other{len(refused)}", {"model": other})

    bcp.save(tmp_path / "c", {"model": states})
    bcp.load(Interrupted(tmp_path / "c", save), {"model": target})
    assert "model tensor 'part' is being loaded on rank 0 while it is to be saved" in refused[0]
    assert not (tmp_path / "torn").exists()
    bcp.save(tmp_path / "whole", {"model": target})  # the load has returned
    assert same(target, states)


def test_a_save_that_is_under_way_notices_a_load_before_its_first_byte(tmp_path: Path) -> None:
    states = {"large": zoo()["large"]}
    target, seen = torch.zeros_like(states["large"]), list[bool]()
    before = target._version
    bcp.save(tmp_path, {"model": states})
    look = Interrupted(tmp_path, lambda: seen.append(target._version > before and not target.any()))
    bcp.load(look, {"model": {"large": target}})
    assert seen == [True]
