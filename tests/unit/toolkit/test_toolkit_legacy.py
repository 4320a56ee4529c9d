# SPDX-License-Identifier: GPL-3.0-or-later
"""Stale package sources and replaced packages: removal, kept entries, and restoration."""

from __future__ import annotations

import json

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import legacy, legacy_apply
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.legacy import (
    clean,
    named_nowhere,
    observe_record,
    observe_sources,
)
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.legacy_apply import installed
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.module import reconcile
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem, killed_at_every_step
from toolkit_kit import add_coreutils

LISTS = "/etc/apt/sources.list.d"
NV = "https://nvidia.github.io"

DOCKER_LIST = f"""deb {NV}/libnvidia-container/stable/ubuntu18.04/$(ARCH) /
#deb {NV}/libnvidia-container/experimental/ubuntu18.04/$(ARCH) /
deb {NV}/nvidia-container-runtime/stable/ubuntu18.04/$(ARCH) /
deb {NV}/nvidia-docker/ubuntu18.04/$(ARCH) /
"""
KEY = "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
TOOLKIT_LIST = f"deb [signed-by={KEY} arch=amd64] {NV}/libnvidia-container/stable/deb/$(ARCH) /\n"
MIXED = f"""# our own
deb [signed-by=/etc/apt/keyrings/own.asc] http://apt.example.org stable main
# containers with GPUs
deb {NV}/nvidia-docker/debian11/amd64 /
deb-src {NV}/nvidia-docker/debian11/amd64 /
"""
NVIDIA_KEY = "/etc/apt/keyrings/nvidia.asc"
DEB822 = f"""# ours

Types: deb
URIs: http://apt.example.org
Suites: stable
Components: main

# from NVIDIA
Types: deb
URIs: {NV}/libnvidia-container/stable/deb/amd64
Suites: /
Signed-By: {NVIDIA_KEY}

"""
DEB822_TWO = f"""Types: deb
URIs: http://mirror.example.org/a
 {NV}/nvidia-docker/debian11/amd64
 http://mirror.example.org/b
Suites: /
"""
DEB822_ONE = f"Types: deb\r\nURIs: {NV}/nvidia-docker/x http://a.example.org\r\nSuites: /\r\n"
PLAIN = "deb http://deb.example.org stable main\n"
ELSEWHERE = "deb http://nvidia.github.io.example.org/ /\n"
REPO = f"""[libnvidia-container]
name=libnvidia-container
baseurl={NV}/libnvidia-container/stable/centos7/$basearch
repo_gpgcheck=1
gpgcheck=0
enabled=1

[libnvidia-container-experimental]
baseurl={NV}/libnvidia-container/experimental/centos7/$basearch
enabled=0
"""
REPO_MIXED = f"""# kept
[base]
name=Base
baseurl=http://mirror.example.org/base

[nvidia-docker]
# do not touch
baseurl=http://mirror.example.org/nvidia-docker/centos7/x86_64
gpgkey={NV}/nvidia-docker/gpgkey
"""


def foreign(text):
    return "".join(line for line in text.splitlines(keepends=True) if "nvidia" not in line)


