# SPDX-License-Identifier: GPL-3.0-or-later
"""What the pages name exists: variables, playbooks, ids; and what exists is found on the pages."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight import specifications
from check_worlds import WORLDS

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
import code_tables  # noqa: E402
import pictures  # noqa: E402
import site_builder  # noqa: E402

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("roles/*/README.md"), *ROOT.glob("*.md")])
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())
# A variable of a role begins with its name; those of several roles with gpu.
VARIABLE = re.compile(rf"`((?:gpu|{'|'.join(ROLES)}|uninstall)_[a-z0-9_]+)(?:: [^`]*|=[^`]*)?`")
SET = re.compile(r"-e '?\{?\"?([a-z][a-z0-9_]+)[=\"]")
# A variable's own line in a block of YAML.
LINE = re.compile(rf"^[ -]*((?:gpu|{'|'.join(ROLES)})_[a-z0-9_]+):", re.MULTILINE)
VALUE = re.compile(r"\b([a-z][a-z0-9_]+)(?:: |=)([\w.-]+)")
TEST = re.compile(r"\btest_\w+")
FILE = re.compile(r"`((?:docs|tests|images|roles|plugins|lab|inventories|awx)/[\w./-]+\.\w+)`")
# Where a page names a finding: behind a bracket, or as what preflight says. Servers and namespaces have these prefixes.
FINDING = re.compile(r"(?:\(|says? )`(?!gpushare-|nvidia-|kubegpu-|hami-acceptance)([a-z]+(?:-[a-z0-9]+)+)`")
ROLE_VARIABLE = re.compile(r"\b(?:gpu|uninstall)_[a-z_]+\b")


@functools.cache
def options():
    """Every option of the roles' argument specifications, and what playbooks, roles and the controller read besides."""
    found = set()
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            found |= set(entry.get("options") or {})
    readers = ("playbooks/*.yml", "roles/*/defaults/main.yml", "plugins/plugin_utils/*/*.py")
    for path in (path for pattern in readers for path in ROOT.glob(pattern)):
        found |= set(ROLE_VARIABLE.findall(path.read_text()))
    for path in ROOT.glob("awx/*.yml"):
        found |= set(re.findall(r"\bawx_\w+", path.read_text()))
    return found


@functools.cache
def others():
    """Names that look like variables and aren't: modules, playbooks, roles, facts, groups, causes, metrics."""
    names = {path.stem for path in (*ROOT.glob("plugins/modules/*.py"), *ROOT.glob("plugins/filter/*.yml"))}
    names |= {path.stem for path in ROOT.glob("playbooks/*.yml")} | set(ROLES)
    for path in ROOT.glob("roles/*/tasks/*.yml"):
        text = path.read_text()
        # Facts and artifacts that a role sets, and names of its result.
        names |= set(re.findall(r"^ +([a-z_]+):", text, re.MULTILINE))
    for check in code_tables.code("module_utils._check.registry").CHECKS:
        names |= set(check.documentation.messages)
    names |= set(WORLDS)
    text = (ROOT / "docs" / "monitoring.md").read_text()
    return names | set(re.findall(r"`(gpushare_\w+)`? \|", text)) | {"gpu_nodes", "gpu_node", "airgap_package_hosts"}


def named(text):
    blocks = "".join(re.findall(r"```ya?ml\n(.*?)```", text, re.DOTALL))
    return set(VARIABLE.findall(text)) | set(SET.findall(text)) | set(LINE.findall(blocks))


def refused(text):
    """Return the values of variables that no role accepts; a table's alternatives have another separator."""
    known = specifications.options()
    found = [(name, value.strip(".")) for name, value in VALUE.findall(text) if name in known]
    choices = {name: [str(choice) for choice in known[name].rules.get("choices", ())] for name, _value in found}
    kinds = {"bool": {"true", "false"}}
    return {
        (name, value)
        for name, value in found
        if value not in (choices[name] or kinds.get(known[name].rules["type"], {value}))
    }


