"""Settle: outcomes are written many at a time, each once, whatever happens to the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import factories
import psycopg
import pytest
from factories import SQL, deliver, engine, read, state, take, until
from proxy import Proxy

from cyclone import db, embedded, migrate, settle
from cyclone.context import Context
from cyclone.errors import ConnectError
from cyclone.model import Claimed, Failure, Outcome, Verb
from cyclone.registry import step
from cyclone.states import ErrorKind

Conn = psycopg.Connection[Any]

FAILURE = Failure(ErrorKind.RETRYABLE, "boom", "Traceback: boom")
DISCARD = Failure(ErrorKind.PERMANENT, "no", "Traceback: no")


async def claimed(dsn: str, conn: Conn, count: int) -> list[Claimed]:
    """This many steps, running under one claim of a life that is alive."""
    factories.steps(conn, count)
    async with engine(dsn) as own:
        found = await take(own, factories.life(conn), room=count)
    assert len(found) == count
    return found


def done(step: Claimed, output: str | None = "1") -> Outcome:
    return Outcome(step, Verb.COMPLETE, output)


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as proxy:
        yield proxy


@pytest.mark.contract("C1", "C6", "R3", "R23", "R31")
async def test_every_sort_of_outcome_in_one_batch(dsn: str, conn: Conn) -> None:
    steps = await claimed(dsn, conn, 8)
    retried, retried_now, discarded, snoozed, released, unstarted, completed, action = steps
    settled = await deliver(
        dsn,
        Outcome(retried, Verb.RETRY, delay_s=60.0, failure=FAILURE),
        Outcome(retried_now, Verb.RETRY, delay_s=0.0, failure=FAILURE),
        Outcome(discarded, Verb.DISCARD, failure=DISCARD),
        Outcome(snoozed, Verb.SNOOZE, delay_s=60.0),
        Outcome(released, Verb.RELEASE),
        Outcome(unstarted, Verb.RELEASE, called=False),
        done(completed, '{"a": [1, null]}'),
        done(action, None),
    )
    assert [certain for _, certain in settled] == [True] * 8
    columns = ("state", "attempts", "resume", "snoozes", "error_kind")
    assert read(conn, retried.id, *columns) == ("scheduled", 1, False, 0, "retryable")
    assert read(conn, retried_now.id, *columns) == ("available", 1, False, 0, "retryable")
    assert read(conn, discarded.id, *columns) == ("discarded", 1, False, 0, "permanent")
    assert read(conn, snoozed.id, *columns) == ("scheduled", 1, True, 1, None)
    assert read(conn, released.id, *columns) == ("available", 1, True, 0, None)
    assert read(conn, unstarted.id, *columns) == ("available", 0, False, 0, None)
    assert read(conn, completed.id, "state", "output") == ("completed", {"a": [1, None]})
    assert read(conn, action.id, "state", "output IS NULL") == ("completed", True)
    for one in (retried, snoozed):
        assert read(conn, one.id, "due_at - now() BETWEEN interval '55 seconds' AND interval '60 seconds'")
    assert factories.errors(conn, retried.id) == [(1, "retryable", "boom")]
    assert factories.errors(conn, discarded.id) == [(1, "permanent", "no")]


@pytest.mark.contract("F4", "E13")
async def test_a_step_given_back_unstarted_is_as_it_was(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, attempts=2, resume=True)
    before = read(conn, made, "attempts", "resume", "reclaims", "snoozes", "error")
    async with engine(dsn) as own:
        for _ in range(3):
            (got,) = await take(own, factories.life(conn))
            assert got.attempt == 2
            await deliver(dsn, Outcome(got, Verb.RELEASE, called=False))
    assert read(conn, made, "attempts", "resume", "reclaims", "snoozes", "error") == before


# Refused


@pytest.mark.contract("E9", "FM-003", "FM-014", "FM-015")
@pytest.mark.parametrize(
    "outcome",
    [
        lambda step: done(step),
        lambda step: Outcome(step, Verb.RETRY, delay_s=0.0, failure=FAILURE),
        lambda step: Outcome(step, Verb.DISCARD, failure=DISCARD),
        lambda step: Outcome(step, Verb.SNOOZE, delay_s=60.0),
        lambda step: Outcome(step, Verb.RELEASE),
    ],
    ids=["complete", "retry", "discard", "snooze", "release"],
)
async def test_nothing_a_stale_worker_sends_changes_anything(dsn: str, conn: Conn, outcome: Any) -> None:
    first = factories.life(conn)
    factories.step(conn)
    async with engine(dsn) as own:
        (stale,) = await take(own, first)
        factories.end_life(conn, first)
        await factories.sweep_all(dsn)
        assert await deliver(dsn, outcome(stale)) == [(outcome(stale), True)]
        assert read(conn, stale.id, "state", "reclaims") == ("available", 1)
        (current,) = await take(own, factories.life(conn))
        before = read(conn, stale.id, "*")
        await deliver(dsn, outcome(stale))
        assert read(conn, stale.id, "*") == before
        await deliver(dsn, done(current, '"the current one"'))
        before = read(conn, stale.id, "*")
        await deliver(dsn, outcome(stale))
    assert read(conn, stale.id, "*") == before
    assert read(conn, stale.id, "state", "output") == ("completed", "the current one")
    assert factories.count(conn, "cyclone_errors") == 0


@pytest.mark.contract("FM-012")
async def test_a_result_whose_step_is_gone_is_dropped_and_the_rest_of_the_batch_is_not(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    steps = await claimed(dsn, conn, 3)
    conn.execute("DELETE FROM cyclone_steps WHERE id = %s", (steps[1].id,))
    settled = await deliver(dsn, *map(done, steps))
    assert {(outcome.step.id, certain) for outcome, certain in settled} == {(one.id, True) for one in steps}
    assert [state(conn, one.id) for one in steps] == ["completed", None, "completed"]
    assert f"step {steps[1].id}" in caplog.text and "gone" in caplog.text


# One outcome is to blame


@pytest.mark.contract("C6", "FM-032", "FM-050")
async def test_one_bad_output_among_a_hundred_costs_the_others_nothing(dsn: str, conn: Conn) -> None:
    steps = await claimed(dsn, conn, 100)
    bad = steps[57]
    settled = await deliver(dsn, *(done(one, r'"\u0000"' if one is bad else "1") for one in steps))
    assert sorted(outcome.step.id for outcome, _ in settled) == [one.id for one in steps]
    assert read(conn, bad.id, "state", "error_kind", "output") == ("discarded", "permanent", None)
    assert "cannot be stored" in read(conn, bad.id, "error")
    assert factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 99


@pytest.mark.contract("C6", "FM-032")
async def test_a_trigger_that_refuses_some_steps_costs_the_others_nothing(dsn: str, conn: Conn) -> None:
    steps = await claimed(dsn, conn, 20)
    bad = {steps[3].id, steps[4].id, steps[19].id}
    conn.execute(
        f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.state = 'completed' AND NEW.id IN ({", ".join(map(str, bad))}) THEN
                RAISE EXCEPTION 'not this one';
            END IF;
            RETURN NEW;
        END $$""".encode()
    )
    conn.execute("CREATE TRIGGER refuse BEFORE UPDATE ON cyclone_steps FOR EACH ROW EXECUTE FUNCTION refuse()")
    settled = await deliver(dsn, *map(done, steps))
    assert sorted(outcome.step.id for outcome, _ in settled) == [one.id for one in steps]
    for one in steps:
        assert state(conn, one.id) == ("discarded" if one.id in bad else "completed")
    assert "not this one" in read(conn, steps[3].id, "error")


