from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import pytest

from bcp.backends import LocalBackend, files
from bcp.backends import file_io as writing
from bcp.errors import InputError, StorageError

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def everything_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record fsync and rename, in order."""
    seen: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 -- the kernel's link, kept as text
        seen.append(("fsync", "temp" if name.name.endswith(files.TEMP_SUFFIX) else name.name))
        fsync(fd)

    def recording_rename(old: Path, new: Path) -> None:
        seen.append(("rename", Path(new).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    return seen


async def test_durable_before_visible(root: Path, calls: list[tuple[str, str]]) -> None:
    async with LocalBackend(root).open_write("folder/object", 3) as writer:
        await writer.write_part(0, 0, b"abc")
    new_directories = [("fsync", root.parent.name), ("fsync", "root")]
    assert calls == [*new_directories, ("fsync", "temp"), ("rename", "object"), ("fsync", "folder")]


async def test_put_is_durable_before_visible(
    root: Path, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rename(old: Path, new: Path) -> None:  # aiofiles has taken its own reference to os.rename
        os.rename(old, new)  # noqa: PTH104 -- the recorded one

    monkeypatch.setattr("aiofiles.os.rename", rename)
    await LocalBackend(root).put("object", b"abc")
    assert calls == [("fsync", root.parent.name), ("fsync", "temp"), ("rename", "object"), ("fsync", "root")]


async def test_nothing_is_created_before_the_first_write(root: Path) -> None:
    backend = LocalBackend(root)
    assert await backend.list() == []
    await backend.delete(["a"])
    assert everything_below(root.parent) == []


async def test_delete_prunes_empty_directories_but_not_the_root(root: Path) -> None:
    backend = LocalBackend(root)
    await backend.put("a/b/c", b"")
    await backend.put("a/d", b"")
    await backend.delete(["a/b/c"])
    assert everything_below(root) == ["a", "a/d"]
    await backend.delete(["a/d"])
    assert everything_below(root.parent) == ["root"]


async def test_symbolic_links_do_not_lead_out(root: Path, tmp_path: Path) -> None:
    backend = LocalBackend(root)
    await backend.put("inside", b"x")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    (root / "folder").symlink_to(secret)
    (root / "file").symlink_to(secret / "file")
    for key in ("folder/file", "file"):
        with pytest.raises(InputError, match="symbolic link"):
            await backend.get(key)
        with pytest.raises(InputError, match="symbolic link"):
            await backend.put(key, b"overwritten")
        with pytest.raises(InputError, match="symbolic link"):
            await backend.delete([key])
    with pytest.raises(InputError, match="symbolic link"):
        await backend.list("folder/")
    assert [info.key for info in await backend.list()] == ["inside"]
    assert (secret / "file").read_bytes() == b"secret"


async def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    await LocalBackend(root).put("a", b"x")
    (tmp_path / "link").symlink_to(root)
    await LocalBackend(tmp_path / "link").put("b", b"x")
    assert everything_below(root) == ["a", "b"]


async def test_keys_like_unfinished_files_are_refused(root: Path) -> None:
    with pytest.raises(InputError, match="bcp-tmp"):
        await LocalBackend(root).put("a.bcp-tmp", b"")


async def test_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: memoryview, _offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"LocalBackend.*write part 0 of 'object'.*No space left") as caught:
        async with LocalBackend(root).open_write("object") as writer:
            await writer.write_part(0, 0, b"abc")
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)
    assert everything_below(root) == []


async def test_full_disk_is_noticed_when_space_is_reserved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "fallocate", full)
    with pytest.raises(StorageError, match="No space left"):
        async with LocalBackend(root).open_write("object", 10):
            pytest.fail("the context was entered")
    assert everything_below(root) == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.EINTR])
async def test_space_that_cannot_be_reserved(root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def unsupported(_fd: int, _nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writing, "fallocate", unsupported)
    async with LocalBackend(root).open_write("object", 3) as writer:
        await writer.write_part(0, 0, b"abc")
    assert (root / "object").read_bytes() == b"abc"


async def test_short_writes_and_reads_are_finished(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, out, offset: preadv(fd, [out[0][:5]], offset))
    data = bytes(range(100))
    backend = LocalBackend(root)
    async with backend.open_write("object", 100) as writer:
        await writer.write_part(1, 40, data[40:])
        await writer.write_part(0, 0, data[:40])
    found = bytearray(90)
    await backend.read_into("object", 10, memoryview(found))
    assert bytes(found) == data[10:]


async def test_a_file_in_the_place_of_a_folder(root: Path) -> None:
    backend = LocalBackend(root)
    await backend.put("a", b"")
    with pytest.raises(StorageError) as caught:
        await backend.put("a/b", b"")
    assert caught.value.errno == errno.ENOTDIR


async def test_cancellation_while_a_part_is_being_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, loop = os.pwrite, asyncio.get_running_loop()
    writing = anyio.Event()
    backend = LocalBackend(root)

    def report_then_write(fd: int, data: memoryview, offset: int) -> int:
        loop.call_soon_threadsafe(writing.set)
        return pwrite(fd, data, offset)

    async def write() -> None:
        async with backend.open_write("a/object", 3) as writer:
            await writer.write_part(0, 0, b"abc")
            await anyio.sleep_forever()

    monkeypatch.setattr(os, "pwrite", report_then_write)
    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await writing.wait()
        group.cancel_scope.cancel()
    assert everything_below(root) == []


@pytest.mark.parametrize("writes", ["direct", "early", "buffered"])
async def test_a_killed_writer_leaves_no_object(root: Path, writes: str) -> None:
    program = f"""
        import anyio, os, signal
        from bcp.backends import LocalBackend

        async def main():
            backend = LocalBackend({str(root)!r}, writes={writes!r})
            await backend.put("object", b"old")
            async with backend.open_write("object", 60_000) as writer:
                await writer.write_part(0, 0, bytes(30_000))
                os.kill(os.getpid(), signal.SIGKILL)

        anyio.run(main)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    assert ended.returncode == -9, ended.stderr.decode()
    backend = LocalBackend(root)
    assert [(info.key, info.nbytes) for info in await backend.list()] == [("object", 3)]
    assert bytes(await backend.get("object")) == b"old"
    assert len(everything_below(root)) == 2  # the unfinished file is there, and is not shown


@pytest.mark.parametrize("whose", ["of the top", "of lost+found"])
async def test_directories_that_may_not_be_listed(root: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    backend, scandir = LocalBackend(root), os.scandir
    await backend.put("model/object", b"abc")
    (root / "model" / ".stale.0123.bcp-tmp").touch()
    (root / "lost+found").mkdir()
    refused = root if whose == "of the top" else root / "lost+found"

    def guarded(path: Any) -> Any:
        if Path(path) == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    if refused == root:
        with pytest.raises(StorageError, match="check the permissions"):
            await backend.list()
        return
    assert [info.key for info in await backend.list()] == ["model/object"]
    await backend.discard(await backend.unfinished())
    assert sorted(path.name for path in (root / "model").iterdir()) == ["object"]
