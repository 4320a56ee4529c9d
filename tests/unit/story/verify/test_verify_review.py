# SPDX-License-Identifier: GPL-3.0-or-later
"""What somebody does to these playbooks who hasn't read their documentation."""

from __future__ import annotations

import base64
import json
import os
import re
import time
import types

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils import _kube
from ansible_collections.kubegpu.share.plugins.module_utils import _reader_kubeconfig as room
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem
from ansible_collections.kubegpu.share.plugins.modules import reader_kubeconfig
from verify_kit import PLAYBOOK, ROOT, Stage, chosen, evidence, finding, report, stats

SECRET = "a-token-that-nobody-may-see"
KUBECONFIG = {
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": SECRET}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
}


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
    """Ansible up to 2.20 returns every module's arguments, and shows them with -vvv."""
    given = {"kubeconfig": KUBECONFIG, "path": str(tmp_path / "r"), "name": "a", "namespace": "b", **more}
    with patch_module_args({**given, "_ansible_inject_invocation": True}), pytest.raises(SystemExit):
        reader_kubeconfig.main()
    told = capsys.readouterr().out
    assert "module_args" in told and SECRET not in told


def test_neither_where_a_library_is_missing(monkeypatch):
    module = types.SimpleNamespace(params={"kubeconfig": KUBECONFIG}, no_log_values=set())
    monkeypatch.setattr(_kube, "MISSING", "No module named 'kubernetes'")
    with pytest.raises(ShareError, match="lacks"):
        _kube.RealKube.of_module(module)
    assert module.no_log_values == {SECRET}


# --------------------------------------------------------------------------- verify.yml


def test_a_limit_without_localhost_is_no_pass(stage):
    """Nothing would be compared, with status 0."""
    rc, text = stage.play("--limit", "gpu1", hosts={"gpu_nodes": {"gpu1": {}, "gpu2": {}}})
    assert rc == 2 and "--limit gpu1 leaves out localhost, which compares: name it too" in text, text


def test_what_was_found_is_told_where_a_report_cannot_be_written_and_a_second_time_from_the_beginning(stage):
    """Twice in one run of ansible-playbook, in check mode, with lists as people write them."""
    findings = [finding("UNKNOWN", "C9", f"n{at}") for at in range(60)] + [
        finding("WARN", "G9", f"n{at}") for at in range(60)
    ]
    refused = {"fail": "control_plane: this group is empty"}
    stage.says("scheduler_info", refused, chosen())
    stage.says(
        "gpu_allocation_check", {"report": report(*findings)}, {"report": report(*findings)}, {"report": report()}
    )
    step = {"id": "Y1", "result": "PASS", "n": 1, "fail": 0, "warn": 0, "unknown": 0}
    skipped = {"id": "Y5", "title": "T", "result": "skipped", "what": "no allocate_command is given", "do": ""}
    ended = {
        "canary": {"result": "PASS", "steps": [skipped]},
        "checks": [step],
        "findings": [],
        "msg": "ended by signal 15",
    }
    stage.says("gpu_canary", ended)
    lists = ["verify_allowed_processes='Xorg, dcgm,'", "verify_allowed_pods='monitoring/*'", "verify_hami_schedulers="]
    lists += ["verify_nodes='gpu1, gpu3'", "verify_canary_allocate_command='python3 /probe.py'", "verify_canary=yes"]
    lists += ["verify_grace=1", "verify_html=out/a.html", "verify_servers=yes"]
    (stage.folder / "out").mkdir()
    # The folder is there in the first run alone.
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
    assert problems["gpu1"] == "" and "wasn't looked at" in problems["gpu2"]
    assert first["allowed_processes"] == ["Xorg", "dcgm"] and first["allowed_pods"] == ["monitoring/*"]
    assert first["hami_schedulers"] is None and first["schedulers"] is None
    assert "how this cluster runs its scheduler can't be told" in first["story"]["unknown"][0]
    # The second run knows nothing of the first one.
    assert second["before"] is None and second["story"] == {
        "problems": [],
        "unknown": [],
        "passed": ["fine"],
        "notes": [],
    }
    assert [one["allocate_command"] for one in stage.calls("gpu_canary")] == [["python3", "/probe.py"]] * 2
    assert text.count("Y5 of the canary is skipped: no allocate_command is given") == 2, text
    handed = stats(text)
    assert handed["result"] == "UNKNOWN" and handed["counts"]["UNKNOWN"] == 1
    assert handed["findings"][0]["what"] == "the canary didn't run to its end: ended by signal 15"
    # Told although the page can't be written.
    assert rc == 2 and "doesn't exist on the controller" in text, text
    assert len(re.findall("^(?:WARN|UNKNOWN): .* checks? passed", text, re.MULTILINE)) == 2, text


