"""File systems of fsspec through the adapter that takes any of them."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import bcp
from bcp.backends import resolve
from bcp.backends.objects import ObjectBackend
from bcp.backends.objects.generic import FsspecStore, open_generic
from bcp.errors import InputError, MissingExtraError, StorageError
from bcp.protocols import Backend, RetryPolicy
from bcp.testing.backend_suite import BackendSuite

pytestmark = pytest.mark.anyio
QUICK = RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3)


class Generic(BackendSuite):
    """What a file system of fsspec cannot promise is left out by name."""

    many = 300  # there are no pages

    async def test_put_if_of_many_at_once(self) -> None:
        """It looks before it writes: two that look at once both write."""


class TestLocal(Generic):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return resolve(f"local://{tmp_path}/deep/root")

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ObjectBackend)
        return open_generic(f"local:///{backend.store._root}", {}, QUICK)


class TestMemory(Generic):
    @pytest.fixture
    def backend(self) -> Backend:
        root = f"/{uuid.uuid4().hex}"
        store = FsspecStore(MemoryFileSystem, MemoryFileSystem, root, f"memory:/{root}", {})
        return ObjectBackend(store, QUICK)


class Flaky(LocalFileSystem):
    """Fails as it is told to."""

    protocol = "flaky"
    cachable = False
    errors: list[Exception] = []  # noqa: RUF012 -- the tests'

    def fail(self) -> None:
        if self.errors:
            raise self.errors.pop()

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> Any:
        self.fail()
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        self.fail()
        return super().cat_file(path, start=start, end=end, **kwargs)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> type[Flaky]:
    monkeypatch.setattr(Flaky, "errors", [])
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    return Flaky


async def test_transient_errors_are_tried_again_and_others_are_not(flaky: type[Flaky], tmp_path: Path) -> None:
    backend = resolve(f"flaky://{tmp_path}", retries=QUICK)
    flaky.errors[:] = [ConnectionResetError("reset"), OSError(errno.ESTALE, "stale file handle"), TimeoutError()]
    await backend.put("a", b"1")
    assert await backend.get("a") == b"1"
    flaky.errors[:] = [PermissionError(errno.EACCES, "denied")]
    with pytest.raises(StorageError, match=r"flaky://.*reading 'a' failed, tried once: PermissionError.*denied"):
        await backend.get("a")
    await backend.aclose()


class Silent(LocalFileSystem):
    """Renames over a file by doing nothing, as fsspec's client of WebHDFS does."""

    protocol = "silent"
    cachable = False

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if not self.exists(path2):
            super().mv(path1, path2, **kwargs)


class Refusing(LocalFileSystem):
    """Refuses to rename over a file."""

    protocol = "refusing"
    cachable = False

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


class Stuck(LocalFileSystem):
    """Never renames."""

    protocol = "stuck"
    cachable = False

    def mv(self, *_: Any, **__: Any) -> None:
        return


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("kind", [Silent, Refusing])
async def test_a_file_system_that_does_not_rename_over_files(kind: type[LocalFileSystem], tmp_path: Path) -> None:
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    backend = resolve(f"{kind.protocol}://{tmp_path}", retries=QUICK)
    for data in (b"1", b"2"):
        await backend.put("a", data)
        assert await backend.get("a") == data
        found = await backend.version("b")
        assert await backend.put_if("b", data, found)
        assert await backend.get("b") == data
        large = data * (10 << 20)
        async with backend.open_write("c", len(large)) as writer:
            await writer.write_part(0, 0, large)
        out = bytearray(len(large))
        await backend.read_into("c", 0, memoryview(out))
        assert out == large
    assert names(tmp_path) == ["a", "b", "c"]
    await backend.aclose()


async def test_a_file_that_keeps_its_temporary_name_is_an_error(tmp_path: Path) -> None:
    fsspec.register_implementation("stuck", Stuck, clobber=True)
    backend = resolve(f"stuck://{tmp_path}", retries=QUICK)
    with pytest.raises(StorageError, match="does not rename it to"):
        await backend.put("a", b"1")
    assert names(tmp_path) == []
    await backend.aclose()


