# SPDX-License-Identifier: GPL-3.0-or-later
"""pinned_packages with the real dnf 4 and zypper in a system of their own, with repositories of stub packages.

It proves every command line, every parser, locks, streams, keys, removals and interruption with these versions. It
can't prove dnf 5, which isn't available here (scripted in test_packages_rpm_apply), scriptlets of real drivers, and
SELinux. Long tests repeat ``test_packages_rpm_apply`` and ``test_packages_rpm_plan``, whose managers are scripted.
"""

from __future__ import annotations

import contextlib

import pytest
import rpm_tree
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._packages import installed
from ansible_collections.kubegpu.share.plugins.module_utils._packages.rpm_locks import compare
from package_sets import apply, headers, package_set

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
        "repositories": [repository],
        "packages": ["nvidia-open=580.95", "nvidia-driver-cuda=580.95"],
        "hold_also": ["*nvidia*"],
        **changes,
    }
    return apply(package_set(**params), tree.system, "redhat", check, fetch=_no_network, sleep=_no_sleep)


def observe(tree):
    return installed.observe_rpm(tree.system)[0]


def locked(tree):
    return {lock["name"] for lock in observe(tree)["locks"]}


def _no_network(url):
    raise OSError("no network")


def _no_sleep(_seconds):
    raise AssertionError("nothing holds a lock here")


def user(tree, *words, rc=0):
    """Run the machine's package manager as a user does."""
    manager = ("zypper", "--non-interactive") if tree.kind == "zypper" else ("dnf", "-y")
    return tree.run(*manager, *words, rc=rc)


def install_old_tool(tree):
    """Install a package that is none of ours in the older of its two versions."""
    user(tree, "install", "tool-1-1.el9" if tree.kind == "dnf" else "tool=1")


def user_lock(tree, name):
    user(tree, *(("versionlock", "add") if tree.kind == "dnf" else ("addlock",)), name)


def upgrade_all(tree):
    user(tree, "upgrade" if tree.kind == "dnf" else "update")


def test_install_is_idempotent_and_removal_restores_every_byte(tree):
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
    assert [line for line in tree.ran if not line.startswith("rpm -qa")] == []

    absent = go(tree, state="absent", erase_dependencies=True)
    assert absent["changed"] and "package nvidia-open" in headers(absent)
    assert tree.packages() == packages and tree.keys() == keys
    assert tree.files(*CONFIGURATION) == files
    assert not go(tree, state="absent", erase_dependencies=True)["changed"]


def test_other_version_changes_the_dependencies_too_and_is_held_against_an_upgrade_of_everything(tree):
    """What isn't ours keeps its version, and is upgraded."""
    install_old_tool(tree)
    go(tree)
    older = ["nvidia-open=570.10*", "nvidia-driver-cuda=570.10*"]
    go(tree, packages=older)
    before = tree.packages()
    assert {before[name] for name in CORE} == {"570.10"} and before["tool"] == "1"
    assert not go(tree, packages=older)["changed"]
    upgrade_all(tree)
    assert tree.packages() == {**before, "tool": "2"}
    go(tree, packages=older, hold=False)
    upgrade_all(tree)
    assert tree.packages()["nvidia-open"] == "590.44"


@pytest.mark.long
def test_user_locks_survive_the_tools_rewrites_and_the_removal_of_ours(tree):
    go(tree)
    install_old_tool(tree)
    user_lock(tree, "tool")
    user_lock(tree, "tool-lib")
    user(tree, *(("versionlock", "delete") if tree.kind == "dnf" else ("removelock",)), "tool-lib")
    assert not go(tree)["changed"]
    go(tree, packages=["nvidia-open=590.44", "nvidia-driver-cuda=590.44"])
    upgrade_all(tree)
    assert tree.packages()["tool"] == "1"
    go(tree, state="absent")
    assert [lock["name"] for lock in observe(tree)["locks"]] == ["tool"]
    assert not observe(tree)["locks"][0]["ours"]


def test_other_flavour_is_refused_until_replaces_matches_it(tree):
    go(tree)
    proprietary = ["cuda-drivers=580.95", "kmod-nvidia-latest-dkms=580.95"]
    with pytest.raises(ShareError, match="kmod-nvidia-open-dkms"):
        go(tree, packages=proprietary, hold_also=[])
    assert tree.packages() == OPEN_580
    with pytest.raises(ShareError, match=r"would remove .*nvidia-open"):
        go(tree, packages=proprietary, hold_also=["*nvidia*"], replaces=["kmod-nvidia-open-*"])
    assert locked(tree) == set(OPEN_580)
    go(tree, packages=proprietary, replaces=["kmod-nvidia-open-*", "nvidia-open"])
    packages = tree.packages()
    assert packages["cuda-drivers"] == "580.95" and not {"nvidia-open", "kmod-nvidia-open-dkms"} & set(packages)
    assert locked(tree) >= {"cuda-drivers", "kmod-nvidia-latest-dkms"}


