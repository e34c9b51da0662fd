"""Commands for people, scripts and service managers: `cyclone`, `cyclone-pool` and `cyclone-sweeper`.

What a command found goes to standard output, as a table or with `--json` as JSON; what went wrong is one line on
standard error. Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict. Nothing ever asks a question.

Modules that are slow to import are imported by the commands that need them, so that `--help` and a failing argument
answer at once.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar, cast

import msgspec
import typer

from . import config
from .errors import (
    ConflictError,
    CycloneError,
    InvalidInputError,
    InvalidOptionError,
    InvalidStateError,
    NotFoundError,
    TargetError,
)

if TYPE_CHECKING:
    import psycopg

    from . import codec, db, graph, model, registry

FAILED, USAGE, NOT_FOUND, CONFLICT = 1, 2, 3, 4
_INTERRUPTED = 130

_CHUNK = 1_000
_MAX_INPUT = 1 << 20

_Command = TypeVar("_Command", bound=Callable[..., None])
_Code = TypeVar("_Code")

_HELP = {"help_option_names": ["-h", "--help"]}


def _app(help: str) -> typer.Typer:
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Plain help: importing rich takes longer than everything else that it would show.
        rich_markup_mode=None,
        context_settings=_HELP,
    )


app = _app("Durable jobs and workflows on PostgreSQL.")
_migrate = _app("The schema in the database.")
app.add_typer(_migrate, name="migrate")
_pool_app = _app("")
_sweeper_app = _app("")

Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="The database. Default: CYCLONE_DSN, which others cannot see, as they can see arguments.",
    ),
]
Schema = Annotated[str | None, typer.Option("--schema", help="The schema. Default: CYCLONE_SCHEMA, else public.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="package.module, or package.module:registry.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]


def main() -> None:
    """`cyclone`."""
    sys.exit(run(app, sys.argv[1:]))


def pool_main() -> None:
    """`cyclone-pool`."""
    sys.exit(run(_pool_app, sys.argv[1:], name="cyclone-pool"))


def sweeper_main() -> None:
    """`cyclone-sweeper`."""
    sys.exit(run(_sweeper_app, sys.argv[1:], name="cyclone-sweeper"))


def run(commands: typer.Typer, args: Sequence[str], *, name: str = "cyclone") -> int:
    """Runs one command line and returns its exit code. An error of Cyclone's or of the database becomes one line."""
    try:
        commands(args=list(args), prog_name=name)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter must not try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except CycloneError as exc:
        return _fail(name, exc, args)
    except Exception as exc:
        # Only a command that has worked with the database can have failed by it.
        known = sys.modules.get("psycopg")
        if known is None or not isinstance(exc, known.Error):
            raise
        return _fail(name, exc, args)
    return 0


def _fail(name: str, exc: Exception, args: Sequence[str]) -> int:
    diag = getattr(exc, "diag", None)
    text = " ".join(str((diag and diag.message_primary) or exc or type(exc).__name__).split())
    if "--json" in args:
        print(json.dumps({"error": type(exc).__name__, "message": text}), file=sys.stderr)
    else:
        print(f"{name}: {text}", file=sys.stderr)
    match exc:
        case InvalidOptionError() | TargetError():
            return USAGE
        case NotFoundError():
            return NOT_FOUND
        case ConflictError() | InvalidStateError():
            return CONFLICT
        case _:
            return FAILED


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cyclone {importlib.metadata.version('cyclone-jobs')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


# Settings


def _settings(dsn: str | None, schema: str | None, **given: Any) -> dict[str, Any]:
    """What holds: the options given, else the environment, else pyproject.toml."""
    found = config.settings(
        {"dsn": dsn, "schema": schema, **given},
        pyproject=config.find_pyproject(Path.cwd()),
        names={"dsn", "schema", *given},
    )
    found.setdefault("schema", "public")
    return found


def _database(dsn: str | None, schema: str | None) -> tuple[str, str]:
    found = _settings(dsn, schema)
    if "dsn" not in found:
        raise InvalidOptionError("no database is named: give --dsn or set CYCLONE_DSN")
    return found["dsn"], found["schema"]


@contextlib.contextmanager
def _connected(dsn: str, schema: str) -> Generator[psycopg.Connection[tuple[Any, ...]]]:
    """A connection to a schema that this release can work with."""
    from . import db, migrate

    with db.connect_sync(dsn, application_name="cyclone command", pooler=True) as conn:
        migrate.require(migrate.read_version(conn, schema), schema)
        yield conn


# Output


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Names and errors are data: what looks like markup or would steer a terminal is shown as it is. Without a terminal
    # there is no width that anything would have to be cut to.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    table = Table(*columns, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    console.print(table)


def _plain(value: object) -> str:
    match value:
        case None:
            return ""
        case datetime():
            return value.astimezone().isoformat(sep=" ", timespec="milliseconds")
        case _:
            text = value if isinstance(value, str) else str(value)
            return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


# cyclone migrate


@_migrate.command("up")
def _up(
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    lock_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for another migrator, and for tables in use.")
    ] = "60s",
) -> None:
    """Install the schema, or upgrade it. Safe to run from many places at once, and again."""
    from . import migrate

    dsn, schema = _database(dsn, schema)
    applied = migrate.up(dsn, schema, lock_timeout=config.parse_seconds("lock-timeout", lock_timeout))
    if as_json:
        _print_json({"schema": schema, "version": migrate.LATEST, "applied": applied})
    elif applied:
        print(f"schema {_plain(schema)}: applied {', '.join(applied)}; now at version {migrate.LATEST}")
    else:
        print(f"schema {_plain(schema)}: nothing to do, at version {migrate.LATEST}")