async def test_values_of_options_are_not_shown(flaky: type[Flaky], tmp_path: Path) -> None:
    flaky.errors[:] = [ValueError("cannot log in with hunter2")]
    backend = resolve(f"flaky://{tmp_path}", {"password": "hunter2"}, QUICK)
    with pytest.raises(StorageError) as caught:
        await backend.put("a", b"1")
    assert "hunter2" not in str(caught.value)
    assert "cannot log in with ***" in str(caught.value)
    assert "hunter2" not in repr(bcp.SaveOptions(storage_options={"password": "hunter2"}))
    await backend.aclose()


def test_saves_and_loads_by_url(tmp_path: Path) -> None:
    model = {"w": torch.arange(300_000.0), "s": torch.ones(3)}
    path = f"local://{tmp_path}/run/step-1"
    options = bcp.SaveOptions(storage_options={"auto_mkdir": True})
    report = bcp.save(path, {"model": model, "extra_states": {"step": 7}}, options=options)
    assert report.path == path
    found: dict[str, Any] = {"w": torch.zeros(300_000), "s": torch.zeros(3)}
    extra: dict[str, Any] = {}
    bcp.load(path, {"model": found, "extra_states": extra})
    assert torch.equal(found["w"], model["w"])
    assert extra == {"step": 7}
    with pytest.raises(bcp.ExistsError):
        bcp.save(path, {"model": model})
    bcp.save(path, {"model": {"w": torch.zeros(2)}}, overwrite=True, async_checkpoint=True).wait()
    left = {one.relative_to(tmp_path).as_posix() for one in tmp_path.rglob("*") if one.is_file()}
    assert {name.split("/")[2] for name in left} == {"metadata.arrow", "model", "receipts", "telemetry"}
    assert len(list((tmp_path / "run/step-1/model").iterdir())) == 1


def test_a_missing_package_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"abfs:// needs a package that is not installed.*adlfs"):
        resolve("abfs://container/path")


def test_options_that_a_file_system_does_not_take_are_refused(flaky: type[Flaky], monkeypatch: Any) -> None:
    def refuse(_: Flaky, **kwargs: Any) -> None:
        raise TypeError(f"unexpected keyword arguments {kwargs}")

    monkeypatch.setattr(flaky, "__init__", refuse)
    options = bcp.SaveOptions(storage_options={"colour": "blue"})
    with pytest.raises(InputError, match=r"flaky:// does not take these options.*colour"):
        bcp.save("flaky:///nowhere", {"model": {}}, options=options)


@pytest.mark.parametrize("path", ["/x", "file:///x", "memory://x"])
def test_paths_without_options_refuse_them(path: str) -> None:
    with pytest.raises(InputError, match=r"storage_options has \['key'\]"):
        resolve(path, {"key": "secret"})


@pytest.mark.parametrize("password", ["hunter2", "hun@ter2", "hun:hunter2"])
def test_passwords_in_urls_are_not_shown(password: str) -> None:
    with pytest.raises(InputError) as caught:
        bcp.save(f"nosuch://user:{password}@host/path", {"model": {}})
    assert "nosuch://user:***@host/path" in str(caught.value)
    assert "ter2" not in str(caught.value)
    for scheme, options in (("memory", {"key": 1}), ("file", {"key": 1}), ("file", {})):
        with pytest.raises(InputError) as caught:
            resolve(f"{scheme}://user:{password}@host/path", options)
        assert "user:***@host" in str(caught.value)
        assert "ter2" not in str(caught.value)
    with pytest.raises(InputError, match="storage_options is a list"):
        bcp.SaveOptions(storage_options=[])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="retries='often'"):
        bcp.LoadOptions(retries="often")  # type: ignore[arg-type]
