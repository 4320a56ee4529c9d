# SPDX-License-Identifier: GPL-3.0-or-later
"""pinned_packages on scripted dnf 4 and dnf 5: dnf 5 isn't available here, and some cases are hard to reproduce."""

from __future__ import annotations

import re

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._packages.paths import MANAGERS
from ansible_collections.kubegpu.share.plugins.module_utils._packages.rpm_backends import (
    Need,
    missing,
    parse_list,
    parse_removed,
    parse_xml_removed,
    reason,
)
from node_fakes import FakeSystem, killed_at_every_step
from package_sets import KEY, apply, package_set

KEY_URL = "http://repo.example.org/key.asc"
PROGRAMS = {"dnf": "/usr/bin/dnf", "dnf5": "/usr/bin/dnf5"}


class RpmMachine(FakeSystem):
    """A node with rpm and one manager above it; packages have no dependencies unless a test adds them."""

    def __init__(self, manager: str) -> None:
        super().__init__({"/var/lib/rpm/Packages": "", PROGRAMS[manager]: "", "/etc/dnf/dnf.conf": ""})
        self.manager = MANAGERS[manager]
        self.available = {
            "nvidia-open": ["3:570.10-1", "3:580.95-1", "3:590.44-1"],
            "nvidia-modprobe": ["3:580.95-1"],
            **({self.manager.lock_plugin: ["4-1"]} if self.manager.lock_plugin else {}),
        }
        if self.manager.lock_plugin:
            self.files[self.manager.lock_plugin_file] = "[main]\nenabled = 1\n"
        self.installed: dict[str, str] = {}
        self.automatic: set[str] = set()
        self.broken = ""
        self.locked = 0
        self.commands.update({"env": self._env, "rpm": self._rpm})

    def state(self):
        return dict(self.files), dict(self.installed)

    def ran_of_managers(self):
        return [line for line in self.ran if not line.startswith(("rpm", "uname"))]

    def _rpm(self, argv):
        if argv[1] == "-qa":
            rows = [(name, *version.rpartition(":")[::2]) for name, version in sorted(self.installed.items())]
            return Done(0, "".join(f"{name}\t{epoch or 0}\t{rest}\tnoarch\t1\tN\n" for name, epoch, rest in rows), "")
        return Done(1 if argv[1] == "-q" else 0, "", "")

    def _env(self, argv):
        self.ran.pop()
        words = [word for word in argv[1:] if not re.match(r"[A-Z_]+=", word)]
        self.ran.append(" ".join(words))
        assert words[0] == self.manager.name
        if self.locked:
            self.locked -= 1
            return Done(200, "", "Error: can't create transaction lock on /var/lib/rpm/.rpm.lock (Resource busy)")
        options = [word for word in words[1:] if word.startswith("-")]
        command, *names = [word for word in words[1:] if not word.startswith("-") and word != "%{name} %{reason}\n"]
        return getattr(self, f"_{command}")(options, names)

    def _makecache(self, options, names):
        assert names == [] and any(word.endswith(".skip_if_unavailable=0") for word in options)
        words = f"Error: Failed to download metadata for repo 'kubegpu-cuda': {self.broken}"
        return Done(1, "", words) if self.broken else Done(0, "", "")

    def _list(self, options, names):
        rows = [f"{name}.noarch   {one}   kubegpu-cuda\n" for name in names for one in self.available.get(name, [])]
        if not rows:
            return Done(1, "", "Error: No matching Packages to list")
        return Done(0, "Available Packages\n" + "".join(rows), "")

    def _repoquery(self, options, names):
        if "--installed" in options:
            rows = [f"{name} {'Dependency' if name in self.automatic else 'User'}\n" for name in names]
            return Done(0, "".join(rows), "")
        names = [name for name in names if "\t" not in name]
        return Done(0, "".join(f"{name}\t{one}\n" for name in names for one in self.available.get(name, [])), "")

    def _spec(self, spec):
        for name, versions in self.available.items():
            for version in versions:
                epoch, _colon, rest = version.rpartition(":")
                if spec == f"{name}-{epoch or 0}:{rest}":
                    return name, version
        return (spec, self.available[spec][-1]) if spec in self.available else None

    def _install(self, options, names):
        for spec in names:
            found = self._spec(spec)
            if found is None:
                return Done(1, "", f"Error: Unable to find a match: {spec}")
            name, version = found
            if name == self.manager.lock_plugin:
                self.files[self.manager.lock_plugin_file] = "[main]\nenabled = 1\n"
            self.step()
            self.installed[name] = version
        self.step()
        return Done(0, "", "")

    def _remove(self, options, names):
        clean = any(word.endswith("clean_requirements_on_remove=1") for word in options)
        going = [name for name in self.installed if name in names or (clean and name in self.automatic)]
        if "--assumeno" in options:
            rows = [f" {name}   noarch   1   @r   0\n" for name in going]
            return Done(1, "Removing:\n" + "".join(rows) + "\n", "Operation aborted.")
        for name in going:
            self.step()
            del self.installed[name]
        self.step()
        return Done(0, "", "")

    def _mark(self, options, names):
        (self.automatic.discard if names[0] == "user" else self.automatic.add)(names[1])
        return Done(0, "", "")


