"""The completion transaction: a handler's writes and the end of its step are one commit, or nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import factories
import psycopg
import pytest
from factories import alone, ended, errors, read, state, until
from proxy import Proxy
from psycopg import conninfo

from cyclone.context import Context, SyncContext
from cyclone.errors import CompletionTxError, Permanent, Snooze
from cyclone.registry import Step, step
from cyclone.retry import fixed

Conn = psycopg.Connection[Any]

NEVER = fixed(timedelta(days=300))
INSERT = "INSERT INTO ledger (run_id, node) VALUES (%s, %s)"


@pytest.fixture(autouse=True)
def _ledger(conn: Conn) -> None:
    factories.ledger(conn)


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as proxy:
        yield proxy


def written(conn: Conn) -> list[tuple[str, str]]:
    return conn.execute("SELECT run_id, node FROM ledger ORDER BY id").fetchall()


# Together


@pytest.mark.contract("X1", "C5")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_a_write_commits_together_with_its_step(dsn: str, conn: Conn, sort: str) -> None:
    entered, release = threading.Event(), threading.Event()

    @step("charge")
    async def async_charge(ctx: Context) -> int:
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, ctx.node))
        entered.set()
        await asyncio.to_thread(release.wait, 10)
        return 42

    @step("charge")
    def sync_charge(ctx: SyncContext) -> int:
        ctx.completion_tx().execute(INSERT, (ctx.run_id, ctx.node))
        entered.set()
        release.wait(10)
        return 42

    handler: Step[Any, Any] = async_charge if sort == "async" else sync_charge
    made = factories.step(conn, "charge")
    async with factories.worker(dsn, handler):
        await until(entered.is_set)
        assert (written(conn), state(conn, made)) == ([], "running")
        release.set()
        await ended(conn, made)
    assert read(conn, made, "state", "output", "attempts") == ("completed", 42, 1)
    assert written(conn) == [(made.run_id, "charge")]
    # One transaction wrote both.
    assert conn.execute(
        "SELECT l.xmin = s.xmin FROM ledger l, cyclone_steps s WHERE s.id = %s", (made.id,)
    ).fetchone() == (True,)


@pytest.mark.contract("X1", "X9", "FM-032")
async def test_when_the_completion_is_refused_the_write_is_absent_and_the_step_not_completed(
    dsn: str, conn: Conn
) -> None:
    conn.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.state = 'completed' THEN RAISE EXCEPTION 'refused by a trigger'; END IF; RETURN NEW;
        END $$"""
    )
    conn.execute("CREATE TRIGGER refuse BEFORE UPDATE ON cyclone_steps FOR EACH ROW EXECUTE FUNCTION refuse()")

    @step("charge", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == ("scheduled", "retryable")
    assert "refused by a trigger" in read(conn, made, "error")
    assert written(conn) == []


@pytest.mark.contract("C2")
async def test_there_is_no_moment_at_which_a_completed_step_lacks_its_output(dsn: str, conn: Conn) -> None:
    @step("give")
    async def handler(ctx: Context, input: bool) -> int:
        if input:
            await (await ctx.completion_tx()).execute("SELECT 1")
        return 1

    factories.steps(conn, 300, "give", input=False)
    factories.steps(conn, 30, "give", input=True)
    missing: list[Any] = []
    stop = threading.Event()

    def watch() -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            while not stop.is_set():
                missing.extend(
                    other.execute("SELECT id FROM cyclone_steps WHERE state = 'completed' AND output IS NULL")
                )

    watching = asyncio.create_task(asyncio.to_thread(watch))
    async with factories.worker(dsn, handler):
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 330)
    stop.set()
    await watching
    assert missing == []


# Lazily begun, once


@pytest.mark.contract("X6")
async def test_handlers_that_do_not_ask_for_it_cost_no_connection(dsn: str, conn: Conn) -> None:
    release = asyncio.Event()
    entered = 0

    @step("sleep")
    async def handler(ctx: Context) -> None:
        nonlocal entered
        entered += 1
        await release.wait()

    def backends() -> set[str]:
        rows = conn.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE 'cyclone%' AND backend_type = 'client backend'"
        )
        return {row[0] for row in rows}

    made = [factories.step(conn, "sleep") for _ in range(100)]
    async with factories.worker(dsn, handler):
        await until(lambda: entered == 100)
        assert backends() <= {"cyclone claim", "cyclone lease", "cyclone listen", "cyclone settle"}
        release.set()
        await ended(conn, *made)
        assert "cyclone completion" not in backends()