@pytest.mark.contract("C6", "FM-031", "FM-032")
async def test_a_batch_that_is_interrupted_while_it_is_halved_tells_of_each_outcome_once(dsn: str, conn: Conn) -> None:
    steps = await claimed(dsn, conn, 8)
    # Step 2 is to blame, so the batch is halved; at step 6, after the first half was written, the connection breaks.
    conn.execute("CREATE SEQUENCE breaks")
    conn.execute(
        f"""CREATE FUNCTION disturb() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.state = 'completed' AND NEW.id = {steps[2].id} THEN
                RAISE EXCEPTION 'not this one';
            END IF;
            IF NEW.state = 'completed' AND NEW.id = {steps[6].id} AND nextval('breaks') = 2 THEN
                PERFORM pg_terminate_backend(pg_backend_pid());
            END IF;
            RETURN NEW;
        END $$""".encode()
    )
    conn.execute("CREATE TRIGGER disturb BEFORE UPDATE ON cyclone_steps FOR EACH ROW EXECUTE FUNCTION disturb()")
    conn.execute("SELECT nextval('breaks')")
    settled = await deliver(dsn, *map(done, steps))
    assert sorted(outcome.step.id for outcome, _ in settled) == [one.id for one in steps]
    assert [state(conn, one.id) for one in steps] == ["discarded" if one is steps[2] else "completed" for one in steps]
    assert factories.count(conn, "cyclone_errors") == 1


# The connection


