"""``import bcp`` is light; names come at their first use, by one import that neither forks nor threads disturb."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from samples import sample

import bcp
import bcp.data.adapters
import bcp.dcp
import bcp.extend
import bcp.policies
import bcp.telemetry
import bcp.testing
import bcp.tools

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "sympy", "rich", "pygments", "opentelemetry", "psutil", "grpc", "fsspec", "matplotlib", "click"}


def printed_by(program: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter; return what it prints."""
    command = [*INTERPRETER, program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603 -- our own code
    assert done.returncode == 0, done.stderr
    return done.stdout


INTERPRETER = [sys.executable, "-W", "ignore::DeprecationWarning", "-c"]

FORKING = """\
import json, os, sys
exec(sys.argv[1])
for line in sys.stdin:
    program, files, arguments = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for name, number in (("out", 1), ("errors", 2)):
    os.dup2(os.open(f"{files}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
sys.argv[1:] = arguments
exec(program, {"__name__": "__main__"})
sys.stdout.flush()
os._exit(0)  # the end of an interpreter with torch takes longer than most programs
"""


class Forking:
    """An interpreter that has run one statement, and forks a process for each program: torch is imported once."""

    def __init__(self, statement: str, files: Path) -> None:
        pipe, self._files = subprocess.PIPE, files
        command = [*INTERPRETER, FORKING, statement]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)  # noqa: S603 -- our own

    def printed_by(self, program: str, *arguments: str) -> str:
        """Run a program; return what it prints."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps([program, str(self._files), arguments]), file=stdin, flush=True)
        assert stdout.readline() == "0\n", (self._files / "errors").read_text()
        return (self._files / "out").read_text()

    def imported_by(self, program: str, *arguments: str) -> set[str]:
        """Run a program; return the names of the modules that it has imported."""
        head = "import sys\n_before = set(sys.modules)\n"
        tail = "\nprint('modules:', *sorted(set(sys.modules) - _before))"
        return set(self.printed_by(head + program + tail, *arguments).rpartition("modules:")[2].split())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    """An interpreter that has imported next to nothing."""
    with closing(Forking("", tmp_path_factory.mktemp("fresh"))) as process:
        yield process


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    """An interpreter that has imported torch, and nothing of bcp."""
    with closing(Forking("import torch", tmp_path_factory.mktemp("with_torch"))) as process:
        yield process


def heavy(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & HEAVY


DOORS = [bcp, bcp.data, bcp.data.adapters, bcp.dcp, bcp.extend, bcp.policies, bcp.telemetry, bcp.testing, bcp.tools]
"""Public modules, which make all their imports at first use, under one lock."""


def name_of(module: ModuleType) -> str:
    return module.__name__


@pytest.mark.parametrize("door", sample(DOORS, bcp, bcp.telemetry), ids=name_of)
def test_the_import_of_a_public_module_is_light(door: ModuleType, fresh: Forking, with_torch: Forking) -> None:
    modules = with_torch.imported_by(f"import {door.__name__}")
    assert len(modules) <= 20, sorted(modules)
    assert not heavy(fresh.imported_by(f"import {door.__name__}"))


@pytest.mark.parametrize("door", DOORS, ids=name_of)
def test_no_public_name_is_a_submodule_too(door: ModuleType) -> None:
    """The import of such a submodule would take the place of the lazy name."""
    submodules = {each.name for each in pkgutil.iter_modules(getattr(door, "__path__", []))}
    assert submodules & set(door.__all__) <= {"errors", "extend", "policies", "telemetry", "tools"}


def test_structlog_is_imported_by_its_root_alone() -> None:
    """Two threads would find it half made: one imports it, the other begins with a module of it."""
    at_import = re.compile(r"^(?:from structlog\b|import structlog\.)", re.MULTILINE)
    assert [str(path) for path in (ROOT / "bcp").rglob("*.py") if at_import.search(path.read_text())] == []


@pytest.mark.parametrize(
    "first", ["import bcp.telemetry as watch", "from bcp import save\nfrom bcp.telemetry import watch"]
)
def test_spans_and_metrics_follow_all_saves(first: str, with_torch: Forking) -> None:
    sinks = with_torch.printed_by(f"{first}\nprint(*[type(sink).__name__ for sink in watch.sinks()])")
    assert sinks.split() == ["Spans", "Metrics"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a run with one checkpoint."""
    import torch  # noqa: PLC0415 -- the tests of this file are about processes that do without

    folder = str(tmp_path_factory.mktemp("run"))
    with bcp.Run(f"{folder}/run", {"model": {"w": torch.ones(5)}}, save=1) as job:
        job.maybe_save(job.resume() + 1)
    return folder


