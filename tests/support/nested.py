"""Nested tensors, as far as the installed torch makes them: they are a prototype, which versions of torch change."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from lacking import lacking

__all__ = ["nested"]


def nested(parts: Iterable[torch.Tensor], layout: str = "strided") -> torch.Tensor:
    """Return a nested tensor; skip the test where torch makes none of this layout."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on what is in beta or deprecated
            return torch.nested.nested_tensor([*parts], layout=getattr(torch, layout))
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        lacking(f"nested tensors of the layout {layout}: {error}")
