"""Programs of the system, sockets in other namespaces, and whether all of that is to be had."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Sequence

from bench.netlab import names
from bench.netlab.errors import CommandError, UnsupportedError

COMMAND_SECONDS = 20.0
CLONE_NEWNET = 0x40000000

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "iptables": "iptables"}

libc = ctypes.CDLL(None, use_errno=True)


def environment() -> dict[str, str]:
    """Return the environment for programs of the system, which often live in sbin."""
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C"}


def command(argv: Sequence[str], lines: Sequence[str] = (), seconds: float | None = None) -> str:
    """Run a program and return what it printed.

    Args:
        argv: Program and arguments.
        lines: What to write to its standard input.
        seconds: When to give up; ``COMMAND_SECONDS`` if not given.

    Raises:
        CommandError: It is not there, failed, or did not end in time.
    """
    limit = COMMAND_SECONDS if seconds is None else seconds
    words = " ".join(argv)
    try:
        done = subprocess.run(
            argv,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            env=environment(),
            timeout=limit,
            text=True,
        )
    except FileNotFoundError:
        package = PACKAGES.get(argv[0], argv[0])
        raise CommandError(
            f"{argv[0]} is not installed: apt-get install {package}, or your system's equivalent"
        ) from None
    except subprocess.TimeoutExpired:
        raise CommandError(
            f"{words!r} did not end within {limit:g} s, expected well under 1"
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").replace("\n", "; ")
        asked = f" given {'; '.join(lines)!r}" if lines else ""
        raise CommandError(f"{words!r}{asked} ended with {done.returncode} and said: {said}")
    return done.stdout


def batch(program: str, namespace: str | None, lines: Sequence[str]) -> None:
    """Run several ``ip`` or ``tc`` commands, in a namespace or in the caller's.

    Raises:
        CommandError: One failed; those before it took effect.
    """
    if lines:
        within = ["-n", namespace] if namespace else []
        command([program, *within, "-batch", "-"], lines)


def list_namespaces() -> list[str]:
    """Return the names of the namespaces there are."""
    try:
        return sorted(path.name for path in names.NAMESPACES.iterdir())
    except FileNotFoundError:
        return []


def socket_in(namespace: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Return a socket that lives in a namespace; the caller stays where it is.

    A namespace belongs to a thread, so a thread of its own goes there, opens it, and ends.

    Raises:
        OSError: The namespace or the socket is not to be had.
    """
    result: list[socket.socket | OSError] = []

    def enter() -> None:
        try:
            with open(names.NAMESPACES / namespace, "rb") as there:
                if libc.setns(there.fileno(), CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, f"setns {namespace}: {os.strerror(number)}")
            result.append(socket.socket(family, kind, protocol))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    (got,) = result
    if isinstance(got, OSError):
        raise got
    return got


def missing() -> list[str]:
    """Return what this machine lacks for a lab, each with what to do; empty if nothing.

    Kernel features are tried in a namespace of our own, which is gone when this returns.
    """
    if not os.path.isdir("/proc/self/ns"):
        return ["a lab needs Linux with network namespaces; this system has none"]
    if os.geteuid():
        return [
            f"a lab needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), got user {os.geteuid()}: sudo"
        ]
    lacking = []
    for program in PACKAGES:
        try:
            command([program, "-V"])
        except CommandError as error:
            lacking.append(str(error))
    if lacking:
        return lacking
    trial = f"netlab-trial-{os.getpid()}"
    try:
        command(["ip", "netns", "add", trial])
    except CommandError as error:
        return [
            f"namespaces cannot be made, even as root; in a container, run it privileged: {error}"
        ]
    try:
        for argv, need in (
            ("ip -n {} link add br0 type bridge", "bridges (CONFIG_BRIDGE)"),
            ("ip -n {} link add v0 type veth peer name v1", "veth (CONFIG_VETH)"),
            ("tc -n {} qdisc add dev lo root handle 1: htb default 1", "HTB (CONFIG_NET_SCH_HTB)"),
            (
                "ip netns exec {} iptables -w 5 -t mangle -A PREROUTING -j NFQUEUE --queue-num 0",
                "NFQUEUE (CONFIG_NETFILTER_XT_TARGET_NFQUEUE)",
            ),
        ):
            try:
                command(argv.format(trial).split())
            except CommandError as error:
                lacking.append(
                    f"the kernel must have {need}; load the module or use another: {error}"
                )
        try:
            socket_in(trial, socket.AF_NETLINK, socket.SOCK_RAW, 12).close()
        except OSError as error:
            lacking.append(f"the kernel must have CONFIG_NETFILTER_NETLINK_QUEUE: {error}")
    finally:
        command(["ip", "netns", "del", trial])
    return lacking


def require() -> None:
    """Check that this machine can run a lab.

    Raises:
        UnsupportedError: It cannot; the message lists every reason.
    """
    lacking = missing()
    if lacking:
        raise UnsupportedError("this machine cannot run a lab:\n  " + "\n  ".join(lacking))
