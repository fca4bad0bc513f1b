"""The supervisor: no exception ends a loop (G5). Pauses are recorded instead of waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest
from util import wait_until_async

from coordinator.runtime.supervisor import FIRST_PAUSE_S, LONGEST_PAUSE_S, QUIET_S, Supervisor


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the supervisor would have slept, in seconds."""
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept


def failing(times: int, turned: asyncio.Event, error: BaseException | None = None) -> Callable[[], Awaitable[None]]:
    """A loop that raises (or returns) that often, then turns."""
    left = times

    async def loop() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            if error is not None:
                raise error
            return
        turned.set()
        await asyncio.Event().wait()

    return loop


@pytest.mark.parametrize("times", [0, 1, 7, 100])
def test_a_loop_that_raises_is_restarted_each_time(
    times: int, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, logged with its traceback, remembered; after that it turns."""

    async def run() -> Supervisor:
        s, turned = Supervisor(), asyncio.Event()
        s.start("sync", failing(times, turned, ValueError("boom")))
        await asyncio.wait_for(turned.wait(), 10)
        await s.stop()
        return s

    with caplog.at_level(logging.ERROR, "coordinator"):
        pulse = asyncio.run(run()).pulses["sync"]
    assert (pulse.restarts, len(pauses)) == (times, times)
    assert pulse.last_error == ("ValueError: boom" if times else "")
    records = [r for r in caplog.records if r.getMessage() == "loop_restarted name=sync"]
    assert len(records) == times
    assert all(r.exc_info for r in records)


def test_pauses_grow_with_jitter_and_are_bounded(pauses: list[float]) -> None:
    """Each pause is at least half of its bound; the bounds double up to 2 s: a broken loop cannot burn the CPU."""

    async def run() -> None:
        s, turned = Supervisor(), asyncio.Event()
        s.start("sync", failing(12, turned, RuntimeError("x")))
        await asyncio.wait_for(turned.wait(), 10)
        await s.stop()

    asyncio.run(run())
    bounds = [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(1, 13)]
    for pause, bound in zip(pauses, bounds, strict=True):
        assert bound / 2 <= pause <= bound
    assert max(pauses) <= LONGEST_PAUSE_S


def test_a_loop_that_ran_for_long_starts_with_a_short_pause(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error a day must not cost what ten in a row cost."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    async def run() -> None:
        s, turned = Supervisor(), asyncio.Event()
        lasts = [0.0] * 8 + [QUIET_S + 1, 0.0]

        async def loop() -> None:
            if not lasts:
                turned.set()
                await asyncio.Event().wait()
            clock[0] += lasts.pop(0)
            raise RuntimeError("x")

        s.start("sync", loop)
        await turned.wait()
        await s.stop()

    asyncio.run(run())
    assert pauses[7] >= LONGEST_PAUSE_S / 2
    assert pauses[8] <= FIRST_PAUSE_S
    assert pauses[9] <= 2 * FIRST_PAUSE_S


def test_a_loop_that_returns_is_restarted_too(pauses: list[float]) -> None:
    """Loops turn for ever; one that ends by itself has a defect, and detection must go on."""

    async def run() -> Supervisor:
        s, turned = Supervisor(), asyncio.Event()
        s.start("sync", failing(3, turned))
        await asyncio.wait_for(turned.wait(), 10)
        await s.stop()
        return s

    pulse = asyncio.run(run()).pulses["sync"]
    assert (pulse.restarts, pulse.last_error) == (3, "it returned")


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), AssertionError(), OSError(5, "x"), TimeoutError()])
def test_every_kind_of_exception_is_survived(error: Exception, pauses: list[float]) -> None:
    """Whatever it is: the loop goes on."""

    async def run() -> Supervisor:
        s, turned = Supervisor(), asyncio.Event()
        s.start("sync", failing(2, turned, error))
        await asyncio.wait_for(turned.wait(), 10)
        await s.stop()
        return s

    assert asyncio.run(run()).pulses["sync"].restarts == 2


def test_a_stray_cancellation_does_not_end_a_loop(pauses: list[float]) -> None:
    """A CancelledError that nobody meant for the loop (a cancelled future it waited for) is an error like any other."""

    async def run() -> Supervisor:
        s, turned = Supervisor(), asyncio.Event()
        s.start("sync", failing(2, turned, asyncio.CancelledError()))
        await asyncio.wait_for(turned.wait(), 5)
        await s.stop()
        return s

    assert asyncio.run(run()).pulses["sync"].restarts == 2


def test_one_loop_does_not_disturb_another() -> None:
    """While one fails again and again, the other's beats go on."""

    async def run() -> None:
        s, beats = Supervisor(), 0

        async def bad() -> None:
            raise ValueError("boom")

        async def good() -> None:
            nonlocal beats
            while True:
                beats += 1
                s.beat("good")
                await asyncio.sleep(0.001)

        s.start("bad", bad)
        s.start("good", good)
        await wait_until_async(lambda: s.pulses["bad"].restarts >= 2 and beats >= 20, 10)
        assert s.pulses["good"].restarts == 0
        await s.stop()

    asyncio.run(run())


def test_ages_grow_until_the_next_beat() -> None:
    """The age of the last beat is readable, starts at zero, and a beat resets it for its own loop only."""

    async def run() -> None:
        s = Supervisor()
        began = time.monotonic()
        s.start("a", asyncio.Event().wait)  # type: ignore[arg-type]
        s.start("b", asyncio.Event().wait)  # type: ignore[arg-type]
        assert max(s.ages().values()) <= time.monotonic() - began
        await wait_until_async(lambda: min(s.ages().values()) >= 0.05)
        s.beat("a")
        ages = s.ages()
        assert ages["a"] < 0.05 <= ages["b"]
        await s.stop()

    asyncio.run(run())


def test_stop_ends_every_loop_and_waits_for_it() -> None:
    """Also one that is in its pause, and one that cleans up; no task is left that could restart one."""

    async def run() -> None:
        s, cleaned = Supervisor(), []

        async def tidy() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)

        async def bad() -> None:
            raise ValueError("boom")

        s.start("tidy", tidy)
        s.start("bad", bad)
        await wait_until_async(lambda: s.pulses["bad"].restarts >= 1)
        await s.stop()
        assert cleaned == [True]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await s.stop()

    asyncio.run(run())
