"""The clients that are compared: bcp's backends, and plain ones with the settings that suit them best here.

Every client writes the payload from memory, and reads it into memory. A plain client may return buffers of its own;
bcp has to fill one that is given. Nobody copies to please the other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bcp
from bcp.backends import resolve
from bcp.protocols import Backend, at_once_of
from benchmarks.storage.payload import MIB, Bytes, filled, wipe

__all__ = ["CLIENTS", "Kit", "Place", "missing"]

PART_BYTES = bcp.SaveOptions().part_bytes
READ_BYTES = bcp.LoadOptions().read_bytes
RANGE_BYTES = 16 * MIB
"""Ranges of plain clients, as of bcp: 4 to 16 MiB differ by less than rounds do, and larger ones are no quicker."""

AT_ONCE = 8
"""Requests of plain clients. bcp has 8 writes or 16 ranges under way; 4, 8 and 16 differ by less than rounds do."""

SMALL_BYTES, CHUNK_BYTES = 8 * MIB, 16 * MIB
"""Requests of the clients that are tuned for a server that answers at once: their copies stay in the core's caches."""

CREDENTIALS = {"key": "key", "secret": "secret", "region": "us-east-1"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client finds its server.

    Attributes:
        url: of the server; of local disks a folder.
        nbytes: size of the payload.
    """

    url: str
    nbytes: int


Write = Callable[[str], Awaitable[None]]
"""Writes the payload to an object of that name, or to several below it."""

Read = Callable[[str], Awaitable[Sequence[Bytes]]]
"""Reads the payload from an object of that name; returns it in order."""


@dataclass(slots=True)
class Kit:
    """A client that is open.

    Attributes:
        writes: ways to write, by name.
        reads: ways to read, by name.
        forget: lets the memory of the last read go, or overwrites it.
        close: closes connections.
    """

    writes: Mapping[str, Write] = field(default_factory=dict)
    reads: Mapping[str, Read] = field(default_factory=dict)
    forget: Callable[[], None] = lambda: None
    close: Callable[[], Awaitable[None]] | None = None


async def at_once(calls: Sequence[Callable[[], Coroutine[Any, Any, None]]], most: int) -> None:
    """Make calls, at most so many at a time."""
    waiting = list(reversed(calls))

    async def work() -> None:
        while waiting:
            await waiting.pop()()

    async with asyncio.TaskGroup() as group:
        for _ in range(most):
            group.create_task(work())


def ranges(nbytes: int, size: int) -> list[tuple[int, int]]:
    """Return begin and end of the ranges of an object."""
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


# -- bcp ----------------------------------------------------------------------------------------


def bcp_kit(backend: Backend, nbytes: int) -> Kit:
    """Return the calls that the stages of a save and a load make, with their numbers by default."""
    data, out = memoryview(filled(nbytes)), memoryview(bytearray(nbytes))

    async def write(name: str) -> None:
        async with backend.open_write(name, nbytes) as writer:
            parts = enumerate(ranges(nbytes, PART_BYTES))
            calls = [partial(writer.write_part, index, start, data[start:stop]) for index, (start, stop) in parts]
            await at_once(calls, at_once_of(backend))

    async def read(name: str) -> Sequence[Bytes]:
        calls = [partial(backend.read_into, name, start, out[start:stop]) for start, stop in ranges(nbytes, READ_BYTES)]
        await at_once(calls, at_once_of(backend))
        return [out]

    return Kit({"parts": write}, {"read_into": read}, partial(wipe, out), backend.aclose)


async def bcp_gcs(place: Place) -> Kit:
    """Open ``gs://``."""
    return bcp_kit(resolve("gs://bucket", {"token": "anon", "endpoint_url": place.url}), place.nbytes)


async def bcp_s3(place: Place) -> Kit:
    """Open ``s3://``."""
    return bcp_kit(resolve("s3://bucket", {**CREDENTIALS, "endpoint_url": place.url}), place.nbytes)


async def bcp_hdfs(place: Place) -> Kit:
    """Open ``hdfs://``."""
    return bcp_kit(resolve(place.url, {"replication": 1}), place.nbytes)


async def bcp_local(place: Place) -> Kit:
    """Open a directory."""
    return bcp_kit(resolve(place.url), place.nbytes)


async def bcp_generic(place: Place) -> Kit:
    """Open a directory by fsspec."""
    return bcp_kit(resolve(f"local://{place.url}"), place.nbytes)


# -- plain clients ------------------------------------------------------------------------------


async def _gcsfs(place: Place) -> tuple[Any, Any]:
    """Return gcsfs and its session."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else it asks Google's gRPC service first
    from gcsfs.core import GCSFileSystem  # noqa: PLC0415 -- an extra

    system = GCSFileSystem(asynchronous=True, token="anon", endpoint_url=place.url, skip_instance_cache=True)  # noqa: S106
    return system, await system._set_session()  # noqa: SLF001 -- as its documentation does


async def gcsfs_kit(place: Place) -> Kit:
    """Open gcsfs, with its own settings and bcp's size of requests."""
    system, session = await _gcsfs(place)
    data = memoryview(bytes(filled(place.nbytes)))

    async def one(name: str) -> None:
        await system._pipe_file(f"bucket/{name}", data)  # noqa: SLF001 -- as above

    async def parts(name: str) -> None:
        await system._pipe_file(f"bucket/{name}", data, chunksize=PART_BYTES)  # noqa: SLF001 -- as above

    async def cat_file(name: str) -> Sequence[Bytes]:
        found = await system._cat_file(f"bucket/{name}", start=0, end=place.nbytes, concurrency=4)  # noqa: SLF001
        return [found]

    writes = {
        f"_pipe_file, {AT_ONCE} objects of {PART_BYTES // MIB} MiB at once": _pipe_many(system, data, PART_BYTES),
        "_pipe_file, one object": one,
        f"_pipe_file, one object, chunksize of {PART_BYTES // MIB} MiB": parts,
    }
    reads: dict[str, Read] = {"_cat_ranges": partial(_cat_ranges, system, place), "_cat_file, concurrency=4": cat_file}
    return Kit(writes, reads, close=session.close)


async def tuned_gcsfs_kit(place: Place) -> Kit:
    """Open gcsfs with sizes that suit a server without latency.

    Objects that are not smaller than the chunk size are sent by resumable uploads, which copy nothing, and take two
    requests each. Chunks of one object are sent one after the other: 8 MiB for each 50 ms of a store are 160 MB/s.
    """
    system, session = await _gcsfs(place)
    data = memoryview(bytes(filled(place.nbytes)))

    async def one(name: str) -> None:
        await system._pipe_file(f"bucket/{name}", data, chunksize=SMALL_BYTES)  # noqa: SLF001 -- as above

    writes = {
        f"{AT_ONCE} resumable uploads of {CHUNK_BYTES // MIB} MiB at once": _pipe_many(
            system, data, CHUNK_BYTES, chunksize=CHUNK_BYTES
        ),
        f"{AT_ONCE} objects of {SMALL_BYTES // MIB} MiB at once": _pipe_many(system, data, SMALL_BYTES),
        f"one object, chunksize of {SMALL_BYTES // MIB} MiB": one,
    }
    return Kit(writes, close=session.close)


def _pipe_many(system: Any, data: Bytes, size: int, **options: Any) -> Write:
    """Return a call that writes several objects."""

    async def pipe(path: str, start: int, stop: int) -> None:
        await system._pipe_file(path, data[start:stop], **options)  # noqa: SLF001 -- as above

    async def many(name: str) -> None:
        slices = enumerate(ranges(len(data), size))
        await at_once([partial(pipe, f"bucket/{name}/{index:05}", *bounds) for index, bounds in slices], AT_ONCE)

    return many


async def _cat_ranges(system: Any, place: Place, name: str) -> Sequence[Bytes]:
    starts, ends = zip(*ranges(place.nbytes, RANGE_BYTES), strict=True)
    found: list[Bytes] = await system._cat_ranges(  # noqa: SLF001 -- as above
        [f"bucket/{name}"] * len(starts), list(starts), list(ends), batch_size=AT_ONCE, on_error="raise"
    )
    return found


async def _s3fs(place: Place) -> tuple[Any, Callable[[], Awaitable[None]]]:
    """Return s3fs and a call that closes it.

    It makes no digests of data: bcp makes no SHA-256 either, and s3fs saves the CRC that bcp makes.
    """
    from s3fs import S3FileSystem  # noqa: PLC0415 -- an extra

    config = {
        "max_pool_connections": 32,
        "s3": {"payload_signing_enabled": False},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    system = S3FileSystem(
        asynchronous=True, skip_instance_cache=True, key="key", secret="secret", endpoint_url=place.url,  # noqa: S106
        client_kwargs={"region_name": "us-east-1"}, config_kwargs=config,
    )  # fmt: skip
    session = await system.set_session()

    async def close() -> None:
        await session.close()

    return system, close


async def s3fs_kit(place: Place) -> Kit:
    """Open s3fs, with bcp's size of requests."""
    system, close = await _s3fs(place)
    data = bytes(filled(place.nbytes))  # it takes no memoryview

    async def one(name: str) -> None:
        await system._pipe_file(f"bucket/{name}", data, chunksize=PART_BYTES, max_concurrency=AT_ONCE)  # noqa: SLF001

    async def cat_file(name: str) -> Sequence[Bytes]:
        found = await system._cat_file(f"bucket/{name}", chunksize=RANGE_BYTES, max_concurrency=AT_ONCE)  # noqa: SLF001
        return [found]

    writes = {
        "_pipe_file, one object": one,
        f"_pipe_file, {AT_ONCE} objects of {PART_BYTES // MIB} MiB at once": _pipe_many(system, data, PART_BYTES),
    }
    reads: dict[str, Read] = {
        "_cat_ranges": partial(_cat_ranges, system, place),
        f"_cat_file, max_concurrency={AT_ONCE}": cat_file,
    }
    return Kit(writes, reads, close=close)


async def tuned_s3fs_kit(place: Place) -> Kit:
    """Open s3fs with sizes that suit a server without latency."""
    system, close = await _s3fs(place)
    data = bytes(filled(place.nbytes))
    name = f"{AT_ONCE} objects of {SMALL_BYTES // MIB} MiB at once"
    return Kit({name: _pipe_many(system, data, SMALL_BYTES)}, close=close)


async def obstore_kit(place: Place) -> Kit:
    """Open obstore, without SHA-256 of data, as the others."""
    import obstore  # noqa: PLC0415 -- an extra
    from obstore.store import S3Store  # noqa: PLC0415 -- as above

    from bcp.backends.objects.parts import checksum  # noqa: PLC0415 -- as above

    store = S3Store(
        "bucket", endpoint=place.url, region="us-east-1", access_key_id="key", secret_access_key="secret",  # noqa: S106
        unsigned_payload=True, client_options={"allow_http": True},
    )  # fmt: skip
    data, out = bytes(filled(place.nbytes)), memoryview(bytearray(place.nbytes))
    starts, ends = map(list, zip(*ranges(place.nbytes, RANGE_BYTES), strict=True))

    async def put(name: str, chunk_bytes: int) -> None:
        await obstore.put_async(store, name, data, use_multipart=True, chunk_size=chunk_bytes, max_concurrency=AT_ONCE)

    async def engine(name: str) -> None:
        """Store parts as an engine of bcp would have to: each one after its CRC-32C, which obstore cannot send."""

        async def parts() -> AsyncIterator[memoryview]:
            slices = [memoryview(data)[start:stop] for start, stop in ranges(place.nbytes, PART_BYTES)]
            crcs = [asyncio.create_task(checksum(one)) for one in slices]
            for part, crc in zip(slices, crcs, strict=True):
                await crc
                yield part

        await obstore.put_async(
            store, name, parts(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=AT_ONCE
        )

    async def get_ranges(name: str) -> Sequence[Bytes]:
        found = await obstore.get_ranges_async(store, name, starts=starts, ends=ends, coalesce=0)
        return [memoryview(one) for one in found]

    async def into(name: str) -> Sequence[Bytes]:
        """Fill one buffer, as an engine of bcp would have to."""

        async def fill(start: int, stop: int) -> None:
            found = await obstore.get_range_async(store, name, start=start, end=stop)
            await asyncio.to_thread(_copy, out[start:stop], memoryview(found))

        await at_once([partial(fill, start, stop) for start, stop in zip(starts, ends, strict=True)], AT_ONCE)
        return [out]

    writes: dict[str, Write] = {f"put, chunks of {size} MiB": partial(put, chunk_bytes=size * MIB) for size in (8, 32)}
    writes["put, parts after their CRCs"] = engine
    return Kit(writes, {"get_ranges": get_ranges, "get_range, copied to one buffer": into}, partial(wipe, out))


def _copy(out: memoryview, data: memoryview) -> None:
    out[:] = data


async def native_kit(place: Place) -> Kit:
    """Open hdfs-native."""
    import hdfs_native  # noqa: PLC0415 -- an extra

    client = hdfs_native.AsyncClient(place.url)
    data = memoryview(filled(place.nbytes))

    async def write(name: str) -> None:
        """Write one stream in chunks of 4 MiB, which are its quickest. It takes anything but bytes item by item."""
        options = hdfs_native.WriteOptions(overwrite=True, create_parent=True, replication=1)
        writer = await client.create(f"/{name}", options)
        for start, stop in ranges(place.nbytes, 4 * MIB):
            await writer.write(bytes(data[start:stop]))
        await writer.close()

    async def whole(name: str) -> Sequence[Bytes]:
        reader = await client.read(f"/{name}")
        return [await reader.read_range(0, place.nbytes)]

    async def stream(name: str) -> Sequence[Bytes]:
        reader = await client.read(f"/{name}")
        return [piece async for piece in reader.read_range_stream(0, place.nbytes)]

    return Kit({"one stream": write}, {"read_range, whole": whole, "read_range_stream": stream})


async def file_kit(place: Place) -> Kit:
    """Open files of Python, in a thread, and let them be durable."""
    data, folder = memoryview(filled(place.nbytes)), Path(place.url)
    out = memoryview(bytearray(place.nbytes))

    def put(name: str) -> None:
        with (folder / name).open("wb", buffering=0) as file:
            for start, stop in ranges(place.nbytes, RANGE_BYTES):
                file.write(data[start:stop])
            os.fsync(file.fileno())

    def fill(name: str) -> None:
        with (folder / name).open("rb", buffering=0) as file:
            for start, stop in ranges(place.nbytes, RANGE_BYTES):
                file.readinto(out[start:stop])

    async def write(name: str) -> None:
        await asyncio.to_thread(put, name)

    async def read(name: str) -> Sequence[Bytes]:
        await asyncio.to_thread(fill, name)
        return [out]

    return Kit({"write, fsync": write}, {"readinto": read}, partial(wipe, out))


CLIENTS: Mapping[str, tuple[Callable[[Place], Awaitable[Kit]], Sequence[str]]] = {
    "bcp gs://": (bcp_gcs, ["gcsfs", "google_crc32c"]),
    "bcp s3://": (bcp_s3, ["aiobotocore", "google_crc32c"]),
    "bcp hdfs://": (bcp_hdfs, ["hdfs_native"]),
    "bcp, directory": (bcp_local, []),
    "bcp local://": (bcp_generic, []),
    "gcsfs": (gcsfs_kit, ["gcsfs"]),
    "gcsfs, tuned": (tuned_gcsfs_kit, ["gcsfs"]),
    "s3fs": (s3fs_kit, ["s3fs"]),
    "s3fs, tuned": (tuned_s3fs_kit, ["s3fs"]),
    "obstore": (obstore_kit, ["obstore"]),
    "hdfs-native": (native_kit, ["hdfs_native"]),
    "Python": (file_kit, []),
}
"""Functions that open clients, and the packages that they need."""


def missing(client: str) -> list[str]:
    """Return the packages that a client needs and that are not installed."""
    return [package for package in CLIENTS[client][1] if find_spec(package) is None]
