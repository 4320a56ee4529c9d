# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Report what would stop a run of site.yml, from variables, the cluster and the machines' facts together.

It reads each host's facts (``gpu_node``) from its variables, and connects to no machine. It prints the findings and
doesn't fail; the role does where there is a problem.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._allocation import foreign_bindings
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import cluster_of, unpacked
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.foreign import Operator
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import Backends
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_software import Software
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.backends import VGPU
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.card_exclusion import address_of
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._images import delivery
from ansible_collections.kubegpu.share.plugins.module_utils._images import image_archive as images_archive
from ansible_collections.kubegpu.share.plugins.module_utils._kube.setup_record import PLAYBOOK
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import Claims, has_cluster_policy
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options, described, examine
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.findings import PROBLEM, WARNING, Finding
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import (
    CARDS,
    limit_mode,
    listed,
    node_name,
)
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import SUBJECT, NodeOptions
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.virtual import VirtualOptions, backend_of
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.results import clean_json
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import findings as airgap
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import Planner
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight import listing

ARGUMENTS: JsonObject = {
    "cluster": {"type": "dict"},
    "gpu_nodes": {"type": "list", "elements": "str", "required": True},
    "control_plane": {"type": "list", "elements": "str", "default": []},
    "mirror_timeout": {"type": "int", "default": 60},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "alone": {"type": "list", "elements": "str", "default": []},
    "gpu_operator": {"type": "bool", "default": False},
    "memory_unit": {"type": "str", "default": "GiB"},
    "memory_limit": {"type": "str", "default": "auto"},
    "image_delivery": {"type": "str", "default": "import"},
    "image": {"type": "str", "default": ""},
    "image_archive": {"type": "path", "default": ""},
    "extender_image": {"type": "str", "default": ""},
    "device_plugin_image": {"type": "str", "default": ""},
    "operator_external": {"type": "bool", "default": False},
    "operator_host_driver": {"type": "bool", "default": False},
    "switch": {"type": "list", "elements": "str", "default": []},
    "owner": {"type": "str", "default": PLAYBOOK},
    "take_over": {"type": "str", "default": ""},
    "ignore": {"type": "list", "elements": "str", "default": []},
}
OPTIONS = tuple(
    field.name for field in dataclasses.fields(Options) if field.name not in ("claims", "record", "bindings")
)

DRIVER_REFUSED = "driver-refused"
# The result that role node_facts registers; it has ``trouble`` where there are no facts.
COLLECTED = "__node_facts_found"
# The prediction of role image_build, where a machine lacks the servers' image.
IMAGE_BUILT = "__image_build_done"


