"""The proxy: what it cuts, what it holds back, and that the server has done what the client never heard of."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator

import psycopg
import pytest
from proxy import Proxy


@pytest.fixture
def proxy(empty_dsn: str) -> Iterator[Proxy]:
    with Proxy(empty_dsn) as proxy:
        yield proxy


@pytest.fixture
def direct(empty_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("CREATE TABLE seen (what text)")
        yield conn


def seen(conn: psycopg.Connection) -> list[str]:
    return [what for (what,) in conn.execute("SELECT what FROM seen ORDER BY what")]


def test_forwards(proxy: Proxy, direct: psycopg.Connection) -> None:
    with psycopg.connect(proxy.dsn) as conn:
        conn.execute("INSERT INTO seen SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
        with conn.cursor().copy("COPY seen FROM STDIN") as copy:
            for _ in range(1000):
                copy.write("y" * 1000 + "\n")
        rows = conn.execute("SELECT what FROM seen").fetchall()
    assert len(rows) == 2000
    assert all(len(what) == 1000 for (what,) in rows)


def test_cut_closes_all_and_accepts_new(proxy: Proxy) -> None:
    with psycopg.connect(proxy.dsn) as one, psycopg.connect(proxy.dsn) as two:
        proxy.cut()
        for conn in (one, two):
            with pytest.raises(psycopg.OperationalError):
                conn.execute("SELECT 1")
    with psycopg.connect(proxy.dsn) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_replies_lag_and_none_is_lost(proxy: Proxy, direct: psycopg.Connection) -> None:
    with psycopg.connect(proxy.dsn, autocommit=True) as conn:
        proxy.lag(0.1)
        begun = time.monotonic()
        for n in range(3):
            conn.execute("INSERT INTO seen VALUES (%s)", (str(n),))
        assert 0.3 <= time.monotonic() - begun
        # Statements in one pipeline pay for the distance together.
        begun = time.monotonic()
        with conn.pipeline():
            for n in range(3, 50):
                conn.execute("INSERT INTO seen VALUES (%s)", (str(n),))
        assert 0.1 <= time.monotonic() - begun < 2
    assert len(seen(direct)) == 50


def test_freeze_and_thaw(proxy: Proxy, direct: psycopg.Connection) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        psycopg.connect(proxy.dsn, autocommit=True) as conn,
    ):
        proxy.freeze()
        answer = pool.submit(conn.execute, "INSERT INTO seen VALUES ('late')")
        with pytest.raises(TimeoutError):
            answer.result(0.1)
        assert seen(direct) == []
        proxy.thaw()
        answer.result(10)
    assert seen(direct) == ["late"]


def test_cut_while_frozen(proxy: Proxy, direct: psycopg.Connection) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        psycopg.connect(proxy.dsn, autocommit=True) as conn,
    ):
        proxy.freeze()
        answer = pool.submit(conn.execute, "INSERT INTO seen VALUES ('never')")
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            answer.result(10)
    proxy.thaw()
    assert seen(direct) == []


def test_reply_of_a_commit_is_lost(proxy: Proxy, direct: psycopg.Connection) -> None:
    with psycopg.connect(proxy.dsn) as conn:
        conn.execute("INSERT INTO seen VALUES ('kept')")
        dropped = proxy.drop_next_reply_after(b"COMMIT")
        with pytest.raises(psycopg.OperationalError):
            conn.commit()
        assert dropped.wait(10)
    assert seen(direct) == ["kept"]


def test_replies_before_the_lost_one_arrive(proxy: Proxy, direct: psycopg.Connection) -> None:
    dropped = proxy.drop_next_reply_after(b"'lost'")
    with psycopg.connect(proxy.dsn, autocommit=True) as conn:
        with pytest.raises(psycopg.OperationalError), conn.pipeline() as pipeline:
            first = conn.execute("INSERT INTO seen VALUES ('heard') RETURNING what")
            pipeline.sync()
            assert first.fetchone() == ("heard",)
            conn.execute("INSERT INTO seen VALUES ('lost')")
            pipeline.sync()
        assert dropped.wait(10)
    assert seen(direct) == ["heard", "lost"]


def test_prepared_statement_is_known_by_its_text(proxy: Proxy, direct: psycopg.Connection) -> None:
    with psycopg.connect(proxy.dsn, autocommit=True) as conn:
        for what in ("a", "b"):
            conn.execute("INSERT INTO seen VALUES (%s)", (what,), prepare=True)
        dropped = proxy.drop_next_reply_after(b"INSERT INTO seen")
        with pytest.raises(psycopg.OperationalError):
            conn.execute("INSERT INTO seen VALUES (%s)", ("c",), prepare=True)
        assert dropped.wait(10)
    assert seen(direct) == ["a", "b", "c"]


async def test_asynchronous_clients(proxy: Proxy, direct: psycopg.Connection) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as conn:
        dropped = proxy.drop_next_reply_after(b"lost")
        with pytest.raises(psycopg.OperationalError):
            await conn.execute("INSERT INTO seen VALUES ('lost')")
        assert dropped.is_set() or dropped.wait(10)
    assert seen(direct) == ["lost"]