@_migrate.command("status")
def _status(dsn: Dsn = None, schema: Schema = None, as_json: Json = False) -> None:
    """List the migrations and when they were applied."""
    from . import migrate

    status = migrate.status(*_database(dsn, schema))
    if as_json:
        _print_json(status)
    else:
        rows = [(m.version, m.name, m.applied_at or "not yet") for m in status.migrations]
        _print_table(("version", "name", "applied"), rows)


@_migrate.command("check")
def _check(dsn: Dsn = None, schema: Schema = None, as_json: Json = False) -> None:
    """Exit with 0 if this release can work with the schema, else with 1 and the reason."""
    from . import migrate

    dsn, schema = _database(dsn, schema)
    version = migrate.check(dsn, schema)
    if as_json:
        _print_json({"schema": schema, "version": version, "latest": migrate.LATEST})
    else:
        print(f"schema {_plain(schema)} is at version {version}, as this release needs it")


@_migrate.command("sql")
def _sql(
    schema: Schema = None,
    after: Annotated[int, typer.Option(help="Leave out the migrations up to this version.")] = 0,
    as_json: Json = False,
) -> None:
    """Print the migrations as one script, for Alembic, Django or a DBA. Needs no database."""
    from . import migrate

    script = migrate.sql(_settings(None, schema)["schema"], after=after)
    if as_json:
        _print_json({"version": migrate.LATEST, "sql": script})
    else:
        sys.stdout.write(script)


@_migrate.command("register")
def _register(target: Target, dsn: Dsn = None, schema: Schema = None, as_json: Json = False) -> None:
    """Make the steps of TARGET known to `cyclone enqueue` and to SQL, as a starting pool does."""
    from . import migrate, registry

    dsn, schema = _database(dsn, schema)
    found = registry.load(target)
    migrate.register(dsn, schema, found)
    if as_json:
        _print_json({"schema": schema, "steps": sorted(found.steps)})
    else:
        print(f"schema {_plain(schema)}: registered {len(found.steps)} steps of {target}")


# cyclone enqueue