def wrong(pattern, exists):
    """Return what the pages name and what doesn't exist, by page."""
    missing = {
        str(page.relative_to(ROOT)): {one for one in pattern(page.read_text()) if not exists(one)} for page in PAGES
    }
    return {page: names for page, names in missing.items() if names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_variable_of_a_page_exists(page):
    known = options() | others()
    # kubespray's and Ansible's own variables have other prefixes.
    assert {name for name in named(page.read_text()) if not name.startswith("ansible_")} <= known


def test_every_value_of_a_page_is_accepted():
    # An example of what preflight refuses.
    assert wrong(refused, {("gpushare_admission", "denny")}.__contains__) == {}
    assert refused("`gpu_maintenance: drain`, -e driver_hold=maybe, inspect_format: wide|json") == {
        ("driver_hold", "maybe")
    }


def test_every_test_of_a_page_exists():
    names = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    names |= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert wrong(TEST.findall, names.__contains__) == {}


def test_every_file_of_a_page_exists():
    # What the lab builds in its own folder, and a user's own inventory.
    others = ("images/gpushare.tar", "inventories/mine/hosts.yml")
    assert wrong(FILE.findall, lambda name: name in others or (ROOT / name).exists()) == {}


def test_every_finding_of_a_page_exists():
    listed = (ROOT / "docs/reference/preflight_findings.rst").read_text()
    ids = set(re.findall(r"^``([\w-]+)``$", listed, re.MULTILINE))
    assert wrong(FINDING.findall, ids.__contains__) == {}
    assert FINDING.findall("preflight says `foreign-plugin`, and (`memory-limt`)") == ["foreign-plugin", "memory-limt"]


def test_variables_of_no_single_role_are_in_the_index():
    # ansible-doc shows them with no role.
    assert set(specifications.SHARED) <= named((ROOT / "docs/README.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_playbook_of_a_page_exists(page):
    text = page.read_text()
    names = re.findall(r"\b(?:ansible-playbook|import_playbook:)[^\n`]*? kubegpu\.share\.(\w+)", text)
    names += re.findall(r"\bplaybooks/(\w+)\.yml", text)
    assert {name for name in names if not (ROOT / "playbooks" / f"{name}.yml").exists()} == set()


def test_every_page_is_in_the_index():
    _text, listed = site_builder.index()
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert own - listed == {site_builder.INDEX}


def test_every_id_is_on_the_page_of_symptoms():
    page = code_tables.troubleshooting()
    for check in code_tables.code("module_utils._check.registry").CHECKS:
        section = page.partition(f"\n### {check.id}\n")[2].partition("\n### ")[0]
        assert check.documentation.title in section
        assert [cause for cause in check.documentation.messages if f"| `{cause}` |" not in section] == []
        assert f"[{check.id}](#{check.id.lower()})" in page, "a symptom, or the list of other ids, leads there"
    reasons = code_tables.code("module_utils._contracts.gpushare").Reason
    assert [code for code in reasons if f"`{code}`" not in page] == []
    assert set(code_tables.reason_codes()) == {str(code) for code in reasons}


def test_a_symptom_with_an_unknown_id_is_refused(monkeypatch):
    for field in ("checks", "codes", "findings"):
        wrong = code_tables.Symptom("Nothing works", "Look.", **{field: ("Z99",)})
        monkeypatch.setattr(code_tables, "SYMPTOMS", (wrong,))
        with pytest.raises(KeyError, match="Z99"):
            code_tables.troubleshooting()


def test_the_picture_of_a_run_has_the_plays_of_site_in_their_order():
    found = list(pictures.plays("site.yml"))
    own = [play["name"] for play in yaml.safe_load((ROOT / "playbooks/site.yml").read_text()) if "hosts" in play]
    assert [play.name for play in found if play.name in own] == own
    assert any(play.serial and play.lanes == ("control_plane",) for play in found)
    drawn = pictures.order_of_site()
    assert all(f"<title>{pictures.escape(play.name)}</title>" in drawn for play in found)


def test_links_lead_to_the_reference_and_out_of_the_site_to_the_repository():
    page = Path("docs/howto/a.md")
    staged = {"docs/b.md", "docs/reference/index.rst", "docs/reference/driver_role.rst"}
    text = (
        "[b](../b.md#x) [p](../../plugins) [d](../../roles/driver/meta/argument_specs.yml) "
        "[i](../../images/gpushare/alerts.yml#L1) [n](none.md) [w](https://e.org/x)"
    )
    assert site_builder.relinked(text, page, staged, "https://example.org/1") == (
        "[b](../b.md#x) [p](../reference/index.rst) [d](../reference/driver_role.rst) "
        "[i](https://example.org/1/images/gpushare/alerts.yml#L1) [n](none.md) [w](https://e.org/x)"
    )


def test_each_row_of_the_threat_model_names_tests_that_exist():
    page = (ROOT / "SECURITY.md").read_text().partition("## The threat model in short")[2].partition("\n## ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 5
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.rpartition(" | ")[2])
        assert named, f"no test in the last column: {row}"
        for path, name in named:
            text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
            assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), f"{path} has no test {name}"
