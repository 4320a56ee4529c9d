# SPDX-License-Identifier: GPL-3.0-or-later
"""Wrong values and misspelt names are found before any machine is connected, by real ansible-playbook and alone."""

from __future__ import annotations

import json
import re
import sys
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleUndefinedVariable
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight import specifications
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight import variables as origin
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight.variables import (
    ENTRIES,
    SOURCES,
    Variables,
    examine,
)
from test_privileges import items
from verify_kit import ROOT, run_playbook

OPTIONS, PREFIXES = specifications.options(), specifications.prefixes()
RUNTIMES = "'auto', 'containerd', 'docker', 'crio', 'k3s', 'rke2'"
MODES = "'auto', 'static_pod', 'k3s', 'rke2', 'dedicated', 'openshift'"
EVERYWHERE = specifications.EVERYWHERE


class Undefined(dict[str, t.Any]):
    """As Ansible's, which evaluates a template when its value is asked for."""

    def __getitem__(self, name: str) -> t.Any:
        value = super().__getitem__(name)
        if isinstance(value, str) and "{{ later }}" in value:
            raise AnsibleUndefinedVariable("'later' is undefined")
        return value


def host(name: str = "gpu1", places: frozenset[str] = EVERYWHERE, /, **variables: t.Any) -> Variables:
    return Variables(name, places, Undefined(variables), lambda: variables)


def found(*hosts: Variables, cluster: bool = True) -> list[tuple[str, str, str]]:
    return [(one.id, one.severity, one.text) for one in examine(OPTIONS, PREFIXES, hosts, cluster)]


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("gpushare_admission", "denny", "'denny' isn't one of 'deny', 'warn', 'none'; set it to 'deny'"),
        ("gpushare_wait_timeout", "abc", "'abc' isn't a whole number; set it to a whole number"),
        ("runtime_name", "dockr", f"'dockr' isn't one of {RUNTIMES}; set it to 'docker'"),
        ("scheduler_mode", "statik", f"'statik' isn't one of {MODES}; set it to 'static_pod'"),
        ("gpu_backend", "magic", "'magic' isn't one of 'gpushare', 'hami', 'nvidia', 'passthrough', 'vgpu', 'kata';"),
        ("gpu_maintenance", "now", "'now' isn't one of 'never', 'drain', 'reboot'; set it to one of 'never',"),
        ("gpushare_memory_unit", "GB", "'GB' isn't one of 'GiB', 'MiB'; set it to 'GiB'"),
        ("gpushare_placement", "worst", "'worst' isn't one of 'binpack', 'spread'; set it to one of 'binpack',"),
        ("gpushare_memory_limit", "hard", "'hard' isn't one of 'auto', 'required', 'off'; set it to one of 'auto',"),
        ("driver_hold", "perhaps", "'perhaps' isn't true or false; set it to true or false"),
        ("gpu_exclude", ["GPU-123"], "'GPU-123' is neither a PCI address (0000:3b:00.0), a UUID (GPU-…)"),
        ("gpu_exclude", ["3b:00.0", "*"], "'*' matches every card: take the machine out of gpu_nodes instead"),
        ("gpu_exclude", "0", "'0' is an index, which changes with the cards that the driver finds: use the card's PCI"),
        ("passthrough_cards", ["NVIDIA A10"], "'NVIDIA A10' is neither a PCI address (0000:3b:00.0) nor"),
        ("gpu_exclude", {"a": 1}, '{"a": 1} isn\'t a list of texts; set it to a list of texts'),
        ("driver_version", [580], "[580] isn't a text; set it to a text"),
        ("gpushare_nodes", {"gpu1": None}, '{"gpu1": null} isn\'t a list of texts; set it to a list of texts'),
        ("gpushare_ignore_xids", ["x"], '["x"] isn\'t a list of whole numbers; set it to a list of whole numbers'),
        ("acceptance_node_selector", "gpu", "'gpu' isn't a mapping; set it to a mapping"),
        ("runtime_name", None, f"null isn't one of {RUNTIMES}; set it to one of"),
        ("scheduler_version", ["x" * 200], '["' + "x" * 58 + "… isn't a text"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_sentence_with_what_is_allowed(variable: str, value: t.Any, text: str) -> None:
    [(id, severity, said)] = found(host(**{variable: value}))
    assert (id, severity) == ("wrong-value", "problem")
    assert said.startswith(f"{variable}: {text}") and "\n" not in said


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("gpushare_memory_limit", False),  # YAML's bare off.
        ("gpushare_wait_timeout", "300"),  # The command line has texts only.
        ("driver_hold", "no"),
        ("verify_nodes", "gpu1,gpu2"),
        ("driver_version", 580),
        ("gpu_kubeconfig", {"clusters": []}),
        ("driver_packages_dir", None),
        ("scheduler_dedicated_tolerations", [{"operator": "Exists"}]),
    ],
)
def test_what_a_role_accepts_is_no_finding(variable: str, value: t.Any) -> None:
    assert found(host(**{variable: value})) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            [{"key": "sku"}, {"operator": "In", "key": "a"}],
            "has the operator In, which is none of",
        ),
        ([{"key": "sku", "operator": "Equal", "value": True}], "has a value that is no text: quote it"),
        ([{"operator": "Equal", "value": "x"}], "has no key: that is valid with the operator Exists only"),
        ([{"key": "a", "operator": "Exists", "value": "x"}], "has a value, which the operator Exists doesn't"),
        ([{"key": "a", "effect": "noschedule"}], "has the effect noschedule, which is none of NoSchedule, "),
        (
            [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 3}],
            "has tolerationSeconds, which need",
        ),
        (
            [{"keys": "a"}],
            "has keys, and a toleration has key, operator",
        ),
    ],
)
@pytest.mark.parametrize("variable", sorted(set(ENTRIES) - {"gpu_exclude", "passthrough_cards"}))
def test_wrong_tolerations_are_one_sentence(variable: str, value: t.Any, reason: str) -> None:
    [(id, severity, said)] = found(host(**{variable: value}))
    assert (id, severity) == ("wrong-value", "problem")
    assert said.startswith(f"{variable}: {json.dumps(value[-1])[:60]}") and reason in said and "\n" not in said


