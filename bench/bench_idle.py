"""What a pool costs while there is nothing to do."""

from __future__ import annotations

import time

from psycopg import conninfo

from bench import work
from bench.conftest import Meter, Round
from bench.server import Server

_PROCS = 16
# An idle session reports what it counted only after 10 s: then the start is no longer in the figures.
_REST_S = 12


def bench_idle(meter: Meter, server: Server) -> None:
    window_s = meter.size(10, quick=2)

    def one_round() -> Round:
        with server.database() as dsn, work.pool(dsn, _PROCS) as crew:
            crew.go()
            time.sleep(meter.size(_REST_S, quick=2))
            name = conninfo.conninfo_to_dict(dsn)["dbname"]

            def watch() -> None:
                for tenth in range(10):
                    meter.show(tenth / 10)
                    time.sleep(window_s / 10)

            transactions = server.ask(_TRANSACTIONS, name)
            with server.counting(crew.pids) as used:
                seconds = yield watch
            transactions = server.ask(_TRANSACTIONS, name) - transactions
            return {
                "statements/s": transactions / seconds,
                "CPU % pool": None if used.cpu_work_s is None else used.cpu_work_s / seconds * 100,
                "CPU % server": None if used.cpu_server_s is None else used.cpu_server_s / seconds * 100,
                "WAL B/s": used.wal_bytes / seconds,
                "connections": server.ask("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", name),
            }

    meter.measure(
        f"pool of {_PROCS}",
        one_round,
        bars=("statements/s", "CPU % pool", "CPU % server"),
        goal=("statements/s", "<=", 5.0),
    )


# Outside a transaction block each statement is one transaction. Asked on another database, so not counted itself.
_TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