def test_absent_refuses_to_remove_packages_of_the_user(tree):
    go(tree)
    user(tree, "install", "cuda-toolkit")
    locks = observe(tree)["locks"]
    message = r"packages: cuda-toolkit need .*; remove them first: (dnf|zypper) remove cuda-tool"
    with pytest.raises(ShareError, match=message):
        go(tree, state="absent", erase_dependencies=True)
    assert tree.packages() == {**OPEN_580, "cuda-toolkit": "13"}
    assert observe(tree)["locks"] == locks
    # The next run, after the user's removal, completes it.
    user(tree, "remove", "cuda-toolkit")
    go(tree, state="absent", erase_dependencies=True)
    assert tree.packages() == {}


@pytest.mark.long
def test_absent_keeps_listed_packages_and_their_dependencies(tree):
    go(tree)
    go(tree, state="absent")
    left = OPEN_580.keys() - {"nvidia-open", "nvidia-driver-cuda"}
    assert tree.packages() == {name: OPEN_580[name] for name in left}
    go(tree)
    go(tree, state="absent", erase_dependencies=True, keep=["nvidia-persistenced"])
    assert tree.packages() == {"nvidia-persistenced": "590.44", "nvidia-modprobe": "590.44"}
    # It is still marked as a dependency.
    if tree.kind == "dnf":
        reasons = tree.run("dnf", "-q", "repoquery", "--installed", "--qf", "%{name} %{reason}")
        assert "nvidia-persistenced dependency" in reasons
    else:
        assert "nvidia-persistenced" in tree.read("/var/lib/zypp/AutoInstalled").split()


@pytest.mark.long
def test_failing_repository_is_rolled_back_with_its_key(tree):
    for _time in range(2):
        files, keys = tree.files(*CONFIGURATION), tree.keys()
        with pytest.raises(ShareError, match="failed: "):
            go(tree, repository={"url": "http://127.0.0.1:9/cuda/"})
        assert tree.files(*CONFIGURATION) == files and tree.keys() == keys
        # The second time it replaces one that works.
        go(tree)


@pytest.mark.long
def test_repository_that_disappears_later_does_not_stop_other_updates(tree):
    install_old_tool(tree)
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
    assert all(lock["ours"] for lock in observe(tree)["locks"])


@pytest.mark.long
def test_key_that_was_imported_before_stays(tree):
    tree.run("rpm", "--import", "/root/key.asc")
    keys = tree.keys()
    go(tree)
    assert tree.keys() == keys
    go(tree, state="absent", erase_dependencies=True)
    assert tree.keys() == keys and KEY_FILE not in tree.files("/etc/pki")


@pytest.mark.long
def test_packages_signed_by_another_key_are_refused(tree):
    tree.write("/root/batch", rpm_tree.batch("other@example.org"))
    tree.run("sh", "-c", "gpg --batch --gen-key /root/batch && gpg --armor --export > /root/other.asc")
    with pytest.raises(ShareError):
        go(tree, repository={"key_text": tree.read("/root/other.asc")})
    assert "nvidia-open" not in tree.packages()


@pytest.mark.long
def test_several_kernel_packages_are_installed_beside_each_other(tree):
    """The headers of the running kernel are requested while those of a newer one are installed."""
    if tree.kind == "zypper":
        pytest.skip("only packages that say so themselves are kept several times by zypper; the stubs don't")
    go(tree, packages=["kernel-devel=5.14.1"], hold=False, hold_also=[])
    go(tree, packages=["kernel-devel=5.14.0"], hold=False, hold_also=[])
    assert tree.packages() == {"kernel-devel": "5.14.0 5.14.1"}
    assert not go(tree, packages=["kernel-devel=5.14.1"], hold=False, hold_also=[])["changed"]
    assert not observe(tree)["duplicates"]
    go(tree, state="absent", packages=["kernel-devel=5.14.0"], hold_also=[])
    assert tree.packages() == {"kernel-devel": "5.14.1"}


@pytest.mark.long
def test_upgrade_that_was_killed_is_completed_by_the_next_run(tree):
    go(tree, packages=["slow=1"], hold_also=[], hold=False)
    zypper = ("zypper", "--non-interactive", "install", "slow=2")
    tree.kill_at_work(*(zypper if tree.kind == "zypper" else ("dnf", "-y", "install", "slow-2-1.el9")))
    # Between the new version's installation and the old one's removal.
    assert tree.packages()["slow-lib"] == "1 2"
    assert observe(tree)["duplicates"]
    result = go(tree, packages=["slow=2", "slow-lib=2"], hold_also=[])
    assert "interrupted transaction" in headers(result)
    assert tree.packages() == {"slow": "2", "slow-lib": "2"}
    assert not go(tree, packages=["slow=2", "slow-lib=2"], hold_also=[])["changed"]
    if tree.kind == "dnf":
        tree.run("dnf", "check")


