"""The command `coordinator` (extra `cli`).

Rules: an error is one line on stderr and exit code 1, never a traceback; bad usage exits with 2, Ctrl-C with 130.
Anything that talks to a store is imported by the command that needs it, so that --help answers at once. Only this
file may be imported without typer and rich.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Entry point of the script `coordinator` and of `python -m coordinator.cli`."""
    if not all(find_spec(name) for name in ("typer", "rich")):  # looked for, not imported: rich comes late
        print("error: the command line needs typer and rich: pip install 'coordinator[cli]'", file=sys.stderr)
        sys.exit(1)
    from .app import run

    sys.exit(run())
