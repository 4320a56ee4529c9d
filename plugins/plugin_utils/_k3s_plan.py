# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The one file of ours that k3s or RKE2 needs: its setting ``default-runtime``, in its folder of drop-ins."""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _k3s
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = dict[str, t.Any]

TEXT = f"# Written by kubegpu.share: what is changed here is lost.\n{_k3s.KEY}: {RUNTIME_NAME}\n"
# Where k3s and RKE2 look for NVIDIA's runtime.
SEARCHED = ("/usr/local/nvidia/toolkit", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the node."""

    plan: Plan
    files: tuple[Json, ...] = ()


def make_plan(kind: _k3s.Kind, wanted: Wanted, observed: Json | None) -> Planned:
    """Compare the node with what is asked for.

    :param observed: the observation's section of that kind.
    :raises BadInput: it can't be configured as asked for; nothing was changed.
    """
    if not observed:
        if wanted.present:
            raise BadInput(f"runtime_name: {kind.title} isn't installed on this node")
        return Planned(Plan())
    if wanted.present:
        _refuse(kind, wanted, observed)
    before = observed["drop_in"]
    # A user's own setting needs no other beside it.
    others = [value for path, value in observed["defaults"].items() if path != kind.drop_in]
    set_already = (bool(others) and others[-1] == RUNTIME_NAME) or RUNTIME_NAME in observed["flag"]["values"][-1:]
    after = TEXT if wanted.present and wanted.default and not set_already else None
    changed = after != before
    rows = ({"path": kind.drop_in, "before": digest(before), "after": after},) if changed else ()
    changes = [Change(kind.drop_in, before or "", after or "")] if changed else []
    reason = _reason(wanted, observed, changed)
    if reason:
        changes.append(Change(observed["unit"], f"running {reason}\n", "running with the files on disk\n"))
    return Planned(Plan(tuple(changes)), rows)


def _reason(wanted: Wanted, observed: Json, changed: bool) -> str:
    """Why it has to be started again, or nothing."""
    if not observed["service_active"]:
        return "not at all" if wanted.present else ""
    if changed or observed["pending"]:
        return "with an older configuration"
    if not wanted.present:
        return ""
    wrong = (wanted.default and observed["default_runtime"] != RUNTIME_NAME) or (
        observed["runtimes"].get(RUNTIME_NAME) != wanted.binary
    )
    return "with an older configuration" if wrong or observed["stale"] else ""


def _refuse(kind: _k3s.Kind, wanted: Wanted, observed: Json) -> None:
    name = kind.title
    if observed["operator"] or str(observed["runtimes"].get(RUNTIME_NAME, "")).startswith("/usr/local/nvidia/toolkit"):
        raise BadInput(
            f"runtime_state: NVIDIA's GPU Operator has put its toolkit on this node, and {name} prefers that; disable "
            "it (toolkit.enabled=false) or leave this node out"
        )
    folder, binary = posixpath.split(wanted.binary)
    if binary != _k3s.BINARY_NAME or folder not in SEARCHED:
        raise BadInput(
            f"runtime_nvidia_binary: {name} finds NVIDIA's runtime by itself, as {_k3s.BINARY_NAME} in one of "
            f"{', '.join(SEARCHED[1:])}, and can't be given {wanted.binary}"
        )
    if not wanted.default:
        return
    if not _k3s.knows_default_runtime(observed["version"]):
        raise BadInput(
            f"runtime_set_default: {name} {observed['version']} has no setting {_k3s.KEY} (1.26.12, 1.27.9, 1.28.5 and "
            "all from 1.29 on have it); upgrade it, or set runtime_set_default: false and give pods a runtime class"
        )
    template = observed["template"]
    if template and not template["heeds"]:
        raise BadInput(
            f"runtime_set_default: {template['path']} takes the place of {name}'s own template and doesn't heed "
            f'{_k3s.KEY}; begin it with {{{{ template "base" . }}}}, or set default_runtime_name in it'
        )
    flag = observed["flag"]
    if flag["values"] and flag["values"][-1] != RUNTIME_NAME:
        raise BadInput(
            f"runtime_set_default: {flag['file']} starts {name} with --{_k3s.KEY}={flag['values'][-1]}, which wins "
            "over all files; take the flag out"
        )
    names = {posixpath.basename(path): path for path in observed["defaults"] if posixpath.dirname(path) == kind.folder}
    for later in _k3s.later(list(names)):
        value = observed["defaults"][names[later]]
        if value != RUNTIME_NAME:
            raise BadInput(
                f"runtime_set_default: {names[later]} is read after {_k3s.DROP_IN_NAME} and sets {_k3s.KEY}: {value}; "
                "take that out of it or give it a name that sorts before"
            )
