# SPDX-License-Identifier: GPL-3.0-or-later
"""pinned_packages with apt: options, plan, apply on a fake apt, interruption at every step."""

from __future__ import annotations

import copy
import hashlib
import re

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._packages import installed
from ansible_collections.kubegpu.share.plugins.module_utils._packages.apply import Commands, shown
from ansible_collections.kubegpu.share.plugins.module_utils._packages.apt_apply import reason
from fake_clock import FakeClock
from node_fakes import AptMachine, FakeSystem, killed_at_every_step
from package_sets import KEY, apply, headers, package_set

URL = "http://repo.example.org/cuda/"
KEY_URL = "http://repo.example.org/key.asc"
OTHER_KEY = KEY.replace("abc", "xyz")
SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
SOURCES = "/etc/apt/sources.list.d/kubegpu-cuda.sources"
KEYRING = "/etc/apt/keyrings/kubegpu-cuda.asc"
PREFERENCES = "/etc/apt/preferences.d/kubegpu-driver.pref"
UPGRADES = "/etc/apt/apt.conf.d/90kubegpu-driver"
PACKAGES = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms")


def options(**changes):
    repository = {"name": "cuda", "url": URL, "key_url": KEY_URL, "architectures": ["amd64"]}
    return {
        "name": "driver",
        "repositories": [{**repository, **changes.pop("repository", {})}],
        "pins": [{"package": "*nvidia*", "pin": "version 580.95.05*"}],
        "packages": [f"{name}=580.95.05-*" for name in PACKAGES],
        "never_upgrade": ["nvidia-"],
        **changes,
    }


def machine():
    versions = ["580.82.07-1", "580.95.05-1", "590.44.01-1"]
    return AptMachine({URL: {**dict.fromkeys(PACKAGES, versions), "other": ["1"]}})


class Fetch:
    def __init__(self, text=KEY):
        self.text, self.asked = text, []

    def __call__(self, url):
        self.asked.append(url)
        if self.text is None:
            raise OSError("no route to host")
        return self.text.encode()


def go(node, params, fetch=None, check=False, sleep=lambda _seconds: None):
    return apply(package_set(**params), node, "debian", check, fetch=fetch or Fetch(), sleep=sleep)


def test_bare_machine_gets_all_files_and_packages_and_the_second_run_changes_nothing():
    node = machine()
    result = go(node, options())
    assert headers(result) == [KEYRING, SOURCES, PREFERENCES, UPGRADES, *(f"package {name}" for name in PACKAGES)]
    assert node.installed == dict.fromkeys(PACKAGES, "580.95.05-1") and node.held == set(PACKAGES)
    assert node.files[KEYRING] == KEY
    repository = f"Types: deb\nURIs: {URL}\nSuites: /\nArchitectures: amd64\nSigned-By: {KEYRING}\n"
    assert node.files[SOURCES].partition("# Created: /etc/apt/keyrings\n")[2] == repository
    pin = "Package: *nvidia*\nPin: version 580.95.05*\nPin-Priority: 1001\n"
    assert pin in node.files[PREFERENCES]
    assert 'Package-Blacklist {\n    "nvidia-";\n};' in node.files[UPGRADES]
    # Only our own list was fetched.
    assert node.fetched == {URL}

    node.ran.clear()
    fetch = Fetch(None)
    assert go(node, options(), fetch) == {"changed": False, "diff": []}
    assert node.changing_commands() == [] and fetch.asked == []


def test_check_mode_predicts_all_changes_without_the_repository():
    node = machine()
    before = copy.deepcopy(node.state())
    params = options(packages=["nvidia-driver-cuda=580.95.05-*", "other"])
    predicted = go(node, params, Fetch(None), check=True)
    assert predicted["changed"] and node.state() == before and node.changing_commands() == []
    by_header = {one["before_header"]: one["after"] for one in predicted["diff"]}
    assert by_header["package nvidia-driver-cuda"] == "580.95.05-*, held\n"
    assert by_header["package other"] == "latest of pin, held\n"
    assert go(node, params)["diff"] == predicted["diff"]


def test_missing_lists_are_downloaded_for_dependencies():
    node = machine()
    node.repositories["http://deb.example.org"] = {"dkms": ["3"]}
    go(node, options(packages=["dkms"]))
    assert node.fetched == {URL, "http://deb.example.org"}
    assert node.installed == {"dkms": "3"}


def converged():
    node = machine()
    go(node, options())
    node.ran.clear()
    return node


def test_edited_file_of_ours_is_restored_without_running_apt():
    node = converged()
    node.files[PREFERENCES] = "# mine\n"
    assert headers(go(node, options())) == [PREFERENCES] and node.changing_commands() == []
    assert "Pin-Priority" in node.files[PREFERENCES]