@pytest.mark.parametrize(("count", "left"), [(0, 0), (100, 0), (101, 1)])
def test_what_awx_keeps_has_an_end_and_begins_with_the_worst(count, left):
    texts = yaml.safe_load((ROOT / "roles/verify/vars/main.yml").read_text())
    handed = next(
        task["ansible.builtin.set_stats"]["data"]["gpu_verify"]
        for task in yaml.safe_load((ROOT / "roles/verify/tasks/whole.yml").read_text())
        if "ansible.builtin.set_stats" in task
    )
    told = [finding("UNKNOWN", node=f"n{at}") for at in range(count - 2)] + [finding("WARN"), finding("FAIL")]
    told = told if count else []
    known = {"__verify_report": report(*told), "__verify_worst": texts["__verify_worst"]}
    worst = template(handed["findings"], **known)
    assert [one["level"] for one in worst[:3]] == (["FAIL", "WARN", "UNKNOWN"] if count else [])
    assert (len(worst), template(handed["findings_left_out"], **known)) == (count - left, left)


# --------------------------------------------------------------------------- reader.yml


def objects(**more):
    text = (ROOT / "roles/reader/templates/reader.yml.j2").read_text()
    given = {"reader_name": "reader", "reader_namespace": "kube-system", "reader_gpushare_namespace": "gpushare-system"}
    made = list(yaml.safe_load_all(template(text, **given, **more)))
    return made, {one["metadata"]["namespace"]: one["rules"] for one in made if one["kind"] == "Role"}


@pytest.mark.parametrize(
    "given",
    ["kube-system, openshift-config ,", ["kube-system", "openshift-config"], ["openshift-config", "kube-system"]],
    ids=["text", "list", "order"],
)
def test_namespaces_are_the_same_as_text_and_as_a_list(given):
    _made, roles = objects(reader_configmap_namespaces=given)
    assert sorted(roles) == ["kube-system", "openshift-config"]
    assert roles["openshift-config"] == [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]
    assert [one["verbs"] for one in roles["kube-system"]] == [["get"], ["list"]]


@pytest.mark.parametrize("none", ["", [], ","], ids=["text", "list", "comma"])
def test_no_namespace_at_all(none):
    _made, roles = objects(reader_configmap_namespaces=none)
    assert [one["resources"] for one in roles["kube-system"]] == [["leases"]]


def test_names_that_look_like_numbers_are_names():
    text = (ROOT / "roles/reader/templates/reader.yml.j2").read_text()
    given = {"reader_name": "1e3", "reader_namespace": "2024", "reader_gpushare_namespace": "on"}
    made = list(yaml.safe_load_all(template(text, reader_configmap_namespaces=[2025, "no"], **given)))
    assert {one["metadata"]["name"] for one in made} == {"1e3"}
    spaces = {one["metadata"].get("namespace", "2024") for one in made}
    assert spaces == {"2024", "kube-system", "2025", "no"}
    assert {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in made} == {"1e3"}
    rules = next(one["rules"] for one in made if one["kind"] == "ClusterRole")
    assert [one["resourceNames"] for one in rules if one["resources"] == ["namespaces"]] == [["on"]]
    bound = [(one["roleRef"]["name"], one["subjects"]) for one in made if "roleRef" in one]
    assert bound and all(
        one == ("1e3", [{"kind": "ServiceAccount", "name": "1e3", "namespace": "2024"}]) for one in bound
    )


class Stingy:
    """An API server that gives a token for a day at most."""

    def __init__(self):
        self.asked = []

    def uid(self, _namespace, _name):
        return "u-1"

    def connection(self):
        return {"server": "https://a:6443"}

    def token(self, _namespace, _name, seconds):
        self.asked.append(seconds // 3600)
        now = int(time.time())
        claims = {"iat": now, "exp": now + min(seconds, 24 * 3600), "kubernetes.io": {"serviceaccount": {"uid": "u-1"}}}
        return f"h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"


def test_a_second_run_changes_nothing_where_the_api_server_gives_less_than_it_is_asked_for(tmp_path):
    api, path = Stingy(), str(tmp_path / "r")

    def bring(hours):
        given = {"path": path, "name": "r", "namespace": "s", "hours": hours, "state": "present"}
        return room.bring(lambda: api, RealSystem(), given, False)["changed"]

    assert [bring(720), bring(720), bring(720)] == [True, False, False]
    assert [bring(1), bring(700), bring(700)] == [False, True, False]
    assert api.asked == [720, 700]
    # Half of what was given is over.
    text = json.loads((tmp_path / "r").read_text())
    claims = {"iat": 1, "exp": int(time.time()) + 3600, "kubernetes.io": {"serviceaccount": {"uid": "u-1"}}}
    text["users"][0]["user"]["token"] = f"h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()}.s"
    (tmp_path / "r").write_text(json.dumps(text))
    assert bring(700)


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