def go(node, check=False, fetch=lambda _url: KEY.encode(), sleep=lambda _seconds: None, **changes):
    params = {
        "name": "driver",
        "repositories": [{"name": "cuda", "url": "http://repo.example.org/x/", "key_url": KEY_URL}],
        "packages": ["nvidia-open=580.95"],
        **changes,
    }
    return apply(package_set(**params), node, "redhat", check, fetch=fetch, sleep=sleep)


@pytest.fixture(params=["dnf5", "dnf"])
def node(request):
    return RpmMachine(request.param)


def test_bare_machine_then_no_change_then_absent(node):
    before = node.state()
    predicted = go(node, check=True, fetch=None)
    assert node.state() == before and node.ran_of_managers() == []
    assert go(node)["diff"] == predicted["diff"]
    assert node.installed["nvidia-open"] == "3:580.95-1"
    node.ran.clear()
    assert go(node, fetch=None) == {"changed": False, "diff": []} and node.ran_of_managers() == []
    go(node, state="absent")
    assert node.installed == {}
    assert {path: text for path, text in node.files.items() if text or path in before[0]} == before[0]


def test_lock_plugin_is_installed_and_removed_with_the_last_lock():
    node = RpmMachine("dnf")
    plugin = node.manager.lock_plugin
    del node.files[node.manager.lock_plugin_file]
    result = go(node)
    assert f"package {plugin}" in [one["before_header"] for one in result["diff"]]
    assert plugin in node.installed
    go(node, state="absent", erase_dependencies=True, keep=[plugin])
    assert plugin in node.installed
    go(node)
    node.files[node.manager.lock_path] += "mine-0:1-1.*\n"
    go(node, state="absent", erase_dependencies=True)
    assert plugin in node.installed
    go(node)
    node.files[node.manager.lock_path] = node.files[node.manager.lock_path].replace("mine-0:1-1.*\n", "")
    go(node, state="absent", erase_dependencies=True)
    assert node.installed == {}


def test_dependencies_are_removed_except_kept_ones():
    node = RpmMachine("dnf5")
    go(node)
    node.installed["nvidia-modprobe"] = "3:580.95-1"
    node.automatic = {"nvidia-modprobe"}
    go(node, state="absent", erase_dependencies=True, keep=["nvidia-modprobe"])
    assert set(node.installed) == {"nvidia-modprobe"} and node.automatic == {"nvidia-modprobe"}
    go(node)
    go(node, state="absent", erase_dependencies=True)
    assert node.installed == {}


def test_locks_of_another_set_are_restored_after_dependencies_were_removed():
    node = RpmMachine("dnf")
    go(node, hold_also=["nvidia-*"])
    go(node, name="tools", repositories=[], packages=["nvidia-modprobe"])
    assert "nvidia-modprobe-3:580.95-1.?*" in node.files[node.manager.lock_path]
    # What came along and went is no longer locked, though the set's own patterns aren't given.
    go(node, state="absent", erase_dependencies=True)
    assert node.files[node.manager.lock_path] == "nvidia-modprobe-3:580.95-1.?*\n"
    node.installed["libx"], node.automatic = "1-1", {"libx"}
    node.files[node.manager.lock_path] += "libx-0:1-1.?*\n"
    go(node, name="tools", repositories=[], packages=["nvidia-modprobe"], state="absent", erase_dependencies=True)
    assert node.installed == {} and node.files[node.manager.lock_path] == ""