def test_holds_are_set_again_and_released():
    node = converged()
    node.held.discard("nvidia-driver-cuda")
    assert headers(go(node, options())) == ["package nvidia-driver-cuda"]
    assert node.changing_commands() == ["apt-mark hold nvidia-driver-cuda"]
    go(node, options(hold=False))
    assert node.held == set()


@pytest.mark.parametrize("version", ["580.82.07", "590.44.01"])
def test_upgrade_and_downgrade_release_only_our_own_holds(version):
    node = converged()
    node.held.add("linux-image-amd64")
    go(node, options(packages=[f"nvidia-driver-cuda={version}-1"]))
    assert node.installed["nvidia-driver-cuda"] == f"{version}-1"
    assert node.held == {*PACKAGES, "linux-image-amd64"}
    assert not [line for line in node.ran if "--allow-change-held-packages" in line]
    assert all("--allow-downgrades" in line for line in node.ran if " install " in line)


def test_failed_installation_keeps_the_old_version_held():
    node = converged()
    with pytest.raises(ShareError, match=r"apt-get install .* failed: E: Unable to locate package nvidia-driver-cuda$"):
        go(node, options(packages=["nvidia-driver-cuda=1-1"]))
    assert node.installed["nvidia-driver-cuda"] == "580.95.05-1" and "nvidia-driver-cuda" in node.held


def test_new_url_replaces_the_old_one():
    node = converged()
    node.repositories["http://mirror.example.org/"] = {}
    result = go(node, options(repository={"url": "http://mirror.example.org/"}))
    assert headers(result) == [SOURCES]
    assert "http://mirror.example.org/" in node.fetched


def test_repository_that_fails_is_rolled_back():
    node = converged()
    before = copy.deepcopy(node.state())
    with pytest.raises(ShareError, match=r"failed: E: The repository .* does not have a Release file\.$"):
        go(node, options(repository={"url": "http://wrong.example.org/"}))
    assert node.state() == before


def test_unpinned_package_keeps_its_version():
    node = machine()
    go(node, options(packages=["nvidia-driver-cuda"]))
    assert node.installed == {"nvidia-driver-cuda": "590.44.01-1"}
    node.installed["nvidia-driver-cuda"] = "1"
    assert not go(node, options(packages=["nvidia-driver-cuda"]))["changed"]


def test_key_rotation_is_a_change():
    node = converged()
    node.keys[URL] = OTHER_KEY
    new = hashlib.sha256(OTHER_KEY.encode()).hexdigest()
    for repository, changed in (
        ({"key_sha256": new}, [KEYRING]),
        ({"key_sha256": new, "key_url": KEY_URL + "2"}, [SOURCES]),
        ({"key_url": KEY_URL + "3"}, [KEYRING, SOURCES]),
        ({"key_url": None, "key_text": OTHER_KEY.strip()}, [SOURCES]),
    ):
        assert headers(go(node, options(repository=repository), Fetch(OTHER_KEY))) == changed
        assert node.files[KEYRING] == OTHER_KEY


def test_replaced_key_is_downloaded_when_apt_update_fails():
    node = converged()
    node.keys[URL] = OTHER_KEY
    go(node, options(packages=["other"]), Fetch(OTHER_KEY))
    assert node.files[KEYRING] == OTHER_KEY and "other" in node.installed
    node.keys[URL] = "third"
    with pytest.raises(ShareError, match="NO_PUBKEY"):
        go(node, options(packages=["nvidia-driver-cuda=580.82.07-1"]), Fetch(KEY))
    assert node.files[KEYRING] == OTHER_KEY


@pytest.mark.parametrize(
    ("fetch", "repository", "words"),
    [
        (Fetch("<html>sign in</html>"), {}, "isn't an armoured OpenPGP public key"),
        (Fetch("-----BEGIN PGP PUBLIC KEY BLOCK-----\ncut"), {}, "isn't an armoured OpenPGP public key"),
        (Fetch(OTHER_KEY), {"key_sha256": SHA256}, f"key_sha256 is {SHA256}"),
        (Fetch(None), {}, f"the key at {KEY_URL} can't be downloaded: no route to host"),
    ],
)
def test_invalid_key_changes_nothing(fetch, repository, words):
    node = machine()
    before = copy.deepcopy(node.state())
    with pytest.raises(ShareError, match=r"^repositories: cuda: the key") as caught:
        go(node, options(repository=repository), fetch)
    assert words in str(caught.value) and node.state() == before