@pytest.mark.parametrize("variable", sorted(ENTRIES))
def test_a_list_that_is_null_is_one_sentence(variable: str) -> None:
    [(id, severity, said)] = found(host(**{variable: None}))
    assert (id, severity) == ("wrong-value", "problem")
    assert said.startswith(f"{variable}: null isn't a list")


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        *((name, "absent", "with 'absent' this run would remove what it is to set up") for name in origin.STATES),
        *((name, "absent", "only the playbooks set it") for name in origin.STEPS),
        ("driver_state", "external", ""),
        ("gpushare_state", "present", ""),
        # As a play that imports the role has it.
        ("scheduler_step", OPTIONS["scheduler_step"].default, ""),
    ],
)
def test_no_variable_turns_a_run_around(variable: str, value: str, text: str) -> None:
    said = [text for _id, _severity, text in found(host(**{variable: value})) if " isn't one of " not in text]
    assert len(said) == bool(text) and all(one.startswith(f"{variable}: {text}") for one in said)
    # Role by role, before there is a cluster.
    assert not text or not [
        one for _id, _severity, one in found(host(**{variable: value}), cluster=False) if text in one
    ]


def test_every_variable_that_site_tells_roles_is_guarded() -> None:
    tasks = [
        task for play in yaml.safe_load((ROOT / "playbooks/site.yml").read_text()) for task in play.get("tasks", ())
    ]
    told = {name for task in tasks for name in task.get("vars", ()) if not name.startswith("__")}
    assert told and told <= {*origin.STATES, *origin.STEPS}


