"""Options of the gRPC channel, the same on both sides, so that neither hangs up on the other.

A Python server tolerates one keepalive ping per five minutes unless told otherwise, and answers an
agent that pings more often with GOAWAY; therefore both sides take their options from here. This
module imports nothing heavy.
"""

from __future__ import annotations

from gradpilot.protos.messages import MAX_MESSAGE_BYTES

__all__ = ["ALL_SERVICES", "CLIENT_OPTIONS", "MAX_MESSAGE_BYTES", "SERVER_OPTIONS"]

KEEPALIVE_TIME_MS = 20_000
"""Silence after which either side pings."""

KEEPALIVE_TIMEOUT_MS = 5_000
"""How long a ping may stay unanswered before the connection counts as lost."""

MIN_PING_INTERVAL_MS = 10_000
"""Pings closer than this are abuse to the server; half of the time above, for clock jitter."""

INITIAL_RECONNECT_MS = 500
MAX_RECONNECT_MS = 5_000
"""Longest back-off of a client: a controller that came back is found within 10 s."""

ALL_SERVICES = ""
"""Service name under which grpc.health.v1 answers for the whole server."""

_BOTH_SIDES: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *_BOTH_SIDES,
    ("grpc.initial_reconnect_backoff_ms", INITIAL_RECONNECT_MS),
    ("grpc.min_reconnect_backoff_ms", INITIAL_RECONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    # An http_proxy in the environment must not catch traffic inside the cluster.
    ("grpc.enable_http_proxy", 0),
)
"""Options of every channel to a controller."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # grpc ends a stream without telling the server why. So the server takes in more than it
    # accepts: enough to count what is a little too large and to explain the refusal.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    *_BOTH_SIDES,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.http2.max_ping_strikes", 2),
    # Two servers on one port would share the agents at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
)
"""Options of the controller's server."""
