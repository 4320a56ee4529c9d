# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the kernel's arguments: only what is missing is added, and only what was added is removed. Pure."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from . import layout, places, words
from .loaders import PENDING, RECORD, REFUSALS
from .types import Boot, Record, RecordedText

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "arguments": {"type": "list", "elements": "str", "default": []},
    "iommu": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}
INTEL = "intel_iommu=on"
# The kernel knows no such value: AMD's IOMMU is on wherever the firmware has one.
MEANINGLESS = frozenset(("amd_iommu=on",))
# Loaders whose entries are edited themselves.
EDITED = frozenset(("grub-bls", "systemd-boot", "kernelstub"))
# Loaders whose own files are made anew from the ones that are edited.
REFRESHED = frozenset(("grub-drop-in", "grub-default", "proxmox"))
KERNELOPTS = "$kernelopts"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the module ``kernel_arguments``."""

    present: bool
    arguments: tuple[str, ...] = ()
    iommu: bool = False


@dataclasses.dataclass(frozen=True)
class PutFile:
    """``text``: None removes the file."""

    path: str
    text: str | None


@dataclasses.dataclass(frozen=True)
class SetKernelopts:
    """Set the variable in GRUB's environment."""

    value: str


@dataclasses.dataclass(frozen=True)
class Kargs:
    """Change the next deployment of rpm-ostree."""

    append: tuple[str, ...]
    delete: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Refresh:
    """Have the loader's own files made anew."""


@dataclasses.dataclass(frozen=True)
class Settle:
    """Only the records change."""


def options(params: JsonObject) -> Options:
    """Return the module's validated options.

    :raises BadInput: an argument can't be written safely, or means nothing.
    """
    if params["state"] == "absent":
        return Options(False)
    for argument in params["arguments"]:
        if argument in MEANINGLESS:
            raise BadInput(
                f"arguments: {argument} means nothing to the kernel, which turns AMD's IOMMU on by itself; leave it out"
            )
        if not words.ARGUMENT.fullmatch(argument):
            raise BadInput(
                f"arguments: {argument!r} isn't one argument of letters, digits and _.,:=+/@%- such as iommu=pt; set "
                "others with the boot loader"
            )
    given = tuple(dict.fromkeys(params["arguments"]))
    for argument in given:
        other = words.conflict(argument, [each for each in given if each != argument])
        if other:
            raise BadInput(f"arguments: {argument} and {other} contradict each other")
    return Options(True, given, bool(params["iommu"]))


def added(boot: Boot) -> list[str]:
    """Return what this collection has added and not removed."""
    if boot["record"]:
        return list(boot["record"]["added"])
    # The record may be lost; the file says whose it is.
    text = boot["files"].get(layout.DROP_IN, "")
    found = places.DropIn().read(layout.DROP_IN, text) if text.startswith(places.OWN) else []
    return [word for word in found if words.ARGUMENT.fullmatch(word)]


def next_words(boot: Boot) -> list[str] | None:
    """Return the kernel's words of the entry that boots next; None where that isn't known."""
    return words.of_kernel(words.split(boot["next"]["arguments"])) if boot["next"] else None


def now_words(boot: Boot) -> list[str]:
    """Return the words of the running kernel."""
    return words.of_kernel(words.split(boot["now"]))


def needed_for_iommu(boot: Boot) -> list[str]:
    """Return the arguments without which the kernel leaves the machine's IOMMU off.

    :raises BadInput: no argument would turn it on.
    """
    table, kept = boot["iommu"]["table"], [argument for argument in added(boot) if argument == INTEL]
    if boot["iommu"]["groups"]:
        # It may be on by what was added.
        return kept
    after = next_words(boot)
    off = words.switched_off(now_words(boot) if after is None else after, table)
    if off:
        raise BadInput(
            f"iommu: {boot['next']['path'] if boot['next'] else '/proc/cmdline'} has {off}, which turns the IOMMU off; "
            "remove it there, if nothing on this machine needs it",
            code="iommu-off",
        )
    if words.switched_off(now_words(boot), table):
        # The next boot has it on again.
        return kept or ([INTEL] if table == "DMAR" and not boot["iommu"]["default_on"] else [])
    if table == "DMAR" and not boot["iommu"]["default_on"]:
        return [INTEL]
    if not table:
        raise BadInput(
            "iommu: the firmware announces no IOMMU, and no kernel argument changes that: turn on VT-d or AMD-Vi in "
            "its setup; a virtual machine needs a virtual IOMMU",
            code="iommu-firmware",
        )
    raise BadInput(
        f"iommu: the firmware's table {table} is there and the kernel turns the IOMMU on by itself, but there is no "
        "IOMMU group: look for DMAR, AMD-Vi and iommu in the kernel's log (dmesg)",
        code="iommu-failed",
    )


