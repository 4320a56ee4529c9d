# SPDX-License-Identifier: GPL-3.0-or-later
"""role_templates compiles each template once, and what it renders depends on nothing that was rendered before."""

from __future__ import annotations

import role_templates
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template


def test_a_text_is_compiled_once_and_rendered_with_each_value(monkeypatch):
    texts = []
    compile_template = role_templates.compile_template
    monkeypatch.setattr(role_templates, "COMPILED", {})
    monkeypatch.setattr(
        role_templates, "compile_template", lambda *given: texts.append(given[1]) or compile_template(*given)
    )
    assert [role_templates.evaluated("{{ a + 1 }}", a=number) for number in (1, 2)] == [2, 3]
    assert texts == ["{{ a + 1 }}"]
    assert role_templates.evaluated("{{ a + 2 }}", a=1) == 3


def test_other_delimiters_and_other_backslashes_are_compiled_again():
    templar = Templar(loader=DataLoader(), variables={"a": 1})
    text = trust_as_template("{{ a }}[[ a ]]{{ '\\n' }}")
    brackets = {"variable_start_string": "[[", "variable_end_string": "]]"}
    assert templar.template(text) == "1[[ a ]]\\n"
    assert templar.template(text, overrides=brackets) == "{{ a }}1{{ '\\n' }}"
    assert templar.template(text, escape_backslashes=False) == "1[[ a ]]\n"