@pytest.mark.contract("FM-031")
@pytest.mark.parametrize("statement", [b"SET state = 'completed'", b"SET state = d.state"])
async def test_when_the_reply_to_a_batch_is_lost_it_is_sent_again_and_recorded_once(
    dsn: str, conn: Conn, proxy: Proxy, statement: bytes
) -> None:
    steps = await claimed(dsn, conn, 6)
    dropped = proxy.drop_next_reply_after(statement)
    settled = await deliver(
        proxy.dsn,
        *map(done, steps[:3]),
        Outcome(steps[3], Verb.RETRY, delay_s=60.0, failure=FAILURE),
        Outcome(steps[4], Verb.SNOOZE, delay_s=60.0),
        Outcome(steps[5], Verb.DISCARD, failure=DISCARD),
    )
    assert dropped.is_set()
    assert sorted(outcome.step.id for outcome, _ in settled) == [one.id for one in steps]
    assert [state(conn, one.id) for one in steps] == ["completed"] * 3 + ["scheduled", "scheduled", "discarded"]
    assert (read(conn, steps[4].id, "snoozes"), factories.count(conn, "cyclone_errors")) == (1, 2)


@pytest.mark.contract("FM-031")
async def test_when_the_reply_is_lost_and_the_step_has_gone_on_meanwhile_the_second_send_is_refused(
    dsn: str, conn: Conn
) -> None:
    (stale,) = await claimed(dsn, conn, 1)
    outcome = Outcome(stale, Verb.RETRY, delay_s=0.0, failure=FAILURE)
    await deliver(dsn, outcome)
    async with engine(dsn) as own:
        (current,) = await take(own, factories.life(conn))
        assert await deliver(dsn, outcome) == [(outcome, True)]
        assert read(conn, stale.id, "state", "claim", "attempts") == ("running", current.claim, 2)
    assert factories.count(conn, "cyclone_errors") == 1


