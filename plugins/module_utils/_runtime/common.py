# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the plans of all container runtimes share: files, refusals, the user's own default, CDI. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .containerd import RUNTIME_NAME, TOOLKIT_CONFIG, Options

# Where the GPU Operator installs its toolkit.
OPERATOR_TOOLKIT = "/usr/local/nvidia/toolkit"
OUTDATED = "with an older configuration"
STOPPED = "not at all"
HEADER = "# Written by kubegpu.share: changes to this file are lost.\n"


@dataclasses.dataclass(frozen=True)
class RuntimePlan:
    """The plan of one runtime.

    :param files: rows of the module's option ``plan``.
    :param restart: Docker has to be restarted, and that stops no container.
    :param warnings: for the user; they stop nothing.
    :param runtime: whose plan it is; empty where there is nothing to do.
    :param expected: settings of the user's that take effect or stop to by this plan, each with ``path`` and ``value``.
    :param users_default: the default runtime of the user's files; None where the plan doesn't know it.
    """

    plan: Plan = dataclasses.field(default_factory=Plan)
    files: tuple[JsonObject, ...] = ()
    restart: bool = False
    warnings: tuple[str, ...] = ()
    runtime: str = ""
    expected: tuple[JsonObject, ...] = ()
    users_default: str | None = None


@dataclasses.dataclass(frozen=True)
class FileChange:
    """One file: its redacted text before and after; None for a missing file."""

    path: str
    before: str | None
    after: str | None

    @property
    def row(self) -> JsonObject:
        return {"path": self.path, "before": digest(self.before), "after": self.after}

    @property
    def change(self) -> Change:
        return Change(self.path, self.before or "", self.after or "")


def restart_reason(present: bool, active: bool, changed: bool, outdated: bool) -> str:
    """Return how the daemon runs if that has to change, or nothing.

    :param present: NVIDIA's runtime is added; only then a stopped or outdated daemon matters.
    :param active: the daemon runs.
    :param changed: its files change, or an interrupted run changed them.
    :param outdated: it runs with another configuration than its files.
    """
    if not active:
        return STOPPED if present else ""
    return OUTDATED if changed or (present and outdated) else ""


def plan_of(
    files: t.Iterable[FileChange], unit: str, reason: str, others: t.Iterable[Change] = (), on_disk: str = "files"
) -> RuntimePlan:
    """Assemble a plan.

    :param files: unchanged ones are left out.
    :param unit: the daemon's systemd unit.
    :param reason: of ``restart_reason``.
    :param others: further changes, shown after the files.
    :param on_disk: ``files``, or ``file`` for a daemon with a single one.
    """
    changed = [file for file in files if file.before != file.after]
    changes = [*(file.change for file in changed), *others]
    if reason:
        changes.append(Change(unit, f"running {reason}\n", f"running with the {on_disk} on disk\n"))
    return RuntimePlan(Plan(tuple(changes)), tuple(file.row for file in changed))


def refuse_missing(title: str, wanted: Options) -> RuntimePlan:
    """Refuse to configure a runtime that isn't installed; there is nothing to remove from it.

    :raises BadInput: NVIDIA's runtime is requested.
    """
    if wanted.present:
        raise BadInput(f"runtime_name: {title} isn't installed on this node")
    return RuntimePlan()


def refuse_operator(title: str, operator: bool, binary: object = "") -> None:
    """Refuse a node whose runtime the GPU Operator configures.

    :param binary: program of the runtime ``nvidia``, where one is configured.
    :raises BadInput: the Operator's toolkit is here.
    """
    if operator or str(binary).startswith(OPERATOR_TOOLKIT):
        raise BadInput(
            f"runtime_state: NVIDIA's GPU Operator configures {title} on this node; disable its toolkit "
            "(toolkit.enabled=false) or remove this node from the inventory group"
        )


