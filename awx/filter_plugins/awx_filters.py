# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters for configure.yml: surveys from roles' argument specifications, whole notifications, and paths of files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError

# What a survey can ask, by an option's type. The answer for a list is text with commas, which the asked roles split.
TYPES = {"str": "text", "path": "text", "int": "integer", "float": "float", "bool": "multiplechoice", "list": "text"}
# What AWX 24.6.1 adds to a notification's configuration where it is missing, by type; for mail servers without a login
# also what it demands, though it may be empty.
ADDED: dict[str, dict[str, Any]] = {
    "awssns": dict.fromkeys(
        ("aws_region", "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "sns_topic_arn"), ""
    ),
    "email": {"timeout": 30, "username": "", "password": ""},
    "webhook": {"http_method": "POST", "disable_ssl_verification": False, "username": "", "password": ""},
}
# What AWX doesn't show of a configuration, of any type.
HIDDEN = ("account_token", "aws_secret_access_key", "aws_session_token", "grafana_key", "password", "token")
EVENTS = ("started", "success", "error", "workflow_approval")
MARKUP = re.compile(r"\b[A-Z]+\(((?:\\.|[^\\)])*)\)")


def _plain(description: str | Sequence[str]) -> str:
    """Return a description without Ansible's markup, as one paragraph."""
    text = description if isinstance(description, str) else " ".join(description)
    return " ".join(MARKUP.sub(lambda found: re.sub(r"\\(.)", r"\1", found[1]), text).split())


def _shown(default: Any) -> str:
    """Return a default as a person reads it; empty for none."""
    if isinstance(default, bool):
        return str(default).lower()
    return ", ".join(map(str, default)) if isinstance(default, list) else str(default)


def _question(name: str, option: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question about one option.

    It is optional and has no default: what AWX presets in a survey is an extra variable, which takes precedence over
    the inventory. So the inventory's value applies, or else the role's default, until somebody answers.

    :param name: the variable that the answer sets.
    """
    kind = option["type"]
    if kind not in TYPES:
        raise AnsibleFilterError(f"awx_survey: {name} is of type {kind}, for which AWX has no question")
    text = _plain(option["description"])
    first = re.split(r"(?<!e\.g)\.(?:\s|$)", text)[0]
    default = _shown(option.get("default", ""))
    question: dict[str, Any] = {
        "variable": name,
        "question_name": f"{name}: {first}" + (f" (default: {default})" if default else ""),
        "question_description": text,
        "required": False,
        "type": TYPES[kind],
    }
    if kind == "int":
        # All are times; AWX refuses less at the launch.
        question["min"] = 0
    choices = ["true", "false"] if kind == "bool" else option.get("choices", [])
    if choices:
        question |= {"type": "multiplechoice", "choices": [str(one) for one in choices if one != ""]}
    return question


def awx_survey(asked: Sequence[Mapping[str, Any]], roles: str) -> dict[str, Any]:
    """Make a survey, as AWX's API takes it.

    :param asked: the questions in their order: ``role``, ``option`` and, where the answer sets another variable that
        the option defaults to, ``variable``. Where no role has the variable: ``variable`` and what an argument
        specification says of an option.
    :param roles: the folder of the roles.
    :returns: the survey; ``{}``, which removes a survey, if nothing is asked.
    :raises AnsibleFilterError: a role has no such option, or AWX can't ask for it.
    """
    questions = []
    for one in asked:
        if "role" not in one:
            questions.append(_question(one["variable"], one))
            continue
        role, option = one["role"], one["option"]
        text = (Path(roles) / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
        entries = yaml.safe_load(text)["argument_specs"].values()
        found = [entry["options"][option] for entry in entries if option in entry.get("options", {})]
        if not found:
            raise AnsibleFilterError(f"awx_survey: role {role} has no option {option}")
        questions.append(_question(one.get("variable", option), found[0]))
    return {"name": "", "description": "", "spec": questions} if questions else {}


def awx_path(path: str) -> str:
    """Return a path as absolute; Ansible's lookups would take a relative one from the playbook's folder."""
    return os.path.abspath(os.path.expanduser(path))


def awx_whole_notifications(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return notifications as AWX shows them afterwards, so that a module that compares them finds no difference.

    :param given: ``awx_notifications``.
    :returns: each with ``secret``: whether it has what AWX doesn't show.
    """
    whole = []
    for one in given:
        configuration = {**ADDED.get(one["notification_type"], {}), **one["notification_configuration"]}
        made = {**one, "notification_configuration": configuration}
        if one.get("messages"):
            made["messages"] = {**dict.fromkeys(EVENTS), **one["messages"]}
        whole.append({**made, "secret": any(configuration.get(name) for name in HIDDEN)})
    return whole


class FilterModule:
    """Announce the filters to Ansible."""

    def filters(self) -> dict[str, Any]:
        return {"awx_survey": awx_survey, "awx_path": awx_path, "awx_whole_notifications": awx_whole_notifications}
