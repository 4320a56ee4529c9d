# SPDX-License-Identifier: GPL-3.0-or-later
"""uninstall.yml by the real ansible-playbook: without a cluster, and where a switch wasn't completed."""

from __future__ import annotations

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.allocators import ALLOCATORS
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import stages
from own_cluster import ROOT, run_playbook
from real_apiserver import own_api_server
from role_templates import evaluated, value, variables_of

UNINSTALL = ROOT / "playbooks" / "uninstall.yml"
SWITCH = {"kubegpu.share/switch": "hami", "kubegpu.share/switch-from": "extender"}


@pytest.mark.parametrize(
    ("given", "queried"),
    [
        # As after nodes.yml alone: no kubeconfig, no control plane.
        ({}, False),
        ({"gpu_kubeconfig": "c"}, True),
        ({"gpushare_nodes": ["n"]}, True),
        ({"groups": {"control_plane": ["cp1"]}}, True),
        ({"gpu_kubeconfig": "c", "uninstall_cluster": "false"}, False),
    ],
)
def test_machines_without_a_cluster(given, queried):
    # In every play, also in those that have no host here.
    plays = yaml.safe_load(UNINSTALL.read_text())
    asked = [play["vars"]["__uninstall_cluster"] for play in plays if "__uninstall_cluster" in play.get("vars", {})]
    assert len(asked) > 1 and len(set(asked)) == 1
    assert evaluated(asked[0], **{"groups": {}, **given}) is queried


@pytest.mark.parametrize(
    ("given", "removed"),
    [
        # Without a cluster the variable alone says it.
        ({}, True),
        ({"gpu_node_software": "roles"}, True),
        ({"gpu_node_software": "gpu_operator"}, False),
        # A machine with the operator's driver, of a cluster that is gone.
        ({"gpu_node": {"driver": {"others": ["gpu-operator"]}}}, False),
        ({"gpu_node": {"driver": {"others": ["gpu-operator"]}}, "gpu_node_software": "roles"}, True),
        ({"software": {"roles": ["n"]}}, True),
        ({"software": {"roles": [], "gpu_operator": ["n"]}}, False),
        ({"software": {"roles": ["other"]}, "gpu_node_name": "other"}, True),
        # The roles were there before.
        ({"software": {"roles": []}, "node_baseline_known": True}, True),
    ],
)
def test_roles_remove_driver_and_toolkit_only_where_they_installed_them(given, removed):
    *_others, play = yaml.safe_load(UNINSTALL.read_text())
    conditions = {role["role"].rpartition(".")[2]: role.get("when") for role in play["roles"]}
    known = {"gpu_backends": {"software": given["software"]}} if "software" in given else {}
    variables = {"inventory_hostname": "n", "node_baseline_known": False, "hostvars": {"localhost": known}, **given}
    for name in ("toolkit", "driver", "nouveau"):
        assert evaluated("{{ " + conditions[name] + " }}", **variables) is removed, name
    if not variables["node_baseline_known"] and "gpu_node" not in given:
        assert evaluated("{{ " + stages.BY_ROLES + " }}", **variables) is removed, "as site.yml installs them"


def test_whose_a_single_machines_software_is_the_cluster_decides(tmp_path):
    """With --limit and without localhost, where the variable says auto."""
    *_others, leave, last = yaml.safe_load(UNINSTALL.read_text())
    [condition] = {str(role["when"]) for role in last["roles"] if role["role"] == "kubegpu.share.toolkit"}
    shown = {"ansible.builtin.debug": {"msg": "removed by roles: {{ (" + condition + ") | bool }}"}}
    play = {"hosts": "gpu_nodes", "gather_facts": False, "vars": {"node_baseline_known": False}, "tasks": [shown]}
    leave["vars"]["__uninstall_cluster"] = True
    operated = dict.fromkeys(("present", "deploy.driver", "deploy.container-toolkit"), "true")
    labels = {f"nvidia.com/gpu.{name}": value for name, value in operated.items()}
    with own_api_server() as server:
        server.install(ROOT / "tests/unit/openshift/operator_chart/crds/definitions.yaml")
        policy = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "p"}, "spec": {}}
        server.request("POST", "/apis/nvidia.com/v1/clusterpolicies", policy)
        for name, own in (("gpu1", labels), ("gpu2", {})):
            server.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": own}})
        given = {"gpu_kubeconfig": str(server.kubeconfig), "groups": {"gpu_nodes": ["gpu1", "gpu2"]}}
        for name, removed in (("gpu1", False), ("gpu2", True)):
            done = run_playbook(tmp_path, [leave, play], "--limit", name, **given)
            assert done.rc == 0 and f"removed by roles: {removed}" in done.text, done.text


