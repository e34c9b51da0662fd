"""The caller's transaction: which psycopg connection it is on, whatever library holds it.

A caller has a connection of psycopg's, of SQLAlchemy's (or an ORM session), or Django's; each leads to a connection
of the driver, and the plans run there. Neither library is imported here: an object of theirs can exist only after its
library was imported by somebody else. Nothing but SQL is sent, so what the library believes of its transaction stays
true.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn, cast

import psycopg
from psycopg.pq import TransactionStatus

from .errors import TransactionRequiredError

_ASYNC = "a psycopg.AsyncConnection, or an AsyncConnection or AsyncSession of SQLAlchemy (postgresql+psycopg)"
_SYNC = "a psycopg.Connection, a Connection or Session of SQLAlchemy (postgresql+psycopg), or the connection of Django"


async def connection(tx: Any, who: str) -> psycopg.AsyncConnection[Any]:
    """The driver's connection of an async transaction.

    Raises TypeError for what is none, TransactionRequiredError for one that is not in a transaction. `who` needs it,
    for the message.
    """
    found: Any = tx
    library: Any = sys.modules.get("sqlalchemy.ext.asyncio")
    if library is not None:
        if isinstance(found, library.async_scoped_session):
            found = found()
        if isinstance(found, library.AsyncSession):
            _check_begins(found.sync_session)
            found = await found.connection()
        if isinstance(found, library.AsyncConnection):
            _check_begun(found)
            found = _lent_by((await found.get_raw_connection()).driver_connection)
    if not _is(found, psycopg.AsyncConnection):
        _refuse(tx, found, who, _ASYNC)
    _check_in_transaction(found)
    return cast("psycopg.AsyncConnection[Any]", found)


def connection_sync(tx: Any, who: str) -> psycopg.Connection[Any]:
    """As `connection`, of a sync transaction."""
    found: Any = tx
    core: Any = sys.modules.get("sqlalchemy.engine")
    orm: Any = sys.modules.get("sqlalchemy.orm")
    if orm is not None and isinstance(found, orm.scoped_session):
        found = found()
    if orm is not None and isinstance(found, orm.Session):
        _check_begins(found)
        found = found.connection()
    if core is not None and isinstance(found, core.Connection):
        _check_begun(found)
        found = _lent_by(found.connection.driver_connection)
    django: Any = sys.modules.get("django.db.backends.base.base")
    # What programs import as `django.db.connection` only stands for the connection, and hands on its methods.
    if django is not None and type(found).__name__ == "ConnectionProxy":
        found = found.get_autocommit.__self__
    if django is not None and isinstance(found, django.BaseDatabaseWrapper):
        if found.vendor == "postgresql" and found.get_autocommit():
            raise TransactionRequiredError(
                "Django's connection is in autocommit; call this inside transaction.atomic()"
            )
        # What Django's own cursors check. The second refuses a block that will be rolled back without an error,
        # whatever is done in it: nobody may believe that something was stored there.
        found.validate_thread_sharing()
        found.validate_no_broken_transaction()
        found = found.connection
    if not _is(found, psycopg.Connection):
        _refuse(tx, found, who, _SYNC)
    _check_in_transaction(found)
    return cast("psycopg.Connection[Any]", found)


def _is(found: object, kind: type[Any]) -> bool:
    return isinstance(found, kind)


def _refuse(tx: object, found: object, who: str, accepted: str) -> NoReturn:
    driver = f" over {type(found).__module__}.{type(found).__name__}" if found is not tx else ""
    raise TypeError(f"a {who} takes {accepted}, in a transaction; not {type(tx).__name__}{driver}")


def _lent_by(driver: Any) -> Any:
    """The connection itself, where cyclone.ext has put another in front of it."""
    return getattr(driver, "__cyclone_connection__", driver)


def _check_begins(session: Any) -> None:
    if not session.autobegin and not session.in_transaction():
        raise TransactionRequiredError("the session is in no transaction and begins none by itself; call `begin()`")


def _check_begun(conn: Any) -> None:
    # Begun behind its back, the transaction would not be ended by its `commit`.
    if not conn.in_transaction():
        raise TransactionRequiredError("the connection is in no transaction; call this inside `engine.begin()`")


def _check_in_transaction(conn: Any) -> None:
    # Without autocommit psycopg begins a transaction by itself, and it is the caller's to commit.
    if conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE:
        raise TransactionRequiredError(
            "the connection is in autocommit and in no transaction; call this inside `conn.transaction()`"
        )