@pytest.mark.contract("X6")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_later_calls_in_the_same_execution_give_the_same_object(dsn: str, conn: Conn, sort: str) -> None:
    seen: list[Any] = []

    @step("ask")
    async def async_ask(ctx: Context) -> None:
        seen.extend(await asyncio.gather(*(ctx.completion_tx() for _ in range(5))))

    @step("ask")
    def sync_ask(ctx: SyncContext) -> None:
        seen.extend(ctx.completion_tx() for _ in range(5))

    made = await alone(dsn, conn, async_ask if sort == "async" else sync_ask, worker={"completion_pool_size": 1})
    assert state(conn, made) == "completed"
    assert len(seen) == 5 and len({id(one) for one in seen}) == 1


@pytest.mark.contract("X6")
async def test_it_is_read_committed_whatever_the_database_says(dsn: str, conn: Conn) -> None:
    name = conninfo.conninfo_to_dict(dsn)["dbname"]
    conn.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'".encode())

    @step("ask")
    async def handler(ctx: Context) -> Any:
        cur = await (await ctx.completion_tx()).execute("SHOW transaction_isolation")
        return (await cur.fetchone())[0]

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "output") == "read committed"


# Only Cyclone ends it


@pytest.mark.contract("X7")
@pytest.mark.parametrize("sort", ["async", "sync"])
@pytest.mark.parametrize("how", ["commit", "rollback", "close"])
async def test_ending_it_is_refused_and_changes_nothing(dsn: str, conn: Conn, sort: str, how: str) -> None:
    @step("end")
    async def async_end(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, ctx.node))
        for owner in (tx, tx.connection):
            with pytest.raises(CompletionTxError, match=how):
                await getattr(owner, how)()
        with pytest.raises(CompletionTxError):
            await tx.connection.set_autocommit(False)

    @step("end")
    def sync_end(ctx: SyncContext) -> None:
        tx = ctx.completion_tx()
        tx.execute(INSERT, (ctx.run_id, ctx.node))
        for owner in (tx, tx.connection):
            with pytest.raises(CompletionTxError, match=how):
                getattr(owner, how)()
        with pytest.raises(CompletionTxError):
            tx.connection.autocommit = False

    made = await alone(dsn, conn, async_end if sort == "async" else sync_end)
    assert read(conn, made, "state", "error") == ("completed", None)
    assert written(conn) == [(made.run_id, "end")]


@pytest.mark.contract("X7")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_a_savepoint_is_rolled_back_alone(dsn: str, conn: Conn, sort: str) -> None:
    @step("save")
    async def async_save(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, "before"))
        with pytest.raises(psycopg.errors.DivisionByZero):
            async with tx.savepoint():
                await tx.execute(INSERT, (ctx.run_id, "inside"))
                await tx.execute("SELECT 1 / 0")
        await tx.executemany(INSERT, [(ctx.run_id, "after"), (ctx.run_id, "after that")])

    @step("save")
    def sync_save(ctx: SyncContext) -> None:
        tx = ctx.completion_tx()
        tx.execute(INSERT, (ctx.run_id, "before"))
        with pytest.raises(psycopg.errors.DivisionByZero):
            with tx.savepoint():
                tx.execute(INSERT, (ctx.run_id, "inside"))
                tx.execute("SELECT 1 / 0")
        tx.executemany(INSERT, [(ctx.run_id, "after"), (ctx.run_id, "after that")])

    made = await alone(dsn, conn, async_save if sort == "async" else sync_save)
    assert state(conn, made) == "completed"
    assert [node for _, node in written(conn)] == ["before", "after", "after that"]


async def test_copy_and_cursors_work_on_it(dsn: str, conn: Conn) -> None:
    @step("copy")
    async def handler(ctx: Context) -> int:
        tx = await ctx.completion_tx()
        async with tx.copy("COPY ledger (run_id, node) FROM STDIN") as copy:
            await copy.write_row((ctx.run_id, "copied"))
        async with tx.cursor() as cur:
            await cur.execute("SELECT count(*) FROM ledger")
            return (await cur.fetchone())[0]

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "output") == ("completed", 1)
    assert [node for _, node in written(conn)] == ["copied"]


