"""Every message between ranks and processes: it survives the wire, and bytes that are no message raise one error."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import pkgutil
import random
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import numpy as np
import pytest
import torch

import bcp
import bcp._messages
from bcp._agree import collective_operation, gather_broadcast, gather_scatter
from bcp._messages.base import Message, decode_either
from bcp._messages.coordination import (
    Abort,
    Answer,
    Card,
    Ended,
    Failure,
    Host,
    Introduction,
    MemberSign,
    OperationEnd,
    Reply,
    RootSign,
    Seat,
)
from bcp._messages.doctor import DoorSign, Finding, Leaders, RankReport, Trial, Way, WholeVerdict
from bcp._messages.planning import (
    Base,
    BlockRuns,
    CatalogueColumns,
    CodecTrial,
    DifferingReplicas,
    EqualBlocks,
    LoadAnswer,
    LoadRequestColumns,
    Opened,
    Opening,
    Rate,
    ReplicaDigests,
    Share,
    SharedDigests,
    SharedRuns,
    SlotColumns,
    SurveyAnswer,
    Table,
    Written,
)
from bcp._messages.publishing import BegunVersion, PublishedVersion, WrittenFiles
from bcp._messages.reading import (
    ArrayPlace,
    Batch,
    Consumed,
    Enclosure,
    ReaderJob,
    Start,
    States,
    StatesRequest,
    WorkerFailure,
)
from bcp._messages.running import (
    Absence,
    Alarm,
    Candidates,
    Choice,
    Departure,
    Durable,
    Outcome,
    Plan,
    Standing,
    Stop,
    Verdict,
)
from bcp._messages.tiers import (
    Attended,
    Digested,
    Drained,
    Drift,
    HeldGroup,
    HeldRanks,
    Holdings,
    Intent,
    KnownLayout,
    LeftBehind,
    Living,
    MadeMetadata,
    Note,
    Offered,
    ParityRecord,
    Post,
    Posted,
    Recovery,
    Settled,
    Sources,
    ToldLayout,
    Traffic,
    Troubles,
    TwinShares,
    TwinTable,
    Want,
    WholeSnapshots,
    WrittenTwin,
)
from bcp._messages.tools import (
    Compared,
    Copied,
    Counted,
    Damage,
    Examined,
    Imported,
    LastNames,
    ObjectSides,
    ValueSides,
)
from bcp._written import decode_written
from bcp.coordinators.local import SoloCoordinator
from bcp.data.worker import Line
from bcp.errors import BcpError, CheckpointError, MessageError, PeerError
from bcp.protocols import Agreement
from bcp.runs.resuming import resume

HOST = Host("h1", "4026531840 boot", "10.0.0.1", ("10.0.0.1/24",))
FINDING = Finding("reach", "cannot reach host h4", "look at the network", of_host=True)

EXAMPLES: list[Message] = [
    Plan(15, saves=True),
    Durable((10, 20), failed=(30,)),
    Candidates((30, 20), (Choice(40, "not committed"),), "a7c1"),
    Outcome("damaged", "CorruptError: bit-flipped"),
    Verdict(3, "rank 3: OSError"),
    Verdict(None),
    Alarm("SIGTERM on rank 3", 29.5),
    Alarm("notice", None),
    Departure(2, 17),
    Standing(17, math.inf),
    Stop(18, 12.0),
    Absence(5, "rank 5 did not answer"),
    Failure(None, "StateError", "no such name"),
    Failure(3, "OSError", "disk full"),
    Abort(3, "rank 3 (host h, pid 7): the disk is full"),
    Abort(0, "different paths", disagreement=True),
    Card("10.0.0.1", 4711, "h1", "4026531840", "secret", tls=False),
    Introduction(4, "h1", 4711),
    RootSign("ab12", 7, None),
    RootSign("ab12", 8, OperationEnd(3, Abort(1, "gone"))),
    MemberSign("cd34", "ab12", HOST),
    Ended(None, OperationEnd(0, Abort(1, "gone"))),
    Reply("cd34", Answer("ef56", "secret", "h1", (HOST,), b"words")),
    Seat(0, (17, 33), (16, 16), ("h0", "h1", "h2")),
    Seat(None, (), (), ()),
    Leaders((0, 8), ("h0", "h1")),
    DoorSign("10.0.0.1", 4711),
    DoorSign(),
    Trial(wrote=False),
    RankReport(3, (FINDING,), {"reach": 2}, {"bcp": "0.1"}, 0.1, "10.0.0.1", "eth0", 7, 0.2, Way(0.1, -3.5)),
    WholeVerdict(False, (7, 9)),  # noqa: FBT003 -- an example
    SharedDigests({"train": "ab"}),
    Examined(2, 9, 1 << 23, (Damage("model/0", 1 << 20, "model/0 is corrupt"),), ("model/1",), 0),
    Compared((ValueSides("optimizer", "lr", "0.5", ""),), (ObjectSides(2, 3, b"", bytes(16)),)),
    Compared(counts=(Counted(4, 5, 6, 0.5), Counted(5, 6, 7, None)), read_nbytes=1 << 20),
    Copied(("receipts/00000-0123456789abcdef",), 4096),
    Intent(
        rank=1,
        world_size=2,
        operation="0123456789abcdef",
        place="step-00000007",
        step=7,
        framework="torch",
        part_bytes=1 << 25,
        layout=bytes(16),
        receipt=b"receipt",
        metrics={"loss": 0.5},
    ),
    BegunVersion("0123456789abcdef", 8, 7, is_anchor=False, has_delta=True),
    WrittenFiles({"w": "model-00001-0.safetensors"}, {}, {"w": "0" * 32}, 4096, 0),
    PublishedVersion(
        "weights/weight_v000008",
        8,
        is_anchor=False,
        has_delta=True,
        tensors=9,
        changed=3,
        nbytes=4096,
        delta_nbytes=40,
        deleted=(1, 2),
    ),
    KnownLayout(bytes(16), b"layout"),
    Drained((0, 2), (b"first", b"second")),
    Holdings("node-1", (HeldRanks("0123456789abcdef", 7, 2, bytes(16)),)),
    WholeSnapshots(
        b"secret",
        ("a", "b"),
        ("10.0.0.1:7000", ""),
        host_of=bytes(8),
        operations=("0123456789abcdef",),
        steps=(7,),
        reasons=("step 8: no",),
    ),
    Recovery(
        2,
        holder=bytes(8),
        begin=bytes(12),
        rebuilt=bytes(4),
        groups=(HeldGroup((bytes(4), bytes(4)), bytes(8)),),
    ),
    ParityRecord("0123456789abcdef", 7, 2, 1, ("node-1", ""), ("10.0.0.1:7000", ""), (bytes(4), bytes(4))),
    Digested(bytes(8), bytes(32), b"intent", b"layout"),
    MadeMetadata(b"metadata", "step-00001000"),
    LeftBehind(("step-00001000",), ("0123456789abcdef",), 4096),
    Settled(True, "run-7/", ("step-00001000",), 8192),  # noqa: FBT003 -- an example
    Offered("0123456789abcdef", (0, 3)),
    Sources(("node-1",), ("10.0.0.1:7000",)),
    ToldLayout(bytes(16), is_copied=True, pairs=True),
    TwinTable(bytes(16), bytes(24)),
    TwinShares(1, b"\3\0\0\0", (bytes(24),)),
    Drift("0123456789abcdef", 7, "node-1", 3, 11, 4, "model/00003-0123456789abcdef.safetensors, block 0: 'w'"),
    Troubles(("node-1",), ("10.0.0.1:7000 does not serve this job",)),
    WrittenTwin(3, ("bn.running_mean",)),
    Traffic(1 << 12, 1 << 20),
    Want("model/00000-0123456789abcdef.safetensors", 1 << 20, 4096),
    Attended(3, 8, 1450, "n1", trouble="1 optimizer steps have begun"),
    Post("a7c1-0", 2, "came/3", b"note"),
    Posted("0123456789abcdef", (Note("came/3", b"note"), Note("closed", b""))),
    Living((0, 3)),
    Opening("0123456789abcdef", True, None, "", True, False),  # noqa: FBT003 -- an example
    Opening("0123456789abcdef", cached=False, version="etag", trace="00-1-2-01", compares=False, differs=True),
    ReplicaDigests(bytes(16), bytes(16), bytes(16)),
    DifferingReplicas(bytes(8), bytes(16), is_trained=True),
    CatalogueColumns(100, b"columns"),
    SlotColumns(2, bytes(16), bytes(16), bytes(32), bytes(32)),
    Table(b"catalogue", b"slots", "", bytes(20)),
    SurveyAnswer(bytes(16), bytes(8), bytes(4)),
    Share(bytes(8), b"", bytes(16), 128, bytes(32)),
    EqualBlocks(3, 4),
    Base(1000, "0123456789abcdef", 3, (500, 1000)),
    Written(bytes(16), 1000, bytes(18), bytes(9), (500,)),
    Opened("00-1-2-01", b"metadata"),
    BlockRuns(3, b"columns"),
    LoadRequestColumns(3, bytes(8), "", b"runs"),
    LoadAnswer(4, bytes(4), b"runs"),
    SharedRuns(3, 2, 4, b"columns"),
    Rate(math.inf),
    CodecTrial(100, 10, 7, 0.5, 64, math.inf),
    LastNames(("config.json", "model.safetensors.index.json")),
    Imported("0123456789abcdef", 3, 2),
    Enclosure(128, 40),
    ReaderJob({"job": ArrayPlace(0, (70,), "|u1")}),
    Start({"units": ArrayPlace(0, (2, 2), "<i8"), "0 tokens": ArrayPlace(64, (0,), "<i8")}),
    Consumed(),
    StatesRequest(2, 7),
    Batch({name: ArrayPlace(64, (2, 3), "<i8") for name in ("numbers", "tokens", "documents", "samples")}, live=True),
    States({}, 2, 7),
    WorkerFailure("a batch", "OSError: gone", "Traceback"),
]
"""One or more of each class."""

OTHERS = [None, True, -1, 1 << 63, 0.5, math.nan, "text", b"bytes", [], [1], {}, {"a": 1}]
"""Values that some field of a message may not have."""

FLIPS = 250


def classes() -> Iterator[type[Message]]:
    """All message classes of the package."""
    for module in pkgutil.iter_modules(bcp._messages.__path__):
        found = importlib.import_module(f"bcp._messages.{module.name}")
        for _, each in inspect.getmembers(found, inspect.isclass):
            if issubclass(each, Message) and each is not Message and each.__module__ == found.__name__:
                yield each


def fields_of(message: Message) -> Any:
    """The message as msgspec writes it: a dict, or a list if the class is an array."""
    return msgspec.msgpack.decode(message.encode())


def refused_or_sound(kind: type[Message], data: bytes) -> None:
    """Decode damaged bytes: a message, which encodes again, or MessageError."""
    try:
        found = kind.decode(data, sender=3)
    except MessageError as error:
        said = str(error)
        assert said.startswith(f"the message {kind.__name__} of rank 3 cannot be decoded, {len(data)} bytes: ")
        assert said.endswith("; run the same version of bcp on all ranks")
    else:
        assert type(found) is kind
        assert kind.decode(found.encode()) == found or found != found  # noqa: PLR0124 -- NaN


each_message = pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)


def test_every_class_has_an_example() -> None:
    assert set(classes()) == set(map(type, EXAMPLES))


def test_every_class_is_strict() -> None:
    for kind in classes():
        config = kind.__struct_config__
        assert config.frozen
        assert config.forbid_unknown_fields
        assert config.tag == kind.__name__ or (config.array_like and config.tag is None)


@each_message
def test_a_message_survives(message: Message) -> None:
    assert type(message).decode(message.encode()) == message


@each_message
def test_a_truncated_message_is_refused(message: Message) -> None:
    data = message.encode()
    for end in range(len(data)):
        with pytest.raises(MessageError, match=f"{type(message).__name__} cannot be decoded, {end} bytes"):
            type(message).decode(data[:end])
    with pytest.raises(MessageError, match="trailing"):
        type(message).decode(data + b"\0")


@each_message
def test_flipped_bytes_are_refused_or_sound(message: Message) -> None:
    dice = random.Random(type(message).__name__)  # noqa: S311 -- a sample, no secret
    for _ in range(FLIPS):
        data = bytearray(message.encode())
        for _ in range(dice.randint(1, 3)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        refused_or_sound(type(message), bytes(data))


@each_message
def test_random_bytes_are_refused(message: Message) -> None:
    dice = random.Random(1)  # noqa: S311 -- a sample, no secret
    for _ in range(FLIPS):
        refused_or_sound(type(message), dice.randbytes(dice.randint(0, 64)))


@each_message
def test_other_types_are_refused_or_sound(message: Message) -> None:
    fields = fields_of(message)
    for place in fields if isinstance(fields, dict) else range(len(fields)):
        for other in OTHERS:
            changed = fields.copy()
            changed[place] = other
            refused_or_sound(type(message), msgspec.msgpack.encode(changed))


@each_message
def test_another_versions_fields_are_refused(message: Message) -> None:
    fields = fields_of(message)
    if isinstance(fields, dict):
        others = [fields | {"added": 1}, fields | {"type": "Other"}]
        required = [each.name for each in msgspec.structs.fields(message) if each.required]
        others += [{name: value for name, value in fields.items() if name != lost} for lost in required]
        others += [{("renamed" if name == old else name): value for name, value in fields.items()} for old in fields]
    else:
        others = [[*fields, 1], fields[1:], fields[:-1], [["Other"], *fields[1:]]]
    for other in others:
        with pytest.raises(MessageError):
            type(message).decode(msgspec.msgpack.encode(other))


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
@each_message
def test_a_length_that_is_claimed_takes_no_memory(message: Message, claim: bytes) -> None:
    fields = fields_of(message)
    head, names = bytes([(0x80 if isinstance(fields, dict) else 0x90) + len(fields)]), list(fields)
    for place in range(len(fields)):
        data = bytearray(head)
        for name in names[:place]:
            data += msgspec.msgpack.encode(name)
            data += msgspec.msgpack.encode(fields[name]) if isinstance(fields, dict) else b""
        data += msgspec.msgpack.encode(names[place]) if isinstance(fields, dict) else b""
        with pytest.raises(MessageError):
            type(message).decode(bytes(data) + claim)


FIRST_DECODES = """
import importlib, pkgutil, sys
import bcp, bcp.data, bcp._messages, bcp.plan.units
from bcp._messages.base import Message, decode_any
from bcp.errors import MessageError

