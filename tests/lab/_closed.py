# SPDX-License-Identifier: GPL-3.0-or-later
"""Close the lab's network: nobody in it has a way to anything else, and what somebody asks of anything else is counted.

Each node, and each namespace beside them, gets a cable to nobody with its only default routes, and name servers behind
it, for IPv4 and for IPv6. So a question for anything outside leaves its sender, is counted and recorded, and is never
answered.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import socket
import socketserver
import struct
import subprocess
import tempfile
import threading
import typing as t
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path

from _lab import JsonObject, Lab, until

from lab import engine as engines
from lab.engine import NAME
from lab.network import machine_address

# Of nobody (RFC 5737, RFC 3849), so that a question for a name is a packet to there.
NAME_SERVER, NAME_SERVER_6 = "203.0.113.53", "2001:db8:53::53"
ELSEWHERE, ELSEWHERE_6 = "198.51.100.1", "2001:db8:1::1"
# What a test leads through this machine, on purpose.
FAR = "198.51.100.2"
# Each is asked once, and the next one a second later.
NAMES = f"nameserver {NAME_SERVER}\nnameserver {NAME_SERVER_6}\noptions timeout:1 attempts:1\n"
OUT, NOBODY = "out", "nobody"
# Addresses of members, on the cable to nobody and in the lab's network: with the last number of their IPv4 address.
OUT_6, INSIDE_6, GATEWAY_6 = "fd92:0:0:1::", "fd92:0:0:2::", "fd92:0:0:2::1"
# Marks the rules of iptables that count what nodes send to this machine, or through it.
COMMENT = "kubegpu-lab-closed"
CLONE_NEWNET = 0x40000000
ETH_P_ALL = 0x0003
ASKED_FOR_NAMES = 53
TABLES = {"iptables": "", "ip6tables": " (IPv6)"}
# Headers between that of IPv6 and its content, whose second byte is their length (RFC 8200).
EXTENSIONS = (socket.IPPROTO_HOPOPTS, socket.IPPROTO_ROUTING, socket.IPPROTO_DSTOPTS)

T = t.TypeVar("T")


def run(*command: str, check: bool = True, source: str | None = None) -> str:
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=60)
    if check:
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}: {done.stderr}{done.stdout}"
    return done.stdout


class Member:
    """A network namespace on the lab's bridge.

    :ivar path: of the namespace, as nsenter takes it.
    :ivar address_6: from which it asks by IPv6 when it is closed; ``inside_6`` is its address in the lab's network.
    """

    def __init__(self, name: str, address: str, path: str, container: str = "") -> None:
        self.name, self.address, self.path = name, address, path
        self._container = container
        number = address.rpartition(".")[2]
        self.address_6, self.inside_6 = f"{OUT_6}{number}", f"{INSIDE_6}{number}"
        self._names = ""
        self._socket: socket.socket | None = None
        self._before: list[str] = []
        self._packets = 0

    def inside(self, *command: str, check: bool = True) -> str:
        """Run a program of this machine in the namespace, and return its output."""
        return run("nsenter", f"--net={self.path}", "--", *command, check=check)

    def in_it(self, act: Callable[[], T]) -> T:
        """Call a function in a thread that is in the namespace."""

        def enter() -> T:
            with open(self.path, encoding="ascii") as file:
                os.setns(file.fileno(), CLONE_NEWNET)
            return act()

        with futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(enter).result()

    def close(self, elsewhere: Sequence[str] = ()) -> None:
        """Lead everything but the lab's own network to nobody.

        :param elsewhere: addresses of the lab's network that are outside.
        """
        self._before = [
            f"{family} {route}"
            for family in ("-4", "-6")
            for route in self.inside("ip", family, "route", "show", "default").splitlines()
        ]
        self.inside("ip", "link", "add", OUT, "type", "veth", "peer", "name", NOBODY)
        for link in (OUT, NOBODY):
            # The kernel's own packets, such as a search for routers, aren't anybody's question.
            self.inside("sysctl", "-q", f"net.ipv6.conf.{link}.disable_ipv6={int(link == NOBODY)}")
            own = ("addrgenmode", "none") if link == OUT else ()
            self.inside("ip", "link", "set", link, *own, "arp", "off", "up")
        self._socket = self.in_it(_packet_socket)
        self.inside("ip", "route", "replace", "default", "dev", OUT)
        for address in elsewhere:
            self.inside("ip", "route", "replace", f"{address}/32", "dev", OUT)
        self.inside("ip", "-6", "route", "flush", "default")
        self.inside("ip", "-6", "address", "add", f"{self.address_6}/128", "dev", OUT, "nodad")
        self.inside("ip", "-6", "route", "add", "default", "dev", OUT)
        if self._container:
            self._names = self._named_by(NAMES)

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
            family, *words = route.split()
            self.inside("ip", family, "route", "replace", *words, check=False)

    @contextlib.contextmanager
    def led(self, address: str, gateway: str) -> Iterator[None]:
        """Lead an address to a gateway instead of nobody."""
        route = (f"{address}/32", "via", gateway)
        self.inside("ip", "route", "add", *route)
        try:
            yield
        finally:
            self.inside("ip", "route", "delete", *route)

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
    """Return protocol, source, destination, and the name that is asked for, of a packet of IPv4 or IPv6."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        length, protocol = (packet[0] & 15) * 4, packet[9]
        source, target = (socket.inet_ntoa(packet[start : start + 4]) for start in (12, 16))
        shown = target
    elif version == 6 and len(packet) >= 40:
        length, protocol = 40, packet[6]
        source, target = (socket.inet_ntop(socket.AF_INET6, packet[start : start + 16]) for start in (8, 24))
        shown = f"[{target}]"
        while protocol in EXTENSIONS and len(packet) >= length + 8:
            protocol, length = packet[length], length + (packet[length + 1] + 1) * 8
    else:
        return f"{len(packet)} bytes that are neither IPv4 nor IPv6"
    if protocol not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP) or len(packet) < length + 8:
        return f"protocol {protocol} {source} > {target}"
    port = struct.unpack("!H", packet[length + 2 : length + 4])[0]
    kind = "tcp" if protocol == socket.IPPROTO_TCP else "udp"
    name = ""
    if kind == "udp" and port == ASKED_FOR_NAMES:
        name = f" name {_name(packet[length + 8 + 12 :])}"
    return f"{kind} {source} > {shown}:{port}{name}"


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
        member.inside("ip", "address", "add", f"{member.inside_6}/64", "dev", "eth0", "nodad")
        member.inside("ip", "link", "set", "eth0", "up")
        # `ip netns exec` lays it over /etc.
        own.mkdir(parents=True)
        (own / "resolv.conf").write_text(NAMES)
        yield member
    finally:
        (own / "resolv.conf").unlink(missing_ok=True)
        if own.exists():
            own.rmdir()
        run("ip", "netns", "delete", space)


