# SPDX-License-Identifier: GPL-3.0-or-later
"""rpm_packages: options, versions, files of locks, what is seen of a node, the plan. Pure, for all four managers."""

from __future__ import annotations

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.kubegpu.share.plugins.module_utils import (
    _key_folders,
    _repository_key,
    _rpm,
    _rpm_locks,
    _rpm_observe,
)
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_apply import replaced
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import Version, compare, matches
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem

KEY = f"{_repository_key.ARMOUR[0]}\n\nabc=\n{_repository_key.ARMOUR[1]}\n"
DATABASE = {"/var/lib/rpm/rpmdb.sqlite": ""}


def wanted(**changes):
    repository = {"name": "cuda", "url": "http://repo.example.org/x/", "key_text": KEY, **changes.pop("repository", {})}
    params = {
        "name": "driver",
        "repositories": [{key: value for key, value in repository.items() if value is not None}],
        "packages": ["nvidia-open=580.95.05", "dkms"],
        **changes,
    }
    result = ArgumentSpecValidator(_rpm.ARGUMENTS).validate(params)
    assert not result.error_messages
    return _rpm.package_set(result.validated_parameters)


def seen(manager="dnf", packages=None, **changes):
    rpm = {
        "manager": manager,
        "files": {},
        "keys": {},
        "imported": [],
        "repositories": [],
        "lock_path": _rpm.MANAGERS[manager].lock_path,
        "lock_plugin": "enabled",
        "locks": [],
        "streams": {},
        "duplicates": [],
        "interrupted": False,
        **changes,
    }
    rows = {name: {"version": version, "held": False, "origin": ""} for name, version in (packages or {}).items()}
    return {"rpm": rpm, "packages": rows}


def lock(name, version, ours=True, exclude=False):
    return _rpm_locks.Lock(name, version, ours, exclude).json()


def headers(plan):
    return [change.header for change in plan.changes]


# --------------------------------------------------------------------------- versions


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
def test_pattern_names_what_it_cares_for(pattern, version, yes):
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


# --------------------------------------------------------------------------- locks

LIST, YUM, TOML, ZYPP = (_rpm.MANAGERS[name].locks for name in ("dnf", "yum", "dnf5", "zypper"))
MINE = {
    "dnf": "# Added lock on Mon\nkernel-0:5.14.0-1.el9.*\n!bad-0:1-1.*\n*cuda*-3:12*\n",
    "yum": "\n# Added locks on Mon\n0:kernel-3.10-1.el7.*\n",
    "dnf5": (
        'version = "1.0"\n\n# hand\n[[packages]]\nname = "kernel"\ncomment = "mine"\n[[packages.conditions]]\n'
        'key = "evr"\ncomparator = "="\nvalue = "0:6-1.fc41"\n\n[[packages]]\nname = "acpi"\n[[packages.conditions]]\n'
        'key = "evr"\ncomparator = "<"\nvalue = "4"\n'
    ),
    "zypper": (
        "\ntype: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: kernel-*\n\n"
        "type: patch\nmatch_type: glob\nsolvable_name: x\n\n"
    ),
}


@pytest.mark.parametrize("manager", MINE)
@pytest.mark.parametrize("text", ["", None])
def test_locks_of_ours_are_told_from_a_users_and_leave_them_to_the_byte(manager, text):
    before = MINE[manager] if text is None else text
    locks = _rpm.MANAGERS[manager].locks
    made = locks.render(before, lambda _name: True, {"nvidia-open": "3:580.95-1.el9", "libcuda": "1-2"})
    ours = {one.name: one for one in locks.parse(made) if one.ours}
    assert set(ours) == {"nvidia-open", "libcuda"}
    assert ours["nvidia-open"].keeps("nvidia-open", "3:580.95-1.el9")
    assert [one for one in locks.parse(made) if not one.ours] == locks.parse(before)
    if manager != "zypper":
        assert not ours["nvidia-open"].keeps("nvidia-open", "3:590.44-1.el9")
    # One of them goes, the other and all else stays.
    less = locks.render(made, lambda name: name == "libcuda", {})
    assert [one.name for one in locks.parse(less) if one.ours] == ["nvidia-open"]
    assert locks.render(less, lambda name: name == "nvidia-open", {}).rstrip("\n") in (
        before.rstrip("\n"),
        _rpm_locks.TomlLocks.HEAD.rstrip("\n"),
    )
    assert locks.render(made, lambda _name: True, {"nvidia-open": "3:580.95-1.el9", "libcuda": "1-2"}) == made


