"""Waiting in tests: for a fact, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout_s: float = 5, what: str = "the condition") -> T:
    """Return the first truthy value of `predicate`; after `timeout_s` AssertionError with `what` and the last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s (last value {value!r})")
        time.sleep(0.005)
    return value


async def wait_until_async(predicate: Callable[[], T], timeout_s: float = 5, what: str = "the condition") -> T:
    """As wait_until, without blocking the running loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s (last value {value!r})")
        await asyncio.sleep(0.005)
    return value
