"""Holds the certificate of this process, and makes TLS credentials of it for servers, channels and sockets.

The files may change at any time: a renewal, a new authority in the bundle. `watch` reads them again; servers use the
new certificate from the next handshake on. A gRPC channel cannot change its credentials: `renewed_channel` opens
another one.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from tandem_machine.memfd import memory_file
from tandem_runtime.certificates.files import CertificateFiles, folder_version, read_certificate, read_files
from tandem_runtime.certificates.names import Identity, identity_in
from tandem_runtime.certificates.server_port import renewed_port_credentials
from tandem_runtime.log import get_logger

log = get_logger(__name__)

WATCH_SECONDS = 1.0
"""Seconds between two looks at the files: a renewed certificate is in use that much later."""


@dataclass(frozen=True)
class LoadedCertificate:
    """One version of the files, checked. Times are Unix seconds."""

    files: CertificateFiles
    identity: Identity
    serial: int
    expires_at: float
    renew_at: float
    generation: int
    authorities: tuple[bytes, ...] = field(repr=False)


class ProcessCertificate:
    """The certificate of this process; `current` changes when its files do. Listeners run on the event loop."""

    def __init__(
        self,
        read: Callable[[], CertificateFiles],
        version: Callable[[], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`version` is cheap and changes with the files. Raises OSError or ValueError for files of no use."""
        self._read = read
        self._version = version
        self._clock = clock
        self._seen = version()
        self._problem = ""
        self._listeners: dict[int, Callable[[], object]] = {}
        self._listener_ids = count()
        self.current = _load(read(), clock(), generation=0)

    @classmethod
    def in_folder(cls, folder: Path) -> ProcessCertificate:
        """Hold a certificate that `tandem_runtime.certificates.files` keeps in `folder`."""
        return cls(lambda: read_certificate(folder), lambda: folder_version(folder))

    @classmethod
    def from_files(cls, certificate: Path, key: Path, bundle: Path) -> ProcessCertificate:
        """Hold a certificate in three files that somebody else renews (cert-manager, SPIRE)."""
        paths = certificate, key, bundle
        return cls(lambda: read_files(*paths), lambda: [_stamp(path) for path in paths])

    @property
    def identity(self) -> Identity:
        return self.current.identity

    @property
    def renew_at(self) -> float:
        """When half of the validity that was left at the loading has passed, in Unix seconds."""
        return self.current.renew_at

    def listen(self, on_change: Callable[[], object]) -> Callable[[], None]:
        """Call `on_change` on the event loop after each change; return a function that ends that.

        One listener is called in each turn of the loop: a gateway has a channel to each of hundreds of workers, and
        each opens a connection.
        """
        listener_id = next(self._listener_ids)
        self._listeners[listener_id] = on_change
        return partial(self._stop_listening, listener_id)

    def refresh(self) -> bool:
        """Read the files again if they changed; return whether `current` did. A bad version is logged and skipped.

        Call on the event loop if there are listeners.
        """
        loaded = self._changed()
        return loaded is not None and self._take(loaded)

    async def watch(self, seconds: float = WATCH_SECONDS) -> None:
        """Keep `current` up to date, for ever. One task per process."""
        while True:
            loaded = await asyncio.to_thread(self._changed)
            if loaded is not None:
                self._take(loaded)
            await asyncio.sleep(seconds)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a gRPC port: every client needs a certificate of a trusted authority."""
        given = self.current

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if given is self.current:
                return None
            given = self.current
            return _configuration(given.files)

        return renewed_port_credentials(_configuration(given.files), changed, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of one gRPC channel, with the current certificate for as long as the channel lives."""
        files = self.current.files
        return grpc.ssl_channel_credentials(files.bundle, files.key, files.certificate)

    def ssl_context(self, server_side: bool) -> ssl.SSLContext:
        """Return a context for sockets with the current certificate: TLS 1.3, both sides verified.

        A client passes `server_hostname=Identity.dns_name` of the process that it expects. Make one context per
        connection or per `current.generation`: a context keeps the certificate that it was made with.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.check_hostname = not server_side
        if server_side:
            context.num_tickets = 0  # a resumed session would skip the look at the certificate
        files = self.current.files
        context.load_verify_locations(cadata=files.bundle.decode("ascii"))
        _load_chain(context, files)
        return context

    def listener_context(self) -> ssl.SSLContext:
        """Return a context for a listening socket whose clients show no certificate. It follows renewals.

        Call on the event loop.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load_chain(context, self.current.files)
        self.listen(lambda: _load_chain(context, self.current.files))
        return context

    def _changed(self) -> LoadedCertificate | None:
        try:
            version = self._version()
            if version == self._seen:
                return None
            loaded = _load(self._read(), self._clock(), self.current.generation + 1)
            if loaded.identity != self.identity:
                raise ValueError(
                    f"the new certificate is of {loaded.identity}, this process is {self.identity}; "
                    "start the process again to change its identity"
                )
        except (OSError, ValueError) as error:
            if self._problem != str(error):  # once, not with each look
                log.warning("certificate_unusable", reason=str(error), expires_at=int(self.current.expires_at))
            self._problem = str(error)
            return None
        self._seen = version
        self._problem = ""
        return loaded

    def _take(self, loaded: LoadedCertificate) -> bool:
        self.current = loaded
        log.info("certificate_renewed", serial=f"{loaded.serial:x}", expires_at=int(loaded.expires_at))
        if self._listeners:
            asyncio.get_running_loop().call_soon(self._call_next, iter(tuple(self._listeners)))
        return True

    def _call_next(self, listener_ids: Iterator[int]) -> None:
        """Call the next listener that still listens, and leave the others to later turns of the event loop."""
        on_change = next((self._listeners[each] for each in listener_ids if each in self._listeners), None)
        if on_change is not None:
            asyncio.get_running_loop().call_soon(self._call_next, listener_ids)
            on_change()

    def _stop_listening(self, listener_id: int) -> None:
        self._listeners.pop(listener_id, None)


