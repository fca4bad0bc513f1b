"""A demo worker with a bug in it, chosen by PLANTED_BUG: the audit must notice. Not part of the package."""

from __future__ import annotations

import os
import sys
from typing import Any

import coordinator.demo.worker as genuine
from coordinator import Failure, Room
from coordinator.demo.child import begin
from coordinator.demo.roles import WorkerOptions


class PlantedWorker(genuine.WorkerProcess):
    """Does one thing wrong, once, when the first of its rooms is told to fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stuck_s = 1.0
        self._bug = os.environ["PLANTED_BUG"]

    def record_failure(self, room: Room, failure: Failure) -> None:
        """The on_failure callback."""
        bug, self._bug = self._bug, ""
        if bug == "drop":
            return
        super().record_failure(room, failure)
        if bug == "double":
            super().record_failure(room, failure)
        elif bug == "false":
            other = next(item.room for item in self.open.values() if item.room.address != room.address)
            self.worker.fail_node(other.address, "planted")


def main(options: WorkerOptions) -> int:
    """As the real one."""
    return genuine.main(options, PlantedWorker)


if __name__ == "__main__":
    sys.exit(begin(WorkerOptions, main))
