from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Awaitable
from contextlib import closing, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import anyio
import deepspeed_job
import megatron_jobs
import pytest
from pages import Given, run_page
from ranks import Ranks
from samples import sample

import bcp
import bcp.testing
from bcp.extend import Backend
from bcp.testing import BackendSuite

ROOT = Path(__file__).parents[2]
ON_RANKS = sorted((ROOT / "docs" / "frameworks").glob("*.md"))
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in ON_RANKS)]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)  # "```python no-run" is not matched
GIVEN: dict[str, Given] = {"deepspeed": deepspeed_job.page, "megatron": megatron_jobs.page}
"""By page: what stands for the launcher and the reader's own script; such a page has ranks of its own."""
FENCE = re.compile(r"^```python.*$", re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and source of each block that is to run."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


def execute(page: Path, line: int, source: str, namespace: dict[str, Any]) -> None:
    """Run one block; ``await`` may stand at its top level. Tracebacks name the page and its lines."""
    code = compile("\n" * line + source, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, namespace)  # noqa: S307 -- our own pages
    if isinstance(result, Awaitable):
        anyio.run(_wait_for, result)


async def _wait_for(result: Awaitable[object]) -> None:
    await result


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated, please do not call:UserWarning")  # torchdata's call
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for line, source in blocks(page):
        execute(page, line, source, namespace)


@pytest.mark.dist
@pytest.mark.parametrize(
    "page", sample(ON_RANKS, *(page for page in ON_RANKS if page.stem not in GIVEN)), ids=lambda page: page.stem
)
def test_every_block_of_a_framework_s_page_runs_on_every_rank(page: Path, tmp_path: Path, ranks4: Ranks) -> None:
    assert blocks(page)
    given = GIVEN.get(page.stem)
    with closing(Ranks(4)) if given else nullcontext(ranks4) as ranks:
        ranks.run(run_page, page, blocks(page), tmp_path, given)


def test_the_first_example_is_a_short_loop_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    line, source = blocks(page)[0]
    assert len([text for text in source.splitlines() if text.strip()]) <= 15
    first: dict[str, Any] = {"__name__": "first"}
    execute(page, line, source.replace("101", "31"), first)
    assert (first["run"].resumed.step, first["step"]) == (0, 30)
    second: dict[str, Any] = {"__name__": "second"}
    execute(page, line, source, second)
    assert (second["run"].resumed.step, second["step"]) == (30, 100)
    assert sorted(path.name for path in tmp_path.glob("ckpt/run-1/step-*")) == [
        f"step-{step:08d}" for step in (80, 90, 100)
    ]


@pytest.mark.parametrize("page", [*PAGES, *ON_RANKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_that_does_not_run_says_so(page: Path) -> None:
    fences = set(FENCE.findall(page.read_text()))
    servers = {"```python gs", "```python s3", "```python hdfs"}  # tests/storage/test_storage_docs.py runs those
    assert fences <= {"```python", "```python no-run", *servers}


def test_extending_imports_one_door_and_the_suites() -> None:
    page = ROOT / "docs" / "extending.md"
    nodes = [node for _, source in blocks(page) for node in ast.walk(ast.parse(source))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.partition(".")[0] == "bcp"} == {"bcp", "bcp.extend", "bcp.testing"}
    deep = set(re.findall(r"`(bcp\.[a-z_]+)\.\w+", page.read_text())) - {"bcp.extend", "bcp.testing"}
    assert deep <= {"bcp.data"}  # VirtualShards is for users
    for name in re.findall(r"`bcp\.(extend\.\w+|testing\.\w+)", page.read_text()):
        assert attrgetter(name)(bcp), name


def test_every_name_of_the_door_is_described() -> None:
    door = bcp.extend
    described = set(re.findall(r":\w+:`(\w+)`", str(door.__doc__)))
    assert described == set(door.__all__)
    defined = [
        name for name in door.__all__ if inspect.isroutine(getattr(door, name)) or inspect.isclass(getattr(door, name))
    ]
    assert [name for name in defined if not inspect.getdoc(getattr(door, name))] == []
    assert len(defined) == len(door.__all__) - len({"REFUSED", "Event", "Graph", "Observer"})


class TestBackendOfTheDocs(BackendSuite):
    """docs/extending.md says that the backend it shows passes the suite."""

    @pytest.fixture
    def backend(self) -> Backend:
        page = ROOT / "docs" / "extending.md"
        line, source = next(block for block in blocks(page) if "class DictBackend" in block[1])
        definitions = source.partition("\nstore = ")[0]
        namespace: dict[str, Any] = {"__name__": "extending"}
        execute(page, line, "import bcp\n" + definitions, namespace)
        return cast("Backend", namespace["DictBackend"]())