async def test_after_the_lease_is_gone_outcomes_are_dropped_with_a_line_in_the_log(
    dsn: str, conn: Conn, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    steps = await claimed(dsn, conn, 3)
    settled: list[tuple[Outcome, bool]] = []
    settler = settle.Settler(
        SQL,
        lambda: db.connect(proxy.dsn, application_name="test"),
        batch=500,
        linger_s=0,
        holds_lease=lambda: False,
        on_settled=lambda outcomes, certain: settled.extend((one, certain) for one in outcomes),
    )
    for one in steps:
        settler.add(done(one))
    settler.stop()
    proxy.close()
    await settler.run()
    assert [certain for _, certain in settled] == [False] * 3
    assert "3 outcomes are dropped" in caplog.text


@pytest.mark.contract("FM-029")
async def test_a_settler_without_lease_and_database_does_not_spin(dsn: str, conn: Conn) -> None:
    tries = 0

    async def connect() -> Any:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        raise ConnectError("away")

    settler = settle.Settler(
        SQL, connect, batch=500, linger_s=0, holds_lease=lambda: False, on_settled=lambda outcomes, certain: None
    )
    settler.close_claim(1)
    running = asyncio.create_task(settler.run())
    await asyncio.sleep(0.3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert 1 <= tries <= 5


# Claims


@pytest.mark.contract("C1")
async def test_the_row_of_a_claim_goes_with_its_last_step(dsn: str, conn: Conn) -> None:
    release = asyncio.Event()

    @step("noop")
    async def handler(ctx: Context, input: bool) -> None:
        if input:
            await release.wait()

    factories.steps(conn, 3, input=False)
    last = factories.step(conn, input=True)
    async with factories.worker(dsn, handler):
        await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 3)
        assert factories.count(conn, "cyclone_claims") == 1
        release.set()
        await until(lambda: state(conn, last) == "completed" and not factories.count(conn, "cyclone_claims"))


async def test_a_claim_that_somebody_has_locked_is_left_for_the_sweeper(dsn: str, conn: Conn) -> None:
    made = factories.step(conn)
    async with factories.worker(dsn, factories.noop()):
        await until(lambda: state(conn, made) == "completed")
    held = factories.step(conn, "noop", "running")
    async with engine(dsn) as own:
        with conn.transaction():
            conn.execute("SELECT FROM cyclone_claims FOR UPDATE")
            params = {"ids": [held.id], "claims": [held.claim], "outputs": ["1"], "closed": [held.claim]}
            cur = await own.execute(SQL["complete_steps"], {**params, "step_over": False, "now": None})
            assert await cur.fetchall() == []
        assert (state(conn, held), factories.count(conn, "cyclone_claims")) == ("completed", 1)
        from cyclone import sweep

        await sweep.tidy(own, SQL, now=await factories.later(own, factories.FAR))
    assert factories.count(conn, "cyclone_claims") == 0


# Somebody else's locks


@pytest.mark.contract("C6", "FM-032", "FM-073")
@pytest.mark.parametrize("notify", [True, False])
async def test_a_users_open_transaction_on_one_step_delays_only_that_one(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture, notify: bool
) -> None:
    release = asyncio.Event()
    entered = 0

    @step("noop")
    async def handler(ctx: Context, input: Any) -> int:
        nonlocal entered
        entered += 1
        await release.wait()
        return 1

    made = factories.steps(conn, 20)
    locked = made[7]
    async with factories.worker(dsn, handler, notify=notify):
        await until(lambda: entered == 20)
        with psycopg.connect(dsn) as other:
            other.execute("SELECT FROM cyclone_steps WHERE id = %s FOR UPDATE", (locked,))
            release.set()
            await until(lambda: factories.count(conn, "cyclone_steps WHERE state = 'completed'") == 19, 3)
            assert state(conn, locked) == "running"
            # Not even the claim's row is lost, which the sweeper would need.
            assert factories.count(conn, "cyclone_claims") == 1
        await until(lambda: state(conn, locked) == "completed")
        await until(lambda: not factories.count(conn, "cyclone_claims"))
    assert entered == 20
    assert factories.count(conn, "cyclone_errors") == 0
    assert "failed and is tried again" not in caplog.text


@pytest.mark.contract("FM-030", "F6")
async def test_behind_a_pooler_no_setting_stays_on_the_session_and_nobody_waits_for_a_lock(
    dsn: str, conn: Conn
) -> None:
    steps = await claimed(dsn, conn, 3)
    settled: list[int] = []
    async with engine(dsn) as shared:

        class Shared:  # what a pooler makes of a connection: closing gives it to the next
            def __getattr__(self, name: str) -> Any:
                return getattr(shared, name)

            async def close(self) -> None:
                pass

        async def connect() -> Any:
            return Shared()

        settler = settle.Settler(
            SQL, connect, batch=500, linger_s=0, pooler=True, holds_lease=lambda: True,
            on_settled=lambda outcomes, certain: settled.extend(one.step.id for one in outcomes),
        )  # fmt: skip
        for one in steps:
            settler.add(done(one))
        settler.stop()
        with psycopg.connect(dsn) as other:
            other.execute("SELECT FROM cyclone_steps WHERE id = %s FOR UPDATE", (steps[1].id,))
            running = asyncio.create_task(settler.run())
            await until(lambda: len(settled) == 2)
        await running
        assert settled == [steps[0].id, steps[2].id, steps[1].id]
        assert await (await shared.execute("SHOW lock_timeout")).fetchone() == ("0",)


# A server that turns read-only


@pytest.mark.contract("FM-029", "M9")
async def test_a_server_that_turns_read_only_keeps_finished_results_until_it_is_writable_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()
    entered: list[str] = []

    @step("noop")
    async def handler(ctx: Context, input: Any) -> str:
        entered.append(ctx.run_id)
        if input:
            tx = await ctx.completion_tx()
            await tx.execute("SELECT 1")
        await release.wait()
        return "done"

    with embedded.Server(18, {"fsync": "off"}) as server:
        migrate.up(server.dsn(), schema="public")
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            made = [factories.step(conn, input=False) for _ in range(5)]
            transactional = factories.step(conn, input=True)
            async with factories.worker(server.dsn(), handler), factories.sweeper(server.dsn()):
                await until(lambda: len(entered) == 6)
                conn.execute("ALTER SYSTEM SET default_transaction_read_only = on")
                conn.execute("SELECT pg_reload_conf()")
                await until(lambda: conn.execute("SHOW transaction_read_only").fetchone() == ("on",))
                release.set()
                # Growing pauses, and nothing is lost meanwhile.
                slow = (
                    "claiming was interrupted and goes on in 0.8 s",
                    "sweeping was interrupted and goes on in 0.8 s",
                )
                await until(
                    lambda: all(text in caplog.text for text in (*slow, "outcomes failed and is tried again in 0.8 s"))
                )
                assert caplog.text.count("listening was interrupted") < 10
                assert {state(conn, one) for one in (*made, transactional)} == {"running"}
                conn.execute("SET default_transaction_read_only = off")
                conn.execute("ALTER SYSTEM RESET default_transaction_read_only")
                conn.execute("SELECT pg_reload_conf()")
                await until(lambda: {state(conn, one) for one in (*made, transactional)} == {"completed"})
            # The plain results were kept; the transaction could not commit, spent no attempt and ran again.
            assert [read(conn, one, "attempts") for one in (*made, transactional)] == [1] * 6
            assert sorted(entered) == sorted([*(one.run_id for one in made), *[transactional.run_id] * 2])
            assert factories.count(conn, "cyclone_errors") == 0