@pytest.mark.contract("FM-059", "X7")
@pytest.mark.parametrize("sort", ["async", "sync"])
@pytest.mark.parametrize(
    "sent",
    [["COMMIT"], ["ROLLBACK"], ["COMMIT", "BEGIN"], ["ROLLBACK", "BEGIN"], ["ROLLBACK", "BEGIN", "seal"]],
    ids="; ".join,
)
async def test_a_handler_that_ends_the_transaction_by_itself_has_failed_and_its_step_is_not_completed(
    dsn: str, conn: Conn, sort: str, sent: list[str]
) -> None:
    texts = ["SELECT set_config('cyclone.seal', 'forged', true)" if text == "seal" else text for text in sent]

    @step("end")
    async def async_end(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, ctx.node))
        for text in texts:
            await tx.connection.execute(text)
        if "BEGIN" in texts:
            await tx.execute(INSERT, (ctx.run_id, "after"))

    @step("end")
    def sync_end(ctx: SyncContext) -> None:
        tx = ctx.completion_tx()
        tx.execute(INSERT, (ctx.run_id, ctx.node))
        for text in texts:
            tx.connection.execute(text)
        if "BEGIN" in texts:
            tx.execute(INSERT, (ctx.run_id, "after"))

    handler: Step[Any, Any] = async_end if sort == "async" else sync_end

    @step("next")
    async def after(ctx: Context) -> Any:
        return (await (await (await ctx.completion_tx()).execute("SELECT 1")).fetchone())[0]

    made, behind = factories.step(conn, "end"), factories.step(conn, "next")
    async with factories.worker(dsn, handler, after, completion_pool_size=1, concurrency=1):
        await ended(conn, made, behind)
    assert read(conn, made, "state", "error_kind") == ("discarded", "permanent")
    assert "ended its completion transaction" in read(conn, made, "error")
    # What it committed itself is its own; nothing of what came after is.
    assert [node for _, node in written(conn)] == (["end"] if sent[0] == "COMMIT" else [])
    assert read(conn, behind, "state", "output") == ("completed", 1)


# Whatever it raises


@pytest.mark.contract("X8", "FM-053")
@pytest.mark.parametrize("sort", ["async", "sync"])
@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (ValueError("no"), ("scheduled", "retryable")),
        (Permanent("no"), ("discarded", "permanent")),
        (Snooze(timedelta(hours=1)), ("scheduled", None)),
        (asyncio.CancelledError(), ("scheduled", "retryable")),
        (SystemExit(1), ("scheduled", "retryable")),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_whatever_a_handler_raises_undoes_its_writes_and_is_recorded(
    dsn: str, conn: Conn, sort: str, raised: BaseException, becomes: tuple[str, str | None]
) -> None:
    @step("fail", backoff=NEVER)
    async def async_fail(ctx: Context) -> None:
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))
        raise raised

    @step("fail", backoff=NEVER)
    def sync_fail(ctx: SyncContext) -> None:
        ctx.completion_tx().execute(INSERT, (ctx.run_id, ctx.node))
        raise raised

    made = await alone(dsn, conn, async_fail if sort == "async" else sync_fail)
    assert read(conn, made, "state", "error_kind") == becomes
    assert written(conn) == []


@pytest.mark.contract("FM-059")
async def test_an_error_that_the_handler_swallows_fails_the_attempt(dsn: str, conn: Conn) -> None:
    @step("swallow", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, ctx.node))
        with pytest.raises(psycopg.errors.DivisionByZero):
            await tx.execute("SELECT 1 / 0")

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind") == ("scheduled", "retryable")
    assert "aborted by an error that the handler did not raise" in read(conn, made, "error")
    assert written(conn) == []