@contextlib.contextmanager
def served(member: Member, folder: Path, port: int) -> Iterator[list[str]]:
    """Serve a folder by HTTP at a member's address; yields a line for each request so far."""
    requests: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form: str, *words: t.Any) -> None:
            requests.append(form % words)

    class Server(socketserver.ThreadingTCPServer):
        """Not an HTTPServer, which asks for the name of its own address."""

        allow_reuse_address = True
        daemon_threads = True

    handler = functools.partial(Handler, directory=str(folder))
    server = member.in_it(lambda: Server((member.address, port), handler))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class Closed:
    """The closed network, and what was asked of anything else since it was last looked."""

    def __init__(self, lab: Lab, *members: Member, outside: str = "") -> None:
        """:param outside: address of a machine on the bridge that has a way out, as it is the vendors' side."""
        self._repository = lab.state["repository"]["address"]
        self.members = members
        # Neighbours' and routers' own messages of IPv6 are of no connection.
        new = ("-m", "conntrack", "--ctstate", "NEW")
        marked = ("-m", "comment", "--comment", COMMENT)
        self._rules = []
        for table in TABLES:
            others = ("!", "-s", outside) if outside and table == "iptables" else ()
            # What they open a connection for on this machine, and what they send through it.
            self._rules += [
                (table, "INPUT", "-i", NAME, *others, *new, *marked),
                (table, "FORWARD", "-i", NAME, *others, "!", "-o", NAME, *marked),
            ]
        self._counted: dict[str, int] = {}

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Close the network; it is open again afterwards, whatever happens."""
        with contextlib.ExitStack() as stack:
            switch, address = f"net.ipv6.conf.{NAME}.disable_ipv6", (f"{GATEWAY_6}/64", "dev", NAME)
            stack.callback(run, "sysctl", "-q", f"{switch}={run('sysctl', '-n', switch).strip()}")
            run("sysctl", "-q", f"{switch}=0")
            run("ip", "address", "add", *address, "nodad")
            stack.callback(run, "ip", "address", "delete", *address)
            for table, *rule in self._rules:
                run(table, "-w", "-I", *rule)
                stack.callback(run, table, "-w", "-D", *rule)
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
                found.append(f"{chain}: {number - self._counted.get(chain, 0)} packets")
            self._counted[chain] = number
        return found

    @staticmethod
    def _of_this_machine() -> dict[str, int]:
        found = {}
        for table, shown in TABLES.items():
            for chain in ("INPUT", "FORWARD"):
                for line in run(table, "-w", "-nvxL", chain).splitlines():
                    if COMMENT in line:
                        found[f"{chain} of this machine{shown}"] = int(line.split()[0])
        return found

    def tried(self, member: Member, address: str = ELSEWHERE, port: int = 443) -> list[str]:
        """Ask something outside on purpose, and return what was counted."""
        script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.3)"
        member.inside("python3", "-I", "-c", script, address, str(port), check=False)
        return t.cast("list[str]", until(self.asked, f"{member.name} asks {address}, and it is counted", 5))
