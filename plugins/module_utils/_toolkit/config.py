# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe, plan and change the container toolkit's files, and what its packages leave behind.

A flag of nvidia-cdi-refresh.service keeps its CDI specification older than version 0.7, which older runtimes reject: it
writes that version where a device node needs a group of its own. A key of config.toml controls whether an unprivileged
container gets the GPUs that its environment requests, and one names the root of a driver that isn't the machine's own;
the runtime and nvidia-ctk read the latter.
https://github.com/NVIDIA/nvidia-container-toolkit/blob/v1.20.1/internal/config/config.go
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._core.errors import NotInEffect
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host.file_transaction import replace_text
from .._host.system import System
from .._packages.steps import RemoveFile
from .facts import CONFIG, CTK, ENVIRONMENT, refresh_env

SERVICE = "nvidia-cdi-refresh.service"
# The service writes it, and no package removes it; /var/run is /run.
SPECIFICATION = "/run/cdi/nvidia.yaml"
VARIABLE = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
FLAG = "no-additional-gids-for-device-nodes"
MARKER = "# kubegpu.share: this node's container runtime reads no CDI specification of version 0.7."
# The marker until the specification has been regenerated.
PENDING = f"{MARKER} (Not in effect yet.)"

ACCEPT = "accept-nvidia-visible-devices-envvar-when-unprivileged"
# The original line follows.
ACCEPT_MARKER = "# kubegpu.share: only a privileged container gets GPUs by its environment. Before:"

CLI = "nvidia-container-cli"
OWN_ROOT = "/"
# The root and the original line follow.
ROOT_MARKER = "# kubegpu.share: the driver isn't the machine's own. Its root:"
# The first line until the specification is regenerated, so that a killed run is continued.
ROOT_PENDING = "# kubegpu.share: the CDI specification isn't regenerated with this driver's root yet.\n"


@dataclasses.dataclass(frozen=True)
class Refresh:
    """The environment's text while the specification is regenerated, and after it."""

    pending: str
    text: str


@dataclasses.dataclass(frozen=True)
class Configure:
    """A change of the toolkit's configuration.

    :param before: None where there is no file.
    :param confirmed: lines that nvidia-ctk has to print, which has read the file then.
    :param regenerate: the CDI specification depends on it.
    """

    before: str | None
    text: str
    confirmed: tuple[str, ...]
    regenerate: bool = False


def with_flag(text: str, marker: str = MARKER) -> str:
    """Return the environment with the flag, set by us or by the user."""
    bare = without_flag(text)
    lines = bare.splitlines(keepends=True)
    assignments = [number for number, line in enumerate(lines) if re.match(rf"\s*{VARIABLE}\s*=", line)]
    # To systemd the last one counts.
    flags = _flags(lines[assignments[-1]]) if assignments else []
    if not flags:
        # The user's empty assignment can stay.
        start = bare if not bare or bare.endswith("\n") else bare + "\n"
        return f"{start}{marker}\n{VARIABLE}={FLAG}\n"
    if FLAG in flags:
        return bare
    at = assignments[-1]
    end = lines[at][len(lines[at].rstrip("\r\n")) :] or "\n"
    lines[at] = f"{marker}\n{VARIABLE}={','.join([*flags, FLAG])}{end}"
    return "".join(lines)


def without_flag(text: str) -> str:
    """Return the environment without the flag, where we set it."""
    lines = text.splitlines(keepends=True)
    marks = [number for number, line in enumerate(lines) if line.startswith(MARKER)]
    for mark in reversed(marks):
        after = lines[mark + 1] if mark + 1 < len(lines) else ""
        if FLAG in _flags(after):
            left = [flag for flag in _flags(after) if flag != FLAG]
            end = after[len(after.rstrip("\r\n")) :]
            lines[mark + 1 : mark + 2] = [f"{VARIABLE}={','.join(left)}{end}"] if left else []
        del lines[mark]
    return "".join(lines)


def _flags(line: str) -> list[str]:
    name, _equals, value = line.partition("=")
    words = value.strip().strip("\"'").split(",") if name.strip() == VARIABLE else []
    return [word.strip() for word in words if word.strip()]


