from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from alike import exactly_alike

import bcp
from bcp.errors import CheckpointError
from bcp.state.units import ALIGNMENT, image_of, unit_in


def written(state: Any, *, allow_pickle: bool = False) -> torch.Tensor:
    """Return the image of a state as it would be read."""
    image = image_of(state, "unit", allow_pickle=allow_pickle)
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in image.tensors]
    whole = torch.cat([*parts, torch.frombuffer(bytearray(image.tail), dtype=torch.uint8)])
    assert len(whole) == image.nbytes
    return whole


STATES: list[Any] = [
    None,
    7,
    {},
    {"a": [1, (2, "x")], 3: {4, 5}, None: b""},
    torch.arange(100_000),
    [torch.arange(1000), torch.arange(1001, dtype=torch.uint8), torch.rand(4096).to(torch.float16), torch.empty(0, 3)],
    {
        "big": torch.rand(33, 777, dtype=torch.float64),
        "not contiguous": torch.rand(100, 200).t(),
        "0-d": torch.ones(()),
    },
    {"array": np.arange(5000), "fortran": np.asfortranarray(np.ones((70, 70)))},
    ("bcp", "outside", torch.arange(9000)),
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    image = written(state)
    assert len(image) % ALIGNMENT == 0
    assert exactly_alike(unit_in(image, allow_pickle=False, where="unit"), state)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.uint16]
)
def test_large_tensors_of_any_dtype_are_neither_copied_when_written_nor_when_read(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (5, 4096), dtype=torch.uint8).to(dtype)
    other = torch.arange(6000, dtype=torch.int16)
    image = image_of({"tensor": tensor, "other": other}, "unit", allow_pickle=False)
    assert {each.data_ptr() for each in image.tensors} == {tensor.data_ptr(), other.data_ptr()}
    whole = written({"tensor": tensor, "other": other})
    found = unit_in(whole, allow_pickle=False, where="unit")
    for name, wanted in (("tensor", tensor), ("other", other)):
        assert found[name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert found[name].data_ptr() % wanted.itemsize == 0
        assert torch.equal(found[name].view(torch.uint8), wanted.view(torch.uint8))


def test_a_view_of_a_large_tensor_is_written_without_the_rest_of_it() -> None:
    whole = torch.arange(1 << 20)
    assert image_of(whole[1000:9000], "unit", allow_pickle=False).nbytes < 8 * 8000 + 4096


def test_what_cannot_be_read_again_is_refused() -> None:
    with pytest.raises(bcp.StateError, match="unit is a "):
        image_of(object(), "unit", allow_pickle=False)


def test_damaged_images_are_refused_and_take_no_memory() -> None:
    good = written({"a": torch.arange(3000), "b": torch.rand(2000), "c": [1, 2]})
    dice = random.Random(5)  # noqa: S311 -- a sample, no secret
    outcomes = {"loaded": 0, "refused": 0}
    for case in range(3000):
        bad = good.clone()
        if case % 5 == 0:
            bad = bad[: dice.randrange(len(bad)) // 64 * 64]
        for _ in range(dice.choice((1, 3))):
            low = max(len(bad) - 1800, 0)
            if len(bad):
                bad[dice.randrange(low, len(bad))] = dice.randrange(256)
        try:
            unit_in(bad, allow_pickle=False, where="unit")
            outcomes["loaded"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100
