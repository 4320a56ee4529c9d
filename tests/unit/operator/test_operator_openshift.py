# SPDX-License-Identifier: GPL-3.0-or-later
"""The operator by the real ansible-operator on OpenShift's definitions: cards by claims, with its account's rights."""

from __future__ import annotations

import pytest
import yaml
from definitions import OLD, definitions
from openshift_parts import CONSTRAINTS, POLICIES, openshift
from operator_kit import OPENSHIFT, OPERATOR, RESOURCES, rules_used, running

pytestmark = pytest.mark.long


def test_claims_on_openshift_from_a_resource_to_nothing():
    files = sorted(file for file in definitions().glob("*.yaml") if file.name != OLD)
    with running() as operator:
        api = operator.api
        api.install(*files)
        openshift(api)
        pod = operator.start()
        operator.create(gpushareAllocation="dra")
        operator.until_well(240)
        assert operator.cluster.named()["daemonsets"] == {"gpushare-dra-driver"}
        assert constraints(api) == {"gpushare-dra-driver", "gpushare-dra-templates"}
        assert api.request("GET", f"{POLICIES}/gpu-cluster-policy")["spec"]["devicePlugin"]["enabled"] is False
        api.request("DELETE", f"{RESOURCES}/cluster")
        operator.until(lambda: operator.get() is None, 240)
        assert constraints(api) == set()
        assert api.request("GET", f"{POLICIES}/gpu-cluster-policy")["spec"]["devicePlugin"]["enabled"] is True
        assert operator.refusals() == []
        rules = [rule for rule in yaml.safe_load((OPERATOR / "rights.yml").read_text()) if is_openshifts(rule)]
        used = rules_used(rules, operator.audit())
        # Granted to the servers, and used by nobody else.
        unused = [rule for rule, is_used in zip(rules, used, strict=True) if not is_used and rule["verbs"] != ["use"]]
        assert rules and unused == []
        assert pod.runs()


def constraints(api):
    return {item["metadata"]["name"] for item in api.request("GET", CONSTRAINTS)["items"]}


def is_openshifts(rule):
    return OPENSHIFT.issuperset(rule["apiGroups"])
