from __future__ import annotations

from pathlib import Path

import pytest
import replicas
from ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("scale", [3, 2000])
def test_every_rank_writes_equally_much_of_a_replicated_model(ranks4: Ranks, tmp_path: Path, scale: int) -> None:
    results = ranks4.run(replicas.write, tmp_path, scale, "split")
    written = [nbytes for nbytes, _, _ in results]
    assert max(written) <= 1.05 * sum(written) / 4
    headers = sum(
        path.read_bytes()[:8] != b"" and 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in (tmp_path / "model").iterdir()
    )
    (state,) = {state for _, state, _ in results}
    assert sum(written) - headers == state, "every byte once"
    assert sum(saved for _, _, saved in results) == 3 * state


def test_worst_fit_gives_whole_shards(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(replicas.write, tmp_path, 20, "worst-fit")
    assert max(nbytes for nbytes, _, _ in results) > 8 * 20 * 1000 * 4


@pytest.mark.parametrize("scale", [3, 2000])
def test_replicas_read_every_byte_once(ranks4: Ranks, tmp_path: Path, scale: int) -> None:
    ranks4.run(replicas.write, tmp_path, scale, "split")
    unique = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    results = ranks4.run(replicas.read, tmp_path, scale)
    assert all(right for *_, right in results)
    assert sum(nbytes for nbytes, *_ in results) == unique
    assert max(nbytes for nbytes, *_ in results) <= unique / 4 + (2 << 20)
    assert all(received > 0 for _, received, _, _ in results if unique > 4 << 20)


def test_without_overlap_every_rank_reads_for_itself(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(replicas.write, tmp_path, 50, "split")
    unique = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    results = ranks4.run(replicas.read_alone, tmp_path, 50)
    assert [(nbytes, received, right) for nbytes, received, _, right in results] == [(unique, 0, True)] * 4


def test_all_ranks_refuse_with_the_same_words(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4.run(replicas.disagree, tmp_path)
    assert len(set(said)) == 1
    assert said[0].startswith("StateError")
    assert "rank 2" in said[0]
    assert not any(tmp_path.iterdir())