@pytest.mark.parametrize(
    ("path", "text", "active", "left", "keyrings"),
    [
        (f"{LISTS}/nvidia-docker.list", DOCKER_LIST, True, None, ()),
        (f"{LISTS}/nvidia-container-toolkit.list", TOOLKIT_LIST, True, None, (KEY,)),
        (f"{LISTS}/x.list", f"# deb {NV}/nvidia-docker/x /\n", False, None, ()),
        (f"{LISTS}/x.list", PLAIN, False, PLAIN, ()),
        (f"{LISTS}/x.list", ELSEWHERE, False, ELSEWHERE, ()),
        ("/etc/apt/sources.list", MIXED, True, foreign(MIXED), ()),
        ("/etc/apt/sources.list", f"deb {NV}/nvidia-docker/debian11/amd64 /\n", True, "", ()),
        (f"{LISTS}/all.sources", DEB822, True, DEB822.partition("Types: deb\nURIs: https")[0], (NVIDIA_KEY,)),
        (f"{LISTS}/two.sources", DEB822_TWO, True, DEB822_TWO.replace(f" {NV}/nvidia-docker/debian11/amd64\n", ""), ()),
        (f"{LISTS}/one.sources", DEB822_ONE, True, DEB822_ONE.replace(f" {NV}/nvidia-docker/x", ""), ()),
        (f"{LISTS}/off.sources", f"Types: deb\nURIs: {NV}/nvidia-docker/x\nSuites: /\nEnabled: no\n", False, None, ()),
        ("/etc/yum.repos.d/nvidia-docker.repo", REPO, True, None, ()),
        ("/etc/yum.repos.d/off.repo", REPO.replace("enabled=1", "enabled=0"), False, None, ()),
        ("/etc/zypp/repos.d/own.repo", REPO_MIXED, True, foreign(REPO_MIXED), ()),
    ],
)  # fmt: skip
def test_stale_entries_are_removed_and_all_others_stay(path, text, active, left, keyrings):
    found = clean(path, text)
    assert (found.active, found.text, found.keyrings) == (active, left, keyrings)
    if active and left is not None:
        assert not clean(path, left).active, "a second time changes nothing"


LINES = st.sampled_from(
    [
        "# a comment",
        "",
        "deb http://deb.example.org/debian stable main",
        "deb [signed-by=/k.gpg arch=amd64] http://deb.example.org/debian sid main  # why",
        f"deb {NV}/libnvidia-container/stable/deb/amd64 /",
        f"deb-src [trusted=yes] {NV}/nvidia-docker/ubuntu20.04/amd64 /",
        "\tdeb   cdrom:[Debian]/ stable main",
        "garbage ][ \x01",
    ]
)


@given(st.lists(LINES), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["a.list", "a.sources", "a.repo"]))
def test_no_foreign_line_is_ever_lost(lines, end, name):
    text = end.join(lines)
    found = clean(f"{LISTS}/{name}", text)
    left = found.text or ""
    if found.text is not None and name == "a.list":
        assert left == foreign(text)
    if not found.active and found.text is not None:
        assert left == text
    assert clean(f"{LISTS}/{name}", left).text in (found.text, None)


def test_a_keyring_of_another_source_stays():
    texts = ["Signed-By: /k/b.gpg\n", "deb [signed-by=/k/a.gpg.old] x /"]
    assert named_nowhere(["/k/a.gpg", "/k/b.gpg"], texts) == ["/k/a.gpg"]


# --------------------------------------------------------------------------- a whole node


class Node(FakeSystem):
    """A node with coreutils and packages; removing nvidia-docker2 renames Docker's file, as rpm does."""

    def __init__(self, files, packages=None, dpkg=True):
        super().__init__(files)
        self.packages = dict(packages or {})
        self.renames = {"nvidia-docker2": ["/etc/docker/daemon.json"]}
        self.folders |= {"/var/lib"}
        if dpkg:
            self.files["/var/lib/dpkg/status"] = ""
        add_coreutils(self)
        self.commands |= {"dpkg-query": self._query, "rpm -q": self._rpm_query, "apt-mark": self._unhold}
        self.commands |= {"rpm -e": self._remove, "apt-get": self._remove}

    def _query(self, argv):
        rows = [f"{'h' if held else 'i'}i \t{n}\t{v}" for n, (v, held) in self.packages.items() if n in argv]
        return Done(1, "\n".join(rows), "")

    def _rpm_query(self, argv):
        rows = [f"{n}\t{v}" for n, (v, _held) in self.packages.items() if n in argv]
        return Done(1, "\n".join([*rows, "package other is not installed"]), "")

    def _unhold(self, argv):
        self.step()
        for name in argv[2:]:
            self.packages[name] = (self.packages[name][0], argv[1] == "hold")
        return Done(0, "", "")

    def _remove(self, argv):
        for name in [name for name in argv if name in self.packages]:
            assert not self.packages[name][1], "held"
            self.step()
            for path in self.renames.get(name, []):
                if path in self.files:
                    self.files[path + ".rpmsave"] = self.files.pop(path)
            self.step()
            del self.packages[name]
        self.step()
        return Done(0, "", "")


