# SPDX-License-Identifier: GPL-3.0-or-later
"""Close the lab's network: nobody in it has a way to anything else, and what somebody asks of anything else is counted.

Each node, and each namespace beside them, gets a cable to nobody with its only default route, and name servers behind
it. So a question for anything outside leaves its sender, is counted and recorded, and is never answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import tempfile
import threading
import typing as t
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from _lab import JsonObject, Lab, until

from lab import engine as engines
from lab.engine import NAME
from lab.network import machine_address

# Of nobody (RFC 5737), so that a question for a name is a packet to there.
NAME_SERVER, ELSEWHERE = "203.0.113.53", "198.51.100.1"
OUT, NOBODY = "out", "nobody"
# Marks the rules of iptables that count what nodes send to this machine, or through it.
COMMENT = "kubegpu-lab-closed"
CLONE_NEWNET = 0x40000000
ETH_P_ALL = 0x0003
ASKED_FOR_NAMES = 53

T = t.TypeVar("T")


def run(*command: str, check: bool = True, source: str | None = None) -> str:
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=60)
    if check:
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}: {done.stderr}{done.stdout}"
    return done.stdout


class Member:
    """A network namespace on the lab's bridge.

    :ivar path: of the namespace, as nsenter takes it.
    """

    def __init__(self, name: str, address: str, path: str, container: str = "") -> None:
        self.name, self.address, self.path = name, address, path
        self._container = container
        self._names = ""
        self._socket: socket.socket | None = None
        self._before: list[str] = []
        self._packets = 0

    def inside(self, *command: str, check: bool = True) -> str:
        """Run a program of this machine in the namespace, and return its output."""
        return run("nsenter", f"--net={self.path}", "--", *command, check=check)

    def in_it(self, act: Callable[[], T]) -> T:
        """Call a function in a thread that is in the namespace."""
        found: list[T] = []

        def enter() -> None:
            with open(self.path, encoding="ascii") as file:
                os.setns(file.fileno(), CLONE_NEWNET)
            found.append(act())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return found[0]

    def close(self, elsewhere: Sequence[str]) -> None:
        """Lead everything but the lab's own network to nobody.

        :param elsewhere: addresses of the lab's network that are outside.
        """
        self._before = self.inside("ip", "-4", "route", "show", "default").splitlines()
        self.inside("ip", "link", "add", OUT, "type", "veth", "peer", "name", NOBODY)
        for link in (OUT, NOBODY):
            # The kernel's own packets, such as a search for routers, aren't anybody's question.
            self.inside("sysctl", "-q", f"net.ipv6.conf.{link}.disable_ipv6=1")
            self.inside("ip", "link", "set", link, "arp", "off", "up")
        self._socket = self.in_it(_packet_socket)
        self.inside("ip", "route", "replace", "default", "dev", OUT)
        for address in elsewhere:
            self.inside("ip", "route", "replace", f"{address}/32", "dev", OUT)
        if self._container:
            self._names = self._named_by(f"nameserver {NAME_SERVER}\n")

    def _named_by(self, content: str) -> str:
        """Replace the resolv.conf of a container, which its engine has mounted, and return what it had."""
        engine = engines.find()
        assert engine is not None
        with tempfile.TemporaryFile() as file:
            file.write(content.encode())
            file.seek(0)
            script = "cat /etc/resolv.conf; cat >/etc/resolv.conf"
            return engine.docker("exec", "-i", self._container, "sh", "-c", script, source=file).stdout

    def open(self) -> None:
        if self._names:
            self._named_by(self._names)
        if self._socket:
            self._socket.close()
        self.inside("ip", "link", "delete", OUT, check=False)
        for route in self._before:
            self.inside("ip", "route", "replace", *route.split(), check=False)

    def sent(self) -> int:
        """Return how many packets went to nobody since the last call, as the kernel counts them."""
        [link] = json.loads(self.inside("ip", "-json", "-statistics", "link", "show", OUT))
        now = int(link["stats64"]["tx"]["packets"])
        before, self._packets = self._packets, now
        return now - before

    def seen(self) -> list[str]:
        """Return what these packets asked, as far as they can be read."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while self._socket:
                found.append(f"{self.name}: {_described(self._socket.recv(65535))}")
        return found


def _packet_socket() -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
    found.bind((NOBODY, ETH_P_ALL))
    found.setblocking(False)
    return found