def test_reset_module_leaves_no_file():
    node = RpmMachine("dnf")
    path, mine = "/etc/dnf/modules.d/nvidia-driver.module", "/etc/dnf/modules.d/nodejs.module"
    node.files[mine] = "[nodejs]\nname=nodejs\nstream=\nprofiles=\nstate=\n"

    def module(_options, words):
        stream = words[1].partition(":")[2]
        state = "enabled" if words[0] == "enable" else ""
        node.files[path] = f"[nvidia-driver]\nname=nvidia-driver\nstream={stream}\nprofiles=\nstate={state}\n"
        return Done(0, "", "")

    node._module = module
    go(node, streams=[{"module": "nvidia-driver", "stream": "580-open"}])
    assert "state=enabled" in node.files[path]
    both = [{"module": "nvidia-driver", "stream": one} for one in ("580-open", "580-dkms")]
    go(node, streams=both, state="absent")
    assert path not in node.files and mine in node.files
    assert not go(node, streams=both, state="absent")["changed"]


def test_locked_dependents_are_removed_with_the_set(node):
    go(node)
    node.installed.update({"nvidia-compute-G06": "3:580.95-1", "cuda-toolkit": "13-1"})
    plain = node._remove
    dependents = {"nvidia-compute-G06"}

    def remove(options, names):
        return plain(options, [*names, *(dependents if "nvidia-open" in names else ())])

    node._remove = remove
    with pytest.raises(ShareError, match="packages: nvidia-compute-G06 need nvidia-open; remove them first"):
        go(node, state="absent", erase_dependencies=True)
    ours = {"state": "absent", "erase_dependencies": True, "hold_also": ["nvidia-compute-G*"]}
    with pytest.raises(ShareError, match=r"keep: nvidia-compute-G06 can't stay|packages: nvidia-compute-G06 need"):
        go(node, keep=["nvidia-compute-G06"], **ours)
    dependents.add("cuda-toolkit")
    with pytest.raises(ShareError, match="packages: cuda-toolkit need nvidia-open; remove them first"):
        go(node, **ours)
    dependents.remove("cuda-toolkit")
    go(node, **ours)
    assert set(node.installed) == {"cuda-toolkit"}


def test_dependencies_that_zypper_forgot_are_removed():
    system = FakeSystem(dict.fromkeys(("/var/lib/zypp/AutoInstalled", "/usr/bin/zypper", "/var/lib/rpm/Packages"), ""))
    going = '<to-remove><solvable type="package" name="nvidia-persistenced"/>'
    going += '<solvable type="package" name="nvidia-compute-G06"/></to-remove>'
    removed = []

    def zypper(argv):
        if "--dry-run" not in argv:
            removed.extend(argv[argv.index("--clean-deps") + 1 :])
        return Done(0, going, "")

    rows = "".join(f"{name}\t0\t1-1\tx86_64\t1\tN\n" for name in ("nvidia-persistenced", "nvidia-compute-G06"))
    system.commands.update(
        {"rpm -qa": lambda _argv: Done(0, "" if removed else rows, ""), "rpm -q ": Done(1, "", ""), "env": zypper}
    )
    held = MANAGERS["zypper"].locks.render("", lambda _name: True, {"nvidia-compute-G06": "1-1"})
    system.files["/etc/zypp/locks"] = held
    go(
        system,
        repositories=[],
        packages=["nvidia-persistenced"],
        hold_also=["nvidia-compute-G*"],
        state="absent",
        erase_dependencies=True,
    )
    assert removed == ["nvidia-persistenced"]
    assert "nvidia-compute-G06" not in system.files.get("/etc/zypp/locks", "")


def test_completing_a_transaction_keeps_duplicates_of_others():
    node = RpmMachine("dnf")
    erased = []
    rows = "jdk1.8\t0\t1-1\tnoarch\t1\tN\njdk1.8\t0\t2-1\tnoarch\t2\tN\n"
    twice = "nvidia-open\t3\t570.10-1\tnoarch\t1\tN\n"
    plain = node._rpm

    def rpm(argv):
        if argv[1] == "-e":
            erased.extend(argv[3:])
        done = plain(argv)
        return Done(0, done.out + rows + ("" if erased else twice), "") if argv[1] == "-qa" else done

    node.commands["rpm"] = rpm
    node.installed["nvidia-open"] = "3:580.95-1"
    go(node)
    assert erased == ["nvidia-open-570.10-1.noarch"]


def test_waits_while_another_manager_holds_the_lock(node):
    node.locked = 3
    slept = []
    go(node, sleep=slept.append)
    assert len(slept) == 3 and "nvidia-open" in node.installed
    node.locked = 1000
    with pytest.raises(ShareError, match="can't create transaction lock"):
        go(node, packages=["nvidia-modprobe"])