STANZA = f"Types: deb\nURIs: http://x/ {URL}\nSuites: /\n"


@pytest.mark.parametrize(
    ("path", "text", "refused"),
    [
        ("sources.list.d/cuda.list", "deb [arch=amd64 signed-by=/a.gpg] http://repo.example.org/cuda /", True),
        ("sources.list.d/cuda.list", f"deb {URL} /", True),
        ("sources.list", f"# x\ndeb  [ signed-by=/a.gpg ]  {URL}  /", True),
        ("sources.list.d/cuda.list", f"#deb [signed-by=/a.gpg] {URL} /", False),
        ("sources.list.d/cuda.list", f"deb-src [signed-by=/a.gpg] {URL} /", False),
        ("sources.list.d/cuda.list", f"deb [signed-by={KEYRING}] {URL} /", False),
        ("sources.list.d/cuda.list", f"deb [signed-by=/a.gpg] {URL} stable main", False),
        ("sources.list.d/cuda.list", "deb [signed-by=/a.gpg] http://else.example.org/cuda/ /", False),
        ("sources.list.d/cuda.list.save", f"deb [signed-by=/a.gpg] {URL} /", False),
        ("sources.list.d/c.sources", f"{STANZA}Signed-By:\n -----BEGIN\n .\n x\n", True),
        ("sources.list.d/c.sources", f"{STANZA}Signed-By: /a.gpg\nEnabled: no\n", False),
        ("sources.list.d/c.sources", f"# a\nTypes: deb\nURIs: http://x/\nSuites: /\n\n{STANZA}", True),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_user_list_with_another_key_is_refused_before_anything_changes(path, text, refused, check):
    node = machine()
    node.files[f"/etc/apt/{path}"] = text
    node.repositories["http://x/"] = node.repositories["http://else.example.org/cuda/"] = {}
    before = copy.deepcopy(node.state())
    if refused:
        with pytest.raises(BadInput, match=f"^/etc/apt/{path} names "):
            go(node, options(), check=check)
        assert node.state() == before and node.changing_commands() == []
    else:
        assert go(node, options(), check=check)["changed"]
        assert node.files[f"/etc/apt/{path}"] == text


def test_the_lock_is_waited_for_in_minutes_where_apt_itself_waits_too():
    clock = FakeClock()

    def waits(argv):
        clock.sleep(300)
        return Done(100, "", "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (x)")

    machine = FakeSystem(commands={"apt-get": waits})
    assert Commands(machine, reason, clock.sleep, clock.now).run(["apt-get", "install", "x"]).rc == 100
    assert len(machine.ran) == 1


def test_waits_while_another_package_manager_holds_the_lock():
    node = machine()
    node.locked = 3
    slept = []
    go(node, options(), sleep=slept.append)
    assert len(slept) == 3
    node.locked = 1000
    with pytest.raises(ShareError, match=r"E: Could not get lock .* held by process 7"):
        go(node, options(packages=["other"]), sleep=slept.append)


def interrupted():
    node = converged()
    node.half, node.unpacked = {"nvidia-driver-cuda"}, {"nvidia-driver-cuda": "580.95.05-1"}
    del node.installed["nvidia-driver-cuda"]
    return node


def test_interrupted_dpkg_is_completed_first():
    node = interrupted()
    result = go(node, options())
    assert "dpkg --configure -a" in headers(result)
    assert node.changing_commands()[0] == "dpkg --force-confdef --force-confold --configure -a"
    node.files["/var/lib/dpkg/updates/0001"] = "journal"
    assert headers(go(node, options())) == ["dpkg --configure -a"]


def test_unfinished_package_of_others_is_no_drift():
    node = converged()
    node.half, node.unpacked = {"broken"}, {"broken": "1"}
    assert not go(node, options())["changed"]


def starts():
    """Initial machines and the requested options."""
    yield "bare", machine, options()
    yield "upgrade", converged, options(packages=[f"{name}=590.44.01-1" for name in PACKAGES])
    moved = {"url": "http://mirror.example.org/", "key_url": KEY_URL + "2"}
    yield "new key and url", converged, options(repository=moved)
    yield "absent", converged, options(state="absent")


@pytest.mark.parametrize(("begin", "params"), [one[1:] for one in starts()], ids=[one[0] for one in starts()])
def test_after_a_kill_at_any_step_the_next_run_reaches_the_same_state(begin, params):
    def fresh():
        node = begin()
        node.repositories["http://mirror.example.org/"] = node.repositories[URL]
        return node

    whole = fresh()
    go(whole, params)
    for moment, node in enumerate(killed_at_every_step(fresh, lambda node: go(node, params)), 1):
        go(node, params)
        assert node.state() == whole.state(), moment
        assert not go(node, params)["changed"], moment


def test_absent_removes_only_own_files_and_packages():
    node = machine()
    node.files["/etc/apt/sources.list.d/mine.list"] = "deb http://deb.example.org stable main\n"
    node.installed["mine"] = "1"
    before = copy.deepcopy(node.state())
    go(node, options())
    result = go(node, options(state="absent"), check=True)
    assert len(result["diff"]) == 6
    go(node, options(state="absent"))
    assert node.state() == before
    assert go(node, options(state="absent")) == {"changed": False, "diff": []}


def test_absent_completes_an_interrupted_dpkg_first():
    node = interrupted()
    node.files["/var/lib/dpkg/updates/0001"] = "journal"
    go(node, options(state="absent"))
    assert node.installed == {} and node.half == set() and KEYRING not in node.files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "My.Set"}, "name: 'My.Set'"),
        ({"repository": {"name": "../x"}}, "repositories: name: '../x'"),
        ({"repository": {"url": "repo.example.org/x"}}, "repositories: cuda: url"),
        ({"repository": {"key_url": "key.asc"}}, "repositories: cuda: key_url"),
        ({"repository": {"key_sha256": "abc"}}, "repositories: cuda: key_sha256"),
        ({"repository": {"components": ["main"]}}, "a suite that ends in / has no components"),
        ({"repository": {"suites": ["a b"]}}, "repositories: cuda: suites"),
        ({"repository": {"key_url": None, "key_text": "x"}}, "isn't an armoured OpenPGP public key"),
        ({"packages": ["-o=x"]}, "packages: '-o=x'"),
        ({"packages": ["other", "other=1"]}, "packages: other is given twice"),
        ({"pins": [{"package": "a\nb", "pin": "x"}]}, "pins: package"),
        ({"never_upgrade": ['a"; };']}, "never_upgrade"),
    ],
)
def test_invalid_input_names_its_option(changes, words):
    with pytest.raises(ShareError, match=re.escape(words)):
        go(machine(), options(**changes))


