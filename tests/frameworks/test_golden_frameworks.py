"""Golden checkpoints go back into the frameworks that wrote them, on the ranks of the other tests of frameworks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from any_to_any import How
from golden import jobs
from golden.cases import FRAMEWORKS, MEGATRON
from golden.expected import DATA, check_plain, read
from ranks import Ranks
from samples import sample

pytestmark = pytest.mark.dist


def check(path: Path, name: str) -> None:
    for part in read(DATA / name).parts:
        check_plain(path / part.folder, part)


@pytest.mark.parametrize(
    "name", sample(["fsdp2-tp", "fsdp1-flat", "deepspeed-zero1", "deepspeed-zero3"], "fsdp2-tp", "deepspeed-zero1")
)
def test_its_own_framework_loads_it_on_four_ranks(pool_of: Callable[[How], Ranks], tmp_path: Path, name: str) -> None:
    how = FRAMEWORKS[name][1]
    pool_of(how).run(jobs.load_exact, DATA / name / "checkpoint", tmp_path, how)
    check(tmp_path / "again", name)


@pytest.mark.parametrize("name", sample(MEGATRON, "megatron-tp2"))
def test_megatron_loads_it_on_four_ranks(megatron4: Ranks, tmp_path: Path, name: str) -> None:
    megatron4.run(jobs.load_megatron, DATA / name / "checkpoint", tmp_path, MEGATRON[name])
    check(tmp_path / "again", name)
