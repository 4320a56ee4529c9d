# SPDX-License-Identifier: GPL-3.0-or-later
"""verify.yml, readonly_access.yml and inspect.yml with unusual input."""

from __future__ import annotations

import os
import re

import pytest
import yaml
from ansible.module_utils.common import parameters
from ansible.module_utils.testing import patch_module_args
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import node_backends
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import client
from ansible_collections.kubegpu.share.plugins.modules import service_account_kubeconfig
from kube_api import SECRET, kubeconfig, module
from verify_kit import PLAYBOOK, ROOT, Stage, chosen, evidence, finding, report, stats

KUBECONFIG = kubeconfig("http://127.0.0.1:1")


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def template(text, **variables):
    """A text with the variables of a role's files, as Ansible makes it."""
    trusted = {
        key: trust_as_template(value) if isinstance(value, str) and "{{" in value else value
        for key, value in variables.items()
    }
    return Templar(loader=DataLoader(), variables=trusted).template(trust_as_template(text))


# --------------------------------------------------------------------------- secrets


@pytest.mark.parametrize("more", [{"state": "absent"}, {"hours": 0}, {}], ids=["absent", "hours", "unreachable"])
def test_a_kubeconfig_in_a_variable_is_never_returned(tmp_path, capsys, more):
    """Ansible up to 2.20 returns every module's arguments, and shows them with -vvv; later ones if they are asked."""
    given = {"kubeconfig": KUBECONFIG, "path": str(tmp_path / "r"), "name": "a", "namespace": "b", **more}
    asked = {"_ansible_inject_invocation": True} if "inject_invocation" in parameters.PASS_VARS else {}
    with patch_module_args({**given, **asked}), pytest.raises(SystemExit):
        service_account_kubeconfig.main()
    printed = capsys.readouterr().out
    assert "module_args" in printed and SECRET not in printed


def test_secrets_are_known_before_a_missing_library_is_reported(monkeypatch):
    given = module(kubeconfig=KUBECONFIG)
    monkeypatch.setattr(client, "MISSING", "No module named 'kubernetes'")
    with pytest.raises(ShareError, match="lacks"):
        client.RealKube.of_module(given)
    assert given.no_log_values == {SECRET}


# --------------------------------------------------------------------------- verify.yml


