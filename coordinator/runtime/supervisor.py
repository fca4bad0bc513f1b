"""Keeps loops alive. No exception ends one: it is logged, counted, and the loop starts again after a pause.

`beat` is called by each loop once a round; its age tells a person or a monitor whether the loop still turns.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

log = logging.getLogger("coordinator")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
CANCEL_AGAIN_S = 0.05
QUIET_S = 10.0  # a loop that ran this long starts with a short pause again


@dataclass(slots=True)
class Pulse:
    """One loop's signs of life."""

    last_beat_s: float
    restarts: int = 0
    last_error: str = ""


@dataclass(slots=True)
class Supervisor:
    """Runs named loops as tasks of the running event loop."""

    pulses: dict[str, Pulse] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def beat(self, name: str) -> None:
        """The loop `name` has come around."""
        self.pulses[name].last_beat_s = time.monotonic()

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run `loop` until `stop`, again and again."""
        self.pulses[name] = Pulse(time.monotonic())
        self._tasks.append(asyncio.get_running_loop().create_task(self._keep(name, loop), name=name))

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        pause = FIRST_PAUSE_S
        pulse = self.pulses[name]
        while True:
            started = time.monotonic()
            try:
                await loop()
                error = "it returned"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                error = "CancelledError: something it waited for was cancelled"  # not this loop: it goes on
                log.exception("loop_restarted name=%s", name)
            except Exception as exc:  # the reason for this class: whatever it is, the loop goes on
                error = f"{type(exc).__name__}: {exc}"
                log.exception("loop_restarted name=%s", name)
            pulse.restarts += 1
            pulse.last_error = error
            pause = FIRST_PAUSE_S if time.monotonic() - started > QUIET_S else min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause)

    async def stop(self) -> None:
        """Cancel every loop and wait until each has ended."""
        await cancel_all(self._tasks)
        self._tasks.clear()

    def ages(self) -> dict[str, float]:
        """Seconds since the last beat of each loop."""
        now = time.monotonic()
        return {name: now - pulse.last_beat_s for name, pulse in self.pulses.items()}


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel `tasks` and wait until all have ended; again and again, since a driver may swallow a cancellation that
    comes in the very moment in which its answer does."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        left = (await asyncio.wait(left, timeout=CANCEL_AGAIN_S))[1]
