"""Several hosts on one machine: network namespaces, joined by a bridge over links of a given rate.

Needs root and iproute2. Names contain the process id, so that two benchmarks can run at once.
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
    """A network namespace, and the address of its link."""

    namespace: str
    address: str

    def command(self, arguments: list[str]) -> list[str]:
        """The command line that runs ``arguments`` inside the namespace."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def missing_tools() -> str | None:
    """The reason why this process cannot create namespaces; ``None`` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not found: install iproute2" if absent else None


@contextmanager
def shaped_hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """Create hosts for the time of the context.

    :param rate: rate of each host's link per direction, as tc spells it: 1gbit.
    :raises SystemExit: if a command fails.
    """
    prefix = f"os{os.getpid()}"
    switch = f"{prefix}s"
    hosts = [Host(f"{prefix}h{i}", f"10.77.0.{i + 1}") for i in range(count)]
    created: list[str] = []
    try:
        # A namespace for the bridge, which stands for the switch between the hosts.
        _create_namespace(switch, created)
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for index, host in enumerate(hosts):
            # One pair of virtual Ethernet devices per host: a link, and a port of the bridge.
            _create_namespace(host.namespace, created)
            port = f"port{index}"
            _run(
                f"ip -n {host.namespace} link add {INTERFACE} type veth "
                f"peer name {port} netns {switch}"
            )
            _run(f"ip -n {switch} link set {port} master bridge up")
            _run(f"ip -n {host.namespace} addr add {host.address}/24 dev {INTERFACE}")
            _run(f"ip -n {host.namespace} link set {INTERFACE} up")
            # Limit both ends: what the host sends, and what the bridge sends to the host.
            for namespace, device in ((host.namespace, INTERFACE), (switch, port)):
                _run(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate}", *_QUEUE)
        yield hosts
    finally:
        for namespace in reversed(created):
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def sent_bytes() -> int:
    """Bytes that the link of this process's namespace has sent, headers included."""
    path = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(path.read_text(encoding="ascii"))


def _create_namespace(name: str, created: list[str]) -> None:
    _run(f"ip netns add {name}")
    created.append(name)
    _run(f"ip -n {name} link set lo up")


def _run(command: str, *more: str) -> None:
    arguments = [*command.split(), *more]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()}")
