"""Shared memory in which each process of a pool shows how it is and what it executes, readable after its death.

The supervisor maps the board before it forks, one page per child. A child writes its own page with plain stores and no
lock; the supervisor and the sweeper read. Every word is 8 bytes at an aligned address, so a reader sees the old or the
new value and never half of one. Nothing needs more than that: the ids on a page are read for the last time when their
writer is dead.

After a death the page is the only witness of which handlers were running (a batch that was claimed and not begun must
not count a reclaim), so `begin` and `end` enclose each execution. Measured: 0.14 µs each; a row in the database would
cost some 100 µs.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable
from enum import IntEnum

# Words of the head, and where the ids begin. The head fills two cache lines, so that ids never share one with the tick.
_PID, _LIFE, _STATE, _TICK, _REACHED, _SLOTS, _RUNNING, _DONE = range(8)
_ROLE, _RESTARTS, _FAILING = range(8, 11)
_HEAD = 16
_WORD = 8

# A step that must run alone may begin while the slots are still being emptied for it.
_EXTRA = 1
# Room for a few words of the child's own, at the page's end: a length and UTF-8.
_NOTE_BYTES = 512


class State(IntEnum):
    """What a child is doing."""

    GONE = 0
    BOOTING = 1
    READY = 2
    DRAINING = 3


class Role(IntEnum):
    """What a child is there for."""

    NONE = 0
    WORKER = 1
    SWEEPER = 2


class Page:
    """One child's page. The setters are for its owner: the child, or for the last three words the supervisor."""

    __slots__ = ("_cells", "_free", "_note", "_reals", "_words")

    def __init__(self, memory: memoryview, concurrency: int) -> None:
        size = Page.size(concurrency)
        if len(memory) != size:
            raise ValueError(f"a page for {concurrency} steps takes {size} bytes, not {len(memory)}")
        self._words = memory.cast("q")
        self._reals = memory.cast("d")
        self._note = memory[size - _NOTE_BYTES :]
        self._cells = self._words[_HEAD : _HEAD + concurrency + _EXTRA]
        # Taken from the end: the lowest cells first, so that a page with little to do stays in few cache lines.
        self._free = list(range(concurrency + _EXTRA - 1, -1, -1))

    @staticmethod
    def size(concurrency: int) -> int:
        """Bytes of a page, a multiple of a cache line."""
        words = _HEAD + concurrency + _EXTRA
        return (words + 7) // 8 * 8 * _WORD + _NOTE_BYTES

    @classmethod
    def private(cls, concurrency: int) -> Page:
        """A page that no other process sees, for a worker embedded in a program."""
        return cls(memoryview(bytearray(cls.size(concurrency))), concurrency)

    def begin(self, step_id: int) -> int:
        """Notes that a step is being executed; the index is for `end`.

        More executions than cells are possible, as a thread that ignores its time limit goes on while its slot serves
        the next step. Those get -1 and are not on the page: blame is lost for them, never an execution.
        """
        try:
            index = self._free.pop()
        except IndexError:
            return -1
        self._cells[index] = step_id
        return index

    def end(self, index: int) -> None:
        """Notes that the execution that `begin` gave this index for has ended."""
        if index >= 0:
            self._cells[index] = 0
            self._free.append(index)

    def executing(self) -> list[int]:
        """The ids of the steps being executed."""
        return [step_id for step_id in self._cells if step_id]

    def clear(self) -> None:
        """Empties the page for the next child. What the supervisor wrote about the place stays."""
        kept = [self._words[word] for word in (_ROLE, _RESTARTS, _FAILING)]
        for index in range(len(self._words)):
            self._words[index] = 0
        for word, value in zip((_ROLE, _RESTARTS, _FAILING), kept, strict=True):
            self._words[word] = value
        self._free = list(range(len(self._cells) - 1, -1, -1))

    def beat(self) -> None:
        """Notes that the loop turns."""
        self._reals[_TICK] = time.monotonic()

    def reach(self) -> None:
        """Notes that the database answered."""
        self._reals[_REACHED] = time.monotonic()

    @property
    def note(self) -> str:
        """Why the child cannot do its work, in its own words; empty when it can."""
        length = min(self._note[0] * 256 + self._note[1], _NOTE_BYTES - 2)
        return bytes(self._note[2 : 2 + length]).decode("utf-8", "replace")

    @note.setter
    def note(self, value: str) -> None:
        text = value.encode("utf-8", "replace")[: _NOTE_BYTES - 2]
        self._note[2 : 2 + len(text)] = text
        self._note[0], self._note[1] = divmod(len(text), 256)

    @property
    def pid(self) -> int:
        """The process, or 0."""
        return self._words[_PID]

    @pid.setter
    def pid(self, value: int) -> None:
        self._words[_PID] = value

    @property
    def life(self) -> int:
        """The life that holds the worker's lease. A worker that takes another notes it here before it claims."""
        return self._words[_LIFE]

    @life.setter
    def life(self, value: int) -> None:
        self._words[_LIFE] = value

    @property
    def state(self) -> State:
        """What the child is doing."""
        return State(self._words[_STATE])

    @state.setter
    def state(self, value: State) -> None:
        self._words[_STATE] = value

    @property
    def tick(self) -> float:
        """When the loop last turned, by CLOCK_MONOTONIC, which all processes of a host share; 0.0: never."""
        return self._reals[_TICK]

    @property
    def reached(self) -> float:
        """When the database last answered, by the same clock; 0.0: never."""
        return self._reals[_REACHED]

    @reached.setter
    def reached(self, value: float) -> None:
        self._reals[_REACHED] = value

    @property
    def slots(self) -> int:
        """How many steps the child can execute at once."""
        return self._words[_SLOTS]

    @slots.setter
    def slots(self, value: int) -> None:
        self._words[_SLOTS] = value

    @property
    def running(self) -> int:
        """How many steps it holds that are being executed, as it last counted."""
        return self._words[_RUNNING]

    @running.setter
    def running(self, value: int) -> None:
        self._words[_RUNNING] = value

    @property
    def done(self) -> int:
        """How many executions it has ended; a worker is replaced after a set number."""
        return self._words[_DONE]

    @done.setter
    def done(self, value: int) -> None:
        self._words[_DONE] = value

    @property
    def role(self) -> Role:
        """What the place is used for."""
        return Role(self._words[_ROLE])

    @role.setter
    def role(self, value: Role) -> None:
        self._words[_ROLE] = value

    @property
    def restarts(self) -> int:
        """How many children have died in this place."""
        return self._words[_RESTARTS]

    @restarts.setter
    def restarts(self, value: int) -> None:
        self._words[_RESTARTS] = value

    @property
    def failing(self) -> int:
        """How many children in a row died in this place before they had been ready for a while."""
        return self._words[_FAILING]

    @failing.setter
    def failing(self, value: int) -> None:
        self._words[_FAILING] = value


class Board:
    """The pages of a pool in one anonymous mapping that children inherit."""

    def __init__(self, pages: int, concurrency: int) -> None:
        size = Page.size(concurrency)
        memory = memoryview(mmap.mmap(-1, size * pages))
        self.pages = [Page(memory[size * index : size * (index + 1)], concurrency) for index in range(pages)]


def any_idle(pages: Iterable[Page]) -> bool:
    """Whether some worker is ready and has a slot free, so that news of work is worth a notification."""
    return any(page.role is Role.WORKER and page.state is State.READY and page.running < page.slots for page in pages)
