"""Small files that would take gigabytes once they are decoded: all are refused before any buffer is."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from test_forged import FACTS, STORED, TABLES, assembled, encoded

from bcp.errors import CorruptError
from bcp.format.container import decoded_nbytes, encode_table, most_decoded, read_tables, seal
from bcp.format.foreign_files import ABOUT
from bcp.format.foreign_files import FILES as FOREIGN
from bcp.format.metadata import MAGIC, decode_commit
from bcp.format.receipt import BLOCKS, FILES, OBJECTS, RECEIPT, Receipt, decode_receipt, encode_receipt
from bcp.format.receipt import MAGIC as RECEIPTS

OPERATION = "0123456789abcdef"
MANY = 20_000_000
MOST_GROWTH = 64 << 20
"""Bytes that a process may take to refuse any of the files below; each would take at least 500 MB decoded."""

CHILD = """
import json, resource, sys
from bcp.errors import CorruptError
from bcp.format.metadata import decode_metadata, stored_files
from bcp.format.receipt import decode_receipt

soft = 1 << 34
resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    try:
        if "foreign" in path and stored_files(data, path) is not None:
            raise AssertionError("its files were decoded")
        (decode_receipt if "receipt" in path else decode_metadata)(data, path)
        found = "it was read"
    except CorruptError as error:
        found = str(error)
    except BaseException as error:
        found = f"foreign: {error!r}"
    print(json.dumps([found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10]), flush=True)
"""


def squeezed(table: str, arrays: Sequence[pa.Array], of: pa.Schema | None = None) -> bytes:
    """Encode a table with columns of any type, compressed. It is one of the metadata's, unless ``of`` is given."""
    names, about = (of or TABLES[table]).names, {b"bcp.table": table.encode(), b"bcp.commit": FACTS.encode()}
    fields = [pa.field(name, array.type, nullable=False) for name, array in zip(names, arrays, strict=True)]
    of = pa.schema(fields, metadata=about)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, of, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.record_batch(list(arrays), schema=of))
    return bytes(sink.getvalue().to_pybytes())


def zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(count, np.int8))


def rows_of(width: int, count: int) -> pa.Array:
    item = pa.field("item", pa.int8(), nullable=False)
    return pa.Array.from_buffers(pa.list_(item, width), count, [None], children=[zeros(count * width)])


def words(strings: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 0], type=pa.int32()), strings)


def many_rows() -> bytes:
    return assembled(files=squeezed("files", [zeros(MANY)] * 3 + [rows_of(1, MANY)]))


def empty_lists() -> bytes:
    """Claim rows of lists of no elements, which need no memory of their own, beside columns that do."""
    lists = [rows_of(0, MANY)] * 2
    return assembled(pieces=squeezed("pieces", [*lists, zeros(MANY), zeros(MANY)]))


def wide_lists() -> bytes:
    planes = rows_of(MANY, 4)
    return assembled(
        files=squeezed("files", [pa.array(STORED["files"][key]) for key in ("kind", "rank", "nbytes")] + [planes])
    )


def many_digests() -> bytes:
    digests = pa.Array.from_buffers(pa.binary(16), MANY, [None, pa.py_buffer(bytes(16 * MANY))])
    return assembled(commit=squeezed("commit", [digests]))


def long_string() -> bytes:
    rows = [pa.array(STORED["objects"]["kind"]).dictionary_encode(), pa.array(["x" * (1 << 29), "y"]), pa.array([0, 1])]
    return assembled(objects=squeezed("objects", rows))


def many_words() -> bytes:
    offsets = pa.py_buffer(bytes(4 * (MANY * 3 + 1)))
    empty = pa.Array.from_buffers(pa.string(), MANY * 3, [None, offsets, pa.py_buffer(b"")])
    return assembled(objects=squeezed("objects", [words(empty), pa.array(["a", "b"]), pa.array([0, 1])]))


def long_word() -> bytes:
    return assembled(objects=squeezed("objects", [words(pa.array(["x" * (1 << 29)])), pa.array(["a", "b"]), zeros(2)]))


def many_dictionaries() -> bytes:
    """Put a dictionary of 8 MB into the stream a hundred times."""
    table = squeezed("objects", [words(pa.array(["x" * (8 << 20)])), pa.array(["a", "b"]), zeros(2)])
    source, messages = pa.BufferReader(table), []
    for message in pa.ipc.MessageReader.open_stream(source):
        sink = pa.BufferOutputStream()
        message.serialize_to(sink)
        messages.append(bytes(sink.getvalue().to_pybytes()))
    schema, dictionary, batch = messages
    return assembled(objects=schema + dictionary * 100 + batch + b"\xff\xff\xff\xff\0\0\0\0")