def test_failed_install_leaves_the_old_version_locked(node):
    go(node)
    before = node.state()
    message = "no repository has nvidia-open=600; available: 3:590.44-1, 3:580.95-1, 3:570.10-1"
    with pytest.raises(ShareError, match=message):
        go(node, packages=["nvidia-open=600"])
    assert node.state() == before


@pytest.mark.parametrize("manager", PROGRAMS)
@pytest.mark.parametrize("state", ["present", "absent"])
def test_after_a_kill_at_any_step_the_next_run_reaches_the_same_state(manager, state):
    def fresh():
        node = RpmMachine(manager)
        if state == "absent":
            go(node)
        return node

    whole = fresh()
    go(whole, state=state)
    for moment, node in enumerate(killed_at_every_step(fresh, lambda node: go(node, state=state)), 1):
        go(node, state=state)
        assert node.state() == whole.state(), moment
        assert not go(node, state=state)["changed"], moment


# --------------------------------------------------------------------------- recorded output

PROBLEM = "Problem: problem with installed package kmod-open-3:590.44-1.el9.noarch"
CAUSE = "package kmod-open-3:590.44-1.el9.noarch conflicts with kmod-latest provided by kmod-latest-3:580.95-1.el9"


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Done(1, "", f"Error:\n {PROBLEM}\n  - {CAUSE}\n  - conflicting requests\n"), f"{PROBLEM}; {CAUSE}"),
        (Done(1, "", "Error: Unable to find a match: x-1\n"), "Error: Unable to find a match: x-1"),
        (Done(104, "Loading repository data...\nPackage 'x' not found.\n", ""), "Package 'x' not found."),
        (
            Done(4, "Problem: a requires b, which cannot be provided\n  not installable providers: b[r]\n", ""),
            "Problem: a requires b, which cannot be provided; not installable providers: b[r]",
        ),
        (Done(4, "<?xml?>\n<message type=\"error\">Repository 'x' failed.</message>", ""), "Repository 'x' failed."),
        (Done(127, "", "env: 'dnf': No such file or directory"), "env: 'dnf': No such file or directory"),
        (Done(9, "", ""), "exit status 9"),
    ],
)
def test_reason_of_a_failure(done, words):
    assert reason(done) == words


def test_list_with_broken_lines_is_parsed():
    text = (
        "Installed Packages\na.noarch   1-1   @r\nAvailable Packages\n"
        "a-name-that-is-much-too-long-for-its-column.x86_64\n                     3:580.95-1.el8      cuda\n"
        "a.noarch  0:2-1  r\n"
    )
    assert parse_list(text) == {"a": {"1-1", "2-1"}, "a-name-that-is-much-too-long-for-its-column": {"3:580.95-1.el8"}}


def test_removals_of_every_kind_are_parsed():
    text = (
        "Dependencies resolved.\n====\n Package   Arch\n====\nRemoving:\n a    noarch 1 @r 0\n"
        "Installing:\n b  noarch 1 r 0\n     replacing  old.noarch 1-1\n"
        "Removing dependent packages:\n a-very-long-name\n          noarch 1 @r 0\n"
        "Removing unused dependencies:\n c    noarch 1 @r 0\n\nTransaction Summary\n====\nRemove  3 Packages\n"
    )
    assert parse_removed(text) == ["a", "a-very-long-name", "c"]
    xml = (
        '<to-install>\n<solvable type="package" name="x"/></to-install>'
        '<to-remove>\n<solvable type="package" name="y" a="b">\n</to-remove>'
    )
    assert parse_xml_removed(xml) == ["y"] and parse_xml_removed("<stream/>") == []


def test_missing_capabilities_are_parsed():
    text = (
        "error: Failed dependencies:\n\tkmod = 3:580.95 is needed by nvidia-open-3:580.95-1.noarch\n"
        "\tlibx.so()(64bit) is needed by a-1-1.x86_64\n\tb >= 2 is needed by a-1-1.x86_64\n"
        "\told = 1 is needed by (installed) old-tools-1-1.noarch\n\t(c or d) is needed by a-1-1.x86_64\n"
    )
    assert missing(text) == [
        Need("kmod", "3:580.95"),
        Need("libx.so()(64bit)", ""),
        Need("b", ""),
        Need("old", "1", "old-tools"),
        Need("(c or d)", ""),
    ]
