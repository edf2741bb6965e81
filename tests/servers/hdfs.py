"""A real HDFS for tests: Hadoop 2.7.4's NameNodes and DataNodes in one JVM on loopback.

The jars come from pyspark 3.0.2 on PyPI, as source distribution, and from four packages of Debian, for neither PyPI
nor Debian has Hadoop itself. They are kept in ``.cache/hdfs`` below the repository. Needs ``java`` and ``javac`` 17.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Self

from filelock import FileLock

from .ports import held_ports

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "hdfs"
SOURCE = Path(__file__).with_name("MiniHdfs.java")
SDIST = "pyspark==3.0.2"
SHA256 = "d4f2ced43394ad773f7b516a4bbcb5821a940462a17b1a25f175c83771b62ebc"
JARS = [
    "hadoop-hdfs-2.7.4",
    "hadoop-common-2.7.4",
    "hadoop-auth-2.7.4",
    "hadoop-annotations-2.7.4",
    "netty-all-4.1.47.Final",
    "guava-14.0.1",
    "protobuf-java-2.5.0",
    "jackson-mapper-asl-1.9.13",
    "jackson-core-asl-1.9.13",
    "jetty-6.1.26",
    "jetty-util-6.1.26",
    "jetty-sslengine-6.1.26",
    "javax.servlet-api-3.1.0",
    "jaxb-runtime-2.3.2",
    "jaxb-api-2.2.2",
    "jakarta.activation-api-1.2.1",
    "istack-commons-runtime-3.0.8",
    "xercesImpl-2.12.0",
    "xml-apis-1.4.01",
    "xmlenc-0.52",
    "log4j-1.2.17",
    "slf4j-api-1.7.30",
    "slf4j-log4j12-1.7.30",
    "htrace-core-3.1.0-incubating",
    "commons-collections-3.2.2",
    "commons-configuration-1.6",
    "commons-logging-1.1.3",
    "commons-lang-2.6",
    "commons-cli-1.2",
    "commons-codec-1.10",
    "commons-io-2.4",
    "httpcore-4.4.12",
    "httpclient-4.5.6",
    "leveldbjni-all-1.8",
]
DEBIAN = {
    "libjersey1-core-java": "jersey1-core",
    "libjersey1-server-java": "jersey1-server",
    "libjersey1-servlet-java": "jersey1-servlet",
    "libjsr311-api-java": "jsr311-api",
}
LOG4J = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""
JVM = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true"]
JAVA = 17
START_SECONDS = 240.0


class ServerError(RuntimeError):
    """A test server could not be prepared or started; a failure, and no reason to skip its tests."""


def prepare(cache: Path = CACHE) -> Path:
    """Return a folder with all that the servers need; download it if it is not there yet.

    Processes that call this at once do it one after the other. The jars get their name when all of them are there, so a
    download that was killed is begun again, and its leftovers are removed.
    """
    _check_java()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        jars = cache / "jars"
        if not jars.exists():
            for left in cache.glob("download-*"):
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as folder:
                new = Path(folder, "jars")
                new.mkdir()
                _jars_of_pyspark(Path(folder), new)
                _jars_of_debian(Path(folder), new)
                new.rename(jars)
        (cache / "conf").mkdir(exist_ok=True)
        (cache / "conf" / "log4j.properties").write_text(LOG4J)
        for folder in ("hdfs", "datanode", "static"):  # empty ones: the servers look for them in the class path
            (cache / "webapps" / folder).mkdir(parents=True, exist_ok=True)
        _compile(cache)
    return cache


def _check_java() -> None:
    """Raise if there is no Java 17 or later, whose language MiniHdfs.java uses."""
    remedy = f"apt-get install openjdk-{JAVA}-jdk-headless"
    for tool in ("java", "javac"):
        if shutil.which(tool) is None:
            raise ServerError(f"the tests of HDFS need {tool} {JAVA} or later, and PATH has none: {remedy}")
    done = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)  # noqa: S607 -- of PATH
    version = re.search(r'version "(\d+)', done.stderr)
    if version is None or int(version[1]) < JAVA:
        said = done.stderr.partition("\n")[0]
        raise ServerError(f"the tests of HDFS need java {JAVA} or later, and PATH has {said!r}: {remedy}")


def _run(command: Sequence[str], folder: Path, remedy: str = "") -> None:
    """Run a command; its output is part of the error."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 -- ours
    if done.returncode:
        raise ServerError(f"{' '.join(command)} failed:{remedy}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _jars_of_pyspark(folder: Path, jars: Path) -> None:
    """Download 205 MB, check them, and keep 27 MB."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    _run([*download, SDIST], folder, f" {SDIST} has to come from PyPI once, or .cache/hdfs/jars from another checkout")
    (sdist,) = folder.glob("pyspark-*.tar.gz")
    with sdist.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ServerError(f"{sdist.name} has the digest {digest} and not {SHA256}")
    wanted = {f"pyspark-3.0.2/deps/jars/{jar}.jar" for jar in JARS}
    with tarfile.open(sdist, "r|gz") as archive:
        for member in archive:
            source = archive.extractfile(member) if member.name in wanted else None
            if source is not None:
                with source, (jars / Path(member.name).name).open("wb") as out:
                    shutil.copyfileobj(source, out)
                wanted.remove(member.name)
            if not wanted:
                return
    raise ServerError(f"{sdist.name} lacks {sorted(wanted)}")


def _jars_of_debian(folder: Path, jars: Path) -> None:
    """Download packages, which apt checks, and unpack them without an installation."""
    missing = [package for package, jar in DEBIAN.items() if not Path("/usr/share/java", f"{jar}.jar").exists()]
    if missing:
        try:
            _run(["apt-get", "download", *missing], folder)
        except ServerError:
            _run(["apt-get", "update"], folder)
            _run(["apt-get", "download", *missing], folder, f" try apt-get install {' '.join(missing)}")
        for package in folder.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), "unpacked"], folder)
    for package, jar in DEBIAN.items():
        root = folder / "unpacked" if package in missing else Path("/")
        shutil.copy(root / "usr/share/java" / f"{jar}.jar", jars / f"{jar}.jar")


def _compile(cache: Path) -> None:
    """Compile our own class unless it is as it was."""
    digest, mark = hashlib.sha256(SOURCE.read_bytes()).hexdigest(), cache / "classes" / "digest"
    if mark.exists() and mark.read_text() == digest:
        return
    mark.parent.mkdir(exist_ok=True)
    _run(["javac", "-nowarn", "-cp", f"{cache}/jars/*", "-d", str(mark.parent), str(SOURCE)], cache)
    mark.write_text(digest)


class MiniHdfs:
    """One NameNode, or an HA pair, and some DataNodes.

    Attributes:
        url: of the root, as in ``hdfs://127.0.0.1:41999``; of a pair ``hdfs://pair``.
        web: address of the first NameNode's WebHDFS, as in ``127.0.0.1:42000``.
        settings: what a client has to know of a pair, else empty.
    """

    def __init__(self, data: Path, datanodes: int = 2, *, pair: bool = False, settings: Sequence[str] = ()) -> None:
        """Start the servers; returns when they are ready, after 2 to 4 seconds."""
        home = prepare()
        data.mkdir(parents=True, exist_ok=True)
        self.settings: dict[str, str] = {}
        self._held = ExitStack()
        if pair:
            ports = self._held.enter_context(held_ports(4))
            settings = [*settings, "ports=" + ",".join(map(str, ports))]
            self.settings = _pair_settings(ports)
        classes = ":".join([f"{home}/classes", f"{home}/conf", f"{home}", f"{home}/jars/*"])
        command = ["java", *JVM, "-cp", classes, "MiniHdfs", str(data), str(datanodes), *settings]
        self._log = (data / "log").open("ab")
        self._answers: Queue[str] = Queue()
        self._process = subprocess.Popen(  # noqa: S603 -- ours
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._reader = threading.Thread(target=self._read, name="output of HDFS", daemon=True)
        self._reader.start()
        try:
            _, rpc, http = self._answer("READY", START_SECONDS).split()
        except BaseException:
            self.close()
            raise
        self.url = "hdfs://pair" if pair else f"hdfs://127.0.0.1:{rpc}"
        self.web = f"127.0.0.1:{http}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, first: str, seconds: float) -> str:
        """Return the next line that begins with a word; lines of Hadoop itself are skipped."""
        while True:
            try:
                line = self._answers.get(timeout=seconds)
            except Empty:
                line = ""
            if line.startswith(first):
                return line
            if not line or line.startswith("ERR"):
                log = Path(self._log.name).read_text(errors="replace")[-3000:]
                raise ServerError(f"HDFS did not say {first} in {seconds} s, but {line!r}; its log ends with:\n{log}")

    def command(self, command: str) -> None:
        """Let the servers do something; see MiniHdfs.java."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._answer("OK", START_SECONDS)

    def close(self) -> None:
        """End the servers."""
        with ExitStack() as stack:
            stack.callback(self._log.close)
            stack.callback(self._held.close)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            stack.callback(self._process.stdout.close)
            stack.callback(self._reader.join, 5)
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pair_settings(ports: Sequence[int]) -> dict[str, str]:
    """Return the settings by which clients find the NameNodes of a pair."""
    names = {"dfs.nameservices": "pair", "dfs.ha.namenodes.pair": "nn0,nn1"}
    for index in range(2):
        names[f"dfs.namenode.rpc-address.pair.nn{index}"] = f"127.0.0.1:{ports[2 * index]}"
        names[f"dfs.namenode.http-address.pair.nn{index}"] = f"127.0.0.1:{ports[2 * index + 1]}"
    provider = "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
    return {**names, "dfs.client.failover.proxy.provider.pair": provider}