def test_a_variable_counts_only_where_its_role_runs() -> None:
    gpu, control = frozenset(("gpu_nodes",)), frozenset(("control_plane",))
    assert found(host("cp1", control, runtime_name="dockr", driver_hold="x")) == []
    assert len(found(host("gpu1", gpu, runtime_name="dockr", driver_hold="x"))) == 2
    assert len(found(host("cp1", control, scheduler_mode="x"))) == 1


def test_a_finding_names_the_hosts_that_have_it_unless_all_do() -> None:
    hosts = [host(f"gpu{at}", gpushare_admission="x", runtime_name="x" if at else "auto") for at in range(3)]
    findings = examine(OPTIONS, PREFIXES, hosts, cluster=True)
    assert {finding.variable: finding.hosts for finding in findings} == {
        "gpushare_admission": (),
        "runtime_name": ("gpu1", "gpu2"),
    }


def test_what_isnt_known_before_the_run_is_a_note() -> None:
    [(id, severity, text)] = found(host(gpushare_admission="{{ later }}"))
    assert (id, severity) == ("unknown-yet", "note") and "it isn't known before the run: 'later' is undefined" in text


def test_a_missing_required_option_is_a_problem() -> None:
    needed = {"driver_licence": specifications.Option({"type": "str", "required": True}, EVERYWHERE)}
    [one] = examine({**OPTIONS, **needed}, PREFIXES, [host()], cluster=True)
    assert (one.id, one.text) == ("missing-value", "driver_licence: it isn't set; set it")


@pytest.mark.parametrize(
    ("name", "severity", "nearest"),
    [
        ("gpushare_memory_unt", "problem", "gpushare_memory_unit"),
        ("gpushare_admision", "problem", "gpushare_admission"),
        ("gpu_kube_config", "problem", "gpu_kubeconfig"),
        ("gpu_maintainance", "problem", "gpu_maintenance"),
        ("preflight_ignores", "problem", "preflight_ignore"),
        ("uninstall_withpods", "problem", "uninstall_with_pods"),
        # The prefix of another role.
        ("gpu_memory_limit", "warning", "gpushare_memory_limit"),
        # Ours alone, and like no other.
        ("gpushare_colour", "warning", ""),
    ],
)
def test_an_unknown_name_is_reported_with_the_nearest_known_one(name: str, severity: str, nearest: str) -> None:
    [one] = examine(OPTIONS, PREFIXES, [host(**{name: 1})], cluster=True)
    assert (one.id, one.severity, one.variable, one.fields["nearest"]) == ("unknown-variable", severity, name, nearest)
    assert not nearest or f"write {nearest}" in one.do


# Of kubespray, DeepOps and others; the names of the last line are only used by other variables.
@pytest.mark.parametrize(
    "variables",
    [
        {"image_arch": "amd64", "image_command_tool": "nerdctl", "image_pull_command": "x", "image_info_command": "x"},
        {"driver_path": "/x", "driver_url": "u", "runtime_class": "x", "scheduler_port": 1, "verify_ssl": True},
        {"gpu_operator_driver_version": "x", "gpu_operator_enabled": True, "gpu_count": 4, "gpu_type": "h100"},
        {"inspect_interval": 5, "toolkit_path": "/x", "maintenance_window": "x", "acceptance_tests": [], "gpu": 1},
        {"gpushare_registry": "r", "gpushare_image": "{{ gpushare_registry }}/gpushare:1"},
        {"driver_versions": {"gpu1": "580"}, "driver_version": "{{ driver_versions[inventory_hostname] }}"},
        {"my_variable": [{"x": "{{ gpushare_images }}"}], "gpushare_images": "r"},
    ],
)
def test_variables_of_others_are_no_finding(variables: dict[str, t.Any]) -> None:
    assert found(host(**variables)) == []