def refusing(text: str) -> str:
    """Return the configuration that ignores the environment of unprivileged containers."""
    bare = accepting(text)
    lines = bare.splitlines(keepends=True)
    at = _accepts(lines)
    if at is None:
        # A top-level key has to precede the first table.
        return f"{ACCEPT_MARKER}\n{ACCEPT} = false\n{bare}"
    old = lines[at].rstrip("\r\n")
    if re.match(r"[^=]*=\s*false\b", old):
        return bare
    end = lines[at][len(old) :]
    marker = f"{ACCEPT_MARKER} {old}" + (end or "\n")
    lines[at] = f"{marker}{ACCEPT} = false{end}"
    return "".join(lines)


def accepting(text: str) -> str:
    """Undo ``refusing``."""
    lines = text.splitlines(keepends=True)
    for mark in reversed([number for number, line in enumerate(lines) if line.startswith(ACCEPT_MARKER)]):
        before = lines[mark][len(ACCEPT_MARKER) :].rstrip("\r\n")
        after = lines[mark + 1] if mark + 1 < len(lines) else ""
        if re.match(rf"{ACCEPT} = false\s*$", after):
            end = after[len(after.rstrip("\r\n")) :]
            lines[mark : mark + 2] = [before[1:] + end] if before else []
        else:
            # Our line was changed since, so only the marker goes.
            del lines[mark]
    return "".join(lines)


def _accepts(lines: t.Sequence[str]) -> int | None:
    """Find the line that assigns the key; a line after the first table's header belongs to that table."""
    for number, line in enumerate(lines):
        if re.match(r"\s*\[\[?[^\[\],]+\]\]?\s*(#.*)?$", line):
            return None
        if re.match(rf"\s*([\"']?){ACCEPT}\1\s*=", line):
            return number
    return None


def rooted(text: str, root: str) -> str:
    """Return the configuration with the driver's root."""
    bare = unrooted(text)
    lines = bare.splitlines(keepends=True)
    header, at = _root(lines)
    marker, ours = f"{ROOT_MARKER} {root}. Before:", f'root = "{root}"\n'
    if header is None:
        start = bare if not bare or bare.endswith("\n") else bare + "\n"
        return f"{start}{marker}\n[{CLI}]\n{ours}"
    if at is None:
        lines[header] = f"{lines[header].rstrip()}\n{marker}\n{ours}"
        return "".join(lines)
    old = lines[at].strip()
    if re.match(rf"root\s*=\s*([\"']){re.escape(root)}\1\s*(#.*)?$", old):
        return bare
    lines[at] = f"{marker} {old}\n{ours}"
    return "".join(lines)


def unrooted(text: str) -> str:
    """Undo ``rooted``; a root that the user has set since stays."""
    lines = text.splitlines(keepends=True)
    for at in range(len(lines) - 1, -1, -1):
        marker = re.match(rf"{re.escape(ROOT_MARKER)} (\S+)\. Before: ?(.*)$", lines[at])
        if not marker:
            continue
        root, before = marker.groups()
        after = [line.strip() for line in lines[at + 1 : at + 3]]
        written = [f'root = "{root}"']
        if after[:1] == [f"[{CLI}]"]:
            written.insert(0, f"[{CLI}]")
        if after[: len(written)] == written:
            lines[at : at + 1 + len(written)] = [f"{before}\n"] if before else []
        else:
            del lines[at]
    return "".join(lines)


def _root(lines: t.Sequence[str]) -> tuple[int | None, int | None]:
    """Find the header of the table with the driver's root, and the line that assigns that."""
    header = None
    for number, line in enumerate(lines):
        if re.match(r"\s*\[", line):
            if header is not None:
                break
            header = number if re.match(rf"\s*\[\s*([\"']?){CLI}\1\s*\]", line) else None
        elif header is not None and re.match(r"\s*([\"']?)root\1\s*=", line):
            return header, number
    return header, None


def _root_line(text: str) -> str:
    lines = text.splitlines()
    at = _root(lines)[1]
    return "" if at is None else lines[at].strip()


def _configuration(text: str | None, accept: bool, root: str = OWN_ROOT) -> t.Iterator[Change]:
    pending = (text or "").startswith(ROOT_PENDING)
    have = (text or "").removeprefix(ROOT_PENDING)
    want = accepting(have) if accept else refusing(have)
    want = unrooted(want) if root == OWN_ROOT else rooted(want, root)
    if want != have or pending:
        confirmed = []
        if not accept:
            confirmed.append(f"{ACCEPT} = false")
        if root != OWN_ROOT:
            confirmed.append(f'root = "{root}"')
        regenerate = pending or _root_line(have) != _root_line(want)
        yield Change(CONFIG, text or "", want, Configure(text, want, tuple(confirmed), regenerate))


