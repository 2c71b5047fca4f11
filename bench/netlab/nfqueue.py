"""The kernel's packet queue for user space (NFQUEUE), spoken over netlink.

Only a packet's number and time of arrival come here (copy mode META); the payload stays in the
kernel, and large packets (GSO) stay whole. Numbers grow by one, and one verdict accepts all up to
a number. Formats: linux/netfilter/nfnetlink_queue.h; numbers of the queue itself are in network
order, those of netlink in the machine's.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from bench.netlab.system import socket_in

QUEUE = 0

_NETLINK_NETFILTER, _SUBSYSTEM = 12, 3
_PACKET, _CONFIG, _VERDICT_BATCH = 0, 2, 3
_ACCEPT = 1
_REQUEST, _ACK = 1, 4
_SOL_NETLINK, _NO_ENOBUFS = 270, 5
_SO_RCVBUFFORCE, _SO_TIMESTAMP = 33, 29
_PACKET_HEADER, _TIMESTAMP = 1, 4
_RECEIVE_BYTES = 16 << 20
_MOST_HELD = 1 << 20
_COPY_META = 1
_FLAG_GSO = 4

_PACKET_MESSAGE = _SUBSYSTEM << 8 | _PACKET

_STALE_SECONDS = 0.1
"""An arrival further back than this is a step of the wall clock, not a late process."""

_header = struct.Struct("=IHHII")
_words = struct.Struct("=HH")
_arrival = struct.Struct("!QQ")
_number = struct.Struct("!I")
_length_kind = struct.Struct("=IH")


def _attribute(kind: int, data: bytes) -> bytes:
    return _words.pack(4 + len(data), kind) + data + bytes(-len(data) % 4)


def _message(kind: int, attributes: bytes, flags: int = _REQUEST) -> bytes:
    body = struct.pack("!BBH", socket.AF_UNSPEC, 0, QUEUE) + attributes
    return _header.pack(16 + len(body), _SUBSYSTEM << 8 | kind, flags, 0, 0) + body


_ACCEPT_UNTIL = _message(_VERDICT_BATCH, _attribute(2, struct.pack("!II", _ACCEPT, 0)))[:-4]
"""The message but for its end, a packet's number."""


class PacketQueue:
    """The queue of one namespace."""

    def __init__(self, namespace: str) -> None:
        """Bind to it.

        Raises:
            OSError: The kernel refuses, or the namespace is not there.
        """
        self._socket = socket_in(namespace, socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        for attributes in (
            _attribute(1, struct.pack("!BBH", 1, 0, socket.AF_INET)),  # bind
            _attribute(2, struct.pack("!IB", 0, _COPY_META)),
            _attribute(3, struct.pack("!I", _MOST_HELD)),
            _attribute(4, struct.pack("!I", _FLAG_GSO))
            + _attribute(5, struct.pack("!I", _FLAG_GSO)),
        ):
            self._socket.send(_message(_CONFIG, attributes, _REQUEST | _ACK))
            code = struct.unpack_from("=i", self._socket.recv(4096), 16)[0]
            if code:
                raise OSError(-code, f"packet queue of {namespace}: {os.strerror(-code)}")
        self._socket.setblocking(False)
        # While anybody wants time stamps the kernel gives them to all that arrives.
        self._stamps = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._stamps.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMP, 1)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def receive(self) -> list[tuple[int, float]]:
        """Return numbers and arrivals, in seconds of the monotonic clock, of what is new."""
        found: list[tuple[int, float]] = []
        now = time.monotonic()
        ahead = time.time() - now
        for _ in range(256):  # then it is the verdicts' turn
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    continue
                raise
            at, end = 0, len(data)
            while at + 16 <= end:
                length, kind = _length_kind.unpack_from(data, at)
                if kind == _PACKET_MESSAGE:
                    number, stamp = _packet(data, at + 20, at + length)
                    arrival = stamp - ahead
                    # Read before this call's clock, or since: then now is near enough.
                    found.append((number, arrival if -_STALE_SECONDS < arrival - now <= 0 else now))
                at += length + 3 & ~3
        return found

    def accept(self, number: int) -> None:
        """Let everything up to a number go on its way."""
        try:
            self._socket.send(_ACCEPT_UNTIL + _number.pack(number))
        except OSError as error:
            if error.errno != errno.ENOENT:  # nothing was left up to that number
                raise


def _packet(data: bytes, at: int, end: int) -> tuple[int, float]:
    """Return number and arrival, in seconds of the wall clock, 0 if not given."""
    number = 0
    while at + 4 <= end:
        length, kind = _words.unpack_from(data, at)
        if kind == _PACKET_HEADER:
            (number,) = _number.unpack_from(data, at + 4)
        elif kind == _TIMESTAMP:
            seconds, micros = _arrival.unpack_from(data, at + 4)
            return number, seconds + micros / 1e6
        at += length + 3 & ~3
    return number, 0.0