@app.command("enqueue")
def _enqueue(
    step: Annotated[str, typer.Argument(metavar="STEP", help="The name of a registered step.")],
    input: Annotated[str | None, typer.Argument(metavar="[JSON]", help="Its input; null for a step without.")] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Enqueue once for each line of JSON of FILE, or of standard input for `-`: all of them in one"
            " transaction, or none.",
        ),
    ] = None,
    max_attempts: Annotated[str | None, typer.Option(metavar="N", help="Attempts allowed.")] = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="The queue.")] = None,
    priority: Annotated[str | None, typer.Option(metavar="N", help="From 0, the highest, to 9.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="The limit of one attempt.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Wait so long first: 30s, 5m, 2h.")] = None,
    scheduled_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Wait until then: 2030-01-31T08:00:00+00:00.")
    ] = None,
    keep_for: Annotated[str | None, typer.Option(metavar="DURATION", help="Keep it so long after its end.")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A label; may be given again.")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="A JSON object that goes with the step.")] = None,
    unique: Annotated[
        str | None, typer.Option(metavar="KEY", help="A key that only one active step of this kind may have.")
    ] = None,
    on_duplicate: Annotated[
        str, typer.Option(metavar="raise|return", help="Exit with 4 if the key is taken, or print who has it. [raise]")
    ] = "raise",
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
) -> None:
    """Enqueue a step that a pool, or `cyclone migrate register`, has made known.

    What is not given is as the step declares it. With --jsonl a bad line ends the command, and nothing is enqueued.
    """
    from . import db, plan, registry, store, wake

    if (input is None) == (jsonl is None):
        raise InvalidOptionError("give either JSON (null for a step without input) or --jsonl FILE")
    options = _parsed(
        tag,
        ("max_attempts", max_attempts, config.parse_count),
        ("queue", queue, lambda _, text: text),
        ("priority", priority, config.parse_count),
        ("timeout", timeout, config.parse_seconds),
        ("delay", delay, config.parse_seconds),
        ("scheduled_at", scheduled_at, _parse_instant),
        ("keep_for", keep_for, config.parse_seconds),
        ("metadata", metadata, _parse_object),
    )
    if unique is not None:
        if jsonl is not None:
            raise InvalidOptionError("--unique is for a single step, not for --jsonl")
        options["unique"] = registry.Unique(unique, cast("registry.OnDuplicate", on_duplicate))
    dsn, schema = _database(dsn, schema)
    statements = db.statements(schema)
    # Bad options are refused before anything is connected.
    inputs: tuple[object, ...] = () if unique is None else (None,)
    prepare = functools.partial(store.prepare, inputs=inputs, options=options, max_input_bytes=_MAX_INPUT, in_tx=True)
    prepare(_declare(step, {}))
    with contextlib.ExitStack() as stack:
        file = None if jsonl is None else _open(stack, jsonl)
        conn = stack.enter_context(_connected(dsn, schema))
        declared = _registered(conn, statements, step)
        batch = prepare(declared)
        if jsonl is None or file is None:
            values = iter([_encode(declared, "JSON", os.fsencode(input or ""))])
        else:
            values = _lines(declared, jsonl, file)
        advance = stack.enter_context(_progress(file))
        run_id, created, count, asleep = "", True, 0, False
        with conn.transaction():
            while some := list(itertools.islice(values, _CHUNK)):
                part = msgspec.structs.replace(batch, inputs=some)
                stored = plan.drive_sync(conn, store.store(statements, part, notify=False))
                ((run_id, created), *_) = stored.pairs()
                count, asleep = count + len(some), asleep or stored.asleep
                advance(count)
        if asleep:
            plan.drive_sync(conn, wake.sleepers(statements))
    if file is not None:
        _print_json({"step": step, "enqueued": count}) if as_json else print(f"enqueued {count:,} steps")
    elif as_json:
        _print_json({"step": step, "run_id": run_id, **({} if unique is None else {"created": created})})
    else:
        print(run_id)


def _parsed(tags: list[str] | None, *given: tuple[str, str | None, Callable[[str, str], object]]) -> dict[str, Any]:
    """The options that were given, by their names in Python."""
    found = {name: parse(f"--{name.replace('_', '-')}", value) for name, value, parse in given if value is not None}
    return {**found, "tags": tags} if tags else found


def _parse_instant(source: str, text: str) -> datetime:
    try:
        return config.instant(source, datetime.fromisoformat(text))
    except ValueError as exc:
        if isinstance(exc, CycloneError):
            raise
        raise InvalidOptionError(f"{source}: {text!r} is no time; write 2030-01-31T08:00:00+00:00") from None


def _parse_object(source: str, text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(os.fsencode(text), type=dict[str, Any])
    except msgspec.MsgspecError as exc:
        raise InvalidOptionError(f"{source} must be a JSON object: {exc}") from None


def _declare(name: str, options: registry.StepOptions) -> registry.Step[Any, Any]:
    """A step of that name for any JSON; what the handler's type asks for, only its worker knows."""
    from . import registry
    from .context import SyncContext

    def handler(ctx: SyncContext, input: Any) -> Any: ...

    return registry.Step(handler, name, options, scope={"SyncContext": SyncContext})


def _registered(
    conn: psycopg.Connection[tuple[Any, ...]], statements: db.Statements, name: str
) -> registry.Step[Any, Any]:
    """The newest version of a step as its pool has registered it."""
    table = f"{statements.quoted}.cyclone_kinds".replace("%", "%%")
    query = (
        f"SELECT version, max_attempts, timeout_s, queue, priority FROM {table} WHERE kind = %s ORDER BY version DESC"
    )
    row = conn.execute(query.encode(), (name,)).fetchone()
    if row is None:
        known = [kind for (kind,) in conn.execute(f"SELECT DISTINCT kind FROM {table} ORDER BY 1 LIMIT 1000".encode())]
        close = difflib.get_close_matches(name, known, n=3)
        raise NotFoundError(
            f"no pool has registered a step {name!r}"
            + (f"; did you mean {' or '.join(map(repr, close))}?" if close else "")
            + (
                " (see `cyclone migrate register`)"
                if known
                else "; start one, or run `cyclone migrate register TARGET`"
            )
        )
    version, max_attempts, timeout_s, queue, priority = row
    options: registry.StepOptions = {
        "version": version,
        "max_attempts": max_attempts,
        "timeout": timeout_s,
        "queue": queue,
        "priority": priority,
    }
    return _declare(name, options)


def _open(stack: contextlib.ExitStack, path: str) -> BinaryIO:
    if path == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(path, "rb"))
    except OSError as exc:
        raise InvalidOptionError(f"{path} cannot be read: {exc.strerror}") from None


def _lines(step: registry.Step[Any, Any], path: str, file: BinaryIO) -> Iterator[bytes]:
    """The inputs in a file, checked. A line is never read further than an input may be long."""
    name = "standard input" if path == "-" else path
    for number in itertools.count(1):
        try:
            line = file.readline(_MAX_INPUT + 2)
        except OSError as exc:
            raise InvalidOptionError(f"{name} cannot be read: {exc.strerror}; nothing was enqueued") from None
        if not line:
            return
        if line.strip():
            try:
                yield _encode(step, f"{name}, line {number}", line.strip())
            except InvalidOptionError as exc:
                raise InvalidInputError(f"{exc}; nothing was enqueued") from None


def _encode(step: registry.Step[Any, Any], where: str, text: bytes) -> bytes:
    from . import codec

    if len(text) > _MAX_INPUT:
        raise InvalidInputError(f"{where}: the input is longer than {_MAX_INPUT:,} bytes")
    try:
        return step.input_codec.encode(step.input_codec.decode(text))
    except (codec.DecodeError, codec.EncodeError) as exc:
        raise InvalidInputError(f"{where}: this is not JSON that can be stored: {exc}") from None


@contextlib.contextmanager
def _progress(file: BinaryIO | None) -> Generator[Callable[[int], None]]:
    """Shows how far a file has been read, if somebody watches. Yields what is told how many lines were sent."""
    if file is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    size = os.fstat(file.fileno()).st_size if file.seekable() else None
    columns = (TextColumn("{task.fields[count]} steps"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=size, count="0")

        def advance(count: int) -> None:
            progress.update(task, completed=file.tell() if size is not None else 0, count=f"{count:,}")

        yield advance


# cyclone submit


@app.command("submit")
def _submit(
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="The name of a registered workflow.")],
    input: Annotated[str, typer.Argument(metavar="JSON", help="Its input; null for a workflow without.")],
    once: Annotated[
        str | None, typer.Option(metavar="KEY", help="At most one run for this key: print the one that has it.")
    ] = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="The queue of its nodes.")] = None,
    priority: Annotated[str | None, typer.Option(metavar="N", help="From 0, the highest, to 9.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Wait so long first: 30s, 5m, 2h.")] = None,
    scheduled_at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Wait until then: 2030-01-31T08:00:00+00:00.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="DURATION", help="It fails unless it ends in time.")] = None,
    keep_for: Annotated[str | None, typer.Option(metavar="DURATION", help="Keep it so long after its end.")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A label; may be given again.")] = None,
    metadata: Annotated[str | None, typer.Option(metavar="JSON", help="A JSON object that goes with the run.")] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
) -> None:
    """Submit a workflow that a pool, or `cyclone migrate register`, has made known; its newest graph.

    Exits with 4 if the run of KEY has another input.
    """
    from . import codec, db, plan, store

    options = _parsed(
        tag,
        ("queue", queue, lambda _, text: text),
        ("priority", priority, config.parse_count),
        ("delay", delay, config.parse_seconds),
        ("scheduled_at", scheduled_at, _parse_instant),
        ("deadline", deadline, config.parse_seconds),
        ("keep_for", keep_for, config.parse_seconds),
        ("metadata", metadata, _parse_object),
    )
    anything: codec.Codec[Any] = codec.Codec(Any)
    try:
        value = anything.decode(os.fsencode(input))
    except codec.DecodeError as exc:
        raise InvalidInputError(f"JSON: this is not JSON that can be stored: {exc}") from None
    keys = None if once is None else [config.key("--once", once)]
    dsn, schema = _database(dsn, schema)
    statements = db.statements(schema)
    with _connected(dsn, schema) as conn:
        declared = _registered_workflow(conn, statements, workflow, anything)
        batch = store.prepare_runs(
            declared, [value], cast("graph.SubmitOptions", options), max_input_bytes=_MAX_INPUT, keys=keys
        )
        (done,) = plan.drive_sync(conn, store.submit(statements, batch))
    if done.error is not None:
        raise done.error
    if as_json:
        _print_json({"workflow": workflow, "run_id": done.run_id, "created": done.created})
    else:
        print(done.run_id)


