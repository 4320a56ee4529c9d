# SPDX-License-Identifier: GPL-3.0-or-later
"""pinned_packages with rpm: options, versions, lock files, facts and plan, for all three package managers."""

from __future__ import annotations

import base64
import hashlib

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.digest import digest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._packages import installed, rpm_locks
from ansible_collections.kubegpu.share.plugins.module_utils._packages import options as signing_key
from ansible_collections.kubegpu.share.plugins.module_utils._packages import plan as repository_record
from ansible_collections.kubegpu.share.plugins.module_utils._packages.paths import MANAGERS
from ansible_collections.kubegpu.share.plugins.module_utils._packages.planner import planner as planner_of
from ansible_collections.kubegpu.share.plugins.module_utils._packages.rpm_apply import replaced
from ansible_collections.kubegpu.share.plugins.module_utils._packages.rpm_locks import Version, compare, matches
from ansible_collections.kubegpu.share.plugins.module_utils._packages.steps import RemovePackage
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem
from package_sets import KEY, headers, lock, package_set, rpm_facts
from package_sets import plan as plan_of

DATABASE = {"/var/lib/rpm/rpmdb.sqlite": ""}


def desired(**changes):
    repository = {"name": "cuda", "url": "http://repo.example.org/x/", "key_text": KEY, **changes.pop("repository", {})}
    params = {"name": "driver", "repositories": [repository], "packages": ["nvidia-open=580.95.05", "dkms"], **changes}
    return package_set(**params)


@pytest.mark.parametrize(
    ("pattern", "version", "yes"),
    [
        ("580.95.05", "3:580.95.05-1.el9", True),
        ("580.95.05", "580.95.05-7.fc39", True),
        ("580.95.05", "3:580.95.055-1.el9", False),
        ("580*", "3:580.95.05-1.el9", True),
        ("580.95.05-1*", "3:580.95.05-1.el9", True),
        ("580.95.05-1*", "3:580.95.05-2.el9", False),
        ("580.95.05-1.el9", "3:580.95.05-1.el9", True),
        ("3:580.95.05", "3:580.95.05-1.el9", True),
        ("2:580.95.05", "3:580.95.05-1.el9", False),
        ("0:1.20.1-1", "1.20.1-1", True),
    ],
)
def test_pattern_compares_only_its_own_parts(pattern, version, yes):
    assert matches(pattern, version) is yes


parts = st.text("0123456789abAB.~^_-", min_size=1, max_size=8).map(lambda text: text.replace("-", "") or "0")


@given(parts, parts, parts)
def test_order_of_versions_is_an_order(one, two, three):
    assert compare(one, one) == 0 and compare(one, two) == -compare(two, one)
    if compare(one, two) <= 0 and compare(two, three) <= 0:
        assert compare(one, three) <= 0


def test_version_keeps_its_parts():
    assert Version.of("3:580.95-1.el9") == ("3", "580.95", "1.el9")
    assert str(Version.of("0:1-1")) == "1-1" and Version.of("1-1").full == "0:1-1"


TOML = MANAGERS["dnf5"].locks
MINE = {
    "dnf": "# Added lock on Mon\nkernel-0:5.14.0-1.el9.*\n!bad-0:1-1.*\n*cuda*-3:12*\n",
    "dnf5": (
        'version = "1.0"\n\n# mine\n[[packages]]\nname = "kernel"\ncomment = "mine"\n[[packages.conditions]]\n'
        'key = "evr"\ncomparator = "="\nvalue = "0:6-1.fc41"\n\n[[packages]]\nname = "acpi"\n[[packages.conditions]]\n'
        'key = "evr"\ncomparator = "<"\nvalue = "4"\n'
    ),
    "zypper": (
        "\ntype: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: kernel-*\n\n"
        "type: patch\nmatch_type: glob\nsolvable_name: x\n\n"
    ),
}


