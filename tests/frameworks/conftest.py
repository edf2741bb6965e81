from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import any_to_any
import pytest
from any_to_any import How
from ranks import Ranks


@pytest.fixture(scope="session")
def deepspeed4() -> Iterator[Ranks]:
    """Four processes of its own: DeepSpeed leaves global state behind, and imports slowly."""
    with closing(Ranks(4)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pool_of(ranks4: Ranks, deepspeed4: Ranks) -> Callable[[How], Ranks]:
    """Say which processes train under a framework."""
    return lambda how: deepspeed4 if any_to_any.by_deepspeed(how) else ranks4


@pytest.fixture(scope="session")
def saved(pool_of: Callable[[How], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Callable[[How], Path]:
    """Give the checkpoint of two steps under a framework, which is made once."""
    paths: dict[How, Path] = {}

    def path_of(how: How) -> Path:
        if how not in paths:
            paths[how] = tmp_path_factory.mktemp("saved") / "checkpoint"
            pool_of(how).run(any_to_any.train, paths[how], how)
        return paths[how]

    return path_of
