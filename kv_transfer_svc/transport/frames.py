"""The protocol of a data connection.

    reader                                           holder
    header, DataRequest {incarnation, token, kind} ->
                                                  <- header, DataReply {num_bytes}       or {error}, then nothing more
                                                  <- num_bytes of blocks, one after the other
                                                  <- header, DataTrailer {checksums}     or {error}: discard the blocks

A header is "TKV", the version (1 byte) and the length of the message after it (4 bytes, little-endian). After the
trailer the reader may send another request on the same connection. The trailer comes last because a slot may be reused
during the transfer, and the holder can check this only afterwards. With certificates all of this is inside TLS 1.3
(link_tls.py). In plain text the token refuses strangers but does not prevent eavesdropping: use it on trusted networks.
"""

from __future__ import annotations

import struct

from google.protobuf.message import Message

from tandem_runtime.errors import InvalidRequest

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
_MAGIC = b"TKV"
_HEADER = struct.Struct("<3sBI")
HEADER_BYTES = _HEADER.size


def packed(message: Message) -> bytes:
    """Return a message with its header."""
    content = message.SerializeToString()
    return _HEADER.pack(_MAGIC, VERSION, len(content)) + content


def message_bytes(header: bytes) -> int:
    """Return the length of the message after `header`; raises InvalidRequest for an unknown header."""
    magic, version, num_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION or num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"a data connection sent {magic!r} version {version} with a message of {num_bytes} bytes; "
            f"expected {_MAGIC!r} version {VERSION}, at most {MAX_MESSAGE_BYTES} bytes"
        )
    return int(num_bytes)
