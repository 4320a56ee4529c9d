# SPDX-License-Identifier: GPL-3.0-or-later
"""rpm_packages with the real dnf 4 and the real zypper in a system of their own, against repositories of stub packages.

What it proves: every command line, every parser, locks, streams, keys, removals, interruption, as these versions have
them. What it can't: CentOS 7's yum and dnf 5, which can't be had here (scripted in test_node_rpm_apply), scriptlets of
real drivers, and SELinux.
"""

from __future__ import annotations

import contextlib

import pytest
import rpm_tree
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.kubegpu.share.plugins.module_utils import _rpm
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_apply import RpmConcern
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_observe import observe
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import compare
from ansible_collections.kubegpu.share.plugins.module_utils._runner import run

WHY = rpm_tree.missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

KEY_FILE = "/etc/pki/rpm-gpg/KUBEGPU-cuda.asc"
OPEN_580 = {
    "nvidia-open": "580.95",
    "kmod-nvidia-open-dkms": "580.95",
    "nvidia-driver-cuda": "580.95",
    "nvidia-persistenced": "590.44",
    "nvidia-modprobe": "590.44",
}
CORE = ("nvidia-open", "nvidia-driver-cuda", "kmod-nvidia-open-dkms")
CONFIGURATION = ("/etc/yum.repos.d", "/etc/zypp", "/etc/pki", "/etc/dnf/plugins")


@pytest.fixture(scope="module")
def trees():
    with contextlib.ExitStack() as stack:
        made = {}

        def tree(kind):
            if kind not in made:
                made[kind] = stack.enter_context(rpm_tree.borrowed(kind))
            rpm_tree.reset(made[kind])
            return made[kind]

        yield tree


@pytest.fixture(params=["dnf", "zypper"])
def tree(request, trees):
    return trees(request.param)


@pytest.fixture
def dnf(trees):
    return trees("dnf")


def go(tree, check=False, **changes):
    repository = {"name": "cuda", "url": "file:///srv/cuda", "key_text": tree.read("/root/key.asc")}
    repository.update(changes.pop("repository", {}))
    params = {
        "name": "driver",
        "repositories": [{key: value for key, value in repository.items() if value is not None}],
        "packages": ["nvidia-open=580.95", "nvidia-driver-cuda=580.95"],
        "hold_also": ["*nvidia*"],
        **changes,
    }
    result = ArgumentSpecValidator(_rpm.ARGUMENTS).validate(params)
    assert not result.error_messages
    concern = RpmConcern(_rpm.package_set(result.validated_parameters), tree.system, fetch=_no_network, sleep=_no_sleep)
    return run(concern, check)


def _no_network(url):
    raise OSError("no network")


def _no_sleep(_seconds):
    raise AssertionError("nothing holds a lock here")


def headers(result):
    return [one["before_header"] for one in result["diff"]]


def user(tree, *words, rc=0):
    """The machine's package manager in a user's hands."""
    manager = ("zypper", "--non-interactive") if tree.kind == "zypper" else ("dnf", "-y")
    return tree.run(*manager, *words, rc=rc)


def commands(tree):
    return [line for line in tree.ran if not line.startswith("rpm -qa")]


def test_from_nothing_and_again_and_back_to_the_byte(tree):
    user(tree, "install", "tool")
    packages, files, keys = tree.packages(), tree.files(*CONFIGURATION), tree.keys()
    predicted = go(tree, check=True)
    assert (tree.packages(), tree.files(*CONFIGURATION), tree.keys()) == (packages, files, keys)
    made = go(tree)
    assert made["changed"] and made["diff"] == predicted["diff"]
    assert tree.packages() == {**packages, **OPEN_580}
    assert len(tree.keys()) == 1

    tree.ran.clear()
    assert go(tree) == {"changed": False, "diff": []}
    assert commands(tree) == []

    absent = go(tree, state="absent", erase_dependencies=True)
    assert absent["changed"] and "package nvidia-open" in headers(absent)
    assert tree.packages() == packages and tree.keys() == keys
    assert tree.files(*CONFIGURATION) == files
    assert not go(tree, state="absent", erase_dependencies=True)["changed"]


