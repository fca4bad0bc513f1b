"""A pytest plugin (`-p hard_exit`): exit with pytest's own status, past the exit code of loaded libraries.

nixl-cu12 1.5.1 ends each process that has loaded it with SIGSEGV (libnl, in the C library's exit handlers).
"""

from __future__ import annotations

import os
import sys

import pytest

_status: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    """Keep the status."""
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Everything is reported: go."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status[0] if _status else 2)