def make_plan(params: JsonObject, seen: t.Mapping[str, t.Any]) -> Plan:
    """Plan the changes.

    :param seen: sections ``toolkit`` and ``cdi`` of ``gpu_node``.
    """
    text = seen["cdi"].get("refresh_env")
    config = (seen["toolkit"].get("config") or {}).get("text")
    if params["state"] == "present":
        wanted = _configuration(config, params["accept_unprivileged"], params["driver_root"])
        return Plan((*_environment(text, params["old_cdi"]), *wanted))
    existing = {CONFIG: config, ENVIRONMENT: text}
    if SPECIFICATION in [spec["path"] for spec in seen["cdi"]["specs"]]:
        existing[SPECIFICATION] = f"generated by {SERVICE}\n"
    changes = [
        Change(path, was, "", RemoveFile(path))
        for path, was in existing.items()
        if was is not None and path not in params["keep"]
    ]
    if ENVIRONMENT in params["keep"]:
        # A file that existed before stays, without our settings.
        changes += _environment(text, False)
    if CONFIG in params["keep"]:
        changes += _configuration(config, True)
    return Plan(tuple(changes))


def _environment(text: str | None, old_cdi: bool) -> t.Iterator[Change]:
    have = text or ""
    want = with_flag(have) if old_cdi else without_flag(have)
    if want != have:
        yield Change(ENVIRONMENT, have, want, Refresh(with_flag(have, PENDING) if old_cdi else want, want))


# systemctl's status for an unknown unit: the toolkit is older than 1.18.
NO_UNIT = 5


class ConfigReconciler:
    """The toolkit's files of the machine that the module runs on."""

    def __init__(self, params: JsonObject, system: System) -> None:
        self._params = params
        self._system = system

    def observe(self) -> JsonObject:
        config = self._system.read(CONFIG)
        specification = self._system.exists(SPECIFICATION)
        return {
            "toolkit": {"config": None if config is None else {"text": config}},
            "cdi": {
                "refresh_env": refresh_env(self._system),
                "specs": [{"path": SPECIFICATION}] if specification else [],
            },
        }

    def plan(self, seen: JsonObject) -> Plan:
        return make_plan(self._params, seen)

    def apply(self, seen: JsonObject, plan: Plan) -> None:
        for change in plan.changes:
            if isinstance(change.step, Refresh):
                replace_text(self._system, ENVIRONMENT, change.step.pending)
                self._refresh()
                replace_text(self._system, ENVIRONMENT, change.step.text)
            elif isinstance(change.step, Configure):
                self._configure(change.step)
            else:
                self._system.remove(change.step.path)
                # rmdir refuses a directory that holds other files.
                self._system.run(["rmdir", posixpath.dirname(change.step.path)])

    def _configure(self, step: Configure) -> None:
        """Write the configuration, which each new container reads, and roll it back where nvidia-ctk rejects it."""
        replace_text(self._system, CONFIG, (ROOT_PENDING if step.regenerate else "") + step.text)
        if self._system.exists(CTK):
            done = self._system.run([CTK, "config", f"--config-file={CONFIG}"], timeout=30)
            lines = [line.strip() for line in done.out.splitlines()]
            missing = [line for line in step.confirmed if line not in lines]
            if done.rc != 0 or missing:
                if step.before is None:
                    self._system.remove(CONFIG)
                else:
                    replace_text(self._system, CONFIG, step.before)
                errors = done.err.strip().splitlines()[-1:] or [f"its output lacks {', '.join(missing)}"]
                raise NotInEffect(f"nvidia-ctk rejects the new {CONFIG}, which was rolled back: {errors[0]}")
            if step.regenerate:
                self._refresh()
        if step.regenerate:
            replace_text(self._system, CONFIG, step.text)

    def _refresh(self) -> None:
        """Regenerate the specification; without a running systemd the next boot does that."""
        masked = self._system.link(f"/etc/systemd/system/{SERVICE}") == "/dev/null"
        # Who has masked the service makes the specification himself.
        if masked or not self._system.exists("/run/systemd/system"):
            return
        done = self._system.run(["systemctl", "restart", SERVICE], timeout=120)
        if done.rc not in (0, NO_UNIT):
            error = (done.err.strip().splitlines() or [f"status {done.rc}"])[0]
            raise NotInEffect(f"{SERVICE} couldn't regenerate the CDI specification: {error}")