@pytest.mark.long
def test_files_of_a_directory_are_installed_with_their_dependencies_only(tree):
    local = {"repositories": [], "node_dir": "/root/files"}
    for name in ("tool-1", "tool-lib-1"):
        (tree.root / "root/files").mkdir(exist_ok=True)
        tree.run("cp", f"/srv/foreign/{name}.rpm", "/root/files")
    tree.run("sh", "-c", "cp /srv/cuda/*580.95.rpm /srv/cuda/*590.44.rpm /root/files")
    go(tree, **local)
    assert tree.packages() == OPEN_580
    assert not go(tree, **local)["changed"]
    go(tree, **local, packages=["nvidia-open=590.44"])
    assert {tree.packages()[name] for name in CORE} == {"590.44"}
    go(tree, **local, packages=["nvidia-open=580.95"])
    assert {tree.packages()[name] for name in CORE} == {"580.95"}
    with pytest.raises(ShareError, match=r"neither /root/files nor a repository has nvidia-open=600; available:"):
        go(tree, **local, packages=["nvidia-open=600"])


# --------------------------------------------------------------------------- dnf alone


def stream(name, switch=False):
    return {"streams": [{"module": "nvidia-driver", "stream": name, "switch": switch}]}


MODULAR = {"url": "file:///srv/modular"}


def test_module_stream_is_enabled_switched_and_reset(dnf):
    result = go(dnf, repository=MODULAR, packages=["nvidia-open"], **stream("580-open"))
    assert "module nvidia-driver" in headers(result)
    assert dnf.packages() == OPEN_580
    assert observe(dnf)["streams"] == {"nvidia-driver": "580-open"}
    assert not go(dnf, repository=MODULAR, packages=["nvidia-open"], **stream("580-open"))["changed"]
    newer = {"repository": MODULAR, "packages": ["nvidia-open=590.44", "nvidia-driver-cuda=590.44"]}
    with pytest.raises(BadInput, match="module nvidia-driver is at 580-open and nvidia-open, nvidia-driver-cuda of it"):
        go(dnf, **newer, **stream("open-dkms"))
    go(dnf, **newer, **stream("open-dkms", switch=True))
    assert dnf.packages()["kmod-nvidia-open-dkms"] == "590.44"
    go(dnf, **{**newer, "state": "absent"}, erase_dependencies=True, **stream("open-dkms"))
    assert dnf.packages() == {} and observe(dnf)["streams"] == {}
    # Without a package of the module another stream needs no switch.
    go(dnf, repository=MODULAR, packages=["cuda-drivers=580.95"], **stream("580-dkms"))
    assert dnf.packages()["kmod-nvidia-latest-dkms"] == "580.95"


@pytest.mark.long
def test_stream_is_rolled_back_where_its_packages_are_unavailable(dnf):
    go(dnf, repository=MODULAR, packages=["nvidia-open"], **stream("580-open"))
    with pytest.raises(ShareError, match="no repository has nvidia-open=600"):
        go(dnf, repository=MODULAR, packages=["nvidia-open=600"], **stream("open-dkms", switch=True))
    with pytest.raises(ShareError, match="nvidia-driver:nosuch"):
        go(dnf, repository=MODULAR, packages=["nvidia-open=600"], **stream("nosuch", switch=True))
    assert observe(dnf)["streams"] == {"nvidia-driver": "580-open"}
    assert dnf.packages() == OPEN_580
    assert locked(dnf) == set(OPEN_580)


def test_versions_are_ordered_as_rpm_orders_them(dnf):
    parts = ["1", "1.0", "1.0~rc1", "1.0^git1", "1.0^git1~x", "1.0.1", "1.0a", "1a", "2", "10", "1.010", "1.10", "a"]
    parts += ["580.95.05", "580.95.5", "1.0~", "1.0~~", "1.0^", "1.0^^", "1.0~^", "1.0^~", "1_0", "1.", "1.0.a", "1.a"]
    parts.append("1.0^a")
    versions = [f"{epoch}{part}-{release}" for part in parts for epoch in ("", "1:") for release in ("1.el9", "1.fc39")]
    pairs = [(version, other) for version in versions for other in versions]
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
    asked = "".join(f"{pair} {other}\n" for pair, other in pairs)
    done = dnf.system.run(["python3", "-c", script], stdin=asked)
    assert done.rc == 0, done.err
    assert [compare(pair, other) for pair, other in pairs] == [int(line) for line in done.out.split()]