def test_a_cluster_that_is_gone_is_left_out_by_a_variable(tmp_path):
    kubeconfig = tmp_path / "gone"
    user = {"name": "u", "user": {"token": "t"}}
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    kubeconfig.write_text(
        yaml.safe_dump({"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x"})
    )
    given = {"gpu_kubeconfig": str(kubeconfig)}
    refused = run_playbook(tmp_path, UNINSTALL, **given)
    said = " ".join(refused.text.split())
    assert refused.rc != 0 and "127.0.0.1:1 can't be reached" in said, refused.text
    assert "Nothing was changed. Where the cluster is gone for good, -e uninstall_cluster=false" in said
    done = run_playbook(tmp_path, UNINSTALL, "-e", "uninstall_cluster=false", **given)
    assert done.rc == 0 and "No cluster was queried" in done.text, done.text


@pytest.mark.parametrize(
    ("written", "former"),
    [("extender", ["extender"]), ("hami,extender", ["hami", "extender"]), ("../x,keys,,{{ 1 }}", []), (None, [])],
)
def test_a_kubelet_that_annotates_its_node_names_no_role(written, former):
    annotations = {} if written is None else {"kubegpu.share/switch-from": written}
    row = {"node": "gpu1", "allocation": "dra", "present": ["dra"]}
    known = {"nodes": [row], "allocators": {name: {"role": "gpushare"} for name in ALLOCATORS}}
    read = {"backends": known, "nodes": [{"name": "gpu1", "annotations": annotations}]}
    given = {**variables_of("switch", "vars"), "switch_node_name": "gpu1", "__switch_read": read}
    assert sorted(value("switch", "__switch_from", **given)) == sorted(former)


def test_nodes_of_a_switch_that_was_not_completed_are_as_before(api_server, tmp_path):
    # By node, whether it stays cordoned, as the user had it before.
    cordoned = {"switched1": False, "switched2": True, "switched3": False, "never-switched": True}
    marks = {"switched1": SWITCH, "switched2": {**SWITCH, "kubegpu.share/switch-cordoned": "true"}}

    def make(name):
        annotations = {**marks[name], "theirs": "x"} if name in marks else {}
        body = {"metadata": {"name": name, "annotations": annotations}, "spec": {"unschedulable": True}}
        api_server.request("POST", "/api/v1/nodes", body)

    connection = {"gpu_kubeconfig": str(api_server.kubeconfig)}
    for name in ("switched1", "switched2", "never-switched"):
        make(name)
    [play] = [play for play in yaml.safe_load(UNINSTALL.read_text()) if "switches" in play["name"]]
    read = {
        "kubegpu.share.cluster_info": {"kubeconfig": str(api_server.kubeconfig)},
        "register": "__scheduler_cluster_info",
    }
    play["tasks"] = [read, *play["tasks"]]
    done = run_playbook(tmp_path, [play], **connection)
    assert (done.rc, done.changed) == (0, 2), done.text
    # The same on a run of a single machine, in whose plays there is no localhost.
    marks["switched3"] = SWITCH
    make("switched3")
    leave = {"ansible.builtin.include_role": {"name": "kubegpu.share.switch", "tasks_from": "leave"}}
    play = {"hosts": "switched3", "gather_facts": False, "tasks": [leave]}
    done = run_playbook(tmp_path, [play], groups={"gpu_nodes": ["switched3"]}, **connection)
    assert (done.rc, done.changed) == (0, 1), done.text
    for name, kept in cordoned.items():
        node = api_server.request("GET", f"/api/v1/nodes/{name}")
        api_server.request("DELETE", f"/api/v1/nodes/{name}")
        assert node["spec"].get("unschedulable", False) is kept, name
        assert node["metadata"].get("annotations", {}) == ({"theirs": "x"} if name in marks else {}), name


def test_the_dra_drivers_folder_goes_when_no_claim_is_prepared(tmp_path):
    folder = tmp_path / "kubelet/plugins/gpu.kubegpu.share"
    record = folder / "claims" / "0f5b8a1e-0000-4000-8000-000000000001.json"
    *_others, play = yaml.safe_load(UNINSTALL.read_text())
    del play["roles"], play["post_tasks"]
    facts = {"ansible.builtin.set_fact": {"gpu_backends": {"dra": ["gpu1"]}}}
    known = {"hosts": "localhost", "gather_facts": False, "tasks": [facts]}

    def run(*plays, **more):
        given = {"gpushare_kubelet_root": str(tmp_path / "kubelet"), **more}
        done = run_playbook(tmp_path, [*plays, play], groups={"gpu_nodes": ["gpu1"]}, **given)
        assert done.rc == 0, done.text
        return done.changed, folder.exists()

    gone = {"uninstall_cluster": False, "gpushare_allocation": "dra"}
    record.parent.mkdir(parents=True)
    (folder / "lock").touch()
    record.touch()
    assert run(known) == (0, True)
    record.unlink()
    assert run() == (0, True), "a node of another back end"
    assert run(known) == (1, False)
    record.parent.mkdir(parents=True)
    assert run(**gone) == (1, False)


