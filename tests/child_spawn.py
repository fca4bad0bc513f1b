"""Uses a worker, then starts a multiprocessing child by "spawn" that makes a worker of its own.

python child_spawn.py URL ADDRESS SETTINGS
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

from coordinator import Settings, Worker


def child(url: str, address: str, given: str, answers: Any) -> None:
    with Worker(url, name="child", settings=Settings(**{**json.loads(given), "url": url})) as worker:
        worker.join(address, 1)
        answers.put([worker.id, worker.flush(10)])


def main(url: str, address: str, given: str) -> None:
    with Worker(url, name="parent", settings=Settings(**{**json.loads(given), "url": url})) as worker:
        worker.join(address, 1)
        worker.flush(10)
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        process = context.Process(target=child, args=(url, address, given, answers))
        process.start()
        name, flushed = answers.get(timeout=60)
        process.join(60)
        report = {"child": [name, flushed, process.exitcode], "id": worker.id, "status": worker.status(address, 1)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
