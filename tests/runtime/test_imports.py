"""``import bcp`` is light; names come at their first use, by one import that neither forks nor threads disturb."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import bcp
import bcp.extend
import bcp.testing

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "sympy", "rich", "pygments", "opentelemetry", "psutil", "grpc", "fsspec", "matplotlib", "click"}


def printed_by(program: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter; return what it prints."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603 -- our own code
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(program: str, *arguments: str, before: str = "") -> set[str]:
    """Run a program in a fresh interpreter; return the names of the modules that it has imported."""
    count = "import sys; print(*sorted(set(sys.modules) - _before), file=open(sys.argv[-1], 'w'))"
    first = f"{before}\nimport sys\n_before = set(sys.modules)\n"
    names = Path(arguments[0]) / "names"
    printed_by(f"{first}{program}\n{count}", *arguments, str(names))
    return set(names.read_text().split())


def heavy(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & HEAVY


def test_import_bcp_is_light(tmp_path: Path) -> None:
    modules = imported_by("import bcp", str(tmp_path), before="import torch")
    assert len(modules) <= 20, sorted(modules)
    assert not heavy(imported_by("import bcp", str(tmp_path)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a run with one checkpoint."""
    import torch  # noqa: PLC0415 -- the tests of this file are about processes that do without

    folder = str(tmp_path_factory.mktemp("run"))
    with bcp.Run(f"{folder}/run", {"model": {"w": torch.ones(5)}}, save=1) as job:
        job.maybe_save(job.resume() + 1)
    return folder


@pytest.mark.parametrize(
    "program",
    [
        "assert bcp.latest(f'{folder}/run').endswith('step-00000001')",
        "import anyio; assert anyio.run(bcp.alatest, f'{folder}/run')",
        "assert bcp.report(f'{folder}/run').recordings",
        "main(['report', f'{folder}/run'])",
        "main(['report', f'{folder}/run', '--json'])",
        "from bcp.extend import Backend, Codec, Stage, register_backend",
        "bcp.SaveOptions(codecs=[bcp.extend.Codec('same', bytes, bytes)]); bcp.LoadOptions(); bcp.MegatronNames",
        "bcp.policies.EverySteps(10); bcp.telemetry.configure(logs='json'); bcp.Preemption",
        "from bcp.format import container, layout_file, metadata, receipt",
    ],
)
def test_calls_without_tensors_import_no_torch(program: str, run: str) -> None:
    modules = imported_by(f"import sys, bcp\nfrom bcp.__main__ import main\nfolder = sys.argv[1]\n{program}", run)
    assert "torch" not in modules


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["doctor", "--help"]])
def test_help_of_the_command_line_imports_next_to_nothing(arguments: list[str], tmp_path: Path) -> None:
    call = f"import contextlib\nfrom bcp.__main__ import main\nwith contextlib.suppress(SystemExit): main({arguments})"
    modules = imported_by(call, str(tmp_path))
    assert not heavy(modules)
    assert len({name for name in modules if name.startswith("bcp")}) <= 10
    assert not {name.partition(".")[0] for name in modules} & {"numpy", "pyarrow", "anyio", "asyncio"}


@pytest.mark.parametrize("use", ["", "bcp.save", "from bcp import *"])
def test_dir_has_the_public_names(use: str) -> None:
    names = f"import bcp\n{use}\nprint(*dir(bcp))\nassert set(dir(bcp)) == set(bcp.__all__)"
    assert printed_by(names).split() == sorted(bcp.__all__)


@pytest.mark.parametrize("module", [bcp, bcp.extend, bcp.testing], ids=lambda module: module.__name__)
def test_a_type_checker_sees_the_same_names(module: object) -> None:
    """Its imports and the table of lazy names are written twice: they name the same objects."""
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    typed = [
        (str(each.module), alias.asname or alias.name, alias.name)
        for node in body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    ]
    assert typed
    for home, name, original in typed:
        value = import_module(f"bcp.{name}") if home == "bcp" else getattr(import_module(home), original)
        assert getattr(module, name) is value
    assert {name for _, name, _ in typed} <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nothing'"):
        _ = module.nothing


