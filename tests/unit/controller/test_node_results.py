# SPDX-License-Identifier: GPL-3.0-or-later
"""What a taken machine returns is no variable on the controller: the real ansible-playbook with its default settings.

The machine's Python adds to each module's result facts, stats and hosts; a fact cache has the same from earlier runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from ansible_runs import BIN, ROOT, ansible
from real_apiserver import own_api_server
from taken_machine import TakenMachine

PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
# add_node.yml begins with site.yml, that with plan.yml, and so on.
PARTS = ("limit", "preflight", "plan", "site")
DEFAULTS = {"ANSIBLE_CONFIG": "empty.cfg", "ANSIBLE_SHOW_CUSTOM_STATS": "1"}
REFUSED = "set inject_facts_as_vars = False in section [defaults] of ansible.cfg"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return TakenMachine(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def taken(machine):
    machine.adds()
    machine.marker.unlink(missing_ok=True)
    return machine


@pytest.fixture(scope="module")
def filled(machine, tmp_path_factory):
    """A fact cache as an earlier play of the user has left it, for the controller, too."""
    folder = tmp_path_factory.mktemp("filled")
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"gpu1": {"ansible_connection": "local"}}}}))
    python = f"ansible_python_interpreter={machine.python}"
    words = ("-i", "hosts.yml", "gpu1", "-m", "ansible.builtin.ping", "-e", python)
    done = ansible(folder, "ansible", *words, **cached(folder / "cache"))
    [made] = (folder / "cache").iterdir()
    assert done.rc == 0 and "Taken" in made.read_text(), done.text
    shutil.copy(made, made.with_name(made.name.replace("gpu1", "localhost")))
    return folder / "cache"


@pytest.fixture
def cache(filled, tmp_path):
    return cached(shutil.copytree(filled, tmp_path / "cache"))


def cached(folder):
    return {"ANSIBLE_CACHE_PLUGIN": "jsonfile", "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(folder)}


@pytest.fixture(scope="module")
def api():
    """A cluster whose node was cordoned for maintenance by an earlier run."""
    with own_api_server() as server:
        marked = {"name": "gpu1", "annotations": {"kubegpu.share/maintenance": "cordoned"}}
        server.request("POST", "/api/v1/nodes", {"metadata": marked})
        yield server


@pytest.fixture
def play(api, tmp_path, taken):
    """Run plays or a playbook on the taken machine ``gpu1``, and on ``gpu2``, whose Python is this one."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    nodes = {"gpu1": {"ansible_python_interpreter": str(taken.python)}, "gpu2": {}}
    given = {"gpu_kubeconfig": "{{ own_kubeconfig }}", "own_kubeconfig": str(api.kubeconfig)}
    given |= {"gpu_maintenance": "never", "verify_grace": 0}
    # As a user has them: in groups, which are weaker than facts.
    groups = {"all": {"vars": local}, "gpu_nodes": {"hosts": nodes, "vars": given}}
    groups["all"]["vars"] |= given
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(groups))
    (tmp_path / "empty.cfg").touch()

    def run(plays, *words, **environment):
        if not isinstance(plays, str):
            (tmp_path / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
            plays = "play.yml"
        program = ("ansible-playbook", "-i", "hosts.yml", plays, *words)
        return ansible(tmp_path, *program, **{**DEFAULTS, **environment})

    return run


def told(name):
    return {"ansible.builtin.debug": {"msg": f"VALUE {{{{ {name} | default('undefined') }}}}"}}


def include(role, **given):
    return {"ansible.builtin.include_role": {"name": f"kubegpu.share.{role}", **given}}


def on_nodes(*tasks, **keywords):
    return {"hosts": "gpu1", "gather_facts": False, "tasks": list(tasks), **keywords}


def test_a_machine_chooses_no_program_that_the_controller_runs(play, taken):
    """Role maintenance reads the cluster on the controller after it has observed the machine."""
    allowed = {"maintenance_allowed": "drain"}
    unfinished = {**include("maintenance", tasks_from="unfinished"), "vars": allowed}
    joined = told("groups.kubegpu_maintenance")
    done = play([on_nodes({"ansible.builtin.ping": {}}, include("node_facts"), unfinished, joined)])
    assert done.rc == 0 and not taken.marker.exists(), done.text
    # Read from the user's cluster.
    assert "VALUE ['gpu1']" in done.text and "returned variables, which it doesn't" in done.text
    # AWX gives stats to the next job of a workflow as variables.
    quiet = play([on_nodes(include("node_facts"))])
    assert quiet.rc == 0 and "taken-stat" not in quiet.text, quiet.text


@pytest.mark.parametrize("playbook", [name for name in PLAYBOOKS if name not in PARTS])
def test_no_playbook_runs_what_a_machine_or_the_fact_cache_says(play, taken, cache, playbook):
    words = ["--check", "--limit", "gpu1,localhost", "-e", "init_gpu_nodes=gpu1=10.0.0.1"]
    done = play(str(ROOT / "playbooks" / f"{playbook}.yml"), *words, **cache)
    assert "PLAY [" in done.text
    assert not taken.marker.exists() and "taken-stat" not in done.text, done.text


@pytest.mark.parametrize("how", ["roles", "import_role", "include_role"])
def test_a_role_in_a_users_play_has_the_users_variables(play, taken, cache, how):
    role = {"name": "kubegpu.share.node_facts"}
    values = [told("gpu_maintenance"), told("ansible_distribution"), told("ansible_facts['distribution']")]
    tasks = [*([] if how == "roles" else [{f"ansible.builtin.{how}": role}]), *values]
    done = play([on_nodes(*tasks, **({"roles": [{"role": role["name"]}]} if how == "roles" else {}))], **cache)
    assert done.rc == 0 and not taken.marker.exists(), done.text
    # What facts are stays readable as what it is.
    assert "VALUE never" in done.text and "VALUE undefined" in done.text and "VALUE Taken" in done.text


def test_neither_another_strategy_nor_a_setting_of_the_users_own_brings_it_back(play, taken):
    tasks = ({"ansible.builtin.ping": {}}, include("node_facts"), {"ansible.builtin.ping": {}}, told("gpu_maintenance"))
    done = play([on_nodes(*tasks, strategy="free")], ANSIBLE_INJECT_FACT_VARS="True")
    assert done.rc == 0 and "VALUE never" in done.text, done.text


def test_facts_of_the_users_own_tasks_stay(play, taken):
    """A warning names results of this collection's tasks only, and their facts don't get into the cache."""
    own = {"ansible.builtin.setup": {"gather_subset": ["!all", "min"]}}
    done = play([on_nodes(include("node_facts"), own, told("ansible_facts['distribution']"))])
    assert "VALUE Taken" in done.text and done.text.count("returned variables") == 1, done.text


def test_a_release_that_is_not_known_is_refused(play, tmp_path):
    """As long as the setting isn't given; then nothing has to be switched off."""
    other = tmp_path / "python"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import ansible.release\nansible.release.__version__ = '2.99.0'\n")
    unknown = {"PYTHONPATH": str(other)}
    facts = {**include("node_facts"), "when": "inventory_hostname == 'gpu1'"}
    # The tasks of other collections' modules, too.
    others = {**include("maintenance", tasks_from="unfinished"), "when": "inventory_hostname == 'gpu2'"}
    both = on_nodes(facts, others, vars={"maintenance_allowed": "drain"})
    done = play([{**both, "hosts": "gpu1,gpu2"}], **unknown)
    assert done.rc != 0
    for host in ("gpu1", "gpu2"):
        assert re.search(rf"fatal: \[{host}.*{re.escape(REFUSED)}", done.text), done.text
    given = play([on_nodes(include("node_facts"))], ANSIBLE_INJECT_FACT_VARS="False", **unknown)
    assert given.rc == 0, given.text


def test_a_tasks_own_process_is_too_late(tmp_path):
    code = f"""
import multiprocessing, sys
sys.path.insert(0, {str(ROOT / "tests/unit")!r})
from ansible.errors import AnsibleError
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
_AnsibleCollectionFinder(paths=[{str(ROOT / ".collections")!r}])._install()

def task():
    from ansible_collections.kubegpu.share.plugins.action import gpu_report
    from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import node_results
    try:
        node_results.require()
    except AnsibleError as error:
        print(error)

one = multiprocessing.get_context("fork").Process(target=task)
one.start()
one.join()
"""
    done = subprocess.run([BIN / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert REFUSED in done.stdout, done.stderr


def own_names(tasks):
    """Yield the collection's names in tasks that ansible-core reads before a play, and whether a role is included."""
    for task in tasks:
        for part in ("block", "rescue", "always"):
            yield from own_names(task.get(part, ()))
        for key, value in task.items():
            role = value.get("name", "") if isinstance(value, dict) and key.endswith("_role") else ""
            if key.startswith("kubegpu.share.") or (role.startswith("kubegpu.share.") and "import" in key):
                yield key, False
            elif role.startswith("kubegpu.share."):
                yield role, True


def plays_of(playbook):
    """The plays of a playbook, with those of the playbooks that it imports."""
    found = []
    for one in yaml.safe_load((ROOT / "playbooks" / f"{playbook}.yml").read_text()):
        imported = one.get("ansible.builtin.import_playbook")
        found += plays_of(imported.removesuffix(".yml")) if imported else [one]
    return found


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_no_template_of_a_playbook_comes_before_facts_are_no_variables(playbook):
    """They aren't from the first name of the collection on that ansible-core reads; an included role, when it runs."""
    plays = plays_of(playbook)
    names = []
    for play in plays:
        roles = [(str(role), False) for role in play.get("roles", ()) if "kubegpu.share." in str(role)]
        tasks = [*play.get("pre_tasks", ()), *play.get("tasks", ()), *play.get("post_tasks", ())]
        names += [*roles, *own_names(tasks)]
    assert names
    if all(included for _name, included in names):
        first = plays[0]["tasks"][0]
        assert set(first) <= {"name", "ansible.builtin.include_role", "vars"} and "{{" not in str(first), first


def test_every_role_has_its_full_name():
    """By which ansible-core imports the package that switches the variables off."""
    for path in [*(ROOT / "playbooks").glob("*.yml"), *(ROOT / "roles").glob("*/tasks/*.yml")]:
        for match in re.finditer(r"(?:_role:\s*\{?\s*name: |- role: )\"?([\w.]+)", path.read_text()):
            assert match[1].startswith("kubegpu.share."), f"{path}: {match[0]}"
