"""Every kept version is readable, whatever was published, killed and deleted before."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import followed

import bcp
from bcp.backends import MemoryBackend
from bcp.publication.retention import needed

numbers = count()


class Killed(BaseException):
    """The publisher is dead."""


class Mortal(MemoryBackend):
    """A backend whose user dies at the n-th write; later writes do not happen."""

    def __init__(self, name: str, writes: int) -> None:
        super().__init__(name)
        self._writes = writes

    def _count(self) -> None:
        self._writes -= 1
        if self._writes < 0:
            raise Killed

    async def put(self, key: str, data: object) -> None:
        self._count()
        await super().put(key, data)  # type: ignore[arg-type]

    async def put_if(self, key: str, data: object, expected: str | None) -> str | None:
        self._count()
        return await super().put_if(key, data, expected)  # type: ignore[arg-type]

    async def delete(self, keys: object) -> None:
        self._count()
        await super().delete(keys)  # type: ignore[arg-type]


steps = st.lists(
    st.tuples(
        st.integers(1, 4),  # anchor_every
        st.one_of(st.none(), st.integers(1, 3)),  # keep
        st.booleans(),  # a gap before it
        st.booleans(),  # another layout
        st.integers(0, 12),  # dies at this write
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_every_kept_version_is_readable(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, ...]]) -> None:
    name, root = f"kept-{next(numbers)}", tmp_path_factory.mktemp("kept")
    url, model, models = f"memory://{name}/", {"a": torch.zeros(600), "b": torch.zeros(3)}, {}
    backend, newest = MemoryBackend(name), 0
    for number, (anchor_every, keep, has_gap, is_other, writes) in enumerate(steps):
        model = {each: value.clone() for each, value in model.items()}
        model["a"][number] += 1
        if is_other:
            model["b"] = torch.zeros(len(model["b"]) + 1)
        version = newest + 1 + has_gap
        more = {"anchor_every": anchor_every, "keep": keep, "claim_seconds": 0}
        try:
            bcp.publish(model, Mortal(name, writes), version, **more)  # type: ignore[arg-type]
        except Killed:
            with suppress(bcp.ExistsError):  # it was sealed
                bcp.publish(model, backend, version, **more)  # type: ignore[arg-type]
        models[version], newest = model, version
        kept = sorted(models)[-keep:] if keep else [version]
        for each in kept:
            folder = root / f"{number}-{each}"
            assert bcp.Subscriber(backend, folder).pull(version=each).version == each
            found = bcp.Checkpoint(folder)
            assert all(torch.equal(found.read(tensor), value) for tensor, value in models[each].items()), (url, each)


def test_retention_deletes_what_nobody_needs(tmp_path: Path) -> None:
    model, deleted = {"w": torch.zeros(500)}, []
    for version in range(1, 9):
        model["w"][version] = version
        deleted.append(bcp.publish(model, tmp_path / "pub", version, anchor_every=3, keep=2).deleted)
    assert deleted == [(), (), (), (), (1, 2, 3), (), (), (4, 5, 6)]
    assert sorted(path.name[-1] for path in (tmp_path / "pub").glob("weight_v*")) == ["7", "8"]
    assert followed(tmp_path / "pub", 8)["w"] == model["w"].numpy().tobytes()
    with pytest.raises(bcp.NotACheckpointError, match="retention has deleted it"):
        bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull(version=5)
    with pytest.raises(bcp.InputError, match="keep=0"):
        bcp.publish(model, tmp_path / "pub", 9, keep=0)


def test_a_version_needs_its_anchor_and_the_deltas_between() -> None:
    assert needed([(3, 5), (4, 4), (9, 9)]) == {3, 4, 5, 9}
    assert needed([]) == set()


def test_a_subscriber_whose_version_was_deleted_begins_at_the_anchor(tmp_path: Path) -> None:
    model = {"w": torch.zeros(500)}
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    for version in range(1, 9):
        model["w"][version] = version
        bcp.publish(model, tmp_path / "pub", version, anchor_every=3, keep=1)
        if version in (2, 6):
            subscriber.pull()
    result = subscriber.pull()
    assert (result.before, result.anchor, result.deltas) == (6, 0, 2)  # the deltas of 7, an anchor, and 8
    assert torch.equal(bcp.Checkpoint(tmp_path / "engine").read("w"), model["w"])
