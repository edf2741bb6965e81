"""What integrations share: checks of a trainer's methods."""

from __future__ import annotations

import pytest

import bcp
from bcp.integrations.common import check_methods, check_version


class Trainer:
    """A trainer whose newest version passes the number of replicas, too."""

    def save(self, path: str, step: int, replicas: int = 1) -> None: ...

    def load(self, path: str) -> None: ...


class Taking:
    def save(self, path: str, step: int, replicas: int = 1) -> None: ...

    def load(self, *_: object) -> None: ...


class Older:
    def save(self, path: str, step: int) -> None: ...

    def load(self, path: str) -> None: ...


class TakingAny(Taking):
    def save(self, *_: object, **__: object) -> None: ...


METHODS = {"save": ("path", "step"), "load": ("path",)}


@pytest.mark.parametrize("replaced_by", [None, Taking, TakingAny])
def test_methods_that_take_all_parameters(replaced_by: type | None) -> None:
    check_methods(Trainer, METHODS, "trainers", "2.0", replaced_by)


@pytest.mark.parametrize(
    ("methods", "replaced_by", "words"),
    [
        ({"save_all": ("path",)}, None, r"Trainer\.save_all\(path\), and trainers 2\.0 does not have it"),
        ({"load": ("folder",)}, None, r"Trainer\.load\(folder\), and trainers 2\.0 has the parameters \(path\)"),
        (METHODS, Older, r"Trainer\.save\(path, step\), and .* has the parameters \(path, step, replicas\)"),
    ],
)
def test_methods_that_are_others(methods: dict[str, tuple[str, ...]], replaced_by: type | None, words: str) -> None:
    with pytest.raises(bcp.InputError, match=words):
        check_methods(Trainer, methods, "trainers", "2.0", replaced_by)


@pytest.mark.parametrize("version", ["2.5", "2.5.0", "2.5.0.post0", "2.10.1", "3.0.0rc1"])
def test_versions_that_are_new_enough(version: str) -> None:
    check_version("trainers", version, "2.5", "older ones repeat samples")


@pytest.mark.parametrize("version", ["2.4.9", "1.30", "0.1.dev0"])
def test_versions_that_are_too_old(version: str) -> None:
    with pytest.raises(bcp.InputError, match=rf"bcp needs trainers 2\.5 or newer, and this is {version}: older ones"):
        check_version("trainers", version, "2.5", "older ones repeat samples")
