"""Fails an address with one call of the script and is gone (SIGKILL) before it can tell anybody.

python child_failer.py URL ADDRESS NAMESPACE
"""

from __future__ import annotations

import os
import signal
import sys

from coordinator.config import Settings
from coordinator.store.client import SyncStore
from coordinator.store.connect import sync_client
from coordinator.store.ops import Ops
from coordinator.store.verdict import fail_address


def main(url: str, address: str, namespace: str) -> None:
    settings = Settings(url=url, namespace=namespace)
    verdict = fail_address(
        SyncStore(sync_client(url, settings)), Ops(settings), address, "killed right after", "failer"
    )
    os.write(1, verdict.outcome.encode())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