@pytest.mark.parametrize("version", ["570.10", "590.44"])
def test_other_version_up_or_down_takes_the_dependencies_along_and_leaves_the_rest(tree, version):
    user(tree, "install", "tool-1-1.el9" if tree.kind == "dnf" else "tool=1")
    go(tree)
    go(tree, packages=[f"nvidia-open={version}*", f"nvidia-driver-cuda={version}*"])
    seen = tree.packages()
    assert {seen[name] for name in CORE} == {version}
    assert seen["tool"] == "1"
    assert not go(tree, packages=[f"nvidia-open={version}*", f"nvidia-driver-cuda={version}*"])["changed"]


def test_locks_hold_against_an_upgrade_of_everything_which_still_upgrades_the_rest(tree):
    user(tree, "install", "tool-1-1.el9" if tree.kind == "dnf" else "tool=1")
    go(tree)
    user(tree, "upgrade" if tree.kind == "dnf" else "update")
    assert tree.packages() == {**OPEN_580, "tool": "2"}
    go(tree, hold=False)
    user(tree, "upgrade" if tree.kind == "dnf" else "update")
    assert tree.packages()["nvidia-open"] == "590.44"


def test_without_locks_of_what_came_along_an_upgrade_of_everything_fails(dnf):
    """Why hold_also is there; should dnf ever do better, this tells."""
    go(dnf, hold_also=[], packages=["nvidia-open=580.95"])
    assert "cannot install the best update candidate" in user(dnf, "upgrade", rc=1)


def test_locks_of_a_users_own_stay_when_the_tool_rewrites_the_file_and_when_ours_go(tree):
    go(tree)
    if tree.kind == "dnf":
        user(tree, "install", "tool-1-1.el9")
        tree.run("dnf", "versionlock", "add", "tool")
        tree.run("dnf", "versionlock", "add", "tool-lib")
        tree.run("dnf", "versionlock", "delete", "tool-lib")
    else:
        user(tree, "install", "tool=1")
        user(tree, "addlock", "tool")
        user(tree, "addlock", "tool-lib")
        user(tree, "removelock", "tool-lib")
    assert not go(tree)["changed"]
    go(tree, packages=["nvidia-open=590.44", "nvidia-driver-cuda=590.44"])
    user(tree, "upgrade" if tree.kind == "dnf" else "update")
    assert tree.packages()["tool"] == "1"
    go(tree, state="absent")
    assert [lock["name"] for lock in observe(tree.system)["rpm"]["locks"]] == ["tool"]
    assert not observe(tree.system)["rpm"]["locks"][0]["ours"]


def test_lock_of_a_users_own_on_our_package_is_refused_and_not_lifted(tree):
    go(tree, hold=False)
    if tree.kind == "dnf":
        tree.run("dnf", "versionlock", "add", "nvidia-open")
    else:
        user(tree, "addlock", "nvidia-open")
    with pytest.raises(BadInput, match="a lock that isn't ours keeps nvidia-open"):
        go(tree, packages=["nvidia-open=590.44"])
    assert tree.packages()["nvidia-open"] == "580.95"
    # It holds what we would hold: nothing to add.
    assert headers(go(tree, packages=["nvidia-open=580.95"], hold_also=[], check=True)) == []


def test_other_flavour_is_refused_by_name_until_it_may_replace(tree):
    go(tree)
    proprietary = ["cuda-drivers=580.95", "kmod-nvidia-latest-dkms=580.95"]
    with pytest.raises(ShareError) as caught:
        go(tree, packages=proprietary, hold_also=[])
    assert "kmod-nvidia-open-dkms" in str(caught.value)
    assert tree.packages() == OPEN_580
    with pytest.raises(ShareError, match=r"would remove .*nvidia-open"):
        go(tree, packages=proprietary, hold_also=["*nvidia*"], replaces=["kmod-nvidia-open-*"])
    assert {lock["name"] for lock in observe(tree.system)["rpm"]["locks"]} == set(OPEN_580)
    go(tree, packages=proprietary, replaces=["kmod-nvidia-open-*", "nvidia-open"])
    seen = tree.packages()
    assert seen["cuda-drivers"] == "580.95" and "nvidia-open" not in seen and "kmod-nvidia-open-dkms" not in seen
    assert {lock["name"] for lock in observe(tree.system)["rpm"]["locks"]} >= {
        "cuda-drivers",
        "kmod-nvidia-latest-dkms",
    }