@pytest.mark.contract("FM-059")
@pytest.mark.parametrize("outcome", ["returns", "raises"])
async def test_the_next_step_gets_a_clean_connection(dsn: str, conn: Conn, outcome: str) -> None:
    seen: list[Any] = []

    @step("dirty", backoff=NEVER)
    async def dirty(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        conn = tx.connection
        await conn.execute("SET search_path = nowhere")
        await conn.execute("SET work_mem = '1MB'")
        await conn.execute("CREATE TEMP TABLE left_behind (a int)")
        await conn.execute("DECLARE left_open CURSOR WITH HOLD FOR SELECT 1")
        await conn.execute("LISTEN left_on")
        await conn.execute("SELECT pg_advisory_lock(4711)")
        conn.row_factory = psycopg.rows.dict_row
        if outcome == "raises":
            raise ValueError

    @step("look")
    async def look(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        cur = await tx.execute(
            """SELECT current_setting('search_path'), current_setting('work_mem') <> '1MB',
                (SELECT count(*) FROM pg_cursors), (SELECT count(*) FROM pg_class WHERE relname = 'left_behind'),
                (SELECT count(*) FROM pg_listening_channels()),
                (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),
                (SELECT count(*) FROM cyclone_steps)"""
        )
        seen.append(await cur.fetchone())

    first = factories.step(conn, "dirty", priority=0)
    second = factories.step(conn, "look")
    async with factories.worker(dsn, dirty, look, concurrency=1, completion_pool_size=1):
        await ended(conn, first, second)
    assert state(conn, first) == ("completed" if outcome == "returns" else "scheduled")
    assert seen == [('"$user", public', True, 0, 0, 0, 0, 2)]


@pytest.mark.contract("FM-059", "X8")
async def test_a_statement_that_is_cancelled_ends_in_the_server_too(dsn: str, conn: Conn) -> None:
    rows = 20_000

    @step("slow", timeout=0.3, backoff=NEVER)
    async def slow(ctx: Context) -> None:
        await (await ctx.completion_tx()).execute("SELECT pg_sleep(30)")

    @step("copy")
    async def copy(ctx: Context) -> int:
        tx = await ctx.completion_tx()
        async with tx.copy("COPY ledger (run_id, node) FROM STDIN") as into:
            for n in range(rows):
                await into.write_row((ctx.run_id, "x" * 100 + str(n)))
        async with tx.copy("COPY ledger TO STDOUT") as out:
            return len([row async for row in out.rows()])

    first, second = factories.step(conn, "slow", priority=0), factories.step(conn, "copy")
    async with factories.worker(dsn, slow, copy, concurrency=1, completion_pool_size=1):
        await ended(conn, first, second)
        assert not factories.count(
            conn, "pg_stat_activity WHERE starts_with(query, 'SELECT pg_sleep') AND state = 'active'"
        )
    assert read(conn, first, "state", "error_kind") == ("scheduled", "timeout")
    assert read(conn, second, "state", "output") == ("completed", rows)


# When the commit itself fails


@pytest.mark.contract("X9", "FM-032")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_a_constraint_that_fails_at_the_commit_is_an_ordinary_error(dsn: str, conn: Conn, sort: str) -> None:
    conn.execute("CREATE TABLE parents (id int PRIMARY KEY)")
    conn.execute("CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")

    @step("orphan", backoff=NEVER)
    async def async_orphan(ctx: Context, input: int) -> None:
        await (await ctx.completion_tx()).execute("INSERT INTO children VALUES (%s)", (input,))

    @step("orphan", backoff=NEVER)
    def sync_orphan(ctx: SyncContext, input: int) -> None:
        ctx.completion_tx().execute("INSERT INTO children VALUES (%s)", (input,))

    conn.execute("INSERT INTO parents VALUES (1)")
    bad, good = (factories.step(conn, "orphan", input=parent) for parent in (2, 1))
    async with factories.worker(dsn, async_orphan if sort == "async" else sync_orphan, completion_pool_size=1):
        await ended(conn, bad, good)
    assert read(conn, bad, "state", "error_kind", "attempts") == ("scheduled", "retryable", 1)
    assert "children_parent_fkey" in read(conn, bad, "error")
    assert (state(conn, good), factories.count(conn, "children")) == ("completed", 1)


@pytest.mark.contract("X9")
async def test_a_serialization_failure_in_the_transaction_is_an_ordinary_error(dsn: str, conn: Conn) -> None:
    @step("serial", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        tx = await ctx.completion_tx()
        await tx.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

    made = await alone(dsn, conn, handler)
    assert read(conn, made, "state", "error_kind", "attempts") == ("scheduled", "retryable", 1)


@pytest.mark.contract("X3", "X4", "X9", "E6", "M4")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_when_the_reply_to_a_commit_that_went_through_is_lost_there_is_no_second_call(
    dsn: str, conn: Conn, proxy: Proxy, sort: str
) -> None:
    calls: list[int] = []

    @step("charge", backoff=NEVER)
    async def async_charge(ctx: Context) -> int:
        calls.append(ctx.attempt)
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))
        return 1

    @step("charge", backoff=NEVER)
    def sync_charge(ctx: SyncContext) -> int:
        calls.append(ctx.attempt)
        ctx.completion_tx().execute(INSERT, (ctx.run_id, ctx.node))
        return 1

    dropped = proxy.drop_next_reply_after(b"cyclone_complete(")
    made = factories.step(conn, "charge")
    async with factories.worker(proxy.dsn, async_charge if sort == "async" else sync_charge):
        await until(dropped.is_set)
        await until(lambda: state(conn, made) != "running")
        await until(lambda: not factories.count(conn, "cyclone_claims"))
    assert read(conn, made, "state", "attempts", "output", "error") == ("completed", 1, 1, None)
    assert calls == [1]
    assert written(conn) == [(made.run_id, "charge")]


@pytest.mark.contract("X2", "X4", "X9", "E5", "E6", "M3")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_when_the_connection_is_lost_before_the_commit_the_same_attempt_runs_again(
    dsn: str, conn: Conn, sort: str
) -> None:
    calls: list[int] = []

    def kill() -> None:
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'cyclone completion'"
        )

    @step("charge", backoff=NEVER)
    async def async_charge(ctx: Context) -> int:
        calls.append(ctx.attempt)
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))
        if len(calls) == 1:
            kill()
        return 1

    @step("charge", backoff=NEVER)
    def sync_charge(ctx: SyncContext) -> int:
        calls.append(ctx.attempt)
        ctx.completion_tx().execute(INSERT, (ctx.run_id, ctx.node))
        if len(calls) == 1:
            kill()
        return 1

    made = await alone(dsn, conn, async_charge if sort == "async" else sync_charge, max_attempts=1)
    assert read(conn, made, "state", "attempts", "reclaims", "error") == ("completed", 1, 0, None)
    assert calls == [1, 1]
    assert written(conn) == [(made.run_id, "charge")]