def _registered_workflow(
    conn: psycopg.Connection[tuple[Any, ...]], statements: db.Statements, name: str, anything: codec.Codec[Any]
) -> graph.AnyWorkflow:
    """The newest graph of a workflow as a pool has registered it; what its input's type asks for, only a worker
    knows.
    """
    from . import graph

    table = f"{statements.quoted}.cyclone_graphs".replace("%", "%%")
    query = f"SELECT spec::text FROM {table} WHERE workflow = %s ORDER BY registered_at DESC, id DESC LIMIT 1"
    row = conn.execute(query.encode(), (name,)).fetchone()
    if row is None:
        known = [one for (one,) in conn.execute(f"SELECT DISTINCT workflow FROM {table} LIMIT 1000".encode())]
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise NotFoundError(f"no pool has registered a workflow {name!r}{hint} (see `cyclone migrate register`)")
    return graph.Stored(graph.GraphSpec.decode(row[0].encode()), anything)


# cyclone runs, cyclone cancel


@app.command("runs")
def _runs(
    workflow: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this workflow.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only running, completed, failed or cancelled ones.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only those with this submit key.")] = None,
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Only those with this label.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only those since then: 2h ago as 2h, or 2030-01-31T08:00:00+00:00."),
    ] = None,
    limit: Annotated[str | None, typer.Option(metavar="N", help="At most so many. [20]")] = None,
    after: Annotated[str | None, typer.Option(metavar="RUN", help="Only those that came before this one.")] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
) -> None:
    """List the runs of workflows, newest first, without inputs."""
    from . import db, plan, views

    ago_s, moment = None, None
    if since is not None and since[:1].isdigit() and since[-1:].isalpha() and "T" not in since:
        ago_s = config.parse_seconds("--since", since)
    elif since is not None:
        moment = _parse_instant("--since", since)
    count = 20 if limit is None else config.parse_count("--limit", limit)
    wanted = views.run_filter(
        workflow=workflow, state=state, key=key, tag=tag, created_after=moment, ago_s=ago_s, limit=count, after=after
    )
    dsn, schema = _database(dsn, schema)
    with _connected(dsn, schema) as conn:
        page = plan.drive_sync(conn, views.runs(db.statements(schema), wanted))
    if as_json:
        shown = [
            {k: v for k, v in msgspec.to_builtins(run).items() if k not in ("input", "metadata")} for run in page.items
        ]
        _print_json({"runs": shown, "next": page.next})
        return
    _print_table(
        ("run", "workflow", "state", "created", "finished", "key", "tags", "error"),
        [
            (
                run.id,
                run.name,
                run.state.value,
                run.created_at,
                run.finished_at,
                run.key,
                ", ".join(run.tags),
                f"{run.node or ''} {run.error_kind}: {(run.error or '').partition(chr(10))[0]}".strip()
                if run.error_kind
                else "",
            )
            for run in page.items
        ],
    )
    if page.next is not None:
        print(f"more: --after {page.next}")