def test_no_extra_variable_decides_what_is_removed(tmp_path):
    """As the spec of a GPUShare would be one."""
    kubeconfig = {"gpu_kubeconfig": "none", "gpushare_nodes": ["n"]}
    for word, name in (("gpushare_state=present", "gpushare_state"), ('{"gpu_backends": {}}', "gpu_backends")):
        done = run_playbook(tmp_path, UNINSTALL, "-e", word, **kubeconfig)
        said = " ".join(done.text.split())
        assert done.rc != 0 and f'"msg": "{name}: an extra variable (-e) takes precedence' in said, done.text
    # Of an inventory they are harmless, and what the plays set themselves takes precedence.
    done = run_playbook(tmp_path, UNINSTALL, gpushare_state="present", **kubeconfig)
    assert "takes precedence" not in done.text and "Nothing was changed" in done.text, done.text


def test_every_variable_that_uninstall_tells_roles_is_guarded():
    plays = yaml.safe_load(UNINSTALL.read_text())
    [guard] = [task for play in plays for task in play.get("tasks", []) if "__preflight_own" in task.get("vars", {})]
    own = {name for name in guard["vars"] if not name.startswith("__")}
    assert own == set(guard["vars"]["__preflight_own"]) and {guard["vars"][name] for name in own} == {"__own"}
    told = {name for play in plays for role in play.get("roles", []) for name in role}
    told |= {name for play in plays for task in play.get("tasks", []) for name in task.get("vars", {})}
    decide = {name for name in told if name.endswith(("_state", "_step", "_component", "_alone"))}
    assert decide and decide <= own, decide - own


def test_the_pods_that_are_named_are_those_whose_shares_it_would_take():
    """A pod with a claim of another driver may stay for ever, and the operator would wait for it."""

    def claim(pod, driver, pool):
        results = [{"driver": "nic.example", "pool": "n1"}, {"driver": driver, "pool": pool}]
        status = {"allocation": {"devices": {"results": results}}}
        held = {"reservedFor": [{"resource": "pods", "name": pod}]}
        return {"metadata": {"namespace": "a"}, "status": {**status, **held}}

    ours = "gpu.kubegpu.share"
    claims = [claim("claims", ours, "n1"), claim("others", "gpu.nvidia.com", "n1"), claim("elsewhere", ours, "n9")]
    resources = [*claims, {"metadata": {"namespace": "a"}, "status": {}}]
    cards = [{"pods": [{"namespace": "b", "name": "extender"}]}]
    nodes = [{"name": "n2", "used": 1, "backend": "gpushare", "cards": cards, "pending": []}]
    [play] = [play for play in yaml.safe_load(UNINSTALL.read_text()) if "__uninstall_pods" in play.get("vars", {})]
    variables = {name: trust_as_template(value) for name, value in play["vars"].items()}
    known = {"__uninstall_names": ["n1", "n2"], "__uninstall_allocation": {"nodes": nodes}}
    found = evaluated(
        "{{ __uninstall_pods }}", **{**variables, **known, "__uninstall_claims": {"resources": resources}}
    )
    assert found == ["a/claims", "b/extender"]


def test_nothing_is_removed_while_a_virtual_machine_has_a_card(tmp_path):
    """Whatever the prediction fails by; here by facts of a machine that can't be read."""
    plays = yaml.safe_load(UNINSTALL.read_text())
    chosen = [play for play in plays if "virtual machine has a card" in play.get("name", "")]
    assert len(chosen) == 2
    names = [play.get("name", "") for play in plays]
    assert names.index(chosen[1]["name"]) < names.index(
        "Remove HAMi and NVIDIA's device plugin from their nodes and from the cluster"
    )
    after = {"hosts": "gpu_nodes", "gather_facts": False, "tasks": [{"ansible.builtin.debug": {"msg": "went on"}}]}
    groups = {"gpu_nodes": {"gpu1": {"gpu_node": {"passthrough": None}}, "gpu2": {}}}
    done = run_playbook(tmp_path, [*chosen, after], groups=groups)
    assert done.rc != 0 and "Nothing was changed" in done.text and "went on" not in done.text, done.text
    groups["gpu_nodes"].pop("gpu1")
    done = run_playbook(tmp_path, [*chosen, after], groups=groups)
    assert done.rc == 0 and done.changed == 0 and "went on" in done.text, done.text
