"""Transfer backends: how an engine forgets a peer and lets go of a room, all through one worker's ledger.

The engines that move bytes (`MooncakeEngine`, `NixlEngine`) import their library when one is made, not before.
"""

from __future__ import annotations

from .base import Backend, Engine
from .errors import EngineFailed, EngineMissing, OutOfMemory, PeerFailed, Withdrawn
from .memory import Block, Memory
from .mooncake import MooncakeBackend
from .mooncake_engine import MooncakeEngine
from .mori import MoriBackend
from .nixl import NixlBackend
from .nixl_engine import NixlEngine
from .peers import Peer, PeerCache
from .pulling import PullingEngine, Session, Transfer

__all__ = [
    "Backend",
    "Block",
    "Engine",
    "EngineFailed",
    "EngineMissing",
    "Memory",
    "MooncakeBackend",
    "MooncakeEngine",
    "MoriBackend",
    "NixlBackend",
    "NixlEngine",
    "OutOfMemory",
    "Peer",
    "PeerCache",
    "PeerFailed",
    "PullingEngine",
    "Session",
    "Transfer",
    "Withdrawn",
]
