"""Samples without storage, so that only the loader is measured."""

from __future__ import annotations

import numpy as np

from bcp.data.recipe import Tokens

__all__ = ["Pages"]

_TOKENS = 1 << 20
_SHORTEST, _LONGEST = 512, 1535


class Pages:
    """Samples of 512 to 1535 tokens, which are slices of one array. Each process makes an array of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens: Tokens | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tokens:
        if self._tokens is None:
            self._tokens = np.arange(_TOKENS)
        length = _SHORTEST + (index * 2_654_435_761 >> 7) % (_LONGEST - _SHORTEST + 1)
        start = index * 40_503 % (_TOKENS - _LONGEST)
        return self._tokens[start : start + length]
