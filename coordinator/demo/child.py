"""What the demo's processes have in common: how they begin and how they are told to end.

A child of the orchestrator gets its options as one JSON argument, is killed by the kernel when its parent ends, and may
have to wait for a line on its standard input before it acts (all imports are done by then). SIGTERM and SIGINT end
either process in good order: the handler sets an event, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from ..errors import CoordinatorError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    O = TypeVar("O", bound=DataclassInstance)  # noqa: E741
else:
    O = TypeVar("O")  # noqa: E741

_PR_SET_PDEATHSIG = 1


def encode(options: DataclassInstance) -> str:
    """Options as the one argument of a child."""
    return json.dumps(asdict(options))


def begin(kind: Callable[..., O], main: Callable[[O], int]) -> int:
    """Run `main` as a child of the orchestrator, with the options from the command line; returns the exit status."""
    values = json.loads(sys.argv[1])
    die_with_parent(values["parent"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return guarded(main, kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))


def guarded(main: Callable[[O], int], options: O) -> int:
    """Run `main`; an error of ours is one line on stderr and exit status 1."""
    try:
        return main(options)
    except (CoordinatorError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if it has ended already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the process that wanted this one is gone")


def wait_for_go() -> bool:
    """Wait for a line on stdin; False if it was closed instead."""
    return bool(sys.stdin.readline())


def stop_on_signals() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    return stop


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` was set within `timeout_s`."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
