"""What the tests with SGLang share: a store for each file, and a bed for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bed import Bed
from decoding import own_server
from servers import Server


@pytest.fixture(scope="module")
def store() -> Iterator[Server]:
    yield from own_server()


@pytest.fixture
def bed() -> Iterator[Bed]:
    with Bed() as bed:
        yield bed