for module in pkgutil.iter_modules(bcp._messages.__path__):
    importlib.import_module(f"bcp._messages.{module.name}")
from bcp._messages.reading import WorkerMessage
from bcp._messages.running import Absence, Alarm, Departure, Stop

kinds = [*Message.__subclasses__(), WorkerMessage, Alarm | Departure, Stop | Absence]
outside = []

def seen(frame, event, argument):
    module = frame.f_globals.get("__name__", "eval")
    if event == "call" and module != "__main__" and not module.startswith("bcp."):
        outside.append(f"{module}.{frame.f_code.co_name}")

def first_decode(kind):
    try:
        decode_any(kind, "", bytes(1))
    except MessageError:
        return
    raise AssertionError(kind)

claims = bcp.plan.units.decode_claims
sys.setprofile(seen)
claims('[["train", 0, 1, []]]')
for kind in kinds:
    first_decode(kind)
sys.setprofile(None)
print(len(kinds), outside)
"""
"""Decodes each message for the first time in its process, and prints the functions outside of bcp that ran."""


def test_a_first_decode_runs_no_code_of_msgspec() -> None:
    done = subprocess.run(  # noqa: S603 -- our own code
        [sys.executable, "-c", FIRST_DECODES], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{len(set(classes())) + 3} []\n"


def test_a_message_of_another_class_is_refused() -> None:
    with pytest.raises(MessageError, match="Stop of rank 7 cannot be decoded"):
        Stop.decode(Standing(1, None).encode(), sender=7)


def test_one_of_two_classes_is_told_by_its_tag() -> None:
    assert decode_either(Alarm, Departure, Departure(1, 2).encode()) == Departure(1, 2)
    with pytest.raises(MessageError, match="Alarm or Departure of rank 2 cannot be decoded, 3 bytes"):
        decode_either(Alarm, Departure, b"abc", sender=2)


def test_no_pattern_lets_a_line_break_pass() -> None:
    opening = Opening("0123456789abcdef\n", cached=True, version=None, trace="", compares=True, differs=False)
    job = ReaderJob({"job": ArrayPlace(0, (70,), "|u1\n")})
    for message in (opening, job):
        with pytest.raises(MessageError, match="matching regex"):
            type(message).decode(message.encode())


def test_a_file_of_no_known_kind_is_refused() -> None:
    known, unknown = (Written(bytes(16), 7, kind + bytes(8), b"", ()) for kind in (b"\3", b"\4"))
    assert decode_written([known.encode(), known.encode()]) == [known, known]
    with pytest.raises(MessageError, match="Written of rank 1 cannot be decoded"):
        decode_written([known.encode(), unknown.encode()])


def test_a_text_that_is_no_unicode_is_sent_escaped() -> None:
    assert Absence.decode(Absence(1, "a\udcff.bin").encode()) == Absence(1, "a\\udcff.bin")


def test_numbers_of_numpy_and_subclasses_of_texts_are_sent() -> None:
    message = Absence(np.int64(3), torch.__version__)  # type: ignore[arg-type]  # numpy's is an index
    assert Absence.decode(message.encode()) == Absence(3, str(torch.__version__))
    assert Standing.decode(Standing(np.int32(3), np.float32(0.5)).encode()) == Standing(3, 0.5)  # type: ignore[arg-type]


def test_no_checkpoint_is_to_blame_for_a_message() -> None:
    assert not issubclass(MessageError, CheckpointError)
    assert bcp.MessageError is MessageError


@pytest.mark.parametrize("error", [MessageError("garbled"), PeerError(1, "rank 1 failed: MessageError: garbled")])
def test_a_run_that_resumes_condemns_no_checkpoint_for_a_message(error: BcpError) -> None:
    async def candidates() -> Candidates:
        return Candidates((20, 10), (), "life")

    tried: list[int] = []

    async def load(step: int, _folder: str) -> None:
        tried.append(step)
        raise error

    with pytest.raises(type(error), match="garbled"):
        anyio.run(partial(resume, SoloCoordinator(), "resume", 10.0, candidates, load))
    assert tried == [20]


class _Forger:
    """The agreement of rank 0 of two ranks, the other one of which sends the given bytes."""

    def __init__(self, other: bytes) -> None:
        self._other = other

    async def gather_broadcast(
        self, step: str, payload: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        del step
        return await decide([payload, self._other])

    async def gather_scatter(
        self, step: str, payload: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> bytes:
        del step
        return divide([payload, self._other])[0]


@pytest.mark.parametrize("other", [b"", b"\7", b"\1", b'\1[null, "StateError", "no such name"]'])
def test_a_garbled_contribution_is_refused_on_all_ranks(other: bytes) -> None:
    forger = cast("Agreement", _Forger(other))

    async def answer(_: Sequence[bytes]) -> bytes:
        return b""

    async def broadcast() -> None:
        async with collective_operation(nullcontext(forger)) as agreement:
            await gather_broadcast(agreement, "begin", 0, b"mine", answer)

    async def scatter() -> None:
        async with collective_operation(nullcontext(forger)) as agreement:
            await gather_scatter(agreement, "plan", 0, b"mine", lambda messages: messages)

    for step in (broadcast, scatter):
        with pytest.raises(MessageError, match="of rank 1 cannot be decoded") as caught:
            anyio.run(step)
        assert caught.value.of_all_ranks


def test_the_last_message_of_a_reader_worker_survives_its_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        Line(ours).send(Consumed())
        Line(theirs).send(failure := WorkerFailure("a batch", "OSError: gone", "Traceback"))
        theirs.close()  # the message to it is unread
        received = Line(ours).receive()
        assert received is not None
        assert received.message == failure
        assert Line(ours).receive() is None


@pytest.mark.parametrize(
    ("file", "packet", "said"),
    [
        (b"", b"\0" * 16, "Enclosure cannot be decoded, 16 bytes"),
        (b"short", Enclosure(128, 40).encode(), "with arrays cannot be decoded, 5 bytes"),
        (b"arrays, and no message", Enclosure(8, 14).encode(), "of a reader worker cannot be decoded, 14 bytes"),
        (
            States({"units": ArrayPlace(64, (2, 2), "<i8")}, 1, 1).encode(),
            None,
            "an array of 32 bytes begins at byte 64",
        ),
    ],
)
def test_a_garbled_message_of_a_reader_worker_is_refused(file: bytes, packet: bytes | None, said: str) -> None:
    batch = next(each for each in EXAMPLES if isinstance(each, Batch))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, file)
        opened = len([*Path("/proc/self/fd").iterdir()])
        socket.send_fds(theirs, [packet or Enclosure(0, len(file)).encode()], [descriptor])
        with pytest.raises(MessageError, match=f"{said}.*run the same version of bcp"):
            Line(ours).receive()
        assert len([*Path("/proc/self/fd").iterdir()]) == opened
        for bare in (b"{}", batch.encode(), States({}, 2, 7).encode()):
            theirs.send(bare)
            with pytest.raises(MessageError, match=f"of a reader worker cannot be decoded, {len(bare)} bytes"):
                Line(ours).receive()
    finally:
        os.close(descriptor)
        ours.close()
        theirs.close()