def wanted(given: Options, boot: Boot) -> list[str]:
    """Return the arguments that have to have their effect at the next boot."""
    if not given.present:
        return []
    return list(dict.fromkeys([*(needed_for_iommu(boot) if given.iommu else ()), *given.arguments]))


def edited(boot: Boot) -> list[str]:
    """Return the paths of the files that arguments are written into."""
    loader, files = boot["loader"], boot["files"]
    if loader == "grub-drop-in":
        return [layout.DROP_IN]
    sources = {
        "grub-default": [layout.DEFAULT],
        "grub-bls": [layout.CMDLINE, layout.DEFAULT],
        "systemd-boot": [layout.CMDLINE],
        "kernelstub": [layout.KERNELSTUB],
        "proxmox": [layout.CMDLINE],
    }.get(loader, [])
    found = [path for path in sources if path in files]
    if loader in EDITED:
        found += [path for path in sorted(files) if layout.is_entry(path) and not _by_environment(boot, path)]
    return found


def _by_environment(boot: Boot, path: str) -> bool:
    """Return whether an entry's arguments come from the variable kernelopts of GRUB's environment."""
    return boot["kernelopts"] is not None and KERNELOPTS in places.LoaderEntry().read(path, boot["files"][path])


@dataclasses.dataclass(frozen=True)
class Difference:
    """What has to be done.

    :param missing: the arguments that the next boot lacks, and those that it has by this collection.
    :param add: those of them that are this collection's, after the change.
    :param drop: those that are this collection's, and no longer wanted.
    :param files: for each file that changes: its text before, after, and in the record (None: there was no file).
    """

    missing: tuple[str, ...]
    add: tuple[str, ...]
    drop: tuple[str, ...]
    files: dict[str, tuple[str | None, str | None, str | None]]
    kernelopts: tuple[str, str, str] | None


def difference(given: Options, boot: Boot) -> Difference:
    """Compare what is wanted with what is there.

    :raises BadInput: the loader is unknown, a file can't be edited, or a user's argument says the opposite.
    """
    if boot["record_error"]:
        raise BadInput(boot["record_error"])
    old = added(boot)
    arguments = wanted(given, boot)
    _refuse_conflicts(arguments, boot, old)
    missing = [argument for argument in arguments if argument in old or not _effective(argument, boot)]
    drop = tuple(argument for argument in old if argument not in missing)
    if not boot["loader"] and (missing or drop):
        _refuse_loader(boot, missing, drop)
    files: dict[str, tuple[str | None, str | None, str | None]] = {}
    places_now = edited(boot)
    recorded = [path for path in (boot["record"]["files"] if boot["record"] else ()) if path not in places_now]
    for path in [*places_now, *recorded] if boot["loader"] else ():
        # What another loader has left in a file is only removed.
        text, (after, base) = boot["files"].get(path), _target(path, boot, old, missing if path in places_now else [])
        if after != text:
            files[path] = (text, after, base)
    kernelopts = _kernelopts(boot, old, missing)
    own = [
        argument
        for argument in missing
        if argument in old or boot["loader"] == "rpm-ostree" or _written(argument, files, kernelopts)
    ]
    made = Difference(tuple(missing), tuple(own), drop, files, kernelopts)
    entry = boot["next"]
    if boot["loader"] in EDITED and entry and not files and not kernelopts:
        others = [argument for argument in missing if not words.effective(argument, next_words(boot) or [])]
        if others:
            raise BadInput(
                f"{entry['path']} boots next, and it isn't one of the system's entries, which have {' '.join(others)}: "
                "choose another one, or set them there",
                code="other-entry",
            )
    return made


