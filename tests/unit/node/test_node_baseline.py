# SPDX-License-Identifier: GPL-3.0-or-later
"""The baseline: recorded once, never overwritten; and the comparison of a node with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from action_plugins import act
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.action import node_baseline as action
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._node import baseline, baseline_apply
from ansible_collections.kubegpu.share.plugins.module_utils._node.baseline import file_state
from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import observe_baseline
from ansible_collections.kubegpu.share.plugins.module_utils._node.types import PATH, SCHEMA, Baseline
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem, Killed

NODE = {
    "packages": {
        "bash": {"version": "5.2-1", "held": False, "origin": "Debian"},
        "nvidia-container-toolkit": {"version": "1.13.5-1", "held": False, "origin": ""},
        "linux-image-amd64": {"version": "6.1", "held": True, "origin": ""},
    },
    "services": {
        "containerd": {"active": True, "enabled": True},
        "docker": {"active": False, "enabled": False},
        "nvidia-persistenced": {"active": True, "enabled": True},
    },
    "runtimes": {
        "containerd": {"dump": 'version = 2\n  default_runtime_name = "runc"\n'},
        "docker": {"default_runtime": "runc"},
        "crio": None,
        "k3s": {},
    },
    "nouveau": {
        "blacklisted": False,
        "images": [{"path": "/boot/initrd.img-6.1", "nouveau": True, "blacklist": False, "bytes": 1, "newer": True}],
    },
}
FILES = {
    "/etc/docker/daemon.json": '{"log-driver": "local"}\n',
    "/etc/apt/sources.list.d/nvidia-docker.list": "deb https://nvidia.github.io/nvidia-docker/x /\n",
    "/etc/apt/sources.list": "deb http://user:secret@deb.example.org stable main\n",
    "/etc/modprobe.d/mine.conf": "options snd x=1\n",
}


def before():
    return baseline.snapshot(NODE, FILES)


def changed(**sections):
    after = copy.deepcopy(before())
    for section, values in sections.items():
        for name, value in values.items():
            if value is None:
                after[section].pop(name)
            else:
                after[section][name] = value
    return after


def package(version, held=False):
    return {"version": version, "held": held}


DAEMON, LIST = "/etc/docker/daemon.json", "/etc/apt/sources.list.d/nvidia-docker.list"
TOOLKIT, PERSISTENCED = "nvidia-container-toolkit", "nvidia-persistenced"
IMAGE = "/boot/initrd.img-6.1"


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ({}, []),
        ({"packages": {"libnvidia-container1": package("1.20.1-1")}}, [("package:libnvidia-container1", True)]),
        ({"packages": {"libcuda1": package("1")}}, [("package:libcuda1", True)]),
        ({"packages": {"htop": package("3")}}, [("package:htop", False)]),
        ({"packages": {"bash": None}}, [("package:bash", False)]),
        ({"packages": {"bash": package("5.2-2")}}, [("package:bash", False)]),
        ({"packages": {"nvidia-container-toolkit": None}}, [("package:nvidia-container-toolkit", True)]),
        ({"packages": {"nvidia-container-toolkit": package("1.20.1-1")}}, [("package:nvidia-container-toolkit", True)]),
        ({"packages": {TOOLKIT: package("1.13.5-1", True)}}, [(f"hold:{TOOLKIT}", True)]),
        ({"packages": {"linux-image-amd64": package("6.1")}}, [("hold:linux-image-amd64", False)]),
        (
            {"files": {"/etc/apt/sources.list.d/kubegpu-cuda.sources": file_state("/x/kubegpu-cuda.sources", "")}},
            [("file:/etc/apt/sources.list.d/kubegpu-cuda.sources", True)],
        ),
        ({"files": {"/etc/o.conf": file_state("/etc/o.conf", "blacklist nouveau")}}, [("file:/etc/o.conf", True)]),
        ({"files": {"/etc/apt/x.list": file_state("/etc/apt/x.list", "deb x")}}, [("file:/etc/apt/x.list", False)]),
        ({"files": {LIST: None}}, [(f"file:{LIST}", True)]),
        ({"files": {"/etc/modprobe.d/mine.conf": None}}, [("file:/etc/modprobe.d/mine.conf", False)]),
        ({"files": {DAEMON: file_state(DAEMON, '{"runtimes": {"nvidia": {}}}')}}, [(f"file:{DAEMON}", True)]),
        ({"files": {DAEMON: file_state(DAEMON, '{"log-driver": "journald"}')}}, [(f"file:{DAEMON}", False)]),
        ({"files": {LIST: file_state(LIST, "# empty")}}, [(f"file:{LIST}", True)]),
        ({"runtimes": {"containerd": "nvidia"}}, [("runtime:containerd", True)]),
        ({"runtimes": {"containerd": "crun"}}, [("runtime:containerd", False)]),
        ({"runtimes": {"containerd": ""}}, []),
        ({"runtimes": {"containerd": None}}, []),
        ({"services": {"containerd": {"active": False, "enabled": True}}}, [("service:containerd", True)]),
        ({"services": {"docker": {"active": True, "enabled": True}}}, [("service:docker", False)]),
        ({"services": {PERSISTENCED: {"active": False, "enabled": False}}}, [(f"service:{PERSISTENCED}", True)] * 2),
        ({"services": {"nvidia-persistenced": None}}, []),
        ({"nouveau": {"blacklisted": True}}, [("nouveau", True)]),
        ({"nouveau": {"images": {IMAGE: {"nouveau": False, "blacklist": True}}}}, [(f"image:{IMAGE}", True)]),
        ({"nouveau": {"images": {IMAGE: {"nouveau": None, "blacklist": None}}}}, []),
        ({"nouveau": {"images": {"/boot/initrd.img-6.9": {"nouveau": True, "blacklist": True}}}}, []),
    ],
)  # fmt: skip
def test_comparison(after, found):
    assert [(one.id, one.ours) for one in baseline.compare(before(), changed(**after))] == found


@given(st.lists(st.sampled_from(["packages", "files", "runtimes", "services"]), unique=True), st.integers(0, 3))
def test_every_removal_is_a_difference_and_nothing_else(sections, at):
    after = copy.deepcopy(before())
    gone = []
    for section in sections:
        names = sorted(after[section])
        name = names[at % len(names)]
        del after[section][name]
        gone.append(f"{section[:-1]}:{name}")
    found = [one.id for one in baseline.compare(before(), after)]
    assert sorted(found) == sorted(one for one in gone if one.startswith(("package:", "file:")))
    ours = [one.ours for one in baseline.compare(before(), after)]
    assert ours == sorted(ours, reverse=True), "ours come first"


def test_an_accepted_difference_is_a_note():
    after = changed(packages={"nvidia-container-toolkit": package("1.20.1-1"), "htop": package("3")})
    kept = Baseline("2026-01-01", before())
    assert baseline.evaluate(kept, after, []).problems == (
        "package:nvidia-container-toolkit: 1.13.5-1 before, 1.20.1-1 now",
    )
    verdict = baseline.evaluate(kept, after, ["package:nvidia-container-toolkit"])
    assert verdict.problems == () and len(verdict.notes) == 2


def test_a_baseline_recorded_too_late_compares_nothing():
    late = Baseline("2026", before(), ("/etc/apt/x/kubegpu-a",))
    found = baseline.evaluate(late, changed(packages={"bash": None}), [])
    assert not found.problems and "kubegpu-a" in found.notes[0] and "can't be compared" in found.notes[0]


# --------------------------------------------------------------------------- on a node


@pytest.fixture
def node(monkeypatch):
    """A node whose facts are NODE and whose directories hold FILES."""
    machine = FakeSystem(FILES, dict.fromkeys(("mkdir", "chmod", "rmdir"), Done(0, "", "")))
    machine.commands["date"] = Done(0, "2026-01-02T03:04:05Z\n", "")
    machine.node = copy.deepcopy(NODE)

    def observed(system, images, packages):
        assert packages == ("*",)
        return machine.node

    monkeypatch.setattr(baseline_apply.facts, "observe", observed)
    return machine


def test_recorded_once_for_root_only_and_without_secrets(node):
    assert baseline_apply.ensure("present", [], False, node)["changed"]
    text = node.files[PATH]
    assert node.modes == {PATH: 0o600}
    assert "mkdir -p -m 0700 /var/lib/kubegpu-share" in node.ran and "chmod 0700 /var/lib/kubegpu-share" in node.ran
    assert "secret" not in text and json.loads(text)["schema"] == SCHEMA
    node.node["packages"] = {}
    assert not baseline_apply.ensure("present", [], False, node)["changed"]
    assert node.files[PATH] == text
    assert observe_baseline(node) == {"path": PATH, "taken": "2026-01-02T03:04:05Z", "own_files": [], "error": ""}
    assert observe_baseline(node, content=True)["snapshot"] == before()


def test_records_that_outlive_the_uninstall_are_a_difference(node):
    baseline_apply.ensure("present", [], False, node)
    node.files["/var/lib/kubegpu-share/docker-was.json"] = "{}"
    with pytest.raises(NotInEffect, match=r"file:/var/lib/kubegpu-share/docker-was\.json: absent before, present now"):
        baseline_apply.ensure("compared", [], False, node)


def test_check_mode_shows_the_file_and_writes_nothing(node):
    done = baseline_apply.ensure("present", [], True, node)
    assert done["changed"] and done["diff"][0]["after_header"] == PATH and PATH not in node.files


def test_a_node_of_an_older_version_is_noted(node):
    node.files["/etc/apt/sources.list.d/kubegpu-cuda.sources"] = "x"
    node.files["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"] = "x"
    baseline_apply.ensure("present", [], False, node)
    marks = ["/etc/apt/sources.list.d/kubegpu-cuda.sources", "/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"]
    assert observe_baseline(node)["own_files"] == marks
    done = baseline_apply.ensure("compared", [], False, node)
    assert done["changed"] and "were there already" in done["notes"][0] and PATH not in node.files
    assert not observe_baseline(node)
    done = baseline_apply.ensure("compared", [], False, node)
    assert done == {"changed": False, "diff": [], "notes": [baseline.NO_BASELINE]}


def test_killed_while_it_is_recorded(node):
    node.kill_at = 1
    with pytest.raises(Killed):
        baseline_apply.ensure("present", [], False, node)
    assert PATH not in node.files
    assert baseline_apply.ensure("present", [], False, node)["changed"] and observe_baseline(node)["taken"]


def test_a_failed_comparison_keeps_the_baseline_and_a_clean_one_removes_it(node):
    baseline_apply.ensure("present", [], False, node)
    node.node["packages"]["libcuda1"] = {"version": "580", "held": True}
    node.node["packages"]["htop"] = {"version": "3", "held": False}
    with pytest.raises(NotInEffect, match="package:libcuda1: not installed before, 580 now") as error:
        baseline_apply.ensure("compared", [], False, node)
    assert len(error.value.details["problems"]) == 1 and len(error.value.details["notes"]) == 1
    assert PATH in node.files
    assert baseline_apply.ensure("compared", [], True, node)["changed"], "check mode reports what it would remove"
    assert PATH in node.files
    done = baseline_apply.ensure("compared", ["package:libcuda1"], False, node)
    assert done["changed"] and len(done["notes"]) == 2 and PATH not in node.files


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "snapshot": {}}', '{"schema": 1}'])
def test_an_unreadable_baseline_is_never_overwritten_nor_compared(node, text):
    node.files[PATH] = text
    assert not baseline_apply.ensure("present", [], False, node)["changed"]
    assert node.files[PATH] == text
    assert (
        "can't be read" in observe_baseline(node)["error"] and observe_baseline(node, content=True)["snapshot"] is None
    )
    with pytest.raises(ShareError, match="move the file away to go on"):
        baseline_apply.ensure("compared", [], False, node)
    baseline_apply.ensure("absent", [], False, node)
    assert PATH not in node.files


def test_files_that_cant_be_read_are_recorded():
    class Broken(FakeSystem):
        def read(self, path):
            if path == DAEMON:
                raise ShareError(f"{path} can't be read: Input/output error")
            return super().read(path)

    units = {"/etc/systemd/system/containerd.service.d/x.conf": "[Service]\n", "/etc/systemd/system/other.service": ""}
    found = baseline_apply.files(Broken({**FILES, **units, "/etc/apt/sources.list.d/sub/x": "", "/etc/ssl/x": ""}))
    expected = {*FILES, "/etc/systemd/system/containerd.service.d/x.conf"}
    assert set(found) == expected and "Input/output" in found[DAEMON]


# --------------------------------------------------------------------------- on the controller


@pytest.mark.parametrize(
    ("args", "kept", "runs"),
    [
        ({}, None, True),
        ({}, {"taken": "2026"}, False),
        ({"state": "compared"}, None, False),
        ({"state": "compared"}, {"taken": "2026"}, True),
        ({"state": "absent"}, None, False),
    ],
)
def test_without_anything_to_do_nothing_is_executed(args, kept, runs, monkeypatch):
    result, executed = act(action, {**args, "observed": {"baseline": kept}}, monkeypatch)
    assert bool(executed) == runs
    if not runs:
        assert result["changed"] is False and bool(result["notes"]) == (args.get("state") == "compared")


def test_facts_without_the_section_execute_the_module(monkeypatch):
    assert act(action, {"observed": {"packages": {}}}, monkeypatch)[1] == [{}]


@pytest.mark.parametrize(
    ("kept", "facts"),
    [
        (None, (False, {}, [], [])),
        ({"taken": "", "own_files": ["/x/kubegpu-a"], "error": "", "snapshot": before()}, (False, {}, [], [])),
        (
            {"taken": "2026", "own_files": [], "error": "", "snapshot": before()},
            (
                True,
                {"bash": "5.2-1", "nvidia-container-toolkit": "1.13.5-1", "linux-image-amd64": "6.1"},
                ["linux-image-amd64"],
                list(FILES),
            ),
        ),
    ],
)
def test_facts_that_the_role_sets(kept, facts):
    role = Path(__file__).resolve().parents[3] / "roles" / "node_baseline"
    values = yaml.safe_load((role / "vars" / "main.yml").read_text())
    tasks = yaml.safe_load((role / "tasks" / "load.yml").read_text())
    # As Ansible has them: what it is given, and what is written in templates.
    variables = {name: trust_as_template(text) for name, text in values.items()}
    variables["__node_baseline_read"] = {"gpu_node": {"baseline": kept}}
    templar = Templar(loader=DataLoader(), variables=variables)
    found = {
        name: templar.template(trust_as_template(text)) for name, text in tasks[-1]["ansible.builtin.set_fact"].items()
    }
    assert tuple(found.values()) == facts
    assert list(found) == ["node_baseline_known", "node_baseline_packages", "node_baseline_held", "node_baseline_files"]
