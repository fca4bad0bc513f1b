"""Ending an epoch takes the list of workers at the address, since every key must be declared. These two loops
(blocking and asyncio) call the script again with the list it answers; each is one idempotent call by its call id.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ..errors import StoreUnavailable, UnknownAddress
from ..protocol import Registration, Verdict
from .ops import Ops

if TYPE_CHECKING:
    from .client import AsyncStore, SyncStore

ROUNDS = 20  # workers may join between two rounds; a list that changes this often is trouble elsewhere


def new_call() -> str:
    """An id for one call and all its repetitions."""
    return secrets.token_hex(8)


def fail_address(store: SyncStore, ops: Ops, address: str, reason: str, by: str, epoch: int | None = None) -> Verdict:
    """Fail `address` in `epoch` (None: the current one). FAILED, or STALE if it had failed or moved already.

    Raises UnknownAddress, StoreUnavailable (repeating the call is safe: it finds the node failed).
    """
    call, workers = new_call(), ()  # type: tuple[str, tuple[str, ...]]
    if epoch is None:
        epoch = int(store.client.hget(ops.keys.node(address), "epoch") or 0)
    if epoch == 0:
        raise UnknownAddress(f"{address}: no worker or node has used it in namespace {ops.settings.namespace!r}")
    for _ in range(ROUNDS):
        verdict = store.run(ops.fail_node(address, epoch, call, by, reason, workers))
        if verdict.outcome != "RETRY":
            return verdict
        workers = verdict.workers
    raise StoreUnavailable(f"the workers at {address} changed {ROUNDS} times while it was to be failed: try again")


async def fail_address_async(
    store: AsyncStore, ops: Ops, address: str, reason: str, by: str, epoch: int, call: str
) -> Verdict:
    """As fail_address, on the event loop."""
    workers: tuple[str, ...] = ()
    for _ in range(ROUNDS):
        verdict = await store.run(ops.fail_node(address, epoch, call, by, reason, workers))
        if verdict.outcome != "RETRY":
            return verdict
        workers = verdict.workers
    raise StoreUnavailable(f"the workers at {address} changed {ROUNDS} times while it was to be failed: try again")


async def register_async(
    store: AsyncStore,
    ops: Ops,
    address: str,
    how: str,
    instance: str,
    epoch: int,
    by: str,
    info: str = "",
    draining: bool | None = None,
) -> Registration:
    """Register an instance; where it ends an epoch, with the epoch and the workers the store lists.

    A probe insists on the epoch it began in; a node takes the current one.
    """
    call, workers = new_call(), ()  # type: tuple[str, tuple[str, ...]]
    for _ in range(ROUNDS):
        op = ops.register_node(address, how, instance, epoch, call, by, workers, info, draining)
        # A probe comes again at the next interval; a node has nobody else to say it.
        answer = await (store.once(op) if how == "probe" else store.run(op))
        if answer.outcome != "RETRY":
            return answer
        workers = answer.workers
        if how != "probe":
            epoch = answer.node.epoch
    raise StoreUnavailable(f"the workers at {address} changed {ROUNDS} times while it registered: try again")
