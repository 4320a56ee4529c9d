# SPDX-License-Identifier: GPL-3.0-or-later
"""Extenders of all modes use one ledger: with two, a card's memory would be allocated twice."""

from __future__ import annotations

import pytest
import role_templates
import yaml
from dedicated_kit import planned
from gpushare.extender import command as extender_command
from gpushare.extender import ledger

SIDE = {"authority": "a", "certificate": "b", "key": "c"}
# Variables that tasks compute, without namespaces.
GIVEN = {
    "__gpushare_archive_sha256": "",
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


def booking(objects):
    """Return the extender's ledger namespace and its service account."""
    [workload] = [each for each in objects if each["kind"] in ("DaemonSet", "Deployment")]
    spec = workload["spec"]["template"]["spec"]
    [command] = [one["command"] for one in spec["containers"] if one["name"] == "extender"]
    account = {"kind": "ServiceAccount", "name": spec["serviceAccountName"]}
    account["namespace"] = workload["metadata"]["namespace"]
    return extender_command.parse(command[1:]).ledger_namespace, account


@pytest.mark.parametrize(
    ("variables", "place"), [({}, "gpushare-system"), ({"gpushare_namespace": "cards"}, "cards")], ids=["unset", "set"]
)
def test_all_modes_use_one_ledger(variables, place):
    accounts = {}
    for mode in MODES:
        namespace, account = booking(rendered(mode, **variables))
        assert namespace == place, mode
        accounts[mode] = account["namespace"]
    # That of a dedicated one would be taken, were none named.
    assert accounts == {"beside schedulers": place, "dedicated": "gpushare-scheduler", "openshift": place}


@pytest.mark.parametrize("mode", MODES)
def test_service_account_may_write_the_ledger(mode):
    objects = rendered(mode, gpushare_namespace="cards", scheduler_dedicated_namespace="elsewhere")
    namespace, account = booking(objects)
    bound = {
        each["roleRef"]["name"]
        for each in objects
        if each["kind"] == "RoleBinding" and each["metadata"]["namespace"] == namespace and account in each["subjects"]
    }
    roles = [
        each
        for each in objects
        if each["kind"] == "Role" and each["metadata"]["namespace"] == namespace and each["metadata"]["name"] in bound
    ]
    create, change = (rule for role in roles for rule in role["rules"])
    for rule in (create, change):
        assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    assert (create["verbs"], change["verbs"]) == (["create"], ["get", "update"])
    assert change["resourceNames"] == [ledger.NAME, ledger.PROBE], "and no other's Lease"


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
    def container(objects):
        [workload] = [each for each in objects if each["kind"] in ("DaemonSet", "Deployment")]
        [found] = [one for one in workload["spec"]["template"]["spec"]["containers"] if one["name"] == "extender"]
        return found

    without, having = container(rendered(mode)), container(rendered(mode, gpushare_extender_metrics=True))
    assert extender_command.parse(without["command"][1:]).metrics_address == "" and "env" not in without
    options = extender_command.parse(having["command"][1:])
    # kubelet puts the variable's value there.
    assert options.metrics_address == "$(POD_IP)"
    assert having["env"] == [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    ports = {one["name"]: one["containerPort"] for one in having["ports"]}
    assert ports["metrics"] == options.metrics_port != options.port
    assert options.address == extender_command.parse(without["command"][1:]).address
