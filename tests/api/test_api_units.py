"""Units of sharded dataloader states: written once, each by one rank, and read by those alone that want them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alike import exactly_alike
from checkpoints import Gate
from safetensors import safe_open
from samples import sample

import bcp
from bcp.backends import LocalBackend
from bcp.coordinators.local import memory_coordinators
from bcp.format.metadata import decode_metadata
from bcp.format.receipt import decode_receipt
from bcp.protocols import Buffer, ShardedState

UNITS = 12


def contents(number: int, step: int = 0) -> dict[str, Any]:
    """Return a state with tensors of all sizes and types, and nested values."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return {
        "cursor": number + step,
        "buffer": torch.randint(0, 1 << 40, (100_000 + 50_000 * number,), generator=generator),
        "mask": torch.randint(0, 2, (7_001,), generator=generator) > 0,
        "scale": torch.rand(3, 1_111, generator=generator, dtype=torch.float64).to(torch.bfloat16),
        "small": torch.rand(3, generator=generator),
        "array": np.arange(number, number + 3_000, dtype=np.int32),
        "nested": {"ids": [("web", 1, number)], "text": "ünit", None: b"\0"},
    }


class Shelf:
    """Has the units of a number that its reader has, modulo readers; takes them likewise."""

    def __init__(self, reader: int = 0, readers: int = 1, *, count: int = UNITS, size: int = 0) -> None:
        self.reader, self.readers, self.count, self.size = reader, readers, count, size
        self.units: dict[str, Any] = {}
        self.shared: Any = None
        self.asked = 0

    def mine(self) -> list[int]:
        return list(range(self.reader, self.count, self.readers))

    def shared_state(self) -> Any:
        return {"count": self.count}

    def unit_states(self) -> Mapping[str, Any]:
        self.asked += 1
        return {f"{number:05d}": contents(number, self.size) for number in self.mine()}

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> Sequence[str]:
        if shared["count"] != self.count:
            raise bcp.MismatchError(f"{shared['count']} units were saved, and there are {self.count}")
        if missing := {f"{number:05d}" for number in range(self.count)} - set(ids):
            raise bcp.StateError(f"units {sorted(missing)} are missing")
        return [f"{number:05d}" for number in self.mine()]

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        self.shared, self.units = shared, dict(units)

    def prepare(self, step: int) -> None:
        del step


