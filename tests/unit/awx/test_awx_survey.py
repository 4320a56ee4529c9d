# SPDX-License-Identifier: GPL-3.0-or-later
"""The surveys of awx/vars.yml are made from the roles' argument specifications, and the roles take each answer."""

from __future__ import annotations

import re
import sys

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from awx_kit import ROOT, variables
from awx_stand_in import Controller

sys.path.insert(0, str(ROOT / "awx" / "filter_plugins"))

from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight.specifications import SHARED
from awx_filters import awx_survey

ROLES = ROOT / "roles"
TEMPLATES = variables()["awx_job_templates"]
QUESTIONS = [one for template in TEMPLATES.values() for one in template["survey"]]
EVERY = {question["option"]: question for question in QUESTIONS if "role" in question}
ASKED = [pytest.param(one, id=name) for name, one in EVERY.items()]
# Variables of playbooks.
OTHERS = [pytest.param(question, id=question["variable"]) for question in QUESTIONS if "role" not in question]
# Values that somebody may type.
TYPED = {"text": ["a", "a,b"], "integer": [0, 600]}


def option(asked):
    entries = yaml.safe_load((ROLES / asked["role"] / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    return next(
        entry["options"][asked["option"]] for entry in entries.values() if asked["option"] in entry.get("options", {})
    )


def answers(question):
    return question["choices"] if question["type"] == "multiplechoice" else TYPED[question["type"]]


@pytest.mark.parametrize("asked", ASKED)
def test_a_role_takes_each_answer_and_none_replaces_the_inventorys_value(asked):
    [question] = awx_survey([asked], str(ROLES))["spec"]
    # AWX passes a survey's defaults as extra variables.
    assert "default" not in question and question["required"] is False
    specified = option(asked)
    validator = ArgumentSpecValidator({asked["option"]: {k: v for k, v in specified.items() if k != "description"}})
    for answer in answers(question):
        assert not validator.validate({asked["option"]: answer}).error_messages, answer
    assert not re.search(r"\b[A-Z]\(", question["question_description"])


def test_a_question_for_a_number_asks_for_a_time():
    """So less than 0, which a survey's question refuses, is never right."""
    asked = awx_survey(list(EVERY.values()), str(ROLES))["spec"]
    times = [one["question_description"] for one in asked if one["type"] == "integer"]
    assert times and all(one.startswith("Seconds ") for one in times)


@pytest.mark.parametrize("asked", ASKED)
def test_the_role_uses_an_answer_as_text(asked):
    """AWX's answers are text, also "false" and "a,b", while role argument validation doesn't convert variables."""
    name, kind = asked["option"], option(asked)["type"]
    if kind not in ("bool", "list"):
        return
    uses = {
        "bool": rf"\b{name} \| bool\b|^\s*\w+: \"\{{\{{ {name} \}}\}}\"$",
        "list": rf"\({name}\.split\(','\) if {name} is string else {name}\)|\b{name} \| kubegpu\.share\.listed\b",
    }
    found = 0
    for path in (*(ROLES / asked["role"] / "tasks").glob("*.yml"), *(ROLES / asked["role"] / "vars").glob("*.yml")):
        text = path.read_text()
        found += len(re.findall(uses[kind], text, re.MULTILINE))
        rest = re.sub(uses[kind], "", text, flags=re.MULTILINE)
        # What a message or a comment says is no use.
        assert not re.search(rf"\{{\{{[^}}]*\b{name}\b|^\s*- {name}\b|when: .*\b{name}\b", rest, re.MULTILINE), path
    assert found


@pytest.mark.parametrize("asked", [one for one in EVERY.values() if "variable" in one])
def test_an_answer_sets_another_variable_only_where_the_option_defaults_to_it(asked):
    default = yaml.safe_load((ROLES / asked["role"] / "defaults" / "main.yml").read_text())[asked["option"]]
    assert default.startswith(f"{{{{ {asked['variable']} | default(")


@pytest.mark.parametrize("asked", OTHERS)
def test_a_question_about_a_playbooks_variable_agrees_with_what_preflight_accepts(asked):
    rules = SHARED[asked["variable"]]
    assert (asked["type"], asked.get("choices")) == (rules["type"], rules.get("choices"))
    [question] = awx_survey([asked], str(ROLES))["spec"]
    assert "default" not in question and question["required"] is False
    assert question.get("choices") == rules.get("choices", ["true", "false"] if rules["type"] == "bool" else None)


def test_what_the_page_sets_at_a_launch_is_asked_and_no_other_variable_can_be_set():
    """Whoever may launch a job could otherwise run programs beside its credentials: -e ansible_ssh_common_args."""
    asked = {
        name: {one.get("variable", one.get("option")) for one in made["survey"]} for name, made in TEMPLATES.items()
    }
    assert {"gpu_backend", "gpushare_allocation"} <= asked["switch"]
    assert {"uninstall_with_pods", "uninstall_cluster"} <= asked["uninstall"]
    assert not [name for name, made in TEMPLATES.items() if "ask_variables" in made]
    [play] = yaml.load((ROOT / "awx" / "configure.yml").read_text(), yaml.SafeLoader)
    for task in play["tasks"]:
        for module in ("awx.awx.job_template", "awx.awx.workflow_job_template"):
            if module in task:
                assert task[module]["ask_variables_on_launch"] is False, task["name"]


def test_awx_accepts_the_surveys():
    asked = [*EVERY.values(), *(question for question in QUESTIONS if "role" not in question)]
    Controller([]).check_survey(awx_survey(asked, str(ROLES)))


def test_a_question_has_the_options_type_choices_and_default(tmp_path):
    folder = tmp_path / "one" / "meta"
    folder.mkdir(parents=True)
    options = {
        "one_a": {"type": "str", "choices": ["x", ""], "default": "x", "description": "Which V(x), O(one_b=2). More."},
        "one_b": {"type": "int", "description": ["Seconds; e.g. 3.5 of C(it\\)).", "Next."]},
        "one_c": {"type": "bool", "default": False, "description": "Whether."},
        "one_d": {"type": "dict", "description": "Labels."},
    }
    specs = {"argument_specs": {"main": {"options": options}, "other": {}}}
    (folder / "argument_specs.yml").write_text(yaml.safe_dump(specs))
    ask = [{"role": "one", "option": name} for name in ("one_a", "one_b", "one_c")]
    first, second, third = awx_survey(ask, str(tmp_path))["spec"]
    assert first == {
        "variable": "one_a",
        "question_name": "one_a: Which x, one_b=2 (default: x)",
        "question_description": "Which x, one_b=2. More.",
        "required": False,
        "type": "multiplechoice",
        "choices": ["x"],
    }
    assert (second["type"], second["min"], second["question_name"]) == ("integer", 0, "one_b: Seconds; e.g. 3.5 of it)")
    assert (third["choices"], third["question_name"]) == (["true", "false"], "one_c: Whether (default: false)")
    assert awx_survey([], str(tmp_path)) == {}
    with pytest.raises(AnsibleFilterError, match="role one has no option one_z"):
        awx_survey([{"role": "one", "option": "one_z"}], str(tmp_path))
    with pytest.raises(AnsibleFilterError, match="one_d is of type dict"):
        awx_survey([{"role": "one", "option": "one_d"}], str(tmp_path))
