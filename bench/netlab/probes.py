"""What a link is like, measured with sockets inside two hosts: round trip and throughput."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator

from bench.netlab.errors import NetlabError
from bench.netlab.system import socket_in

PROBE_BYTES = 64
PRIORITY = 5  # below the lab's own processes
_BUFFER_BYTES = 256 << 10
_PORT_SECONDS = 5.0


def round_trips(
    here: str, there: str, address: str, count: int, lost_after: float, skip: int = 5
) -> list[float]:
    """Return round trips of small datagrams, one at a time, s; lost ones are missing.

    Args:
        here: Namespace of who asks.
        there: Namespace of who answers.
        address: Of who answers.
        count: How many to measure.
        lost_after: When to give one up, s.
        skip: How many to send before, which resolve addresses and wake things up.
    """
    stop = threading.Event()
    found = []
    with (
        socket_in(there, socket.AF_INET, socket.SOCK_DGRAM) as echo,
        socket_in(here, socket.AF_INET, socket.SOCK_DGRAM) as ask,
    ):
        echo.bind((address, 0))
        ask.connect(echo.getsockname())

        def answer() -> None:
            with _ahead():
                while not stop.is_set():
                    if select.select([echo], [], [], 0.05)[0]:
                        data, peer = echo.recvfrom(PROBE_BYTES)
                        echo.sendto(data, peer)

        with _beside(answer, stop), _ahead():
            for number in range(skip + count):
                begun = time.monotonic()
                ask.send(struct.pack("!I", number).ljust(PROBE_BYTES, b"\0"))
                while (left := begun + lost_after - time.monotonic()) > 0:
                    if not select.select([ask], [], [], left)[0]:
                        break
                    if struct.unpack_from("!I", ask.recv(PROBE_BYTES))[0] == number:
                        if number >= skip:
                            found.append(time.monotonic() - begun)
                        break
    return found


def throughput(here: str, there: str, address: str, seconds: float, warm_up: float) -> float:
    """Return what one TCP connection delivers, bytes of payload per second.

    Args:
        here: Namespace of the sender.
        there: Namespace of the receiver.
        address: Of the receiver.
        seconds: How long to measure.
        warm_up: How long to send before that.

    Raises:
        NetlabError: The connection does not come about, or nothing arrives.
    """
    stop = threading.Event()
    with (
        socket_in(there, socket.AF_INET, socket.SOCK_STREAM) as listener,
        socket_in(here, socket.AF_INET, socket.SOCK_STREAM) as sender,
    ):
        listener.bind((address, 0))
        listener.listen(1)
        listener.settimeout(_PORT_SECONDS)
        sender.settimeout(_PORT_SECONDS)
        try:
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
        except OSError as error:
            raise NetlabError(
                f"no connection from {here} to {address} within {_PORT_SECONDS:g} s ({error}); "
                "the lab's status says what is wrong"
            ) from error
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sender.settimeout(0.2)
        payload = bytes(_BUFFER_BYTES)

        def send() -> None:
            with _ahead():
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        sender.send(payload)

        with receiver, _beside(send, stop), _ahead():
            return _receive(receiver, seconds, warm_up)


def _receive(receiver: socket.socket, seconds: float, warm_up: float) -> float:
    buffer = bytearray(_BUFFER_BYTES)
    begun = last = time.monotonic()
    first, total = 0.0, 0
    receiver.settimeout(_PORT_SECONDS)
    while last < begun + warm_up + seconds:
        try:
            got = receiver.recv_into(buffer)
        except TimeoutError as error:
            raise NetlabError(
                f"nothing arrived for {_PORT_SECONDS:g} s in a running transfer"
            ) from error
        last = time.monotonic()
        if first:
            total += got
        elif last >= begun + warm_up:
            first = last
    if not total:
        raise NetlabError(f"nothing arrived in {seconds:g} s: measure for longer")
    return total / (last - first)


@contextlib.contextmanager
def _beside(work: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _ahead() -> Iterator[None]:
    """Let this thread go before ordinary ones: the link is measured, not who computes."""
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, before, parameters)


def median(values: list[float]) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(values) if values else float("nan")
