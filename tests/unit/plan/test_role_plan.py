# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of the roles, made from their own tasks: what it finds, and that it can read every task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import test_driver_role as driver
import yaml
from ansible.errors import AnsibleError
from ansible_collections.kubegpu.share.plugins.module_utils._core.digest import digest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._packages.plan import with_record
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import stages
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.walk import (
    BLOCK,
    GROUP,
    LATER,
    Undefined,
    Walk,
    action_of,
    listed,
)
from plan_kit import facts, host, planned, planner, walk

ROOT = Path(__file__).resolve().parents[3]
REGISTRY = {"gpushare_image_delivery": "registry", "driver_repo_url": "http://repo.example.org/"}


def tasks_of(entries):
    for entry in entries:
        if "block" in entry:
            assert set(entry) <= BLOCK
            for part in ("block", "rescue", "always"):
                yield from tasks_of(entry.get(part) or [])
        else:
            yield entry


@pytest.mark.parametrize(
    "path", sorted((ROOT / "roles").glob("*/tasks/*.yml")), ids=lambda path: f"{path.parts[-3]}-{path.stem}"
)
def test_every_task_has_keywords_that_the_plan_knows(path):
    for task in tasks_of(yaml.safe_load(path.read_text())):
        assert action_of(task)
        assert set(task.get("module_defaults") or {}) <= {GROUP}
        assert set(task.get("loop_control") or {}) <= {"label", "loop_var"}


def plays_of(name):
    """The plays of a playbook and of those that it imports, in their order."""
    found = []
    for play in yaml.safe_load((ROOT / "playbooks" / f"{name}.yml").read_text()):
        imported = play.get("ansible.builtin.import_playbook")
        found += plays_of(imported.removesuffix(".yml")) if imported else [play]
    return found


def test_the_stages_are_the_plays_of_the_playbooks():
    plays = plays_of("site")
    named = {}
    for play in plays:
        for stage in stages.STAGES:
            pattern = (
                f"groups['{stages.MAINTENANCE}']" if stage.name == "maintenance" else f"plan.patterns.{stage.name} "
            )
            if pattern in str(play.get("hosts")):
                named[stage.name] = play
    assert list(named) == [stage.name for stage in stages.STAGES]
    for stage in stages.STAGES:
        play = named[stage.name]
        entries = []
        assert "roles" not in play, "Ansible would read the role's files also where no host is in the play"
        for task in [*play["tasks"], *play.get("post_tasks", [])]:
            included = task["ansible.builtin.include_role"]
            name, tasks = included["name"].rpartition(".")[2], included.get("tasks_from", "main")
            entries.append(stages.Entry(name, task.get("vars", {}), task.get("when", ""), tasks))
        assert tuple(entries) == stage.entries
        assert (play.get("serial") == 1) == stage.serial
        if not stage.serial:
            assert f"default('{':'.join(stage.groups) or stages.LOCALHOST}')" in play["hosts"]


def steps(found):
    return [(step["stage"], step["role"], step["task"]) for step in found["steps"]]


def test_a_fresh_node_is_planned_to_the_end(tmp_path):
    found = planned(host("fresh", gpu_node=facts("debian-12-bare", tmp_path), **REGISTRY))
    by_role = {}
    for step in found["steps"]:
        by_role.setdefault(step["role"], []).extend(step["changes"])
    assert list(by_role) == ["node_baseline", "nouveau", "driver", "toolkit"], found
    assert "package nvidia-driver-cuda" in by_role["driver"] and "package libnvidia-container1" in by_role["toolkit"]
    assert all(step["certain"] for step in found["steps"])
    # The simulated machine has no container runtime: the refusal is that of role runtime.
    assert found["refusal"]["role"] == "runtime" and "no container runtime is installed" in found["refusal"]["reason"]


