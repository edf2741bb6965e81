"""The file ``.metadata`` of torch.distributed.checkpoint: a pickle, decoded to plain records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import DTYPES, check_dtype, check_shape
from bcp.interop.torch_pickle import Dtype, empty_dict
from bcp.interop.unpickle import Allowed, Call, Record, unpickled

__all__ = ["Chunk", "DcpMetadata", "decode_dcp"]

Shape = tuple[int, ...]
_Boxes = tuple[str, Shape, dict[Shape, Shape]]
_HOME = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_HOME}.metadata", name): Record.named(name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}
_PLANS = {
    (f"{_HOME}.planner", name): Record.named(name)
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
}
"""Classes of the plans that Megatron keeps in the file; they are not looked at."""

_BYTE_CHECKPOINT = {
    ("bytecheckpoint.checkpointer.meta_type", name): Record.named(name) for name in ("Metadata", "_StorageInfo")
}
"""Classes of ByteCheckpoint with the attributes of DCP's, and ``all_tensor_metadata``."""

_PLACE = ("relative_path", "offset", "length")
_PATH_MODULES = ("pathlib", "pathlib._local")
_PATHS = ("PosixPath", "PurePosixPath", "PurePath", "Path", "PureWindowsPath", "WindowsPath")
NAMES: Allowed = {
    **_RECORDS,
    **_PLANS,
    **_BYTE_CHECKPOINT,
    (f"{_HOME}.filesystem", "_StorageInfo"): Record.named("_StorageInfo"),
    **{("torch", name): Dtype(name) for name in DTYPES},
    **{(module, name): Call(lambda *parts: "/".join(map(str, parts))) for module in _PATH_MODULES for name in _PATHS},
    ("torch", "Size"): Call(tuple),
    ("torch", "device"): Call(lambda *_: None),
    ("torch.serialization", "_get_layout"): Call(lambda _: None),
    ("collections", "OrderedDict"): Call(empty_dict),
}
"""All names in the file."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of a file with the elements of a box, or with a value.

    Attributes:
        name: of the tensor or value, as the library knows it.
        key: the file.
        start: first byte.
        nbytes: how many.
        dtype: of the tensor; empty for a value.
        shape: global shape of the tensor.
        offset: first corner of the box.
        length: its extent.
        pickle: the pickle of the tensor, where the range has its elements alone; else the range is a zip.
    """

    name: str
    key: str
    start: int
    nbytes: int
    dtype: str = ""
    shape: Shape = ()
    offset: Shape = ()
    length: Shape = ()
    pickle: bytes = b""


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of ``.metadata``.

    Attributes:
        chunks: all ranges.
        paths: where each name was in the saved state, as keys from the outside in; empty if the file does not say.
        empty: dtype and shape of each tensor without elements and without a range.
        is_flattened: whether Megatron has reshaped flattened ranges, and has noted the real shapes beside DCP's fields.
        version: of ByteCheckpoint; None if the file is not of it.
    """

    chunks: tuple[Chunk, ...]
    paths: Mapping[str, tuple[Any, ...]]
    empty: Mapping[str, tuple[str, Shape]]
    is_flattened: bool = False
    version: str | None = None

    def below(self, folder: str) -> DcpMetadata:
        """Return the same with the files in a folder, given with its slash."""
        if not folder:
            return self
        return replace(self, chunks=tuple(replace(chunk, key=folder + chunk.key) for chunk in self.chunks))

    @property
    def names(self) -> list[str]:
        """All names, each once."""
        return list(dict.fromkeys([*(chunk.name for chunk in self.chunks), *self.empty]))


def decode_dcp(data: bytes, where: str) -> DcpMetadata:
    """Decode ``.metadata``; ``where`` names it in messages.

    Raises:
        CheckpointError: it names other classes, ranges were transformed, or a dtype is unknown.
        CorruptError: it is damaged, or ranges of a tensor are missing.

    """
    meta = unpickled(data, NAMES, where)
    tensors = _attribute(meta, "Metadata", "state_dict_metadata", where)
    stored = _attribute(meta, "Metadata", "storage_data", where)
    if not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise CorruptError(f"{where} has no tables of tensors and files; get it again")
    boxes = {name: _boxes(entry, f"{where}: {name!r:.80}") for name, entry in tensors.items()}
    chunks = tuple(_chunks(boxes, stored, _pickles(meta, where), where))
    found = {chunk.name for chunk in chunks}
    left = {name: box for name, box in boxes.items() if name not in found}
    empty = {name: box[:2] for name, box in left.items() if isinstance(name, str) and box is not None and 0 in box[1]}
    if lacking := [name for name in left if name not in empty]:
        raise CorruptError(f"{where} has no file of {lacking[0]!r:.80} and {len(lacking) - 1} more; get it again")
    planned = meta.get("planner_data")
    paths = planned if isinstance(planned, dict) else {}
    version = meta.get("bytecheckpoint_version")
    return DcpMetadata(
        chunks,
        {name: path for name, path in paths.items() if _is_path(path)},
        empty,
        bool(meta.get("mcore_data")),
        version if isinstance(version, str) else None,
    )


def _is_path(path: object) -> bool:
    return isinstance(path, tuple) and bool(path) and all(type(key) in (str, int) for key in path)


def _attribute(record: object, kind: str, attribute: str, where: str) -> Any:
    """Return an attribute of a record of a class."""
    if not isinstance(record, Record) or record.name != kind:
        raise CorruptError(f"{where} has a {type(record).__name__} where a {kind} has to be; get it again")
    return record.get(attribute)


def _pickles(meta: Record, where: str) -> dict[tuple[Any, Any], bytes]:
    """Return the pickles of tensors by name and first corner; empty if ranges are zips."""
    found = meta.get("all_tensor_metadata")
    pairs = found.items() if isinstance(found, dict) else ()
    keyed = ((_attribute(index, "MetadataIndex", "fqn", where), index.get("offset"), data) for index, data in pairs)
    return {(name, offset): data for name, offset, data in keyed if isinstance(data, bytes)}


def _chunks(
    boxes: Mapping[Any, _Boxes | None],
    stored: Mapping[Any, Any],
    pickles: Mapping[tuple[Any, Any], bytes],
    where: str,
) -> Iterator[Chunk]:
    """Yield all ranges; ``boxes`` has those of each tensor, and None for a value."""
    for index, info in stored.items():
        name = _attribute(index, "MetadataIndex", "fqn", where)
        if not isinstance(name, str) or name not in boxes:
            raise CorruptError(f"{where} has a range of {name!r:.80}, which is none of its tensors; get it again")
        words = f"{where}: {name!r:.80}"
        key, start, nbytes = (_attribute(info, "_StorageInfo", part, where) for part in _PLACE)
        if [type(key), type(start), type(nbytes)] != [str, int, int] or min(start, nbytes) < 0:
            raise CorruptError(f"{words} is said to lie at {start!r:.40} of {key!r:.80}; get the file again")
        if transforms := info.get("transform_descriptors"):
            raise CheckpointError(f"{words} went through {transforms!r:.80}, which bcp does not undo; save it without")
        box = boxes[name]
        if box is None:
            yield Chunk(name, key, start, nbytes)
            continue
        dtype, shape, lengths = box
        offset = check_shape(index.get("offset") or (0,) * len(shape), words)
        if offset not in lengths:
            raise CorruptError(f"{words} has a range of the box at {list(offset)}, which is not listed; get it again")
        pickle = pickles.get((name, index.get("offset")), b"")
        yield Chunk(name, key, start, nbytes, dtype, shape, offset, lengths[offset], pickle)


def _boxes(entry: object, words: str) -> _Boxes | None:
    """Return dtype, shape, and extents of boxes by first corner; None for a value."""
    if isinstance(entry, Record) and entry.name == "BytesStorageMetadata":
        return None
    size, chunks = (_attribute(entry, "TensorStorageMetadata", part, words) for part in ("size", "chunks"))
    properties = _attribute(entry, "TensorStorageMetadata", "properties", words)
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    name = dtype.name if isinstance(dtype, Dtype) else None
    shape = check_shape(size, words)
    if not isinstance(chunks, list):
        raise CorruptError(f"{words} has no boxes; get it again")
    lengths: dict[Shape, Shape] = {}
    for chunk in chunks:
        offset, length = (_attribute(chunk, "ChunkStorageMetadata", part, words) for part in ("offsets", "sizes"))
        lengths[check_shape(offset, words)] = check_shape(length, words)
    return check_dtype(name, f"{words} has dtype {dtype!r:.40}"), shape, lengths
