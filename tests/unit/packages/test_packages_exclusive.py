# SPDX-License-Identifier: GPL-3.0-or-later
"""Repositories that a set has written and that aren't listed any more: they go, unless somebody has changed them."""

from __future__ import annotations

import base64

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import ARMOUR, rpm_names
from node_fakes import AptMachine, Folders, killed_at_every_step
from package_sets import apply, package_set
from test_packages_rpm_apply import RpmMachine

PLACE = "http://files.example.org/"


def key(seed):
    """An armoured key of version 4, as far as rpm's names of keys need it."""
    body = b"\x04" + bytes([seed]) * 20
    packet = b"\x99" + len(body).to_bytes(2, "big") + body
    return f"{ARMOUR[0]}\n\n{base64.b64encode(packet).decode()}\n{ARMOUR[1]}\n"


KEYS = {f"{PLACE}{name}/key.asc": key(seed) for name, seed in (("main", 1), ("updates", 1), ("old", 1), ("other", 2))}


class Apt(Folders, AptMachine):
    makes = ("/etc/apt/keyrings",)
    family, sources, key_file, change = (
        "debian",
        "/etc/apt/sources.list.d/kubegpu-%s.sources",
        "/etc/apt/keyrings/kubegpu-%s.asc",
        "Suites: /",
    )

    def __init__(self) -> None:
        super().__init__({f"{PLACE}{name}/": {"x": ["1"]} for name in ("main", "updates", "old", "other")})
        self.commands["dpkg -S"] = Done(1, "", "dpkg-query: no path found matching pattern")


class Rpm(Folders, RpmMachine):
    makes = ("/etc/pki", "/etc/pki/rpm-gpg")
    family, sources, key_file, change = (
        "redhat",
        "/etc/yum.repos.d/kubegpu-%s.repo",
        "/etc/pki/rpm-gpg/KUBEGPU-%s.asc",
        "enabled=1",
    )

    def __init__(self) -> None:
        super().__init__("dnf")
        self.imported: set[str] = set()

    def _rpm(self, argv):
        """rpm's database of keys, too."""
        if argv[1] == "--import":
            self.imported |= set(rpm_names(self.files[argv[2]]))
        elif argv[1] == "-e":
            self.imported.remove(argv[-1].removeprefix("gpg-pubkey-"))
        elif argv[1] == "-q":
            return Done(0 if argv[-1].removeprefix("gpg-pubkey-") in self.imported else 1, "", "")
        else:
            done = super()._rpm(argv)
            rows = [f"gpg-pubkey\t0\t{name}\t(none)\t1\t(none)\n" for name in sorted(self.imported)]
            return Done(done.rc, done.out + "".join(rows), done.err)
        return Done(0, "", "")


def go(node, *names, state="present", **more):
    rows = [{"name": name, "url": f"{PLACE}{name}/", "key_url": f"{PLACE}{name}/key.asc"} for name in names]
    given = {"name": "airgap", "state": state, "repositories": rows, "exclusive": True, **more}
    return apply(package_set(**given), node, node.family, fetch=lambda url: KEYS[url].encode())


def ours(node):
    """Names of our repositories, as far as anything of them is there."""
    mine = [path for path in node.files if "kubegpu-" in path.lower() and not path.endswith("-begun")]
    return {path.rpartition("/")[2].lower().removeprefix("kubegpu-").rpartition(".")[0] for path in mine}


both = pytest.mark.parametrize("kind", [Apt, Rpm])


@both
def test_what_a_newer_list_lacks_goes_and_the_rest_stays(kind):
    node = kind()
    assert go(node, "old", "main")["changed"] and ours(node) == {"old", "main"}
    assert go(node, "old", "main") == {"changed": False, "diff": [], "left": []}
    main = node.files[node.sources % "main"]
    done = go(node, "main", "other")
    assert [one["before_header"] for one in done["diff"]][:2] == [node.key_file % "old", node.sources % "old"]
    assert (
        ours(node) == {"main", "other"}
        and main.splitlines()[-3:] == node.files[node.sources % "main"].splitlines()[-3:]
    )
    assert not go(node, "main", "other")["changed"]
    # No variable names them any more.
    go(node)
    assert ours(node) == set() and not any(map(node.exists, node.makes))


@both
def test_removal_needs_no_list_and_takes_no_other_sets_repositories(kind):
    node = kind()
    go(node, "main", "old")
    go(node, "other", name="driver", exclusive=False)
    assert not go(node, name="driver", exclusive=False)["changed"] and ours(node) == {"main", "old", "other"}
    assert not go(node, name="toolkit", state="absent")["changed"]
    go(node, state="absent")
    assert ours(node) == {"other"}


@both
def test_what_somebody_has_changed_stays_and_is_named(kind):
    node = kind()
    go(node, "main", "old")
    path = node.sources % "old"
    node.files[path] = node.files[path].replace(node.change, f"{node.change} # mine")
    for state, names in (("present", ["main"]), ("absent", ["main"]), ("absent", [])):
        done = go(node, *names, state=state)
        assert done["left"] == [path] and "old" in ours(node) and node.key_file % "old" in node.files, done
    assert ours(node) == {"old"}


@both
def test_killed_at_any_step_the_next_run_removes_it(kind):
    def begun():
        node = kind()
        go(node, "main", "old")
        return node

    for node in killed_at_every_step(begun, lambda one: go(one, "main", "other")):
        go(node, "main", "other")
        assert ours(node) == {"main", "other"}
        go(node, state="absent")
        assert ours(node) == set()


def test_a_key_that_a_repository_shares_with_one_that_goes_stays_and_goes_with_the_last():
    node = Rpm()
    [shared], [another] = rpm_names(key(1)), rpm_names(key(2))
    go(node, "old", "main")
    go(node, "main", "updates", "other")
    assert node.imported == {shared, another}
    go(node, "other")
    assert node.imported == {another}
    # A repository that comes when the one with its key goes imports it anew, and records that.
    go(node, "old")
    assert node.imported == {shared}
    go(node, "updates")
    assert node.imported == {shared} and f"# Imported: {shared}" in node.files[node.sources % "updates"]
    go(node, state="absent")
    assert node.imported == set()