DAEMON = '{\n  "log-driver": "local",   "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}\n}\n'
BEFORE = {
    f"{LISTS}/nvidia-docker.list": DOCKER_LIST,
    f"{LISTS}/nvidia-container-toolkit.list": TOOLKIT_LIST,
    "/etc/apt/sources.list": MIXED,
    KEY: "key",
    "/etc/apt/keyrings/own.asc": "own",
    "/etc/docker/daemon.json": DAEMON,
    f"{LISTS}/kubegpu-nvidia-container-toolkit.sources": f"URIs: {NV}/libnvidia-container/stable/deb/amd64/\n",
}
PACKAGES = {"nvidia-docker2": ("2.13.0-1", True), "nvidia-container-toolkit": ("1.13.5-1", False)}
WANT = ("nvidia-docker2",)


def options(remove, state="present"):
    return {"state": state, "files": False, "remove_sources": True, "remove_packages": list(remove)}


def work(remove, check, node):
    """Remove the stale sources and these replaced packages."""
    return reconcile(options(remove), check, node)


def restore(node):
    return reconcile(options((), "absent"), False, node)


def controllers_plan(node):
    """Return the plan that the controller makes from the node's facts."""
    seen = {"sources_stale": observe_sources(node), "toolkit_legacy": observe_record(node)}
    return legacy_apply.make_plan(legacy_apply.options_of(options(WANT)), {**seen, "packages": installed(node, WANT)})


def etc(node):
    return {path: text for path, text in node.files.items() if not path.startswith(("/var/lib/", "/proc"))}


@pytest.mark.parametrize("dpkg", [True, False])
def test_removal_and_restoration(dpkg):
    node = Node(BEFORE, PACKAGES if dpkg else {"nvidia-docker2": ("2.13.0-1", False)}, dpkg)
    done = work(WANT, False, node)
    assert done["changed"] and done["packages"] == {"nvidia-docker2": "2.13.0-1"}
    assert node.files["/etc/docker/daemon.json"] == DAEMON
    assert f"{LISTS}/nvidia-docker.list" not in node.files and KEY not in node.files
    assert "nvidia.github.io" not in node.files["/etc/apt/sources.list"]
    assert f"{LISTS}/kubegpu-nvidia-container-toolkit.sources" in node.files
    assert not [path for path in node.files if path.endswith(".rpmsave") or "/.kubegpu" in path]
    copies = [path for path in node.files if path.startswith(legacy.STORE) and "daemon.json" in path]
    assert not copies and "nvidia-docker2" not in node.packages
    again = work(WANT, False, node)
    assert not again["changed"] and again["packages"] == {"nvidia-docker2": "2.13.0-1"}
    back = restore(node)
    assert back["changed"] and back["packages"] == {"nvidia-docker2": "2.13.0-1"}
    assert etc(node) == BEFORE
    assert not [path for path in node.files if path.startswith("/var/lib/kubegpu-share")]
    assert not restore(node)["changed"]


def test_check_mode_reports_everything_and_changes_nothing():
    node = Node(BEFORE, PACKAGES)
    before = dict(node.files)
    done = work(WANT, True, node)
    assert node.files == before and not node.events
    lists = [f"{LISTS}/nvidia-container-toolkit.list", f"{LISTS}/nvidia-docker.list"]
    there = [one["before_header"] for one in done["diff"]]
    assert there == [KEY, "/etc/apt/sources.list", *lists, "package nvidia-docker2"]
    # The facts of the node don't have keyrings.
    assert [change.header for change in controllers_plan(node).changes] == there[1:]