def check_replacement(
    title: str, name: str, lost: str, wanted: Options, done: bool, low_level: str = ""
) -> tuple[str, ...]:
    """Refuse to replace a user's default runtime by a copy of runc, unless the user allows it.

    :param title: of the container runtime.
    :param name: the user's default runtime.
    :param lost: what ``sandbox.replaced`` returns for it.
    :param wanted: the requested state.
    :param done: an earlier run replaced it, so a refusal would protect nothing.
    :param low_level: the program by which NVIDIA's runtime runs containers; empty for runc.
    :returns: a warning of what an earlier run replaced.
    :raises BadInput: pods without a runtime class would run without it.
    """
    if not lost or not wanted.default or wanted.replace_default or lost == CRUN == posixpath.basename(low_level):
        return ()
    known = f" ({lost})" if lost != name else ""
    if done:
        return (
            f"runtime_replace_default: an earlier run of this collection replaced {title}'s default runtime {name}"
            f"{known} by NVIDIA's, and pods without a runtime class run without it; to get it back set "
            "runtime_set_default: false, with gpushare_device_injection: cdi and gpushare_runtime_class: nvidia, or "
            "set runtime_replace_default: true to accept that",
        )
    instead = f"name crun first in runtimes of {TOOLKIT_CONFIG}, or " if lost == CRUN else ""
    raise BadInput(
        f"runtime_replace_default: {title}'s default runtime is {name}{known}, and pods without a runtime class "
        f"would run without it once NVIDIA's runtime is the default; {instead}set runtime_set_default: false, with "
        "gpushare_device_injection: cdi, which needs no default, and gpushare_runtime_class: nvidia (create this "
        "RuntimeClass with the handler nvidia, no role does), or set runtime_replace_default: true to accept that"
    )


CRUN = "crun"
# Those that isolate pods by more than the kernel's namespaces.
SANDBOXES = ("Kata", "gVisor", "Sysbox", "Firecracker", "krun")
# By a word of the runtime's type or of its program's name.
_KNOWN = (
    (re.compile(r"kata|^cc-runtime"), "Kata"),
    (re.compile(r"runsc|gvisor"), "gVisor"),
    (re.compile(r"sysbox"), "Sysbox"),
    (re.compile(r"firecracker"), "Firecracker"),
    (re.compile(r"^crun\b"), CRUN),
    (re.compile(r"^krun\b"), "krun"),
    (re.compile(r"^youki\b"), "youki"),
)
# Types of runc's shims, which run any program with runc's command line.
_RUNC_SHIM = re.compile(r"^io\.containerd\.(runc\.v[0-9]+|runtime\.v1\.linux)$")
_RUNC = re.compile(r"^(docker-)?runc\b|^nvidia-container-runtime")


def replaced(name: str, runtime_type: str, program: str) -> str:
    """Return the runtime that pods without a runtime class lose when NVIDIA's runtime becomes the default.

    :param name: the default runtime's name in the configuration.
    :param runtime_type: its type in containerd, Docker or CRI-O; empty for none.
    :param program: the program that it runs; empty for the built-in one.
    :returns: what it is, like "Kata", "gVisor" or "crun", its type, or its own name; empty for runc and for
        NVIDIA's runtime.
    """
    # Docker takes a type as a name.
    kind = runtime_type or (name if name.startswith("io.containerd.") else "")
    binary = posixpath.basename(program)
    runc_shim = _RUNC_SHIM.match(kind) is not None
    other_shim = kind not in ("", "oci") and not runc_shim
    if other_shim:
        # It has a program of its own.
        words = [kind, binary]
    elif runc_shim:
        words = [binary]
    else:
        # Without a type the name is the program's.
        words = [binary or name]
    for word in words:
        for pattern, title in _KNOWN:
            if pattern.search(word):
                return title
    if runc_shim or name in ("", RUNTIME_NAME):
        return ""
    if other_shim:
        # This is what is lost, whatever the runtime is called.
        return kind
    return "" if _RUNC.search(words[0]) else name