@pytest.mark.parametrize(
    ("locks", "line", "name", "version"),
    [
        (LIST, "nvidia-open-3:580.95-1.el9.*", "nvidia-open", "3:580.95-1.el9"),
        (LIST, "nvidia-open-580.95-1.el9.x86_64", "nvidia-open", "*:580.95-1.el9"),
        (LIST, "*nvidia*-3:580*", "*nvidia*", "3:580*-*"),
        (YUM, "3:nvidia-open-580.95-1.el7.*", "nvidia-open", "3:580.95-1.el7"),
    ],
)
def test_forms_of_a_line(locks, line, name, version):
    (one,) = locks.parse(line)
    assert (one.name, one.version, one.ours, one.exclude) == (name, version, False, False)
    assert one.keeps("nvidia-open", "3:580.95-1.el7" if locks is YUM else "3:580.95-1.el9")


def test_name_without_version_locks_nothing_in_a_list():
    (one,) = LIST.parse("nvidia-driver-cuda")
    assert not one.keeps("nvidia-driver-cuda", "1-1")


def test_toml_as_dnf5_itself_writes_it_is_read():
    text = (
        'version = "1.0"\n[[packages]]\ncomment = "kubegpu.share"\nconditions = '
        '[{comparator = "=", key = "evr", value = "3:580.95-1.fc41"}]\nname = "nvidia-open"\n'
    )
    (one,) = TOML.parse(text)
    assert one.ours and one.keeps("nvidia-open", "3:580.95-1.fc41")
    assert TOML.render(text, lambda _name: True, {}) == 'version = "1.0"\n'


@pytest.mark.parametrize("text", ['version = "1.0"\npackages = []\n', '[[packages]]\nname = "a"\n'])
def test_toml_that_would_come_to_mean_something_else_is_refused(text):
    with pytest.raises(ShareError, match=r"/etc/dnf/versionlock\.toml"):
        TOML.render(text, lambda _name: True, {"b": "1-1"})


# --------------------------------------------------------------------------- what is seen

ROWS = "\n".join(
    [
        "kernel-core\t0\t5.14.0-9.el9\tx86_64\t100\tRocky",
        "kernel-core\t0\t5.14.0-10.el9\tx86_64\t200\tRocky",
        "glibc\t0\t2.34-1\tx86_64\t100\tRocky",
        "glibc\t0\t2.34-1\ti686\t100\tRocky",
        "nvidia-open\t3\t580.95-1.el9\tnoarch\t300\t(none)",
        "gpg-pubkey\t0\td42d0685-62589a51\t(none)\t1\t(none)",
    ]
)


def machine(files, rows=ROWS, links=()):
    system = FakeSystem({**DATABASE, **files}, {"rpm -qa": Done(0, rows, "")})
    system.links.update(links)
    return system


@pytest.mark.parametrize(
    ("files", "links", "name"),
    [
        ({"/usr/bin/dnf": "", "/usr/bin/yum": ""}, {}, "dnf"),
        ({"/usr/bin/yum": ""}, {"/usr/bin/dnf": "dnf-3"}, "dnf"),
        ({"/usr/bin/dnf5": ""}, {"/usr/bin/dnf": "dnf5"}, "dnf5"),
        ({"/usr/bin/yum": ""}, {}, "yum"),
        ({"/usr/bin/zypper": "", "/usr/bin/dnf": ""}, {}, "zypper"),
    ],
)
def test_manager_of_a_machine(files, links, name):
    assert _rpm_observe.observe(machine(files, links=links))["rpm"]["manager"] == name


def test_machine_without_rpm():
    assert _rpm_observe.observe(FakeSystem({"/usr/bin/dnf": ""})) == {"rpm": None, "packages": {}}
    with pytest.raises(BadInput, match="no dnf, yum or zypper"):
        _rpm.plan(wanted(), {"rpm": None, "packages": {}})


