"""One asyncio loop in one daemon thread: everything asynchronous of a worker or node runs there.

A forked child has no such thread. `check` refuses there with a clear error; the parent is not touched.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from ..errors import WorkerClosed

T = TypeVar("T")


class LoopThread:
    """An event loop on its own thread. Public methods may be called from any thread but its own."""

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, os.getpid()
        self.loop = asyncio.new_event_loop()
        self._closing, self._door = False, threading.Lock()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(asyncio.sleep(0))  # what was submitted last becomes a task
        if left := asyncio.all_tasks(self.loop):  # somebody waits for these in another thread
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        self.loop.close()

    @property
    def alive(self) -> bool:
        """Whether the loop turns, in this process."""
        return os.getpid() == self.pid and self.thread.is_alive()

    def check(self) -> None:
        """Raise WorkerClosed if the loop is gone or belongs to the parent of this process."""
        if os.getpid() != self.pid:
            raise WorkerClosed(f"{self.name} belongs to process {self.pid}: create a new one after fork")
        if not self.thread.is_alive():
            raise WorkerClosed(f"{self.name} is closed: create a new one")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop; the future may be waited for in a thread or wrapped for asyncio."""
        try:
            self.check()
            with self._door:
                if self._closing:
                    raise WorkerClosed(f"{self.name} is closed: create a new one")
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `work` on the loop and wait for it here. Never from the loop's own thread."""
        if threading.current_thread() is self.thread:
            work.close()
            raise RuntimeError(
                f"{self.name}: a blocking call from its own loop would wait for itself; use the a... form"
            )
        try:
            return self.submit(work).result(timeout_s)
        except CancelledError:
            raise WorkerClosed(f"{self.name} was closed meanwhile: create a new one") from None

    def soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop soon; quietly nothing if the loop is gone."""
        if os.getpid() == self.pid and not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(callback)
            except RuntimeError:  # closed in between
                return

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the loop and its thread."""
        with self._door:
            self._closing = True
        self.soon(self.loop.stop)
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout_s)
