"""Starts a gateway: decides where its certificate comes from, opens the fleet's identity, and serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from control_plane.compiled_routing import load_routing
from control_plane.fleet_identity.addresses import JOIN_FOLDER
from control_plane.fleet_identity.service import FleetIdentity, IdentityOptions
from control_plane.gateway import Gateway
from control_plane.secrets import load_secret
from control_plane.settings import ControlPlaneSettings
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from tandem_runtime import paths
from tandem_runtime.enrolment.claimed_folder import ClaimedFolder
from tandem_runtime.errors import InvalidRequest, Unavailable

_EXIT_REVOKED = 1
"""A restart helps: a revoked gateway that starts again is a new member, admitted by the secret."""


async def serve(settings: ControlPlaneSettings, drain: asyncio.Event) -> int:
    """Run a gateway until it has drained: with certificates from files, in plain text, or as its own authority.

    Return the exit status: 0, or 1 if this gateway was revoked.
    """
    compiled = await asyncio.to_thread(load_routing)
    has_files = any((settings.tls_cert, settings.tls_key, settings.tls_ca))
    if has_files or settings.allows_plaintext:
        return await Gateway(settings, compiled=compiled).run(drain)
    async with open_fleet(settings) as fleet:
        fleet.when_revoked(drain.set)
        code = await Gateway(settings, fleet, compiled).run(drain)
        return _EXIT_REVOKED if fleet.is_revoked else code


@asynccontextmanager
async def open_fleet(settings: ControlPlaneSettings) -> AsyncIterator[FleetIdentity]:
    """Join the fleet of the database, or make it, and keep the enrolment port open inside the block.

    Raise InvalidRequest for a database or a port that cannot be used.
    """
    state_dir = paths.state_dir(settings.state_dir or None, "--state-dir")
    secret, address = load_secret(settings.secret, state_dir), settings.enrolment_address
    database = Database(database_url(settings.database_url, state_dir))
    folder = await asyncio.to_thread(ClaimedFolder.claim, state_dir / "certificates", "gateway")
    options = IdentityOptions(
        address,
        folder.path,
        state_dir / JOIN_FOLDER,
        settings.certificate_seconds,
        settings.enrolment_advertise,
    )
    fleet = FleetIdentity(database, secret, options)
    try:
        await _open(fleet, database)
        yield fleet
    finally:
        await fleet.close()
        await database.close()
        folder.release()


async def _open(fleet: FleetIdentity, database: Database) -> None:
    try:
        await migrate(database)
        await database.set_clock()
        await fleet.open()
    except Unavailable as error:
        raise InvalidRequest(f"{database.problem or error.message}; see --database-url") from error
