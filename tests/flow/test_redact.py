"""What is told of a failure: redacted first, then cut, and the same in the row and in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import factories
import msgspec
import process_steps
import psycopg
import pytest
from factories import read, until

import cyclone
from cyclone.context import Context, SyncContext
from cyclone.errors import InvalidOptionTypeError, Permanent, PoolTimeoutError, RetryAfter
from cyclone.execute import CUT, REDACTION_FAILED, Limits
from cyclone.registry import Registry, Step, step
from cyclone.retry import fixed

Conn = psycopg.Connection[Any]

NEVER = fixed(timedelta(days=300))
SECRET = "hunter2"


def mask(text: str) -> str:
    return text.replace(SECRET, "***")


def everything(conn: Conn) -> str:
    """Every row of every table."""
    tables = conn.execute("SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relname ~ '^cyclone_'")
    rows = [conn.execute(f"SELECT t::text FROM {name} t".encode()).fetchall() for (name,) in tables.fetchall()]
    return repr(rows)


async def run(dsn: str, conn: Conn, *handlers: Step[Any, Any], **options: Any) -> list[factories.Made]:
    """Runs one step of each handler until none is left to be run now."""
    made = [factories.step(conn, one.name) for one in handlers]
    ids = [one.id for one in made]
    async with factories.worker(dsn, *handlers, **options):
        rows = "cyclone_steps WHERE id = ANY(%s) AND state IN ('available', 'running')"
        await until(lambda: not factories.count(conn, rows, ids), 30)
    return made


class OddDelay(RetryAfter):
    """Whoever asks for its delay gets to see the secret."""

    def __getattribute__(self, name: str) -> Any:
        if name == "delay":
            raise ValueError(f"no delay for {SECRET}")
        return super().__getattribute__(name)


def _no_wait(attempt: int, exc: Exception) -> timedelta:
    raise ValueError(f"no wait for {exc}")


def _handlers() -> list[Step[Any, Any]]:
    @step("async", backoff=NEVER)
    async def one(ctx: Context) -> None:
        raise RuntimeError(f"the token is {SECRET}")

    @step("sync", backoff=NEVER)
    def two(ctx: SyncContext) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as exc:
            raise Permanent(f"it was {SECRET}") from exc

    @step("backoff", backoff=_no_wait)
    async def three(ctx: Context) -> None:
        raise RuntimeError(f"the token is {SECRET}")

    @step("timeout", timeout=0.05, backoff=NEVER)
    async def four(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError(f"cleaning up {SECRET}") from None

    @step("unjudged")
    async def five(ctx: Context) -> None:
        try:
            raise RuntimeError(SECRET)
        except RuntimeError as exc:
            raise RetryAfter(timedelta(days=1), f"later, {SECRET}") from exc

    @step("odd")
    def six(ctx: SyncContext) -> None:
        raise OddDelay(1)

    return [one, two, three, four, five, six, process_steps.secret]


@pytest.mark.contract("R47")
async def test_a_secret_is_in_no_row_and_in_no_line_of_the_log(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    made = await run(dsn, conn, *_handlers(), redact=mask)
    assert SECRET not in everything(conn)
    assert SECRET not in caplog.text and SECRET not in "".join(capfd.readouterr())
    stored = dict(conn.execute("SELECT step, message || traceback FROM cyclone_errors").fetchall())
    assert set(stored) == {one.id for one in made}
    for one in made[:5]:
        assert "***" in stored[one.id]
    assert read(conn, made[0], "error") == "RuntimeError: the token is ***"
    assert "KeyError: '***'" in stored[made[1].id]
    # What a hook of the handler's raised shows what it was about, and is told in full.
    assert "ValueError: no wait for the token is ***" in caplog.text
    assert "could not judge the failure" in caplog.text and "no delay for ***" in caplog.text


@pytest.mark.contract("R47")
async def test_without_redaction_the_log_has_the_exception_itself(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    @step("backoff", backoff=_no_wait)
    async def handler(ctx: Context) -> None:
        raise RuntimeError("as it is")

    (made,) = await run(dsn, conn, handler)
    assert read(conn, made, "error") == "RuntimeError: as it is"
    (record,) = [record for record in caplog.records if "backoff raised" in record.message]
    assert record.exc_info is not None and isinstance(record.exc_info[1], ValueError)


@pytest.mark.contract("R47", "FM-048")
async def test_a_text_is_redacted_before_it_is_cut(dsn: str, conn: Conn) -> None:
    @step("long", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        # Wherever the cut falls, it falls into a secret: in the message at its end, in the traceback in its middle.
        raise RuntimeError(SECRET * 1000)

    (made,) = await run(
        dsn, conn, handler, redact=lambda text: text.replace(SECRET, "-" * len(SECRET)), max_error_bytes=2000
    )
    found = conn.execute("SELECT message, traceback FROM cyclone_errors").fetchone()
    assert found is not None
    for text in (*found, read(conn, made, "error")):
        assert len(text.encode()) <= 2000 and CUT in text
        assert not any(part in text for part in ("hunt", "unte", "nter", "ter2"))
    assert "in handler" in found[1]


def _raises(text: str) -> NoReturn:
    raise ValueError(f"cannot redact {text}")


def _exits(text: str) -> NoReturn:
    raise SystemExit(text)


def _gives_bytes(text: str) -> bytes:
    return text.encode()


@pytest.mark.contract("R47")
@pytest.mark.parametrize("redact", [_raises, _exits, _gives_bytes, lambda text: None])
async def test_a_redaction_that_fails_hides_the_text_and_loses_no_outcome(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture, redact: Callable[[str], Any]
) -> None:
    first, second, third, *_ = _handlers()
    made = await run(dsn, conn, first, second, third, factories.noop(), redact=redact)
    assert [read(conn, one, "state", "error_kind") for one in made] == [
        ("scheduled", "retryable"),
        ("discarded", "permanent"),
        ("scheduled", "retryable"),
        ("completed", None),
    ]
    texts = conn.execute("SELECT message, traceback FROM cyclone_errors").fetchall()
    assert texts == [(REDACTION_FAILED, REDACTION_FAILED)] * 3
    assert SECRET not in caplog.text and REDACTION_FAILED in caplog.text
    assert "redact raised" in caplog.text or "redact returned" in caplog.text


@pytest.mark.contract("R47", "FM-050", "FM-051")
async def test_a_redaction_gets_and_gives_text_of_any_sort(dsn: str, conn: Conn) -> None:
    seen: list[str] = []

    def redact(text: str) -> str:
        seen.append(text)
        text.encode()
        return text.replace("alone", "\ud801\0")

    @step("odd", backoff=NEVER)
    async def handler(ctx: Context) -> None:
        raise RuntimeError("nul \0 and \ud800 alone")

    (made,) = await run(dsn, conn, handler, redact=redact)
    assert read(conn, made, "error") == r"RuntimeError: nul \x00 and \ud800 \ud801\x00"
    assert r"RuntimeError: nul \x00 and \ud800 alone" in seen


@pytest.mark.contract("R47")
async def test_what_the_server_says_of_an_output_it_refuses_is_redacted_too(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    @step("give", backoff=NEVER)
    async def handler(ctx: Context) -> Any:
        return msgspec.Raw(b'["%s", ' % SECRET.encode() + b"[" * 50_000 + b"]" * 50_000 + b"]")

    (made,) = await run(dsn, conn, handler, redact=lambda text: text.replace("stack depth", "***"))
    assert read(conn, made, "state") == "discarded"
    assert "*** limit" in read(conn, made, "error")
    assert "stack depth" not in caplog.text


@pytest.mark.contract("R47")
async def test_redactions_of_the_registry_come_first_and_each_gets_what_the_one_before_has_left(
    dsn: str, conn: Conn
) -> None:
    handlers = Registry()

    @handlers.redact
    def declared(text: str) -> str:
        return text.replace("a", "b")

    @step("fail", registry=handlers, backoff=NEVER)
    async def fail(ctx: Context) -> None:
        raise RuntimeError("aXa")

    assert [one.fn for one in handlers.redactions] == [declared.fn]
    made = factories.step(conn, "fail")
    async with cyclone.Worker(dsn, handlers, poll_interval=0.05, redact=lambda text: text.replace("bX", "c")):
        await until(lambda: read(conn, made, "state") == "scheduled")
    assert read(conn, made, "error") == "RuntimeError: cb"


@pytest.mark.contract("R47")
def test_a_redaction_is_a_function(dsn: str) -> None:
    for declare in (cyclone.redact, Registry().redact, lambda fn: cyclone.Worker(dsn, Registry(), redact=fn)):
        with pytest.raises(InvalidOptionTypeError, match="redact"):
            declare("secret")  # type: ignore[arg-type]


@pytest.mark.contract("R47")
def test_a_line_of_the_log_that_shows_a_failure_is_redacted(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(max_output_bytes=1, max_error_bytes=20, redactions=[mask])
    try:
        raise PoolTimeoutError(SECRET)
    except PoolTimeoutError:
        limits.log.exception("step %d: %s", 1, SECRET)
    limits.log.debug("not at this level: %s", SECRET)
    assert "step 1: ***" in caplog.text and "PoolTimeoutError: ***" in caplog.text and SECRET not in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.contract("FM-048")
@pytest.mark.parametrize("most", [1, 8, 30, 1000])
def test_a_text_is_cut_to_its_limit_whatever_that_is(most: int) -> None:
    limits = Limits(max_output_bytes=1, max_error_bytes=most)
    for text in ("é" * 5000, "x" * 5000):
        for cut in (limits.message(text), limits.traceback(text)):
            assert len(cut.encode()) <= max(most, len(CUT.encode()) + 1)
    assert limits.message("x" * min(most, 3)) == limits.traceback("x" * min(most, 3)) == "x" * min(most, 3)
