# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in of AWX's API refuses what AWX refuses; else a run against it would prove nothing."""

from __future__ import annotations

import pytest
from awx_stand_in import API, Controller, Refused, StandIn

TYPE = {"name": "Config", "kind": "cloud", "inputs": {"fields": [{"id": "text", "label": "Text", "secret": True}]}}
HOOK = {"url": "https://chat.example", "headers": {}}
QUESTION = {"type": "integer", "question_name": "q", "variable": "v", "required": True}


class Client:
    """Objects that depend on each other, as one account creates them."""

    def __init__(self):
        self.controller = Controller({"site.yml"})
        self.organization = self.controller.named("organizations", "Default")["id"]

    def ask(self, method, path, body=None, **query):
        return self.controller.answer(method, API + path, query, body or {})[1]

    def add(self, endpoint, **body):
        return self.ask("POST", f"{endpoint}/", body)["id"]

    def refused(self, method, path, body=None, **query):
        with pytest.raises(Refused) as refused:
            self.ask(method, path, body, **query)
        return refused.value.status, str(refused.value.answer)

    def project(self):
        project = self.add("projects", name="p", organization=self.organization, scm_type="git", scm_url="https://a")
        update = self.ask("GET", f"projects/{project}/")["summary_fields"]["current_update"]["id"]
        assert [self.ask("GET", f"project_updates/{update}/")["status"] for _n in range(2)] == [
            "running",
            "successful",
        ]
        return project

    def template(self, **more):
        inventory = self.add("inventories", name="i", organization=self.organization)
        given = {"name": "site", "inventory": inventory, "project": self.project(), "playbook": "site.yml"}
        return self.add("job_templates", **given, **more)


@pytest.fixture
def client():
    return Client()


@pytest.mark.parametrize(
    ("endpoint", "body", "said"),
    [
        ("organizations", {}, "This field is required."),
        ("organizations", {"name": "Default"}, "already exists"),
        ("inventories", {"name": "a", "organization": 99}, "object does not exist"),
        ("credential_types", {**TYPE, "kind": "ssh"}, "is not a valid choice"),
        ("credential_types", {**TYPE, "inputs": {"fields": [{"id": "a"}]}}, "Not a field"),
        ("credential_types", {**TYPE, "injectors": {"env": {"A": "{{ tower.filename }}"}}}, "undefined"),
        ("credential_types", {**TYPE, "injectors": {"env": {"ANSIBLE_A": "a"}}}, "not allowed"),
        ("credential_types", {**TYPE, "injectors": {"files": {}}}, "Additional properties"),
        ("credentials", {"name": "a", "credential_type": 2, "inputs": {}}, "Missing 'user', 'team', or 'organization'"),
        (
            "credentials",
            {"name": "a", "credential_type": 2, "organization": 1, "inputs": {"kubeconfig": ""}},
            "kubeconfig",
        ),
        ("projects", {"name": "a", "scm_type": "git"}, "SCM URL is required"),
        (
            "notification_templates",
            {"name": "a", "organization": 1, "notification_type": "webhook", "notification_configuration": {}},
            "Missing required fields",
        ),
    ],
)
def test_a_body_that_awx_refuses(client, endpoint, body, said):
    status, answer = client.refused("POST", f"{endpoint}/", body)
    assert status == 400 and said in answer, answer


def test_a_job_template_needs_a_fetched_project_with_its_playbook(client):
    template = client.template()
    assert "Playbook not found" in client.refused("PATCH", f"job_templates/{template}/", {"playbook": "sit.yml"})[1]
    project = client.add("projects", name="new", scm_type="git", scm_url="https://a", organization=1)
    assert "Playbook not found" in client.refused("PATCH", f"job_templates/{template}/", {"project": project})[1]


def test_a_template_has_one_credential_of_a_type(client):
    template = client.template()
    kind = client.add("credential_types", **TYPE)
    first, second = (client.add("credentials", name=n, organization=1, credential_type=kind) for n in "ab")
    path = f"job_templates/{template}/credentials/"
    assert client.ask("POST", path, {"id": first}) is None
    assert "Cannot assign multiple Config credentials" in client.refused("POST", path, {"id": second})[1]
    client.ask("POST", path, {"id": first, "disassociate": True})
    assert client.ask("GET", path)["count"] == 0


