"""The completion transaction: what a handler writes on it commits with its step, or not at all.

It is begun lazily on a bounded pool and ended only here. Three things keep it honest: the connection refuses
`commit`, `rollback` and `close` while a handler has it; a seal that lives only in the transaction shows whether the
handler ended it by other means; and the completion is fenced *in the server*, so that a stale worker's COMMIT becomes
a rollback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, NoReturn

import psycopg
import psycopg_pool
from psycopg import AsyncCursor, Cursor, generators, sql
from psycopg.abc import PQGen, QueryNoTemplate
from psycopg.errors import Diagnostic
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.rows import tuple_row

from . import config, db, metrics, waiting
from .errors import CompletionTxError, LeaseLostError, PoolTimeoutError
from .model import Claimed

_Params = Sequence[Any] | Mapping[str, Any] | None
_ParamsSeq = Sequence[Sequence[Any] | Mapping[str, Any]]

_KEEP_S = 60.0  # so often what the pool has lent goes back to it

# What a handler may have changed on the session goes with its step: the next one gets a clean connection. Not DISCARD
# ALL, which would also drop what the driver has prepared, and cannot be part of a message. In a function of the server
# they took twice as long.
_CLEAN = (
    "RESET ALL; RESET SESSION AUTHORIZATION; UNLISTEN *; CLOSE ALL; DISCARD TEMP; "
    "SELECT pg_catalog.pg_advisory_unlock_all()"
)


def _refuse(what: str) -> NoReturn:
    raise CompletionTxError(
        f"{what}() on the completion transaction: only Cyclone ends it, together with the step. "
        "Use savepoint() for a block that may fail by itself, and raise to roll back everything."
    )


def _message(conn: psycopg.AsyncConnection[Any] | psycopg.Connection[Any], text: bytes) -> PQGen[None]:
    """Sends statements as one message and reads all that comes back. Without a cursor, which cost half as much again as
    the sending.
    """
    conn.pgconn.send_query(text)
    for result in (yield from generators.execute(conn.pgconn)):
        if result.status == ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result, encoding=conn.info.encoding)


class AsyncTxConnection(waiting.AsyncConnection):
    """A connection that refuses to be ended while a handler has it, and that remembers why the server ended it."""

    lent: bool = False
    ended_by: tuple[str, str] | None = None
    """The SQLSTATE and the message with which the server ended the session."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_notice_handler(self._heard)

    async def message(self, text: bytes) -> None:
        async with self.lock:
            await self.wait(_message(self, text))

    def _heard(self, notice: Diagnostic) -> None:
        if notice.severity_nonlocalized == "FATAL":
            self.ended_by = notice.sqlstate or "", notice.message_primary or ""

    async def commit(self) -> None:
        if self.lent:
            _refuse("commit")
        await super().commit()

    async def rollback(self) -> None:
        if self.lent:
            _refuse("rollback")
        await super().rollback()

    async def close(self) -> None:
        if self.lent:
            _refuse("close")
        await super().close()

    async def set_autocommit(self, value: bool) -> None:
        if self.lent:
            _refuse("set_autocommit")
        await super().set_autocommit(value)