def test_absent_stops_before_it_tears_what_a_user_installed(tree):
    go(tree)
    user(tree, "install", "cuda-toolkit")
    locks = observe(tree.system)["rpm"]["locks"]
    with pytest.raises(
        ShareError, match=r"packages: cuda-toolkit need .*; remove them first: (dnf|zypper) remove cuda-tool"
    ):
        go(tree, state="absent", erase_dependencies=True)
    assert tree.packages() == {**OPEN_580, "cuda-toolkit": "13"}
    assert observe(tree.system)["rpm"]["locks"] == locks
    # The next run, after the user's removal, ends it.
    user(tree, "remove", "cuda-toolkit")
    go(tree, state="absent", erase_dependencies=True)
    assert tree.packages() == {}


def test_absent_keeps_what_it_is_told_to_and_what_that_needs(tree):
    go(tree)
    go(tree, state="absent", erase_dependencies=True, keep=["nvidia-persistenced"])
    assert tree.packages() == {"nvidia-persistenced": "590.44", "nvidia-modprobe": "590.44"}
    # Its mark is as it was: nobody asked for it by name.
    if tree.kind == "dnf":
        assert "nvidia-persistenced dependency" in tree.run(
            "dnf", "-q", "repoquery", "--installed", "--qf", "%{name} %{reason}"
        )
    else:
        assert "nvidia-persistenced" in tree.read("/var/lib/zypp/AutoInstalled").split()


def test_absent_without_erase_dependencies_leaves_them(tree):
    go(tree)
    go(tree, state="absent")
    assert tree.packages() == {
        name: OPEN_580[name] for name in OPEN_580 if name not in ("nvidia-open", "nvidia-driver-cuda")
    }


def test_repository_that_does_not_work_is_put_back_with_its_key(tree):
    url = "http://127.0.0.1:9/cuda/"
    files = tree.files(*CONFIGURATION)
    with pytest.raises(ShareError, match="failed: "):
        go(tree, repository={"url": url})
    assert tree.files(*CONFIGURATION) == files and tree.keys() == []
    user(tree, "install", "tool")
    go(tree)
    files, keys = tree.files(*CONFIGURATION), tree.keys()
    with pytest.raises(ShareError, match="failed: "):
        go(tree, repository={"url": url})
    assert tree.files(*CONFIGURATION) == files and tree.keys() == keys
    assert not go(tree)["changed"]


def test_repository_that_goes_away_later_stops_nobody_elses_updates(tree):
    user(tree, "install", "tool-1-1.el9" if tree.kind == "dnf" else "tool=1")
    go(tree)
    (tree.root / "srv/cuda").rename(tree.root / "srv/gone")
    if tree.kind == "dnf":
        user(tree, "--refresh", "upgrade")
    else:
        user(tree, "update", rc=None)
    assert tree.packages()["tool"] == "2"
    with pytest.raises(ShareError, match="failed: "):
        go(tree, packages=["nvidia-open=590.44", "nvidia-driver-cuda=590.44"])
    assert tree.packages()["nvidia-open"] == "580.95"
    assert all(lock["ours"] for lock in observe(tree.system)["rpm"]["locks"])


def test_key_that_was_there_before_stays(tree):
    tree.run("rpm", "--import", "/root/key.asc")
    keys = tree.keys()
    go(tree)
    assert tree.keys() == keys
    go(tree, state="absent", erase_dependencies=True)
    assert tree.keys() == keys and KEY_FILE not in tree.files("/etc/pki")


def test_packages_signed_by_another_key_are_refused(tree):
    tree.write("/root/batch", rpm_tree.batch("other@example.org"))
    tree.run("sh", "-c", "gpg --batch --gen-key /root/batch && gpg --armor --export > /root/other.asc")
    with pytest.raises(ShareError):
        go(tree, repository={"key_text": tree.read("/root/other.asc")})
    assert "nvidia-open" not in tree.packages()


