"""Tells the owner about failed rooms, on a thread of its own: a slow or failing callback delays no loop.

Each (room, failure) is told once to every callback, in the order of the failures of one address.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ..decide.ledger import Room
from ..rooms import Failure

log = logging.getLogger("coordinator")

Callback = Callable[[Room, Failure], object]


class Delivery:
    """A queue of work and the thread that does it. `errors` counts what callbacks raised."""

    def __init__(self, name: str) -> None:
        self.errors = 0
        self.told = 0
        self._name = name
        self._callbacks: list[Callback] = []
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()

    def on_failure(self, callback: Callback) -> None:
        """Call `callback(room, failure)` for each room failed from now on; a coroutine function runs on the
        event loop that is running here."""
        if asyncio.iscoroutinefunction(callback):
            loop = asyncio.get_running_loop()
            self._callbacks.append(lambda room, failure: _on_loop(loop, callback(room, failure), self))
        else:
            self._callbacks.append(callback)

    def failed(self, pairs: list[tuple[Room, Failure]]) -> None:
        """Tell about these rooms, soon."""
        if pairs and self._callbacks:
            self.do(lambda: self._tell(pairs))

    def do(self, work: Callable[[], object]) -> None:
        """Do `work` on the delivery thread, after what was queued before."""
        with self._start:
            self._queue.put(work)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads now: told with the next piece of work
                    self.errors += 1
                    log.exception("delivery_waits")
                else:
                    self._thread = thread

    def _tell(self, pairs: list[tuple[Room, Failure]]) -> None:
        for room, failure in pairs:
            for callback in list(self._callbacks):
                try:
                    callback(room, failure)
                except BaseException:  # not ours, and SystemExit or CancelledError would end this thread in silence
                    self.errors += 1
                    log.exception("callback_failed room=%d address=%s", room.id, failure.address)
            self.told += 1

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:
                self.errors += 1
                log.exception("delivery_failed")

    def stop(self, timeout_s: float = 5.0) -> None:
        """Deliver what is queued, then end the thread."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._thread = None


def _on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, object], delivery: Delivery) -> None:
    def done(future: Any) -> None:
        if not future.cancelled() and future.exception() is not None:
            delivery.errors += 1
            log.error("callback_failed error=%r", future.exception())

    try:
        asyncio.run_coroutine_threadsafe(work, loop).add_done_callback(done)
    except RuntimeError:  # that loop has ended, and with it whoever wanted to know
        work.close()
        delivery.errors += 1
