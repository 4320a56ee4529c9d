# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated machines: a directory of trees/ becomes files under a temporary root, and scripts the commands' output.

``tree.yml``: ``like`` another tree, ``release`` (os-release), ``files`` by path, ``links``, ``folders``, ``pci``
(address: "vendor:device class driver"), ``kernels`` (release: headers, module), ``running``, ``dpkg`` or ``rpm`` (name,
version, maker, "held"; ``manager`` and ``database`` of rpm), ``smi`` (rows of nvidia-smi, or how it fails; a recorded
answer has only the ``fields`` that were asked for, so any newer field is refused as by a driver without it),
``commands`` by how their line begins. ``expected.yml``: parts of the observation by their dotted path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nvidia_smi import NEWER_FIELDS
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, RealSystem

TREES = Path(__file__).parent / "trees"


def names() -> list[str]:
    return sorted(path.name for path in TREES.iterdir())


def load(name: str) -> JsonObject:
    """Load a tree over the one that ``like`` names: its sections are merged, a null removes a key."""
    own = yaml.safe_load((TREES / name / "tree.yml").read_text())
    tree = load(own.pop("like")) if "like" in own else {}
    for section, content in own.items():
        if isinstance(content, dict) and isinstance(tree.get(section), dict) and section != "smi":
            merged = {**tree[section], **content}
            tree[section] = {key: value for key, value in merged.items() if value is not None}
        else:
            tree[section] = content
    return tree


def expected(name: str) -> JsonObject:
    return yaml.safe_load((TREES / name / "expected.yml").read_text()) or {}


def part(value: Any, path: str) -> Any:
    """Return the value at ``a.0.b``."""
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


