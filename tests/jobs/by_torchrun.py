"""Programs that torchrun starts; it and they are :class:`~forked.Forked`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forked import Forked

END_SECONDS = 500.0


def started(ranks: int, program: str, *words: str) -> subprocess.Popen[str]:
    """Start a program on so many ranks."""
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, [here, here.with_name("support"), *here.parents[:2]]))
    command = [sys.executable, str(here / "patient_torchrun.py"), "--standalone", "--local-addr=localhost"]
    command += [f"--nproc-per-node={ranks}", program, *words]
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipe = subprocess.PIPE
    return Forked(command, env=environ, stdout=pipe, stderr=pipe, text=True)


def torchrun(ranks: int, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks to its end."""
    process = started(ranks, program, *words)
    try:
        out, errors = process.communicate(timeout=END_SECONDS)
    except BaseException:
        process.terminate()  # which ends its ranks too
        process.communicate(timeout=200)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)
