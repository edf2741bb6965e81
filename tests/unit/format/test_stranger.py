from __future__ import annotations

from pathlib import Path

import numpy as np
import stranger
from handmade import ARRAYS, EXTRA, OBJECTS, TENSORS, write_checkpoint
from stranger import read_checkpoint, read_others


def test_a_stranger_reads_every_element(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    found = read_checkpoint(tmp_path)
    assert set(found) == {(tensor.kind, tensor.fqn) for tensor in TENSORS}
    for tensor in TENSORS:
        read = found[tensor.kind, tensor.fqn]
        wanted = ARRAYS.get((tensor.kind, tensor.tied_to or tensor.fqn), np.zeros(tensor.shape, dtype="<f4"))
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(read.data.view(wanted.dtype).reshape(wanted.shape), wanted)


def test_a_stranger_reads_the_rest(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    objects, extras = read_others(tmp_path)
    assert {key: str(value) for key, value in objects.items()} == OBJECTS
    assert extras == {("extra_states", 1): EXTRA}


def test_the_stranger_knows_nothing_of_bcp_and_is_short() -> None:
    text = Path(stranger.__file__).read_text()
    assert "import bcp" not in text
    assert "from bcp" not in text
    assert len(text.splitlines()) < 120