def _described(packet: bytes) -> str:
    """Return protocol, destination, and the name that is asked for, of an IPv4 packet."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return f"{len(packet)} bytes that aren't IPv4"
    length, protocol = (packet[0] & 15) * 4, packet[9]
    source, target = (socket.inet_ntoa(packet[start : start + 4]) for start in (12, 16))
    if protocol not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) or len(packet) < length + 8:
        return f"protocol {protocol} {source} > {target}"
    port = struct.unpack("!H", packet[length + 2 : length + 4])[0]
    kind = "tcp" if protocol == socket.IPPROTO_TCP else "udp"
    name = ""
    if kind == "udp" and port == ASKED_FOR_NAMES:
        name = f" name {_name(packet[length + 8 + 12 :])}"
    return f"{kind} {source} > {target}:{port}{name}"


def _name(question: bytes) -> str:
    words, place = [], 0
    while place < len(question) and question[place]:
        words.append(question[place + 1 : place + 1 + question[place]].decode("ascii", "replace"))
        place += 1 + question[place]
    return ".".join(words)


def members_of(described: t.Mapping[str, JsonObject]) -> list[Member]:
    """Return the lab's nodes or machines, as its state has them."""
    engine = engines.find()
    assert engine is not None
    found = []
    for name, one in described.items():
        number = engine.out("inspect", "--format={{.State.Pid}}", one["container"])
        found.append(Member(name, one["address"], f"/proc/{number}/ns/net", one["container"]))
    return found


@contextlib.contextmanager
def joined(lab: Lab, name: str, number: int) -> Iterator[Member]:
    """A network namespace of its own on the lab's bridge, for programs of this machine.

    :param number: of its address in the lab's network.
    """
    address, space, cable = machine_address(lab.state["settings"]["subnet"], number), f"{NAME}-{name}", f"kgl-{number}"
    own = Path("/etc/netns") / space
    run("ip", "netns", "delete", space, check=False)
    run("ip", "netns", "add", space)
    try:
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", cable, "master", NAME, "up")
        member = Member(name, address, f"/run/netns/{space}")
        member.inside("ip", "link", "set", "lo", "up")
        member.inside("ip", "address", "add", f"{address}/24", "dev", "eth0")
        member.inside("ip", "link", "set", "eth0", "up")
        # `ip netns exec` lays it over /etc.
        own.mkdir(parents=True)
        (own / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")
        yield member
    finally:
        (own / "resolv.conf").unlink(missing_ok=True)
        if own.exists():
            own.rmdir()
        run("ip", "netns", "delete", space)


class Closed:
    """The closed network, and what was asked of anything else since it was last looked."""

    def __init__(self, lab: Lab, *members: Member, outside: str = "") -> None:
        """:param outside: address of a machine on the bridge that has a way out, as it is the vendors' side."""
        self._repository = lab.state["repository"]["address"]
        self.members = members
        marked = ("-m", "comment", "--comment", COMMENT)
        others = ("!", "-s", outside) if outside else ()
        # What they open a connection for on this machine, and what they send through it.
        self._rules = [
            ("INPUT", "-i", NAME, *others, "-m", "conntrack", "--ctstate", "NEW", *marked),
            ("FORWARD", "-i", NAME, *others, "!", "-o", NAME, *marked),
        ]
        self._counted: dict[str, int] = {}

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Close the network; it is open again afterwards, whatever happens."""
        with contextlib.ExitStack() as stack:
            for rule in self._rules:
                run("iptables", "-w", "-I", *rule)
                stack.callback(run, "iptables", "-w", "-D", *rule)
            for member in self.members:
                stack.callback(member.open)
                # The packages' repository is the vendors'.
                member.close([self._repository])
            self.asked()
            yield

    def asked(self) -> list[str]:
        """Return what was asked of anything else since the last call: a line for each sender and packet."""
        found = []
        for member in self.members:
            # In this order, a packet that comes meanwhile is counted the next time at the latest.
            seen, number = member.seen(), member.sent()
            found += seen
            found += [f"{member.name}: {number - len(seen)} packets that nobody read"] if number > len(seen) else []
        for chain, number in self._of_this_machine().items():
            if number > self._counted.get(chain, 0):
                found.append(f"{chain} of this machine: {number - self._counted.get(chain, 0)} packets")
            self._counted[chain] = number
        return found

    @staticmethod
    def _of_this_machine() -> dict[str, int]:
        found = {}
        for chain in ("INPUT", "FORWARD"):
            for line in run("iptables", "-w", "-nvxL", chain).splitlines():
                if COMMENT in line:
                    found[chain] = int(line.split()[0])
        return found

    def tried(self, member: Member, address: str = ELSEWHERE, port: int = 443) -> list[str]:
        """Ask something outside on purpose, and return what was counted."""
        script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.3)"
        member.inside("python3", "-I", "-c", script, address, str(port), check=False)
        return t.cast("list[str]", until(self.asked, f"{member.name} asks {address}, and it is counted", 5))
