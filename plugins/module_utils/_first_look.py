# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The first look at a node, kept on it before anything is changed, and the comparison with it after an uninstall. Pure.

What is compared is a reduction of ``gpu_node``: all packages, digests of the files in the folders that roles touch,
services, each runtime's effective default and nouveau. Texts aren't kept: lists and runtimes' files may hold passwords.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

PATH = "/var/lib/kubegpu-share/first-look.json"
SCHEMA = 1

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["present", "compared", "absent"], "default": "present"},
    "accept": {"type": "list", "elements": "str", "default": []},
    "observed": {"type": "dict"},
}

# What this collection installs, or replaces, has one of these in its name.
NVIDIA = re.compile(r"nvidia|nouveau|libcuda|cuda-|libnvsdm|libnv-|nvlsm|kubegpu", re.IGNORECASE)
MARK = "kubegpu"
DEFAULT = re.compile(r"""^\s*default_runtime(?:_name)?\s*=\s*["']([^"']*)["']""", re.MULTILINE)
RUNTIMES = ("containerd", "docker", "crio", "k3s", "k3s-agent", "rke2-server", "rke2-agent")


# --------------------------------------------------------------------------- what is kept


def speaks_of_nvidia(path: str, text: str) -> bool:
    return bool(NVIDIA.search(path) or NVIDIA.search(text))


def file_entry(path: str, text: str) -> Json:
    """What is kept of a file."""
    return {
        "sha256": hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest(),
        "nvidia": speaks_of_nvidia(path, text),
    }


def reduce(node: Json, files: t.Mapping[str, str]) -> Json:
    """What the comparison needs.

    :param node: the observation with all packages.
    :param files: texts in the folders that roles touch.
    """
    nouveau = node.get("nouveau") or {}
    runtimes = node.get("runtimes") or {}
    return {
        "packages": {
            name: {"version": one["version"], "held": bool(one.get("held"))} for name, one in node["packages"].items()
        },
        "files": {path: file_entry(path, text) for path, text in files.items()},
        "services": {
            name: {"active": bool(one.get("active")), "enabled": bool(one.get("enabled"))}
            for name, one in (node.get("services") or {}).items()
        },
        "runtimes": {name: default_runtime(row) for name, row in runtimes.items() if row},
        "nouveau": {
            "blacklisted": bool(nouveau.get("blacklisted")),
            "images": {
                one["path"]: {"nouveau": one.get("nouveau"), "blacklist": one.get("blacklist")}
                for one in nouveau.get("images") or []
            },
        },
    }


def default_runtime(row: Json) -> str:
    """A runtime's effective default, in the component's own words where they are known."""
    if row.get("default_runtime") is not None:
        return str(row["default_runtime"])
    found = DEFAULT.search(str(row.get("dump") or ""))
    return found.group(1) if found else ""


def ours_before(files: t.Mapping[str, str]) -> list[str]:
    """Files of this collection that were there already: then it wasn't the first look."""
    return sorted(path for path in files if MARK in path.lower())


@dataclasses.dataclass(frozen=True)
class Look:
    """What was kept.

    :param marks: files of this collection that were there already.
    """

    taken: str
    seen: Json
    marks: tuple[str, ...] = ()

    def text(self) -> str:
        fields = {"schema": SCHEMA, "taken": self.taken, "marks": list(self.marks), "seen": self.seen}
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"


def parse(text: str) -> Look:
    """Read what was kept.

    :raises ShareError: it isn't what this version writes.
    """
    try:
        fields = json.loads(text)
        if fields["schema"] == SCHEMA:
            return Look(str(fields["taken"]), dict(fields["seen"]), tuple(fields["marks"]))
        words = f"it has schema {fields['schema']!r}, and this version of the collection knows {SCHEMA}"
    except (ValueError, KeyError, TypeError):
        words = "it isn't what this collection writes"
    raise ShareError(f"{PATH} can't be read: {words}; move it aside to go on without a comparison")


# --------------------------------------------------------------------------- the plan


def plan(state: str, seen: Json) -> Plan:
    """Keep the look where there is none, or forget it.

    :param seen: ``first_look`` as ``gpu_node`` has it.
    """
    have = seen["first_look"]
    if state == "present" and have is None:
        return Plan((Change(PATH, "", "packages, files, services and runtimes as they are before anything changes\n"),))
    if state != "present" and have is not None:
        return Plan((Change(PATH, f"taken {have.get('taken') or 'at an unknown time'}\n", ""),))
    return Plan()