def test_the_distributions_repositories_inside_come_before_the_driver(tmp_path):
    source = {"name": "debian", "url": "http://files.example.org/packages/apt/debian/", "suites": ["bookworm"]}
    source |= {"components": ["main"], "targets": ["Packages"], "key_sha256": "a" * 64}
    source |= {"key_url": f"{source['url']}repository.asc"}
    variables = {"gpu_node": facts("debian-12-bare", tmp_path), "airgap_distribution_sources": [source], **REGISTRY}
    found = planned(host("fresh", **variables))
    changes = [(step["role"], step["changes"]) for step in found["steps"]]
    assert [role for role, _changes in changes][:4] == ["node_baseline", "airgap", "nouveau", "driver"], found
    assert "/etc/apt/sources.list.d/kubegpu-debian.sources" in changes[1][1]


def test_repositories_of_an_earlier_archive_go_without_a_word_of_them(tmp_path):
    """As after airgap_push.yml with airgap_state absent, and as with a newer archive that lacks them."""
    folder = "/etc/apt/sources.list.d"
    text = "# Written by hand or not.\nTypes: deb\nURIs: http://files.example.org/x/\nSuites: /\n"
    seen = facts("debian-12-bare", tmp_path)
    seen["apt"]["files"] |= {
        f"{folder}/kubegpu-airgap-old.sources": with_record(text, [], (), ("airgap", digest(text))),
        f"{folder}/kubegpu-airgap-changed.sources": with_record(text, [], (), ("airgap", digest("other"))),
        f"{folder}/kubegpu-of-another-set.sources": with_record(text, [], (), ("tools", digest(text))),
    }
    found = planned(host("fresh", gpu_node=seen, **REGISTRY))
    [step] = [step for step in found["steps"] if step["role"] == "airgap"]
    assert step["changes"] == [f"{folder}/kubegpu-airgap-old.sources"], found


def test_with_claims_a_control_plane_has_a_step_only_where_it_runs_a_server(tmp_path):
    given = {"gpushare_image_delivery": "import", "gpushare_image_archive": str(tmp_path / "none.tar")}
    given["gpu_node"] = facts("debian-12-bare", tmp_path)
    found = planned(host("cp1", ("control_plane",), **given))
    assert found["refusal"]["role"] == "image", "the image would be imported there"
    backends = {"parts": {"extender": False, "dra": True}, "gpushare": ["gpu1"], "control_plane_image": False}
    given["others"] = {"localhost": {"gpu_backends": backends}}
    found = planned(host("cp1", ("control_plane",), **given))
    assert (found["steps"], found["refusal"]) == ([], None)
    backends["control_plane_image"] = True
    assert planned(host("cp1", ("control_plane",), **given))["refusal"]["role"] == "image"
    backends["control_plane_image"] = False
    # Nor has a node of another back end.
    assert planned(host("gpu2", ("control_plane",), **given))["refusal"] is None
    # A control plane that has GPUs gets it.
    backends["gpushare"].append("cp1")
    found = planned(host("cp1", ("control_plane", "gpu_nodes"), **given))
    assert found["refusal"]["role"] == "image"


def plan_driver(name):
    return walk_driver(name, driver.HOSTS[name])


def walk_driver(name, variables):
    made = walk(host(name, **variables))
    made.role("driver")
    return made


@pytest.mark.parametrize("name", driver.UNTOUCHED)
def test_the_plan_is_empty_where_the_role_changes_nothing(name):
    made = plan_driver(name)
    assert (made.steps, made.refusal) == ([], None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("external-broken", "has 1 NVIDIA cards on PCI and nvidia-smi lists 0."),
        ("wrong-cards", "has 2 NVIDIA cards on PCI and nvidia-smi lists 1."),
        ("conflict", "has its driver from a .run file: run"),
        ("loaded-never", "Host loaded-never has driver 570.133.20 loaded"),
        ("gentoo", "Host gentoo runs gentoo 2.17, which role driver has no packages for"),
    ],
)
def test_what_the_role_refuses_the_plan_refuses(name, message):
    made = plan_driver(name)
    assert made.refusal is not None and message in made.refusal.reason and made.steps == []