class TreeSystem(RealSystem):
    """The files and commands of a tree; ``ran`` lists the commands that ran."""

    def __init__(self, root: Path, tree: JsonObject) -> None:
        super().__init__(str(root))
        self._tree = tree
        self.ran: list[str] = []
        build(root, tree)

    def run(self, argv: Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        words = list(argv)
        if words[0] == "timeout":
            words = words[4:]
        words[0] = words[0].rpartition("/")[2]
        line = " ".join(words)
        self.ran.append(line)
        if words[0] == "uname":
            return Done(0, self._tree.get("machine", "x86_64") + "\n", "")
        # Of a driver that others provide it runs below another root, or with another folder of libraries.
        at = next((number for number, word in enumerate(words) if word.rpartition("/")[2] == "nvidia-smi"), None)
        if at is not None:
            return smi(self._tree["smi"], line)
        if words[0] in ("dpkg-query", "rpm") and ("-W" in words or "-qa" in words):
            kind = "dpkg" if words[0] == "dpkg-query" else "rpm"
            return Done(0, "".join(row(one, words) for one in self._tree.get(kind, [])), "")
        commands = self._tree.get("commands", {})
        known = [begin for begin in commands if line.startswith(begin)]
        if not known:
            return Done(127, "", f"{words[0]}: not found")
        answer = commands[max(known, key=len)]
        answer = {"out": answer} if isinstance(answer, str) else answer
        return Done(answer.get("rc", 0), answer.get("out", ""), answer.get("err", ""))


def build(root: Path, tree: JsonObject) -> None:
    """The tree's files, in the way that sysfs, the kernel's packages and the package managers lay theirs."""
    files = {"/etc/os-release": tree.get("release", ""), **tree.get("files", {})}
    links = dict(tree.get("links", {}))
    for address, words in tree.get("pci", {}).items():
        folder = f"/sys/bus/pci/devices/{address}"
        ids, kind, *driver = words.split()
        vendor, device = ids.split(":")
        files |= {
            f"{folder}/vendor": f"0x{vendor}\n",
            f"{folder}/device": f"0x{device}\n",
            f"{folder}/class": f"0x{kind}\n",
        }
        if driver:
            links[f"{folder}/driver"] = f"../../../../bus/pci/drivers/{driver[0]}"
    for release, has in tree.get("kernels", {}).items():
        files[f"/boot/vmlinuz-{release}"] = ""
        folder = f"/lib/modules/{release}"
        links[f"{folder}/build"] = f"/usr/src/{release}"
        if has.get("headers"):
            files[f"/usr/src/{release}/Makefile"] = ""
        dep = "kernel/drivers/gpu/drm/nouveau/nouveau.ko:\n"
        if has.get("module"):
            sibling = has["module"].replace("nvidia.ko", "nvidia-uvm.ko")
            dep += f"{has['module']}: kernel/drivers/char/ipmi/ipmi_msghandler.ko\n{sibling}: {has['module']}\n"
        files[f"{folder}/modules.dep"] = dep
    if "running" in tree:
        files["/proc/sys/kernel/osrelease"] = tree["running"] + "\n"
    if "dpkg" in tree:
        files["/var/lib/dpkg/status"] = ""
    if "rpm" in tree:
        files[f"/var/lib/rpm/{tree.get('database', 'rpmdb.sqlite')}"] = ""
        files[f"/usr/bin/{tree.get('manager', 'dnf')}"] = ""
    if "smi" in tree:
        files["/usr/bin/nvidia-smi"] = ""
    for folder in tree.get("folders", []):
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        if text is not None:
            place(root, path).write_text(text)
    for path, target in links.items():
        place(root, path).symlink_to(target)


def place(root: Path, path: str) -> Path:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def smi(scripted: JsonObject, line: str) -> Done:
    """Answer as nvidia-smi, with the fields of the tree."""
    asked = (re.search(r"--query-gpu=(\S+)", line) or [""])[0].partition("=")[2].split(",")
    if "fields" in scripted:
        newer = [field for field in asked if field in NEWER_FIELDS and field not in scripted["fields"]]
        if newer:
            return Done(2, f'Field "{newer[0]}" is not a valid field to query.\n\n', "")
    if "out" in scripted or "rc" in scripted:
        return Done(scripted.get("rc", 0), scripted.get("out", ""), scripted.get("err", ""))
    if line.endswith(" -q"):
        return Done(0, scripted.get("report", ""), "")
    for field in asked:
        if field in scripted.get("unknown", []):
            return Done(2, f'Field "{field}" is not a valid field to query.\n\n', "")
    common = {"persistence_mode": "Disabled", "mig.mode.current": "[N/A]", "fabric.state": "[N/A]", **scripted["all"]}
    rows = [{"index": index, **common, **card} for index, card in enumerate(scripted["cards"])]
    return Done(0, "".join(", ".join(str(card[field]) for field in asked) + "\n" for card in rows), "")


def row(package: Sequence[str], words: Sequence[str]) -> str:
    """A package in the form that dpkg-query or rpm is asked for."""
    name, version, maker, *held = package
    epoch, _colon, rest = version.rpartition(":")
    number, _dash, release = rest.rpartition("-")
    values = {
        "db:Status-Abbrev": "hi " if held else "ii ",
        "Package": name,
        "Version": version,
        "Architecture": "amd64",
        "Maintainer": maker,
        "NAME": name,
        "EPOCHNUM": epoch or "0",
        "VERSION": number,
        "RELEASE": release,
        "VENDOR": maker,
        "ARCH": "x86_64",
        "INSTALLTIME": "1750000000",
    }
    wanted = next(word for word in words if "${" in word or "%{" in word)
    wanted = wanted.partition("=")[2] if wanted.startswith("--") else wanted
    wanted = re.sub(
        r"%\|EPOCH\?\{(.*?%\{EPOCH\}.*?)\}:\{(.*?)\}\|", lambda m: m.group(1) if epoch else m.group(2), wanted
    )
    values["EPOCH"] = epoch
    text = re.sub(r"[$%]\{([\w:-]+)\}", lambda found: values[found.group(1)], wanted)
    return text.replace("\\t", "\t").replace("\\n", "\n")