@pytest.mark.contract("X4", "X9", "E6", "FM-031")
async def test_a_hundred_charges_under_broken_connections_leave_an_exact_ledger(
    dsn: str, conn: Conn, proxy: Proxy
) -> None:
    @step("charge", max_attempts=50, backoff=fixed(0.001))
    async def handler(ctx: Context) -> int:
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))
        await asyncio.sleep(0.005)
        return 1

    made = factories.steps(conn, 100, "charge", max_attempts=50)
    async with factories.worker(proxy.dsn, handler), factories.sweeper(dsn):
        for cut in range(6):
            await until(
                lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") >= 100 * (cut + 1) // 8  # noqa: B023
            )
            proxy.cut()
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 100, 30)
    assert sorted(int(run) for run, _ in written(conn)) == made


@pytest.mark.contract("M9")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_connections_that_broke_while_nobody_used_them_cost_no_attempt(
    dsn: str, conn: Conn, proxy: Proxy, sort: str
) -> None:
    @step("charge")
    async def async_charge(ctx: Context) -> None:
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))
        await asyncio.sleep(0.02)

    @step("charge")
    def sync_charge(ctx: SyncContext) -> None:
        ctx.completion_tx().execute(INSERT, (ctx.run_id, ctx.node))

    before = [factories.step(conn, "charge") for _ in range(4)]
    async with factories.worker(proxy.dsn, async_charge if sort == "async" else sync_charge, completion_pool_size=4):
        await ended(conn, *before)
        proxy.cut()
        after = [factories.step(conn, "charge", max_attempts=1) for _ in range(4)]
        await ended(conn, *after)
    assert {read(conn, one, "state", "error") for one in after} == {("completed", None)}
    assert len(written(conn)) == 8


