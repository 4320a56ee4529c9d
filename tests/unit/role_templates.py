# SPDX-License-Identifier: GPL-3.0-or-later
"""Templates of the roles, rendered as their tasks do it: by Ansible's own lookup, from the role's folder."""

from __future__ import annotations

from pathlib import Path

import yaml
from ansible._internal._templating import _jinja_bits as jinja
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import lookup_loader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._kube.objects import parse

ROLES = Path(__file__).resolve().parents[2] / "roles"
compile_template = jinja.AnsibleEnvironment.compile


def compile_once(environment, source, name=None, filename=None, raw=False, defer_init=False):
    """Do what ``AnsibleEnvironment.compile`` does, and keep the code: Ansible compiles the same text for each value."""
    if not isinstance(source, str):
        return compile_template(environment, source, name, filename, raw, defer_init)
    # What the lexer depends on, besides the text.
    context = jinja._TemplateCompileContext.current(optional=True)
    depends = [context and context.escape_backslashes]
    depends += [getattr(environment, field) for field in jinja._TEMPLATE_OVERRIDE_FIELD_NAMES]
    key = (str(source), name, filename, raw, defer_init, *depends)
    if key not in COMPILED:
        COMPILED[key] = compile_template(environment, source, name, filename, raw, defer_init)
    return COMPILED[key]


COMPILED = {}
jinja.AnsibleEnvironment.compile = compile_once


def variables_of(role, kind):
    """A role's own variables; some are computed from others."""
    read_them = yaml.safe_load((ROLES / role / kind / "main.yml").read_text())
    return {name: _trusted(value) for name, value in read_them.items()}


def _trusted(value):
    if isinstance(value, dict):
        return {name: _trusted(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_trusted(one) for one in value]
    return trust_as_template(value) if isinstance(value, str) else value


def defaults(role):
    return variables_of(role, "defaults")


def objects(role, *names, **variables):
    """The objects of these templates (without their ending), in the order in which they are created."""
    loader = DataLoader()
    # Ansible always has the inventory's variables.
    given = {"ansible_search_path": [str(ROLES / role)], "groups": {}, "hostvars": {}, **variables}
    templar = Templar(loader=loader, variables=given)
    lookup = lookup_loader.get("ansible.builtin.template", loader=loader, templar=templar)
    texts = []
    for name in names:
        [text] = lookup.run([f"{name}.yml.j2"], given)
        # Tagged by Ansible, which the YAML parser in C refuses.
        texts.append(str(text) if isinstance(text, str) else yaml.safe_dump(text))
    return parse(texts)


def value(role, name, **variables):
    """The value of a variable in a role."""
    return evaluated("{{ " + name + " }}", ansible_search_path=[str(ROLES / role)], **variables)


def evaluated(template, **variables):
    """The value of a role's expression."""
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template(template))


def one(found, kind, name=""):
    """The only object of a kind, or the only one with this in its name."""
    [only] = [each for each in found if each["kind"] == kind and name in each["metadata"]["name"]]
    return only