class Counting(LocalBackend):
    """Counts the bytes that are read of each file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: Counter[tuple[str, int]] = Counter()

    async def read_into(self, key: str, offset: int, out: Buffer) -> None:
        if key.startswith("dataloader/"):
            self.read.update((key, offset + at) for at in range(0, len(memoryview(out)), 64))
        await super().read_into(key, offset, out)


def save(path: Any, states: Sequence[Any], **options: Any) -> list[bcp.SaveResult]:
    """Save on as many ranks as there are states."""
    return on_all_ranks(bcp.asave, path, states, **options)


def load(path: Any, states: Sequence[Any], **options: Any) -> list[bcp.LoadResult]:
    """Load on as many ranks as there are states."""
    return on_all_ranks(bcp.aload, path, states, **options)


def on_all_ranks(call: Callable[..., Awaitable[Any]], path: Any, states: Sequence[Any], **options: Any) -> list[Any]:
    """Return the reports of all ranks; raise the first rank's error when all have ended."""
    ranks = memory_coordinators(len(states))

    async def run() -> list[Any]:
        calls = [call(path, each, coordinator=rank, **options) for each, rank in zip(states, ranks, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    reports = asyncio.run(run())
    for report in reports:
        if isinstance(report, BaseException):
            raise report
    return reports


def shelves(readers: int, **how: Any) -> list[Shelf]:
    return [Shelf(reader, readers, **how) for reader in range(readers)]


def check(loaded: Sequence[Shelf], size: int = 0) -> None:
    """Check that the shelves have all units, each once, with the contents that were saved."""
    found = {name: unit for shelf in loaded for name, unit in shelf.units.items()}
    assert sum(len(shelf.units) for shelf in loaded) == len(found) == loaded[0].count
    for name, unit in found.items():
        assert exactly_alike(unit, contents(int(name), size)), name


def units_in(path: Path) -> dict[str, tuple[int, int]]:
    """Return rank and bytes of every unit, by the metadata and the receipts."""
    metadata = decode_metadata((path / "metadata.arrow").read_bytes(), "metadata")
    found = {}
    for (kind, name), rank in zip(metadata.layout.objects, metadata.layout.object_rank.tolist(), strict=True):
        if kind == "dataloader":
            receipt = next(path.glob(f"receipts/{rank:05d}-*"))
            start, stop = json.loads(decode_receipt(receipt.read_bytes(), "receipt").objects[kind, name])
            found[name] = rank, stop - start
    return found


def before_units(path: Path) -> int:
    """Return the bytes of the header and of the shared part in the first rank's file."""
    with next(path.glob("dataloader/00000-*")).open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    return header + units_in(path)["/"][1]


# -- any number of readers ---------------------------------------------------------------------------


def test_the_shelf_is_a_sharded_state() -> None:
    assert isinstance(Shelf(), ShardedState)


ZLIB = bcp.extend.Codec("zlib", lambda data: zlib.compress(data, 1), zlib.decompress)


@pytest.mark.parametrize(
    ("codecs", "saving"),
    sample(itertools.product([(), (ZLIB,)], [(3, 1, 5), (4, 2, 8)]), ((), (3, 1, 5))),
    ids=["one to five", "two to eight", "one to five, encoded", "two to eight, encoded"],
)
def test_units_move_between_any_number_of_readers(tmp_path: Path, codecs: Any, saving: tuple[int, ...]) -> None:
    for step, readers in enumerate(saving, 1):
        path = tmp_path / f"step-{step}"
        options = bcp.SaveOptions(codecs=codecs, part_bytes=1 << 20)
        save(path, [{"dataloader": shelf} for shelf in shelves(readers, size=step)], options=options)
        for count in (readers, 1, 6):
            loaded = shelves(count)
            load(path, [{"dataloader": shelf} for shelf in loaded], options=bcp.LoadOptions(codecs=codecs))
            check(loaded, step)


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": shelf} for shelf in shelves(4)], options=bcp.SaveOptions(part_bytes=1 << 20))
    backend = Counting(tmp_path)
    loaded = shelves(8)
    reports = load(backend, [{"dataloader": shelf} for shelf in loaded])
    check(loaded)
    shared = sum(64 for at in backend.read if backend.read[at] == 8)
    assert shared == before_units(tmp_path), "the shared part, and the header before it, are read by every rank"
    assert all(backend.read[at] in (1, 8) for at in backend.read)
    files = sum(file.stat().st_size for file in tmp_path.glob("dataloader/*"))
    assert sum(report.read_nbytes for report in reports) == files + 7 * shared


def test_a_rank_reads_its_own_units_alone(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": Shelf()}])
    sizes = {name: nbytes for name, (_, nbytes) in units_in(tmp_path).items()}
    loaded = shelves(4)
    reports = load(tmp_path, [{"dataloader": shelf} for shelf in loaded])
    for shelf, report in zip(loaded, reports, strict=True):
        assert report.read_nbytes == before_units(tmp_path) + sum(sizes[f"/{name}"] for name in shelf.units)


def test_several_states_plain_values_and_other_kinds_lie_beside_each_other(tmp_path: Path) -> None:
    def states(reader: int, readers: int, value: int) -> dict[str, Any]:
        return {
            "model": {"w": torch.full((1000,), float(value))},
            "dataloader": {
                "train": Shelf(reader, readers, size=value),
                "more": {"val": Shelf(reader, readers, count=3, size=value)},
                "epoch": value,
                "own": {"rank": reader * value},
            },
            "extra_states": {"step": value},
        }

    save(tmp_path, [states(rank, 2, 7) for rank in range(2)])
    loaded = [states(rank, 2, 0) for rank in range(2)]
    load(tmp_path, loaded)
    for rank, each in enumerate(loaded):
        data = each["dataloader"]
        assert (data["epoch"], data["own"], each["extra_states"]) == (7, {"rank": 7 * rank}, {"step": 7})
        assert each["model"]["w"].tolist() == [7.0] * 1000
        assert sorted(data["train"].units) == [f"{number:05d}" for number in range(rank, UNITS, 2)]
        assert all(exactly_alike(unit, contents(int(name), 7)) for name, unit in data["more"]["val"].units.items())


def test_ranks_of_one_reader_write_its_units_in_turn(tmp_path: Path) -> None:
    grid = [{"dataloader": Shelf(rank // 2, 2)} for rank in range(4)]  # two data-parallel ranks, two of each
    save(tmp_path, grid)
    owners = {name: rank for name, (rank, _) in units_in(tmp_path).items()}
    assert Counter(owners.values()) == {0: 4, 1: 3, 2: 3, 3: 3}, "12 units, and the shared part"
    loaded = [Shelf(rank // 2, 3) for rank in range(6)]
    load(tmp_path, [{"dataloader": shelf} for shelf in loaded])
    check(loaded[::2])
    check(loaded[1::2])


def test_ranks_without_a_loader_take_no_part(tmp_path: Path) -> None:
    model = {"w": torch.ones(8)}
    save(tmp_path, [{"model": model, "dataloader": Shelf()}, {"model": model}])
    assert {rank for rank, _ in units_in(tmp_path).values()} == {0}
    loaded = [Shelf(0, 2), Shelf(1, 2)]
    load(tmp_path, [{"model": model}, *({"model": model, "dataloader": shelf} for shelf in loaded)])
    check(loaded)


def test_an_unchanged_set_of_units_is_planned_once(tmp_path: Path) -> None:
    for step in range(3):
        states = [{"dataloader": shelf} for shelf in shelves(2, count=30 + 7, size=step)]
        reports = save(tmp_path / f"{step}", states)
        assert [report.plan_cached for report in reports] == [step > 0] * 2
    assert not save(tmp_path / "other", [{"dataloader": shelf} for shelf in shelves(2, count=38)])[0].plan_cached


def test_training_does_not_wait_until_units_are_copied(tmp_path: Path) -> None:
    copied: list[str] = []

    def watch(event: bcp.extend.Event) -> None:
        if isinstance(event, bcp.extend.StageEvent) and event.stage == "d2h":
            copied.append(event.item)

    async def run() -> None:
        gate = Gate()
        options = replace(gate.options, observe=watch)
        states = {"model": {"w": torch.ones(1000)}, "dataloader": Shelf()}
        pending = await bcp.asave(tmp_path, states, async_checkpoint=True, options=options)
        count = len(copied)
        gate.opened.set()
        await pending
        assert count < len(copied), "there is not staging memory for all units at once"

    asyncio.run(run())


def test_safetensors_readers_see_the_tensors_of_units(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": Shelf(count=2)}])
    with safe_open(next(tmp_path.glob("dataloader/*")), "pt") as file:
        names = set(file.keys())
        assert {"/", "/00000", "/00001", "/00000#0"} <= names
        tensors = [file.get_tensor(name) for name in names if name.startswith("/00001#")]
    assert any(tensor.dtype == torch.bfloat16 and tensor.shape == (3, 1_111) for tensor in tensors)


def test_states_prepare_in_the_step_before_a_save(tmp_path: Path) -> None:
    class Prepared(Shelf):
        steps: tuple[int, ...] = ()

        def prepare(self, step: int) -> None:
            self.steps = (*self.steps, step)

    train, val = Prepared(), Prepared(count=2)
    states = {"dataloader": {"train": train, "more": {"val": val}}}
    told = [bcp.prefetch_data_state(step, states, every_steps=4) for step in range(9)]
    assert [step for step, was in enumerate(told) if was] == [3, 7]
    assert train.steps == val.steps == (4, 8)
    bcp.save(tmp_path, states)
    other = Prepared()
    assert bcp.prefetch_data_state(11)
    assert train.steps == val.steps == (4, 8, 12)
    bcp.load(tmp_path, {"dataloader": {"train": other}}, strict=False)
    assert bcp.prefetch_data_state(12)
    assert (train.steps[-1], other.steps) == (12, (13,))
    del other
    gc.collect()
    assert not bcp.prefetch_data_state(13)
    with pytest.raises(bcp.InputError, match="every_steps=0"):
        bcp.prefetch_data_state(13, every_steps=0)


# -- refused -----------------------------------------------------------------------------------------


def test_a_unit_that_two_readers_claim_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    first, second = shelves(2)
    second.mine = lambda: [1, 2, 3]  # type: ignore[method-assign] -- 2 is the first one's
    with pytest.raises(bcp.StateError, match=r"unit '00002' is claimed by rank 0 \(reader 0\) and by rank 1"):
        save(tmp_path, [{"dataloader": first}, {"dataloader": second}])
    assert not list(tmp_path.glob("**/*.*"))


def test_readers_have_to_be_complete_and_agree_about_their_number(tmp_path: Path) -> None:
    with pytest.raises(bcp.StateError, match="has 3 readers, and no rank is reader 2"):
        save(tmp_path, [{"dataloader": Shelf(0, 3)}, {"dataloader": Shelf(1, 3)}])
    with pytest.raises(bcp.StateError, match="rank 1 is one of 3 readers, rank 0 one of 2"):
        save(tmp_path, [{"dataloader": Shelf(0, 2)}, {"dataloader": Shelf(1, 3)}])
    with pytest.raises(bcp.StateError, match="rank 0 is reader 2 of 2"):
        save(tmp_path, [{"dataloader": Shelf(2, 2)}])
    other = Shelf()
    other.mine = lambda: [0, 1]  # type: ignore[method-assign]
    with pytest.raises(bcp.StateError, match="ranks 0 and 1 are both reader 0 and differ in units"):
        save(tmp_path, [{"dataloader": Shelf()}, {"dataloader": other}])
    assert not list(tmp_path.glob("**/*.*"))


def test_shared_parts_have_to_be_equal(tmp_path: Path) -> None:
    def states(*positions: int) -> list[Any]:
        found = shelves(len(positions))
        for shelf, position in zip(found, positions, strict=True):
            shelf.shared_state = lambda position=position: {"position": position}  # type: ignore[method-assign]
        return [{"dataloader": {"train": shelf}} for shelf in found]

    for step in (5, 6):
        reports = save(tmp_path / f"{step}", states(step, step, step))
        assert reports[0].plan_cached == (step > 5)
    with pytest.raises(bcp.StateError, match="'train': ranks 0 and 2 have different shared states; all readers have"):
        save(tmp_path / "7", states(7, 7, 8))
    assert not (tmp_path / "7").exists()


def test_units_that_nobody_wants_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    saved = {"w": torch.ones(8)}
    save(tmp_path, [{"model": saved, "dataloader": Shelf()}])
    target = torch.zeros(8)
    shelf = Shelf()
    shelf.mine = lambda: [0, 1]  # type: ignore[method-assign] -- forgets the others
    with pytest.raises(bcp.StateError, match="10 units of the checkpoint are wanted by none of 1 readers"):
        load(tmp_path, [{"model": {"w": target}, "dataloader": shelf}])
    with pytest.raises(bcp.StateError, match="no rank is reader 1"):
        load(tmp_path, [{"model": {"w": target}, "dataloader": Shelf(0, 2)} for _ in range(2)])
    assert not target.any()
    assert not shelf.units
    load(tmp_path, [{"model": {"w": target}, "dataloader": shelf}], strict=False)
    assert sorted(shelf.units) == ["00000", "00001"]


def test_what_a_state_refuses_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, [{"model": {"w": torch.ones(8)}, "dataloader": Shelf()}])
    target = torch.zeros(8)
    with pytest.raises(bcp.MismatchError, match="12 units were saved, and there are 13"):
        load(tmp_path, [{"model": {"w": target}, "dataloader": Shelf(count=13)}])
    assert not target.any()


def test_states_of_other_names_are_refused(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": {"train": Shelf(), "val": Shelf()}}])
    with pytest.raises(bcp.FqnMismatchError, match="units of dataloaders that rank 0 does not have: 'val'"):
        load(tmp_path, [{"dataloader": {"train": Shelf()}}])
    with pytest.raises(bcp.FqnMismatchError, match="names that the checkpoint lacks: dataloader: test"):
        load(tmp_path, [{"dataloader": {"train": Shelf(), "val": Shelf(), "test": Shelf()}}])
    train, test = Shelf(), Shelf()
    (report,) = load(tmp_path, [{"dataloader": {"train": train, "test": test}}], strict=False)
    check([train])
    assert not test.units
    assert report.missing == ("dataloader: test",)


@pytest.mark.parametrize("unit", ["", "a/b", 3])
def test_ids_are_texts_without_a_slash(tmp_path: Path, unit: Any) -> None:
    shelf = Shelf()
    shelf.unit_states = lambda: {unit: 1}  # type: ignore[method-assign]
    with pytest.raises(bcp.InputError, match="is no id of a unit"):
        save(tmp_path, [{"dataloader": shelf}])


def test_a_state_that_raises_is_named(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.unit_states = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(bcp.StateError, match=r"the Shelf at dataloader 'train' was asked .* ZeroDivisionError"):
        save(tmp_path, [{"dataloader": {"train": shelf}}])


def test_a_state_that_raises_when_it_is_asked_what_it_wants_is_named(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": Shelf()}])
    shelf = Shelf()
    shelf.wanted_units = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(bcp.StateError, match=r"asked which units it wants and raised ZeroDivisionError"):
        load(tmp_path, [{"dataloader": shelf}])


def test_opaque_states_beside_units_keep_to_their_number_of_ranks(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": {"train": shelf, "epoch": 1}} for shelf in shelves(2)])
    with pytest.raises(bcp.MismatchError, match="saved by 2 ranks, one opaque object each, and this job has 1"):
        load(tmp_path, [{"dataloader": {"train": Shelf(), "epoch": 0}}])
    shelf = Shelf()
    load(tmp_path, [{"dataloader": {"train": shelf}}])
    check([shelf])


def test_damaged_units_are_found(tmp_path: Path) -> None:
    save(tmp_path, [{"dataloader": Shelf()}])
    file = next(tmp_path.glob("dataloader/*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(bcp.CorruptError, match=r"is corrupt: bytes .*dataloader /000"):
        load(tmp_path, [{"dataloader": Shelf()}])
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(bcp.CorruptError):
        load(tmp_path, [{"dataloader": Shelf()}])