def test_version_that_no_repository_has_is_answered_with_those_there_are(tree):
    with pytest.raises(ShareError, match=r"no repository has nvidia-open=600\*; there is 3:590.44-1.el9, 3:580.95"):
        go(tree, packages=["nvidia-open=600*"])
    assert tree.packages() == {}


def test_conflicts_are_refused_with_the_command_before_anything_changes(tree):
    user(tree, "install", "tool")
    files = tree.files(*CONFIGURATION)
    with pytest.raises(BadInput, match=r"conflicts: tool 2-1.el9 can't be beside .*: (dnf|zypper) remove tool$"):
        go(tree, conflicts=["too*"])
    assert tree.files(*CONFIGURATION) == files


def test_several_kernel_packages_are_there_beside_each_other(tree):
    """The headers of the running kernel are asked for while those of a newer one are installed."""
    if tree.kind == "zypper":
        pytest.skip("only packages that say so themselves are kept several times by zypper; the stubs don't")
    go(tree, packages=["kernel-devel=5.14.1"], hold=False, hold_also=[])
    go(tree, packages=["kernel-devel=5.14.0"], hold=False, hold_also=[])
    assert tree.packages() == {"kernel-devel": "5.14.0 5.14.1"}
    assert not go(tree, packages=["kernel-devel=5.14.1"], hold=False, hold_also=[])["changed"]
    assert not observe(tree.system)["rpm"]["interrupted"]
    go(tree, state="absent", packages=["kernel-devel=5.14.0"], hold_also=[])
    assert tree.packages() == {"kernel-devel": "5.14.1"}


def test_killed_in_the_middle_of_an_upgrade_is_finished_by_the_next_run(tree):
    go(tree, packages=["slow=1"], hold_also=[], hold=False)
    tree.kill_at_work(*_upgrade(tree))
    # Between the new version's installation and the old one's removal.
    assert tree.packages()["slow-lib"] == "1 2"
    assert observe(tree.system)["rpm"]["interrupted"]
    result = go(tree, packages=["slow=2", "slow-lib=2"], hold_also=[])
    assert "unfinished transaction" in headers(result)
    assert tree.packages() == {"slow": "2", "slow-lib": "2"}
    assert not go(tree, packages=["slow=2", "slow-lib=2"], hold_also=[])["changed"]
    if tree.kind == "dnf":
        tree.run("dnf", "check")


def _upgrade(tree):
    if tree.kind == "zypper":
        return ("zypper", "--non-interactive", "install", "slow=2")
    return ("dnf", "-y", "install", "slow-2-1.el9")


def test_files_of_a_folder_bring_what_they_need_and_no_more(tree):
    for name in ("tool-1", "tool-lib-1"):
        (tree.root / "root/files").mkdir(exist_ok=True)
        tree.run("cp", f"/srv/foreign/{name}.rpm", "/root/files")
    tree.run("sh", "-c", "cp /srv/cuda/*580.95.rpm /srv/cuda/*590.44.rpm /root/files")
    go_local(tree)
    assert tree.packages() == OPEN_580
    assert not go_local(tree)["changed"]
    go_local(tree, packages=["nvidia-open=590.44"])
    assert {tree.packages()[name] for name in CORE} == {"590.44"}
    go_local(tree, packages=["nvidia-open=580.95"])
    assert {tree.packages()[name] for name in CORE} == {"580.95"}
    with pytest.raises(ShareError, match=r"neither /root/files nor a repository has nvidia-open=600; there is"):
        go_local(tree, packages=["nvidia-open=600"])


def go_local(tree, **changes):
    params = {
        "name": "driver",
        "packages": ["nvidia-open=580.95", "nvidia-driver-cuda=580.95"],
        "hold_also": ["*nvidia*"],
        "node_dir": "/root/files",
    }
    result = ArgumentSpecValidator(_rpm.ARGUMENTS).validate({**params, **changes})
    assert not result.error_messages
    return run(RpmConcern(_rpm.package_set(result.validated_parameters), tree.system, _no_network, _no_sleep), False)


