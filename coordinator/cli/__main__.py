"""`python -m coordinator.cli` is the script `coordinator`."""

from . import main

main()
