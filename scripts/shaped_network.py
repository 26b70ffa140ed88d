"""Several hosts on one machine: network namespaces, each behind a shaped link, joined by a bridge.

Needs root and iproute2. The names carry the process id, so that two benchmarks do not meet.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""Name of a host's only link, inside its namespace."""

_QUEUE = ("burst", "256kb", "latency", "50ms")


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, arguments: list[str]) -> list[str]:
        """A command line that runs inside."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def missing_tools() -> str | None:
    """What keeps this process from making namespaces, if anything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not found: install iproute2" if absent else None


@contextmanager
def shaped_hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """Hosts with links of ``rate`` (as tc spells it: 1gbit), in each direction."""
    prefix = f"os{os.getpid()}"
    switch = f"{prefix}s"
    hosts = [Host(f"{prefix}h{i}", f"10.77.0.{i + 1}") for i in range(count)]
    made: list[str] = []
    try:
        _make_namespace(switch, made)
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for index, host in enumerate(hosts):
            _make_namespace(host.namespace, made)
            port = f"port{index}"
            _run(
                f"ip -n {host.namespace} link add {INTERFACE} type veth "
                f"peer name {port} netns {switch}"
            )
            _run(f"ip -n {switch} link set {port} master bridge up")
            _run(f"ip -n {host.namespace} addr add {host.address}/24 dev {INTERFACE}")
            _run(f"ip -n {host.namespace} link set {INTERFACE} up")
            # Both ends: what leaves the host, and what the bridge sends to it.
            for namespace, device in ((host.namespace, INTERFACE), (switch, port)):
                _run(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate}", *_QUEUE)
        yield hosts
    finally:
        for namespace in reversed(made):
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def sent_bytes() -> int:
    """What this namespace's link has sent, headers included."""
    path = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(path.read_text(encoding="ascii"))


def _make_namespace(name: str, made: list[str]) -> None:
    _run(f"ip netns add {name}")
    made.append(name)
    _run(f"ip -n {name} link set lo up")


def _run(command: str, *more: str) -> None:
    arguments = [*command.split(), *more]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()}")