@app.command("cancel")
def _cancel(
    run: RunArgument,
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="Only this node of it.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it is recorded.")] = None,
    actor: Annotated[str | None, typer.Option(metavar="NAME", help="Who asks for it. [user@host]")] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
) -> None:
    """Cancel a run, or one node of it. Exits with 4 if it had ended already."""
    from . import control, db, handles, plan, views

    asked = control.request(actor=actor, reason=reason)
    views.run_number(run)
    dsn, schema = _database(dsn, schema)
    statements = db.statements(schema)
    with _connected(dsn, schema) as conn:
        if node is None:
            done = plan.drive_sync(conn, handles.cancel_run(statements, None, run, asked))
        else:
            done = plan.drive_sync(conn, handles.cancel(statements, None, run, node, asked))
    what = f"run {run}" if node is None else f"node {node!r} of run {run}"
    if not done:
        raise InvalidStateError(f"{what} had ended already")
    _print_json({"run_id": run, "node": node}) if as_json else print(f"cancelled {_plain(what)}")


# cyclone steps, cyclone show


@app.command("steps")
def _steps(run: RunArgument, dsn: Dsn = None, schema: Schema = None, as_json: Json = False) -> None:
    """List the steps of a run with their states, without inputs and outputs."""
    found = _steps_of(run, *_database(dsn, schema))
    if as_json:
        hidden = {"input", "output", "metadata", "errors"}
        _print_json([{k: v for k, v in msgspec.to_builtins(step).items() if k not in hidden} for step in found])
        return
    columns = ("node", "step", "state", "attempts", "queue", "ready", "started", "finished", "error")
    _print_table(
        columns,
        [
            (
                step.node,
                step.kind,
                step.state.value,
                f"{step.attempts}/{step.max_attempts}",
                step.queue,
                step.due_at or step.ready_at,
                step.started_at,
                step.finished_at,
                f"{step.error_kind}: {(step.error or '').partition(chr(10))[0]}" if step.error_kind else "",
            )
            for step in found
        ],
    )