@pytest.mark.parametrize("manager", MINE)
@pytest.mark.parametrize("mine", [True, False])
def test_our_locks_differ_from_a_users_and_leave_those_to_the_byte(manager, mine):
    before = MINE[manager] if mine else ""
    locks = MANAGERS[manager].locks
    made = locks.render(before, lambda _name: True, {"nvidia-open": "3:580.95-1.el9", "libcuda": "1-2"})
    ours = {one.name: one for one in locks.parse(made) if one.ours}
    assert set(ours) == {"nvidia-open", "libcuda"}
    assert ours["nvidia-open"].keeps("nvidia-open", "3:580.95-1.el9")
    assert [one for one in locks.parse(made) if not one.ours] == locks.parse(before)
    if manager != "zypper":
        assert not ours["nvidia-open"].keeps("nvidia-open", "3:590.44-1.el9")
    # One of ours is removed; the other, and all else, stays.
    less = locks.render(made, lambda name: name == "libcuda", {})
    assert [one.name for one in locks.parse(less) if one.ours] == ["nvidia-open"]
    assert locks.render(less, lambda name: name == "nvidia-open", {}).rstrip("\n") in (
        before.rstrip("\n"),
        rpm_locks.TomlLocks.HEAD.rstrip("\n"),
    )
    assert locks.render(made, lambda _name: True, {"nvidia-open": "3:580.95-1.el9", "libcuda": "1-2"}) == made


@pytest.mark.parametrize(
    ("line", "name", "version"),
    [
        ("nvidia-open-3:580.95-1.el9.*", "nvidia-open", "3:580.95-1.el9"),
        ("nvidia-open-580.95-1.el9.x86_64", "nvidia-open", "*:580.95-1.el9"),
        ("*nvidia*-3:580*", "*nvidia*", "3:580*-*"),
        # A name alone locks nothing.
        ("nvidia-open", "nvidia-open", ""),
    ],
)
def test_forms_of_a_line(line, name, version):
    (one,) = MANAGERS["dnf"].locks.parse(line)
    assert (one.name, one.version, one.ours, one.exclude) == (name, version, False, not version)
    assert one.keeps("nvidia-open", "3:580.95-1.el9") is bool(version)


def test_toml_in_dnf5s_own_form_is_read():
    text = (
        'version = "1.0"\n[[packages]]\ncomment = "kubegpu.share"\nconditions = '
        '[{comparator = "=", key = "evr", value = "3:580.95-1.fc41"}]\nname = "nvidia-open"\n'
    )
    (one,) = TOML.parse(text)
    assert one.ours and one.keeps("nvidia-open", "3:580.95-1.fc41")
    assert TOML.render(text, lambda _name: True, {}) == 'version = "1.0"\n'


@pytest.mark.parametrize("text", ['version = "1.0"\npackages = []\n', '[[packages]]\nname = "a"\n'])
def test_toml_that_an_edit_would_change_in_meaning_is_refused(text):
    with pytest.raises(ShareError, match=r"/etc/dnf/versionlock\.toml"):
        TOML.render(text, lambda _name: True, {"b": "1-1"})


# --------------------------------------------------------------------------- observation

ROWS = """kernel-core\t0\t5.14.0-9.el9\tx86_64\t100\tRocky
kernel-core\t0\t5.14.0-10.el9\tx86_64\t200\tRocky
glibc\t0\t2.34-1\tx86_64\t100\tRocky
glibc\t0\t2.34-1\ti686\t100\tRocky
nvidia-open\t3\t580.95-1.el9\tnoarch\t300\t(none)
gpg-pubkey\t0\td42d0685-62589a51\t(none)\t1\t(none)"""


def machine(files, rows=ROWS, links=()):
    system = FakeSystem({**DATABASE, **files}, {"rpm -qa": Done(0, rows, "")})
    system.links.update(links)
    return system


@pytest.mark.parametrize(
    ("files", "links", "name"),
    [
        ({"/usr/bin/dnf": "", "/usr/bin/yum": ""}, {}, "dnf"),
        ({}, {"/usr/bin/dnf": "dnf-3"}, "dnf"),
        ({"/usr/bin/dnf5": ""}, {"/usr/bin/dnf": "dnf5"}, "dnf5"),
        ({"/usr/bin/zypper": "", "/usr/bin/dnf": ""}, {}, "zypper"),
    ],
)
def test_manager_of_a_machine(files, links, name):
    assert installed.observe_rpm(machine(files, links=links))[0]["manager"] == name