def test_machine_without_package_manager_is_refused():
    node = machine()
    del node.files["/var/lib/dpkg/status"]
    with pytest.raises(BadInput, match="this node has neither apt, dnf nor zypper"):
        go(node, options())


def test_absent_removes_a_package_that_cant_be_configured():
    """As apt-get does: a kernel module that can't be built must not prevent the removal of its package."""
    node = interrupted()
    node.unconfigurable = {"nvidia-driver-cuda"}
    with pytest.raises(ShareError, match="dpkg: error processing package nvidia-driver-cuda"):
        go(node, options())
    node.installed["nvidia-kernel-open-dkms"] = "580.95.05-1"
    assert "package nvidia-driver-cuda" in headers(go(node, options(state="absent"), check=True))
    go(node, options(state="absent"))
    assert node.installed == {} and node.half == set() and KEYRING not in node.files
    assert not go(node, options(state="absent"))["changed"]


def test_query_lists_native_packages_holds_and_unfinished_packages():
    text = "ii \ta\t1\tamd64\tA. N. Other <a@example.org>\nhi \tb\t2\tall\nrc \tc\t3\tamd64\nun \td\t\t\n"
    text += "iF \te\t4\tamd64\niHR\tf\t4\tamd64\nii \ta\t9\ti386\nit \tg\t5\tamd64"
    packages, unfinished, triggers = installed.parse_dpkg(text, "amd64")
    assert packages == {
        "a": {"version": "1", "held": False, "origin": "A. N. Other <a@example.org>"},
        "b": {"version": "2", "held": True, "origin": ""},
        "g": {"version": "5", "held": False, "origin": ""},
    }
    assert unfinished == ["e", "f"] and triggers


BROKEN = "E: Unable to correct problems, you have held broken packages."
UNMET = "a : Depends: b (= 1) but 2 is to be installed"


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Done(100, "x", "W: a\nE: first\nE: second\n"), "E: first"),
        (Done(100, "", "dpkg: error processing x:\n y\nE: Sub-process dpkg returned (1)"), "dpkg: error processing x"),
        (Done(127, "", "apt-get: not installed"), "apt-get: not installed"),
        (
            Done(100, f"The following packages have unmet dependencies:\n {UNMET}\n", f"{BROKEN}\n"),
            f"{BROKEN} {UNMET}",
        ),
        (Done(9, "", ""), "exit status 9"),
    ],
)
def test_reason_of_a_failure(done, words):
    assert reason(done) == words


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("apt-get -y -o A::B=1 install x=1", "apt-get install x=1"),
        ("env A_B=1 dnf -y -q --setopt=x=1 install a-0:1-1", "dnf install a-0:1-1"),
    ],
)
def test_command_is_reported_without_its_options(argv, text):
    assert shown(argv.split()) == text


