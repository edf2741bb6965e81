"""The examples in the docstrings of public names run, and the names that need one have one."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import textwrap
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import bcp
from bcp import _api, _pending, _report, errors, events, extend, options, protocols
from bcp.backends import MemoryBackend
from bcp.publication import publishing, subscriber
from bcp.read import checkpoint, contents, facts
from bcp.runs import following, latest, run
from bcp.tools import collection, cooling, copying, difference, importing, removal, sharing, steps, verifying
from bcp.tools.exports import dcp, hf, single, torch_file

MODULES = [
    bcp,
    _api,
    _pending,
    _report,
    errors,
    events,
    extend,
    options,
    protocols,
    latest,
    following,
    checkpoint,
    contents,
    facts,
    publishing,
    subscriber,
    collection,
    cooling,
    copying,
    difference,
    importing,
    removal,
    sharing,
    steps,
    verifying,
    dcp,
    hf,
    single,
    torch_file,
]
BLOCK = re.compile(r"^Example::\n\n((?: {4}.*\n|\n)+)", re.MULTILINE)
CALLS = [bcp.save, bcp.save_async, bcp.load, bcp.prepare, bcp.asave, bcp.aload, bcp.aprepare, bcp.report, bcp.latest]
CALLS += [bcp.wait_for_next, bcp.tools.collect, bcp.tools.copy, bcp.tools.diff, bcp.tools.list_steps, bcp.tools.remove]
CALLS += [bcp.tools.import_files, bcp.tools.export_hf, bcp.tools.export_safetensors, bcp.tools.export_torch]
CALLS += [bcp.tools.export_dcp, bcp.tools.pin, bcp.tools.verify, bcp.cool, bcp.promote, bcp.publish]
CLASSES = [
    bcp.SaveOptions,
    bcp.LoadOptions,
    bcp.Pending,
    bcp.RetryPolicy,
    bcp.Checkpoint,
    bcp.AsyncCheckpoint,
    bcp.extend.Codec,
    bcp.SaveResult,
    bcp.LoadResult,
]


def documented() -> Iterator[tuple[str, str]]:
    """Name and docstring of every public name of these modules, and of the methods of their classes."""
    for module in MODULES:
        yield module.__name__, inspect.getdoc(module) or ""
        for name, member in vars(module).items():
            if getattr(member, "__module__", "") != module.__name__ or name.startswith("_"):
                continue
            yield f"{module.__name__}.{name}", inspect.getdoc(member) or ""
            if inspect.isclass(member):
                methods = ((each, getattr(member, each)) for each in vars(member) if not each.startswith("_"))
                yield from ((f"{module.__name__}.{name}.{each}", inspect.getdoc(it) or "") for each, it in methods)


DOCSTRINGS = dict(documented())
WITH_EXAMPLE = {name: text for name, text in DOCSTRINGS.items() if BLOCK.search(f"{text}\n") or ">>>" in text}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that every example may use; ``ckpt/step-100`` is a checkpoint of the states."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optimizer.step()
    states = {"model": model, "optimizer": optimizer}
    bcp.save("ckpt/step-100", states)
    known = {"bcp": bcp, "torch": torch, "backend": MemoryBackend(str(tmp_path)), "states": states}
    return {"__name__": "example", **states, **known}


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_example_of_a_docstring_runs(name: str, names: dict[str, Any]) -> None:
    text = WITH_EXAMPLE[name]
    for block in BLOCK.findall(f"{text}\n"):
        code = compile(textwrap.dedent(block), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, names)  # noqa: S307 -- our own docstrings
        if isinstance(result, Awaitable):
            anyio.run(_wait_for, result)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(doctest.DocTestParser().get_doctest(text, names, name, None, 0))
    assert runner.summarize(verbose=False).failed == 0


async def _wait_for(result: Awaitable[object]) -> None:
    await result


def test_calls_and_options_have_an_example() -> None:
    described = [f"{each.__module__}.{each.__name__}" for each in [*CALLS, *CLASSES]]
    assert [name for name in described if name not in WITH_EXAMPLE] == []
    assert "Example::" in str(run.Run.__doc__)


def test_no_sentence_of_a_docstring_begins_without_a_subject() -> None:
    bad = re.compile(r"(?:^|(?<=[.:]\s))(What|Where|That|Of)\b")
    assert [name for name, text in DOCSTRINGS.items() if bad.search(text)] == []
