"""What travels on a data connection?

    reader                                           holder
    header, DataRequest {incarnation, token, kind} ->
                                                  <- header, DataReply {num_bytes}       or {error}, and that is all
                                                  <- num_bytes of blocks, one after the other
                                                  <- header, DataTrailer {checksums}     or {error}: refuse what came

A header is "TKV", the version (1 byte) and the length of the message after it (4 bytes, little-endian). The reader may
ask again on the same connection once it has the trailer. The trailer comes last because a slot may be reused while it
is sent: only afterwards does the holder know that it was not. There is no TLS here: the token keeps strangers out,
not listeners; use it on networks that are trusted, as the gRPC channel beside it.
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
    """Return a message as it travels, header first."""
    content = message.SerializeToString()
    return _HEADER.pack(_MAGIC, VERSION, len(content)) + content


def message_bytes(header: bytes) -> int:
    """Return how long the message after `header` is; raises InvalidRequest if it is none of ours."""
    magic, version, num_bytes = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION or num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"a data connection speaks {magic!r} version {version} with a message of {num_bytes} bytes; "
            f"known is {_MAGIC!r} version {VERSION}, at most {MAX_MESSAGE_BYTES} bytes"
        )
    return int(num_bytes)