def test_look_runs_one_command_and_reads_files_for_the_rest():
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
    found = _rpm_observe.observe(system)
    assert len(system.ran) == 1
    rpm = found["rpm"]
    assert list(rpm["files"]) == ["/etc/yum.repos.d/kubegpu-cuda.repo"]
    assert list(rpm["keys"]) == ["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"] and rpm["imported"] == ["d42d0685-62589a51"]
    assert [(one["id"], one["url"], one["enabled"]) for one in rpm["repositories"]] == [
        ("kubegpu-cuda", "http://x/", True),
        ("baseos", "http://m/", True),
        ("extras", "http://e/", False),
    ]
    assert rpm["streams"] == {"nvidia-driver": "580-open"}
    assert rpm["lock_path"] == "/etc/dnf/mylist" and rpm["lock_plugin"] == "enabled"
    assert rpm["duplicates"] == [] and rpm["interrupted"] is False
    assert found["packages"]["kernel-core"] == {
        "version": "5.14.0-10.el9",
        "held": False,
        "origin": "Rocky",
        "versions": ["5.14.0-10.el9", "5.14.0-9.el9"],
    }
    assert found["packages"]["nvidia-open"] == {"version": "3:580.95-1.el9", "held": True, "origin": ""}
    assert "versions" not in found["packages"]["glibc"] and "gpg-pubkey" not in found["packages"]


def test_what_a_killed_transaction_leaves_is_seen():
    rows = ROWS + "\nnvidia-open\t3\t590.44-1.el9\tnoarch\t400\tNVIDIA"
    found = _rpm_observe.observe(machine({"/usr/bin/dnf": ""}, rows))
    assert found["rpm"]["duplicates"] == ["nvidia-open"] and found["rpm"]["interrupted"]
    # What was there before goes, also where it is the newer one.
    assert replaced(_rpm_observe.parse_query(rows), ["nvidia-open"]) == ["nvidia-open-580.95-1.el9.noarch"]
    back = rows.replace("\t400\t", "\t200\t")
    assert replaced(_rpm_observe.parse_query(back), ["nvidia-open"]) == ["nvidia-open-590.44-1.el9.noarch"]
    left = machine({"/usr/bin/yum": "", "/var/lib/yum/transaction-all.2026-11-21": ""})
    assert _rpm_observe.observe(left)["rpm"]["interrupted"]


def test_unreadable_list_of_packages_is_an_error():
    system = FakeSystem(
        {**DATABASE, "/usr/bin/dnf": ""}, {"rpm -qa": Done(1, "", "error: cannot open Packages database")}
    )
    with pytest.raises(ShareError, match="rpm's list of packages can't be read: error: cannot open"):
        _rpm_observe.observe(system)


# --------------------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("manager", "folder", "lines"),
    [
        ("dnf", "/etc/yum.repos.d", {"gpgcheck=1", "repo_gpgcheck=0", "skip_if_unavailable=1"}),
        ("dnf5", "/etc/yum.repos.d", {"gpgcheck=1", "repo_gpgcheck=0", "skip_if_unavailable=1"}),
        ("yum", "/etc/yum.repos.d", {"gpgcheck=1", "repo_gpgcheck=0", "skip_if_unavailable=1"}),
        ("zypper", "/etc/zypp/repos.d", {"gpgcheck=1", "repo_gpgcheck=0", "pkg_gpgcheck=1", "autorefresh=1"}),
    ],
)
def test_repository_of_each_manager(manager, folder, lines):
    plan = _rpm.plan(wanted(), seen(manager))
    path = f"{folder}/kubegpu-cuda.repo"
    assert headers(plan)[:2] == ["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc", path]
    text = plan.changes[1].after.splitlines()
    assert lines <= set(text) and "gpgkey=file:///etc/pki/rpm-gpg/KUBEGPU-cuda.asc" in text
    metadata = wanted(repository={"signed": ["metadata"]}).repositories[0].text(_rpm.MANAGERS[manager]).splitlines()
    assert "repo_gpgcheck=1" in metadata and ("pkg_gpgcheck=0" if manager == "zypper" else "gpgcheck=0") in metadata


def converged(manager="dnf", **changes):
    one = wanted()
    repository = one.repositories[0]
    held = [lock("nvidia-open", "3:580.95.05-1.el9"), lock("dkms", "3-1")]
    return seen(
        manager,
        {"nvidia-open": "3:580.95.05-1.el9", "dkms": "3-1"},
        **{
            "files": {repository.path(_rpm.MANAGERS[manager]): repository.text(_rpm.MANAGERS[manager])},
            "keys": {repository.key_path: _repository_key.sha256_of(KEY)},
            "locks": held,
            **changes,
        },
    )


