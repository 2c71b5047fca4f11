"""Making a lab's devices and changing their limits, by ``ip``, ``tc`` and ``iptables``."""

from __future__ import annotations

from collections.abc import Iterable

from bench.netlab import names
from bench.netlab.background import PORT
from bench.netlab.errors import CommandError, UnsupportedError
from bench.netlab.state import State
from bench.netlab.system import batch, command

LARGEST_BURST = 65536
"""What TCP may hand to a link at once (GSO), bytes."""

_SETTINGS = {
    # Whatever is not delayed must not get through.
    "ipv6/conf/all/disable_ipv6": "1",
    # A training step is a pause: without this, TCP would begin every step slowly.
    "ipv4/tcp_slow_start_after_idle": "0",
    # The next connection must not remember the link as it was.
    "ipv4/tcp_no_metrics_save": "1",
}


def make(state: State) -> None:
    """Make namespaces, bridge and links, with their rates and no delay yet.

    Raises:
        CommandError: A command failed; what was made before it is there.
        UnsupportedError: The congestion control is not to be had.
    """
    name, hosts = state.name, range(state.hosts)
    hub = names.hub(name)
    batch("ip", None, [f"netns add {hub}", *(f"netns add {names.host(name, i)}" for i in hosts)])
    links = [
        f"link add {names.port(i)} netns {hub} mtu {state.mtu} type veth "
        f"peer name {names.DEVICE} netns {names.host(name, i)} mtu {state.mtu}"
        for i in hosts
    ]
    batch("ip", None, links)
    ports = [f"link set {names.port(i)} gso_max_size {LARGEST_BURST} master br0 up" for i in hosts]
    bridge = "link add br0 type bridge forward_delay 0 mcast_snooping 0"
    batch("ip", hub, ["link set lo up", bridge, "link set br0 up", *ports])
    for i in hosts:
        _make_host(names.host(name, i), i, state.congestion)
    shape(state, hosts, "add")


def _make_host(namespace: str, index: int, congestion: str) -> None:
    device, address = names.DEVICE, names.address(index)
    setting = "; ".join(
        f"[ ! -e /proc/sys/net/{key} ] || echo {value} > /proc/sys/net/{key}"
        for key, value in _SETTINGS.items()
    )
    command(["ip", "netns", "exec", namespace, "sh", "-ec", setting])
    lines = [
        "link set lo up",
        f"link set {device} gso_max_size {LARGEST_BURST} up",
        f"addr add {address}/24 dev {device} noprefixroute",
    ]
    batch("ip", namespace, lines)
    # As an attribute of the route it needs no change outside: a namespace may set the default only
    # to what the whole machine allows everybody.
    route = f"route add {names.NETWORK} dev {device} src {address} congctl {congestion}"
    try:
        batch("ip", namespace, [route])
    except CommandError as error:
        known = command(["sysctl", "-n", "net.ipv4.tcp_available_congestion_control"]).strip()
        raise UnsupportedError(
            f"congestion control must be one of {known}, got {congestion!r}: {error}"
        ) from error


def shape(state: State, hosts: Iterable[int], verb: str) -> None:
    """Add or change the rates of hosts, in both directions.

    Raises:
        CommandError: A command failed.
    """
    hosts = list(hosts)
    down = [line for i in hosts for line in state.links[i].shaping(names.port(i), verb)]
    batch("tc", names.hub(state.name), down)
    for i in hosts:
        batch("tc", names.host(state.name, i), state.links[i].shaping(names.DEVICE, verb))


def queue_arrivals(state: State) -> None:
    """Lead what arrives at the hosts through the delay process.

    Without that process the packets are dropped: no delay at all would be worse than no network.

    Raises:
        CommandError: A command failed.
    """
    for i in range(state.hosts):
        rule = f"-t mangle -A PREROUTING -i {names.DEVICE} -j NFQUEUE --queue-num 0"
        iptables(names.host(state.name, i), rule)


def drop_background(state: State, source: int, target: int) -> None:
    """Let a host drop, and count, background traffic of another before anything else sees it.

    Raises:
        CommandError: A command failed.
    """
    rule = f"PREROUTING -s {names.address(source)} -i {names.DEVICE} -p udp --dport {PORT} -j DROP"
    namespace = names.host(state.name, target)
    try:
        iptables(namespace, f"-t raw -C {rule}")
    except CommandError:
        iptables(namespace, f"-t raw -A {rule}")


def iptables(namespace: str, words: str) -> str:
    """Run ``iptables`` in a namespace and return what it prints.

    Raises:
        CommandError: It failed.
    """
    return command(["ip", "netns", "exec", namespace, "iptables", "-w", "5", *words.split()])
