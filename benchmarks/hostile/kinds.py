"""All kinds of hostile requests by name: bodies, then heads and connections."""

from __future__ import annotations

from benchmarks.hostile.body_kinds import BODIES
from benchmarks.hostile.connection_kinds import CONNECTIONS
from benchmarks.hostile.conversion_kinds import CONVERSIONS
from benchmarks.hostile.encoder_kinds import ENCODERS
from benchmarks.hostile.maker import Kind

KINDS: dict[str, Kind] = BODIES | CONVERSIONS | ENCODERS | CONNECTIONS