@app.command("show")
def _show(run: RunArgument, dsn: Dsn = None, schema: Schema = None, as_json: Json = False) -> None:
    """Show everything that is stored of a run: the graph of a workflow with what has become of each node, and the steps
    with inputs, outputs, each failure and the recorded events.
    """
    from . import db, graph, plan, views

    dsn, schema = _database(dsn, schema)
    with _connected(dsn, schema) as conn:
        found = plan.drive_sync(conn, views.steps(db.statements(schema), run))
        past = plan.drive_sync(conn, views.history(db.statements(schema), run))
        about = plan.drive_sync(conn, views.run(db.statements(schema), run))
        spec = plan.drive_sync(conn, views.spec(db.statements(schema), run))
    steps = [{**msgspec.structs.asdict(step), "events": [e for e in past if e.node == step.node]} for step in found]
    if as_json:
        if spec is None:
            _print_json(steps)
        else:
            whole = [event for event in past if event.step_kind is None]
            _print_json({**msgspec.structs.asdict(about), "graph": json.loads(spec), "events": whole, "steps": steps})
        return
    if spec is not None:
        _show_run(about, graph.GraphSpec.decode(spec.encode()), found)
    for number, step in enumerate(found):
        if number:
            print()
        fields = msgspec.structs.asdict(step)
        for name in ("input", "output", "metadata"):
            fields[name] = None if fields[name] is None else json.dumps(fields[name], ensure_ascii=False)
        fields["tags"] = ", ".join(step.tags)
        fields["timeout_s"] = None if step.timeout_s is None else f"{step.timeout_s:g}"
        del fields["errors"]
        _print_table(("", ""), [(name, value) for name, value in fields.items() if value not in (None, "")])
        for error in step.errors:
            print(_plain(f"\nattempt {error.attempt}, {_plain(error.at)}, {error.kind}: {error.message}"))
            if error.traceback:
                print(_plain(error.traceback.rstrip()))
        events = [event for event in past if event.node == step.node]
        if events:
            print()
            _print_table(
                ("at", "event", "attempt", "by", "detail"),
                [
                    (
                        event.at,
                        event.kind.value,
                        event.attempt,
                        event.actor or event.host,
                        # The error itself is told above.
                        ", ".join(f"{name} {value}" for name, value in event.detail.items() if name != "error"),
                    )
                    for event in events
                ],
            )


