"""Pipes, sockets, devices, directories and links in the place of a checkpoint's files: refused at once, never read."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bcp

pytestmark = pytest.mark.timeout(240)  # ends a hang

FILES = ("run.json", "metadata.arrow", "receipts/*", "model/*.safetensors", "extra_states/*.safetensors")


def states(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value)}, "extra_states": {"seen": value}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("odd") / "run"
    with bcp.Run(folder, states(1.0), save=1) as run:
        run.resume()
        for step in (1, 2):
            run.maybe_save(step).wait()
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def put_a_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_a_socket(path: Path) -> None:
    """Bind a socket by a short relative name: its address has room for 107 bytes."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def put_a_device(path: Path) -> None:
    """Make a node of ``/dev/zero``, which can be read without end."""
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


PUTS = [(put_a_pipe, "a named pipe"), (put_a_socket, "a socket"), (put_a_device, "a device")]


def replaced(folder: Path, pattern: str, put: Callable[[Path], None]) -> Path:
    """Put something else in the place of a file of the run or of its newest checkpoint."""
    (path,) = folder.glob(pattern) if pattern == "run.json" else (folder / "step-00000002").glob(pattern)
    path.unlink()
    put(path)
    return path


@pytest.mark.parametrize(("put", "words"), PUTS)
@pytest.mark.parametrize("pattern", FILES[1:])
def test_a_load_names_it_and_a_run_resumes_from_the_older_checkpoint(
    folder: Path, pattern: str, put: Callable[[Path], None], words: str
) -> None:
    path = replaced(folder, pattern, put)
    with pytest.raises(bcp.CorruptError, match=rf"{path.name} is {words} and not a file: move it away"):
        bcp.load(folder / "step-00000002", states())
    if pattern != "metadata.arrow":
        assert bcp.latest(folder) == f"{folder}/step-00000002"
    target = states()
    with bcp.Run(folder, target, save=100) as run:
        assert run.resume() == 1
    assert target["model"]["w"].eq(1).all()


@pytest.mark.parametrize(("put", "words"), PUTS)
def test_in_the_place_of_the_ledger_it_ends_resume_and_not_latest(
    folder: Path, put: Callable[[Path], None], words: str
) -> None:
    replaced(folder, "run.json", put)
    assert bcp.latest(folder) == f"{folder}/step-00000002"
    with bcp.Run(folder, states(), save=100) as run, pytest.raises(bcp.CorruptError, match=rf"run\.json is {words}"):
        run.resume()
    assert not list(folder.glob("run.json.broken-*"))


@pytest.mark.parametrize("pattern", ["telemetry/*", "telemetry"])
def test_a_report_leaves_it_out(folder: Path, pattern: str) -> None:
    (path,) = (folder / "step-00000002").glob(pattern)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)
    assert len(bcp.report(folder).recordings) == 1


def test_a_directory_in_the_place_of_the_ledger_is_named(folder: Path) -> None:
    replaced(folder, "run.json", Path.mkdir)
    with bcp.Run(folder, states(), save=100) as run, pytest.raises(bcp.StorageError, match="move the directory away"):
        run.resume()


def test_a_save_over_a_pipe_is_refused_and_leaves_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metadata.arrow")
    with pytest.raises(bcp.CorruptError, match=r"metadata\.arrow is a named pipe"):
        bcp.save(tmp_path, states(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.arrow"]


@pytest.mark.parametrize("pattern", FILES)
def test_a_link_out_of_the_folder_is_refused_and_its_target_copied_nowhere(folder: Path, pattern: str) -> None:
    secret = folder.parent / "secret"
    secret.write_text("TOP SECRET")
    replaced(folder, pattern, lambda path: path.symlink_to(secret))
    with pytest.raises(bcp.BcpError, match="symbolic link"):
        bcp.load(folder / "step-00000002", states()) if pattern != "run.json" else bcp.Run(folder, states()).resume()
    regular = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in regular if b"SECRET" in path.read_bytes()]


def test_a_linked_folder_loads(folder: Path, tmp_path: Path) -> None:
    """A user may keep a checkpoint on other storage, and a folder of a checkpoint's files beside it."""
    (tmp_path / "elsewhere").mkdir()
    moved = (folder / "step-00000002").rename(tmp_path / "elsewhere" / "step-00000002")
    (folder / "step-00000002").symlink_to(moved)
    (moved / "model").rename(moved / "weights")
    (moved / "model").symlink_to("weights")
    target = states()
    bcp.load(folder / "step-00000002", target)
    assert target["model"]["w"].eq(1).all()