class SyncTxConnection(psycopg.Connection[Any]):
    """The same for handlers in threads."""

    lent: bool = False
    ended_by: tuple[str, str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_notice_handler(self._heard)

    def message(self, text: bytes) -> None:
        with self.lock:
            self.wait(_message(self, text))

    def _heard(self, notice: Diagnostic) -> None:
        if notice.severity_nonlocalized == "FATAL":
            self.ended_by = notice.sqlstate or "", notice.message_primary or ""

    def commit(self) -> None:
        if self.lent:
            _refuse("commit")
        super().commit()

    def rollback(self) -> None:
        if self.lent:
            _refuse("rollback")
        super().rollback()

    def close(self) -> None:
        if self.lent:
            _refuse("close")
        super().close()

    def set_autocommit(self, value: bool) -> None:
        if self.lent:
            _refuse("set_autocommit")
        super().set_autocommit(value)


class CompletionTx:
    """The open transaction that commits together with the step. Only Cyclone ends it."""

    def __init__(self, connection: AsyncTxConnection) -> None:
        self.connection: psycopg.AsyncConnection[Any] = connection

    async def execute(self, query: QueryNoTemplate, params: _Params = None) -> AsyncCursor[Any]:
        """Runs one statement and returns its cursor. Database errors pass through; the transaction is then aborted,
        and the attempt fails unless the statement was inside a `savepoint()`.
        """
        return await self.connection.execute(query, params)

    async def executemany(self, query: QueryNoTemplate, params_seq: _ParamsSeq) -> None:
        """Runs one statement for many parameters."""
        async with self.connection.cursor() as cur:
            await cur.executemany(query, params_seq)

    def cursor(self) -> AsyncCursor[Any]:
        """A cursor on the transaction."""
        return self.connection.cursor()

    @asynccontextmanager
    async def copy(self, query: QueryNoTemplate) -> AsyncGenerator[psycopg.AsyncCopy]:
        """COPY into or out of a table on the transaction."""
        async with self.connection.cursor() as cur, cur.copy(query) as copy:
            yield copy

    def savepoint(self) -> AbstractAsyncContextManager[psycopg.AsyncTransaction]:
        """A block that is rolled back alone when it raises; what was written before it stays."""
        return self.connection.transaction()

    async def commit(self) -> NoReturn:
        """Refused: raises CompletionTxError."""
        _refuse("commit")

    async def rollback(self) -> NoReturn:
        """Refused: raises CompletionTxError."""
        _refuse("rollback")

    async def close(self) -> NoReturn:
        """Refused: raises CompletionTxError."""
        _refuse("close")


class SyncCompletionTx:
    """As CompletionTx, for handlers in threads."""

    def __init__(self, connection: SyncTxConnection) -> None:
        self.connection: psycopg.Connection[Any] = connection

    def execute(self, query: QueryNoTemplate, params: _Params = None) -> Cursor[Any]:
        """Runs one statement and returns its cursor."""
        return self.connection.execute(query, params)

    def executemany(self, query: QueryNoTemplate, params_seq: _ParamsSeq) -> None:
        """Runs one statement for many parameters."""
        with self.connection.cursor() as cur:
            cur.executemany(query, params_seq)

    def cursor(self) -> Cursor[Any]:
        """A cursor on the transaction."""
        return self.connection.cursor()

    @contextmanager
    def copy(self, query: QueryNoTemplate) -> Generator[psycopg.Copy]:
        """COPY into or out of a table on the transaction."""
        with self.connection.cursor() as cur, cur.copy(query) as copy:
            yield copy

    def savepoint(self) -> AbstractContextManager[psycopg.Transaction]:
        """A block that is rolled back alone when it raises; what was written before it stays."""
        return self.connection.transaction()

    def commit(self) -> NoReturn:
        """Refused: raises CompletionTxError."""
        _refuse("commit")

    def rollback(self) -> NoReturn:
        """Refused: raises CompletionTxError."""
        _refuse("rollback")

    def close(self) -> NoReturn:
        """Refused: raises CompletionTxError."""
        _refuse("close")


def _seal(step: Claimed) -> str:
    return f"{step.id}:{step.claim}"


def _check_open(status: TransactionStatus) -> None:
    """What the handler left behind, judged before anything is sent."""
    if status == TransactionStatus.IDLE:
        raise CompletionTxError("the handler ended its completion transaction")
    if status == TransactionStatus.INERROR:
        raise CompletionAborted("the completion transaction was aborted by an error that the handler did not raise")
    if status != TransactionStatus.INTRANS:
        raise CompletionAborted(f"the completion transaction was left in state {status.name}")


def _translate(exc: psycopg.Error, ended_by: tuple[str, str] | None) -> Exception:
    """What the server's refusal means. A server that ended the session meanwhile says why in what reaches the client as
    a mere notice, followed by a lost connection: without it, a handler that always idles longer than its role may would
    pass for a bad network, and be called again for ever.
    """
    if exc.sqlstate is None and ended_by is not None:
        with suppress(KeyError):
            return psycopg.errors.lookup(ended_by[0])(ended_by[1])
    if exc.sqlstate == db.LEASE_LOST:
        return LeaseLostError("the lease of this step was lost")
    if exc.sqlstate == db.TX_ENDED:
        return CompletionTxError("the handler ended its completion transaction")
    return exc


def _too_late(timeout_s: float, size: int) -> PoolTimeoutError:
    return PoolTimeoutError(
        f"no connection for the completion transaction became free within {timeout_s} s "
        f"(completion_pool_size is {size})"
    )


class CompletionAborted(Exception):
    """The completion transaction cannot be committed because of what the handler left of it; an ordinary failure."""


def _begin(step: Claimed) -> bytes:
    return f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL cyclone.seal = '{_seal(step)}'".encode()


def _finish(statements: db.Statements, step: Claimed, output: str | None, clean: bool) -> bytes:
    """Everything that ends a completion transaction, as one message of several statements: one round trip, and a
    fraction of what the driver takes for as many statements in a pipeline. After a refusal the server skips the
    rest.
    """
    schema = statements.quoted
    value = "NULL" if output is None else sql.Literal(output).as_string()
    run = "NULL" if step.graph is None else step.run_id
    complete = f"SELECT {schema}.cyclone_complete({step.id}, {step.claim}, {run}, {value}, NULL, '{_seal(step)}')"
    return "; ".join((complete, "COMMIT", _CLEAN) if clean else (complete, "COMMIT")).encode()


class AsyncCompletions:
    """The completion transactions of a worker's async handlers, on a bounded pool."""

    def __init__(self, dsn: str, statements: db.Statements, options: config.WorkerOptions) -> None:
        self._sql = statements
        self._timeout_s = options.completion_pool_timeout_s
        self._dsn = dsn
        self._pool: psycopg_pool.AsyncConnectionPool[AsyncTxConnection] | None = None
        self._size = options.completion_pool_size
        self._pooler = not options.notify
        # Connections between two steps stay here, since to go through the pool for each step took as long as a message.
        # From time to time all go back to it, which closes what is idle or old.
        self._idle: list[AsyncTxConnection] = []
        self._waiting = 0
        self._closed = False
        self._return: asyncio.TimerHandle | None = None
        self._returning: asyncio.Task[None] | None = None

    async def begin(self, step: Claimed) -> AsyncTxConnection:
        pool = self._pool
        if pool is None:
            pool = self._pool = psycopg_pool.AsyncConnectionPool(
                self._dsn,
                connection_class=AsyncTxConnection,
                kwargs=_kwargs(self._dsn, self._pooler),
                min_size=0,
                max_size=self._size,
                timeout=self._timeout_s,
                name="cyclone completion",
                open=False,
            )
            await pool.open()
        start = time.perf_counter()
        while True:
            left_s = self._timeout_s - (time.perf_counter() - start)
            if self._idle:
                conn = self._idle.pop()
            else:
                self._waiting += 1
                try:
                    conn = await pool.getconn(max(left_s, 0.0))
                except psycopg_pool.PoolTimeout as exc:
                    raise _too_late(self._timeout_s, self._size) from exc
                finally:
                    self._waiting -= 1
            try:
                await conn.message(_begin(step))
                break
            except BaseException as exc:
                broken = isinstance(exc, psycopg.OperationalError) and conn.closed
                await conn.close()
                await pool.putconn(conn)
                if not broken:
                    raise  # one that broke while nobody used it is no failure of the handler's: the next may be good
        metrics.tx_waited(time.perf_counter() - start)
        conn.lent = True
        conn.row_factory = tuple_row  # the handler before may have chosen another
        return conn

    async def commit(self, conn: AsyncTxConnection, step: Claimed, output: str | None) -> None:
        """Completes the step and commits, in one round trip. LeaseLostError, CompletionTxError and CompletionAborted
        mean that everything was rolled back; a lost connection means that nobody knows.
        """
        _check_open(conn.info.transaction_status)
        conn.lent = False
        try:
            await conn.message(_finish(self._sql, step, output, not self._pooler))
        except psycopg.Error as exc:
            await conn.close()  # what the server skipped includes the cleaning
            raise _translate(exc, conn.ended_by) from exc

    async def end(self, conn: AsyncTxConnection, held_since: float) -> None:
        """Gives the connection back; whatever is still open on it is rolled back. One that is not clean is closed."""
        conn.lent = False
        if conn.info.transaction_status != TransactionStatus.IDLE:
            await conn.close()  # cheaper than cleaning after a failure, and sure
        if self._waiting or conn.closed or self._closed:
            assert self._pool is not None
            await self._pool.putconn(conn)
        else:
            self._idle.append(conn)
            if self._return is None:
                self._return = asyncio.get_running_loop().call_later(_KEEP_S, self._return_soon)
        metrics.tx_held(time.perf_counter() - held_since)

    def _return_soon(self) -> None:
        self._return = None
        self._returning = asyncio.create_task(self._return_all())

    async def _return_all(self) -> None:
        while self._idle and self._pool is not None:
            await self._pool.putconn(self._idle.pop())

    async def close(self) -> None:
        self._closed = True
        if self._return is not None:
            self._return.cancel()
        if self._returning is not None:
            await self._returning
        if self._pool is not None:
            await self._return_all()
            await self._pool.close()


class SyncCompletions:
    """The completion transactions of a worker's handlers in threads."""

    def __init__(self, dsn: str, statements: db.Statements, options: config.WorkerOptions) -> None:
        self._sql = statements
        self._timeout_s = options.completion_pool_timeout_s
        self._size = options.completion_pool_size
        self._pooler = not options.notify
        self._pool: psycopg_pool.ConnectionPool[SyncTxConnection] = psycopg_pool.ConnectionPool(
            dsn,
            connection_class=SyncTxConnection,
            kwargs=_kwargs(dsn, self._pooler),
            min_size=0,
            max_size=self._size,
            timeout=self._timeout_s,
            name="cyclone completion (threads)",
            open=False,
        )

    def begin(self, step: Claimed) -> SyncTxConnection:
        self._pool.open()
        start = time.perf_counter()
        while True:
            left_s = self._timeout_s - (time.perf_counter() - start)
            try:
                conn = self._pool.getconn(max(left_s, 0.0))
            except psycopg_pool.PoolTimeout as exc:
                raise _too_late(self._timeout_s, self._size) from exc
            try:
                conn.message(_begin(step))
                break
            except BaseException as exc:
                broken = isinstance(exc, psycopg.OperationalError) and conn.closed
                self._pool.putconn(conn)
                if not broken:
                    raise  # one that broke while nobody used it is no failure of the handler's: the next may be good
        metrics.tx_waited(time.perf_counter() - start)
        conn.lent = True
        conn.row_factory = tuple_row  # the handler before may have chosen another
        return conn

    def commit(self, conn: SyncTxConnection, step: Claimed, output: str | None) -> None:
        """As AsyncCompletions.commit."""
        _check_open(conn.info.transaction_status)
        conn.lent = False
        try:
            conn.message(_finish(self._sql, step, output, not self._pooler))
        except psycopg.Error as exc:
            conn.close()
            raise _translate(exc, conn.ended_by) from exc

    def end(self, conn: SyncTxConnection, held_since: float) -> None:
        """As AsyncCompletions.end."""
        conn.lent = False
        if conn.info.transaction_status != TransactionStatus.IDLE:
            conn.close()
        self._pool.putconn(conn)
        metrics.tx_held(time.perf_counter() - held_since)

    def close(self) -> None:
        self._pool.close()


def _kwargs(dsn: str, pooler: bool) -> dict[str, Any]:
    return {
        "autocommit": True,
        "prepare_threshold": None if pooler else 5,
        **db.connect_options(dsn, "cyclone completion"),
    }
