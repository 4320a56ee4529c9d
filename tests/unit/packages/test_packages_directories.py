# SPDX-License-Identifier: GPL-3.0-or-later
"""Directories of keys, with apt and rpm: only created ones are removed, after a kill at any step too."""

from __future__ import annotations

import contextlib

import pytest
import test_packages_apt
import test_packages_rpm_apply
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from node_fakes import AptMachine, Folders, killed_at_every_step

ELSEWHERE = "http://repo.example.org/tools/"


class Apt(Folders, AptMachine):
    """Debian 11, where no package owns the directory."""

    makes = ("/etc/apt/keyrings",)
    list_of_cuda = test_packages_apt.SOURCES
    key_of_cuda = test_packages_apt.KEYRING

    def __init__(self) -> None:
        super().__init__({test_packages_apt.URL: {"nvidia-driver-cuda": ["1"]}, ELSEWHERE: {"tool": ["1"]}})
        self.commands["dpkg -S"] = Done(1, "", "dpkg-query: no path found matching pattern")

    def fail(self):
        del self.repositories[test_packages_apt.URL]

    def go(self, **changes):
        params = {"packages": ["nvidia-driver-cuda"], **changes}
        return test_packages_apt.go(self, test_packages_apt.options(**params))

    def go_other(self, **changes):
        return self.go(name="tools", repository={"name": "tools", "url": ELSEWHERE}, packages=["tool"], **changes)

    def edited(self):
        return self.files[self.list_of_cuda].replace("Suites: /", "Suites: x/")


class Rpm(Folders, test_packages_rpm_apply.RpmMachine):
    makes = ("/etc/pki", "/etc/pki/rpm-gpg")
    list_of_cuda = "/etc/yum.repos.d/kubegpu-cuda.repo"
    key_of_cuda = "/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"

    def __init__(self) -> None:
        super().__init__("dnf")

    def fail(self):
        self.broken = "Cannot download repomd.xml"

    def go(self, **changes):
        return test_packages_rpm_apply.go(self, **changes)

    def go_other(self, **changes):
        repository = {"name": "tools", "url": ELSEWHERE, "key_url": test_packages_rpm_apply.KEY_URL}
        return self.go(name="tools", repositories=[repository], packages=["nvidia-modprobe"], **changes)

    def edited(self):
        return self.files[self.list_of_cuda].replace("enabled=1", "enabled=0")


# Every step of a kill, on a bare node; with directories that exist already only in the long run.
CASES = [
    pytest.param(
        kind, kind.makes[:count], id=f"{kind.__name__.lower()}-{count}-there", marks=pytest.mark.long if count else ()
    )
    for kind in (Apt, Rpm)
    for count in range(len(kind.makes) + 1)
]


def fresh(kind, there):
    node = kind()
    node.folders.update(there)
    return node


def installed(kind, there):
    node = fresh(kind, there)
    node.go()
    return node


def folders(node):
    return tuple(one for one in node.makes if node.exists(one))


def left(node):
    """Files of ours that aren't empty; a write's temporary file elsewhere is harmless."""
    mine = (path for path, text in node.files.items() if text and "kubegpu" in path.lower())
    return [path for path in mine if not path.endswith("/.kubegpu-begun")]


@pytest.mark.parametrize(("kind", "there"), [case.values for case in CASES])
def test_created_directories_are_removed_and_others_stay(kind, there):
    node = fresh(kind, there)
    node.go()
    node.go()
    node.go(state="absent")
    assert (folders(node), left(node)) == (there, [])


@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize(("kind", "there"), CASES)
def test_killed_installation_is_completed_or_removed(kind, there, completed):
    for node in killed_at_every_step(lambda: fresh(kind, there), kind.go):
        # The roles detect by the list whether they have installed anything.
        assert node.list_of_cuda in node.files or (folders(node), node.key_of_cuda in node.files) == (there, False)
        if completed:
            node.go()
            begun = {path: text for path, text in node.files.items() if "begun" in path}
            assert node.files == {**installed(kind, there).files, **begun}
        node.go(state="absent")
        assert (folders(node), left(node)) == (there, [])


@pytest.mark.parametrize(("kind", "there"), CASES)
def test_killed_removal_is_completed(kind, there):
    for node in killed_at_every_step(lambda: installed(kind, there), lambda one: one.go(state="absent")):
        assert node.list_of_cuda in node.files or (folders(node), node.key_of_cuda in node.files) == (there, False)
        node.go(state="absent")
        assert (folders(node), left(node)) == (there, [])


@pytest.mark.parametrize(("kind", "there"), CASES)
def test_failing_repository_leaves_no_directory(kind, there):
    def broken():
        node = fresh(kind, there)
        node.fail()
        return node

    def failing(node):
        with contextlib.suppress(ShareError):
            node.go()

    node = broken()
    with pytest.raises(ShareError):
        node.go()
    assert folders(node) == there and not {node.list_of_cuda, node.key_of_cuda} & set(node.files)
    for node in killed_at_every_step(broken, failing):
        node.go(state="absent")
        assert (folders(node), left(node)) == (there, [])


@pytest.mark.parametrize("first", ["go", "go_other"])
@pytest.mark.parametrize(("kind", "there"), CASES)
def test_last_of_two_sets_removes_the_directories(kind, there, first):
    node = fresh(kind, there)
    node.go()
    node.go_other()
    second = {"go": "go_other", "go_other": "go"}[first]
    getattr(node, first)(state="absent")
    assert folders(node) == kind.makes
    getattr(node, second)(state="absent")
    assert (folders(node), left(node)) == (there, [])


@pytest.mark.parametrize("kind", [Apt, Rpm])
def test_directories_with_other_files_stay(kind):
    node = installed(kind, ())
    node.files[f"{kind.makes[-1]}/foreign.asc"] = "foreign"
    node.go(state="absent")
    assert folders(node) == kind.makes and node.files[f"{kind.makes[-1]}/foreign.asc"] == "foreign"


@pytest.mark.parametrize("kind", [Apt, Rpm])
def test_record_of_directories_is_no_drift_and_survives_an_edit(kind):
    node = installed(kind, ())
    assert not node.go()["changed"]
    text = node.files[node.list_of_cuda]
    node.files[node.list_of_cuda] = node.edited()
    shown = node.go()["diff"]
    assert "Created" not in str(shown) and node.files[node.list_of_cuda] == text
    node.go(state="absent")
    assert folders(node) == ()


def test_apt_ignores_a_list_whose_key_is_missing():
    for begin, work in (
        (lambda: fresh(Apt, ()), Apt.go),
        (lambda: installed(Apt, ()), lambda one: one.go(state="absent")),
    ):
        for node in killed_at_every_step(begin, work):
            text = node.files.get(Apt.list_of_cuda, "")
            assert not text or Apt.key_of_cuda in node.files or text.endswith("\nEnabled: no\n")


def test_directory_that_belongs_to_a_package_stays():
    # As after the upgrade to Debian 12, whose apt brings it.
    node = installed(Apt, ())
    node.commands["dpkg -S"] = Done(0, "apt: /etc/apt/keyrings\n", "")
    node.go(state="absent")
    assert (folders(node), left(node)) == (Apt.makes, [])
