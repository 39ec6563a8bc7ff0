"""Messages to bytes and back, bounded."""

from __future__ import annotations

import msgspec

from msrun.cluster.wire.messages import PROTOCOL_VERSION, Envelope
from msrun.errors import ProtocolError, VersionError

FRAME_BYTES_MAX = 64 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class _Version(msgspec.Struct):
    """Only the version, which every protocol version has."""

    version: int = 0


# The one message that a peer of another version can read.
VERSION_FRAME = _encoder.encode(_Version(PROTOCOL_VERSION))

_version_decoder = msgspec.msgpack.Decoder(_Version)


def encode(envelope: Envelope) -> bytes:
    """Return the one frame that carries `envelope`.

    Raises:
        ProtocolError: It would be larger than `FRAME_BYTES_MAX`, or holds values that no peer
            could read: text that is not Unicode, a number of more than 64 bits.
    """
    try:
        frame = _encoder.encode(envelope)
    except (UnicodeEncodeError, OverflowError) as error:
        msg = f"a message cannot be sent: {error}"
        raise ProtocolError(msg) from error
    if len(frame) > FRAME_BYTES_MAX:
        msg = f"a message of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}"
        raise ProtocolError(msg)
    return frame


def decode(frame: bytes | memoryview) -> Envelope:
    """Return the message in `frame`.

    Raises:
        VersionError: It is of another version.
        ProtocolError: It is too large, or no message at all.
    """
    if len(frame) > FRAME_BYTES_MAX:
        msg = f"a frame of {len(frame)} bytes is over the limit of {FRAME_BYTES_MAX}"
        raise ProtocolError(msg)
    try:
        version = _version_decoder.decode(frame).version
        if version != PROTOCOL_VERSION:
            msg = f"the peer speaks protocol version {version}, this is {PROTOCOL_VERSION}"
            raise VersionError(msg, hint="install the same msrun on all nodes")
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"a frame is no message: {error}"
        raise ProtocolError(msg) from error