def claimed_rows() -> bytes:
    """Claim 2^40 rows in the header of a batch; the buffers are as they were."""
    rows = 1_234_567
    table = squeezed("files", [zeros(rows)] * 3 + [rows_of(1, rows)])
    return assembled(files=table.replace(struct.pack("<q", rows), struct.pack("<q", 1 << 40)))


def claimed_nbytes() -> bytes:
    """Claim 64 GiB behind the compressed bytes of a column."""
    rows = 1_234_567
    table = squeezed("files", [zeros(rows)] * 3 + [rows_of(1, rows)])
    at = table.index(b"\x28\xb5\x2f\xfd") - 8  # zstd's magic number
    return assembled(files=table[:at] + struct.pack("<q", 1 << 36) + table[at + 8 :])


def foreign_files() -> bytes:
    """Claim many files of another library."""
    offsets = pa.py_buffer(bytes(4 * (MANY + 1)))
    empty = pa.Array.from_buffers(pa.string(), MANY, [None, offsets, pa.py_buffer(b"")])
    first = encode_table(ABOUT, [[1], [0]], commit=FACTS)
    return seal(first + squeezed("foreign files", [empty, zeros(MANY), zeros(MANY)], FOREIGN), MAGIC, 2)


def foreign_header() -> bytes:
    """Put such a header first: its name tells files of another library from others."""
    return seal(repeated(encode_table(ABOUT, [[1], [0]], commit=FACTS)), MAGIC, 2)


def repeated_metadata() -> bytes:
    return assembled(layout=repeated(encoded("layout", STORED["layout"])))


def repeated(table: bytes) -> bytes:
    """Let the header of a table refer to one long pair of strings many times."""
    (size,) = struct.unpack_from("<i", table, 4)
    header = bytearray(table[8 : 8 + size])
    root = struct.unpack_from("<I", header)[0]
    schema = _reference(header, root, 2)
    at = _slot(header, schema, 2)
    pair = _reference(header, schema, 2) + 4  # the first of the pairs
    pair += struct.unpack_from("<I", header, pair)[0]
    vtable = pair - struct.unpack_from("<i", header, pair)[0]
    count, text = 60_000, b"bcp.table".ljust(60_000, b"x")
    vector = len(header)
    struct.pack_into("<I", header, at, vector - at)
    header += struct.pack("<I", count)
    copy = vector + 4 + 4 * count
    header += b"".join(struct.pack("<I", copy - (vector + 4 + 4 * row)) for row in range(count))
    header += struct.pack("<i", copy - vtable) + bytes(8)
    string = len(header)
    for slot in (0, 1):
        place = _slot(header, copy, slot)
        struct.pack_into("<I", header, place, string - place)
    header += struct.pack("<I", len(text)) + text + b"\0" * 4
    header += bytes(-len(header) % 8)
    return table[:4] + struct.pack("<i", len(header)) + bytes(header) + table[8 + size :]


def _slot(data: bytearray, table: int, slot: int) -> int:
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    return table + int(struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0])


def _reference(data: bytearray, table: int, slot: int) -> int:
    at = _slot(data, table, slot)
    return at + int(struct.unpack_from("<I", data, at)[0])


def receipt(**tables: bytes) -> bytes:
    """Return a receipt with some tables replaced."""
    honest = {
        "receipt": encode_table(RECEIPT, ([0], [OPERATION])),
        "files": encode_table(FILES, ([], [], [], [], [], [])),
        "blocks": encode_table(BLOCKS, ([], [], [])),
        "objects": encode_table(OBJECTS, ([], [], [])),
    }
    return seal(b"".join((honest | tables).values()), RECEIPTS)


def receipt_of_many_blocks() -> bytes:
    lengths = np.ones(MANY, np.int64)
    digests = np.zeros(MANY, "V16")
    files = encode_table(FILES, ([0], [0], [MANY], [MANY], [[]], [MANY]))
    return receipt(files=files, blocks=encode_table(BLOCKS, (lengths, lengths, digests)))


def receipt_of_a_long_value() -> bytes:
    return receipt(objects=encode_table(OBJECTS, (["model"], ["a"], ["1" * (1 << 29)])))


def receipt_of_many_codecs() -> bytes:
    offsets, inner = pa.array([0, 3 * MANY], pa.int32()), pa.py_buffer(bytes(4 * (3 * MANY + 1)))
    names = pa.Array.from_buffers(pa.string(), 3 * MANY, [None, inner, pa.py_buffer(b"")])
    codecs = pa.ListArray.from_arrays(offsets, names)
    return receipt(files=squeezed("files", [*[zeros(1)] * 4, codecs, zeros(1)], FILES))


