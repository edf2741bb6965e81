"""Every number in the files of a checkpoint replaced by others: a load ends at once and takes little memory."""

from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import training
from samples import sample
from test_api_forged import forge

import bcp
from bcp.data import Source, TokenLoader
from bcp.format.metadata import METADATA_KEY, decode_metadata
from bcp.format.receipt import decode_receipt
from bcp.telemetry.store import decode as decode_recording
from bcp.telemetry.store import encode as encode_recording

NUMBERS = (-1, 1 << 31, 1 << 62)
MEMORY = 256 << 20

pytestmark = pytest.mark.timeout(240)  # ends a hang


def loader() -> TokenLoader:
    return TokenLoader([Source("a", [[1, 2, 3]] * 40), Source("b", [[4, 5]] * 40)], context=4, batch=2, shards=2)


def states(seed: int = 0) -> dict[str, Any]:
    return {**training(seed), "extra_states": {"step": seed}, "dataloader": {"train": loader()}}


def forged(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of a record, each with another number in one place, and the place."""
    if type(value) is int:
        yield from ((f"{path}={number}", number) for number in NUMBERS)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "i" and value.size:
        for place, number in product({0, value.size - 1}, NUMBERS):
            changed = value.copy()
            changed.flat[place] = number
            yield f"{path}.flat[{place}]={number}", changed
    elif is_dataclass(value) and not isinstance(value, type):
        for name in (field.name for field in fields(value)):
            for where, changed in forged(getattr(value, name), f"{path}.{name}"):
                with suppress(ValueError, OverflowError, bcp.BcpError):
                    yield where, replace(value, **{name: changed})
    elif isinstance(value, list | tuple):
        for row, element in enumerate(value):
            for where, changed in forged(element, f"{path}[{row}]"):
                yield where, type(value)([*value[:row], changed, *value[row + 1 :]])


def ends_soon(call: Callable[[], object], where: str) -> None:
    """Make a call that may fail by an error of bcp only, and that takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with suppress(bcp.BcpError):
            call()
        peak = tracemalloc.get_traced_memory()[1]
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        tracemalloc.stop()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak < MEMORY, where
    assert (after - before) << 10 < MEMORY, where


@pytest.mark.parametrize("part", sample(["layout", "commit", "receipt"], "layout", "commit"))
def test_forged_numbers_of_metadata_and_receipts(tmp_path: Path, part: str) -> None:
    bcp.save(tmp_path, states())
    original = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    metadata = decode_metadata((tmp_path / METADATA_KEY).read_bytes(), "here")
    (receipt,) = (tmp_path / "receipts").iterdir()
    record = {
        "layout": metadata.layout, "commit": metadata.commit, "receipt": decode_receipt(receipt.read_bytes(), "here")
    }[part]  # fmt: skip
    target, count = states(1), 0
    for where, changed in forged(record, part):
        for path, data in original.items():
            path.write_bytes(data)
        try:
            forge(tmp_path, **{part: lambda _, changed=changed: changed})
        except (ValueError, OverflowError, IndexError, bcp.BcpError):  # no encoder writes such a number
            continue
        ends_soon(lambda: bcp.load(tmp_path, target, options=bcp.LoadOptions(record=False)), where)
        count += 1
    assert count >= len(NUMBERS)


def numbers_in(value: Any) -> Iterator[Any]:
    """Yield copies of JSON data, each with another number in one place."""
    if isinstance(value, dict | list):
        for key, element in value.items() if isinstance(value, dict) else enumerate(value):
            for changed in numbers_in(element):
                copy = value.copy()
                copy[key] = changed
                yield copy
    elif type(value) in (int, float):
        yield from NUMBERS


def test_forged_numbers_of_a_ledger(tmp_path: Path) -> None:
    model = {"model": torch.nn.Linear(2, 2)}
    with bcp.Run(tmp_path / "run", model, save=1) as run:
        run.resume()
        run.maybe_save(1).wait()
    file = tmp_path / "run" / "run.json"
    sound = file.read_bytes()
    for changed in numbers_in(json.loads(sound)):
        file.write_text(json.dumps(changed))
        ends_soon(lambda: bcp.latest(tmp_path / "run"), str(changed))


def test_forged_numbers_of_a_recording(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(3)}})
    (file,) = (tmp_path / "telemetry").iterdir()
    sound = decode_recording(file.read_bytes(), "here")
    for where, changed in forged(sound, "recording"):
        file.write_bytes(encode_recording(changed))
        ends_soon(lambda: bcp.report(tmp_path).text(), where)


def units(parts: int, draws: int = 0, epoch: int = 0) -> dict[str, Any]:
    """Return the units of a loader of two shards in so many parts, the last one of them forged."""
    reader = TokenLoader(
        [Source("a", [[1, 2, 3]] * 40), Source("b", [[4, 5]] * 40)], context=4, batch=2 * parts, shards=2, readers=1
    )
    state = reader.unit_states()["00000"]
    made = {}
    for shard in range(2):
        for part in range(parts):
            cursors = torch.tensor([[0, shard + 2 * part]] * 2)
            made[f"{shard:05d}.{part}of{parts}"] = {**state, "cursors": cursors}
    last = f"00001.{parts - 1}of{parts}"
    cursors = made[last]["cursors"].clone()
    cursors[:, 0] = epoch
    made[last] = {**made[last], "cursors": cursors, "draws": draws}
    return made


@pytest.mark.parametrize("name", ["00000.0of1000000", "00000.0of999999999999999999", "00000." + "9" * 5000 + "of2"])
def test_a_unit_that_claims_many_parts_is_refused_at_once(name: str) -> None:
    one = loader()
    (state, *_) = one.unit_states().values()
    with pytest.raises(bcp.StateError, match=r"lacks|none of a token loader"):
        one.wanted_units(one.shared_state(), [name])
    with pytest.raises(bcp.StateError, match=r"lacks|none of a token loader"):
        one.load_units(one.shared_state(), {name: state})


@pytest.mark.parametrize(("draws", "epoch"), [(0, 1 << 62), (1 << 60, 1 << 60), (1 << 62, 1 << 40), (1 << 50, 1 << 33)])
def test_an_epoch_that_no_reader_reaches_is_refused_at_once(draws: int, epoch: int) -> None:
    one = loader()
    with pytest.raises(bcp.StateError, match="damaged"):
        one.load_units(one.shared_state(), units(2, draws, epoch))


def test_an_honest_lag_of_some_epochs_loads() -> None:
    one = loader()
    one.load_units(one.shared_state(), units(2, draws=1000, epoch=30))
    assert len(next(one).windows) == 2


def test_forged_units_in_a_checkpoint_end_its_load(tmp_path: Path) -> None:
    """Two loaders of one part would have saved these names and numbers."""

    class Forger:
        reader, readers = 0, 1

        def shared_state(self) -> Any:
            return loader().shared_state()

        def unit_states(self) -> Any:
            return units(2, 1 << 60, 1 << 60)

        def prepare(self, step: int) -> None:
            del step

        def wanted_units(self, shared: Any, ids: Any) -> Any:
            raise NotImplementedError

        def load_units(self, shared: Any, units: Any) -> None:
            raise NotImplementedError

    bcp.save(tmp_path, {"dataloader": {"train": Forger()}})
    with pytest.raises(bcp.StateError, match="damaged"):
        bcp.load(tmp_path, {"dataloader": {"train": loader()}})