def test_files_that_are_missing_on_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [(id, severity, text)] = found(host(gpu_kubeconfig="reader.kubeconfig"))
    assert (id, severity) == ("missing-file", "problem")
    assert text == (
        f"gpu_kubeconfig: there is no {tmp_path}/reader.kubeconfig; set it to a path on the controller; a relative one "
        f"begins at {tmp_path}"
    )
    assert found(host(gpu_kubeconfig="reader.kubeconfig"), cluster=False) == []
    (tmp_path / "reader.kubeconfig").touch()
    assert found(host(gpu_kubeconfig="reader.kubeconfig")) == []
    packages = {"driver_packages_dir": "/nowhere", "driver_source": "packages"}
    absolute = "driver_packages_dir: there is no directory /nowhere; set it to a path on the controller"
    assert found(host(**packages))[0][2] == absolute
    assert found(host(**{**packages, "driver_source": "repository"})) == []
    assert found(host(driver_runfile="https://example.org/driver.run", driver_source="runfile")) == []
    assert set(SOURCES) <= set(OPTIONS)


def test_the_places_and_the_facts_are_those_of_the_roles() -> None:
    roles = {path.name for path in (ROOT / "roles").iterdir()}
    assert set(specifications.PLACES) <= roles
    files = [yaml.safe_load(path.read_text()) for path in (ROOT / "roles").glob("*/tasks/*.yml")]
    named = {name for file in files for task in items(file) for name in task.get("ansible.builtin.set_fact", ())}
    # ansible-lint wants a role's facts to begin with its name, so that a shared one's name is a variable.
    shared = {
        f"{{{{ {key} }}}}": value
        for path in (ROOT / "roles").glob("*/vars/main.yml")
        for key, value in yaml.safe_load(path.read_text()).items()
        if isinstance(value, str)
    }
    registered = {shared.get(name, name) for name in named}
    assert {name for name in registered if name.startswith(PREFIXES)} <= specifications.FACTS | set(OPTIONS)
    # What nobody sets any more isn't kept.
    assert specifications.FACTS - {"gpu_node"} <= registered
    required = {name for name, option in OPTIONS.items() if option.rules.get("required")}
    assert required == specifications.PASSED


# --------------------------------------------------------------------------- by ansible-playbook

WRONG = {
    "gpushare_memory_unt": 1,
    "gpushare_admission": "denny",
    "gpushare_wait_timeout": "abc",
    "gpu_kubeconfig": "reader.kubeconfig",
    "driver_version": "{{ gpu_node.driver.version }}",
    "gpu_exclude": ["0000:3b:00.0", "3b:0", 1],
}


def play(folder: Path, *words: str, playbook: str = "preflight", **variables: t.Any) -> tuple[int, str]:
    """Run a playbook on machines that can't be reached."""
    (folder / "group_vars").mkdir(exist_ok=True)
    (folder / "group_vars" / "all.yml").write_text(yaml.safe_dump(variables, sort_keys=False))
    machines = {"gpu_nodes": {"hosts": {"gpu1": {}, "gpu2": {}}}, "control_plane": {"hosts": {"cp1": {}}}}
    nowhere = {"ansible_host": "127.0.0.9", "ansible_port": 1, "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": nowhere}, **machines}))
    rc, text = run_playbook(folder, ROOT / "playbooks" / f"{playbook}.yml", "-i", "hosts.yml", *words)
    assert "Traceback" not in text, text
    return rc, text