def test_secrets_are_hidden_and_injected(client):
    injectors = {"file": {"template": "{{ text }}"}, "extra_vars": {"path": "{{ tower.filename }}"}}
    kind = client.add("credential_types", **TYPE, injectors=injectors)
    number = client.add("credentials", name="a", organization=1, credential_type=kind, inputs={"text": "secret"})
    assert client.ask("GET", f"credentials/{number}/")["inputs"] == {"text": "$encrypted$"}
    assert client.controller.injected("a", "/f") == {"file": {"template": "secret"}, "extra_vars": {"path": "/f"}}
    assert client.refused("PATCH", f"credential_types/{kind}/", {"inputs": {}})[0] == 403
    hook = {"name": "h", "organization": 1, "notification_type": "webhook"}
    number = client.add("notification_templates", **hook, notification_configuration={**HOOK, "password": "secret"})
    shown = client.ask("GET", f"notification_templates/{number}/")["notification_configuration"]
    assert shown["password"] == "$encrypted$" and shown["http_method"] == "POST"


def test_surveys_and_what_answers_them(client):
    template = client.template(survey_enabled=True)
    path = f"job_templates/{template}/survey_spec/"
    for wrong in ({}, {"name": "", "description": "", "spec": []}):
        assert client.refused("POST", path, wrong)[0] == 400
    for change in ({"required": "no"}, {"type": "list"}, {"default": "a"}, {"type": "multiplechoice"}):
        spec = {"name": "", "description": "", "spec": [{**QUESTION, **change}]}
        assert client.refused("POST", path, spec)[0] == 400, change
    client.ask("POST", path, {"name": "", "description": "", "spec": [QUESTION]})
    schedule = {
        "name": "s",
        "unified_job_template": template,
        "rrule": "DTSTART:20260101T000000Z RRULE:FREQ=DAILY;INTERVAL=1",
    }
    assert "'v' value missing" in client.refused("POST", "schedules/", schedule)[1]
    assert "not allowed on launch" in client.refused("POST", "schedules/", {**schedule, "extra_data": {"w": 1}})[1]
    assert (
        "prompt on launch"
        in client.refused("POST", "schedules/", {**schedule, "extra_data": {"v": 1}, "limit": "a"})[1]
    )
    client.add("schedules", **schedule, extra_data={"v": 1})
    for rule in (
        "RRULE:FREQ=DAILY;INTERVAL=1",
        "DTSTART:20260101T000000Z RRULE:FREQ=DAILY",
        "DTSTART:20260101T000000 RRULE:FREQ=DAILY;INTERVAL=1",
    ):
        assert client.refused("POST", "schedules/", {**schedule, "name": "t", "rrule": rule})[0] == 400, rule


def test_an_approval_is_an_object_without_successors(client):
    workflow = client.add("workflow_job_templates", name="w", organization=1)
    first, second = (
        client.add("workflow_job_template_nodes", workflow_job_template=workflow, identifier=n) for n in "ab"
    )
    path = f"workflow_job_template_nodes/{first}/"
    approval = client.ask("POST", f"{path}create_approval_template/", {"name": "Go?"})
    assert client.ask("GET", path)["related"]["unified_job_template"] == approval["url"]
    client.ask("POST", f"{path}success_nodes/", {"id": second})
    assert client.refused("GET", f"workflow_approval_templates/{approval['id']}/success_nodes/")[0] == 404


def test_lists_have_pages_and_known_filters(client):
    client.add("organizations", name="b")
    first = client.ask("GET", "organizations/")
    assert (first["count"], len(first["results"]), first["next"]) == (2, 1, f"{API}organizations/?page=2")
    assert client.ask("GET", "organizations/", page="2")["results"][0]["name"] == "b"
    assert client.ask("GET", "organizations/", or__id="1", or__name="1")["count"] == 1
    assert "no field named 'nam'" in client.refused("GET", "organizations/", nam="b")[1]
    assert client.refused("GET", "organizations")[0] == 404


def test_only_the_account_is_answered():
    stand_in = StandIn([])
    with pytest.raises(Refused) as refused:
        stand_in._request("GET", f"{API}organizations/", {"Authorization": "Bearer other"}, b"")
    assert refused.value.status == 401