@pytest.mark.long
def test_findings_are_reported_despite_an_unwritable_file_and_a_second_run_has_no_state_of_the_first(stage):
    """Twice in one run of ansible-playbook, in check mode, with lists as people write them."""
    findings = [finding("UNKNOWN", "C9", f"n{at}") for at in range(60)] + [
        finding("WARN", "G9", f"n{at}") for at in range(60)
    ]
    refused = {"fail": "control_plane: this group is empty"}
    stage.returns("cluster_info", refused, chosen())
    stage.returns(
        "gpu_allocation_check", {"report": report(*findings)}, {"report": report(*findings)}, {"report": report()}
    )
    step = {"id": "Y1", "result": "PASS", "n": 1, "fail": 0, "warn": 0, "unknown": 0}
    skipped = {"id": "Y5", "title": "T", "result": "skipped", "what": "no allocate_command is given", "do": ""}
    ended = {
        "acceptance": {"result": "PASS", "steps": [skipped]},
        "checks": [step],
        "findings": [],
        "msg": "ended by signal 15",
    }
    stage.returns("gpu_acceptance", ended)
    lists = ["verify_allowed_processes='Xorg, dcgm,'", "verify_allowed_pods='monitoring/*'", "verify_hami_schedulers="]
    lists += ["verify_nodes='gpu1, gpu3'", "verify_canary_allocate_command='python3 /probe.py'", "verify_canary=yes"]
    lists += [
        "gpushare_admission_exempt_namespaces='storage, kube-system'",
        "verify_grace=1",
        "verify_html=out/a.html",
        "verify_servers=yes",
    ]
    (stage.folder / "out").mkdir()
    # The folder exists in the first run only.
    gone = {"ansible.builtin.file": {"path": str(stage.folder / "out"), "state": "absent"}, "check_mode": False}
    verify = {"ansible.builtin.import_playbook": str(PLAYBOOK)}
    twice = stage.folder / "twice.yml"
    twice.write_text(yaml.safe_dump([verify, {"hosts": "localhost", "gather_facts": False, "tasks": [gone]}, verify]))
    rc, text = stage.play(
        "--check",
        *[word for each in lists for word in ("-e", each)],
        playbook=twice,
        hosts={"gpu_nodes": {"gpu1": {"gpu_node_name": ""}, "gpu2": {}}},
    )
    calls = stage.calls("gpu_allocation_check")
    assert len(calls) == 3, text
    first, again, second = calls
    assert first["before"] is None and again["before"] == report(*findings)
    problems = {node: one["problem"] for node, one in evidence(first).items()}
    assert problems["gpu1"] == "" and "wasn't observed" in problems["gpu2"]
    assert first["allowed_processes"] == ["Xorg", "dcgm"] and first["allowed_pods"] == ["monitoring/*"]
    assert first["exempt_namespaces"] == ["storage", "kube-system"]
    assert first["stack_namespaces"] == ["gpushare-system"]
    assert first["hami_schedulers"] is None and first["schedulers"] is None
    assert first["servers"]["problem"] == "control_plane: this group is empty"
    # The second run has no state of the first one.
    assert second["before"] is None and second["servers"]["problem"] == ""
    assert [call["allocate_command"] for call in stage.calls("gpu_acceptance")] == [["python3", "/probe.py"]] * 2
    assert text.count("Y5 of the canary is skipped: no allocate_command is given") == 2, text
    stat = stats(text)
    assert stat["result"] == "UNKNOWN" and stat["counts"]["UNKNOWN"] == 1
    assert stat["findings"][0]["what"] == "the canary didn't run completely: ended by signal 15"
    # Reported although the page can't be written.
    assert rc == 2 and "doesn't exist on the controller" in text, text
    assert len(re.findall("^(?:WARN|UNKNOWN): .* checks? passed", text, re.MULTILINE)) == 2, text


def defaults_of(*roles):
    return {
        key: value
        for role in roles
        for key, value in yaml.safe_load((ROOT / "roles" / role / "defaults/main.yml").read_text()).items()
    }


@pytest.mark.parametrize(
    ("nodes", "given", "stacks"),
    [
        (None, {}, []),
        # No node has another back end: their namespaces may be anybody's.
        ([("extender", ["extender"])], {}, []),
        ([("hami", ["hami"])], {}, ["hami_namespace"]),
        # What is left beside another one is to be known, too.
        ([("extender", ["extender", "hami"]), ("dra", ["dra"])], {}, ["hami_namespace"]),
        (
            [("nvidia", ["nvidia"]), ("kata", [])],
            {},
            ["nvidia_device_plugin_namespace", "sandbox_device_plugin_namespace"],
        ),
        ([("hami", ["hami"])], {"hami_namespace": "gpu-stack"}, ["hami_namespace"]),
        ([], {"hami_namespace": "gpu-stack"}, ["hami_namespace"]),
        ([], {"gpu_operator_namespace": "nvidia"}, ["gpu_operator_namespace"]),
        ([], {"nvidia_device_plugin_operator_namespace": "nvidia"}, ["nvidia_device_plugin_operator_namespace"]),
    ],
)
def test_components_are_known_in_the_namespaces_of_the_back_ends_that_nodes_have(nodes, given, stacks):
    """By default these are the roles' own."""
    assert {"allocation", "present"} < node_backends.NodeBackend.__annotations__.keys()
    rows = [{"allocation": allocation, "present": present} for allocation, present in nodes or []]
    texts = yaml.safe_load((ROOT / "roles/verify/vars/main.yml").read_text())
    known = {name: texts[name] for name in ("__verify_nodes", "__verify_allocators", "__verify_stack_namespaces")}
    facts = {} if nodes is None else {"gpu_backends": {"nodes": rows}}
    known |= {"hostvars": {"localhost": facts}, "verify_namespace": "gpushare", **given}
    expected = {**defaults_of("hami", "nvidia_device_plugin", "sandbox_device_plugin"), **given}
    assert template("{{ __verify_stack_namespaces }}", **known) == ["gpushare", *(expected[name] for name in stacks)]


