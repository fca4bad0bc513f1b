"""The demo's decode worker: opens rooms, receives their bytes, closes them; fails a room only when it is told to.

A broken connection is evidence, not a verdict: it is reported (`report_transfer_error`) and the room waits until
`on_failure` says what happened. A room that is told nothing for STUCK_S is recorded as stuck. Everything that
happens is recorded where it happens, before anything else is done about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import aiohttp  # noqa: F401  (the first probe and the first sync must not wait for these)
import redis.asyncio  # noqa: F401

from .. import Failure, Room, Settings, Status, Worker
from ..errors import CoordinatorError, JoinRefused
from . import trace, wire
from .child import begin, stop_on_signals, wait_for, wait_for_go
from .facts import Facts
from .pull import Puller, make_engine, report
from .roles import LOOK_S, STUCK_S, WorkerOptions

__all__ = ["WorkerOptions", "WorkerProcess", "main"]

logger = logging.getLogger("coordinator.demo.worker")

STORED_S = 0.1
FLUSH_S = 0.5
TALLY_S = 2.0
REPORT_EVERY = 5  # one of so many tallies is logged
FOREVER_S = 10 * 365 * 86400.0


@dataclass(slots=True)
class Open:
    """One open room, as the coroutine that receives it and the failure callback see it."""

    room: Room
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    writer: asyncio.StreamWriter | None = None

    def fail(self) -> None:
        """End the transfer: on the loop, once the room has failed."""
        self.failed.set()
        if self.writer is not None:
            self.writer.transport.abort()


class WorkerProcess:
    """One life of a worker."""

    def __init__(self, options: WorkerOptions, worker: Worker) -> None:
        self.options, self.worker = options, worker
        self.facts = Facts(options.facts or None)
        self.dice = random.Random(f"worker {options.seed} {options.name}")
        self.stuck_s, self.ending = STUCK_S, False
        self.puller: Puller | None = None  # with an engine
        self.nodes = list(options.nodes)
        self.open: dict[tuple[str, int], Open] = {}
        self.unstored: list[tuple[str, int]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.opened = self.succeeded = self.failed = self.unserved = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def record_failure(self, room: Room, failure: Failure) -> None:
        """The on_failure callback, on a thread of the worker's."""
        self.facts.write(
            "failed",
            address=room.address,
            room=room.id,
            cause=str(failure.cause),
            reason=failure.reason,
            epoch=failure.epoch,
        )
        self.failed += 1
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: the worker is being closed
                self.loop.call_soon_threadsafe(self._end_transfer, room.address, room.id)

    async def run(self) -> None:
        """Open rooms for as long as the options say, see them through, then wait for SIGTERM or SIGINT."""
        self.loop = asyncio.get_running_loop()
        stop = stop_on_signals()
        helpers = [asyncio.create_task(self._note_stored()), asyncio.create_task(self._report())]
        if not self.nodes:
            helpers.append(asyncio.create_task(self._look_for_nodes()))
        schedule = asyncio.create_task(self._follow_schedule())
        ending = asyncio.create_task(stop.wait())
        await asyncio.wait({schedule, ending}, return_when=asyncio.FIRST_COMPLETED)
        if schedule.done():
            schedule.result()
            while self.tasks and not stop.is_set():
                await asyncio.wait({*self.tasks, ending}, return_when=asyncio.FIRST_COMPLETED)
            self.facts.write("drained")
            await stop.wait()
        self.ending = True
        for task in (schedule, *helpers, *self.tasks):
            task.cancel()
        for address, room in self.open:
            self.facts.write("stuck", address=address, room=room)
        self._tally()

    # -- rooms --------------------------------------------------------------------------------------------------

    def _requests(self) -> Iterator[trace.Request]:
        o = self.options
        seconds = o.seconds or FOREVER_S
        if o.trace:
            return trace.every(trace.replay(o.trace, o.speed, seconds), o.index, o.count)
        return trace.synthetic(o.rate, seconds, f"arrivals {o.seed} {o.name}")

    async def _follow_schedule(self) -> None:
        assert self.loop is not None
        start = self.loop.time()
        for request in self._requests():
            wait_s = start + request.at_s - self.loop.time()
            await asyncio.sleep(max(0.0, wait_s))
            task = asyncio.create_task(self._serve(request))
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("room_crashed", exc_info=error)

    async def _serve(self, request: trace.Request) -> None:
        """One room from join to leave."""
        item = self._join()
        if item is None:
            self.unserved += 1
            return
        room, key = item.room, (item.room.address, item.room.id)
        try:
            error = await self._receive(item, request.input_length)
            if error is None and room.update(Status.SUCCESS):
                self.facts.write("succeeded", address=room.address, room=room.id)
                self.succeeded += 1
                return
            if error is not None and not item.failed.is_set():
                text = str(error) or type(error).__name__
                self.facts.write("broken", address=room.address, room=room.id, error=text)
                if self.options.report_errors:
                    self._report_error(room.address, error)
            if not await wait_for(item.failed, self.stuck_s):
                self.facts.write("stuck", address=room.address, room=room.id)
        finally:
            self.open.pop(key, None)
            if not self.ending and self._leave(room):  # at the end the worker's close reports them to their nodes
                self.facts.write("left", address=room.address, room=room.id)

    def _join(self) -> Open | None:
        """Open a room at a node picked at random; at another one if that takes none; None if nobody does."""
        number = self.dice.getrandbits(63)
        for address in self.dice.sample(self.nodes, len(self.nodes)):
            try:
                room = (self.puller.backend.open if self.puller else self.worker.join)(address, number)
            except JoinRefused as refusal:
                self.facts.write("refused", address=address, state=refusal.state)
                continue
            key = (room.address, room.id)
            item = self.open[key] = Open(room)
            self.facts.write("opened", address=room.address, room=room.id)
            self.unstored.append(key)
            self.opened += 1
            if room.failure is not None:  # it failed before the callback could find it here
                item.failed.set()
            return item
        return None

    def _leave(self, room: Room) -> bool:
        return self.puller.leave(room) if self.puller else room.leave()

    def _report_error(self, address: str, error: Exception) -> None:
        if self.puller is not None:
            report(self.puller.backend, address, error)
        else:
            self.worker.report_transfer_error(address, str(error) or type(error).__name__)

    async def _receive(self, item: Open, tokens: int) -> Exception | None:
        """Receive all bytes of a room; None, or why they did not come."""
        room = item.room
        request = wire.RoomRequest(self.worker.id, room.id, tokens)
        host = room.address.rpartition(":")[0].strip("[]")
        try:
            async with asyncio.timeout(self.stuck_s):
                reader, writer = await asyncio.open_connection(host, wire.stream_port(room.address))
                item.writer = writer
                self._move(room, Status.WAITING_FOR_INPUT)
                writer.write(request.encode())
                if item.failed.is_set():
                    return wire.BrokenTransfer("the room has failed")
                begin = partial(self._move, room, Status.TRANSFERRING)
                if self.puller is not None:
                    await self.puller.receive(room, request.size, reader, writer, begin)
                else:
                    await wire.receive(reader, request.size, begin)
        except (OSError, wire.BrokenTransfer, CoordinatorError) as exc:
            return exc
        finally:
            if item.writer is not None:
                item.writer.close()
        return None

    def _move(self, room: Room, status: Status) -> None:
        if room.update(status):
            self.facts.write("status", address=room.address, room=room.id, status=status.name)

    def _end_transfer(self, address: str, room: int) -> None:
        if (item := self.open.get((address, room))) is not None:
            item.fail()

    # -- beside them --------------------------------------------------------------------------------------------

    async def _note_stored(self) -> None:
        """Record which openings are in the store for certain: the audit asks of the store no more than that."""
        while True:
            await asyncio.sleep(STORED_S)
            rooms, self.unstored = self.unstored, []
            try:
                if rooms and await self.worker.aflush(FLUSH_S):
                    self.facts.write("stored", rooms=rooms)
                else:
                    self.unstored = rooms + self.unstored
            except CoordinatorError as exc:
                self.unstored = rooms + self.unstored
                logger.info("flush_failed error=%s", exc)

    async def _report(self) -> None:
        while True:
            for _ in range(REPORT_EVERY):
                await asyncio.sleep(TALLY_S)
                self._tally()
            logger.info("tally %s", " ".join(f"{name}={n}" for name, n in self.counts().items()))

    async def _look_for_nodes(self) -> None:
        """Learn the nodes' addresses from the store's index: for a worker that was given none."""
        from .. import inspect
        from ..store.connect import sync_client
        from ..store.discover import find_store
        from ..store.keys import Keys

        settings = Settings.load()
        client = sync_client(find_store(self.options.url).url, settings)
        while True:
            try:
                found = await asyncio.to_thread(inspect.addresses, client, Keys(settings.namespace))
                if found != self.nodes:
                    logger.info("nodes addresses=%s", ",".join(found))
                self.nodes = found
            except CoordinatorError as exc:
                logger.warning("looking_for_nodes_failed error=%s", exc)
            await asyncio.sleep(LOOK_S)

    def _tally(self) -> None:
        self.facts.write("tally", **self.counts(), counters=self.worker.health()["counters"])

    def counts(self) -> dict[str, int]:
        """Rooms so far; `unserved` are requests for which no node took a room."""
        return {
            "opened": self.opened,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "open": len(self.open),
            "unserved": self.unserved,
        }


def main(options: WorkerOptions, kind: type[WorkerProcess] = WorkerProcess) -> int:
    """Run a worker until it is told to end. Raises ConfigError, StoreNotFound."""
    engine = make_engine(options.transport, options.name)
    with ExitStack() as stack:
        worker = stack.enter_context(Worker(options.url, name=options.name))
        process = kind(options, worker)
        if engine is not None:
            process.puller = Puller(worker, engine)
            stack.callback(process.puller.close)
        worker.on_failure(process.record_failure)
        process.facts.write("start", role="worker", id=worker.id, pid=os.getpid())
        if options.wait and not wait_for_go():
            return 0
        asyncio.run(process.run())
    return 0


if __name__ == "__main__":
    sys.exit(begin(WorkerOptions, main))
