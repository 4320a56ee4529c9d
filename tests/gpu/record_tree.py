# SPDX-License-Identifier: GPL-3.0-or-later
"""Record what gpu_node_info reads of this machine, as a tree of tests/unit/node/trees.

usage: PYTHONPATH=.collections record_tree.py > tests/unit/node/trees/NAME/tree.yml
UUIDs are replaced. Of the kernel's log only lines about the driver are kept, and of the packages those that the facts
report; look through the rest before you publish it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nvidia_smi import NEWER_FIELDS
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts

UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
LOG = re.compile(r"(?:^|\] )(?:NVRM|nvidia|nouveau)")
# Files that list everything of a folder: only these entries count.
COUNTED = {"/dev": re.compile(r"nvidia.*")}


def run(
    argv: t.Sequence[str], data: str | None = None, environ_update: t.Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    environment = {**os.environ, **(environ_update or {})}
    done = subprocess.run(
        argv, input=data, capture_output=True, text=True, errors="replace", check=False, env=environment
    )
    return done.returncode, done.stdout, done.stderr


class Recorder(RealSystem):
    """This machine, and what was asked of it; ``commands`` by their line, without the path of the program."""

    def __init__(self) -> None:
        super().__init__("/", run)
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.folders: set[str] = set()
        self.commands: dict[str, Done] = {}

    def read(self, path: str) -> str | None:
        text = super().read(path)
        if text is not None:
            self.files[path] = text
        return text

    def names(self, path: str) -> list[str]:
        found = super().names(path)
        for name in found:
            if COUNTED.get(path, re.compile("")).match(name):
                self._note(f"{path}/{name}")
        return found

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        if found:
            self._note(path)
        return found

    def link(self, path: str) -> str | None:
        target = super().link(path)
        if target is not None:
            self.links[path] = target
        return target

    def run(self, argv: t.Sequence[str], timeout: float = 60, stdin: str | None = None) -> Done:
        done = super().run(argv, timeout, stdin)
        words = list(argv)[4:] if argv[0] == "timeout" else list(argv)
        self.commands[" ".join([words[0].rpartition("/")[2], *words[1:]])] = done
        return done

    def _note(self, path: str) -> None:
        if os.path.isdir(path):
            self.folders.add(path)
        else:
            self.files.setdefault(path, "")


def tree(seen: Recorder, node: JsonObject) -> JsonObject:
    """Return the recording in the form of a tree."""
    commands: JsonObject = {}
    made: JsonObject = {"release": seen.files.pop("/etc/os-release")}
    for line, done in seen.commands.items():
        program = line.split()[0]
        if done.rc == 127 or program == "uname":
            continue
        if program == "nvidia-smi":
            # The last query is the one that the driver didn't refuse.
            asked = line.partition("--query-gpu=")[2].split()[0].split(",") if "--query-gpu=" in line else []
            if asked:
                newer = [field for field in asked if field in NEWER_FIELDS]
                made["smi"] = {"fields": newer, "rc": done.rc, "out": done.out, "err": done.err}
        elif program == "dpkg-query":
            made["dpkg"] = [row for row in packages(done.out) if row[0] in node["packages"]]
        else:
            lines = [one.rstrip() for one in done.out.splitlines() if program != "dmesg" or LOG.search(one)]
            commands[line] = {"rc": done.rc, "out": "\n".join([*lines, ""]), "err": done.err}
    below = {*seen.files, *seen.links}
    folders = sorted(folder for folder in seen.folders if not any(path.startswith(f"{folder}/") for path in below))
    files = {path: text for path, text in sorted(seen.files.items()) if path not in seen.links}
    return {**made, "files": files, "links": dict(sorted(seen.links.items())), "folders": folders, "commands": commands}


def packages(out: str) -> t.Iterator[list[str]]:
    """Read dpkg-query's rows as the tree has them: name, version, maker, and whether it is held."""
    for line in out.splitlines():
        status, name, version, _architecture, maker = line.split("\t")
        yield [name, version, maker, *(["held"] if status.startswith("h") else [])]


def anonymous(text: str) -> str:
    for number, uuid in enumerate(dict.fromkeys(UUID.findall(text))):
        text = text.replace(uuid, f"GPU-a1b2c3d{number}-e5f6-4a7b-8c9d-0e1f2a3b4c5d")
    return re.sub(r"(Serial Number: )\d+", r"\g<1>1650000000000", text)


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def scalar(dumper: Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


Dumper.add_representer(str, scalar)


if __name__ == "__main__":
    recorder = Recorder()
    observed = t.cast(JsonObject, facts.observe(recorder))
    recorded = yaml.dump(tree(recorder, observed), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    sys.stdout.write(f"---\n{anonymous(recorded)}")