def _show_run(about: model.RunInfo, spec: graph.GraphSpec, steps: Sequence[model.StepInfo]) -> None:
    """A run of a workflow, and its graph as a tree: each node under the last of those that it depends on."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    fields = msgspec.structs.asdict(about)
    for name in ("input", "metadata"):
        fields[name] = None if fields[name] is None else json.dumps(fields[name], ensure_ascii=False)
    for name in ("tags", "discarded"):
        fields[name] = ", ".join(fields[name])
    _print_table(("", ""), [(name, value) for name, value in fields.items() if value not in (None, "")])
    states = {step.node: step for step in steps}
    root = Tree(Text(f"{about.name} ({about.state})"))
    places: dict[int, Tree] = {}
    for pos, node in enumerate(spec.nodes):
        step = states.get(node.name)
        words = [node.name, step.state.value if step is not None else "?"]
        if step is not None and step.fate is not None:
            words.append(f"({step.fate})")
        if node.map:
            items = [one.state.value for name, one in states.items() if name.startswith(f"{node.name}[")]
            words.append(f"{items.count('completed')} of {len(items)} items completed")
        if len(node.parents) > 1:
            words.append(f"after {', '.join(spec.nodes[one].name for one in node.parents)}")
        if pos == spec.result:
            words.append("= result")
        parent = places[node.parents[-1]] if node.parents else root
        places[pos] = parent.add(Text(_plain(" ".join(words))))
    print()
    Console(soft_wrap=True).print(root)
    print()


def _steps_of(run: str, dsn: str, schema: str) -> Sequence[model.StepInfo]:
    from . import db, plan, views

    with _connected(dsn, schema) as conn:
        return plan.drive_sync(conn, views.steps(db.statements(schema), run))


# cyclone retry


@app.command("retry")
def _retry(
    run: RunArgument,
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="The node; or --all for all of them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Reopen every discarded node of the run.")] = False,
    attempts: Annotated[str | None, typer.Option(metavar="N", help="How many more attempts to grant. [1]")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it is recorded.")] = None,
    actor: Annotated[str | None, typer.Option(metavar="NAME", help="Who asks for it. [user@host]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be reopened.")] = False,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
) -> None:
    """Reopen a discarded node of a run, or all of them: the same step becomes available again.

    Exits with 4 if NODE is not discarded; with --all nothing to reopen is no error.
    """
    from . import control, db, plan, views, wake

    if (node is None) != everything:
        raise InvalidOptionError("give either NODE or --all")
    granted = None if attempts is None else config.parse_count("--attempts", attempts)
    asked = control.request(actor=actor, reason=reason, additional_attempts=granted)
    number = views.run_number(run)
    dsn, schema = _database(dsn, schema)
    statements = db.statements(schema)
    with _connected(dsn, schema) as conn:
        # A dry run does the same and takes it back, so it finds what the other would find.
        with conn.transaction(force_rollback=dry_run):
            done = plan.drive_sync(conn, control.reopen(statements, number, node, asked, notify=False))
        if done.asleep and not dry_run:
            plan.drive_sync(conn, wake.sleepers(statements))
    nodes = [event.node for event in done.events]
    if as_json:
        _print_json({"run_id": run, "nodes": nodes, "dry_run": dry_run})
    elif nodes:
        print("\n".join(f"{'would reopen' if dry_run else 'reopened'} {_plain(one)}" for one in nodes))
    else:
        print("nothing is discarded")


# cyclone doctor


@app.command("doctor")
def _doctor(
    dsn: Dsn = None,
    schema: Schema = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also read all steps and check how they hang together.")] = False,
    as_json: Json = False,
) -> None:
    """Look for what is wrong with the database, and say what to do. Exits with 1 if there is an error."""
    from . import db, doctor

    dsn, schema = _database(dsn, schema)
    with db.connect_sync(dsn, application_name="cyclone doctor", pooler=True) as conn:
        findings = doctor.check(conn, schema)
        installed = not any(finding.name in ("schema version", "missing table") for finding in findings)
        damages = doctor.deep(conn, schema) if deep and installed else []
    if as_json:
        _print_json({"findings": findings, "damages": damages if deep and installed else None})
    else:
        for finding in findings:
            print(f"{finding.severity}: {_plain(finding.text)}\n    {_plain(finding.remedy)}")
        for damage in damages:
            print(f"damage: {_plain(damage)}")
        if not findings and not damages:
            print("nothing is wrong")
    if damages or any(finding.severity == "error" for finding in findings):
        raise typer.Exit(FAILED)


# Processes

_WORKER_HELP = {
    "queues": ("NAMES", "The queues to take steps from, separated by commas. [default: default]"),
    "concurrency": ("N", "How many handlers a worker runs at once. [100]"),
    "threads": ("N", "How many of them may be sync handlers. [32]"),
    "lease": ("DURATION", "How long a silent worker keeps its steps. [60s]"),
    "poll_interval": ("DURATION", "How often to look for work that nothing announced. [1s]"),
    "notify": ("BOOL", "Whether to listen for notifications; no behind a pooler in transaction mode. [yes]"),
    "claim_batch": ("N", "The most steps to claim at once, or auto. [auto]"),
    "settle_batch": ("N", "The most outcomes to record in one transaction, or auto. [auto]"),
    "settle_linger": ("DURATION", "How long an outcome waits for others to join its transaction. [2ms]"),
    "completion_pool_size": ("N", "The most connections for completion transactions. [8]"),
    "completion_pool_timeout": ("DURATION", "How long a handler waits for one of them. [30s]"),
    "drain_timeout": ("DURATION", "How long handlers may go on after a stop. [30s]"),
    "stall_limit": ("DURATION", "How long a handler may block the event loop. [five leases]"),
    "max_output_bytes": ("SIZE", "The largest output. [1MiB]"),
    "max_error_bytes": ("SIZE", "Where a stored error is cut. [16KiB]"),
}


def _with_worker_options(command: _Command) -> _Command:
    """Gives a command one option for each of a worker's, in place of its `**options`, so that none can be forgotten."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name in config.WORKER_NAMES:
        metavar, text = _WORKER_HELP[name]
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
            )
        )
    vars(command)["__signature__"] = signature.replace(parameters=parameters)
    return command


