# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in of AWX's API: what the modules of awx.awx need to create and to find objects. It runs no job.

``ENDPOINTS`` has what AWX 24.6.1 requires of an object, by its serializers and models (awx/api/serializers.py,
awx/main/models and awx/main/fields.py at that tag), as far as it is used here; its further rules are the functions
``_check_*``. The names, types and choices of fields are checked by awx.awx's modules themselves.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import threading
import typing as t
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from dateutil.rrule import rrulestr
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

VERSION = "24.6.1"
API = "/api/v2/"
ENCRYPTED = "$encrypted$"
# AWX's is 25. Everything that has two entries has two pages here.
PAGE = 1
Object = dict[str, t.Any]


class Refused(Exception):
    """A request that AWX refuses; ``status`` is the HTTP status."""

    def __init__(self, status: int, answer: Object) -> None:
        super().__init__(answer)
        self.status, self.answer = status, answer


def exactly(value: object, kind: type) -> bool:
    """Whether a value is of a type; true and false are no numbers, though Python counts them as such."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


EVENTS = ("started", "success", "error")
NOTIFIED = {f"notification_templates_{event}": "notification_templates" for event in EVENTS}
ORGANIZATION = {"organization": "organizations"}
ENVIRONMENT = {"execution_environment": "execution_environments"}
PROMPTS = ("limit", "inventory", "scm_branch", "diff_mode")
# What AWX sets where a body has none, as far as it is read here.
DEFAULTS: Object = {
    **dict.fromkeys(("organization", "inventory", "source_project", "unified_job_template")),
    **{"description": "", "scm_type": "", "scm_url": "", "source": "", "survey_enabled": False},
    **{"inputs": {}, "injectors": {}, "notification_configuration": {}, "extra_data": {}},
    **{f"ask_{one}_on_launch": False for one in ("variables", "job_slice_count", *PROMPTS)},
    **{"job_slice_count": 1, "allow_simultaneous": False},
}


@dataclass(frozen=True)
class Endpoint:
    """What AWX knows of one kind of object.

    :param references: fields that are ids of other objects, with the endpoint of those.
    :param required: fields without which none is created.
    :param unique: fields that no two objects may have in common.
    :param associations: sub-lists, with the endpoint of what they list.
    """

    kind: str
    references: dict[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ("name",)
    unique: tuple[str, ...] = ("name", "organization")
    associations: dict[str, str] = field(default_factory=dict)


ENDPOINTS = {
    "organizations": Endpoint("organization", unique=("name",)),
    "execution_environments": Endpoint(
        "execution_environment", {**ORGANIZATION, "credential": "credentials"}, ("name", "image"), ("name",)
    ),
    "credential_types": Endpoint("credential_type", {}, ("name", "kind"), ("name", "kind")),
    "credentials": Endpoint(
        "credential",
        {**ORGANIZATION, "credential_type": "credential_types"},
        ("name", "credential_type"),
        ("name", "organization", "credential_type"),
    ),
    "projects": Endpoint(
        "project",
        {**ORGANIZATION, "credential": "credentials", "default_environment": "execution_environments"},
        associations=NOTIFIED,
    ),
    "inventories": Endpoint("inventory", ORGANIZATION, ("name", "organization")),
    "inventory_sources": Endpoint(
        "inventory_source",
        {**ENVIRONMENT, "inventory": "inventories", "source_project": "projects"},
        ("name", "inventory"),
        ("name", "inventory"),
        NOTIFIED,
    ),
    "notification_templates": Endpoint(
        "notification_template", ORGANIZATION, ("name", "organization", "notification_type")
    ),
    "job_templates": Endpoint(
        "job_template",
        {**ENVIRONMENT, "inventory": "inventories", "project": "projects"},
        ("name", "project", "playbook"),
        associations={"credentials": "credentials", **NOTIFIED},
    ),
    "workflow_job_templates": Endpoint(
        "workflow_job_template",
        {**ORGANIZATION, "inventory": "inventories"},
        associations={**NOTIFIED, "notification_templates_approvals": "notification_templates"},
    ),
    "workflow_job_template_nodes": Endpoint(
        "workflow_job_template_node",
        {"workflow_job_template": "workflow_job_templates", "unified_job_template": "unified_job_templates"},
        ("workflow_job_template",),
        ("identifier", "workflow_job_template"),
        {f"{how}_nodes": "workflow_job_template_nodes" for how in ("success", "failure", "always")},
    ),
    "workflow_approval_templates": Endpoint("workflow_approval_template", unique=("name", "workflow_job_template")),
    "schedules": Endpoint(
        "schedule",
        {"unified_job_template": "unified_job_templates"},
        ("name", "unified_job_template", "rrule"),
        ("name", "unified_job_template"),
    ),
}
# Objects that a job can be made from have one sequence of ids, and this list has all of them.
UNIFIED = (
    "projects",
    "inventory_sources",
    "job_templates",
    "workflow_job_templates",
    "workflow_approval_templates",
)
SURVEYED = ("job_templates", "workflow_job_templates")
NOTICES = ("started", "success", "error", "workflow_approval")
# Fields of a webhook, the only notifications here, with their types, and their defaults where they have one.
WEBHOOK: dict[str, tuple[type, t.Any]] = {
    "url": (str, None),
    "http_method": (str, "POST"),
    "disable_ssl_verification": (bool, False),
    "username": (str, ""),
    "password": (str, ""),
    "headers": (dict, None),
}
# AWX brings this type of credential with it; of its inputs those that are used here, and whether each is secret.
MACHINE_INPUTS = {"username": False, "ssh_key_data": True, "become_method": False, "become_password": True}


class Controller:
    """The objects of one AWX, and the rules by which they change."""

    def __init__(self, playbooks: t.Collection[str]) -> None:
        """
        :param playbooks: the playbooks in every project, relative to its root.
        """
        self.playbooks = frozenset(playbooks)
        self.data: dict[str, dict[int, Object]] = {one: {} for one in (*ENDPOINTS, "unified_job_templates")}
        # Fields that no answer shows: surveys, sub-lists, secrets.
        self.surveys: dict[tuple[str, int], Object] = {}
        self.lists: dict[tuple[str, int, str], list[int]] = {}
        self.secrets: dict[int, Object] = {}
        self.tokens: dict[int, str] = {}
        self._updates: dict[int, tuple[Object, Object]] = {}
        # Every request that changed something, as method and path.
        self.written: list[tuple[str, str]] = []
        self._last = 0
        self._create("organizations", {"name": "Default"})
        inputs = [
            {"id": name, "label": name, "type": "string", "secret": secret} for name, secret in MACHINE_INPUTS.items()
        ]
        machine = {"name": "Machine", "kind": "ssh", "inputs": {"fields": inputs}, "injectors": {}, "description": ""}
        self._store("credential_types", {**machine, "managed": True})
        self.written.clear()

    # ------------------------------------------------------------ objects

    def named(self, endpoint: str, name: str) -> Object:
        """Return the object of a name or identifier."""
        [found] = [one for one in self.data[endpoint].values() if name in (one.get("name"), one.get("identifier"))]
        return found

    def listed(self, endpoint: str, name: str, association: str) -> list[str]:
        """Return the names of what a sub-list has."""
        to = ENDPOINTS[endpoint].associations[association]
        ids = self.lists.get((endpoint, self.named(endpoint, name)["id"], association), [])
        return [self.data[to][one].get("name") or self.data[to][one]["identifier"] for one in ids]

    def _store(self, endpoint: str, values: Object) -> Object:
        self._last += 1
        number = self._last
        known = ENDPOINTS[endpoint]
        url = f"{API}{endpoint}/{number}/"
        related = {association: f"{url}{association}/" for association in known.associations}
        if endpoint in SURVEYED:
            related["survey_spec"] = f"{url}survey_spec/"
        if endpoint == "projects":
            related["update"] = f"{url}update/"
        stored = {"id": number, "type": known.kind, "url": url, "related": related, "summary_fields": {}, **values}
        self.data[endpoint][number] = stored
        if endpoint in UNIFIED:
            self.data["unified_job_templates"][number] = stored
        return stored

    def _check(self, endpoint: str, body: Object, existing: Object | None) -> Object:
        known = ENDPOINTS[endpoint]
        given = {name: copy.deepcopy(value) for name, value in body.items() if name != "type"}
        errors = {
            name: [f'Invalid pk "{given[name]}" - object does not exist.']
            for name, to in known.references.items()
            if given.get(name) is not None and given[name] not in self.data[to]
        }
        if existing is None:
            errors |= {name: ["This field is required."] for name in known.required if name not in given}
        if errors:
            raise Refused(400, errors)
        after = {**(existing or copy.deepcopy(DEFAULTS)), **given}
        if check := getattr(self, f"_check_{endpoint}", None):
            check(after, given, existing)
        key = [after.get(name) for name in known.unique]
        for other in self.data[endpoint].values():
            if other is not existing and [other.get(name) for name in known.unique] == key:
                raise Refused(
                    400, {"__all__": [f"{known.kind} with this {' and '.join(known.unique)} already exists."]}
                )
        return after

    def _create(self, endpoint: str, body: Object) -> Object:
        stored = self._store(endpoint, self._check(endpoint, body, None))
        self._after(endpoint, stored)
        return stored

    def _after(self, endpoint: str, stored: Object) -> None:
        """What AWX does when an object was written."""
        if endpoint == "credentials":
            self._hide_inputs(stored)
        elif endpoint == "projects":
            self._sync(stored)
        elif endpoint == "job_templates":
            stored["organization"] = self.data["projects"][stored["project"]]["organization"]
        elif endpoint == "inventory_sources":
            stored["organization"] = self.data["inventories"][stored["inventory"]]["organization"]
        elif endpoint == "notification_templates":
            shown = stored["notification_configuration"]
            if shown.get("password"):
                shown["password"] = ENCRYPTED

    def _hide_inputs(self, stored: Object) -> None:
        fields = self.data["credential_types"][stored["credential_type"]]["inputs"]["fields"]
        secret = {one["id"] for one in fields if one.get("secret")}
        values = {name: value for name, value in stored["inputs"].items() if value != ENCRYPTED}
        self.secrets[stored["id"]] = {**self.secrets.get(stored["id"], {}), **values}
        stored["inputs"] = {name: ENCRYPTED if name in secret else value for name, value in stored["inputs"].items()}

    def _sync(self, project: Object) -> Object:
        """An update of a project that is complete when it is asked for the second time."""
        self._last += 1
        url = f"{API}project_updates/{self._last}/"
        update = {"id": self._last, "type": "project_update", "url": url, "name": project["name"]}
        project["status"] = "pending"
        project.setdefault("scm_revision", "")
        project["summary_fields"] = {"current_update": {"id": self._last}}
        self._updates[self._last] = (project, update)
        return update

    def _project_update(self, number: int) -> Object:
        project, update = self._updates[number]
        done = update.setdefault("asked", False)
        update["asked"] = True
        if done:
            project |= {"status": "successful", "scm_revision": "1" * 40, "summary_fields": {}}
        status = {"status": "successful" if done else "running", "finished": "2026-01-01T00:00:00Z" if done else None}
        return {**update, **status, "failed": False, "scm_revision": project["scm_revision"]}

    # ------------------------------------------------------------ AWX's rules beside the fields

    def _check_credential_types(self, after: Object, given: Object, existing: Object | None) -> None:
        if existing and existing["managed"]:
            raise Refused(403, {"detail": "Modifications not allowed for managed credential types"})
        used = existing and any(
            credential["credential_type"] == existing["id"] for credential in self.data["credentials"].values()
        )
        if used and existing and "inputs" in given and given["inputs"] != existing["inputs"]:
            raise Refused(
                403, {"detail": "Modifications to inputs are not allowed for credential types that are in use"}
            )
        if after["kind"] not in ("cloud", "net"):
            raise Refused(400, {"kind": [f'"{after["kind"]}" is not a valid choice.']})
        after["managed"] = False
        fields = after["inputs"].get("fields", [])
        allowed = {"type", "format", "choices", "id", "label", "help_text", "multiline", "secret", "default"}
        for one in fields:
            # AWX adds the type where it is missing, so that each run would find a difference.
            one.setdefault("type", "string")
            if not {"id", "label"} <= set(one) <= allowed or one["type"] not in ("string", "boolean"):
                raise Refused(400, {"inputs": [f"Not a field: {one}"]})
        if not set(after["inputs"]) <= {"fields", "required"}:
            raise Refused(400, {"inputs": ["Additional properties are not allowed"]})
        self._inject(after, {one["id"]: "EXAMPLE" for one in fields}, "EXAMPLE_FILENAME")

    def _inject(self, credential_type: Object, values: Object, filename: str) -> Object:
        """Render the injectors of a credential type, as AWX does it for a job; one file, ``template``."""
        injectors = credential_type["injectors"]
        if not set(injectors) <= {"file", "env", "extra_vars"} or set(injectors.get("file", {})) - {"template"}:
            raise Refused(400, {"injectors": ["Additional properties are not allowed"]})
        if any(name.startswith("ANSIBLE_") for name in injectors.get("env", {})):
            raise Refused(400, {"injectors": ["may affect Ansible configuration so its use is not allowed"]})
        names = {**values, "tower": {"filename": filename} if injectors.get("file") else {}}
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            return {
                kind: {key: environment.from_string(value).render(names) for key, value in entries.items()}
                for kind, entries in injectors.items()
            }
        except TemplateError as error:
            raise Refused(400, {"injectors": [f"uses an undefined field ({error})"]}) from None

    def injected(self, credential: str, filename: str) -> Object:
        """Return the file, the environment and the extra variables that a job gets of a credential.

        :param filename: where the job has the file.
        """
        found = self.named("credentials", credential)
        return self._inject(
            self.data["credential_types"][found["credential_type"]], self.secrets[found["id"]], filename
        )

    def _check_credentials(self, after: Object, given: Object, existing: Object | None) -> None:
        if existing is None and not after["organization"]:
            raise Refused(400, {"detail": "Missing 'user', 'team', or 'organization'."})
        inputs = self.data["credential_types"][after["credential_type"]]["inputs"]
        fields = {one["id"]: one for one in inputs["fields"]}
        for name, value in given.get("inputs", {}).items():
            if name not in fields:
                raise Refused(400, {"inputs": {name: ["Additional properties are not allowed"]}})
            if not isinstance(value, bool if fields[name]["type"] == "boolean" else str):
                raise Refused(400, {"inputs": {name: [f"{value!r} is not of type {fields[name]['type']}"]}})
            if existing is None and value == ENCRYPTED:
                raise Refused(400, {"inputs": [f"{ENCRYPTED} is a reserved keyword"]})

    def _check_projects(self, after: Object, _given: Object, _existing: Object | None) -> None:
        if after["scm_type"] and not after["scm_url"]:
            raise Refused(400, {"scm_url": ["SCM URL is required."]})

    def _check_inventory_sources(self, after: Object, _given: Object, _existing: Object | None) -> None:
        if after["source"] == "scm" and not after["source_project"]:
            raise Refused(400, {"source_project": ["Project required for scm type sources."]})

    def _check_job_templates(self, after: Object, _given: Object, _existing: Object | None) -> None:
        project = self.data["projects"][after["project"]]
        # AWX knows the files of a project when it has been fetched.
        if project["status"] != "successful" or after["playbook"] not in self.playbooks:
            raise Refused(400, {"playbook": ["Playbook not found for project."]})
        if not after["inventory"] and not after["ask_inventory_on_launch"]:
            raise Refused(400, {"inventory": ["You must either set a default value or ask to prompt on launch."]})

    def _check_workflow_job_template_nodes(self, after: Object, given: Object, existing: Object | None) -> None:
        if existing is None:
            after |= {f"{how}_nodes": [] for how in ("success", "failure", "always")}
        self._check_prompts(after, given, required=False)

    def _check_schedules(self, after: Object, given: Object, _existing: Object | None) -> None:
        rule = after["rrule"]
        starts = re.findall(r"DTSTART(?:;[^:]+)?:[0-9]+T[0-9]+Z?", rule)
        rules = re.findall(r"RULE:[^\s]*", rule)
        problems = [
            (len(starts) != 1, "Valid DTSTART required in rrule."),
            (bool(re.search(r"DTSTART:[0-9]+T[0-9]+ ", rule)), "DTSTART cannot be a naive datetime."),
            (not rules, "One or more rule required in rrule."),
            (any("INTERVAL" not in one for one in rules), "INTERVAL required in rrule"),
            (any("SECONDLY" in one for one in rules), "SECONDLY is not supported"),
        ]
        if wrong := [said for is_wrong, said in problems if is_wrong]:
            raise Refused(400, {"rrule": wrong})
        try:
            rrulestr(re.sub(r"DTSTART;TZID=[^:]+:", "DTSTART:", rule).replace(" ", "\n"))
        except ValueError as error:
            raise Refused(400, {"rrule": [f"rrule parsing failed validation: {error}"]}) from None
        self._check_prompts(after, given, required=True)

    def _check_prompts(self, after: Object, given: Object, required: bool) -> None:
        """What is set for a job in advance must be what its template asks for.

        :param required: whether required questions must be answered.
        """
        template = self.data["unified_job_templates"].get(after["unified_job_template"])
        if template is None or template["type"] not in ("job_template", "workflow_job_template"):
            return
        survey = self.surveys.get((template["type"] + "s", template["id"]), {}).get("spec", [])
        asked = {one["variable"] for one in survey} if template["survey_enabled"] else set()
        answers = given.get("extra_data", {})
        if set(answers) - asked and not template["ask_variables_on_launch"]:
            raise Refused(400, {"extra_data": [f"Variables {sorted(set(answers) - asked)} are not allowed on launch."]})
        missing = [one["variable"] for one in survey if one["required"] and one["variable"] not in answers]
        if required and missing and template["survey_enabled"]:
            raise Refused(400, {"variables_needed_to_start": [f"'{one}' value missing" for one in missing]})
        for prompt in PROMPTS:
            if given.get(prompt) is not None and not template.get(f"ask_{prompt}_on_launch"):
                raise Refused(400, {prompt: ["Field is not configured to prompt on launch."]})

    def _check_notification_templates(self, after: Object, given: Object, existing: Object | None) -> None:
        before = (existing or {}).get("messages") or {}
        if existing is None:
            after.setdefault("messages", dict.fromkeys(NOTICES))
        elif "messages" in given:
            # What is not given stays.
            after["messages"] = {notice: given["messages"].get(notice) or before.get(notice) for notice in NOTICES}
        if "notification_configuration" not in given:
            return
        values = after["notification_configuration"]
        if existing is not None and values.get("password") == ENCRYPTED:
            values["password"] = existing["notification_configuration"]["password"]
        values |= {
            name: default for name, (_type, default) in WEBHOOK.items() if name not in values and default is not None
        }
        if missing := sorted(set(WEBHOOK) - set(values)):
            raise Refused(400, {"__all__": [f"Missing required fields for Notification Configuration: {missing}."]})
        if wrong := [name for name, (kind, _default) in WEBHOOK.items() if not exactly(values[name], kind)]:
            raise Refused(400, {"__all__": [f"Configuration field '{wrong}' incorrect type."]})

    def check_survey(self, survey: Object) -> None:
        for name, kind in (("name", str), ("description", str), ("spec", list)):
            if not isinstance(survey.get(name), kind):
                raise Refused(400, {"error": f"Field '{name}' is missing from survey spec."})
        if not survey["spec"]:
            raise Refused(400, {"error": "'spec' doesn't contain any items."})
        seen = set()
        for question in survey["spec"]:
            kinds = {"type": str, "question_name": str, "variable": str, "required": bool}
            wrong = [name for name, kind in kinds.items() if not exactly(question.get(name), kind)]
            if wrong or question["variable"] in seen:
                raise Refused(
                    400, {"error": f"{wrong or 'variable'} in survey question {question} missing or duplicated"}
                )
            seen.add(question["variable"])
            defaults = {
                "text": str,
                "textarea": str,
                "password": str,
                "multiplechoice": str,
                "multiselect": (str, list),
            }
            defaults |= {"integer": int, "float": (int, float)}
            if question["type"] not in defaults:
                raise Refused(400, {"error": f"'{question['type']}' is not an allowed question type"})
            if "default" in question and not isinstance(question["default"], defaults[question["type"]]):
                raise Refused(400, {"error": f"Default value {question['default']} of the wrong type"})
            if question["type"] in ("multiplechoice", "multiselect"):
                choices = question.get("choices")
                if not choices or ("default" in question and question["default"] not in choices):
                    raise Refused(400, {"error": f"Survey question {question} must specify choices."})

    # ------------------------------------------------------------ requests

    def answer(self, method: str, path: str, query: dict[str, str], body: Object) -> tuple[int, t.Any]:
        """Answer one request with a status and a body.

        :raises Refused: AWX would refuse it.
        """
        words = path.removeprefix(API).split("/")
        if not path.startswith(API) or words.pop() != "":
            raise Refused(404, {"detail": "Not found."})
        if method != "GET":
            self.written.append((method, path))
        match words:
            case ["project_updates", number]:
                return 200, self._project_update(int(number))
            case [endpoint] if endpoint in self.data:
                if method == "GET":
                    return 200, self._page(path, query, list(self.data[endpoint].values()), endpoint)
                if method == "POST" and endpoint in ENDPOINTS and endpoint != "workflow_approval_templates":
                    return 201, self._create(endpoint, body)
            case [endpoint, number, *rest] if endpoint in ENDPOINTS and int(number) in self.data[endpoint]:
                stored = self.data[endpoint][int(number)]
                if not rest:
                    return self._one(method, endpoint, stored, body)
                return self._below(method, endpoint, stored, rest, body, path, query)
            case _:
                raise Refused(404, {"detail": "Not found."})
        raise Refused(405, {"detail": f'Method "{method}" not allowed.'})

    def _one(self, method: str, endpoint: str, stored: Object, body: Object) -> tuple[int, t.Any]:
        if method == "PATCH":
            changed = self._check(endpoint, body, stored)
            stored.clear()
            stored |= changed
            self._after(endpoint, stored)
        elif method != "GET":
            raise Refused(405, {"detail": f'Method "{method}" not allowed.'})
        return 200, stored

    def _below(
        self,
        method: str,
        endpoint: str,
        stored: Object,
        rest: list[str],
        body: Object,
        path: str,
        query: dict[str, str],
    ) -> tuple[int, t.Any]:
        match method, endpoint, rest:
            case "GET", _, ["survey_spec"] if endpoint in SURVEYED:
                return 200, self.surveys.get((endpoint, stored["id"]), {})
            case "POST", _, ["survey_spec"] if endpoint in SURVEYED:
                self.check_survey(body)
                self.surveys[endpoint, stored["id"]] = body
                return 200, {}
            case "DELETE", _, ["survey_spec"] if endpoint in SURVEYED:
                self.surveys.pop((endpoint, stored["id"]), None)
                return 200, {}
            case "POST", "projects", ["update"]:
                return 202, {**self._sync(stored), "project_update": stored["id"]}
            case "POST", "workflow_job_template_nodes", ["create_approval_template"]:
                made = self._check("workflow_approval_templates", body, None)
                # Its field, which no request sets.
                made["workflow_job_template"] = stored["workflow_job_template"]
                approval = self._store("workflow_approval_templates", made)
                stored["unified_job_template"] = approval["id"]
                stored["related"]["unified_job_template"] = approval["url"]
                return 201, approval
            case _, _, [association] if association in ENDPOINTS[endpoint].associations:
                return self._association(method, endpoint, stored, association, body, path, query)
        raise Refused(404, {"detail": "Not found."})

    def _association(
        self, method: str, endpoint: str, stored: Object, name: str, body: Object, path: str, query: dict[str, str]
    ) -> tuple[int, t.Any]:
        to = ENDPOINTS[endpoint].associations[name]
        ids = self.lists.setdefault((endpoint, stored["id"], name), [])
        if method == "GET":
            return 200, self._page(path, query, [self.data[to][one] for one in ids], to)
        if method != "POST" or not exactly(body.get("id"), int) or not set(body) <= {"id", "disassociate"}:
            raise Refused(400, {"detail": f"not an association: {method} {body}"})
        other = self.data[to].get(body["id"])
        if other is None:
            raise Refused(400, {"id": [f"{to} with id {body['id']} does not exist."]})
        if body.get("disassociate"):
            ids.remove(body["id"])
            return 204, None
        if name == "credentials":
            # One of each type, and no types of a registry or of source control.
            kind = self.data["credential_types"][other["credential_type"]]
            if kind["kind"] not in ("ssh", "vault", "cloud", "net", "kubernetes"):
                raise Refused(400, {"error": f"Cannot assign a Credential of kind `{kind['kind']}`."})
            if other["credential_type"] in [self.data[to][one]["credential_type"] for one in ids]:
                raise Refused(400, {"error": f"Cannot assign multiple {kind['name']} credentials."})
        if to == "workflow_job_template_nodes" and other["workflow_job_template"] != stored["workflow_job_template"]:
            raise Refused(400, {"error": "Cannot associate nodes of different workflows."})
        if body["id"] not in ids:
            ids.append(body["id"])
        return 204, None

    def _page(self, path: str, query: dict[str, str], found: list[Object], endpoint: str) -> Object:
        filters = {name: value for name, value in query.items() if name not in ("page", "page_size")}
        alternatives = {
            name.removeprefix("or__"): filters.pop(name) for name in list(filters) if name.startswith("or__")
        }
        known = {"id", "type", "name", "identifier", "organization"}
        if endpoint in ENDPOINTS:
            known |= set(ENDPOINTS[endpoint].references)
        for name in {*filters, *alternatives} - known:
            raise Refused(400, {"detail": f"{endpoint} has no field named '{name}'"})
        found = [one for one in found if all(str(one.get(name)) == value for name, value in filters.items())]
        if alternatives:
            found = [one for one in found if any(str(one.get(name)) == value for name, value in alternatives.items())]
        page = int(query.get("page", 1))
        rest = "&".join(f"{name}={value}" for name, value in query.items() if name != "page")
        more = len(found) > page * PAGE
        return {
            "count": len(found),
            "next": f"{path}?{rest}{'&' if rest else ''}page={page + 1}" if more else None,
            "previous": None,
            "results": found[(page - 1) * PAGE : page * PAGE],
        }


class StandIn:
    """The stand-in as a server on loopback, with one account.

    ``environment`` has what a module of awx.awx needs to reach it.
    """

    USER, PASSWORD = "admin", "a password of the tests"

    def __init__(self, playbooks: t.Collection[str]) -> None:
        """
        :param playbooks: the playbooks in every project, relative to its root.
        """
        self.controller = Controller(playbooks)
        self._lock = threading.Lock()

    def __enter__(self) -> StandIn:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                sent = self.rfile.read(length)
                with stand_in._lock:
                    try:
                        status, answer = stand_in._request(self.command, self.path, self.headers, sent)
                    except Refused as refused:
                        status, answer = refused.status, refused.answer
                    data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("X-API-Product-Name", "AWX")
                self.send_header("X-API-Product-Version", VERSION)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = do

            def log_message(self, *_arguments: t.Any) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CONTROLLER_HOST": f"http://127.0.0.1:{self._server.server_port}",
            "CONTROLLER_USERNAME": self.USER,
            "CONTROLLER_PASSWORD": self.PASSWORD,
        }

    def _request(self, method: str, target: str, headers: t.Any, sent: bytes) -> tuple[int, t.Any]:
        controller = self.controller
        parts = urlsplit(target)
        basic = "Basic " + base64.b64encode(f"{self.USER}:{self.PASSWORD}".encode()).decode()
        allowed = {basic, *(f"Bearer {token}" for token in controller.tokens.values())}
        if headers.get("Authorization") not in allowed:
            raise Refused(401, {"detail": "Authentication credentials were not provided."})
        if method == "POST" and parts.path == f"{API}tokens/":
            number = max(controller.tokens, default=0) + 1
            controller.tokens[number] = f"token-{number}"
            return 201, {"id": number, "token": controller.tokens[number]}
        if method == "DELETE" and parts.path.startswith(f"{API}tokens/"):
            controller.tokens.pop(int(parts.path.split("/")[-2]))
            return 204, None
        body = json.loads(sent) if sent else {}
        if not isinstance(body, dict):
            raise Refused(400, {"detail": "not an object"})
        return controller.answer(method, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)), body)
