from __future__ import annotations

import subprocess
import sys

from gradpilot.protos.messages import MAX_MESSAGE_BYTES
from gradpilot.protos.transport import CLIENT_OPTIONS, SERVER_OPTIONS


def test_the_server_tolerates_the_pings_of_the_client() -> None:
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    least = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * least
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_both_sides_cap_messages_and_no_option_comes_twice() -> None:
    for options in (CLIENT_OPTIONS, SERVER_OPTIONS):
        assert len(dict(options)) == len(options)
        assert dict(options)["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
    assert dict(CLIENT_OPTIONS)["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES


def test_a_second_server_cannot_share_the_port() -> None:
    assert dict(SERVER_OPTIONS)["grpc.so_reuseport"] == 0


def test_it_imports_nothing_heavy() -> None:
    program = "import sys, gradpilot.protos.transport; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"
