"""The memory of a host: what counts, who may read it, and who may take it away."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from bcp._messages.tiers import Intent
from bcp.errors import CorruptError, InputError, MessageError, StorageError
from bcp.format.receipt import Receipt, encode_receipt
from bcp.tiers.folder import NodeFolder
from bcp.tiers.intent import decode_intent, encode_intent
from bcp.tiers.notes import COPYING, REFUSED, STORING, Mark

OPERATION = "0123456789abcdef"


def intent(rank: int = 1, operation: str = OPERATION, **more: Any) -> Intent:
    facts = {
        "world_size": 4,
        "place": "step-00000007",
        "step": 7,
        "framework": "torch",
        "part_bytes": 1 << 25,
        "layout": bytes(16),
        "receipt": encode_receipt(Receipt(rank, operation, [], {})),
    }
    return Intent(rank=rank, operation=operation, **(facts | more))


def marked(folder: NodeFolder, **more: Any) -> Mark:
    made = intent(**more)
    mark = Mark(made.operation, made.rank)
    folder.prepare(made)
    folder.mark(mark)
    return mark


def test_an_intent_counts_once_it_is_marked(tmp_path: Path) -> None:
    folder, made = NodeFolder(tmp_path / "a"), intent()
    folder.prepare(made)
    assert folder.marks() == []
    folder.mark(Mark(OPERATION, 1))
    assert folder.marks() == [Mark(OPERATION, 1)]
    with folder.holding(Mark(OPERATION, 1)) as held:
        assert held is not None
        assert held.intent == made
        assert held.blank.rank == 1


def test_a_forgotten_intent_leaves_nothing(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    folder.prepare(intent())
    folder.forget(Mark(OPERATION, 1))
    folder.forget(Mark(OPERATION, 1))
    assert not [*(folder.root / "intents").iterdir()]


def test_marks_come_by_operation_and_rank(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    marks = [marked(folder, rank=rank, operation=operation * 16) for operation in "ba" for rank in (3, 0)]
    (folder.root / "intents" / "README").write_text("no intent")
    assert folder.marks() == sorted(marks)


def test_what_is_read_is_not_taken_away(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    mark = marked(folder)
    with folder.holding(mark) as one, NodeFolder(folder.root).holding(mark) as other:
        assert one is not None
        assert other is not None
        assert not NodeFolder(folder.root).take(mark)
    assert folder.take(mark)
    assert folder.marks() == []
    assert folder.take(mark), "it is taken away already"
    with folder.holding(mark) as gone:
        assert gone is None


def hold_and_die(root: Path, mark: Mark, is_held: Any) -> None:
    with NodeFolder(root).holding(mark):
        is_held.set()
        os._exit(9)


def test_a_reader_that_dies_holds_nothing_any_more(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    mark = marked(folder)
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    process = context.Process(target=hold_and_die, args=(folder.root, mark, is_held))
    process.start()
    assert is_held.wait(60)
    process.join(60)
    assert process.exitcode == 9
    assert folder.take(mark)


def test_a_child_that_is_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    """It has the same open files; the locks are given up where their owner does so."""
    folder = NodeFolder(tmp_path / "a")
    mark = marked(folder)
    end, begin = os.pipe()
    with folder.holding(mark) as held, folder.arranging():
        assert held is not None
        child = os.fork()
        if not child:
            os.close(begin)
            os.read(end, 1)
            os._exit(0)
    try:
        assert folder.take(mark)
        with folder.arranging():
            assert not folder.is_member(0)
            member = folder.join(0)
        other = os.fork()
        if not other:
            os.close(begin)
            os.read(end, 1)
            os._exit(0)
        with folder.arranging():
            assert folder.is_member(0), "the fork has not given the place up"
        member.close()
        with folder.arranging():
            assert not folder.is_member(0)
    finally:
        os.close(begin)
        os.close(end)
        os.waitpid(child, 0)
        os.waitpid(other, 0)


def test_a_mark_that_goes_while_it_is_opened_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = NodeFolder(tmp_path / "a")
    mark = marked(folder)
    opened = os.open

    def slow_open(path: Any, *flags: Any) -> int:
        fd = opened(path, *flags)
        monkeypatch.undo()
        assert NodeFolder(folder.root).take(mark)
        return fd

    monkeypatch.setattr(os, "open", slow_open)
    with folder.holding(mark) as held:
        assert held is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "of another rank", "empty"])
def test_a_damaged_intent_counts_for_nothing(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = NodeFolder(tmp_path / "a")
    mark = marked(folder)
    path = folder.root / "intents" / mark.name
    data = bytearray(path.read_bytes())
    data[20] ^= 1 if damage == "flipped" else 0
    others = {"cut": data[:-3], "flipped": data, "of another rank": encode_intent(intent(rank=2)), "empty": b""}
    path.write_bytes(others[damage])
    with folder.holding(mark) as held:
        assert held is None
    assert "cannot be read, so its files count for nothing" in caplog.text


def test_an_intent_with_the_receipt_of_another_is_refused() -> None:
    other = encode_receipt(Receipt(2, OPERATION, [], {}))
    with pytest.raises(CorruptError, match=r"of rank 1 in operation 0123456789abcdef, and its receipt of rank 2"):
        decode_intent(encode_intent(intent(receipt=other)), "there")


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": "../elsewhere"},
        {"place": "/etc"},
        {"place": "a//b"},
        {"place": "a/./b"},
        {"place": ".hidden"},
        {"rank": 4},
        {"operation": "x"},
        {"replaces": "x"},
    ],
)
def test_an_intent_that_leads_astray_is_no_intent(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, MessageError)):
        intent(**({"receipt": b""} | wrong))


def test_layouts_are_kept_once(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    name = folder.put_layout(b"layout")
    assert folder.put_layout(b"layout") == name
    assert folder.layout(name) == b"layout"
    assert len([*(folder.root / "layouts").iterdir()]) == 1
    with pytest.raises(CorruptError, match="is missing"):
        folder.layout(bytes(16))


# -- whose directory it is -----------------------------------------------------------------------------


def test_it_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    assert folder.root.stat().st_mode & 0o777 == 0o700
    assert NodeFolder(tmp_path / "a").root == folder.root


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o755)
    with pytest.raises(InputError, match="with mode 755"):
        NodeFolder(tmp_path / "a")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NodeFolder(tmp_path / "a")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match="and this is user 12345"):
        NodeFolder(tmp_path / "a")


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    if kind == "link":
        (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "a").write_bytes(b"")
    with pytest.raises(InputError, match="is no directory"):
        NodeFolder(tmp_path / "a")
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_an_error_of_the_system_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing is no directory"):
        NodeFolder(tmp_path / "missing" / "a")


def test_notes_of_troubles_go_with_them(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path / "a")
    assert folder.troubles(COPYING) == folder.troubles(STORING) == {}
    folder.put_troubles(STORING, {})
    assert not (folder.root / STORING).exists(), "an agent without troubles writes nothing"
    folder.put_troubles(COPYING, {"node-2": "silent", "node-3": "full"})
    assert folder.troubles(COPYING) == {"node-2": "silent", "node-3": "full"}
    assert folder.troubles(STORING) == {}
    folder.put_troubles(COPYING, {})
    assert folder.troubles(COPYING) == {}
    (folder.root / COPYING).write_bytes(b"damaged")
    assert folder.troubles(COPYING) == {}


def test_a_note_without_room_ends_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = NodeFolder(tmp_path / "a")
    before = {*folder.root.rglob("*")}
    monkeypatch.setattr(Path, "write_bytes", full)
    folder.put_troubles(COPYING, {"node-2": "silent"})
    assert {*folder.root.rglob("*")} == before, "nothing is left behind"
    with pytest.raises(StorageError, match="No space left"):
        folder.end(OPERATION, REFUSED)
    assert {*folder.root.rglob("*")} == before
