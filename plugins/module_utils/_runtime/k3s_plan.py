# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan for k3s and RKE2: one drop-in with their setting ``default-runtime``."""

from __future__ import annotations

import dataclasses
import posixpath

from .._core.errors import BadInput
from .._rancher import settings
from .._rancher.settings import DROP_IN_NAME, Kind
from . import k3s
from .common import (
    HEADER,
    OPERATOR_TOOLKIT,
    FileChange,
    RuntimePlan,
    check_replacement,
    plan_of,
    refuse_missing,
    refuse_operator,
    replaced,
    restart_reason,
)
from .containerd import RUNTIME_NAME, Options
from .types import K3sState

TEXT = f"{HEADER}{k3s.KEY}: {RUNTIME_NAME}\n"
# Where k3s and RKE2 search for NVIDIA's runtime, and the name by which they detect it.
SEARCHED = (OPERATOR_TOOLKIT, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
BINARY_NAME = "nvidia-container-runtime"


def make_plan(kind: Kind, wanted: Options, observed: K3sState | None) -> RuntimePlan:
    """Compare the node with the requested state.

    :raises BadInput: it can't be configured as requested; nothing was changed.
    """
    if not observed:
        return refuse_missing(kind.title, wanted)
    problem = observed["settings"]["problem"]
    if problem and (wanted.present or observed["ours"]):
        raise BadInput(f"runtime_name: {settings.explain(kind.title, problem)}")
    warnings = _refuse(kind, wanted, observed) if wanted.present else ()
    # A user's own setting needs no drop-in of ours.
    set_already = RUNTIME_NAME in (_users_default(observed), _containerd_default(observed)[1])
    after = TEXT if wanted.present and wanted.default and not set_already else None
    change = FileChange(observed["drop_in_path"], observed["drop_in"], after)
    # Ours at the default place, where the settings were before.
    unread = FileChange(kind.drop_in, observed["unread"], None)
    differs = (wanted.default and observed["default_runtime"] != RUNTIME_NAME) or (
        observed["runtimes"].get(RUNTIME_NAME) != wanted.binary
    )
    template = observed["template"]
    # Since its last start NVIDIA's runtime was removed, and its next one won't find it.
    listed = RUNTIME_NAME in observed["gone"] and not (template and template["names_nvidia"])
    outlived = not wanted.present and observed["service_active"] and listed
    reason = restart_reason(
        wanted.present,
        observed["service_active"],
        change.before != after or observed["pending"] or outlived,
        differs or observed["stale"],
    )
    return dataclasses.replace(plan_of([change, unread], observed["unit"], reason), warnings=warnings)


def _users_default(observed: K3sState) -> str:
    """Return the default runtime of the user's own flag or files; empty where they set none."""
    return settings.value(observed["settings"], k3s.KEY, without=(observed["drop_in_path"],))


def _containerd_default(observed: K3sState) -> tuple[str, str]:
    """Return the file that sets the default runtime for containerd itself, and the runtime; empty without one."""
    return (list(observed["containerd_defaults"].items()) or [("", "")])[-1]


def _refuse(kind: Kind, wanted: Options, observed: K3sState) -> tuple[str, ...]:
    """Refuse what can't be configured as requested; return warnings of the rest."""
    name = kind.title
    refuse_operator(f"{name}'s containerd", observed["operator"], observed["runtimes"].get(RUNTIME_NAME, ""))
    folder, binary = posixpath.split(wanted.binary)
    if binary != BINARY_NAME or folder not in SEARCHED:
        raise BadInput(
            f"runtime_nvidia_binary: {name} detects NVIDIA's runtime by itself, as {BINARY_NAME} in one of "
            f"{', '.join(SEARCHED[1:])}, and can't be configured with {wanted.binary}"
        )
    template = observed["template"]
    if template and template["repeats_nvidia"]:
        raise BadInput(
            f"{template['path']} has a table of the runtime {RUNTIME_NAME} beside {name}'s base template, which has it "
            "wherever NVIDIA's runtime is installed, and containerd doesn't start with the same table twice; take that "
            "table out of it"
        )
    holder, own = _containerd_default(observed)
    if not wanted.default or own == RUNTIME_NAME:
        return ()
    if not k3s.since(observed["version"], k3s.HAVE_KEY):
        raise BadInput(
            f"runtime_set_default: {name} {observed['version']} has no setting {k3s.KEY} (1.26.12, 1.27.9, 1.28.5 and "
            "all since 1.29 have it); upgrade it, or set runtime_set_default: false and give pods a runtime class"
        )
    if template and not template["renders_default"]:
        raise BadInput(
            f"runtime_set_default: {template['path']} replaces {name}'s own template and ignores {k3s.KEY}; begin it "
            'with {{ template "base" . }}, or set default_runtime_name = "nvidia" in it'
        )
    lost = replaced(own, observed["types"].get(own, ""), observed["runtimes"].get(own, ""))
    check_replacement(name, own, lost, wanted, False, observed["low_level"])
    if own:
        raise BadInput(
            f'runtime_set_default: {holder} sets default_runtime_name = "{own}" for {name}\'s containerd, beside '
            f'{k3s.KEY}; take that line out, or set it to "{RUNTIME_NAME}"'
        )
    ours, configured = observed["drop_in_path"], observed["settings"]
    default = _users_default(observed)
    with_ours = settings.replaced(configured, ours, {k3s.KEY: [RUNTIME_NAME]})
    if settings.value(with_ours, k3s.KEY) != RUNTIME_NAME:
        if configured["flags"].get(k3s.KEY):
            raise BadInput(
                f"runtime_set_default: {observed['flag_file']} starts {name} with --{k3s.KEY}={default}, which "
                "overrides all files; remove the flag"
            )
        later = settings.after(with_ours, ours, k3s.KEY)[-1]
        raise BadInput(
            f"runtime_set_default: {later} is read after {DROP_IN_NAME} and sets {k3s.KEY}: {default}; "
            "remove that setting or rename the file so that it sorts before"
        )
    lost = replaced(default, observed["types"].get(default, ""), observed["runtimes"].get(default, ""))
    done = settings.setters(configured, k3s.KEY).get(ours) == [RUNTIME_NAME]
    return check_replacement(name, default, lost, wanted, done, observed["low_level"])
