"""The janitor leaves an address that had no room for long, also if it looks while a lease is being renewed."""

from __future__ import annotations

import asyncio
import types
from typing import Any

from coordinator import Settings
from coordinator.decide.ledger import Ledger
from coordinator.protocol import NodeView, SyncReply, SyncStatus
from coordinator.runtime.janitor import FORGET_LEASES, Janitor

A = "10.0.0.1:80"


class Store:
    """Takes every call."""

    async def run(self, op: object) -> None:
        pass


def test_a_renewal_on_its_way_does_not_begin_the_wait_anew() -> None:
    """Every other look meets a batch that is not answered yet: the address is forgotten all the same, and on time."""
    settings = Settings(lease_s=2.0)
    ledger = Ledger("w", lambda: 0.0, lambda: None)
    book = ledger.open_book(A)
    ops = types.SimpleNamespace(reap_worker=lambda *args, **more: None)
    detector = types.SimpleNamespace(forget=lambda address: None)
    core: Any = types.SimpleNamespace(
        ledger=ledger,
        settings=settings,
        feeds=[],
        detector=detector,
        store=Store(),
        ops=ops,
        ended=lambda address: None,
    )
    janitor, looks = Janitor(core), 10 * FORGET_LEASES
    for look in range(looks):
        if look % 2:
            book.batch(float(look), 500)
        elif book.behind:
            book.apply(book.batch(float(look), 500), SyncReply(SyncStatus.OK, NodeView(1)), float(look))
        asyncio.run(janitor._forget(float(look)))
        if ledger.book(A) is None:
            break
    assert 2.0 * FORGET_LEASES <= look <= 2.0 * FORGET_LEASES + 1
