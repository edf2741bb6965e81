"""Samples of matrices: some cases run in ``make test``, most in ``.ci/run``, and all of them in ``make test-all``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def sample(cases: Iterable[Any], *kept: Any, full: Collection[Any] = ()) -> list[Any]:
    """Return the cases for ``parametrize``. Those that are not kept have the mark ``long``, and some ``full``, too."""
    cases = list(cases)
    assert kept, "a matrix leaves a sample in make test"
    strange = [each for each in (*kept, *full) if each not in cases]
    assert not strange, f"{strange} are no cases"
    marks = {True: [pytest.mark.long, pytest.mark.full], False: [pytest.mark.long]}
    return [_param(case, () if case in kept else marks[case in full]) for case in cases]


def sample_of(cases: Mapping[str, Any], *kept: str) -> list[Any]:
    """Return the values of named cases for ``parametrize``, with their names. Those not kept have the mark ``long``."""
    assert kept, "a matrix leaves a sample in make test"
    assert set(kept) <= set(cases), f"{set(kept) - set(cases)} are no cases"
    return [
        pytest.param(value, id=name, marks=() if name in kept else pytest.mark.long) for name, value in cases.items()
    ]


def _param(case: Any, marks: Any) -> Any:
    return pytest.param(*case, marks=marks) if isinstance(case, tuple) else pytest.param(case, marks=marks)