@pytest.mark.parametrize("manager", list(_rpm.MANAGERS))
def test_nothing_to_do(manager):
    assert _rpm.plan(wanted(), converged(manager)).empty
    # Which keys rpm got from us is memory, no drift.
    state = converged(manager)
    ((path, text),) = state["rpm"]["files"].items()
    state["rpm"]["files"][path] = _rpm.with_memory(text, ["a-b"], ["/etc/pki", "/etc/pki/rpm-gpg"])
    assert _rpm.imported(state["rpm"]["files"][path]) == ("a-b",)
    assert _key_folders.made(state["rpm"]["files"][path]) == ("/etc/pki", "/etc/pki/rpm-gpg")
    assert _rpm.plan(wanted(), state).empty


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"locks": [lock("nvidia-open", "3:580.95.05-1.el9")]}, ["package dkms"]),
        ({"locks": [lock("nvidia-open", "3:570-1"), lock("dkms", "3-1")]}, ["package nvidia-open"]),
        ({"locks": [lock("nvidia-open", "3:580.95.05-1.el9", False), lock("dk*", "*:3-1", False)]}, []),
        ({"keys": {}}, ["/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"]),
        ({"lock_plugin": ""}, ["package python3-dnf-plugin-versionlock"]),
        ({"duplicates": ["bash"], "interrupted": True}, []),
        ({"duplicates": ["dkms"], "interrupted": True}, ["unfinished transaction"]),
    ],
)
def test_drift(changes, expected):
    assert headers(_rpm.plan(wanted(), converged(**changes))) == expected


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("manager", ["dnf", "dnf5", "zypper"])
def test_packages_of_others_may_be_there_twice(manager, state):
    def lines(*duplicates):
        found = seen(manager, {"dkms": "3-1"}, duplicates=list(duplicates), interrupted=True)
        return [
            one.before
            for one in _rpm.plan(wanted(state=state), found).changes
            if isinstance(one.step, _rpm.FinishTransaction)
        ]

    assert lines("jdk1.8") == []
    assert lines("dkms", "jdk1.8") == ["dkms\n"]
    if state == "present":
        left = _rpm.plan(wanted(), seen("yum", duplicates=["jdk1.8"], interrupted=True))
        assert "unfinished transaction" in headers(left), "it may be yum's own list that says so"


def test_kernel_package_is_there_if_one_of_its_versions_is():
    state = seen(packages={"kernel-devel": "5.14.0-10.el9"})
    state["packages"]["kernel-devel"]["versions"] = ["5.14.0-10.el9", "5.14.0-9.el9"]
    params = {"repositories": [], "hold": False}
    assert _rpm.plan(wanted(packages=["kernel-devel=5.14.0-9.el9"], **params), state).empty
    assert headers(_rpm.plan(wanted(packages=["kernel-devel=5.14.0-8.el9"], **params), state)) == [
        "package kernel-devel"
    ]
    gone = _rpm.plan(wanted(packages=["kernel-devel=5.14.0-9.el9"], state="absent", **params), state)
    assert [change.step for change in gone.changes] == [_rpm.Remove("kernel-devel", ("5.14.0-9.el9",))]


def test_what_came_along_is_held_too_and_released_again():
    state = seen(
        packages={"nvidia-open": "3:580-1", "nvidia-kmod": "3:580-1", "other": "1-1"},
        locks=[lock("nvidia-open", "3:580-1")],
    )
    params = {"repositories": [], "packages": ["nvidia-open"], "hold_also": ["nvidia-*"]}
    plan = _rpm.plan(wanted(**params), state)
    assert [(one.header, one.before, one.after) for one in plan.changes] == [
        ("package nvidia-kmod", "3:580-1\n", "3:580-1, held\n")
    ]
    assert _rpm.lock_changes(wanted(**params), state) == {"nvidia-open": "3:580-1", "nvidia-kmod": "3:580-1"}
    free = _rpm.plan(wanted(**params, hold=False), state)
    assert headers(free) == ["package nvidia-open"]


