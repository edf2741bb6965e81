"""Ceph RGW: a real server of S3, from Debian's packages, which are unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from servers.ports import held_ports
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

CACHE = Path(__file__).parents[2] / ".cache" / "rgw"
PACKAGES = ["radosgw", "ceph-mon", "ceph-osd", "ceph-common"]
START_SECONDS = 240

CONF = """
[global]
fsid = {fsid}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
mon_initial_members = a
mon_host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
run_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
pid_file = {folder}/run/$name.pid
log_file = {folder}/$name.log
keyring = {folder}/keyring
plugin_dir = {root}/usr/lib/x86_64-linux-gnu/ceph
erasure_code_dir = {root}/usr/lib/x86_64-linux-gnu/ceph/erasure-code
osd_class_dir = {root}/usr/lib/x86_64-linux-gnu/rados-classes
auth_allow_insecure_global_id_reclaim = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 1000
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
[mon.a]
mon_data = {folder}/mon
mon_data_avail_warn = 2
mon_data_avail_crit = 1
[osd]
osd_data = {folder}/osd0
osd_objectstore = memstore
memstore_device_bytes = 2147483648
osd_class_load_list = *
osd_class_default_list = *
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_dns_name = 127.0.0.1
rgw_enable_usage_log = false
rgw_enable_quota_threads = false
rgw_enable_gc_threads = false
rgw_enable_lc_threads = false
rgw_run_sync_thread = false
rgw_num_rados_handles = 1
rgw_thread_pool_size = 32
"""


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command, and return its output; the error has it too."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def prepare() -> Path:
    """Return the folder with the unpacked packages; the first call loads 60 MB by apt."""
    root = CACHE / "root"
    if root.exists():
        return root
    CACHE.mkdir(parents=True, exist_ok=True)
    if not Path("/var/lib/apt/lists").exists() or not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
        _run("apt-get", "update", "-q")
    plan = _run("apt-get", "--simulate", "--no-install-recommends", "install", *PACKAGES)
    names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run("apt-get", "download", "-q", *names, cwd=Path(folder))
        for package in Path(folder).glob("*.deb"):
            _run("dpkg-deb", "-x", package, Path(folder) / "root")
        (Path(folder) / "root").rename(root)
    return root


class Ceph:
    """A monitor, an OSD in memory and a gateway, with all files in one folder."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self._held = ExitStack()
        self.port, self.mon, self.mon_1 = self._held.enter_context(held_ports(3))
        libraries = [
            root / "usr/lib/x86_64-linux-gnu",
            root / "usr/lib/x86_64-linux-gnu/ceph",
            root / "lib/x86_64-linux-gnu",
        ]
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{root}/usr/lib/python3/dist-packages",
        }
        for name in ("mon", "osd0", "run"):
            (folder / name).mkdir()
        self.fsid = str(uuid.uuid4())
        text = CONF.format(fsid=self.fsid, mon=self.mon, mon_1=self.mon_1, folder=folder, root=root, port=self.port)
        (folder / "ceph.conf").write_text(text)

    def call(self, program: str, *arguments: str) -> str:
        """Run one of Ceph's programs."""
        return _run(self.root / "usr/bin" / program, *arguments, env=self.env)

    def ceph(self, *arguments: str) -> str:
        """Run Ceph's command line tool, which is a script of Debian's Python."""
        script = self.root / "usr/bin/ceph"
        return _run("/usr/bin/python3", script, "-c", self.conf, "--connect-timeout", "30", *arguments, env=self.env)

    @property
    def conf(self) -> str:
        return str(self.folder / "ceph.conf")

    def start(self) -> None:
        """Start all three, and make the user of the tests."""
        keyring = str(self.folder / "keyring")
        allow = ["--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
        self.call("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name in ("client.admin", "client.rgw"):
            self.call("ceph-authtool", keyring, "--gen-key", "-n", name, "--cap", "mon", "allow *", *allow)
        monmap = str(self.folder / "monmap")
        address = f"[v2:127.0.0.1:{self.mon},v1:127.0.0.1:{self.mon_1}]"
        self.call("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", address, monmap)
        self.call("ceph-mon", "-c", self.conf, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.call("ceph-mon", "-c", self.conf, "-i", "a")
        osd = str(uuid.uuid4())
        self.ceph("osd", "new", osd)
        caps = ["mon", "allow profile osd", "osd", "allow *", "mgr", "allow profile osd"]
        with (self.folder / "keyring").open("a") as file:
            file.write(self.ceph("auth", "get-or-create", "osd.0", *caps))
        self.call("ceph-osd", "-c", self.conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.call("ceph-osd", "-c", self.conf, "-i", "0")
        with suppress(RuntimeError):  # it may be there
            self.ceph("osd", "crush", "add", "osd.0", "1.0", "root=default", "host=vm")
        self.call("radosgw", "-c", self.conf, "-n", "client.rgw")
        self._wait()
        user = ["--uid=test", "--display-name=test", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"]
        self.call("radosgw-admin", "-c", self.conf, "-n", "client.rgw", "user", "create", *user)

    def _wait(self) -> None:
        began = time.monotonic()
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}", timeout=2).read()
            except urllib.error.HTTPError:
                return
            except OSError:
                if time.monotonic() - began > START_SECONDS:
                    raise
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """Kill all three by their ids; memstore would write itself to disk at a gentler signal."""
        for file in (self.folder / "run").glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._held.close()


@contextmanager
def rgw_server() -> Iterator[S3Server]:
    """Run Ceph RGW."""
    ceph = Ceph(prepare(), Path(tempfile.mkdtemp(prefix="rgw-")))
    try:
        ceph.start()
        yield S3Server(f"http://127.0.0.1:{ceph.port}")
    finally:
        ceph.stop()
