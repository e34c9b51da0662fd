"""The supervisor: signals, deaths, replacement and its own end, with scripted children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from process import pools

from cyclone import board, process, supervisor
from cyclone.process import EX_BOOT, EX_REPLACE, Spec

TERM, INT, KILL, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP


def gone(pid: int) -> None:
    """Waits for the end of a process that became ours when its parent died (see conftest)."""
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], pools.LIMIT_S)[0], f"{pid} is still there"
    finally:
        os.close(descriptor)


def living(*pids: int) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# Stopping


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_stop_signal_drains_each_child_once_and_the_sweeper_last(tmp_path: Path, number: int) -> None:
    with pools.running(tmp_path, pools.looping()) as pool:
        pids = [one["pid"] for one in pool.expect("ready", 2)]
        pool.signal(number)
        assert pool.end() == 0
    assert [one["drain"] for one in pool.seen("order")] == [True, True]
    last = pool.seen("sweeper ends")[0]
    assert all(last["at"] > one["at"] for one in pool.seen("order"))
    # A clean end ends the life as well, and blames nothing.
    assert {one["life"] for one in pool.seen("buried")} == {one["life"] for one in pool.seen("ready")}
    assert all(one["executing"] == [] for one in pool.seen("buried"))
    assert not living(*pids)


def test_a_drain_waits_for_work_in_hand(tmp_path: Path) -> None:
    gate, opener = os.pipe()

    def finish(spec: Spec, drain: bool, end: asyncio.Event) -> None:
        asyncio.get_running_loop().add_reader(gate, end.set)

    with pools.running(tmp_path, pools.looping(finish), procs=1) as pool:
        (ready,) = pool.expect("ready")
        pool.signal(TERM)
        pool.expect("order", drain=True)
        assert living(ready["pid"])
        os.write(opener, b"\0")
        assert pool.end() == 0
    for end in (gate, opener):
        os.close(end)


def until_stop(spec: Spec, drain: bool, end: asyncio.Event) -> None:
    """Work that goes on and on: a drain waits for it, a stop does not."""
    if not drain:
        end.set()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with pools.running(tmp_path, pools.looping(until_stop)) as pool:
        pool.expect("ready", 2)
        pool.signal(INT)
        pool.expect("order", 2, drain=True)
        pool.signal(INT)
        assert pool.end() == 0
    assert len(pool.seen("order", drain=False)) == 2


def test_one_signal_to_the_whole_group_is_one_wish(tmp_path: Path) -> None:
    """A terminal and a service manager signal every process; children hear the supervisor too, and must only drain."""
    gate, opener = os.pipe()

    def finish(spec: Spec, drain: bool, end: asyncio.Event) -> None:
        asyncio.get_running_loop().add_reader(gate, end.set)

    with pools.running(tmp_path, pools.looping(finish)) as pool:
        pool.expect("ready", 2)
        pool.expect("sweeper ready")
        os.killpg(pool.pid, INT)
        pool.expect("order", 4)  # each by the signal and by the supervisor
        os.write(opener, b"\0")
        assert pool.end() == 0
    assert all(one["drain"] for one in pool.seen("order"))
    for end in (gate, opener):
        os.close(end)


def test_a_child_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_CANCEL_S", 0.2)
    with pools.running(
        tmp_path, pools.looping(lambda spec, drain, end: spec.page.begin(7) and None), procs=1, drain_timeout=0.0
    ) as pool:
        pool.expect("ready")
        pool.signal(TERM)
        assert pool.end() == 0
    (buried,) = pool.seen("buried")
    assert buried["executing"] == [7] and buried["reason"] == "killed by SIGKILL"


def booting(spec: Spec) -> int:
    pools.tell("boot", role="worker")
    while True:
        signal.pause()  # as an import that waits for something


@pytest.mark.contract("FM-019")
def test_a_child_that_is_booting_ends_at_once(tmp_path: Path) -> None:
    with pools.running(tmp_path, booting) as pool:
        pids = [one["pid"] for one in pool.expect("boot", 2, role="worker")]
        pool.signal(TERM)
        assert pool.end() == 0
    assert not living(*pids)


@pytest.mark.contract("FM-019")
def test_a_signal_in_the_first_moment_ends_everything(tmp_path: Path) -> None:
    for count in range(1, 5):
        with pools.running(tmp_path, pools.looping(), procs=4) as pool:
            pool.expect("boot", count)  # while others are still being forked
            pool.signal(TERM)
            assert pool.end() == 0


# Deaths


def dies_executing(end: str) -> pools.Script:
    """The first worker ends in some way while it executes; its successor is idle."""

    def script(spec: Spec) -> int:
        if spec.page.restarts:
            return pools.looping()(spec)
        spec.page.state = board.State.READY
        spec.page.end(spec.page.begin(10))
        for step in (11, 12):
            spec.page.begin(step)
        pools.tell("busy", life=spec.page.life)
        if end == "exit":
            os._exit(9)
        if end == "raise":
            raise RuntimeError("a bug")
        if end == "lost":
            return EX_REPLACE
        if end == "abort":
            os.abort()
        while True:
            signal.pause()

    return script


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("kill", "killed by SIGKILL"),
        ("abort", "killed by SIGABRT"),
        ("exit", "exit status 9"),
        ("raise", "exit status 1"),
        ("lost", "exit status 75"),
    ],
)
def test_a_death_is_told_to_the_sweeper_and_the_worker_is_replaced(tmp_path: Path, end: str, reason: str) -> None:
    with pools.running(tmp_path, dies_executing(end), procs=1) as pool:
        (busy,) = pool.expect("busy")
        if end == "kill":
            os.kill(busy["pid"], KILL)
        (buried,) = pool.expect("buried")
        assert (buried["life"], buried["executing"], buried["reason"]) == (busy["life"], [11, 12], reason)
        (ready,) = pool.expect("ready")
        assert ready["life"] not in (0, busy["life"])
        pool.signal(TERM)
        assert pool.end() == 0
    assert f"worker {busy['pid']} ended: {reason}; it was executing 2 steps: 11, 12" in pool.log.read_text()


def test_a_death_is_told_again_until_a_sweeper_has_dealt_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "tried"

    def once_without_answer() -> bool:
        if marker.exists():
            return True
        marker.touch()
        return False

    with pools.running(tmp_path, pools.looping(), pools.sweeper(once_without_answer), procs=1) as pool:
        (ready,) = pool.expect("ready")
        (first,) = pool.expect("sweeper ready")
        os.kill(ready["pid"], KILL)
        pool.expect("buried", 1, life=ready["life"])
        os.kill(first["pid"], KILL)
        buried = pool.expect("buried", 2, life=ready["life"])
        assert buried[0]["pid"] != buried[1]["pid"]
        pool.expect("ready", 2)
        pool.signal(TERM)
        assert pool.end() == 0


@pytest.mark.contract("FM-020")
def test_pauses_grow_while_a_worker_dies_again_and_again(tmp_path: Path) -> None:
    def dies(spec: Spec) -> int:
        spec.page.state = board.State.READY
        pools.tell("boot", role="worker", failing=spec.page.failing)
        os._exit(9)

    with pools.running(tmp_path, dies, procs=1) as pool:
        boots = pool.expect("boot", 5, role="worker")
        pool.signal(TERM)
        assert pool.end() == 0
    assert [boot["failing"] for boot in boots[:5]] == [0, 1, 2, 3, 4]
    pauses = [after["at"] - before["at"] for before, after in zip(boots[:-1], boots[1:5], strict=True)]
    for pause, least in zip(pauses, (0.07, 0.14, 0.28, 0.56), strict=True):
        assert pause > least


@pytest.mark.contract("FM-020")
def test_workers_that_cannot_start_end_the_pool_with_the_reason(tmp_path: Path) -> None:
    def boot(spec: Spec) -> int:
        pools.tell("boot", role="worker")
        return process.cannot_boot(spec, LookupError("there is no module 'shop'"))

    with pools.running(tmp_path, boot) as pool:
        assert pool.end() == 1
    log = pool.log.read_text()
    assert "giving up: no worker can start: there is no module 'shop'" in log
    assert log.count("cannot start: there is no module 'shop'") == 1
    assert len(pool.seen("boot", role="worker")) <= 6


# Replacement


def test_hup_replaces_workers_one_by_one_and_keeps_each_until_its_successor_is_ready(tmp_path: Path) -> None:
    with pools.running(tmp_path, pools.looping(), procs=3) as pool:
        old = pool.expect("ready", 3)
        pool.signal(HUP)
        pool.expect("ready", 6)
        pool.expect("buried", 3)
        pool.signal(TERM)
        assert pool.end() == 0
    new = pool.seen("ready")[3:]
    assert not {one["pid"] for one in old} & {one["pid"] for one in new}
    drains = [one for one in pool.seen("order") if one["pid"] in {one["pid"] for one in old}]
    for successor, drain, following in zip(new, drains, [*new[1:], None], strict=True):
        assert successor["at"] < drain["at"]
        assert following is None or drain["at"] < following["at"]


def test_new_code_that_cannot_start_does_not_take_the_place_of_old_code(tmp_path: Path) -> None:
    broken = tmp_path / "broken"

    def script(spec: Spec) -> int:
        if broken.exists():
            pools.tell("broken")
            spec.page.note = "a syntax error"
            return EX_BOOT
        return pools.looping()(spec)

    with pools.running(tmp_path, script) as pool:
        pids = [one["pid"] for one in pool.expect("ready", 2)]
        broken.touch()
        pool.signal(HUP)
        pool.expect("broken")
        pool.expect("buried")  # the successor's life
        assert living(*pids) == pids
        broken.unlink()
        pool.signal(HUP)
        pool.expect("ready", 4)
        pool.expect("buried", 3)
        pool.signal(TERM)
        assert pool.end() == 0
    assert "the workers stay as they are" in pool.log.read_text()
    assert not living(*pids)


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_to_one_worker_drains_and_replaces_it_alone(tmp_path: Path, number: int) -> None:
    with pools.running(tmp_path, pools.looping()) as pool:
        one, other = pool.expect("ready", 2)
        os.kill(one["pid"], number)
        pool.expect("order", drain=True, pid=one["pid"])
        pool.expect("ready", 3)
        assert living(other["pid"])
        assert not pool.seen("order", pid=other["pid"])
        pool.signal(TERM)
        assert pool.end() == 0


def test_a_second_signal_to_one_worker_stops_it_at_once(tmp_path: Path) -> None:
    with pools.running(tmp_path, pools.looping(until_stop), procs=1) as pool:
        (one,) = pool.expect("ready")
        for drain in (True, False):
            os.kill(one["pid"], TERM)
            pool.expect("order", drain=drain, pid=one["pid"])
        _, other = pool.expect("ready", 2)
        pool.signal(TERM)
        pool.expect("order", pid=other["pid"], drain=True)
        pool.signal(TERM)
        assert pool.end() == 0


def test_a_worker_is_replaced_after_so_many_steps(tmp_path: Path) -> None:
    def script(spec: Spec) -> int:
        if not spec.page.restarts and not spec.page.done and spec.page.role is board.Role.WORKER:
            spec.page.done = 5 if not (tmp_path / "done").exists() else 0
            (tmp_path / "done").touch()
        return pools.looping()(spec)

    with pools.running(tmp_path, script, procs=1, recycle_after=5) as pool:
        first, second = pool.expect("ready", 2)
        pool.expect("order", pid=first["pid"], drain=True)
        pool.expect("buried", life=first["life"])
        pool.signal(TERM)
        assert pool.end() == 0
    assert second["at"] < pool.seen("order", pid=first["pid"])[0]["at"]


# The world around


def test_children_leave_when_the_supervisor_was_killed(tmp_path: Path) -> None:
    with pools.running(tmp_path, pools.looping()) as pool:
        pids = [one["pid"] for one in pool.expect("ready", 2)] + [one["pid"] for one in pool.expect("sweeper ready")]
        pool.signal(KILL)
        assert pool.end() == -KILL
        for pid in pids:
            gone(pid)
        pool.expect("order", 2, drain=True)
        pool.expect("sweeper ends")


def sockets() -> set[str]:
    links: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith("socket:")}


@pytest.mark.contract("FM-023")
def test_children_hold_only_their_own_descriptors_and_programs_they_run_hold_none(tmp_path: Path) -> None:
    ours = sockets()  # which a pool started from a shell would not have

    def script(spec: Spec) -> int:
        code = "import os; print([fd for fd in os.listdir('/proc/self/fd') if int(fd) > 2])"
        inner = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        pools.tell(
            "open",
            sockets=sorted(sockets() - ours),
            own=f"socket:[{os.fstat(spec.channel.fileno()).st_ino}]",
            inner=len(eval(inner.stdout)) - 1,  # the listing itself
        )
        return pools.looping()(spec)

    with pools.running(tmp_path, script, procs=3, metrics_port=0) as pool:
        pool.expect("ready", 3)
        for one in pool.expect("open", 3):
            assert one["sockets"] == [one["own"]]
            assert one["inner"] == 0
        pool.signal(TERM)
        assert pool.end() == 0


@pytest.mark.contract("FM-027")
def test_a_closed_standard_error_ends_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pools.running(tmp_path, dies_executing("kill"), procs=1, stderr=writer) as pool:
        (busy,) = pool.expect("busy")
        os.kill(busy["pid"], KILL)
        pool.expect("ready")
        pool.signal(TERM)
        assert pool.end() == 0
    os.close(writer)
    assert len(pool.seen("boot", role="worker")) == 1


def test_a_port_that_is_taken_is_told_before_anything_is_forked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pools.running(tmp_path, pools.looping(), metrics_port=taken.getsockname()[1]) as pool:
            assert pool.end() == 1
    assert not pool.seen("boot")
    assert "cannot serve metrics at 127.0.0.1" in pool.log.read_text()


@pytest.mark.contract("FM-034")
def test_what_a_pool_may_need_is_told_at_its_start(tmp_path: Path) -> None:
    with pools.running(tmp_path, pools.looping(), completion_pool_size=4, metrics_port=0) as pool:
        pool.expect("ready", 2)
        pool.signal(TERM)
        assert pool.end() == 0
    log = pool.log.read_text()
    assert "up to 16 database connections" in log
    assert "metrics and health at http://127.0.0.1:" in log


def test_no_directory_of_metrics_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(spec: Spec) -> int:
        pools.tell("directory", path=spec.metrics_dir)
        return pools.looping()(spec)

    with pools.running(tmp_path, script, procs=1) as killed:
        (left,) = killed.expect("directory")
        (ready,) = killed.expect("ready")
        (sweeping,) = killed.expect("sweeper ready")
        killed.signal(KILL)
        killed.end()
        for one in (ready, sweeping):
            gone(one["pid"])
    assert Path(left["path"]).exists()
    with pools.running(tmp_path, script, procs=1) as pool:
        (own,) = pool.expect("directory")
        pool.expect("ready")
        assert not Path(left["path"]).exists() and Path(own["path"]).exists()
        pool.signal(TERM)
        assert pool.end() == 0
    assert not Path(own["path"]).exists()