@pytest.mark.parametrize(
    ("options", "state", "words"),
    [
        ({}, {"locks": [lock("nvidia-open", "3:570-1.el9", ours=False)]}, "keeps nvidia-open at 3:570-1.el9; delete"),
        ({}, {"locks": [lock("nvidia-*", "", ours=False)]}, "a lock that isn't ours keeps nvidia-"),
        ({"conflicts": ["xorg-x11-drv-nvidia*"]}, {}, "to remove: dnf remove xorg-x11-drv-nvidia-cuda"),
        ({}, {"lock_plugin": "disabled"}, "hold: /etc/dnf/plugins/versionlock.conf has the plugin switched off"),
        (
            {"streams": [{"module": "nvidia-driver", "stream": "open-dkms"}]},
            {"streams": {"nvidia-driver": "580-open"}},
            "streams: module nvidia-driver is at 580-open and dkms of it installed",
        ),
    ],
)
def test_what_the_node_has_forbids_the_set(options, state, words):
    with pytest.raises(BadInput) as caught:
        _rpm.plan(wanted(**options), seen(packages={"dkms": "3-1", "xorg-x11-drv-nvidia-cuda": "1-1"}, **state))
    assert words in str(caught.value)


@pytest.mark.parametrize("manager", ["dnf5", "yum", "zypper"])
def test_streams_where_there_are_none(manager):
    with pytest.raises(BadInput, match=f"streams: this node's {manager} knows no streams"):
        _rpm.plan(wanted(streams=[{"module": "m", "stream": "s"}]), seen(manager))


def test_absent_of_what_was_kept_leaves_its_stream():
    state = converged(streams={"nvidia-driver": "580-open"})
    options = {"state": "absent", "streams": [{"module": "nvidia-driver", "stream": "580-open"}]}
    assert "module nvidia-driver" in headers(_rpm.plan(wanted(**options), state))
    kept = headers(_rpm.plan(wanted(**options, keep=["nvidia-*"]), state))
    assert "module nvidia-driver" not in kept and "package nvidia-open" not in kept and "lock of nvidia-open" in kept
    assert _rpm.plan(wanted(**options), seen()).empty
    # Whichever of several it is.
    options["streams"] = [{"module": "nvidia-driver", "stream": one} for one in ("580-dkms", "580-open")]
    resets = [change for change in _rpm.plan(wanted(**options), state).changes if "module" in change.header]
    assert [change.before for change in resets] == ["580-open\n"]
    mine = converged(streams={"nvidia-driver": "latest"})
    assert "module nvidia-driver" not in headers(_rpm.plan(wanted(**options), mine))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "My.Set"}, "name: 'My.Set'"),
        ({"repository": {"name": "../x"}}, "repositories: name: '../x'"),
        ({"repository": {"url": "repo.example.org/x"}}, "repositories: cuda: url"),
        ({"repository": {"key_text": None, "key_url": "key.asc"}}, "repositories: cuda: key_url"),
        ({"repository": {"key_sha256": "abc"}}, "repositories: cuda: key_sha256"),
        ({"repository": {"key_text": "x"}}, "isn't an armoured OpenPGP public key"),
        ({"repository": {"signed": []}}, "repositories: cuda: signed is empty"),
        ({"packages": ["nvidia open"]}, "packages: 'nvidia open'"),
        ({"packages": ["-o=x"]}, "packages: '-o=x'"),
        ({"packages": ["a="]}, "packages: 'a='"),
        ({"packages": ["other", "other=1"]}, "packages: one is named twice"),
        ({"streams": [{"module": "a b", "stream": "x"}]}, "streams: module 'a b'"),
        ({"keep": ["a;b"]}, "keep: 'a;b'"),
    ],
)
def test_bad_input_names_its_option(changes, words):
    with pytest.raises(ShareError) as caught:
        wanted(**changes)
    assert words in str(caught.value)


# --------------------------------------------------------------------------- keys

# A key of nobody's, made for this.
ARMOURED = """-----BEGIN PGP PUBLIC KEY BLOCK-----
Version: made for a test

{body}
=abcd
-----END PGP PUBLIC KEY BLOCK-----
"""


def test_name_that_rpm_gives_a_key():
    import base64
    import hashlib

    packet = b"\x04" + bytes.fromhex("6b018567") + b"\x01" + b"\x00\x10ab" + b"\x00\x03\x05"
    expected = hashlib.sha1(b"\x99" + len(packet).to_bytes(2, "big") + packet).hexdigest()[-8:] + "-6b018567"
    old = bytes([0x80 | 6 << 2, len(packet)]) + packet
    new = bytes([0xC0 | 6, len(packet)]) + packet
    other = bytes([0xC0 | 13, 3]) + b"uid"
    for data in (old, new, other + old, old + other):
        assert _repository_key.rpm_names(ARMOURED.format(body=base64.b64encode(data).decode())) == [expected]
    assert _repository_key.rpm_names(ARMOURED.format(body="!!")) == [] and _repository_key.rpm_names("") == []
