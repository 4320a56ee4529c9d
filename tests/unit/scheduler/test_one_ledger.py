# SPDX-License-Identifier: GPL-3.0-or-later
"""Extenders of all modes use one ledger: with two, a card's memory would be allocated twice."""

from __future__ import annotations

import pytest
import role_templates
import yaml
from dedicated_kit import planned
from gpushare.extender import command, ledger

SIDE = {"authority": "a", "certificate": "b", "key": "c"}
# Variables that tasks compute, without namespaces.
GIVEN = {
    "__gpushare_image_sha256": "",
    "gpushare_nodes": [],
    "gpushare_openshift": False,
    "scheduler_detection": {"mode": "dedicated"},
    "scheduler_dedicated_nodes": [],
    "__scheduler_certificates": {"ours": True, "server": SIDE, "client": SIDE},
    "__scheduler_dedicated": planned(),
}
# Beside schedulers on machines and those of OpenShift before 4.10; in a scheduler's pod; behind a Service.
MODES = {
    "beside schedulers": ("gpushare", ["extender"]),
    "dedicated": ("scheduler", ["dedicated/rights", "dedicated/workload"]),
    "openshift": ("scheduler", ["openshift/extender"]),
}


def rendered(mode, **variables):
    """With the variables that a role sees: another role's only where the inventory has them."""
    role, names = MODES[mode]
    own = {**role_templates.defaults(role), **role_templates.variables_of(role, "vars")}
    return role_templates.objects(role, *names, **{**own, **GIVEN, **variables})


def extender(objects):
    """Return the extender's workload, its container and its options."""
    [workload] = [each for each in objects if each["kind"] in ("DaemonSet", "Deployment")]
    [found] = [
        container for container in workload["spec"]["template"]["spec"]["containers"] if container["name"] == "extender"
    ]
    return workload, found, command.parse(found["command"][1:])


@pytest.mark.parametrize(
    ("variables", "place"), [({}, "gpushare-system"), ({"gpushare_namespace": "cards"}, "cards")], ids=["unset", "set"]
)
def test_all_modes_use_one_ledger(variables, place):
    accounts = {}
    for mode in MODES:
        workload, _container, options = extender(rendered(mode, **variables))
        assert options.ledger_namespace == place, mode
        accounts[mode] = workload["metadata"]["namespace"]
    # That of a dedicated one would be taken, were none named.
    assert accounts == {"beside schedulers": place, "dedicated": "gpushare-scheduler", "openshift": place}


def test_uninstall_removes_the_ledger():
    tasks = yaml.safe_load((role_templates.ROLES / "gpushare" / "tasks" / "extender.yml").read_text())
    [lease] = tasks[-1]["kubegpu.share.cluster_objects"]["definitions"]
    assert lease["metadata"]["name"] == ledger.NAME


def test_objects_of_modes_do_not_overlap():
    """While a cluster changes its mode both are there, and each goes by the names of its own objects."""

    def names(mode):
        return {
            (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in rendered(mode)
        }

    assert not names("dedicated") & names("beside schedulers")


@pytest.mark.parametrize("mode", MODES)
def test_metrics_address(mode):
    _workload, without, usual = extender(rendered(mode))
    workload, container, options = extender(rendered(mode, gpushare_extender_metrics=True))
    assert usual.metrics_address == "" and "env" not in without and usual.address == options.address
    # kubelet puts the variable's value there.
    assert options.metrics_address == "$(POD_IP)"
    assert container["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    assert bool(options.metrics.tls), "tokens travel by TLS"
    folder = options.metrics.tls.cert.rpartition("/")[0]
    [mount] = [volume_mount for volume_mount in container["volumeMounts"] if volume_mount["mountPath"] == folder]
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    assert [volume["secret"] for volume in volumes if volume["name"] == mount["name"]]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["metrics"] == options.metrics_port != options.port