# --------------------------------------------------------------------------- dnf alone


def stream(name, switch=False):
    return {"streams": [{"module": "nvidia-driver", "stream": name, "switch": switch}]}


MODULAR = {"url": "file:///srv/modular"}


def test_stream_of_a_module_is_enabled_switched_and_reset(dnf):
    result = go(dnf, repository=MODULAR, packages=["nvidia-open"], **stream("580-open"))
    assert "module nvidia-driver" in headers(result)
    assert dnf.packages() == OPEN_580
    assert observe(dnf.system)["rpm"]["streams"] == {"nvidia-driver": "580-open"}
    assert not go(dnf, repository=MODULAR, packages=["nvidia-open"], **stream("580-open"))["changed"]
    newer = {"repository": MODULAR, "packages": ["nvidia-open=590.44", "nvidia-driver-cuda=590.44"]}
    with pytest.raises(BadInput, match="module nvidia-driver is at 580-open and nvidia-open, nvidia-driver-cuda of it"):
        go(dnf, **newer, **stream("open-dkms"))
    go(dnf, **newer, **stream("open-dkms", switch=True))
    assert dnf.packages()["kmod-nvidia-open-dkms"] == "590.44"
    go(dnf, **{**newer, "state": "absent"}, erase_dependencies=True, **stream("open-dkms"))
    assert dnf.packages() == {} and observe(dnf.system)["rpm"]["streams"] == {}
    # With nothing of the module installed another stream is no question.
    go(dnf, repository=MODULAR, packages=["cuda-drivers=580.95"], **stream("580-dkms"))
    assert dnf.packages()["kmod-nvidia-latest-dkms"] == "580.95"


def test_stream_goes_back_where_the_packages_of_the_other_can_not_be_had(dnf):
    go(dnf, repository=MODULAR, packages=["nvidia-open"], **stream("580-open"))
    with pytest.raises(ShareError, match="no repository has nvidia-open=600"):
        go(dnf, repository=MODULAR, packages=["nvidia-open=600"], **stream("open-dkms", switch=True))
    with pytest.raises(ShareError, match="nvidia-driver:nosuch"):
        go(dnf, repository=MODULAR, packages=["nvidia-open=600"], **stream("nosuch", switch=True))
    assert observe(dnf.system)["rpm"]["streams"] == {"nvidia-driver": "580-open"}
    assert dnf.packages() == OPEN_580
    assert {lock["name"] for lock in observe(dnf.system)["rpm"]["locks"]} == set(OPEN_580)


def test_zypper_knows_no_streams(trees):
    with pytest.raises(BadInput, match="streams: this node's zypper knows no streams"):
        go(trees("zypper"), **stream("580-open"))


def test_versions_are_ordered_as_rpm_orders_them(dnf):
    parts = [
        "1",
        "1.0",
        "1.0~rc1",
        "1.0^git1",
        "1.0^git1~x",
        "1.0.1",
        "1.0a",
        "1a",
        "2",
        "10",
        "1.010",
        "1.10",
        "a",
        "1.0~~",
    ]
    parts += ["580.95.05", "580.95.5", "1.0~", "1.0^", "1.0^^", "1.0~^", "1.0^~", "1_0", "1.", "1.0.a", "1.a", "1.0^a"]
    versions = [f"{epoch}{part}-{release}" for part in parts for epoch in ("", "1:") for release in ("1.el9", "1.fc39")]
    pairs = [(one, other) for one in versions for other in versions]
    script = (
        "import rpm, sys\n"
        "def label(text):\n"
        "    epoch, _, rest = text.rpartition(':')\n"
        "    version, _, release = rest.partition('-')\n"
        "    return epoch or '0', version, release\n"
        "for line in sys.stdin:\n"
        "    one, other = line.split()\n"
        "    print(rpm.labelCompare(label(one), label(other)))\n"
    )
    asked = "".join(f"{one} {other}\n" for one, other in pairs)
    done = dnf.system.run(["python3", "-c", script], stdin=asked)
    assert done.rc == 0, done.err
    assert [compare(one, other) for one, other in pairs] == [int(line) for line in done.out.split()]