BOMBS = (
    many_rows,
    empty_lists,
    wide_lists,
    many_digests,
    long_string,
    many_words,
    long_word,
    many_dictionaries,
    claimed_rows,
    claimed_nbytes,
    repeated_metadata,
    foreign_files,
    foreign_header,
    receipt_of_many_blocks,
    receipt_of_a_long_value,
    receipt_of_many_codecs,
)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int, int]]:
    """Let another process open every bomb: (what it said, bytes that it has grown by since its start, size)."""
    folder, sizes = tmp_path_factory.mktemp("bombs"), []
    for bomb in BOMBS:
        data = bomb()
        (folder / bomb.__name__).write_bytes(data)
        sizes.append(len(data))
    paths = [str(folder / bomb.__name__) for bomb in BOMBS]
    done = subprocess.run([sys.executable, "-c", CHILD, *paths], check=False, capture_output=True, text=True)  # noqa: S603 -- this file's own
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS), done.stderr
    return {bomb.__name__: (*line, size) for bomb, line, size in zip(BOMBS, lines, sizes, strict=True)}


@pytest.mark.parametrize("bomb", [bomb.__name__ for bomb in BOMBS])
def test_a_bomb_is_refused_before_it_takes_memory(refusals: dict[str, tuple[str, int, int]], bomb: str) -> None:
    said, growth, size = refusals[bomb]
    assert size < 1 << 20
    assert f"{bomb} is corrupt: " in said
    assert "bytes of memory decoded, more than" in said or "names and metadata" in said or "pairs of metadata" in said
    assert growth < MOST_GROWTH


def test_a_commit_is_read_beside_a_bomb_and_refused_as_one() -> None:
    """A sweep decodes the commit alone."""
    assert decode_commit(claimed_rows(), "metadata.arrow").operation == json.loads(FACTS)["operation"]
    with pytest.raises(CorruptError, match="bytes of memory decoded, more than"):
        decode_commit(many_digests(), "metadata.arrow")


def decoded_by_hand(data: bytes, schemas: Sequence[pa.Schema]) -> int:
    """Decode tables and add up what :func:`decoded_nbytes` is to find without: buffers, rows and values."""

    def inside(array: pa.Array) -> tuple[int, int]:
        if pa.types.is_dictionary(array.type):
            (a, b), (c, d) = inside(array.indices), inside(array.dictionary)
            return a + c, b + d + len(array.dictionary)
        if pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type):
            a, b = inside(array.flatten() if pa.types.is_fixed_size_list(array.type) else array.values)
            own = 4 * (len(array) + 1) if pa.types.is_list(array.type) else 0
            return a + own, b + len(array)
        return sum(buffer.size for buffer in array.buffers() if buffer is not None), len(array)

    nbytes = 0
    for table in read_tables(data, schemas):
        sizes = [inside(column) for column in table.columns]
        nbytes += sum(size for size, _ in sizes) + 8 * (sum(count for _, count in sizes) + len(table))
        nbytes += sum(len(key) + len(value) for key, value in table.schema.metadata.items())
        nbytes += sum(len(field.name) + len("item") * (field.type.num_fields > 0) for field in table.schema)
    return nbytes


def test_two_values_of_one_name_are_refused() -> None:
    twice = receipt(objects=encode_table(OBJECTS, (["model"] * 2, ["a"] * 2, ["1", "2"])))
    with pytest.raises(CorruptError, match="two values of one name"):
        decode_receipt(twice, "r")


def test_the_decoded_size_is_that_of_the_decoded_tables() -> None:
    data = memoryview(assembled())[:-24]
    assert decoded_nbytes(data) == pytest.approx(decoded_by_hand(bytes(data), tuple(TABLES.values())), abs=64 * 8)


def test_a_batch_without_rows_takes_no_bytes() -> None:
    of, sizes = pa.schema([("n", pa.int64())]), []
    for batches in ([], [pa.record_batch([pa.array([], pa.int64())], schema=of)]):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, of) as stream:
            for batch in batches:
                stream.write_batch(batch)
        sizes.append(decoded_nbytes(memoryview(sink.getvalue())))
    assert sizes == [len("n")] * 2


def test_honest_values_that_compress_too_well_are_stored_as_they_are() -> None:
    value = json.dumps("0" * (200 << 20))
    small = encode_receipt(Receipt(0, OPERATION, [], {("model", "a"): '"0"'}))
    data = encode_receipt(Receipt(0, OPERATION, [], {("model", "a"): value}))
    assert decode_receipt(data, "r").objects["model", "a"] == value
    assert len(data) > len(value) > most_decoded(len(small))