def test_machine_without_rpm():
    assert installed.observe_rpm(FakeSystem({"/usr/bin/dnf": ""})) == (None, {})


def test_observation_runs_one_command_and_reads_files():
    system = machine(
        {
            "/usr/bin/dnf": "",
            "/etc/yum.repos.d/kubegpu-cuda.repo": "[kubegpu-cuda]\nbaseurl=http://x/\n",
            "/etc/yum.repos.d/rocky.repo": "# c\n[baseos]\nmirrorlist=http://m/\nenabled=1\n"
            "[extras]\nenabled = 0\nbaseurl = http://e/\n",
            "/etc/pki/rpm-gpg/KUBEGPU-cuda.asc": KEY,
            "/etc/pki/rpm-gpg/RPM-GPG-KEY-rocky": "x",
            "/etc/dnf/plugins/versionlock.conf": "[main]\nenabled = 1\nlocklist = /etc/dnf/mylist\n",
            "/etc/dnf/mylist": "nvidia-open-3:580.95-1.el9.?*\n",
            "/etc/dnf/modules.d/nvidia-driver.module": "[nvidia-driver]\nname=nvidia-driver\nstream=580-open\n"
            "profiles=\nstate=enabled\n",
            "/etc/dnf/modules.d/nodejs.module": "[nodejs]\nname=nodejs\nstream=\nprofiles=\nstate=\n",
        }
    )
    rpm, packages = installed.observe_rpm(system)
    assert len(system.ran) == 1
    assert list(rpm["files"]) == ["/etc/yum.repos.d/kubegpu-cuda.repo"]
    assert list(rpm["keys"]) == ["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"] and rpm["imported"] == ["d42d0685-62589a51"]
    assert [(repository["id"], repository["url"], repository["enabled"]) for repository in rpm["repositories"]] == [
        ("kubegpu-cuda", "http://x/", True),
        ("baseos", "http://m/", True),
        ("extras", "http://e/", False),
    ]
    assert rpm["streams"] == {"nvidia-driver": "580-open"}
    assert rpm["lock_path"] == "/etc/dnf/mylist" and rpm["lock_plugin"] == "enabled"
    assert rpm["duplicates"] == []
    newest = {"version": "5.14.0-10.el9", "held": False, "origin": "Rocky"}
    assert packages["kernel-core"] == {**newest, "versions": ["5.14.0-10.el9", "5.14.0-9.el9"]}
    assert packages["nvidia-open"] == {"version": "3:580.95-1.el9", "held": True, "origin": ""}
    assert "versions" not in packages["glibc"] and "gpg-pubkey" not in packages


def test_duplicates_of_a_killed_transaction_are_detected():
    rows = ROWS + "\nnvidia-open\t3\t590.44-1.el9\tnoarch\t400\tNVIDIA"
    assert installed.observe_rpm(machine({"/usr/bin/dnf": ""}, rows))[0]["duplicates"] == ["nvidia-open"]
    # The package that was installed first is removed, also where it is the newer one.
    assert replaced(installed.parse_rpm(rows), ["nvidia-open"]) == ["nvidia-open-580.95-1.el9.noarch"]
    back = rows.replace("\t400\t", "\t200\t")
    assert replaced(installed.parse_rpm(back), ["nvidia-open"]) == ["nvidia-open-590.44-1.el9.noarch"]


def test_unreadable_list_of_packages_is_an_error():
    system = FakeSystem(
        {**DATABASE, "/usr/bin/dnf": ""}, {"rpm -qa": Done(1, "", "error: cannot open Packages database")}
    )
    with pytest.raises(ShareError, match="rpm can't list the packages: error: cannot open"):
        installed.observe_rpm(system)


