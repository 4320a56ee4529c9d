# SPDX-License-Identifier: GPL-3.0-or-later
"""RoleBindings of others in the servers' namespaces: which give what the servers have, and what preflight says."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.foreign_bindings import (
    MOST,
    UNKNOWN,
    foreign_bindings,
    none,
)
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.ownership import bindings
from fake_kube import FakeKube
from test_claims import read

RBAC, SPACE = "rbac.authorization.k8s.io/v1", "gpushare-system"
USER = {"kind": "User", "name": "eve"}


def account(name, namespace=SPACE):
    return {"kind": "ServiceAccount", "name": name, "namespace": namespace}


def bound(*subjects, role="admin", kind="ClusterRole", name="theirs", namespace=SPACE):
    metadata = {"name": name, "namespace": namespace}
    reference = {"apiGroup": RBAC.partition("/")[0], "kind": kind, "name": role}
    return {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": metadata, "roleRef": reference, "subjects": subjects}


def role(verbs, resources, name="admin", kind="ClusterRole", groups=("",)):
    metadata = {"name": name, **({"namespace": SPACE} if kind == "Role" else {})}
    rule = {"apiGroups": list(groups), "verbs": verbs, "resources": resources}
    return {"apiVersion": RBAC, "kind": kind, "metadata": metadata, "rules": [rule]}


READER = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "kubegpu-readonly", "labels": {"app.kubernetes.io/component": "readonly-access"}},
    "spec": {"matchConditions": [{"expression": "x == 'system:serviceaccount:kubegpu:kubegpu-readonly'"}]},
}
LIMITED = account("kubegpu-readonly", "kubegpu")


@pytest.mark.parametrize(
    ("objects", "rights"),
    [
        ([bound(USER), role(["create"], ["pods"])], ["pods"]),
        ([bound(USER), role(["get"], ["secrets", "pods", "pods/exec"])], ["pods/exec", "secrets"]),
        ([bound(USER), role(["*"], ["*"])], ["*"]),
        ([bound(USER), role(["impersonate"], ["users"])], ["impersonate"]),
        ([bound(USER, role="own", kind="Role"), role(["patch"], ["daemonsets"], "own", "Role")], ["daemonsets"]),
        # Of the namespace, which the tenant has made with it: its name is none of the servers'.
        ([bound(account("builder")), role(["create"], ["serviceaccounts/token"])], ["serviceaccounts/token"]),
        ([bound(account("gpushare-device-plugin", "theirs")), role(["delete"], ["pods"])], ["pods"]),
        ([bound(account("gpushare-device-plugin")), role(["*"], ["*"])], None),
        ([bound(USER), role(["get", "list", "watch"], ["pods", "configmaps", "pods/log"])], None),
        # A role that isn't there gives nothing.
        ([bound(USER)], None),
        ([bound(account("deployer"), role="system:deployer"), role(["create"], ["pods"], "system:deployer")], None),
        ([bound(USER, role="system:deployer"), role(["create"], ["pods"], "system:deployer")], ["pods"]),
        ([bound(LIMITED, role="r", kind="Role"), role(["create"], ["pods/exec"], "r", "Role"), READER], None),
        ([bound(LIMITED, role="r", kind="Role"), role(["create"], ["pods/exec"], "r", "Role")], ["pods/exec"]),
        ([bound(LIMITED, role="r", kind="Role"), role(["create"], ["pods"], "r", "Role"), READER], ["pods"]),
    ],
)
def test_a_binding_counts_by_what_it_gives_and_to_whom(objects, rights):
    found = foreign_bindings(FakeKube(*objects), [SPACE])["found"]
    assert [binding["rights"] for binding in found] == ([rights] if rights else [])
    # Elsewhere it is none of ours.
    assert foreign_bindings(FakeKube(*objects), ["other"]) == none()


def test_accounts_of_a_charts_namespace_are_the_charts():
    objects = [bound(account("gpu-operator")), role(["*"], ["*"])]
    assert foreign_bindings(FakeKube(*objects), [SPACE], [SPACE]) == none()
    assert len(foreign_bindings(FakeKube(*objects, bound(USER, name="x")), [SPACE], [SPACE])["found"]) == 1


def test_what_may_not_be_read_is_no_proof_and_a_tenants_bindings_are_bounded():
    kube = FakeKube(bound(USER), role(["get"], ["pods"]))

    def refuse(*_given, **_more):
        raise KubeError("no", 403, "Forbidden")

    kube.get = refuse
    assert [binding["rights"] for binding in foreign_bindings(kube, [SPACE])["found"]] == [[UNKNOWN]]
    kube.list_all = refuse
    read_nothing = foreign_bindings(kube, [SPACE, "gpu-operator"])
    assert read_nothing == {"found": [], "refused": [SPACE, "gpu-operator"]}
    [finding] = bindings(read_nothing)
    assert (finding.id, finding.severity, finding.fields["status"]) == ("foreign-bindings-unknown", "warning", 403)
    assert f"in {SPACE}, gpu-operator (HTTP 403)" in finding.text
    many = [bound(USER, role=f"r{number}", kind="Role", name=f"b{number}") for number in range(MOST + 5)]
    kube = FakeKube(*many)
    found = foreign_bindings(kube, [SPACE])["found"]
    assert len(found) == 5 and kube.requests["GET"] == MOST + 1


def test_preflight_names_them_and_stops():
    mine = bound(USER, {"kind": "Group", "name": "a\x1b[2Jb"})
    made = read({"gpu1": "extender"}, mine, role(["create"], ["pods/exec"]))["bindings"]
    [found] = bindings(made)
    assert (found.id, found.severity) == ("foreign-bindings", "problem")
    assert "namespace gpushare-system" in found.text and "theirs (User eve, Group a" in found.text
    assert "by pods/exec" in found.text and "\x1b" not in found.text and "and " not in found.fields["more"]
    several = [{**made["found"][0], "name": f"b{number}"} for number in range(7)]
    [found] = bindings({**made, "found": several})
    assert "b4 " in found.text and "b5" not in found.text and "and 2 more" in found.text
    # NVIDIA's plugin has another namespace, and nothing of ours is there.
    assert read({"gpu1": "nvidia"}, mine, role(["create"], ["pods/exec"]))["bindings"] == none()