def test_the_plan_of_a_bare_node_is_the_diff_of_check_mode():
    made = plan_driver("fresh")
    [step] = [one for one in made.steps if one.task == driver.INSTALL]
    names = ("nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-open-dkms")
    packages = [f"package {name}" for name in names]
    assert list(step.changes) == ["/etc/apt/keyrings/kubegpu-cuda.asc", *driver.FACTS["apt"]["files"], *packages]


def test_a_node_that_has_to_be_drained_joins_the_group_and_its_maintenance_is_planned():
    drained = plan_driver("loaded-drain")
    assert drained.groups == {"kubegpu_maintenance"} and drained.steps == []
    facts_of_another = driver.host(kernel=driver.OWN_KERNEL, driver=driver.OLD, packages={})
    inside = walk_driver("d", {**facts_of_another, "gpu_maintenance": "drain", "driver_in_maintenance": True})
    assert driver.INSTALL in [step.task for step in inside.steps]


def test_a_persistence_daemon_that_a_killed_run_has_not_restarted_is_a_step_of_the_driver(tmp_path):
    node = facts("ubuntu-24.04-cuda-repo", tmp_path)
    node["driver"].update(persistence=False, persistence_daemon={"enables": False, "masked": False, "files": []})
    found = planned(host("d", gpu_node=node, **REGISTRY))
    assert "Write the persistence daemon's drop-in" in [
        step["task"] for step in found["steps"] if step["stage"] == "driver"
    ]


def test_the_maintenance_of_a_node_is_planned_as_far_as_that_is_possible(tmp_path):
    node = facts("ubuntu-24.04-cuda-repo", tmp_path)
    node["driver"].update(dict.fromkeys(("module_version", "version", "library_version"), "570.133.20"))
    found = planned(host("d", gpu_node=node, gpu_maintenance="drain", maintenance_cluster=False, **REGISTRY))
    assert "kubegpu_maintenance" in found["groups"]
    inside = [(step["task"], step["certain"]) for step in found["steps"] if step["stage"] == "maintenance"]
    assert inside[0] == ("Unload the driver", False) and inside[-1] == (LATER, False)
    assert (driver.INSTALL, True) in inside
    assert driver.INSTALL not in [step["task"] for step in found["steps"] if step["stage"] == "driver"]


# ---------------------------------------------------------------- the interpreter


class Roles:
    """An engine whose files are given, whose conditions are Python and whose templates are the values themselves."""

    def __init__(self, **files):
        self.files = {f"/r/{name.replace('__', '/')}.yml": value for name, value in files.items()}

    def template(self, value, variables):
        if isinstance(value, dict):
            return {key: self.template(one, variables) for key, one in value.items()}
        if isinstance(value, str) and value.startswith("$"):
            if value[1:] not in variables:
                raise Undefined(value[1:])
            return self.template(variables[value[1:]], variables)
        return value

    def holds(self, condition, variables):
        try:
            return bool(eval(condition, {}, dict(variables)))
        except NameError as error:
            raise Undefined(str(error)) from error

    def load(self, path):
        return self.files.get(path)


def run(tasks, predict=lambda module, options, variables: None, host_variables=None, **files):
    made = Walk(Roles(a__tasks__main=tasks, **files), predict, "/r", host_variables or {})
    made.role("a")
    return made


def changed(*names):
    def predict(module, options, variables):
        return {"changed": options.get("name") in names, "diff": [{"after_header": options.get("name")}]}

    return predict


def test_a_module_that_has_to_be_executed_may_change_something_and_ends_what_depends_on_it():
    made = run(
        [
            {"name": "Copy", "ansible.builtin.copy": {}, "register": "copied"},
            {"name": "Needs it", "kubegpu.share.x": {"name": "$path"}, "vars": {"path": "$copied_path"}},
            {"name": "Not reached", "kubegpu.share.x": {}},
        ]
    )
    assert [(step.task, step.certain) for step in made.steps] == [("Copy", False), (LATER, False)]
    assert made.refusal is None


def test_a_read_that_has_to_be_executed_is_no_step():
    made = run([{"name": "Read", "ansible.builtin.command": {}, "changed_when": False}])
    assert made.steps == []