WITHOUT_TENSORS = [
    "assert bcp.latest(f'{folder}/run').endswith('step-00000001')",
    "import anyio; assert anyio.run(bcp.alatest, f'{folder}/run')",
    "assert bcp.report(f'{folder}/run').recordings",
    "main(['report', f'{folder}/run'])",
    "main(['report', f'{folder}/run', '--json'])",
    "from bcp.extend import Backend, Codec, Stage, register_backend",
    "bcp.SaveOptions(codecs=[bcp.extend.Codec('same', bytes, bytes)]); bcp.LoadOptions(); bcp.MegatronNames",
    "bcp.policies.EverySteps(10); bcp.telemetry.configure(logs='json'); bcp.Preemption",
    "from bcp.format import container, layout_file, metadata, receipt",
    "ckpt = bcp.Checkpoint(f'{folder}/run/step-00000001'); assert ckpt['w'].shape == (5,); repr(ckpt)",
    "assert bcp.Checkpoint(f'{folder}/run/step-00000001').verify()",
    "run = f'{folder}/run'\nassert main(['ls', run]) == main(['gc', run]) == main(['pin', run, '1']) == 0",
    "assert main(['show', f'{folder}/run/step-00000001']) == 0",
    "step = f'{folder}/run/step-00000001'\nassert main(['verify', step]) == main(['diff', step, step]) == 0",
    "a, b = f'{folder}/run/step-00000001', f'{folder}/c'\nassert main(['cp', a, b]) == main(['rm', '-y', b]) == 0",
]


def test_calls_without_tensors_import_no_torch(run: str) -> None:
    head = "import sys, bcp\nfrom bcp.__main__ import main\nfolder = sys.argv[1]\nprograms = eval(sys.argv[2])\n"
    each = "for program in programs:\n    exec(program)\n    assert 'torch' not in sys.modules, program\n"
    printed_by(head + each, run, repr(WITHOUT_TENSORS))


PLAIN = """\
import sys, torch, bcp
folder = sys.argv[1]
states = {"model": {"w": torch.arange(8.0)}, "extra_states": {"rng": bcp.RngState(), "a": [1]}}
bcp.save(f"{folder}/plain", states)
bcp.load(f"{folder}/plain", states)
"""

DTENSORS = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def made(seed):
    torch.manual_seed(seed)
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    cut = distribute_tensor(torch.rand(8), mesh, [Shard(0)])
    return {"model": [model, {"cut": cut}], "optimizer": optimizer}


def values(states):
    tensors = [*states["model"][0].parameters(), states["model"][1]["cut"]]
    moments = [state["exp_avg"] for state in states["optimizer"].state.values()]
    assert all(isinstance(tensor, DTensor) for tensor in tensors + moments)
    return [tensor.to_local().detach() for tensor in tensors + moments]


states, fresh = made(1), made(2)
bcp.save(f"{folder}/dtensors", states)
bcp.load(f"{folder}/dtensors", fresh)
assert all(map(torch.equal, values(states), values(fresh)))
try:
    bcp.save(f"{folder}/refused", {"model": {}, "extra_states": {"cut": states["model"][1]["cut"]}})
except bcp.errors.StateError as error:
    assert "is a DTensor" in str(error)
else:
    raise AssertionError("a DTensor among extra states was saved")
"""


def test_a_save_of_plain_tensors_imports_neither_dtensors_nor_sympy(with_torch: Forking, tmp_path: Path) -> None:
    modules = with_torch.imported_by(PLAIN, str(tmp_path))
    assert not modules & {"sympy", "torch.distributed.tensor"}


def test_dtensors_imported_after_the_first_save_are_saved_and_loaded(with_torch: Forking, tmp_path: Path) -> None:
    with_torch.printed_by(PLAIN + DTENSORS, str(tmp_path))


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["doctor", "--help"]])
def test_help_of_the_command_line_imports_next_to_nothing(arguments: list[str], fresh: Forking) -> None:
    call = f"import contextlib\nfrom bcp.__main__ import main\nwith contextlib.suppress(SystemExit): main({arguments})"
    modules = fresh.imported_by(call)
    assert heavy(modules) <= {"click"}
    assert len({name for name in modules if name.startswith("bcp")}) <= 15
    assert not {name.partition(".")[0] for name in modules} & {"numpy", "pyarrow", "anyio", "asyncio"}


@pytest.mark.parametrize("use", sample(["", "bcp.save", "from bcp import *"], "", "from bcp import *"))
def test_dir_has_the_public_names(use: str, with_torch: Forking) -> None:
    names = f"import bcp\n{use}\nprint(*dir(bcp))\nassert set(dir(bcp)) == set(bcp.__all__)"
    assert with_torch.printed_by(names).split() == sorted(bcp.__all__)


@pytest.mark.parametrize("module", DOORS, ids=name_of)
def test_a_type_checker_sees_the_same_names(module: ModuleType) -> None:
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


NAMES = "|".join(re.escape(door.__name__) for door in DOORS)
DOOR = re.compile(rf"^(?:from (?:{NAMES}) import (?!errors$|_)|import bcp$)", re.MULTILINE)


def rooms() -> list[Path]:
    """Files of bcp that bcp itself may import. Integrations use it as any user does."""
    return [path for path in (ROOT / "bcp").rglob("*.py") if "integrations" not in path.parts]


def test_no_module_of_bcp_takes_a_lazy_name_while_it_is_imported() -> None:
    """It would wait for the lock of imports, which is held by a thread that may wait for this module."""
    found = [str(path) for path in rooms() if DOOR.search(path.read_text())]
    assert found == [str(ROOT / "bcp" / "__init__.py")] or found == []


HEAD = """\
import faulthandler, os, signal, sys, threading
import torch
import bcp