@_pool_app.command(context_settings=_HELP, no_args_is_help=True)
@_with_worker_options
def _pool(
    target: Target,
    *,
    procs: Annotated[str | None, typer.Option(metavar="N", help="How many workers. [one per CPU]")] = None,
    sweeper: Annotated[
        bool | None, typer.Option("--sweeper/--no-sweeper", help="Whether to run a sweeper. [yes]")
    ] = None,
    metrics_port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Where to serve /metrics, /healthz and /readyz; or none. [9464]")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(metavar="HOST", help="The address to serve them at. [127.0.0.1]")
    ] = None,
    recycle_after: Annotated[
        str | None, typer.Option(metavar="N", help="Replace a worker when it has executed so many steps. [never]")
    ] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    **options: Any,
) -> None:
    """Run worker processes and a sweeper for the steps of TARGET, and replace those that end.

    TERM or Ctrl-C lets running handlers finish, a second one stops at once; HUP replaces the workers one by one.
    """
    from . import supervisor

    serve = metrics_port != "none"
    found = _settings(
        dsn,
        schema,
        procs=procs,
        sweeper=sweeper,
        metrics_host=metrics_host,
        metrics_port=metrics_port if serve else None,
        recycle_after=recycle_after,
        **options,
    )
    if not serve:
        found["metrics_port"] = None
    raise typer.Exit(supervisor.Pool(target, **found).run())


@app.command("worker")
@_with_worker_options
def _worker(target: Target, *, dsn: Dsn = None, schema: Schema = None, **options: Any) -> None:
    """Run one worker for the steps of TARGET, for service managers of their own; it needs a sweeper somewhere.

    TERM or Ctrl-C lets running handlers finish, a second one stops at once.
    """
    from . import process, registry, worker

    dsn, schema = _database(dsn, schema)
    found = _settings(None, None, **options)
    for name in ("dsn", "schema"):
        found.pop(name, None)
    handlers = registry.load(target)
    process.configure_logging("worker")
    working = worker.Worker(dsn, handlers, schema=schema, **found)
    code = _until_stopped(working.run(), lambda drain: working.stop(drain=drain))
    raise typer.Exit(code or 0)


@_sweeper_app.command(context_settings=_HELP)
def _sweeper(
    dsn: Dsn = None,
    schema: Schema = None,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="The longest pause between two rounds.")] = "1s",
) -> None:
    """Run one sweeper: it takes back the steps of lost workers and starts what is due. A pool has one already."""
    from . import process, sweep

    dsn, schema = _database(dsn, schema)
    sweeping = sweep.Sweeper(dsn, schema=schema, interval=config.parse_seconds("--interval", interval))
    process.configure_logging("sweeper")
    _until_stopped(sweeping.run(), lambda drain: sweeping.stop())


def _until_stopped(running: Coroutine[Any, Any, _Code], stop: Callable[[bool], object]) -> _Code:
    """Runs until TERM or Ctrl-C; a second one is told to `stop` as False."""
    import asyncio
    import signal

    import uvloop

    async def until_stopped() -> _Code:
        loop = asyncio.get_running_loop()
        first = itertools.chain([True], itertools.repeat(False))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: stop(next(first)))
        return await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(until_stopped())


if __name__ == "__main__":
    main()