def test_a_failure_ends_the_host_and_is_its_refusal():
    def predict(module, options, variables):
        raise BadInput("file: it isn't there")

    made = run([{"name": "Do", "kubegpu.share.x": {}}, {"name": "After", "kubegpu.share.x": {}}], predict)
    assert made.refusal.result() == {"role": "a", "task": "Do", "reason": "file: it isn't there"}
    assert not made.role("b")
    tolerated = run([{"name": "Do", "kubegpu.share.x": {}, "failed_when": False}], predict)
    assert tolerated.refusal is None


def test_variables_have_ansibles_precedence():
    seen = []

    def predict(module, options, variables):
        seen.append(options)
        return {"changed": False}

    read = {"x": "$x", "y": "$y", "z": "$z", "role": "$role_name"}
    made = Walk(
        Roles(
            a__defaults__main={"x": "default", "y": "default", "z": "default"},
            a__vars__main={"z": "own"},
            a__tasks__main=[
                {"kubegpu.share.m": read},
                {"kubegpu.share.m": read, "vars": {"z": "task"}},
                {"ansible.builtin.set_fact": {"z": "fact"}},
                {"kubegpu.share.m": read, "vars": {"z": "task"}},
                {"ansible.builtin.include_role": {"name": "kubegpu.share.b"}, "vars": {"z": "given"}},
                {"kubegpu.share.m": read},
            ],
            b__defaults__main={"x": "other"},
            b__tasks__main=[{"kubegpu.share.m": read}],
        ),
        predict,
        "/r",
        {"y": "host"},
    )
    made.role("a")
    assert [one["z"] for one in seen] == ["own", "task", "fact", "given", "fact"]
    assert {(one["x"], one["y"]) for one in seen if one["role"] == "a"} == {("default", "host")}
    assert [one["x"] for one in seen if one["role"] == "b"] == ["other"]


def test_conditions_loops_blocks_and_module_defaults():
    made = run(
        [
            {"kubegpu.share.x": {"name": "$item"}, "loop": ["a", "b", "c"], "when": "item != 'b'", "name": "Loop"},
            {"kubegpu.share.x": {"name": "c"}, "loop": "$nowhere", "when": ["False", "nowhere"], "name": "Skipped"},
            {
                "when": "False",
                "block": [{"kubegpu.share.x": {"name": "a"}, "name": "In a block"}],
                "rescue": [{"kubegpu.share.x": {"name": "a"}, "name": "In its rescue"}],
            },
            {
                "block": [{"kubegpu.share.x": {"name": "b"}, "name": "In a block"}],
                "rescue": [{"kubegpu.share.x": {"name": "a"}, "name": "In its rescue"}],
                "always": [{"kubegpu.share.x": {"name": "a"}, "name": "Always"}],
            },
            {
                "module_defaults": {GROUP: {"name": "a"}},
                "block": [
                    {"kubegpu.share.x": {}, "name": "By default"},
                    {"kubegpu.share.of_no_group": {}, "name": "Not of the group"},
                ],
            },
            {"ansible.builtin.include_tasks": "more.yml", "when": "True"},
        ],
        changed("a"),
        **{"..__meta__runtime": {"action_groups": {"cluster": ["x"]}}},
        a__tasks__more=[{"kubegpu.share.x": {"name": "a"}, "name": "Included", "when": "ansible_check_mode"}],
    )
    assert [step.task for step in made.steps] == ["Loop", "Always", "By default", "Included"]


def test_a_change_that_an_earlier_step_makes_is_no_change_of_a_later_one():
    def predict(module, options, variables):
        diff = [{"after_header": "Node a", **one} for one in options["to"]]
        return {"changed": True, "restarts": ["x"], "diff": diff}

    first, second = {"before": "1", "after": "2"}, {"before": "1", "after": "3"}
    made = run(
        [
            {"name": "Label", "kubegpu.share.x": {"to": [first]}},
            {"name": "Again", "kubegpu.share.x": {"to": [first]}},
            {"name": "Another", "kubegpu.share.x": {"to": [first, second]}},
            {"name": "Unknown", "kubegpu.share.x": {"to": [{}]}},
            {"name": "Unknown again", "kubegpu.share.x": {"to": [{}]}},
        ],
        predict,
    )
    assert [step.task for step in made.steps] == ["Label", "Another", "Unknown", "Unknown again"]
    assert all(step.changes == ("Node a",) and step.restarts == ("x",) for step in made.steps)


