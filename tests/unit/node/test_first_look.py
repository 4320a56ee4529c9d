# SPDX-License-Identifier: GPL-3.0-or-later
"""The first look: kept once and whole, never overwritten; and what a comparison with it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.action import first_look as action
from ansible_collections.kubegpu.share.plugins.module_utils import _first_look as look
from ansible_collections.kubegpu.share.plugins.module_utils import _first_look_apply as apply
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._first_look_observe import observe
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem, Killed
from test_node_actions import act

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
    return look.reduce(NODE, FILES)


def changed(**sections):
    after = copy.deepcopy(before())
    for section, values in sections.items():
        for name, value in values.items():
            if value is None:
                after[section].pop(name)
            else:
                after[section][name] = value
    return after


def entry(path, text):
    return look.file_entry(path, text)


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
            {"files": {"/etc/apt/sources.list.d/kubegpu-cuda.sources": entry("/x/kubegpu-cuda.sources", "")}},
            [("file:/etc/apt/sources.list.d/kubegpu-cuda.sources", True)],
        ),
        ({"files": {"/etc/o.conf": entry("/etc/o.conf", "blacklist nouveau")}}, [("file:/etc/o.conf", True)]),
        ({"files": {"/etc/apt/x.list": entry("/etc/apt/x.list", "deb x")}}, [("file:/etc/apt/x.list", False)]),
        ({"files": {LIST: None}}, [(f"file:{LIST}", True)]),
        ({"files": {"/etc/modprobe.d/mine.conf": None}}, [("file:/etc/modprobe.d/mine.conf", False)]),
        ({"files": {DAEMON: entry(DAEMON, '{"runtimes": {"nvidia": {}}}')}}, [(f"file:{DAEMON}", True)]),
        ({"files": {DAEMON: entry(DAEMON, '{"log-driver": "journald"}')}}, [(f"file:{DAEMON}", False)]),
        ({"files": {LIST: entry(LIST, "# empty")}}, [(f"file:{LIST}", True)]),
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
    assert [(one.id, one.ours) for one in look.compare(before(), changed(**after))] == found


@given(st.lists(st.sampled_from(["packages", "files", "runtimes", "services"]), unique=True), st.integers(0, 3))
def test_every_change_is_told_and_nothing_else(sections, at):
    after = copy.deepcopy(before())
    gone = []
    for section in sections:
        names = sorted(after[section])
        name = names[at % len(names)]
        del after[section][name]
        gone.append(f"{section[:-1]}:{name}")
    told = [one.id for one in look.compare(before(), after)]
    assert sorted(told) == sorted(one for one in gone if one.startswith(("package:", "file:")))
    ours = [one.ours for one in look.compare(before(), after)]
    assert ours == sorted(ours, reverse=True), "ours come first"


def test_what_is_accepted_is_told_and_no_failure():
    after = changed(packages={"nvidia-container-toolkit": package("1.20.1-1"), "htop": package("3")})
    kept = look.Look("2026-01-01", before())
    assert look.judge(kept, after, []).problems == (
        "package:nvidia-container-toolkit: 1.20.1-1 is installed and 1.13.5-1 was",
    )
    verdict = look.judge(kept, after, ["package:nvidia-container-toolkit"])
    assert verdict.problems == () and len(verdict.notes) == 2


def test_a_look_that_wasn_t_the_first_compares_nothing():
    verdict = look.judge(look.Look("2026", before(), ("/etc/apt/x/kubegpu-a",)), changed(packages={"bash": None}), [])
    assert not verdict.problems and "kubegpu-a" in verdict.notes[0] and "can't be compared" in verdict.notes[0]


# --------------------------------------------------------------------------- on a node


@pytest.fixture
def node(monkeypatch):
    """A node whose observation is NODE, and whose folders hold FILES."""
    machine = FakeSystem(FILES, {"mkdir": Done(0, "", ""), "chmod": Done(0, "", ""), "rmdir": Done(0, "", "")})
    machine.commands["date"] = Done(0, "2026-01-02T03:04:05Z\n", "")
    machine.modes = {}
    write = machine.write

    def keep_mode(path, text, mode=0o644):
        write(path, text, mode)
        machine.modes[path] = mode

    machine.write = keep_mode
    machine.node = copy.deepcopy(NODE)

    def observed(system, images, packages):
        assert packages == ("*",)
        return machine.node

    monkeypatch.setattr(apply._node_info, "observe", observed)
    return machine


def test_kept_once_for_root_alone_and_without_secrets(node):
    assert apply.work("present", [], False, node)["changed"]
    text = node.files[look.PATH]
    assert node.modes == {look.PATH: 0o600}
    assert "mkdir -p -m 0700 /var/lib/kubegpu-share" in node.ran and "chmod 0700 /var/lib/kubegpu-share" in node.ran
    assert "secret" not in text and json.loads(text)["schema"] == look.SCHEMA
    node.node["packages"] = {}
    assert not apply.work("present", [], False, node)["changed"]
    assert node.files[look.PATH] == text
    assert observe(node) == {"path": look.PATH, "taken": "2026-01-02T03:04:05Z", "marks": [], "error": ""}
    assert observe(node, content=True)["seen"] == before()


def test_records_that_outlive_the_uninstall_are_a_difference(node):
    apply.work("present", [], False, node)
    node.files["/var/lib/kubegpu-share/docker-was.json"] = "{}"
    with pytest.raises(NotInEffect, match=r"file:/var/lib/kubegpu-share/docker-was\.json: it is there and wasn't"):
        apply.work("compared", [], False, node)


def test_check_mode_shows_the_file_and_writes_nothing(node):
    done = apply.work("present", [], True, node)
    assert done["changed"] and done["diff"][0]["after_header"] == look.PATH and look.PATH not in node.files


def test_a_node_of_an_older_version_says_so(node):
    node.files["/etc/apt/sources.list.d/kubegpu-cuda.sources"] = "x"
    node.files["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"] = "x"
    apply.work("present", [], False, node)
    marks = ["/etc/apt/sources.list.d/kubegpu-cuda.sources", "/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"]
    assert observe(node)["marks"] == marks
    done = apply.work("compared", [], False, node)
    assert done["changed"] and "came after" in done["notes"][0] and look.PATH not in node.files
    assert not observe(node)
    assert apply.work("compared", [], False, node) == {"changed": False, "diff": [], "notes": [look.NO_LOOK]}


def test_killed_while_it_is_kept(node):
    node.kill_at = 1
    with pytest.raises(Killed):
        apply.work("present", [], False, node)
    assert look.PATH not in node.files
    assert apply.work("present", [], False, node)["changed"] and observe(node)["taken"]


def test_comparison_that_fails_keeps_the_look_and_one_that_holds_forgets_it(node):
    apply.work("present", [], False, node)
    node.node["packages"]["libcuda1"] = {"version": "580", "held": True}
    node.node["packages"]["htop"] = {"version": "3", "held": False}
    with pytest.raises(NotInEffect, match="package:libcuda1: 580 is installed and wasn't there") as error:
        apply.work("compared", [], False, node)
    assert len(error.value.details["problems"]) == 1 and len(error.value.details["notes"]) == 1
    assert look.PATH in node.files
    assert apply.work("compared", [], True, node)["changed"], "check mode only says what it would forget"
    assert look.PATH in node.files
    done = apply.work("compared", ["package:libcuda1"], False, node)
    assert done["changed"] and len(done["notes"]) == 2 and look.PATH not in node.files


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "seen": {}}', '{"schema": 1}'])
def test_what_isn_t_ours_is_never_overwritten_and_compares_nothing(node, text):
    node.files[look.PATH] = text
    assert not apply.work("present", [], False, node)["changed"]
    assert node.files[look.PATH] == text
    assert "can't be read" in observe(node)["error"] and observe(node, content=True)["seen"] is None
    with pytest.raises(ShareError, match="move it aside to go on"):
        apply.work("compared", [], False, node)
    apply.work("absent", [], False, node)
    assert look.PATH not in node.files


def test_files_that_can_t_be_read_are_there():
    class Broken(FakeSystem):
        def read(self, path):
            if path == DAEMON:
                raise ShareError(f"{path} can't be read: Input/output error")
            return super().read(path)

    units = {"/etc/systemd/system/containerd.service.d/x.conf": "[Service]\n", "/etc/systemd/system/other.service": ""}
    found = apply.files(Broken({**FILES, **units, "/etc/apt/sources.list.d/sub/x": "", "/etc/ssl/x": ""}))
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
def test_nothing_is_executed_where_nothing_is_to_do(args, kept, runs, monkeypatch):
    result, executed = act(action, {**args, "observed": {"first_look": kept}}, monkeypatch)
    assert bool(executed) == runs
    if not runs:
        assert result["changed"] is False and bool(result["notes"]) == (args.get("state") == "compared")


def test_an_observation_without_the_section_is_no_reason_to_do_nothing(monkeypatch):
    assert act(action, {"observed": {"packages": {}}}, monkeypatch)[1] == [{}]


@pytest.mark.parametrize(
    ("kept", "facts"),
    [
        (None, (False, {}, [], [])),
        ({"taken": "", "marks": ["/x/kubegpu-a"], "error": "", "seen": before()}, (False, {}, [], [])),
        (
            {"taken": "2026", "marks": [], "error": "", "seen": before()},
            (
                True,
                {"bash": "5.2-1", "nvidia-container-toolkit": "1.13.5-1", "linux-image-amd64": "6.1"},
                ["linux-image-amd64"],
                list(FILES),
            ),
        ),
    ],
)
def test_what_the_role_brings_to_mind(kept, facts):
    role = Path(__file__).resolve().parents[3] / "roles" / "first_look"
    values = yaml.safe_load((role / "vars" / "main.yml").read_text())
    tasks = yaml.safe_load((role / "tasks" / "remembered.yml").read_text())
    # As Ansible has them: what it is given, and what is written in templates.
    variables = {name: trust_as_template(text) for name, text in values.items()}
    variables["__first_look_read"] = {"gpu_node": {"first_look": kept}}
    templar = Templar(loader=DataLoader(), variables=variables)
    found = {
        name: templar.template(trust_as_template(text)) for name, text in tasks[-1]["ansible.builtin.set_fact"].items()
    }
    assert tuple(found.values()) == facts
    assert list(found) == ["first_look_known", "first_look_packages", "first_look_held", "first_look_files"]