DOOR = re.compile(r"^(?:from bcp(?:\.extend|\.testing)? import (?!errors$|_)|import bcp\b)", re.MULTILINE)


def test_no_module_of_bcp_takes_a_lazy_name_while_it_is_imported() -> None:
    """It would wait for the lock of imports, which is held by a thread that may wait for this module."""
    found = [str(path) for path in (ROOT / "bcp").rglob("*.py") if DOOR.search(path.read_text())]
    assert found == [str(ROOT / "bcp" / "__init__.py")] or found == []


HEAD = """\
import faulthandler, os, signal, sys, threading
import torch
import bcp

moment, folder = sys.argv[1:]
inside, forking = threading.Event(), threading.Event()


class Pause:
    def find_spec(self, name, path, target=None):
        if name == moment and threading.current_thread() is importer:
            at_the_moment()


def work(name):
    assert bcp.save_async  # is imported
    states = {"model": {"w": torch.ones(5)}, "extra_states": {"rng": bcp.RngState()}}
    for path in (f"{folder}/{name}-{os.getpid()}", f"memory://{name}"):
        bcp.save_async(path, states).wait()
        fresh = {"model": {"w": torch.zeros(5)}}
        bcp.load(path, fresh)
        assert torch.equal(fresh["model"]["w"], states["model"]["w"])
    assert bcp.latest(folder) is None


def work_in_child():
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(120)  # a child that hangs says where, and is killed
    try:
        work("child")
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def ended_well(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


sys.meta_path.insert(0, Pause())
"""

ANOTHER_THREAD = """\
def at_the_moment():
    inside.set()
    forking.wait()

importer = threading.Thread(target=work, args=("parent",))
importer.start()
inside.wait()
os.register_at_fork(before=forking.set)  # it runs before the older hook of bcp
if (child := os.fork()) == 0:
    work_in_child()
importer.join()
assert ended_well(child)
"""

SAME_THREAD = """\
children = []

def at_the_moment():
    if not children:
        children.append(os.fork())

importer = threading.current_thread()
work("process")
if children == [0]:
    os._exit(0)
assert ended_well(*children)
"""

FIRST_LOOP = """\
import asyncio.events

importer = None
assert bcp.save_async
with asyncio.events._lock:  # held by a thread that makes its first event loop
    if (child := os.fork()) == 0:
        work_in_child()
assert ended_well(child)
"""


@pytest.mark.parametrize("moment", ["bcp._api", "bcp._save.leader", "bcp.runs.latest"])
def test_a_child_forked_in_the_middle_of_an_import_saves_and_loads(moment: str, tmp_path: Path) -> None:
    printed_by(HEAD + ANOTHER_THREAD, moment, str(tmp_path))


def test_a_thread_may_fork_in_the_middle_of_its_own_import(tmp_path: Path) -> None:
    printed_by(HEAD + SAME_THREAD, "bcp._save.leader", str(tmp_path))


def test_a_child_forked_while_another_thread_makes_its_first_event_loop_has_one(tmp_path: Path) -> None:
    printed_by(HEAD + FIRST_LOOP, "", str(tmp_path))


THREADS = """\
import sys, threading
import bcp

begin, errors = threading.Barrier(len(bcp.__all__) + 2), []


def use(statement):
    begin.wait()
    try:
        exec(statement)
    except BaseException as error:
        errors.append(error)


statements = [f"bcp.{name}" for name in bcp.__all__] + ["from bcp.extend import HostPart", "from bcp import *"]
threads = [threading.Thread(target=use, args=(statement,)) for statement in statements]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
"""


def test_all_names_can_be_used_first_at_once() -> None:
    printed_by(THREADS)