@pytest.mark.parametrize(
    ("manager", "folder", "lines"),
    [
        ("dnf", "/etc/yum.repos.d", {"gpgcheck=1", "repo_gpgcheck=0", "skip_if_unavailable=1"}),
        ("zypper", "/etc/zypp/repos.d", {"gpgcheck=1", "repo_gpgcheck=0", "pkg_gpgcheck=1", "autorefresh=1"}),
    ],
)
def test_repository_of_each_manager(manager, folder, lines):
    plan = plan_of(desired(), rpm_facts(manager))
    path = f"{folder}/kubegpu-cuda.repo"
    assert headers(plan)[:2] == ["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc", path]
    text = plan.changes[1].after.splitlines()
    assert lines <= set(text) and "gpgkey=file:///etc/pki/rpm-gpg/KUBEGPU-cuda.asc" in text
    metadata = plan_of(desired(repository={"signed": ["metadata"]}), rpm_facts(manager)).changes[1].after.splitlines()
    assert "repo_gpgcheck=1" in metadata and ("pkg_gpgcheck=0" if manager == "zypper" else "gpgcheck=0") in metadata


def converged(manager="dnf", **changes):
    planner = planner_of(desired(), rpm_facts(manager))
    repository = desired().repositories[0]
    held = [lock("nvidia-open", "3:580.95.05-1.el9"), lock("dkms", "3-1")]
    files = {planner.repository_path(repository): planner.repository_text(repository)}
    usual = {"files": files, "keys": {planner.key_path(repository): digest(KEY)}, "locks": held}
    return rpm_facts(manager, {"nvidia-open": "3:580.95.05-1.el9", "dkms": "3-1"}, **{**usual, **changes})


@pytest.mark.parametrize("manager", list(MANAGERS))
def test_no_drift_is_an_empty_plan(manager):
    assert plan_of(desired(), converged(manager)).empty
    # The record of imported keys is no drift.
    state = converged(manager)
    ((path, text),) = state["rpm"]["files"].items()
    state["rpm"]["files"][path] = repository_record.with_record(text, ["/etc/pki", "/etc/pki/rpm-gpg"], ["a-b"])
    assert repository_record.imported(state["rpm"]["files"][path]) == ("a-b",)
    assert repository_record.created(state["rpm"]["files"][path]) == ("/etc/pki", "/etc/pki/rpm-gpg")
    assert plan_of(desired(), state).empty


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"locks": [lock("nvidia-open", "3:580.95.05-1.el9")]}, ["package dkms"]),
        ({"locks": [lock("nvidia-open", "3:570-1"), lock("dkms", "3-1")]}, ["package nvidia-open"]),
        ({"locks": [lock("nvidia-open", "3:580.95.05-1.el9", False), lock("dk*", "*:3-1", False)]}, []),
        ({"keys": {}}, ["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"]),
        ({"lock_plugin": ""}, ["package python3-dnf-plugin-versionlock"]),
        # Of other packages two versions may be there on purpose.
        ({"duplicates": ["bash"]}, []),
        ({"duplicates": ["dkms", "bash"]}, ["interrupted transaction"]),
    ],
)
def test_each_drift_is_planned(changes, expected):
    assert headers(plan_of(desired(), converged(**changes))) == expected


def test_kernel_package_is_satisfied_by_one_of_its_versions():
    state = rpm_facts(packages={"kernel-devel": "5.14.0-10.el9"})
    state["packages"]["kernel-devel"]["versions"] = ["5.14.0-10.el9", "5.14.0-9.el9"]
    params = {"repositories": [], "hold": False}
    assert plan_of(desired(packages=["kernel-devel=5.14.0-9.el9"], **params), state).empty
    assert headers(plan_of(desired(packages=["kernel-devel=5.14.0-8.el9"], **params), state)) == [
        "package kernel-devel"
    ]
    gone = plan_of(desired(packages=["kernel-devel=5.14.0-9.el9"], state="absent", **params), state)
    assert [change.step for change in gone.changes] == [RemovePackage("kernel-devel", False, ("5.14.0-9.el9",))]


