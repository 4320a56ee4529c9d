# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/howto/awx.md line by line: configure.yml by awx.awx's real modules against a stand-in of AWX's API."""

from __future__ import annotations

import itertools
import json
import re
import shlex

import pytest
import yaml
from awx_kit import ROOT, awx_collection, changed, configure, recap, variables
from awx_stand_in import VERSION, StandIn

PAGE = (ROOT / "docs" / "howto" / "awx.md").read_text()
COMMANDS = [
    line.strip()
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
# What needs Galaxy, a container engine or a cluster: the tests of those are elsewhere.
ELSEWHERE = (
    "ansible-builder ",
    "podman push ",
    "ansible-galaxy collection install ",
    "ansible-playbook playbooks/readonly_access.yml ",
)
TEMPLATES = variables()["awx_job_templates"]
MESSAGES = {"error": {"message": "A job failed"}}
STEPS = ["plan", "approve", "site", "verify", "acceptance"]


def runs():
    """The arguments of each run of configure.yml, in the order of the page."""
    words = [shlex.split(line) for line in COMMANDS if not line.startswith((*ELSEWHERE, "export "))]
    assert {tuple(word[:2]) for word in words} == {("ansible-playbook", "awx/configure.yml")}
    return [word[2:] for word in words]


@pytest.fixture(scope="module")
def stand_in():
    playbooks = {f"playbooks/{path.name}" for path in (ROOT / "playbooks").glob("*.yml")}
    with StandIn(playbooks) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a person stands, with the files that the page speaks of."""
    made = tmp_path_factory.mktemp("person")
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (made / "my-awx.yml").write_text(text)
    given = yaml.safe_load(text)
    (made / given["awx_kubeconfig"]).write_text("kind: Config # of the administrator\n")
    (made / given["awx_ssh_private_key"]).write_text("a private key\n")
    (made / "reader.kubeconfig").write_text("kind: Config # that can read\n")
    return made


def test_the_page_has_each_job_template_and_artifact():
    for name in (*TEMPLATES, *re.findall(r"awx_\w+", PAGE)):
        assert name in PAGE and (not name.startswith("awx_") or name in variables()), name
    rows = dict(re.findall(r"^\| ([a-z_, ]+) \| (yes|no)", PAGE, re.MULTILINE))
    roots = {name: root == "yes" for names, root in rows.items() for name in names.split(", ")}
    assert roots == {name: template.get("become", False) for name, template in TEMPLATES.items()}


def test_the_modules_are_of_the_release_that_the_stand_in_has():
    [wanted] = yaml.safe_load((ROOT / "awx" / "requirements.yml").read_text())["collections"]
    assert wanted == {"name": "awx.awx", "version": VERSION}


def test_the_playbooks_exist_and_those_without_root_connect_to_no_machine():
    for name, template in TEMPLATES.items():
        playbook = ROOT / "playbooks" / f"{name}.yml"
        plays = [one for one in yaml.safe_load(playbook.read_text()) if "limit.yml" not in one.values()]
        assert bool(template.get("become")) == any(play.get("hosts") != "localhost" for play in plays), name


@pytest.mark.long
def test_what_is_missing_is_named_before_anything_is_created(stand_in, folder):
    rc, text = configure(stand_in, folder, "-e", "awx_ee_image=a")
    assert rc == 2 and "awx_inventory_url, awx_kubeconfig: not set." in text and not stand_in.controller.written, text


@pytest.mark.long
def test_the_commands_of_the_page_twice_and_after_changes_by_hand(stand_in, folder):
    first, again, reader = runs()
    controller = stand_in.controller
    manifest = json.loads((awx_collection() / "ansible_collections/awx/awx/MANIFEST.json").read_text())
    assert manifest["collection_info"]["version"] == VERSION
    rc, text = configure(stand_in, folder, *first)
    assert rc == 0 and recap(text)["changed"] == 13, text

    # What there is now.
    for name, template in TEMPLATES.items():
        made = controller.named("job_templates", f"kubegpu {name}")
        assert made["become_enabled"] is template.get("become", False) and made["playbook"] == f"playbooks/{name}.yml"
        machine = ["kubegpu machines"] if template.get("become") else []
        assert controller.listed("job_templates", made["name"], "credentials") == ["kubegpu kubeconfig", *machine]
        assert controller.listed("job_templates", made["name"], "notification_templates_error") == ["platform team"]
        survey = controller.surveys.get(("job_templates", made["id"]), {"spec": []})
        asked = [one.get("variable", one.get("option")) for one in template["survey"]]
        assert [one["variable"] for one in survey["spec"]] == asked and made["survey_enabled"] is bool(asked)
    workflow = controller.named("workflow_job_templates", "kubegpu roll-out")
    of_all = [one for name in ("site", "verify", "acceptance") for one in TEMPLATES[name]["survey"]]
    asked = [one.get("variable", one.get("option")) for one in of_all]
    assert [one["variable"] for one in controller.surveys["workflow_job_templates", workflow["id"]]["spec"]] == asked
    nodes = {node["id"]: node["identifier"] for node in controller.data["workflow_job_template_nodes"].values()}
    follow = {
        nodes[at]: [nodes[one] for one in ids]
        for (_e, at, how), ids in controller.lists.items()
        if how == "success_nodes"
    }
    assert {one: following for one, following in follow.items() if following} == {
        before: [after] for before, after in itertools.pairwise(STEPS)
    }
    approve = controller.named("workflow_job_template_nodes", "approve")
    approval = controller.data["workflow_approval_templates"][approve["unified_job_template"]]
    assert approval["timeout"] == 86400
    [schedule] = controller.data["schedules"].values()
    assert schedule["unified_job_template"] == controller.named("job_templates", "kubegpu verify")["id"]
    assert controller.named("credentials", "kubegpu machines")["inputs"] == {
        "username": "ansible",
        "ssh_key_data": "$encrypted$",
        "become_method": "sudo",
    }
    assert controller.injected("kubegpu kubeconfig", "/runner/env/k") == {
        "file": {"template": "kind: Config # of the administrator\n"},
        "env": {"K8S_AUTH_KUBECONFIG": "/runner/env/k"},
        "extra_vars": {"gpu_kubeconfig": "/runner/env/k"},
    }
    assert "of the administrator" not in text and "a private key" not in text

    # The second run only fetches the projects.
    controller.written.clear()
    rc, text = configure(stand_in, folder, *first)
    assert rc == 0 and recap(text)["changed"] == 0, text
    assert [path.split("/")[3:] for _method, path in controller.written] == [
        ["projects", str(controller.named("projects", f"kubegpu {name}")["id"]), "update", ""]
        for name in ("playbooks", "inventory")
    ]

    # What somebody changed by hand is restored, and nothing else; secrets are written on request.
    controller.named("job_templates", "kubegpu site")["become_enabled"] = False
    by_hand = {"job_slice_count": 2, "allow_simultaneous": True, "ask_variables_on_launch": True}
    controller.named("job_templates", "kubegpu switch").update(by_hand)
    controller.surveys["job_templates", controller.named("job_templates", "kubegpu verify")["id"]]["spec"].pop()
    controller.lists["workflow_job_template_nodes", approve["id"], "success_nodes"].clear()
    (folder / "admin.kubeconfig").write_text("kind: Config # rotated\n")
    rc, text = configure(stand_in, folder, *again)
    assert rc == 0, text
    assert changed(text) == [
        "Store the kubeconfigs as credentials",
        "Store the machines' SSH account as a credential",
        "Create the job templates",
        "Connect the workflow's steps",
    ]
    assert "rotated" in controller.injected("kubegpu kubeconfig", "/k")["file"]["template"]
    restored = controller.named("job_templates", "kubegpu switch")
    assert [restored[name] for name in by_hand] == [1, False, False]

    # With a kubeconfig that can only read.
    rc, text = configure(stand_in, folder, *reader)
    assert rc == 0, text
    for name, template in TEMPLATES.items():
        [used, *_machine] = sorted(controller.listed("job_templates", f"kubegpu {name}", "credentials"))
        assert ("can read" in controller.injected(used, "/k")["file"]["template"]) is template.get("reads_only", False)


@pytest.mark.long
def test_a_notification_without_a_secret_is_compared(stand_in, folder):
    """Its address changed; one with a password is written only on request."""
    first, again, _reader = runs()
    shown = stand_in.controller.data["notification_templates"]

    def run(url, *words):
        """Configure two notifications with an address.

        :returns: the tasks with a change, the output of the task with the notifications, and the addresses afterwards.
        """
        hook = {"url": url, "headers": {"X-Team": "gpu"}}
        two = [("plain", hook), ("secret", {**hook, "password": "1"})]
        given = [
            {"name": name, "notification_type": "webhook", "notification_configuration": one, "messages": MESSAGES}
            for name, one in two
        ]
        (folder / "more.json").write_text(json.dumps({"awx_notifications": given}))
        rc, text = configure(stand_in, folder, *words, "-e", "@more.json")
        assert rc == 0, text
        told = text.partition("TASK [Create the notification templates]")[2].partition("TASK [")[0]
        after = {one["name"]: one["notification_configuration"]["url"] for one in shown.values()}
        return changed(text), re.findall(r"^changed: .*item=(\w+)", told, re.MULTILINE), after

    run("https://old", *first)
    tasks, written, after = run("https://new", *first)
    assert (tasks, written) == (["Create the notification templates"], ["plain"])
    assert (after["plain"], after["secret"]) == ("https://new", "https://old")
    _tasks, written, after = run("https://new", *again)
    assert written == ["secret"] and after["secret"] == "https://new"
