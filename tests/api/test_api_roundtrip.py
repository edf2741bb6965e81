from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bcp

MIB = 1 << 20


def test_the_report_counts_every_byte_that_was_placed(tmp_path: Path) -> None:
    weight = torch.randn(2 * MIB)
    bcp.save(tmp_path, {"model": {"w": weight}})
    target = {"w": torch.zeros(2 * MIB)}
    report = bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(read_bytes=MIB, copy_workers=4))
    assert torch.equal(target["w"], weight)
    assert report.nbytes == weight.nbytes


@pytest.mark.parametrize("name", ["", "UPPER", "a b", "a/b"])
def test_a_codec_has_a_sound_name(name: str) -> None:
    with pytest.raises(bcp.InputError, match="lower-case letters, digits"):
        bcp.Codec(name, encode=bytes, decode=bytes)
