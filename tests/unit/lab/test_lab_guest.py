# SPDX-License-Identifier: GPL-3.0-or-later
"""The guest's parts that need no QEMU: the order of modules, its archive, and a guest that doesn't end well."""

from __future__ import annotations

import subprocess

import pytest

from lab.guest import bytecode, initramfs, machine
from lab.guest.kernel import Kernel
from lab.shell import LabError

DEPENDENCIES = """\
kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/fscache/fscache.ko kernel/fs/netfs/netfs.ko
kernel/net/9p/9pnet.ko:
kernel/fs/fscache/fscache.ko: kernel/fs/netfs/netfs.ko
kernel/fs/netfs/netfs.ko:
kernel/drivers/virtio/virtio_pci.ko.xz: kernel/drivers/virtio/virtio.ko.xz
kernel/drivers/virtio/virtio.ko.xz:
"""


def test_modules_are_loaded_after_those_that_they_need():
    order = initramfs.order(DEPENDENCIES, ("virtio_pci", "9p", "9pnet"))
    names = [path.rpartition("/")[2].partition(".")[0] for path in order]
    assert names == ["virtio", "virtio_pci", "netfs", "fscache", "9pnet", "9p"]
    with pytest.raises(LabError, match="no module overlay"):
        initramfs.order(DEPENDENCIES, ("overlay",))


def test_the_initramfs_is_an_archive_that_cpio_would_read(tmp_path):
    modules = tmp_path / "layer/usr/lib/modules/6.1"
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text("".join(f"kernel/{name}.ko:\n" for name in initramfs.ROOT))
    (modules / "kernel").mkdir()
    for name in initramfs.ROOT:
        (modules / "kernel" / f"{name}.ko").write_bytes(name.encode())
    (tmp_path / "layer/usr/bin").mkdir()
    (tmp_path / "layer/usr/bin/busybox").write_bytes(b"\x7fELF")
    target = tmp_path / "initramfs"
    initramfs.write(Kernel("6.1", tmp_path / "vmlinuz", tmp_path / "config", tmp_path / "layer"), target)
    content = target.read_bytes()
    assert len(content) % 4 == 0
    at, found = 0, {}
    while content[at : at + 6] == b"070701":
        fields = [int(content[at + 6 + 8 * number : at + 14 + 8 * number], 16) for number in range(13)]
        size, length = fields[6], fields[11]
        name = content[at + 110 : at + 110 + length - 1].decode()
        data = at + 110 + length + (-(110 + length)) % 4
        found[name] = (oct(fields[1]), content[data : data + size])
        at = data + size + (-size) % 4
    assert at == len(content) and list(found)[-1] == "TRAILER!!!"
    assert found["init"] == ("0o100755", initramfs.INIT.read_bytes())
    assert [found[f"modules/{number:02}.ko"][1].decode() for number in range(4)] == list(initramfs.ROOT)


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        ("echo panic; exit 0", 30, "ended without a result; it printed last: \n    panic"),
        ("echo hangs; exec sleep 600", 0.05, "stands still, and printed last: \n    hangs"),
        ("echo spins; while :; do :; done", 1, "didn't end within 1 s of processor time; it printed last: \n    spins"),
    ],
)
def test_a_guest_without_a_result_is_an_error_and_is_ended(script, seconds, message, tmp_path):
    with pytest.raises(LabError, match=message):
        machine.boot(["sh", "-c", f"echo $$ >{tmp_path}/pid; {script}"], tmp_path, seconds, lambda line: None)
    pid = (tmp_path / "pid").read_text().strip()
    assert subprocess.run(["kill", "-0", pid], check=False, capture_output=True).returncode != 0


def test_the_result_is_the_one_of_this_run(tmp_path):
    (tmp_path / "code").write_text("0\n")
    with pytest.raises(LabError, match="without a result"):
        machine.boot(["true"], tmp_path, 30)
    lines: list[str] = []
    ended = machine.boot(["sh", "-c", f"printf 'one\\r\\ntwo'; echo 3 >{tmp_path}/code"], tmp_path, 30, lines.append)
    assert (ended.code, lines) == (3, ["one", "two"])


def test_bytecode_lies_where_python_looks_for_it_and_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBEGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bytecode, "FOLDERS", ("lab/guest",))
    compiled: list[str] = []
    real = bytecode.py_compile.compile
    monkeypatch.setattr(
        bytecode.py_compile, "compile", lambda file, **more: compiled.append(file) or real(file, **more)
    )
    for name in ("one", "two"):
        bytecode.lay(tmp_path / name)
    sources = {str(path) for path in (bytecode.CHECKOUT / "lab/guest").glob("*.py")}
    assert sorted(compiled) == sorted(sources)
    for source in sources:
        assert (tmp_path / "two" / bytecode.importlib.util.cache_from_source(source).lstrip("/")).is_file()
