"""Answers of a store to a commit that do not say what has happened: the save tells the truth, and nothing is lost."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from fake_store import FakeStore

import bcp
from bcp._deletion import Attempt, Committed, may_delete
from bcp.backends.objects import ConditionError, If, ObjectBackend, RequestError
from bcp.format.metadata import METADATA_KEY, operation_of
from bcp.options import LoadOptions, SaveOptions
from bcp.protocols import RetryPolicy, Version

POLICY = RetryPolicy(deadline_seconds=60.0, first_pause_seconds=0.001, longest_pause_seconds=0.002)


class Store(FakeStore):
    """Answers requests for the metadata and for receipts in the ways that a test has set.

    Attributes:
        put_error: raised by a conditional write, which is carried out all the same if ``acts`` is set.
        times: how many of these writes fail so.
        stale: reads of the metadata that show what was there before; None for an absent one.
        absent: by part of the key, how many reads do not find the object.
    """

    def __init__(self, objects: dict[str, tuple[bytes, Version]]) -> None:
        super().__init__(objects)
        self.put_error: Exception | None = None
        self.acts, self.times, self.stale = True, 1, 0
        self.absent: dict[str, int] = {}
        self.old = objects.get(METADATA_KEY)

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        if condition is None or self.put_error is None or not self.times:
            return await super().put(key, data, condition)
        self.times -= 1
        if self.acts:
            await super().put(key, data, condition)
        raise self.put_error

    async def get(self, key: str) -> tuple[bytes, Version]:
        for part, count in self.absent.items():
            if part in key and count and self.writes(key):
                self.absent[part] -= 1
                raise FileNotFoundError(key)
        if key == METADATA_KEY and self.stale and self.objects.get(key) != self.old:
            self.stale -= 1
            if self.old is None:
                raise FileNotFoundError(key)
            return self.old
        return await super().get(key)

    def writes(self, key: str) -> bool:
        """Whether the new metadata are there already, or the key is another one."""
        return key != METADATA_KEY or self.objects.get(key) != self.old


def states(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((5,), value)}, "extra_states": {"value": value}}


def save(store: FakeStore, value: float) -> bcp.SaveResult:
    return bcp.save(ObjectBackend(store, POLICY), states(value), options=SaveOptions(overwrite=True, retries=POLICY))


def load(store: FakeStore) -> float | None:
    """Return what a load finds, with a store of good answers; None for no checkpoint. A harmed one raises."""
    target = states(0.0)
    try:
        options = LoadOptions(record=False)
        bcp.load(ObjectBackend(FakeStore(store.objects), POLICY), target, options=options)
    except bcp.NotACheckpointError:
        return None
    except bcp.UncommittedError:
        return None
    assert target["model"]["w"].eq(target["extra_states"]["value"]).all()
    return float(target["extra_states"]["value"])


def place(*, overwrites: bool) -> Store:
    objects: dict[str, tuple[bytes, Version]] = {}
    if overwrites:
        save(FakeStore(objects), 1.0)
    return Store(objects)


ANSWERS: dict[str, Exception] = {
    "refused": ConditionError("412"),
    "forbidden": RequestError("403"),
    "conflict": RequestError("409", transient=True),
    "absent": FileNotFoundError("404"),
    "without a header": KeyError("ETag"),
    "not text": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "lost": ConnectionResetError("reset"),
}


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_commit_that_was_carried_out_is_a_success_whatever_the_answer(answer: str, *, overwrites: bool) -> None:
    store = place(overwrites=overwrites)
    store.put_error = ANSWERS[answer]
    report = save(store, 2.0)
    assert load(store) == 2.0
    assert {operation_of(key) for key in store.objects} == {report.operation, None}, "the old files are swept"


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("answer", ["forbidden", "absent"])
def test_a_commit_of_unknown_outcome_says_so_and_deletes_nothing(answer: str, *, overwrites: bool) -> None:
    """The request may arrive late: then the checkpoint has all its files."""
    store = place(overwrites=overwrites)
    late: list[tuple[bytes, If]] = []

    async def put(key: str, data: memoryview, condition: If | None = None) -> Version:
        if condition is None:
            return await FakeStore.put(store, key, data)
        late.append((bytes(data), condition))
        raise ANSWERS[answer]

    store.put = put  # type: ignore[method-assign]
    with pytest.raises(bcp.StorageError, match=r"no known outcome: .* may be committed, now or later.*No file was"):
        save(store, 2.0)
    assert load(store) == (1.0 if overwrites else None)
    store.store(METADATA_KEY, late[0][0])
    assert load(store) == 2.0


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("reads", [1, 3, 1000])
def test_reads_that_are_behind_lose_nothing(reads: int, *, overwrites: bool) -> None:
    store = place(overwrites=overwrites)
    store.put_error, store.stale = ConditionError("412"), reads
    try:
        save(store, 2.0)
    except bcp.StorageError as error:
        assert reads == 1000
        assert "may be committed" in str(error)  # noqa: PT017 -- a success is right, too
    assert load(store) == 2.0


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("key", ["receipts/", METADATA_KEY])
@pytest.mark.parametrize("times", [1, 3])
def test_an_object_that_is_not_found_at_first_is_asked_for_again(key: str, times: int, *, overwrites: bool) -> None:
    store = place(overwrites=overwrites)
    store.absent[key] = times
    save(store, 2.0)
    assert load(store) == 2.0


@pytest.mark.parametrize("overwrites", [False, True])
def test_old_metadata_come_back_if_the_files_of_a_commit_are_gone(*, overwrites: bool) -> None:
    store = place(overwrites=overwrites)
    old = {key for key in store.objects if operation_of(key)}

    async def put(key: str, data: memoryview, condition: If | None = None) -> Version:
        version = await FakeStore.put(store, key, data, condition)
        if condition is not None:
            for gone in [key for key in store.objects if operation_of(key) and key not in old]:
                del store.objects[gone]
        return version

    store.put = put  # type: ignore[method-assign]
    with pytest.raises(bcp.StorageError, match="disappeared during its commit"):
        save(store, 2.0)
    assert load(store) == (1.0 if overwrites else None)


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_save_that_lost_names_the_winner_and_leaves_no_file(*, overwrites: bool) -> None:
    store = place(overwrites=overwrites)
    winner: list[str] = []

    async def put(key: str, data: memoryview, condition: If | None = None) -> Version:
        if condition is not None and not winner:
            winner.append("")
            other = FakeStore(store.objects)
            other.numbers = store.numbers
            bcp_report = await bcp.asave(ObjectBackend(other, POLICY), states(3.0), options=SaveOptions(overwrite=True))
            winner[0] = bcp_report.operation
        return await FakeStore.put(store, key, data, condition)

    store.put = put  # type: ignore[method-assign]
    with pytest.raises(bcp.ExistsError) as caught:
        save(store, 2.0)
    assert winner[0] in str(caught.value)
    assert load(store) == 3.0
    assert {operation_of(key) for key in store.objects} == {winner[0], None}


OWN, OLD, OTHER = "a" * 16, "b" * 16, "c" * 16


def rule(committed: Committed, attempt: Attempt | None, files: str) -> bool:
    """State the rule in other words: what may be named now or later is kept."""
    if attempt is not None and files == attempt.operation and not attempt.is_sent:
        return True
    if committed.data is not None and (committed.operation in ("", files) or files in committed.also):
        return False
    if attempt is None or (files != attempt.operation and files not in attempt.also):
        return True
    has_lost = committed.operation not in ("", attempt.replaces)
    return has_lost or (attempt.is_refused and committed.operation != "")


def test_the_rule_of_deletion_in_every_case() -> None:
    found = [Committed(), Committed(b"?"), *(Committed(b"x", operation) for operation in (OWN, OLD, OTHER))]
    found += [Committed(b"x", OTHER, frozenset([OLD])), Committed(b"x", OWN, frozenset([OLD]))]
    tries: list[Attempt | None] = [None]
    for replaces, sent, refused in itertools.product(("", OLD), (False, True), (False, True)):
        tries.append(Attempt(OWN, replaces, is_sent=sent, is_refused=refused))
        tries.append(Attempt(OWN, replaces, is_sent=sent, is_refused=refused, also=frozenset([OLD])))
    for committed, attempt, files in itertools.product(found, tries, (OWN, OLD, OTHER)):
        assert may_delete(files, committed, attempt) == rule(committed, attempt, files), (committed, attempt, files)


def test_no_deletion_goes_past_the_rule(pytestconfig: pytest.Config) -> None:
    """Name every file with a call that deletes objects; a new one has to ask the rule, or to say why it need not."""
    calls = re.compile(r"(backend|whole|view|hot)\.(delete|discard)\(")
    rooms = {}
    for path in (pytestconfig.rootpath / "bcp").rglob("*.py"):
        name = path.relative_to(pytestconfig.rootpath / "bcp").as_posix()
        count = len(calls.findall(path.read_text()))
        if count and not name.startswith("testing/"):
            rooms[name] = count
    assert rooms == {
        "_deletion.py": 6,
        "_doctor/storage.py": 2,
        "_save/codec_trial.py": 1,  # the file of a trial, which no metadata name
        "backends/cooled.py": 1,  # these three pass on what their callers delete
        "backends/passing.py": 2,
        "backends/prefixed.py": 2,
        "publication/folder.py": 1,  # the older weights of a subscriber's own folder
        "publication/retention.py": 1,  # unfinished writes of dead claims
        "runs/deletion.py": 1,
        "runs/folder.py": 2,
        "runs/ledger_file.py": 1,
        "tools/exports/exporting.py": 1,  # files of other software, which no metadata name
        "tools/exports/last_files.py": 1,  # the same
        "tools/exports/target.py": 2,  # the same
        "tools/moving.py": 1,  # unfinished writes of files that are whole elsewhere
    }, "see bcp/_deletion.py"
