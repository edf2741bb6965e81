"""The differences of two checkpoints are those that torch finds, and equal blocks are not read."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.extend import Codec
from bcp.testing.storage_fakes import CountingBackend

BLOCK = 1 << 20
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
ZLIB = Codec("zlib", zlib.compress, zlib.decompress)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several blocks and of a few bytes, of all dtypes."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "large": torch.rand(3 * BLOCK // 4 + 5, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    for number, dtype in enumerate(DTYPES):
        made[f"d{number}"] = torch.randint(0, 2, (17, 5), generator=generator).to(dtype)
    return made


def save(path: Path, states: dict[str, Any], **options: Any) -> Path:
    bcp.save(path, states, options=bcp.SaveOptions(record=False, **options))
    return path


def clones(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values.items()}


def by_torch(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> dict[str, tuple[int, float]]:
    """Return how many elements differ, and how far, by torch's own comparison of values."""
    found = {}
    for name in one.keys() & two.keys():
        wide = torch.complex128 if one[name].is_complex() else torch.float64
        distance = (one[name].to(wide) - two[name].to(wide)).abs()
        if distance.any():
            found[name] = int((distance != 0).sum()), float(distance.max())
    return found


def found_by(difference: bcp.tools.Difference) -> dict[str, tuple[int, float | None]]:
    return {each.name: (each.elements, each.largest) for each in difference.tensors}


@pytest.mark.parametrize("codecs", [(), (ZLIB,)], ids=["plain", "codec"])
def test_any_changes_are_those_of_torch(tmp_path: Path, codecs: tuple[Codec, ...]) -> None:
    chance = random.Random(8)  # noqa: S311 -- no secret
    one = tensors()
    first = save(tmp_path / "first", {"model": one}, codecs=codecs)
    for trial in range(6):
        two = clones(one)
        for name in chance.sample(sorted(two), chance.randint(1, 5)):
            flat = two[name].view(-1)
            for at in {chance.randrange(len(flat)) for _ in range(min(3, len(flat)))}:
                flat[at] = 1 - flat[at].to(torch.float32).item() if flat.dtype != torch.bool else not flat[at].item()
        second = save(tmp_path / f"second-{trial}", {"model": two}, codecs=codecs)
        difference = bcp.tools.diff(first, second, options=bcp.LoadOptions(codecs=codecs))
        assert found_by(difference) == by_torch(one, two)
        assert difference.equal == len(one) - len(by_torch(one, two))
        assert bool(difference) == bool(by_torch(one, two))


def test_only_blocks_with_other_checksums_are_read(tmp_path: Path) -> None:
    one = {"large": torch.rand(2 * BLOCK), "small": torch.rand(3)}  # 8 MiB
    two = clones(one)
    two["large"][BLOCK] += 1.0
    backends = [
        CountingBackend(LocalBackend(save(tmp_path / name, {"model": model})))
        for name, model in (("one", one), ("two", two))
    ]
    difference = bcp.tools.diff(*backends)
    assert found_by(difference) == by_torch(one, two)
    for backend in backends:
        data: Counter[str] = Counter({key: n for key, n in backend.read.items() if key.startswith("model/")})
        assert BLOCK <= data.total() <= BLOCK + (4 << 10)
    assert difference.read_nbytes == BLOCK


def test_equal_checkpoints_cost_no_data(tmp_path: Path) -> None:
    model = tensors()
    backends = [CountingBackend(LocalBackend(save(tmp_path / name, {"model": model}))) for name in ("one", "two")]
    difference = bcp.tools.diff(*backends)
    assert not difference
    assert difference.equal == len(model)
    assert not [key for backend in backends for key in backend.read if key.startswith("model/")]


def test_names_dtypes_and_shapes(tmp_path: Path) -> None:
    one = {"gone": torch.rand(3), "dtype": torch.rand(2), "shape": torch.rand(4), "same": torch.ones(5)}
    two = {"new": torch.rand(3), "dtype": torch.rand(2).double(), "shape": torch.rand(2, 2), "same": torch.ones(5)}
    difference = bcp.tools.diff(save(tmp_path / "a", {"model": one}), save(tmp_path / "b", {"model": two}))
    assert (difference.removed, difference.added) == ((("model", "gone"),), (("model", "new"),))
    assert [(each.name, each.before, each.after) for each in difference.tensors] == [
        ("dtype", "float32[2]", "float64[2]"),
        ("shape", "float32[4]", "float32[2, 2]"),
    ]
    assert difference.equal == 1


@pytest.mark.parametrize(
    ("one", "two", "largest"),
    [(0.0, -0.0, 0.0), (1.0, math.nan, math.nan), (math.nan, math.nan, None), (math.inf, 1.0, math.inf)],
    ids=str,
)
def test_bits_count(tmp_path: Path, one: float, two: float, largest: float | None) -> None:
    """Zeros of two signs differ, and a nan is itself."""
    paths = [save(tmp_path / str(n), {"model": {"w": torch.tensor([1.0, x])}}) for n, x in enumerate((one, two))]
    found = bcp.tools.diff(*paths).tensors
    assert [each.elements for each in found] == ([] if largest is None else [1])
    if largest is not None:
        assert found[0].largest == pytest.approx(largest, nan_ok=True)


def test_values_and_objects(tmp_path: Path) -> None:
    def states(rate: float, epoch: int) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=rate),
            "extra_states": {"epoch": epoch},
        }

    paths = [save(tmp_path / str(n), states(*pair)) for n, pair in enumerate([(0.125, 1), (0.25, 1), (0.125, 2)])]
    difference = bcp.tools.diff(paths[0], paths[1])
    assert {(each.name, each.before, each.after) for each in difference.values} == {
        ("param_groups.weight.lr", "0.125", "0.25"),
        ("param_groups.bias.lr", "0.125", "0.25"),
    }
    assert (difference.objects, difference.tensors, bool(difference)) == ((), (), True)
    assert bcp.tools.diff(paths[0], paths[2]).objects == ("extra_states of rank 0",)


def test_a_tied_tensor_differs_with_the_one_that_it_shares(tmp_path: Path) -> None:
    paths = []
    for fill in (1.0, 2.0):
        w = torch.full((4,), fill)
        paths.append(save(tmp_path / str(fill), {"model": {"a": w, "b": w, "c": torch.zeros(2)}}))
    assert found_by(bcp.tools.diff(*paths)) == {"a": (4, 1.0), "b": (4, 1.0)}


def test_damage_is_no_difference(tmp_path: Path) -> None:
    one, two = save(tmp_path / "a", {"model": tensors()}), save(tmp_path / "b", {"model": tensors(1)})
    (file,) = (two / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(bcp.CorruptError, match=file.name):
        bcp.tools.diff(one, two)


class Shelf:
    """A data loader of one reader, whose units have a number."""

    reader, readers = 0, 1

    def __init__(self, number: int) -> None:
        self.number = number

    def shared_state(self) -> dict[str, int]:
        return {"count": 2}

    def unit_states(self) -> dict[str, int]:
        return {"0": 0, "1": self.number}

    def wanted_units(self, _: Any, __: Any) -> list[str]:
        return []

    def load_units(self, _: Any, __: Any) -> None:
        return None

    def prepare(self, _: int) -> None:
        return None


def test_units_of_data_loaders_are_compared(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2), ("c", 1)):
        save(tmp_path / name, {"model": {"w": torch.ones(2)}, "dataloader": {"shelf": Shelf(number)}})
    assert bcp.tools.diff(tmp_path / "a", tmp_path / "b").objects == ("dataloader of rank 0",)
    assert not bcp.tools.diff(tmp_path / "a", tmp_path / "c")