@pytest.mark.parametrize(("count", "left"), [(0, 0), (100, 0), (101, 1)])
def test_the_stat_for_awx_has_the_worst_hundred_findings(count, left):
    texts = yaml.safe_load((ROOT / "roles/verify/vars/main.yml").read_text())
    stat = next(
        task["ansible.builtin.set_stats"]["data"]["gpu_verify"]
        for task in yaml.safe_load((ROOT / "roles/verify/tasks/report.yml").read_text())
        if "ansible.builtin.set_stats" in task
    )
    findings = [finding("UNKNOWN", node=f"n{at}") for at in range(count - 2)] + [finding("WARN"), finding("FAIL")]
    findings = findings if count else []
    known = {"__verify_report": report(*findings), "__verify_worst": texts["__verify_worst"]}
    worst = template(stat["findings"], **known)
    assert [one["level"] for one in worst[:3]] == (["FAIL", "WARN", "UNKNOWN"] if count else [])
    assert (len(worst), template(stat["findings_left_out"], **known)) == (count - left, left)


# --------------------------------------------------------------------------- readonly_access.yml


def objects(configmap_namespaces, name="reader", namespace="kube-system", gpushare_namespace="gpushare-system"):
    given = {f"readonly_access_{key}": value for key, value in locals().items()}
    text = (ROOT / "roles/readonly_access/templates/account.yml.j2").read_text()
    made = list(yaml.safe_load_all(template(text, **given)))
    return made, {one["metadata"]["namespace"]: one["rules"] for one in made if one["kind"] == "Role"}


@pytest.mark.parametrize(
    "given",
    ["kube-system, openshift-config ,", ["kube-system", "openshift-config"], ["openshift-config", "kube-system"]],
    ids=["text", "list", "order"],
)
def test_namespaces_are_the_same_as_text_and_as_a_list(given):
    _made, roles = objects(given)
    assert sorted(roles) == ["kube-system", "openshift-config"]
    assert roles["openshift-config"] == [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]
    assert [one["verbs"] for one in roles["kube-system"]] == [["get"], ["list"]]


@pytest.mark.parametrize("none", ["", [], ","], ids=["text", "list", "comma"])
def test_without_namespaces_no_configmap_may_be_read(none):
    _made, roles = objects(none)
    assert [one["resources"] for one in roles["kube-system"]] == [["leases"]]


def test_numeric_names_stay_strings():
    made, _roles = objects([2025, "no"], "1e3", "2024", "on")
    assert {one["metadata"]["name"] for one in made} == {"1e3"}
    spaces = {one["metadata"].get("namespace", "2024") for one in made}
    assert spaces == {"2024", "kube-system", "2025", "no"}
    assert {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in made} == {"1e3"}
    rules = next(one["rules"] for one in made if one["kind"] == "ClusterRole")
    assert [rule["resourceNames"] for rule in rules if rule["resources"] == ["namespaces"]] == [["on"]]
    bound = [(one["roleRef"]["name"], one["subjects"]) for one in made if "roleRef" in one]
    assert bound and all(
        one == ("1e3", [{"kind": "ServiceAccount", "name": "1e3", "namespace": "2024"}]) for one in bound
    )


# --------------------------------------------------------------------------- inspect.yml


def test_the_page_of_inspect_is_never_written_through_a_link(tmp_path, monkeypatch):
    """gpu_report replaces a link in a file's place, for which it has to be named by the link."""
    variables = yaml.safe_load((ROOT / "roles/inspect/vars/main.yml").read_text())
    folder = tmp_path / "real"
    folder.mkdir()
    (tmp_path / "folder").symlink_to(folder)
    (folder / "page.html").symlink_to(tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGES", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    known = {key: variables[key] for key in ("__inspect_path", "__inspect_page")}
    for given, page in (
        ("folder/page.html", folder / "page.html"),
        ("$PAGES/page.html", folder / "page.html"),
        ("~/page.html", folder / "page.html"),
        ("new.html", tmp_path / "new.html"),
    ):
        assert template("{{ __inspect_page }}", inspect_output=given, **known) == os.fspath(page)