# Stale


@pytest.mark.contract("E9", "E8", "M5", "FM-014", "X4")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_a_handler_that_lost_its_lease_and_ends_last_writes_nothing(dsn: str, conn: Conn, sort: str) -> None:
    calls: list[str] = []
    release = threading.Event()

    @step("charge")
    async def async_charge(ctx: Context) -> str:
        calls.append(me := "first" if not calls else "second")
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, me))
        if me == "first":
            while not release.is_set():  # deaf to its cancellation
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    continue
        return me

    @step("charge")
    def sync_charge(ctx: SyncContext) -> str:
        calls.append(me := "first" if not calls else "second")
        ctx.completion_tx().execute(INSERT, (ctx.run_id, me))
        if me == "first":
            release.wait(10)
        return me

    handler: Step[Any, Any] = async_charge if sort == "async" else sync_charge
    made = factories.step(conn, "charge")
    # The sweeper's word stands for a lease that ran out under load: the worker is alive and has not noticed.
    async with factories.worker(dsn, handler) as slow:
        await until(lambda: calls)
        factories.end_life(conn, slow._keeper.life, reason="lease expired")
        slow.stop()
        async with factories.worker(dsn, handler) as other:
            await factories.sweep_all(dsn)
            await until(lambda: state(conn, made) == "completed")
            assert calls == ["first", "second"]
            release.set()
            other.stop()
    assert read(conn, made, "state", "output", "attempts", "reclaims") == ("completed", "second", 1, 1)
    assert [node for _, node in written(conn)] == ["second"]


# A bounded pool


@pytest.mark.contract("X12")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_waiting_too_long_for_a_connection_gives_the_step_back_and_spends_no_attempt(
    dsn: str, conn: Conn, sort: str, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    calls: list[str] = []

    @step("hold")
    async def async_hold(ctx: Context) -> None:
        calls.append(ctx.run_id)
        await ctx.completion_tx()
        await asyncio.to_thread(release.wait, 10)

    @step("hold")
    def sync_hold(ctx: SyncContext) -> None:
        calls.append(ctx.run_id)
        ctx.completion_tx()
        release.wait(10)

    handler: Step[Any, Any] = async_hold if sort == "async" else sync_hold
    made = [factories.step(conn, "hold", max_attempts=1) for _ in range(2)]
    async with factories.worker(dsn, handler, completion_pool_size=1, completion_pool_timeout=0.1):
        await until(lambda: len(calls) >= 4)
        release.set()
        await ended(conn, *made)
    assert {read(conn, one, "state", "attempts", "error") for one in made} == {("completed", 1, None)}
    assert "completion_pool_size is 1" in caplog.text


@pytest.mark.contract("X12")
async def test_handlers_known_to_use_it_wait_for_a_connection_before_they_begin(dsn: str, conn: Conn) -> None:
    running = most = 0

    @step("charge")
    async def handler(ctx: Context) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await (await ctx.completion_tx()).execute(INSERT, (ctx.run_id, ctx.node))
        await asyncio.sleep(0.002)
        running -= 1

    first = factories.step(conn, "charge")
    async with factories.worker(dsn, handler, completion_pool_size=3):
        await ended(conn, first)
        most = 0
        made = [factories.step(conn, "charge") for _ in range(30)]
        await ended(conn, *made)
    assert most == 3
    assert len(written(conn)) == 31


# Short limits of the role


@pytest.mark.contract("FM-037")
@pytest.mark.parametrize("sort", ["async", "sync"])
async def test_short_limits_of_the_role_hit_the_handler_that_breaks_them_and_not_the_engine(
    dsn: str, conn: Conn, sort: str
) -> None:
    name = conninfo.conninfo_to_dict(dsn)["dbname"]
    for limit in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        conn.execute(f"ALTER DATABASE {name} SET {limit} = '300ms'".encode())

    @step("limit", backoff=NEVER)
    async def async_limit(ctx: Context, input: str) -> None:
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, ctx.node))
        if input == "statement":
            await tx.execute("SELECT pg_sleep(5)")
        elif input == "idle":
            await asyncio.sleep(0.6)

    @step("limit", backoff=NEVER)
    def sync_limit(ctx: SyncContext, input: str) -> None:
        tx = ctx.completion_tx()
        tx.execute(INSERT, (ctx.run_id, ctx.node))
        if input == "statement":
            tx.execute("SELECT pg_sleep(5)")
        elif input == "idle":
            threading.Event().wait(0.6)

    statement, idle, good = (factories.step(conn, "limit", input=input) for input in ("statement", "idle", "good"))
    async with (
        factories.worker(dsn, async_limit if sort == "async" else sync_limit),
        factories.sweeper(dsn),
    ):
        await ended(conn, statement, idle, good)
    assert read(conn, statement, "state", "error_kind", "attempts") == ("scheduled", "retryable", 1)
    assert "statement timeout" in read(conn, statement, "error")
    assert read(conn, idle, "state", "error_kind", "attempts") == ("scheduled", "retryable", 1)
    assert "idle-in-transaction timeout" in read(conn, idle, "error")
    assert state(conn, good) == "completed"
    assert written(conn) == [(good.run_id, "limit")]


