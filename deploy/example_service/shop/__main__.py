"""`python -m shop setup` makes the table; `python -m shop order [N]` places N orders and waits for the first charge."""

from __future__ import annotations

import os
import sys

import psycopg

from cyclone import SyncClient

from .jobs import Order, charge, send_receipt

# No unique constraint: it is Cyclone that sees to it that each order is charged once.
LEDGER = "CREATE TABLE IF NOT EXISTS shop_ledger (charge text NOT NULL, order_id text NOT NULL, cents integer NOT NULL)"


def main() -> None:
    dsn = os.environ["CYCLONE_DSN"]
    match sys.argv[1:]:
        case ["setup"]:
            with psycopg.connect(dsn) as conn:
                conn.execute(LEDGER)
        case ["order", *rest]:
            count = int(rest[0]) if rest else 100
            orders = [Order(id=str(number), email="ada@example.com", cents=100 + number) for number in range(count)]
            with SyncClient(dsn) as client, psycopg.connect(dsn) as conn:
                # Both kinds, or neither.
                with conn.transaction():
                    charges = charge.enqueue_many_tx(client, conn, orders)
                    send_receipt.enqueue_many_tx(client, conn, orders)
                print(f"placed {count} orders; the first charge is {charges[0].result(timeout=60)}")
        case _:
            sys.exit(__doc__)


main()