@pytest.mark.parametrize("playbook", ["preflight", pytest.param("site", marks=pytest.mark.long), "nodes"])
def test_variables_are_reported_once_with_file_and_line_before_any_connection(playbook: str, tmp_path: Path) -> None:
    words = ("-e", "runtime_name=dockr", "-e", "scheduler_mode=statik", "-e", "gpushare_state=absent")
    rc, text = play(tmp_path, *words, playbook=playbook, **WRONG)
    assert rc == 2, text
    joined = " ".join(text.split())
    # Before there is a cluster there may be no kubeconfig.
    kubeconfig = f"gpu_kubeconfig: there is no {tmp_path}/reader.kubeconfig (group_vars/all.yml:4)"
    for words in (
        "gpushare_memory_unt: no role has a variable of this name (group_vars/all.yml:1)",
        "→ write gpushare_memory_unit, or",
        "gpushare_admission: 'denny' isn't one of 'deny', 'warn', 'none' (group_vars/all.yml:2)",
        "gpushare_wait_timeout: 'abc' isn't a whole number (group_vars/all.yml:3)",
        "runtime_name: 'dockr' isn't one of 'auto', 'containerd', 'docker', 'crio', 'k3s', 'rke2' (CLI option '-e')",
        "scheduler_mode: 'statik' isn't one of",
        "driver_version: it isn't known before the run: 'gpu_node' is undefined (group_vars/all.yml:5)",
        "gpu_exclude: '3b:0' is neither a PCI address (0000:3b:00.0), a UUID (GPU-…) or a pattern of a model "
        "(NVIDIA T400*) (group_vars/all.yml:8)",
        "gpu_exclude: 1 is neither a PCI address (0000:3b:00.0), a UUID (GPU-…) or a pattern of a model "
        "(NVIDIA T400*) (group_vars/all.yml:9)",
    ):
        assert joined.count(words) == 1, (words, text)
    turned = "gpushare_state: with 'absent' this run would remove what it is to set up (CLI option '-e')"
    for only_with_cluster in (kubeconfig, turned):
        assert joined.count(only_with_cluster) == (playbook != "nodes"), text
    number = 7 if playbook == "nodes" else 9
    assert f"Problems with variables, listed above: {number}. No machine was connected." in text
    assert "unreachable=1" not in text and "UNREACHABLE" not in text and "Collect the machine" not in text
    # The failure doesn't repeat them.
    assert not [line for line in text.splitlines() if "fatal: " in line and "denny" in line], text
    assert not re.search("changed=[1-9]", text)


def test_variables_of_a_play_that_imports_the_playbook_count_too(tmp_path: Path) -> None:
    outer = [{"import_playbook": "kubegpu.share.preflight", "vars": {"gpushare_placement": "worst"}}]
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(outer))
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": {"gpu1": {}}}}))
    rc, text = run_playbook(tmp_path, "mine.yml", "-i", "hosts.yml")
    assert rc == 2 and "gpushare_placement: 'worst' isn't one of 'binpack', 'spread' (mine.yml:3)" in text, text


def test_a_finding_can_be_ignored_by_its_variable(tmp_path: Path) -> None:
    given = {"gpushare_imags": 1, "gpushare_admision": 1, "preflight_ignore": ["unknown-variable@gpushare_imags"]}
    rc, text = play(tmp_path, **given)
    assert rc == 2 and "Problems with variables, listed above: 1." in text, text
    assert re.search(r"(?m)^ignored  unknown-variable\n +gpushare_imags:", text), text


def test_findings_are_data_for_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [
        {
            "kubegpu.share.preflight_variables": {"gpu_nodes": [], "cluster": False},
            "register": "seen",
        },
        {"ansible.builtin.copy": {"dest": "{{ place }}", "content": "{{ seen | to_json }}", "mode": "0600"}},
    ]
    (tmp_path / "mine.yml").write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    place = tmp_path / "seen.json"
    rc, text = run_playbook(tmp_path, "mine.yml", "-e", f"place={place}", "-e", "gpushare_admission=denny")
    assert rc == 0, text
    [one] = json.loads(place.read_text())["findings"]
    assert (one["id"], one["variable"], one["hosts"], one["severity"]) == (
        "wrong-value",
        "gpushare_admission",
        [],
        "problem",
    )
    assert one["fields"]["value"] == "'denny'" and one["fields"]["nearest"] == "deny"


def test_places_are_left_out_where_ansible_has_no_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "Origin", None)
    monkeypatch.setattr(origin, "VaultedValue", None)
    assert origin.where("x") == "" and not origin.is_vaulted("x")


def test_what_a_role_needs_and_users_dont_set_is_known() -> None:
    """Otherwise every run would be refused, also those that don't use the role."""
    needed = {name for name, option in specifications.options().items() if option.rules.get("required")}
    assert needed == specifications.PASSED
