"""Small optimizers that keep state in unusual places, as private code does."""

from __future__ import annotations

from optimizer_trial import Recipe

STAND_INS: dict[str, Recipe] = {}