def _written(argument: str, files: t.Mapping[str, t.Any], kernelopts: tuple[str, str, str] | None) -> bool:
    """Return whether an argument comes into a file, or into GRUB's variable, that didn't have it."""
    for path, (_text, after, base) in files.items():
        kind = places.kind_of(path)
        if after and argument in kind.read(path, after) and not (base and argument in kind.read(path, base)):
            return True
    return kernelopts is not None and argument in words.split(kernelopts[1])


def _effective(argument: str, boot: Boot) -> bool:
    """Return whether an argument has its effect at the next boot."""
    after = next_words(boot)
    if after is not None:
        return words.effective(argument, after)
    if not boot["loader"]:
        return words.effective(argument, now_words(boot))
    found = [path for path in edited(boot) if path in boot["files"]]
    return bool(found) and all(
        words.effective(argument, places.kind_of(path).read(path, boot["files"][path])) for path in found
    )


def _refuse_conflicts(arguments: t.Sequence[str], boot: Boot, old: t.Collection[str]) -> None:
    """Refuse what a user has decided otherwise, wherever it stands.

    :raises BadInput: a file has the opposite of an argument.
    """
    found = {path: places.kind_of(path).read(path, text) for path, text in sorted(boot["files"].items())}
    if boot["kernelopts"] is not None:
        found[f"{boot['environment']} (kernelopts)"] = words.split(boot["kernelopts"])
    entry = boot["next"]
    if entry:
        found.setdefault(f"{entry['path']} ({entry['id']})", words.split(entry["arguments"]))
    elif not boot["loader"]:
        found["/proc/cmdline"] = words.split(boot["now"])
    for argument in arguments:
        for place, every in found.items():
            theirs = [word for word in words.of_kernel(every) if word not in old]
            other = words.conflict(argument, theirs)
            if other:
                raise BadInput(
                    f"{place} has {other}, and {argument} is wanted: it isn't overridden; remove {other} there, or "
                    f"leave {argument} out",
                    code="conflict",
                    path=place,
                    value=other,
                )


def _refuse_loader(boot: Boot, missing: t.Sequence[str], drop: t.Sequence[str]) -> t.NoReturn:
    said = f" ({', '.join(boot['found'])})" if boot["found"] else ""
    todo = [f"set {' '.join(missing)}"] if missing else []
    todo += [f"remove {' '.join(drop)}"] if drop else []
    raise BadInput(
        f"The kernel arguments of this node can't be changed, because {REFUSALS[boot['refused']]}{said}: "
        f"{' and '.join(todo)} by its own means, reboot, and run again",
        code=f"loader-{boot['refused']}",
        arguments=list(missing),
    )


def _target(path: str, boot: Boot, old: t.Sequence[str], missing: t.Sequence[str]) -> tuple[str | None, str | None]:
    """Return a file's text as it has to be, and the text that it goes back to.

    :raises BadInput: it can't be edited.
    """
    kind, text = places.kind_of(path), boot["files"].get(path)
    known = boot["record"]["files"].get(path) if boot["record"] else None
    own_file = isinstance(kind, places.DropIn)
    if own_file and text is not None and not text.startswith(places.OWN):
        if not missing:
            return text, text
        raise BadInput(f"{path} isn't this collection's file, and is left as it is: move it to another name")
    base = _base(kind, path, text, known, old)
    if own_file:
        return (kind.add(path, "", missing) if missing else None), None
    if text is None or base is None:
        return text, base
    have = kind.read(path, text)
    if (
        all(argument in have for argument in missing)
        and not any(argument in have for argument in old if argument not in missing)
        and missing
    ):
        # It may have come there by a kernel's package, too.
        return text, base
    present = words.of_kernel(kind.read(path, base))
    lacking = [argument for argument in missing if argument not in present]
    return (kind.add(path, base, lacking) if lacking else base), base


def _base(
    kind: places.File, path: str, text: str | None, known: RecordedText | None, old: t.Sequence[str]
) -> str | None:
    """Return the text without what was added: the old bytes, unless someone has changed the file since."""
    if known is not None and (digest(text) == known["after"] or text == known["before"]):
        return known["before"]
    if text is None or not old:
        return text
    rest, before = kind.remove(path, text, old), known["before"] if known is not None else None
    # kernelstub writes its file anew at each kernel's update.
    same = isinstance(kind, places.Kernelstub) and before is not None and kind.same(path, before, rest)
    return before if same else rest


