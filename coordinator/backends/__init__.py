"""Transfer backends: how an engine forgets a peer and lets go of a room, all through one worker's ledger."""

from __future__ import annotations

from .base import Backend, Engine
from .mooncake import MooncakeBackend
from .mori import MoriBackend
from .nixl import NixlBackend
from .peers import Peer, PeerCache

__all__ = ["Backend", "Engine", "MooncakeBackend", "MoriBackend", "NixlBackend", "Peer", "PeerCache"]
