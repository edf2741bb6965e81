from __future__ import annotations

import pytest
from divided import divided
from safetensors.torch import load

from bcp.errors import InputError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.write.files import DataFile, PartInterval, data_files


def files_of(*metas: TensorMeta, part_bytes: int = 4096) -> list[DataFile]:
    table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])
    return data_files(table, divided([table], block_bytes=4096).writes[0], rank=0, part_bytes=part_bytes)


def floats(fqn: str, *shape: int, kind: str = "model") -> TensorMeta:
    return TensorMeta(kind, fqn, "float32", 4, shape)


def test_a_big_tensor_is_split_and_small_ones_share_a_part():
    (file,) = files_of(floats("a", 1500), floats("b", 10), floats("c", 10))
    assert len(file.header) == 4096
    assert file.nbytes == 4096 + 6080
    first, second = file.parts
    assert (first.index, first.start, first.stop, first.nbytes) == (0, 0, 8192, 8192)
    assert first.spans == (PartInterval(0, 0, 1024, 4096),)
    assert first.name == "model part 0: a"
    assert (second.index, second.start, second.stop) == (1, 8192, file.nbytes)
    assert second.spans == (PartInterval(0, 1024, 1500, 0), PartInterval(1, 0, 10, 1904), PartInterval(2, 0, 10, 1944))
    assert second.name == "model part 1: a and 2 more"


def test_wide_elements_first_so_that_none_straddles_a_part():
    byte = TensorMeta("model", "a", "int8", 1, (4095,))
    (file,) = files_of(byte, floats("b", 3), TensorMeta("model", "c", "float64", 8, (1,)))
    spans = [span for part in file.parts for span in part.spans]
    assert [(span.row, span.at) for span in spans] == [(2, 4096), (1, 4104), (0, 4116), (0, 0)]


def test_a_file_that_ends_with_its_part():
    (file,) = files_of(floats("a", 2048))
    assert [part.stop for part in file.parts] == [8192, 12288]


def test_one_file_a_kind_with_a_header_that_safetensors_reads():
    model, optimizer = files_of(floats("a", 2, kind="optimizer"), floats("a", 3))
    assert (model.kind, optimizer.kind) == ("model", "optimizer")
    assert load(model.header + bytes(12))["a"].shape == (3,)
    assert b'"bcp.kind":"optimizer","bcp.rank":"0"' in optimizer.header


def test_a_cut_tensor_is_named_by_its_block():
    table = ShardTable.build([ShardRow(floats("w", 64, 64), Box.whole((64, 64)))])
    division = divided([table, table], block_bytes=4096)
    found = [data_files(table, writes, rank=rank, part_bytes=4096)[0] for rank, writes in enumerate(division.writes)]
    assert [list(load(file.header + bytes(8192))) for file in found] == [["w[0:32,0:64]"], ["w[32:64,0:64]"]]
    assert found[1].parts[0].spans == (PartInterval(0, 2048, 3072, 4096),)


def test_nothing_to_write_makes_no_file():
    assert files_of() == []


def test_a_terabyte_is_only_numbers():
    (file,) = files_of(floats("a", 1 << 20, 1 << 18), part_bytes=1 << 36)
    assert len(file.parts) == 16
    assert file.parts[-1].stop == file.nbytes == 4096 + (1 << 40)


@pytest.mark.parametrize("part_bytes", [0, -4096, 1000])
def test_parts_that_would_not_align_are_refused(part_bytes):
    with pytest.raises(InputError, match="multiple of 4096"):
        files_of(floats("a", 1), part_bytes=part_bytes)
