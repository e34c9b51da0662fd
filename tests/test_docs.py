"""What the documentation says is true: its examples run, its commands exist, its tables are those of the code."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import factories
import psycopg
import pytest
from factories import until

import cyclone
from cyclone import cli, config, context, supervisor, worker

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DEPLOY = (ROOT / "deploy" / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


JOBS, SERVICE, FLOWS, TRANSACTIONS, REFUNDS = blocks(README, "python")

TABLES = """
CREATE TABLE ledger (run_id text, node text, cents int, PRIMARY KEY (run_id, node));
CREATE TABLE orders (id text PRIMARY KEY, cents int)
"""

MAIL = """
from types import SimpleNamespace

answers = [SimpleNamespace(status=429, retry_after=0.01), SimpleNamespace(status=200)]
sent = []

async def post(receipt, idempotency_key):
    sent.append(idempotency_key)
    return answers[min(len(sent), 2) - 1]
"""

BANK = """
refunds = []
asked = []
fail_after = 1

async def has_refund(reference):
    asked.append(reference)
    return reference in [one for one, _ in refunds]

async def refund(charge_id, reference):
    refunds.append((reference, charge_id))
    if len(refunds) == fail_after:
        raise ConnectionError("the bank has done it, and the answer was lost")
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of the package that the README writes."""
    files = {
        "__init__": "",
        "jobs": JOBS,
        "service": SERVICE,
        "refunds": REFUNDS,
        "bank": BANK,
        "flows": FLOWS,
        "mail": MAIL,
    }
    (tmp_path / "shop").mkdir()
    for name, text in files.items():
        (tmp_path / "shop" / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    yield lambda name: importlib.import_module(f"shop.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def test_every_file_named_above_an_example_is_the_one_that_the_commands_run() -> None:
    assert "`shop/jobs.py`:\n\n```python" in README
    assert "`shop/service.py` submits it" in README
    assert "from shop.jobs import" in SERVICE and "cyclone-pool --procs 16 shop.jobs" in README


async def test_the_first_example_runs(dsn: str, conn: psycopg.Connection, shop: Callable[[str], ModuleType]) -> None:
    conn.execute(TABLES)
    jobs, service = shop("jobs"), shop("service")
    async with cyclone.Client(dsn) as client, cyclone.Worker(dsn, jobs, poll_interval=0.05):
        receipt = await service.place(client, jobs.Order(id="o-1", email="a@example.com", cents=4200))
        assert isinstance(receipt, jobs.Receipt)
        first = conn.execute("SELECT run_id, node, cents FROM ledger").fetchall()
        assert first == [(receipt.charge_id.partition(":")[0], "charge", 4200)]

        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as tx:
            await service.place_with_row(client, tx, jobs.Order(id="o-2", email="b@example.com", cents=7))
            with pytest.raises(psycopg.errors.UniqueViolation):
                await service.place_with_row(client, tx, jobs.Order(id="o-2", email="b@example.com", cents=8))
            with pytest.raises(ZeroDivisionError):
                async with tx.transaction():  # the service's own block becomes a part of this one
                    await service.place_with_row(client, tx, jobs.Order(id="o-3", email="c@example.com", cents=9))
                    raise ZeroDivisionError
        await until(lambda: factories.count(conn, "ledger") == 2)
        assert conn.execute("SELECT id, cents FROM orders").fetchall() == [("o-2", 7)]
        assert factories.count(conn, "cyclone_steps") == 2

        broken = await jobs.charge.enqueue(client, jobs.Order(id="o-4", email="", cents=0))
        with pytest.raises(cyclone.RunFailedError, match="amount must be positive"):
            await broken.result(timeout=10)
    assert sum(row[0] for row in conn.execute("SELECT cents FROM ledger")) == 4207


@pytest.mark.contract("U31", "U36", "W1")
async def test_the_workflow_runs(dsn: str, conn: psycopg.Connection, shop: Callable[[str], ModuleType]) -> None:
    conn.execute(TABLES)
    flows, jobs, mail = shop("flows"), shop("jobs"), shop("mail")
    order = jobs.Order(id="o-1", email="a@example.com", cents=4200)
    async with (
        cyclone.Client(dsn) as client,
        cyclone.Worker(dsn, flows, poll_interval=0.05),
        factories.sweeper(dsn),
    ):
        receipt = await flows.place(client, order)
        assert await flows.place(client, order) == receipt
        run = await flows.checkout.find(client, "order:o-1")
        assert await run.wait(10) is cyclone.RunState.COMPLETED
        with pytest.raises(cyclone.SubmitConflictError):
            await flows.place(client, jobs.Order(id="o-1", email="a@example.com", cents=1))
    assert mail.sent == [f"{run.id}:send_receipt"] * 2
    assert factories.count(conn, "ledger") == 1
    assert "submit_once_tx(client, session" in TRANSACTIONS and "submit_once_tx(client, connection" in TRANSACTIONS
    text = " ".join(README.split())
    assert "Take keys from the business request" in text and "keep runs longer" in text


async def test_the_commands_of_the_first_example_run(
    empty_dsn: str,
    shop: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CYCLONE_DSN", empty_dsn)
    (block,) = [block for block in blocks(README, "console") if "migrate up" in block]
    lines = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
    assert [line[0] for line in lines] == ["export", "cyclone", "cyclone-pool", "cyclone"]
    assert cli.run(cli.app, lines[1][1:]) == 0
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(TABLES)
        async with cyclone.Worker(empty_dsn, shop("jobs"), poll_interval=0.05):
            capsys.readouterr()
            assert cli.run(cli.app, lines[3][1:]) == 0
            run_id = capsys.readouterr().out.strip()
            await until(lambda: factories.count(conn, "ledger WHERE run_id = %s AND cents = 4200", run_id) == 1)


@pytest.mark.contract("K11", "R42")
async def test_a_system_without_tokens_is_asked_first(
    dsn: str, conn: psycopg.Connection, shop: Callable[[str], ModuleType]
) -> None:
    refunds, bank = shop("refunds"), shop("bank")
    async with cyclone.Client(dsn) as client, cyclone.Worker(dsn, refunds, poll_interval=0.05):
        handle = await refunds.refund.enqueue(client, "charge-1")
        await until(lambda: factories.state(conn, int(handle.run_id)) == "scheduled")
        await factories.fire(dsn)
        await handle.result(timeout=10)
        assert (await client.get_step(handle.run_id, "refund")).attempts == 2
    key = f"{handle.run_id}:refund"
    assert bank.refunds == [(key, "charge-1")]
    assert bank.asked == [key, key]


# Words that must not get lost


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.contract("E17", "R42")
def test_where_handlers_are_explained_it_is_said_that_they_are_called_more_than_once() -> None:
    """The price of losing nothing is told at the start, in a chapter of its own, and where a handler is declared."""
    start, chapter = README.split("### Handlers must accept more than one call")
    assert "Handlers are called **at least once**" in start
    assert "another worker calls the handler again. So does a retry." in said(chapter)
    for place in (cyclone.step.__doc__, context.Context.__doc__, context.SyncContext.__doc__):
        assert place is not None and "more than once" in said(place)


@pytest.mark.contract("X5")
def test_effects_outside_are_said_to_need_a_key_and_not_to_be_undone() -> None:
    assert "Cyclone cannot undo what happened outside PostgreSQL" in said(README)
    assert "a call to another system that takes a token | `ctx.idempotency_key`" in README


@pytest.mark.contract("X13", "K7")
def test_what_the_completion_transaction_cannot_reach_is_named() -> None:
    text = said(README)
    assert "(another database, another pool, another role's tables) is outside it, and commits or not by itself" in text
    assert "weaker: it stays when the completion then rolls back" in text


@pytest.mark.contract("K3", "K4")
def test_the_key_is_documented_as_it_is_made(conn: psycopg.Connection) -> None:
    assert "`ctx.idempotency_key`, which is `run_id:node` and never changes" in README
    assert "a key with the attempt in it would make every retry look new" in said(README)
    doc = context.Context.idempotency_key.__doc__
    assert doc is not None and "<run_id>:<node>" in doc


# Commands


def commands(text: str) -> set[str]:
    """Every call of Cyclone's commands: in consoles, and in the text between backticks."""
    lines = [line.removeprefix("$ ") for block in blocks(text, "console") for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    found: set[str] = set()
    for line in (*lines, *inline):
        _, separator, rest = f" {line}".partition(" exec pool ")
        line = rest if separator else line
        if re.match(r"cyclone(-pool|-sweeper)? [a-zA-Z-]", line):
            found.add(line)
    return found


APPS = {"cyclone": cli.app, "cyclone-pool": cli._pool_app, "cyclone-sweeper": cli._sweeper_app}


@pytest.mark.parametrize("command", sorted(commands(README) | commands(DEPLOY)))
def test_every_command_exists_with_its_options(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *args = shlex.split(command)
    # The parser refuses what it does not know before it helps.
    assert cli.run(APPS[name], [*args, "--help"]) == 0, capsys.readouterr().err


def test_there_are_commands_to_check() -> None:
    assert len(commands(README)) >= 5 and len(commands(DEPLOY)) >= 4


def test_make_has_the_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    used = set(re.findall(r"`make ([a-z]+)`|^\$ make ([a-z]+)", README, re.M))
    assert used and {one or other for one, other in used} <= targets


def test_links_lead_somewhere() -> None:
    for file, text in ((ROOT / "README.md", README), (ROOT / "deploy" / "README.md", DEPLOY)):
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert link.startswith("http") or (file.parent / link).exists(), link


def test_extras_that_are_named_exist() -> None:
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    used = set(re.findall(r"cyclone-jobs\[(\w+)\]", README))
    assert used and used <= extras


# Tables


def table(header: str) -> list[list[str]]:
    rows = README[README.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def written(key: str, options: config.WorkerOptions) -> str:
    """A default of a worker as the table writes it."""
    field = config._WORKER[key].field
    value: Any = getattr(options, field)
    if key == "queues":
        return f"`{','.join(value)}`"
    if key == "settle_batch" and value is None:
        return str(worker._SETTLE_BATCH)
    if key == "stall_limit" and value is None:
        return "five leases"
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if field.endswith("_s"):
        return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"
    if field.endswith("_bytes"):
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    return str(value)


def test_the_table_of_options_has_every_option_with_its_default() -> None:
    shown: dict[str, str] = {}
    for names, defaults, meaning in table("| option of the worker and the pool |"):
        keys = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ") if len(keys) > 1 else [defaults]
        assert meaning or len(keys) > 1, names
        shown |= dict(zip(keys, values, strict=True))
    assert shown.keys() == config._SETTINGS.keys()
    for key in config.WORKER_NAMES:
        assert shown[key] == written(key, config.WorkerOptions()), key
    assert (shown["dsn"], shown["schema"]) == ("–", "`public`")
    pool = supervisor.Pool("shop", dsn="postgresql://")
    assert (shown["procs"], shown["sweeper"]) == ("one a core", "on") and pool._sweeps
    assert (shown["metrics_host"], shown["metrics_port"]) == (pool._host, str(pool._port))
    assert shown["recycle_after"] == "never" and pool._recycle_after is None
    assert "five leases" in README and "renewed at a third" in README


def test_the_help_of_the_pool_tells_the_same_defaults() -> None:
    for key, (_, text) in cli._WORKER_HELP.items():
        (default,) = re.findall(r"\[(?:default: )?([^\]]+)\]$", text)
        wanted = {
            "queues": "default",
            "stall_limit": "five leases",
            "notify": "yes",
            "settle_batch": "auto",
        }.get(key, written(key, config.WorkerOptions()).replace(" ", ""))
        assert default == wanted, key


def test_what_handlers_may_raise_exists() -> None:
    for cell, *_ in table("| raise | becomes |"):
        if match := re.match(r"`(\w+)\(", cell):
            assert issubclass(getattr(cyclone, match[1]), Exception)


# The map


def test_the_map_has_every_module_on_the_floor_that_lint_checks() -> None:
    chapter = README.split("## The map of the code\n")[1].split("\n## ")[0]
    lines = [line.strip() for line in chapter.splitlines() if line.startswith("    ")]
    shown = [set(re.split(r"\s{2,}", line)[0].split(" · ")) for line in lines]
    (contract,) = PYPROJECT["tool"]["importlinter"]["contracts"]
    floors = [set(re.split(r"[\s|()]+", layer.strip("()"))) for layer in reversed(contract["layers"])]
    assert shown == floors
    ignored = {"__init__", *contract["exhaustive_ignores"]}
    packages = {path.parent.name for path in (ROOT / "cyclone").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "cyclone").glob("*.py")} - ignored | packages
    assert set(itertools.chain.from_iterable(shown)) == files


def test_python_of_every_page_compiles() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("docs/**/*.md")]
    compiled = [compile(block, str(page), "exec") for page in pages for block in blocks(page.read_text(), "python")]
    assert len(compiled) >= 3


def test_the_drawing_shows_every_state_of_a_step() -> None:
    drawing = README.split("## The life of a step")[1].split("1. **Enqueue**")[0]
    # What belongs to workflows is told in words below.
    assert {state.value for state in cyclone.StepState} - {"pending", "waiting"} <= set(re.findall(r"[a-z]+", drawing))
    assert "is `pending` until" in README and "is `waiting` while" in README


async def test_a_worker_can_live_inside_a_program(dsn: str) -> None:
    """`async with cyclone.Worker(dsn, registry)`, as the README writes it."""
    assert "`async with cyclone.Worker(dsn, registry): ...`" in README
    registry = cyclone.Registry()
    registry.include(factories.noop())
    async with asyncio.timeout(20), cyclone.Worker(dsn, registry):
        pass