# --------------------------------------------------------------------------- the comparison


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that isn't as it was.

    :param id: what ``accept`` names.
    :param ours: this collection's doing, as far as one can tell; others' changes are only told of.
    :param command: what would bring back what was; may be empty.
    """

    id: str
    ours: bool
    sentence: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.id}: {self.sentence}" + (f" ({self.command})" if self.command else "")


def compare(before: Json, after: Json) -> list[Difference]:
    """All that differs; what is ours first.

    :param before: ``seen`` of the first look.
    :param after: the same reduction of the node as it is.
    """
    found = [
        *_packages(before["packages"], after["packages"]),
        *_files(before["files"], after["files"]),
        *_runtimes(before["runtimes"], after["runtimes"]),
        *_services(before["services"], after["services"]),
        *_nouveau(before["nouveau"], after["nouveau"]),
    ]
    return sorted(found, key=lambda one: not one.ours)


def _packages(before: Json, after: Json) -> t.Iterator[Difference]:
    for name in sorted(set(before) | set(after)):
        was, now = before.get(name), after.get(name)
        id, ours = f"package:{name}", bool(NVIDIA.search(name))
        if was is None and now is not None:
            yield Difference(id, ours, f"{now['version']} is installed and wasn't there")
        elif now is None and was is not None:
            yield Difference(id, ours, f"{was['version']} was installed and is gone")
        elif was is not None and now is not None:
            if was["version"] != now["version"]:
                yield Difference(id, ours, f"{now['version']} is installed and {was['version']} was")
            if was["held"] != now["held"]:
                words = "held and wasn't" if now["held"] else "not held and was"
                yield Difference(f"hold:{name}", ours, f"the package is {words}")


def _files(before: Json, after: Json) -> t.Iterator[Difference]:
    for path in sorted(set(before) | set(after)):
        was, now = before.get(path), after.get(path)
        id = f"file:{path}"
        if was is None and now is not None:
            yield Difference(id, now["nvidia"], "it is there and wasn't")
        elif now is None and was is not None:
            yield Difference(id, was["nvidia"], "it was there and is gone")
        elif was is not None and now is not None and was["sha256"] != now["sha256"]:
            if was["nvidia"] == now["nvidia"]:
                words = "it isn't what it was"
            else:
                words = "it names NVIDIA's parts now" if now["nvidia"] else "it named NVIDIA's parts before"
            # Where both texts name them nobody can tell whose change it was; it is better said than passed over.
            yield Difference(id, was["nvidia"] or now["nvidia"], words)


def _runtimes(before: Json, after: Json) -> t.Iterator[Difference]:
    for name in sorted(set(before) & set(after)):
        was, now = before[name], after[name]
        # What couldn't be read says nothing.
        if was and now and was != now:
            ours = bool(NVIDIA.search(was) or NVIDIA.search(now))
            yield Difference(f"runtime:{name}", ours, f"its default runtime is {now!r} and was {was!r}")


def _services(before: Json, after: Json) -> t.Iterator[Difference]:
    for name in sorted(set(before) & set(after)):
        was, now = before[name], after[name]
        id, ours = f"service:{name}", bool(NVIDIA.search(name))
        if was["enabled"] != now["enabled"]:
            words = "starts at boot and didn't" if now["enabled"] else "doesn't start at boot and did"
            yield Difference(id, ours, f"it {words}")
        if was["active"] and not now["active"] and (ours or name in RUNTIMES):
            # A runtime that doesn't run is a node that doesn't work, whoever stopped it.
            yield Difference(id, True, "it doesn't run and did", f"systemctl start {name}")


def _nouveau(before: Json, after: Json) -> t.Iterator[Difference]:
    if before["blacklisted"] != after["blacklisted"]:
        words = "kept from being loaded and wasn't" if after["blacklisted"] else "free to be loaded and wasn't"
        yield Difference("nouveau", True, f"it is {words}")
    for path in sorted(set(before["images"]) & set(after["images"])):
        was, now = before["images"][path]["blacklist"], after["images"][path]["blacklist"]
        if was is not None and now is not None and was != now:
            words = "in it and wasn't" if now else "gone from it"
            yield Difference(f"image:{path}", True, f"nouveau's blacklist is {words}")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``problems`` are ours and not accepted; ``notes`` are what others did, and what was accepted."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def judge(look: Look, after: Json, accept: t.Sequence[str]) -> Verdict:
    """Whether the node is as it was at the first look."""
    if look.marks:
        words = f"the first look, taken {look.taken}, came after this collection's own files ({', '.join(look.marks)})"
        return Verdict((), (f"{words}: what was there before can't be compared",))
    found = compare(look.seen, after)
    return Verdict(
        tuple(str(one) for one in found if one.ours and one.id not in accept),
        tuple(str(one) for one in found if not one.ours or one.id in accept),
    )


NO_LOOK = (
    "there is no first look: an older version of this collection set the node up, or it was forgotten; "
    "what was there before can't be compared"
)