def test_a_wait_is_a_step_though_nothing_changes():
    made = run(
        [{"name": "Deploy", "kubegpu.share.x": {}}],
        lambda module, options, variables: {"changed": False, "unready": ["DaemonSet a: 1 of 2"]},
    )
    [step] = made.steps
    assert step.waits == ("DaemonSet a: 1 of 2",) and step.changes == ()


def test_one_condition_is_a_list_of_one():
    assert (listed(None), listed("a"), listed(["a"])) == ([], ["a"], ["a"])


def test_preflight_gets_the_refusals_of_all_roles_at_once():
    """A refusal of one role does not hide those of the others."""
    sections = {"toolkit": {"operator": False, "version": None}, "runtimes": {}}
    facts_of_gentoo = {**driver.HOSTS["gentoo"], "gpu_node": {**driver.HOSTS["gentoo"]["gpu_node"], **sections}}
    found = planner(host("g", toolkit_version="latest", **facts_of_gentoo)).validate("g")
    assert [
        refusal for refusal in found["driver_choice"]["refusals"] if "which role driver has no packages for" in refusal
    ]
    assert any("toolkit_version is latest" in one for one in found["toolkit_refused"])
    assert found["runtime_refused"] == ["runtime_name: no container runtime is installed on this node"]


def test_the_variables_of_a_play_that_imports_the_playbook_are_stronger_than_the_inventory_and_weaker_than_extra_ones():
    """They are no host's: the plan of the roles must choose the driver that the roles will choose."""
    inventory = host("a", driver_version="inventory", toolkit_version="extra", gpu_node_name="a")
    made = planner(inventory, driver_version="play", toolkit_version="play", runtime_name="play")
    found = made._variables("a")
    assert found["driver_version"] == "play" and found["runtime_name"] == "play"
    assert found["gpu_node_name"] == "a" and found["hostvars"] is made._known["hostvars"]
    extra = planner(inventory, known={"toolkit_version": "extra"}, toolkit_version="play")
    assert extra._variables("a")["toolkit_version"] == "extra"


def test_an_error_names_its_machine(monkeypatch):
    made = planner(host("gpu7", driver_version="{{ 1 / 0 }}", **driver.HOSTS["fresh"]))
    with pytest.raises(AnsibleError, match="Host gpu7: "):
        made.machine("gpu7")


def test_ansible_playbook_loads_filters_and_the_client_before_it_starts_a_process():
    """It loads the action of the first task itself; what is missing then is compiled in the process of each task."""
    program = """
import sys
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
_AnsibleCollectionFinder(paths=[sys.argv[1]])._install()
from ansible.plugins.loader import action_loader
action_loader.get("kubegpu.share.preflight_variables", class_only=True)
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / ".collections")], capture_output=True, text=True, check=True
    )
    own = "ansible_collections.kubegpu.share.plugins"
    filters = {f"{own}.filter.{path.stem}" for path in (ROOT / "plugins" / "filter").glob("*.py")}
    loaded = set(done.stdout.split())
    assert filters and filters - loaded == set()
    assert {f"{own}.module_utils._kube.direct", f"{own}.module_utils._driver.select"} - loaded == set()
    # Most kubeconfigs don't need it, and each process would inherit its memory.
    assert "kubernetes" not in loaded
    # ansible-core compiles a collection's files at each run, so what only a change needs is left to the change.
    only_changes = {
        f"{own}.module_utils.{name}" for name in ("_host.file_transaction", "_runtime.engine", "_images.build")
    }
    assert only_changes & loaded == set()
    assert not [name for name in loaded if name.startswith(own) and name.endswith(("_apply", "._runtime.plan"))]
    # ansible-core's own have names with a number.
    assert any(name.startswith("ansible.plugins.filter.core_") for name in loaded)
