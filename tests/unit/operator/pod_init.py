# SPDX-License-Identifier: GPL-3.0-or-later
"""The first process of a played pod: namespaces as a container has them, then the operator.

Its network is the loopback interface; the API server is there, by a socket that the test forwards. Its root is
read-only, and /tmp is a volume of a bounded size. With this process all others of the pod end, as in a container.
Arguments: the folder of the sockets, the API server's port, the volume's size in MiB, and the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

METRICS = 8080


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def forward(listener: socket.socket, family: int, address: object) -> None:
    """Forward each connection of a listener to an address."""

    def serve() -> None:
        while True:
            try:
                accepted, _from = listener.accept()
            except OSError:
                return
            other = socket.socket(family, socket.SOCK_STREAM)
            try:
                other.connect(address)
            except OSError:
                accepted.close()
                continue
            for pair in ((accepted, other), (other, accepted)):
                threading.Thread(target=_pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def listen_tcp(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sh", b"lo", 0x1 | 0x40)
        fcntl.ioctl(one, 0x8914, request)


def main() -> int:
    folder, port, size, *command = sys.argv[1:]
    _loopback_up()
    forward(listen_tcp(int(port)), socket.AF_UNIX, f"{folder}/api.sock")
    forward(listen_unix(Path(folder) / "metrics.sock"), socket.AF_INET, ("127.0.0.1", METRICS))
    for words in (("-t", "tmpfs", "-o", f"size={size}m", "tmpfs", "/tmp"), ("-o", "remount,bind,ro", "/")):
        subprocess.run(["mount", *words], check=True)
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
