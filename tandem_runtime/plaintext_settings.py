"""The settings that services share of plain text, and of the upgrade from release 0.2, whose processes are in it.

    @dataclass(frozen=True)
    class Settings(PlaintextSettings):
        insecure: bool = insecure()
        insecure_plaintext: bool = insecure_plaintext()
        plaintext_until: str = plaintext_until()

A service declares the fields itself, so that they stand at their place among its others.
"""

from __future__ import annotations

from datetime import UTC, datetime

from tandem_runtime.settings import setting


def insecure() -> bool:
    return setting(False, "the same as --insecure-plaintext; of the release before", shared=True)


def insecure_plaintext() -> bool:
    return setting(
        False,
        "no certificates: gRPC and KV data in plain text, also beyond loopback; HTTP may listen beyond loopback",
        shared=True,
    )


def plaintext_until() -> str:
    return setting(
        "",
        "for the upgrade from release 0.2: date or time until which processes without certificates are called and "
        "answered in plain text too, and KV handles carry that release's MAC; never if empty",
        shared=True,
    )


def hmac_handles_until() -> str:
    return setting(
        "",
        "for the upgrade from release 0.2: date or time until which KV handles also carry that release's MAC, and KV "
        "services accept it; never if empty",
        shared=True,
    )


class PlaintextSettings:
    """Of every service."""

    insecure: bool
    insecure_plaintext: bool
    plaintext_until: str

    @property
    def plaintext_until_unix_seconds(self) -> float:
        """Until when processes of release 0.2 are called and answered; 0: never. Raise ValueError for no date."""
        return until_unix_seconds(self.plaintext_until, "plaintext_until")

    @property
    def allows_plaintext(self) -> bool:
        """Whether the process may do without a certificate, and listen beyond loopback in plain text."""
        return self.insecure_plaintext or self.insecure


class HandleSettings(PlaintextSettings):
    """Of the services that make or verify KV handles."""

    hmac_handles_until: str

    @property
    def macs_until(self) -> float:
        """Until when KV handles carry the MAC of release 0.2, in Unix seconds. Raise ValueError for no date."""
        return max(until_unix_seconds(self.hmac_handles_until, "hmac_handles_until"), self.plaintext_until_unix_seconds)


def until_unix_seconds(text: str, name: str) -> float:
    """Return the moment that the setting `name` gives, 0 for ""; raise ValueError with the accepted form."""
    if not text:
        return 0.0
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r}; give a date or a time, such as 2026-12-31 or 2026-12-31T18:00:00+00:00, "
            "or leave it out"
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
