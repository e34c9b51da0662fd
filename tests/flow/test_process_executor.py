"""Execute in a process of its own: a handler that can be killed, and whose death costs nobody else anything."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories
import process_steps as steps
import psycopg
import pytest
from factories import errors, read, state, until

import cyclone
from cyclone import subprocesses
from cyclone.context import ProcessContext, SyncContext
from cyclone.errors import InvalidOptionError, InvalidOptionTypeError
from cyclone.registry import step

Conn = psycopg.Connection[Any]

# An interpreter has to start first.
ended = functools.partial(factories.ended, limit=30.0)
alone = functools.partial(factories.alone, limit=30.0)


async def told(path: Path) -> str:
    """Waits for what a handler writes into a file."""
    await until(path.exists)
    return await until(path.read_text)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# What a handler is given, and what it returns


@pytest.mark.contract("R45", "C1")
async def test_a_handler_runs_in_another_process_and_its_output_is_stored(dsn: str, conn: Conn, tmp_path: Path) -> None:
    doubled = factories.step(conn, "double", input={"id": "a", "cents": 21})
    acted = factories.step(conn, "act", input=str(tmp_path / "pid"))
    async with factories.worker(dsn, steps.double, steps.act):
        await ended(conn, doubled, acted)
    assert read(conn, doubled, "state", "output", "attempts") == ("completed", {"id": "a", "cents": 42}, 1)
    assert read(conn, acted, "state", "output IS NULL") == ("completed", True)
    pid = int((tmp_path / "pid").read_text())
    assert pid != os.getpid() and gone(pid)


@pytest.mark.contract("R45", "K1")
async def test_the_context_of_a_process_says_which_step_this_is(
    dsn: str, conn: Conn, capfd: pytest.CaptureFixture[str]
) -> None:
    columns = {"attempts": 3, "max_attempts": 4, "snoozes": 2, "reclaims": 1, "tags": ["t"], "metadata": {"m": 1}}
    made = await alone(dsn, conn, steps.who, **columns)
    assert read(conn, made, "output") == {
        "run_id": made.run_id,
        "node": "who",
        "attempt": 4,
        "max_attempts": 4,
        "is_last_attempt": True,
        "idempotency_key": f"{made.id}:who",
        "key": f"{made.id}:who:receipt:2",
        "reclaims": 1,
        "snoozes": 2,
        "queue": "default",
        "tags": ["t"],
        "metadata": {"m": 1},
        "aware": True,
        "has_tx": False,
    }
    assert f"seen [run {made.id} node who attempt 4]" in capfd.readouterr().err


@pytest.mark.contract("E16")
async def test_input_that_is_none_fails_as_invalid_without_a_process(dsn: str, conn: Conn) -> None:
    made = await alone(dsn, conn, steps.double, {"id": "a", "cents": "many"})
    assert read(conn, made, "state", "error_kind", "attempts") == ("discarded", "invalid_input", 0)


@pytest.mark.contract("R45")
async def test_processes_are_used_again_and_no_more_run_than_are_needed(dsn: str, conn: Conn) -> None:
    made: list[factories.Made] = []
    async with factories.worker(dsn, steps.pid, steps.pid_limited):
        for kind in ("pid", "pid", "pid_limited", "pid_limited", "pid"):
            made.append(factories.step(conn, kind))
            await ended(conn, made[-1])
    first, second, limited, again, last = (read(conn, one, "output") for one in made)
    assert first == second
    assert limited == again != first
    # With one core there is one process, which had to make room in between.
    assert last == first or len(os.sched_getaffinity(0)) == 1


@pytest.mark.contract("R45", "FM-023")
async def test_a_process_gets_nothing_of_the_worker_but_its_channel_and_what_it_starts_gets_not_even_that(
    dsn: str, conn: Conn
) -> None:
    made = await alone(dsn, conn, steps.look)
    seen = read(conn, made, "output")
    assert len([target for target in seen["descriptors"].values() if "socket:" in target]) == 1
    assert seen["descriptors"]["0"] == os.devnull
    assert seen["below"] == 0
    assert seen["path"] == [one for one in sys.path if isinstance(one, str)]
    assert len(seen["argv"]) == 1


# Whatever a handler raises


@pytest.mark.contract("R45", "M6", "M7", "FM-046", "FM-047")
async def test_anything_a_handler_raises_in_its_process_is_a_failed_attempt(dsn: str, conn: Conn) -> None:
    names = [
        "RuntimeError", "SystemExit", "KeyboardInterrupt", "MemoryError", "CancelledError", "GeneratorExit",
        "Cancelled", "Silent", "Broken",
    ]  # fmt: skip
    made = {name: factories.step(conn, "fail", input=name) for name in names}
    async with factories.worker(dsn, steps.fail):
        await ended(conn, *made.values())
    for name, one in made.items():
        assert (name, *read(conn, one, "state", "attempts", "error_kind")) == (name, "scheduled", 1, "retryable")
        ((message, trace),) = conn.execute(
            "SELECT message, traceback FROM cyclone_errors WHERE step = %s", (one.id,)
        ).fetchall()
        assert name in message and name in trace
        assert "process_steps.py" in trace and "def fail" not in message


@pytest.mark.contract("FM-046", "FM-048", "FM-051", "R47")
async def test_errors_and_outputs_of_any_sort_come_out_of_a_process(dsn: str, conn: Conn) -> None:
    names = ["recursion", "huge", "text", "output", "large output", "group"]
    made = {name: factories.step(conn, "fail", input=name) for name in names}
    async with factories.worker(dsn, steps.fail, max_error_bytes=4000):
        await ended(conn, *made.values())
    error = {name: read(conn, one, "error") for name, one in made.items()}
    kinds = {name: read(conn, one, "state", "error_kind") for name, one in made.items()}
    assert {kinds.pop("output"), kinds.pop("large output")} == {("discarded", "permanent")}
    assert set(kinds.values()) == {("scheduled", "retryable")}
    assert "RecursionError" in error["recursion"]
    assert 3900 < len(error["huge"].encode()) <= 4000 and "[cut]" in error["huge"]
    assert error["text"] == r"RuntimeError: nul \x00 and \ud800 alone"
    assert "lone surrogate" in error["output"] and "max_output_bytes" in error["large output"]
    assert "many (2 sub-exceptions)" in error["group"]
    traces = dict(conn.execute("SELECT step, traceback FROM cyclone_errors").fetchall())
    assert "ValueError: one" in traces[made["group"].id] and "KeyError: 'two'" in traces[made["group"].id]
    assert traces[made["huge"].id].startswith("Traceback") and "in fail" in traces[made["huge"].id]
    assert max(len(trace.encode()) for trace in traces.values()) <= 4000


@pytest.mark.contract("R22", "R31", "R32", "R33")
async def test_what_steers_a_step_steers_it_from_a_process_too(dsn: str, conn: Conn) -> None:
    names = ["permanent", "snooze", "retry after", "Mapped"]
    made = {name: factories.step(conn, "fail", input=name) for name in names}
    async with factories.worker(dsn, steps.fail):
        await ended(conn, *made.values())
    assert read(conn, made["permanent"], "state", "error_kind", "error") == ("discarded", "permanent", "no use")
    assert read(conn, made["snooze"], "state", "snoozes", "attempts") == ("scheduled", 1, 1)
    days = "round(extract(epoch FROM due_at - now()) / 86400)::int"
    assert read(conn, made["snooze"], days) == 1
    assert read(conn, made["retry after"], "state", "attempts", days) == ("scheduled", 1, 2)
    assert read(conn, made["Mapped"], "state", "error_kind") == ("discarded", "permanent")
    ((trace,),) = conn.execute(
        "SELECT traceback FROM cyclone_errors WHERE step = %s", (made["permanent"].id,)
    ).fetchall()
    assert "the cause" in trace


@pytest.mark.contract("R20", "R21")
async def test_a_backoff_gets_the_exception_itself_and_one_that_fails_is_reported_by_the_worker(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = factories.step(conn, "odd", input="fine"), factories.step(conn, "odd", input="broken")
    async with factories.worker(dsn, steps.odd):
        await ended(conn, good, bad)
    assert read(conn, good, "round(extract(epoch FROM due_at - now()) / 86400)::int") == 10
    assert read(conn, bad, "state", "due_at < now() + interval '1 hour'") == ("scheduled", True)
    assert "backoff raised ValueError" in caplog.text


# The death of a process


@pytest.mark.contract("R45", "FM-021", "FM-022", "E12", "E13")
async def test_a_process_that_dies_fails_its_attempt_and_harms_nobody_else(
    dsn: str, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    hows = {
        "segfault": "SIGSEGV",
        "exit": "exit code 9",
        "kill": "SIGKILL",
        "closed": "SIGKILL",
        "garbage": "no reply",
    }
    made = {how: factories.step(conn, "die", input=how) for how in hows}
    neighbours = [factories.step(conn, kind, input={"id": "a", "cents": 1}) for kind in ("double", "noop") * 5]
    async with factories.worker(dsn, steps.die, steps.double, factories.noop()):
        await ended(conn, *made.values(), *neighbours)
    for how, words in hows.items():
        found = read(conn, made[how], "state", "attempts", "reclaims", "error_kind")
        assert (how, *found) == (how, "scheduled", 1, 0, "crashed")
        ((attempt, kind, message),) = errors(conn, made[how])
        assert (attempt, kind) == (1, "crashed") and words in message
        assert any(str(made[how].id) in line and message in line for line in caplog.messages)
    assert {read(conn, one, "state", "attempts") for one in neighbours} == {("completed", 1)}
    assert factories.count(conn, "cyclone_lives WHERE end_reason IS DISTINCT FROM 'stopped'") == 0


@pytest.mark.contract("R45", "R12")
async def test_a_death_in_the_last_attempt_discards(dsn: str, conn: Conn) -> None:
    made = await alone(dsn, conn, steps.die, "exit", max_attempts=1)
    assert read(conn, made, "state", "error_kind", "attempts") == ("discarded", "crashed", 1)


@pytest.mark.contract("R45", "FM-023")
@pytest.mark.parametrize("how", ["returns", "terminates", "exits"])
async def test_copies_that_a_handler_forks_neither_answer_for_it_nor_hide_its_death(
    dsn: str, conn: Conn, how: str
) -> None:
    made = await alone(dsn, conn, steps.fork, how)
    if how == "exits":
        assert read(conn, made, "state", "error_kind") == ("scheduled", "crashed")
        assert "exit code 3" in read(conn, made, "error")
    else:
        assert state(conn, made) == "completed"
        assert how == "returns" or read(conn, made, "output") == -signal.SIGTERM


@pytest.mark.contract("R45")
async def test_a_process_that_died_while_nothing_ran_in_it_costs_no_attempt(dsn: str, conn: Conn) -> None:
    async with factories.worker(dsn, steps.pid):
        first = factories.step(conn, "pid")
        await ended(conn, first)
        os.kill(read(conn, first, "output"), signal.SIGKILL)
        await until(lambda: gone(read(conn, first, "output")))
        second = factories.step(conn, "pid")
        await ended(conn, second)
    assert read(conn, second, "state", "attempts") == ("completed", 1)


# Stopping a handler


@pytest.mark.contract("R43", "R45", "FM-087")
async def test_an_endless_loop_fails_as_timeout_and_the_worker_keeps_serving(dsn: str, conn: Conn) -> None:
    made = factories.step(conn, "spin")
    async with factories.worker(dsn, steps.spin, factories.noop(), concurrency=2):
        behind = [factories.step(conn, "noop") for _ in range(20)]
        await ended(conn, made, *behind)
        after = factories.step(conn, "noop")
        await ended(conn, after)
    assert read(conn, made, "state", "error_kind", "attempts") == ("scheduled", "timeout", 1)
    assert errors(conn, made) == [(1, "timeout", "the attempt took longer than its timeout of 1 s")]
    ((trace,),) = conn.execute("SELECT traceback FROM cyclone_errors").fetchall()
    assert "in spin" in trace  # where it was when it was stopped
    assert {state(conn, one) for one in (*behind, after)} == {"completed"}


@pytest.mark.contract("R45", "FM-023", "FM-087")
async def test_a_handler_that_ignores_its_timeout_is_killed_with_what_it_has_started(
    dsn: str, conn: Conn, tmp_path: Path
) -> None:
    made = factories.step(conn, "deaf", input=str(tmp_path / "pids"))
    after = factories.step(conn, "pid")
    async with factories.worker(dsn, steps.deaf, steps.pid, concurrency=1):
        await ended(conn, made, after)
        killed = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        await until(lambda: all(map(gone, killed)))
        assert read(conn, after, "output") not in killed
    assert read(conn, made, "state", "error_kind", "attempts") == ("scheduled", "timeout", 1)


@pytest.mark.contract("R45")
async def test_a_handler_that_returns_after_its_timeout_has_failed(dsn: str, conn: Conn) -> None:
    made = await alone(dsn, conn, steps.stays)
    assert read(conn, made, "state", "error_kind", "output") == ("scheduled", "timeout", None)


@pytest.mark.contract("R46")
async def test_the_time_to_start_a_process_is_no_time_of_the_handler(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, late = threading.Event(), threading.Event()
    child = subprocesses.Child

    def slow(memory_limit: int | None) -> subprocesses.Child:
        started.set()
        assert late.wait(20)
        return child(memory_limit)

    monkeypatch.setattr(subprocesses, "Child", slow)
    made = factories.step(conn, "polite", input=str(tmp_path / "pid"), timeout_s=600)
    async with factories.worker(dsn, steps.polite) as worker:
        await until(started.is_set)
        execution = worker._executions[made.id]
        assert execution._timer is None
        late.set()
        await told(tmp_path / "pid")
        await until(lambda: execution._timer is not None)
        (tmp_path / "go").touch()
        await ended(conn, made)
    assert read(conn, made, "state", "error") == ("completed", None)


@pytest.mark.contract("R36", "R45", "FM-063")
async def test_a_cancel_order_stops_a_handler_which_may_clean_up(dsn: str, conn: Conn, tmp_path: Path) -> None:
    made = factories.step(conn, "polite", input=str(tmp_path / "pid"))
    async with factories.worker(dsn, steps.polite):
        pid = int(await told(tmp_path / "pid"))
        factories.cancel(conn, made)
        assert await told(tmp_path / "stopped") == made.run_id
        await until(lambda: gone(pid))  # it is not used again
    assert read(conn, made, "state", "attempts") == ("cancelled", 1)


@pytest.mark.contract("R45", "E9")
async def test_a_lost_lease_stops_the_handler(dsn: str, conn: Conn, tmp_path: Path) -> None:
    made = factories.step(conn, "polite", input=str(tmp_path / "pid"))
    async with factories.worker(dsn, steps.polite, lease=1.5, drain_timeout=0) as worker:
        await told(tmp_path / "pid")
        factories.end_life(conn, worker._page.life)
        assert await told(tmp_path / "stopped") == made.run_id
    assert read(conn, made, "output", "error") == (None, None)


@pytest.mark.contract("R45", "D3")
async def test_a_drain_lets_handlers_finish_and_stops_them_past_its_limit(dsn: str, conn: Conn, tmp_path: Path) -> None:
    for name, limit in (("short", 0.1), ("long", 60)):
        folder = tmp_path / name
        folder.mkdir()
        made = factories.step(conn, "polite", input=str(folder / "pid"))
        async with factories.worker(dsn, steps.polite, drain_timeout=limit) as worker:
            pid = int(await told(folder / "pid"))
            stopped = worker.stop()
            # A service manager tells every process of a service: it is the worker's word that counts.
            os.kill(pid, signal.SIGTERM)
            if name == "long":
                await until(lambda worker=worker: worker._page.state.name == "DRAINING")
                (folder / "go").touch()
            await stopped
        assert gone(pid)
        if name == "long":
            assert read(conn, made, "state", "output") == ("completed", "went")
        else:
            assert (folder / "stopped").exists()
            assert read(conn, made, "state", "attempts", "error") == ("available", 1, None)
            factories.cancel(conn, made)


@pytest.mark.contract("R45", "FM-023")
async def test_a_worker_that_stops_leaves_no_process_behind_whatever_its_handlers_do(
    dsn: str, conn: Conn, tmp_path: Path
) -> None:
    made = factories.step(conn, "deaf", input=str(tmp_path / "pids"), timeout_s=600)
    async with factories.worker(dsn, steps.deaf, drain_timeout=0):
        await told(tmp_path / "pids")
    killed = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    await until(lambda: all(map(gone, killed)))
    assert read(conn, made, "state", "attempts") == ("available", 1)


@pytest.mark.contract("R45", "FM-025")
async def test_a_process_leaves_when_its_worker_is_gone(conn: Conn, tmp_path: Path) -> None:
    program = (
        "import sys; sys.path[:] = sys.argv[2:]\n"
        "import os, process_steps as steps, msgspec\n"
        "from cyclone import subprocesses\n"
        "from cyclone.model import Claimed\n"
        "from datetime import datetime, timezone\n"
        "step = steps.spin\n"
        "input = msgspec.json.encode(sys.argv[1]).decode()\n"
        "claimed = Claimed(1, 1, 1, 'spin', 'spin', 1, 'default', input, 1, 5, 0, 0, None, False,\n"
        "    None, None, datetime.now(timezone.utc), None, None, None, None, 0.0)\n"
        "children = subprocesses.Children([step], 1)\n"
        "with children.child(step) as child:\n"
        "    child.call(children.call(claimed, step, 1000), lambda: None)\n"
    )
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path / "pid"), *sys.path)
    pid = int(await told(tmp_path / "pid"))
    assert not gone(pid)
    worker.kill()
    await worker.wait()
    await until(lambda: gone(pid))


# Memory


@pytest.mark.contract("R45")
async def test_a_handler_above_its_memory_limit_fails_and_one_below_does_not(dsn: str, conn: Conn) -> None:
    below, above, again = (factories.step(conn, "eat", input=size) for size in (100, 300, 100))
    crumbs, free = factories.step(conn, "nibble"), factories.step(conn, "pid")
    async with factories.worker(dsn, steps.eat, steps.nibble, steps.pid):
        await ended(conn, below, above, again, crumbs, free)
    assert read(conn, below, "state", "output") == ("completed", 100 << 20)
    assert read(conn, again, "state", "output") == ("completed", 100 << 20)
    for one in (above, crumbs):
        found = read(conn, one, "state", "attempts", "error_kind", "error")
        assert found == ("scheduled", 1, "retryable", "MemoryError")
    assert state(conn, free) == "completed"


# Declaring


@pytest.mark.contract("R45", "R16")
def test_a_memory_limit_is_checked_when_the_step_is_declared() -> None:
    def handler(ctx: ProcessContext) -> None: ...

    for given, bytes_ in (("512MiB", 512 << 20), ("1GiB", 1 << 30), (100_000_000, 100_000_000), (None, None)):
        declared = step("a", executor="process", memory_limit=given)(handler)
        assert declared.settings.memory_limit == bytes_
        assert isinstance(declared, cyclone.ProcessStep) and not declared.is_async
        assert cyclone.action("a", executor="process", memory_limit=given)(handler).action
    for wrong in ("512MB", "-1", "", 0, -5, "1MiB"):
        with pytest.raises(InvalidOptionError, match="memory_limit"):
            step("a", executor="process", memory_limit=wrong)(handler)
    for odd in (True, 1.5, b"1GiB"):
        with pytest.raises(InvalidOptionTypeError, match="memory_limit"):
            step("a", executor="process", memory_limit=odd)(handler)  # type: ignore[arg-type]


@pytest.mark.contract("R45")
def test_memory_limit_needs_a_process_and_a_process_a_def() -> None:
    def sync(ctx: SyncContext) -> None: ...

    async def coroutine(ctx: cyclone.Context) -> None: ...

    options: dict[str, Any] = {"memory_limit": "512MiB"}
    for executor in ("auto", "thread"):
        with pytest.raises(InvalidOptionError, match="memory_limit"):
            step("a", executor=executor, **options)(sync)
    with pytest.raises(InvalidOptionError, match="write def"):
        step("a", executor="process")(coroutine)  # type: ignore[type-var]


@pytest.mark.contract("R45")
async def test_a_handler_that_cannot_be_imported_is_refused_when_the_worker_is_made(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @step("local", executor="process")
    def local(ctx: ProcessContext) -> None: ...

    with pytest.raises(InvalidOptionError, match=r"'local'.*top of a module"):
        cyclone.Worker(dsn, factories.registered(local))
    main = sys.modules["__main__"]
    monkeypatch.setattr(local.fn, "__module__", "__main__")
    monkeypatch.setattr(main, "local", local, raising=False)
    with pytest.raises(InvalidOptionError, match="the program that was started"):
        cyclone.Worker(dsn, factories.registered(local))


def test_a_step_is_found_where_a_module_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subprocesses.locate(steps.double) == ("process_steps", "double")
    elsewhere = step("elsewhere", executor="process")(steps.double.fn)
    monkeypatch.setattr(factories, "named", elsewhere, raising=False)
    assert subprocesses.locate(elsewhere) == ("factories", "named")


@pytest.mark.contract("R45", "FM-046")
async def test_a_handler_that_its_process_cannot_import_after_all_is_a_failed_attempt_that_says_why(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = step("elsewhere", executor="process", backoff=steps.NEVER)(steps.double.fn)
    monkeypatch.setattr(steps, "elsewhere", elsewhere, raising=False)  # in this process only
    made = await alone(dsn, conn, elsewhere, {"id": "a", "cents": 1})
    assert read(conn, made, "state", "error_kind", "attempts") == ("scheduled", "retryable", 1)
    assert "cannot import 'process_steps': AttributeError" in read(conn, made, "error")
    ((trace,),) = conn.execute("SELECT traceback FROM cyclone_errors").fetchall()
    assert "AttributeError" in trace


@pytest.mark.contract("R45", "FM-046")
async def test_a_process_that_cannot_be_started_is_a_failed_attempt(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    made = await alone(dsn, conn, steps.pid)
    assert read(conn, made, "state", "error_kind") == ("scheduled", "retryable")
    assert "cannot be started: FileNotFoundError" in read(conn, made, "error")


def test_a_process_handler_is_a_plain_function_for_unit_tests(context: Callable[[], ProcessContext]) -> None:
    assert steps.double(context(), steps.Order("a", 1)) == steps.Order("a", 2)


@pytest.fixture
def context() -> Callable[[], ProcessContext]:
    from datetime import UTC, datetime

    from cyclone.model import Claimed

    claimed = Claimed(
        1,
        1,
        1,
        "double",
        "double",
        1,
        "default",
        b"null",
        1,
        5,
        0,
        0,
        None,
        False,
        None,
        None,
        datetime.now(UTC),
        None,
        None,
        None,
        None,
        0.0,
    )
    return lambda: ProcessContext(claimed)