def _kernelopts(boot: Boot, old: t.Sequence[str], missing: t.Sequence[str]) -> tuple[str, str, str] | None:
    value = boot["kernelopts"]
    if boot["loader"] != "grub-bls" or value is None:
        return None
    if not any(layout.is_entry(path) and _by_environment(boot, path) for path in boot["files"]):
        return None
    known = boot["record"]["kernelopts"] if boot["record"] else None
    same = known is not None and digest(value) == known["after"]
    base = (known["before"] or "") if known is not None and same else words.remove(value, old)
    after = words.add(base, [argument for argument in missing if argument not in words.split(base)])
    return (value, after, base) if after != value else None


def new_record(made: Difference, boot: Boot) -> Record | None:
    """Return the record after a change; None where nothing of this collection is left."""
    if not made.add:
        return None
    old = boot["record"]
    files = dict(old["files"]) if old else {}
    for path, (_text, after, base) in made.files.items():
        files[path] = {"before": base, "after": digest(after)}
    kernelopts = old["kernelopts"] if old else None
    if made.kernelopts:
        _value, after_value, base_value = made.kernelopts
        kernelopts = {"before": base_value, "after": digest(after_value)}
    return {"added": list(made.add), "files": files, "kernelopts": kernelopts}


def record_text(record: Record) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def make_plan(given: Options, boot: Boot) -> Plan:
    """Return what has to be done.

    :raises BadInput: as ``difference``.
    """
    made = difference(given, boot)
    changes = [
        Change(path, text or "", after or "", PutFile(path, after)) for path, (text, after, _base) in made.files.items()
    ]
    if made.kernelopts:
        value, after_value, _base_value = made.kernelopts
        header = f"{boot['environment']} (kernelopts)"
        changes.append(Change(header, f"{value}\n", f"{after_value}\n", SetKernelopts(after_value)))
    changes += _of_loader(made, boot, bool(changes))
    if list(made.add) != added(boot) or (boot["record"] and not made.add):
        changes.append(Change(RECORD, _shown(added(boot)), _shown(made.add), Settle()))
    if boot["pending"]:
        changes.append(Change(PENDING, "left by an interrupted run\n", "", Settle()))
    return Plan(tuple(changes))


def _shown(arguments: t.Sequence[str]) -> str:
    return f"added: {' '.join(arguments)}\n" if arguments else ""


def _of_loader(made: Difference, boot: Boot, edits: bool) -> list[Change]:
    """Return the change of the loader's own files, which follows from the edited ones."""
    entry, loader = boot["next"], boot["loader"]
    have = next_words(boot) or []
    append = tuple(argument for argument in made.missing if argument not in have)
    delete = tuple(argument for argument in made.drop if argument in have)
    if loader == "rpm-ostree" and entry and (append or delete):
        after = words.add(words.remove(entry["arguments"], delete), append)
        return [Change("rpm-ostree kargs", f"{entry['arguments']}\n", f"{after}\n", Kargs(append, delete))]
    if loader in REFRESHED and (edits or boot["pending"] or append or delete):
        before = entry["arguments"] if entry else ""
        after = words.add(words.remove(before, delete), append)
        header = boot["config"] or "proxmox-boot-tool refresh"
        return [Change(header, f"{before}\n", f"{after}\n", Refresh())]
    return []


def outcome(given: Options, boot: Boot) -> JsonObject:
    """Return what the module returns beside ``changed`` and ``diff``.

    :raises BadInput: as ``difference``.
    """
    made = difference(given, boot)
    now = now_words(boot)
    waiting = [argument for argument in wanted(given, boot) if not words.effective(argument, now)]
    gone = [argument for argument in made.drop if argument in now]
    off = given.iommu and not boot["iommu"]["groups"] and bool(words.switched_off(now, boot["iommu"]["table"]))
    return {
        "loader": boot["loader"],
        "arguments": list(made.add),
        "reboot_required": bool(waiting or gone or off),
    }
