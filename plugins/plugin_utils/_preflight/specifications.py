# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables that users may set: the roles' own argument specifications, and those of the playbooks."""

from __future__ import annotations

import typing as t
from pathlib import Path

import yaml

from ...module_utils._allocation import allocators, node_software
from ...module_utils._core.types import JsonObject

ROLES = Path(__file__).resolve().parents[3] / "roles"
LOCAL = "localhost"
GPU, CONTROL = "gpu_nodes", "control_plane"
EVERYWHERE = frozenset((GPU, CONTROL, LOCAL))
# Where the variables of a role that doesn't run everywhere count; elsewhere they are ignored.
PLACES: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        ("node_baseline", "nouveau", "driver", "maintenance", "toolkit", "runtime", "switch"), frozenset((GPU,))
    ),
    **dict.fromkeys(
        ("preflight", "plan", "inspect", "acceptance", "readonly_access", "image_build", "airgap"), frozenset((LOCAL,))
    ),
}
# Variables of no role alone.
SHARED: JsonObject = {
    "gpu_backend": {"type": "str", "choices": list(allocators.BACKENDS)},
    "gpu_exclude": {"type": "list", "elements": "str"},
    "gpu_maintenance": {"type": "str", "choices": ["never", "drain", "reboot"]},
    "gpu_node_name": {"type": "str"},
    "gpu_node_software": {"type": "str", "choices": list(node_software.CHOICES)},
    "switch_nodes": {"type": "list", "elements": "str"},
    "uninstall_cluster": {"type": "bool"},
    "uninstall_with_pods": {"type": "bool"},
}
# Required options that playbooks and roles set themselves.
PASSED = frozenset(
    (
        "gpu_operator_step",
        "gpushare_component",
        "hami_step",
        "helm_release_chart",
        "helm_release_name",
        "helm_release_namespace",
        "helm_release_variable",
        "image_reference",
        "kata_step",
        "nvidia_device_plugin_step",
        "sandbox_device_plugin_kind",
        "sandbox_device_plugin_step",
    )
)
# Variables that roles set for each other. Users don't, and they are no misspelt ones.
FACTS = frozenset(
    (
        "gpu_node",
        "node_baseline_known",
        "node_baseline_packages",
        "node_baseline_held",
        "node_baseline_files",
        "nouveau_reboot_required",
        "passthrough_bound",
        "passthrough_reboot_reason",
        "passthrough_reboot_required",
        "gpu_backends",
        "scheduler_detected",
        "scheduler_observed",
        "verify_second_sample_hosts",
    )
)
# What decides whether a value is accepted.
RULES = ("type", "choices", "elements", "required")


class Option(t.NamedTuple):
    """A variable's specification.

    :param rules: as in an argument specification: ``type``, ``choices``, ``elements`` and ``required``.
    :param places: groups of hosts on which it counts.
    :param default: the role's; None without one.
    """

    rules: JsonObject
    places: frozenset[str]
    default: t.Any = None


def options(folder: Path = ROLES) -> dict[str, Option]:
    """Return every variable that a user may set, by its name.

    :param folder: the collection's roles.
    """
    options_by_name = {name: Option(rules, EVERYWHERE) for name, rules in SHARED.items()}
    for path in sorted(folder.glob("*/meta/argument_specs.yml")):
        entries = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for entry in entries["argument_specs"].values():
            for name, spec in (entry.get("options") or {}).items():
                rules = {rule: spec[rule] for rule in RULES if rule in spec}
                places = PLACES.get(path.parts[-3], EVERYWHERE) | (
                    options_by_name[name].places if name in options_by_name else frozenset()
                )
                options_by_name[name] = Option(rules, places, spec.get("default"))
    return options_by_name


def prefixes(folder: Path = ROLES) -> tuple[str, ...]:
    """Return the beginnings of this collection's variables, longer ones first."""
    roles = [path.parts[-3] for path in folder.glob("*/meta/argument_specs.yml")]
    return tuple(sorted((f"{name}_" for name in (*roles, "gpu", "uninstall")), key=len, reverse=True))
