"""Numbers of layers and experts in keys of Megatron: an axis of a tensor, or a part of the name."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["axes_of", "numbered"]

_NUMBERED = frozenset({"layers", "experts"})
"""Segments of keys behind which Megatron writes the number of a layer or an expert, where it has no axis for it."""


def axes_of(key: str) -> list[int]:
    """Return the segments of a key behind which a number is missing: a tensor has as many axes in front for them.

    Example:
        >>> axes_of("decoder.layers.mlp.experts.experts.linear_fc1.weight")
        [1, 4]
        >>> axes_of("decoder.layers.3.mlp.linear_fc1.weight")
        []

    """
    segments = key.split(".")
    following = [*segments[1:], ""]
    return [
        index
        for index, (segment, after) in enumerate(zip(segments, following, strict=True))
        if segment in _NUMBERED and segment != after and not after.isdigit()
    ]


def numbered(key: str, indices: Sequence[int]) -> str:
    """Return the name of a key's tensor at these indices on its first axes.

    Example:
        >>> numbered("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 7))
        'decoder.layers.2.mlp.experts.experts.7.linear_fc1.weight'

    """
    numbers = list(map(str, indices))
    if not numbers:
        return key
    segments, places = key.split("."), axes_of(key)
    if len(places) != len(numbers):
        return ".".join([*segments, *numbers])
    for place, number in reversed(list(zip(places, numbers, strict=True))):
        segments.insert(place + 1, number)
    return ".".join(segments)