class ActionModule(ShareAction):
    """Examines the facts of all hosts and the cluster."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        sources = {name: group for group in ("control_plane", "gpu_nodes") for name in params[group]}
        names = dict.fromkeys([*params["gpu_nodes"], *params["control_plane"]])
        hostvars = (task_vars or {})["hostvars"]
        planner = Planner(self, task_vars or {})
        known = untagged(params["cluster"] or {})
        if "all_nodes" in known:
            known["nodes"] = clean_json(unpacked(known.pop("all_nodes")))
        resolved = known.get("backends")
        decided = (resolved or {}).get("software")
        hosts = [_host(name, sources[name], hostvars[name], planner, resolved, decided) for name in names]
        limit = limit_mode(params["memory_limit"])
        claims = Claims(
            known.get("given") or {},
            known.get("capacity"),
            resolved,
            params["switch"],
            known.get("releases") or {},
            decided,
            frozenset(params["nodes"]) - {node_name(name, hostvars[name]) for name in params["gpu_nodes"]},
        )
        given = {name: params[name] for name in OPTIONS}
        read = {"record": known.get("owner"), "bindings": known.get("bindings") or foreign_bindings.none()}
        options = Options(**{**given, "memory_limit": limit, "claims": claims, **read})
        cluster = cluster_of(known) if known else None
        findings = examine(options, cluster, hosts, params["ignore"])
        needed = claims.backends is None or claims.backends["gpushare"]
        if cluster is not None and needed and params["image_delivery"] == delivery.IMPORT:
            findings += _archive(params["image_archive"], params["image"])
        if params["mirror_timeout"] > 0:
            seen = [name for name in params["gpu_nodes"] if hostvars[name].get("gpu_node")]
            choices = untagged({name: planner.validate(name)["driver_choice"] for name in seen})
            findings += airgap.examine(hostvars, choices, known, params["mirror_timeout"])
            findings.ignore(params["ignore"], described())
        if claims.backends is not None:
            # The get of Ansible's hostvars has no default.
            local = hostvars["localhost"] if "localhost" in hostvars else {}  # noqa: SIM401
            findings += _helm(claims.backends, known["operators"], local)
            if not params["operator_external"]:
                findings += _operators_helm(decided, known["operators"], local)
        if params["image_delivery"] == delivery.BUILD:
            findings += _build(hostvars[name].get(IMAGE_BUILT) for name in names)
        taken_from = next((finding.fields["present"] for finding in findings if finding.id == "owner-taken"), "")
        return {**listing.report(self._display, findings), "taken_from": taken_from}


def _archive(archive: str, image: str) -> t.Iterator[Finding]:
    """Check the archive that nodes are to import."""

    def problem(what: str, action: str) -> Finding:
        fields = {"archive": archive, "image": image}
        return Finding("image-archive", PROBLEM, what, action, variable="gpushare_image_archive", fields=fields)

    if not archive:
        yield problem("importing {image} needs an archive", "set it, or set gpushare_image_delivery to another value")
    elif not os.path.isfile(archive):
        yield problem("{archive} is no file", "set it to an archive that playbook kubegpu.share.build_images wrote")
    else:
        try:
            images_archive.require(archive, image)
        except BadInput as error:
            # Its text begins with the name of the option.
            action = "write one with playbook kubegpu.share.build_images, or set gpushare_image to the name in it"
            yield Finding("image-archive", PROBLEM, "gpushare_{reason}", action, fields={"reason": str(error)})


def _helm(backends: Backends, operators: t.Sequence[Operator], variables: t.Mapping[str, t.Any]) -> t.Iterator[Finding]:
    """Report a helm that isn't there; a run that neither deploys nor removes a chart needs none.

    :param backends: the back ends as they were resolved.
    :param operators: what the GPU Operator was told, where it runs: it deploys NVIDIA's device plugin without a chart.
    :param variables: those of localhost.
    """
    parts, there, leaving = (t.cast(JsonObject, backends[key]) for key in ("parts", "there", "leaving"))
    for name, variable in (("hami", "hami_helm"), ("nvidia", "nvidia_device_plugin_helm")):
        program = str(variables.get(variable) or "helm")
        if name == "nvidia" and has_cluster_policy(operators):
            continue
        if (parts[name] or leaving[name]) and not shutil.which(program):
            # Without it, a node that is switched would be left without a back end.
            severity = PROBLEM if parts[name] and not there[name] else WARNING
            what = "there is no {program} on the controller, by which the chart is deployed, changed and removed"
            do = "install helm 3, or set it to the path of one"
            yield Finding("no-helm", severity, what, do, "", variable, {"program": program})


def _operators_helm(
    software: Software | None, operators: t.Sequence[Operator], variables: t.Mapping[str, t.Any]
) -> t.Iterator[Finding]:
    """Report a helm that isn't there, by which role gpu_operator deploys the GPU Operator outside OpenShift."""
    program = str(variables.get("gpu_operator_helm") or "helm")
    if software is None or not software["installs"] or software["openshift"] or shutil.which(program):
        return
    if software["ours"] or not has_cluster_policy(operators):
        what = "there is no {program} on the controller, by which the GPU Operator's chart is deployed and changed"
        do = "install helm 3, or set it to the path of one"
        yield Finding("no-helm", PROBLEM, what, do, "", "gpu_operator_helm", {"program": program})