def test_conflicting_package_is_refused_with_the_command_that_removes_it():
    node = converged()
    node.installed["nvidia-legacy-390xx-driver"] = "390"
    before = copy.deepcopy(node.state())
    message = r"^conflicts: nvidia-legacy-390xx-driver 390 .* apt-get purge nvidia-legacy-390xx"
    with pytest.raises(BadInput, match=message):
        go(node, options(conflicts=["nvidia-legacy-*"]))
    assert node.state() == before
    # The set's own packages are no conflict.
    assert not go(converged(), options(conflicts=["nvidia-*"]))["changed"]


def test_installation_removes_only_packages_that_replaces_matches():
    node = machine()
    node.installed["nvidia-kernel-dkms"] = "580.95.05-1"
    node.excludes["nvidia-kernel-open-dkms"] = {"nvidia-kernel-dkms"}
    with pytest.raises(ShareError, match=r"apt-get install .* would remove nvidia-kernel-dkms; remove them first"):
        go(node, options())
    assert "nvidia-kernel-dkms" in node.installed and "nvidia-driver-cuda" not in node.installed
    go(node, options(replaces=["nvidia-kernel-*"]))
    assert set(node.installed) == set(PACKAGES)


def test_package_files_of_a_directory_are_offered_to_apt():
    node = machine()
    node.files["/tmp/x/nvidia-driver-cuda_1.deb"] = node.files["/tmp/x/README"] = ""
    go(node, options(node_dir="/tmp/x"))
    install = next(line for line in node.ran if " install " in line)
    assert "--with-source=/tmp/x/nvidia-driver-cuda_1.deb nvidia-driver-cuda=" in install
    with pytest.raises(ShareError, match=r"node_dir: /tmp/y contains no \.deb file"):
        go(node, options(node_dir="/tmp/y", packages=["other"]))


def with_dependencies():
    node = converged()
    node.installed.update({"libnvidia-ml1": "580", "old-orphan": "1", "orphans-lib": "1", "mine": "1", "shared": "1"})
    node.automatic |= {"libnvidia-ml1", "old-orphan", "orphans-lib", "shared"}
    node.needs = {
        "nvidia-driver-cuda": {"libnvidia-ml1", "orphans-lib", "shared"},
        "old-orphan": {"orphans-lib"},
        "mine": {"shared"},
    }
    return node


@pytest.mark.parametrize(
    ("params", "stays"),
    [({}, True), ({"erase_dependencies": True}, False), ({"erase_dependencies": True, "keep": ["libnvidia-*"]}, True)],
)
def test_absent_erases_only_dependencies_that_became_unneeded(params, stays):
    node = with_dependencies()
    go(node, options(state="absent", **params))
    left = {"old-orphan", "orphans-lib", "shared"} | ({"libnvidia-ml1"} if stays else set())
    assert set(node.installed) == left | {"mine"} and node.automatic >= left


def test_absent_only_releases_kept_packages():
    node = with_dependencies()
    go(node, options(state="absent", erase_dependencies=True, keep=["nvidia-driver-cuda"]))
    assert "nvidia-kernel-open-dkms" not in node.installed
    assert {"nvidia-driver-cuda", "libnvidia-ml1"} <= set(node.installed) and node.held == set()
    assert not go(node, options(state="absent", erase_dependencies=True, keep=["nvidia-driver-cuda"]))["changed"]


def test_absent_refuses_to_remove_packages_of_the_user():
    node = with_dependencies()
    node.installed["cuda-toolkit"] = "13"
    node.needs["cuda-toolkit"] = {"nvidia-driver-cuda"}
    before = copy.deepcopy(node.state())
    message = r"^packages: cuda-toolkit need .*; remove them first: apt-get purge cuda-toolkit"
    with pytest.raises(ShareError, match=message):
        go(node, options(state="absent", erase_dependencies=True))
    assert node.state() == before
    go(node, options(state="absent", replaces=["cuda-*"]))
    assert "cuda-toolkit" not in node.installed


def test_every_command_disables_needrestart():
    # FakeSystem accepts apt-get and dpkg only behind env with the variable; without env nothing calls them.
    node = converged()
    ran = []
    node.commands["apt-get"] = node.commands["dpkg --"] = lambda argv: ran.append(argv) or Done(0, "", "")
    del node.commands["env"]
    with pytest.raises(ShareError, match="env: not installed"):
        go(node, options(packages=["other"]))
    assert ran == []
