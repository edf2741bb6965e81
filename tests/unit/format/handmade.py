"""A small checkpoint, made by hand: two ranks, bfloat16 and float32, a tie, two states cut alike in two files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import xxhash

from bcp.format.metadata import Commit, data_key, encode_layout, encode_metadata, receipt_key
from bcp.format.receipt import Blocks, FileReceipt, Receipt, encode_receipt, receipt_digest
from bcp.plan.layout import Layout
from bcp.plan.shards import Segments, TensorMeta, TensorTable

OPERATION = "0123456789abcdef"
BLOCK_BYTES = 16


def ints(*values: int) -> np.typing.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


TENSORS = [
    TensorMeta("model", "bias", "float32", 4, (), (), "cuda", requires_grad=True),
    TensorMeta("model", "embed", "bfloat16", 2, (4, 6), (6, 1), "cuda", requires_grad=True),
    TensorMeta("model", "head", "bfloat16", 2, (4, 6), (6, 1), "cuda", requires_grad=True, tied_to="embed"),
    TensorMeta("model", "nothing", "float32", 4, (0, 3), (3, 1)),
    TensorMeta("optimizer", "exp_avg.embed", "float32", 4, (4, 6), (6, 1), "cuda"),
    TensorMeta("optimizer", "exp_avg_sq.embed", "float32", 4, (4, 6), (6, 1), "cuda"),
]

LAYOUT = Layout(
    world_size=2,
    block_bytes=BLOCK_BYTES,
    tensors=TensorTable.build(TENSORS),
    leader=ints(0, 1, 2, 3, 4, 4),
    plane=ints(0, 1, 1, 0, 0, 1),
    box_tensor=ints(0, 1, 1, 4),
    offset=np.array([[0, 0], [0, 0], [0, 3], [0, 0]]),
    length=np.array([[1, 1], [4, 3], [4, 3], [4, 6]]),
    segments=Segments.of(
        number=ints(1, 2, 1, 2),
        length=ints(1, 5, 7, 12, 11, 13),
        file=ints(0, 0, 1, 1, 2, 3),
        at=ints(0, 0, 0, 7, 0, 0),
    ),
    file_kind=ints(0, 0, 1, 1),
    file_rank=ints(0, 1, 0, 1),
    file_nbytes=ints(14, 38, 88, 104),
    file_planes=np.array([[0, 4], [0, 0], [0, 44], [0, 52]]),
    objects=[("optimizer", "param_groups.0.lr"), ("optimizer", "step")],
    object_rank=ints(0, 1),
    extra_kind=ints(3),
    extra_rank=ints(1),
)

ARRAYS = {  # bfloat16 as its 16 bits
    ("model", "bias"): np.array(2.5, dtype="<f4"),
    ("model", "embed"): np.arange(24, dtype="<u2").reshape(4, 6),
    ("optimizer", "exp_avg.embed"): np.arange(24, dtype="<f4").reshape(4, 6) / 8,
    ("optimizer", "exp_avg_sq.embed"): np.arange(24, dtype="<f4").reshape(4, 6) * 3,
}
OBJECTS = {("optimizer", "param_groups.0.lr"): "0.001", ("optimizer", "step"): "17"}
EXTRA = b"opaque bytes of rank 1"


def _sections() -> dict[tuple[int, int], tuple[dict[str, object], bytes]]:
    """Return header and data section by (kind, rank)."""
    embed = ARRAYS["model", "embed"]
    states = {name: ARRAYS["optimizer", name].reshape(-1) for name in ("exp_avg.embed", "exp_avg_sq.embed")}
    left, right = embed[:, :3].reshape(-1), embed[:, 3:].reshape(-1)
    contents: dict[tuple[int, int], list[tuple[str, str, np.typing.NDArray[np.generic]]]] = {
        (0, 0): [("bias", "F32", ARRAYS["model", "bias"]), ("embed[0:4,0:3]{0:5}", "BF16", left[:5])],
        (0, 1): [("embed[0:4,0:3]{5:12}", "BF16", left[5:]), ("embed[0:4,3:6]", "BF16", right.reshape(4, 3))],
        (1, 0): [(f"{name}[0:4,0:6]{{0:11}}", "F32", state[:11]) for name, state in states.items()],
        (1, 1): [(f"{name}[0:4,0:6]{{11:24}}", "F32", state[11:]) for name, state in states.items()],
        (3, 1): [("state", "U8", np.frombuffer(EXTRA, np.uint8))],
    }
    sections = {}
    for key, arrays in contents.items():
        header: dict[str, object] = {}
        data = b""
        for name, dtype, array in arrays:
            span = (len(data), len(data) + array.nbytes)
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": span}
            data += array.tobytes()
        sections[key] = (header, data)
    return sections


def _image(header: dict[str, object], data: bytes) -> tuple[int, bytes]:
    """Return data_start and the bytes of a data file."""
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return 8 + len(text), len(text).to_bytes(8, "little") + text + data


def file_receipt(kind: int, data_start: int, image: bytes) -> FileReceipt:
    """Describe a plain data file."""
    cuts = [0, *range(data_start + BLOCK_BYTES, len(image), BLOCK_BYTES), len(image)]
    blocks = [image[a:b] for a, b in itertools.pairwise(cuts)]
    lengths = [len(block) for block in blocks]
    table = Blocks.build(lengths, lengths, [xxhash.xxh3_128_digest(block) for block in blocks])
    return FileReceipt(kind, data_start, len(image), len(image), (), table)


def commit(receipts: bytes) -> Commit:
    """Describe the save."""
    return Commit(
        operation=OPERATION,
        created="2026-01-02T03:04:05.678+00:00",
        framework="fsdp2",
        codecs=(),
        part_bytes=1 << 20,
        version="0.1.0",
        receipts=receipts,
    )


def write_checkpoint(path: Path) -> None:
    """Write the checkpoint into a directory."""
    files: dict[int, list[FileReceipt]] = {0: [], 1: []}
    for (kind, rank), (header, data) in _sections().items():
        data_start, image = _image(header, data)
        target = path / data_key(kind, rank, OPERATION, encoded=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(image)
        files[rank].append(file_receipt(kind, data_start, image))
    digests = []
    (path / "receipts").mkdir()
    for rank, mine in files.items():
        objects = {
            key: OBJECTS[key] for key, owner in zip(LAYOUT.objects, LAYOUT.object_rank, strict=True) if owner == rank
        }
        encoded = encode_receipt(Receipt(rank, OPERATION, mine, objects))
        (path / receipt_key(rank, OPERATION)).write_bytes(encoded)
        digests.append(receipt_digest(encoded))
    (path / "metadata.arrow").write_bytes(encode_metadata(encode_layout(LAYOUT), commit(b"".join(digests))))