def _build(predictions: t.Iterable[t.Any]) -> t.Iterator[Finding]:
    """Report that the servers' image can't be built; there is no prediction where no machine lacks the image."""
    predicted = next((prediction for prediction in predictions if prediction and not prediction.get("skipped")), None)
    # Only a build that can be done names its archives.
    if predicted and "archives" not in predicted:
        yield Finding(
            "image-build",
            PROBLEM,
            "the servers' image can't be built: {reason}",
            "install podman, buildah or docker there, or name another machine in image_build_host. Where none can "
            "build: run playbook kubegpu.share.build_images elsewhere, and set gpushare_image_archive to its archive, "
            "or gpushare_image to the name under which it was pushed to a registry",
            variable="gpushare_image_delivery",
            fields={"reason": str(predicted.get("msg") or "unknown")},
        )


def _host(
    name: str,
    source: str,
    variables: t.Mapping[str, t.Any],
    planner: Planner,
    backends: Backends | None,
    decided: Software | None,
) -> Host:
    facts = variables.get("gpu_node")
    # Without a cluster every machine is the roles'.
    by_roles = decided is None or node_name(name, variables) in decided["roles"]
    about = _virtual_options(variables)
    backend = backend_of(node_name(name, variables), about, backends)
    # Roles install nothing for containers where virtual machines have the cards: the driver only for vGPUs.
    examined = source == "gpu_nodes" and facts and by_roles and backend in ("", VGPU)
    plans = tuple(_plans(name, untagged(planner.validate(name)))) if examined else ()
    if backend:
        plans = tuple(finding for finding in plans if finding.id == DRIVER_REFUSED)
    trouble = (variables.get(COLLECTED) or {}).get("trouble")
    options = _node_options(variables)
    return Host(name, node_name(name, variables), source, facts, options, plans, trouble, about)


def _virtual_options(variables: t.Mapping[str, t.Any]) -> VirtualOptions:
    cards = listed(variables.get(CARDS) or ())
    return VirtualOptions(
        backend=str(variables.get("gpu_backend") or ""),
        driver_state=str(variables.get("driver_state") or ""),
        driver_source=str(variables.get("driver_source") or ""),
        passthrough_state=str(variables.get("passthrough_state") or ""),
        vgpu_state=str(variables.get("vgpu_state") or ""),
        cards=tuple(address_of(card) or card.lower() for card in cards),
    )


def _plan_finding(id: str, severity: str, host: str, reason: object, subject: str = "") -> Finding:
    return Finding(id, severity, "{reason}", host=host, fields={"reason": str(reason)}, subject=subject)


def _plans(host: str, validated: JsonObject) -> t.Iterator[Finding]:
    """Yield what the roles driver, toolkit and runtime refuse of the host, or warn of."""
    for reason in validated["driver_choice"]["refusals"]:
        yield _plan_finding(DRIVER_REFUSED, PROBLEM, host, reason)
    for finding in validated["driver_choice"]["lists"]:
        fields = {name: value for name, value in finding.items() if name not in ("id", "severity")}
        yield Finding(finding["id"], finding["severity"], "{found}", "{remedy}", host, "", fields, SUBJECT)
    for reason in validated["toolkit_refused"]:
        yield _plan_finding("toolkit-refused", PROBLEM, host, reason)
    for reason in validated["runtime_refused"]:
        yield _plan_finding("runtime-refused", PROBLEM, host, reason, "host {host}: ")
    for warning in validated["runtime_warnings"]:
        yield _plan_finding("runtime-warning", WARNING, host, warning, "host {host}: ")


def _node_options(variables: t.Mapping[str, t.Any]) -> NodeOptions:
    """Return the variables of the nodes' roles, and their defaults for those that aren't set."""
    defaults = NodeOptions()
    names = {"maintenance": "gpu_maintenance", "fabric_manager": "driver_fabric_manager"}
    return NodeOptions(
        **{
            field.name: str(variables.get(names.get(field.name, field.name), getattr(defaults, field.name)))
            for field in dataclasses.fields(NodeOptions)
        }
    )
