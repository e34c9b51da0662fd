"""The board: what a child writes, others read, also after its death."""

from __future__ import annotations

import os
import timeit

import pytest

from cyclone.board import Board, Page, Role, State


def test_executing_steps_are_those_begun_and_not_ended() -> None:
    page = Page.private(3)
    one, two = page.begin(2**62), page.begin(5)
    assert sorted(page.executing()) == [5, 2**62]
    page.end(one)
    assert page.executing() == [5]
    page.begin(6)
    assert sorted(page.executing()) == [5, 6]
    page.end(two)
    assert page.executing() == [6]


def test_more_executions_than_cells_are_let_through() -> None:
    page = Page.private(2)
    indexes = [page.begin(step) for step in (1, 2, 3, 4)]
    assert sorted(page.executing()) == [1, 2, 3]
    assert indexes[3] == -1
    for index in indexes:
        page.end(index)
    assert page.executing() == []
    assert page.begin(9) >= 0


def test_a_page_is_read_after_the_death_of_its_writer() -> None:
    board = Board(2, 10)
    page = board.pages[1]
    pid = os.fork()
    if pid == 0:
        try:
            page.pid, page.life, page.state = os.getpid(), 2**61 + 1, State.READY
            page.slots, page.running, page.done = 10, 2, 77
            page.note = "nö" * 400
            page.beat()
            page.reach()
            page.end(page.begin(41))
            page.begin(42)
            page.begin(43)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (page.pid, page.life, page.state) == (pid, 2**61 + 1, State.READY)
    assert (page.slots, page.running, page.done) == (10, 2, 77)
    assert sorted(page.executing()) == [42, 43]
    assert 0 < page.tick <= page.reached
    assert page.note.startswith("nönönö")
    assert board.pages[0].executing() == [] and board.pages[0].pid == 0


def test_clear_keeps_what_the_supervisor_knows_of_the_place() -> None:
    page = Page.private(2)
    page.role, page.restarts, page.failing = Role.WORKER, 4, 2
    page.life, page.note = 5, "no"
    page.beat()
    page.begin(1)
    page.clear()
    assert (page.role, page.restarts, page.failing) == (Role.WORKER, 4, 2)
    assert (page.life, page.note, page.tick, page.state) == (0, "", 0.0, State.GONE)
    assert page.executing() == [] and [page.begin(step) for step in (1, 2, 3)] == [0, 1, 2]


def test_a_page_needs_memory_of_its_size() -> None:
    with pytest.raises(ValueError, match="takes"):
        Page(memoryview(bytearray(64)), 1)


def test_noting_an_execution_costs_almost_nothing() -> None:
    page = Page.private(100)
    pair_s = min(timeit.repeat(lambda: page.end(page.begin(7)), number=20_000, repeat=10)) / 20_000
    assert pair_s < 2e-6  # measured: 0.3 µs for both; the rest is for a machine under load