first, moment, folder = sys.argv[1:]
inside, forking, forked = threading.Event(), threading.Event(), threading.Event()


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
        exec(first)
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

def import_and_work():
    exec(first)
    forked.wait()  # the child begins between imports: it has no half of torch's first operations
    work("parent")

importer = threading.Thread(target=import_and_work, daemon=True)
if not first.startswith("bcp.save_async"):
    bcp.save_async
importer.start()
assert inside.wait(120)
os.register_at_fork(before=forking.set)  # it runs before the older hook of bcp
if (child := os.fork()) == 0:
    work_in_child()
forked.set()
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


@pytest.mark.parametrize(
    ("first", "moment"),
    sample(
        [
            ("bcp.save_async", "bcp._api"),
            ("bcp.save_async", "bcp._save.leader"),
            ("bcp.wait_for_next", "bcp.runs.following"),
            ("bcp.backends.resolve('local:///tmp/a')", "fsspec"),
            ("bcp.backends.resolve('local:///tmp/a')", "fsspec.implementations.local"),
            ("bcp.backends.resolve('s3://bucket/a')", "bcp.backends.objects.s3"),
            ("bcp.backends.resolve('s3://bucket/a')", "bcp.backends.objects.s3_store"),
            ("from bcp.coordinators import GrpcCoordinator", "grpc"),
        ],
        ("bcp.save_async", "bcp._save.leader"),
        ("from bcp.coordinators import GrpcCoordinator", "grpc"),
    ),
)
def test_a_child_forked_in_the_middle_of_an_import_saves_and_loads(
    first: str, moment: str, with_torch: Forking, tmp_path: Path
) -> None:
    with_torch.printed_by(HEAD + ANOTHER_THREAD, first, moment, str(tmp_path))


def test_a_thread_may_fork_in_the_middle_of_its_own_import(with_torch: Forking, tmp_path: Path) -> None:
    with_torch.printed_by(HEAD + SAME_THREAD, "", "bcp._save.leader", str(tmp_path))


def test_a_child_forked_while_another_thread_makes_its_first_event_loop_has_one(
    with_torch: Forking, tmp_path: Path
) -> None:
    with_torch.printed_by(HEAD + FIRST_LOOP, "", "", str(tmp_path))


def test_every_import_inside_of_a_function_takes_the_lock_of_imports() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in rooms()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in lines_without_the_lock(function.body)
    ]
    assert found == []


def lines_without_the_lock(body: Sequence[ast.stmt | ast.excepthandler | ast.expr]) -> Iterator[int]:
    """Yield the lines that import something outside of ``with importing``."""
    for node in body:
        if isinstance(node, ast.With) and "importing" in [ast.unparse(item.context_expr) for item in node.items]:
            continue
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Import | ast.ImportFrom) or called in IMPORTING:
            yield node.lineno
        else:
            yield from lines_without_the_lock([*ast.iter_child_nodes(node)])


IMPORTING = {"import_module", "importlib.import_module", "fsspec.get_filesystem_class"}


THREADS = """\
import sys, threading
import bcp

errors = []


def use(statement):
    begin.wait()
    try:
        exec(statement)
    except BaseException as error:
        errors.append(error)


doors = ["data", "data.adapters", "extend", "policies", "telemetry", "testing"]
statements = [f"bcp.{name}" for name in bcp.__all__] + ["from bcp.extend import HostPart, Stage", "from bcp import *"]
statements += [f"import bcp.{door}; dir(bcp.{door})" for door in doors]
statements += ["from bcp.data import Source", "from bcp.policies import Tuned", "from bcp.telemetry import measure"]
begin = threading.Barrier(len(statements))
threads = [threading.Thread(target=use, args=(statement,)) for statement in statements]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
"""


def test_all_names_can_be_used_first_at_once() -> None:
    printed_by(THREADS)