@pytest.mark.parametrize("dpkg", [True, False])
def test_the_run_after_a_killed_one_finishes(dpkg):
    packages = PACKAGES if dpkg else {"nvidia-docker2": ("2.13.0-1", False)}
    whole = Node(BEFORE, packages, dpkg)
    work(WANT, False, whole)
    left = list(killed_at_every_step(lambda: Node(BEFORE, packages, dpkg), lambda node: work(WANT, False, node), 16))
    for at, node in enumerate(left, 1):
        pending = not controllers_plan(node).empty
        work(WANT, False, node)
        assert etc(node) == etc(whole) and node.packages == whole.packages, at
        assert pending or at >= len(left) - 1, f"killed at {at}: the controller's plan is empty"
        restore(node)
        assert etc(node) == BEFORE, at


def test_killed_while_restoring():
    def replaced():
        node = Node(BEFORE, PACKAGES)
        work(WANT, False, node)
        return node

    for at, node in enumerate(killed_at_every_step(replaced, restore), 1):
        restore(node)
        assert etc(node) == BEFORE, at


def test_a_file_changed_since_is_not_restored():
    node = Node(BEFORE, PACKAGES)
    work(WANT, False, node)
    node.files["/etc/apt/sources.list"] += "deb http://new.example.org stable main\n"
    node.files[f"{LISTS}/nvidia-docker.list"] = "# not again\n"
    restore(node)
    assert "new.example.org" in node.files["/etc/apt/sources.list"]
    assert node.files[f"{LISTS}/nvidia-docker.list"] == "# not again\n"
    assert node.files[f"{LISTS}/nvidia-container-toolkit.list"] == TOOLKIT_LIST


def test_a_keyring_of_a_package_stays():
    node = Node(BEFORE)
    node.commands["dpkg -S"] = Done(0, "cuda-keyring: " + KEY, "")
    work(WANT, False, node)
    assert node.files[KEY] == "key"


@pytest.mark.parametrize("dpkg", [True, False])
def test_a_removal_that_fails_halfway_restores_dockers_file(dpkg):
    packages = {"nvidia-docker2": ("2.13.0-1", dpkg), "other": ("1", dpkg)}
    node = Node(BEFORE, packages, dpkg)
    want = ("nvidia-docker2", "other")

    def half(argv):
        node._remove(["nvidia-docker2"])
        return Done(1, "", "E: dpkg returned an error\n")

    node.commands["apt-get"] = node.commands["rpm -e"] = half
    with pytest.raises(ShareError, match="E: dpkg returned an error"):
        work(want, False, node)
    assert node.files["/etc/docker/daemon.json"] == DAEMON
    assert not [path for path in node.files if path.endswith(".rpmsave")]
    assert node.packages == {"other": ("1", dpkg)}
    node.commands["apt-get"] = node.commands["rpm -e"] = node._remove
    assert work(want, False, node)["changed"] and node.files["/etc/docker/daemon.json"] == DAEMON
    restore(node)
    assert etc(node) == BEFORE


def test_drop_ins_are_only_reported():
    path = "/etc/crio/conf.d/99-nvidia.toml"
    node = Node({path: "[crio]\n"})
    done = work(WANT, False, node)
    assert not done["changed"] and done["drop_ins"] == [path] and node.files[path]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', json.dumps({"schema": 1, "files": 3})])
def test_a_record_of_another_version_is_refused(text):
    node = Node({legacy.RECORD: text})
    with pytest.raises(ShareError, match=r"record\.json wasn't written by this version"):
        restore(node)


def test_an_invalid_package_name_is_refused():
    with pytest.raises(BadInput, match="remove_packages: '-x'"):
        work(["-x"], True, Node({}))