# Keys, as documented examples


@pytest.mark.contract("K2", "K6", "O5")
async def test_a_handler_can_dedupe_its_own_writes_by_run_and_node(dsn: str, conn: Conn) -> None:
    conn.execute("CREATE TABLE mails (run_id text, node text, PRIMARY KEY (run_id, node))")
    calls: list[tuple[str, str]] = []

    @step("mail", backoff=fixed(0.001))
    async def handler(ctx: Context) -> None:
        calls.append((ctx.run_id, ctx.node))
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as own:
            await own.execute("INSERT INTO mails VALUES (%s, %s) ON CONFLICT (run_id, node) DO NOTHING", calls[-1])
        if len(calls) == 1:
            raise RuntimeError("after the effect")

    made = factories.step(conn, "mail")
    async with factories.worker(dsn, handler), factories.sweeper(dsn):
        await until(lambda: state(conn, made) == "completed")
    assert calls == [(made.run_id, "mail")] * 2
    assert conn.execute("SELECT run_id, node FROM mails").fetchall() == [(made.run_id, "mail")]


@pytest.mark.contract("K7", "E5", "E6")
async def test_a_write_on_another_connection_stays_when_the_completion_is_rolled_back(dsn: str, conn: Conn) -> None:
    conn.execute("CREATE TABLE audit (run_id text)")
    conn.execute("CREATE TABLE unlucky (once int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    conn.execute("INSERT INTO unlucky VALUES (1)")
    calls = 0

    @step("audited", backoff=fixed(0.001))
    async def handler(ctx: Context) -> None:
        nonlocal calls
        calls += 1
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            await other.execute("INSERT INTO audit VALUES (%s)", (ctx.run_id,))
        tx = await ctx.completion_tx()
        await tx.execute(INSERT, (ctx.run_id, ctx.node))
        await tx.execute("INSERT INTO unlucky VALUES (%s)", (calls,))  # the first collides, at the commit

    made = factories.step(conn, "audited")
    async with factories.worker(dsn, handler), factories.sweeper(dsn):
        await until(lambda: state(conn, made) == "completed")
    assert calls == 2
    assert (factories.count(conn, "audit"), len(written(conn))) == (2, 1)
    assert [kind for _, kind, _ in errors(conn, made)] == ["retryable"]


@pytest.mark.contract("X6")
async def test_it_cannot_be_begun_after_the_handler_has_ended(dsn: str, conn: Conn) -> None:
    kept: list[Context] = []

    @step("keep")
    async def handler(ctx: Context) -> None:
        kept.append(ctx)

    made = factories.step(conn, "keep")
    async with factories.worker(dsn, handler):
        await ended(conn, made)
        with pytest.raises(CompletionTxError, match="has ended"):
            await kept[0].completion_tx()


@pytest.mark.contract("X6")
def test_outside_a_worker_there_is_none() -> None:
    claimed: Any = object()
    with pytest.raises(CompletionTxError, match="outside a worker"):
        asyncio.run(Context(claimed, None, None).completion_tx())
    with pytest.raises(CompletionTxError, match="outside a worker"):
        SyncContext(claimed, None, None).completion_tx()