def test_hold_also_locks_and_releases_dependencies():
    state = rpm_facts(
        packages={"nvidia-open": "3:580-1", "nvidia-kmod": "3:580-1", "other": "1-1"},
        locks=[lock("nvidia-open", "3:580-1")],
    )
    params = {"repositories": [], "packages": ["nvidia-open"], "hold_also": ["nvidia-*"]}
    (change,) = plan_of(desired(**params), state).changes
    assert (change.header, change.before, change.after) == ("package nvidia-kmod", "3:580-1\n", "3:580-1, held\n")
    assert planner_of(desired(**params), state).locks() == {"nvidia-open": "3:580-1", "nvidia-kmod": "3:580-1"}
    assert headers(plan_of(desired(**params, hold=False), state)) == ["package nvidia-open"]


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        ({}, {"locks": [lock("nvidia-open", "3:570-1.el9", ours=False)]}, "keeps nvidia-open at 3:570-1.el9; delete"),
        ({}, {"locks": [lock("nvidia-*", "", ours=False)]}, "a lock that isn't ours keeps nvidia-"),
        ({"conflicts": ["xorg-x11-drv-nvidia*"]}, {}, "to remove them: dnf remove xorg-x11-drv-nvidia-cuda"),
        ({}, {"lock_plugin": "disabled"}, "hold: the plugin is disabled in /etc/dnf/plugins/versionlock.conf"),
        (
            {"streams": [{"module": "nvidia-driver", "stream": "open-dkms"}]},
            {"streams": {"nvidia-driver": "580-open"}},
            "streams: module nvidia-driver is at 580-open and dkms of it is installed",
        ),
    ],
)
def test_node_state_that_prevents_the_set_is_refused(options, state, words):
    with pytest.raises(BadInput) as caught:
        plan_of(desired(**options), rpm_facts(packages={"dkms": "3-1", "xorg-x11-drv-nvidia-cuda": "1-1"}, **state))
    assert words in str(caught.value)


@pytest.mark.parametrize("manager", ["dnf5", "zypper"])
def test_streams_are_refused_where_there_are_none(manager):
    with pytest.raises(BadInput, match=f"streams: {manager} has no module streams"):
        plan_of(desired(streams=[{"module": "m", "stream": "s"}]), rpm_facts(manager))


def test_absent_keeps_the_stream_of_kept_packages():
    state = converged(streams={"nvidia-driver": "580-open"})
    options = {"state": "absent", "streams": [{"module": "nvidia-driver", "stream": "580-open"}]}
    assert "module nvidia-driver" in headers(plan_of(desired(**options), state))
    kept = headers(plan_of(desired(**options, keep=["nvidia-*"]), state))
    assert "module nvidia-driver" not in kept and "package nvidia-open" not in kept and "lock of nvidia-open" in kept
    assert plan_of(desired(**options), rpm_facts()).empty
    # The enabled one of several is reset.
    options["streams"] = [{"module": "nvidia-driver", "stream": one} for one in ("580-dkms", "580-open")]
    resets = [change for change in plan_of(desired(**options), state).changes if "module" in change.header]
    assert [change.before for change in resets] == ["580-open\n"]
    mine = converged(streams={"nvidia-driver": "latest"})
    assert "module nvidia-driver" not in headers(plan_of(desired(**options), mine))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repository": {"signed": []}}, "repositories: cuda: signed is empty"),
        ({"packages": ["a="]}, "packages: 'a='"),
        ({"streams": [{"module": "a b", "stream": "x"}]}, "streams: module 'a b'"),
        ({"keep": ["a;b"]}, "keep: 'a;b'"),
    ],
)
def test_invalid_option_of_rpm_is_named(changes, words):
    with pytest.raises(ShareError) as caught:
        plan_of(desired(**changes), rpm_facts())
    assert words in str(caught.value)


ARMOURED = """-----BEGIN PGP PUBLIC KEY BLOCK-----
Version: generated for this test

{body}
=abcd
-----END PGP PUBLIC KEY BLOCK-----
"""


def test_rpms_name_of_a_key():
    packet = b"\x04" + bytes.fromhex("6b018567") + b"\x01" + b"\x00\x10ab" + b"\x00\x03\x05"
    expected = hashlib.sha1(b"\x99" + len(packet).to_bytes(2, "big") + packet).hexdigest()[-8:] + "-6b018567"
    old = bytes([0x80 | 6 << 2, len(packet)]) + packet
    new = bytes([0xC0 | 6, len(packet)]) + packet
    other = bytes([0xC0 | 13, 3]) + b"uid"
    for data in (old, new, other + old, old + other):
        assert signing_key.rpm_names(ARMOURED.format(body=base64.b64encode(data).decode())) == [expected]
    assert signing_key.rpm_names(ARMOURED.format(body="!!")) == [] and signing_key.rpm_names("") == []