def _load(files: CertificateFiles, now: float, generation: int) -> LoadedCertificate:
    chain = x509.load_pem_x509_certificates(files.certificate)
    leaf = chain[0]
    identity = identity_in(leaf)
    _check_dns_names(leaf, identity)
    _check_key(leaf, files.key)
    authorities = x509.load_pem_x509_certificates(files.bundle)
    expires_at = leaf.not_valid_after_utc.timestamp()
    loaded_at = max(now, leaf.not_valid_before_utc.timestamp())
    return LoadedCertificate(
        files,
        identity,
        leaf.serial_number,
        expires_at,
        (loaded_at + expires_at) / 2,
        generation,
        tuple(authority.public_bytes(Encoding.DER) for authority in authorities),
    )


def _check_dns_names(leaf: x509.Certificate, identity: Identity) -> None:
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    missing = set(identity.dns_names) - set(names.get_values_for_type(x509.DNSName))
    if missing:
        raise ValueError(
            f"the certificate of {identity} lacks the DNS name {min(missing)}; "
            "issue it with both names of tandem_runtime/certificates/names.py, or nobody can connect to this process"
        )


def _check_key(leaf: x509.Certificate, key: bytes) -> None:
    try:
        private = load_pem_private_key(key, password=None)
    except TypeError as error:
        raise ValueError("the private key is encrypted; give a key without a passphrase") from error
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ValueError("the private key does not belong to the certificate; give the files of one renewal")


def _configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.bundle)


def _load_chain(context: ssl.SSLContext, files: CertificateFiles) -> None:
    """Load certificate and key from memory: `ssl` takes paths only, and the files on disk may change in between."""
    descriptor = memory_file("certificate")
    with os.fdopen(descriptor, "wb") as file:
        file.write(files.key + b"\n" + files.certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size
