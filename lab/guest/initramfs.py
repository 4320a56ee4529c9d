# SPDX-License-Identifier: GPL-3.0-or-later
"""The guest's initramfs: busybox, the modules for its root, and the program ``init`` beside this file."""

from __future__ import annotations

import stat
from pathlib import Path

from lab.guest.kernel import Kernel
from lab.shell import LabError

INIT = Path(__file__).resolve().parent / "init"
# What the root needs: this machine's files over 9p, and memory laid over them.
ROOT = ("virtio_pci", "9pnet_virtio", "9p", "overlay")


def order(dependencies: str, wanted: tuple[str, ...]) -> list[str]:
    """Return the files of modules in the order in which they can be loaded.

    :param dependencies: the text of modules.dep: each line a file, and the files that must be loaded before it.
    :raises LabError: a module isn't in it.
    """
    needs = {name: rest.split() for name, _colon, rest in (line.partition(":") for line in dependencies.splitlines())}
    files = {path.rpartition("/")[2].partition(".ko")[0].replace("-", "_"): path for path in needs}
    found: list[str] = []
    for module in wanted:
        if module not in files:
            raise LabError(f"the guest's kernel has no module {module}.")
        # The file lists the last one to load first.
        for path in [*reversed(needs[files[module]]), files[module]]:
            if path not in found:
                found.append(path)
    return found


def write(kernel: Kernel, target: Path) -> None:
    """Write the initramfs, uncompressed, since unpacking costs more than reading here."""
    modules = order((kernel.modules / "modules.dep").read_text(), ROOT)
    files = {f"modules/{number:02}.ko": kernel.modules / path for number, path in enumerate(modules)}
    folders = ("bin", "dev", "proc", "sys", "modules", "machine", "layer", "bytecode", "memory", "root")
    with target.open("wb") as file:
        entries = [(name, stat.S_IFDIR | 0o755, b"") for name in folders]
        entries.append(("bin/busybox", stat.S_IFREG | 0o755, (kernel.layer / "usr/bin/busybox").read_bytes()))
        entries.append(("init", stat.S_IFREG | 0o755, INIT.read_bytes()))
        entries += [(name, stat.S_IFREG | 0o644, path.read_bytes()) for name, path in files.items()]
        for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
            file.write(_entry(number, name, mode, content))


def _entry(number: int, name: str, mode: int, content: bytes) -> bytes:
    """Return an entry of a cpio archive, "newc": header with name, and content, each padded to 4 bytes."""
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)
