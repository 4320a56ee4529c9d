# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever a node had before: after the toolkit was installed and taken away it is as it was."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _apt
from ansible_collections.kubegpu.share.plugins.module_utils import _first_look as look
from ansible_collections.kubegpu.share.plugins.module_utils import _first_look_apply as first_look
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_files as files
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy as legacy
from ansible_collections.kubegpu.share.plugins.module_utils._apt_apply import AptConcern
from ansible_collections.kubegpu.share.plugins.module_utils._first_look_observe import observe
from ansible_collections.kubegpu.share.plugins.module_utils._runner import run
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_files_apply import ToolkitFiles
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_legacy_apply import work as legacy_work
from hypothesis import given, settings
from hypothesis import strategies as st
from node_fakes import AptMachine, Killed
from test_toolkit_legacy import DAEMON, DEB822_TWO, DOCKER_LIST, KEY, LISTS, MIXED, TOOLKIT_LIST

URL = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64/"
TOOLKIT = [
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
]
OLD, NEW = "1.13.5-1", "1.20.1-1"
ARMOURED = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nabc=\n-----END PGP PUBLIC KEY BLOCK-----\n"

# What a node may have before, each alone or together.
FILES = {
    f"{LISTS}/nvidia-docker.list": DOCKER_LIST,
    f"{LISTS}/nvidia-container-toolkit.list": TOOLKIT_LIST,
    f"{LISTS}/two.sources": DEB822_TWO,
    "/etc/apt/sources.list": MIXED + "deb http://deb.example.org stable main\n",
    KEY: "a key",
    "/etc/docker/daemon.json": DAEMON,
    files.CONFIG: "disable-require = true\n",
    files.ENVIRONMENT: "# the user's\nNVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS=disable-nvsandboxutils\n",
}
PACKAGES = {
    "nvidia-docker2": "2.13.0-1",
    "nvidia-container-runtime": "3.13.0-1",
    **dict.fromkeys(TOOLKIT, OLD),
    "bash": "5.2-1",
}


class Machine(AptMachine):
    """apt, dpkg and coreutils over one dict, and the toolkit's packages' own habits."""

    def __init__(self) -> None:
        both = {name: [OLD, NEW] for name in TOOLKIT}
        wrappers = {"nvidia-docker2": ["2.13.0-1"], "nvidia-container-runtime": ["3.13.0-1"]}
        super().__init__({URL: {**both, **wrappers}})
        self.repositories["https://nvidia.github.io/nvidia-docker"] = wrappers
        self.fetched.add(URL)
        self.commands |= {
            "mkdir": Done(0, "", ""),
            "chmod": Done(0, "", ""),
            "rmdir": Done(0, "", ""),
            "date": Done(0, "2026-01-02T03:04:05Z\n", ""),
            "cp -a": self._cp,
            "mv": self._mv,
            "rm -r": self._rm,
            "cmp": lambda argv: Done(0 if self.files.get(argv[2], 1) == self.files.get(argv[3], 2) else 1, "", ""),
            "stat": Done(0, "644 0:0\n", ""),
            "dpkg -S": Done(1, "", "no path found"),
            "dpkg-query -W -f ${db:Status-Abbrev}\\t${Package}\\t${Version}\\n": self._named,
            "systemctl restart": Done(0, "", ""),
        }

    def _cp(self, argv):
        self.step()
        self.files[argv[-1]] = self.files[argv[-2]]
        return Done(0, "", "")

    def _mv(self, argv):
        self.step()
        self.files[argv[-1]] = self.files.pop(argv[-2])
        return Done(0, "", "")

    def _rm(self, argv):
        self.step()
        for path in [one for one in self.files if one.startswith(argv[2] + "/")]:
            del self.files[path]
        return Done(0, "", "")

    def _named(self, argv):
        rows = [f"{'h' if n in self.held else 'i'}i \t{n}\t{v}" for n, v in self.installed.items() if n in argv]
        return Done(0, "\n".join(rows), "")

    def _apt_get(self, argv):
        if "remove" in argv:
            for name in argv[argv.index("remove") + 1 :]:
                self.step()
                self.installed.pop(name, None)
            return Done(0, "", "")
        done = super()._apt_get(argv)
        if done.rc == 0 and "install" in argv:
            # postinst writes the one, newer packages have the other.
            if any(word.startswith("nvidia-container-toolkit-base=") for word in argv):
                self.files.setdefault(files.CONFIG, "generated\n")
            if any(word.endswith(f"={NEW}") for word in argv):
                self.files.setdefault(files.ENVIRONMENT, "# packaged\n")
        return done

    def node(self):
        """gpu_node as far as the first look reads it."""
        packages = {n: {"version": v, "held": n in self.held} for n, v in self.installed.items()}
        return {"packages": packages, "services": {}, "runtimes": {}, "nouveau": {}}


def apt(machine, name, state, packages, hold, **more):
    params = {key: option.get("default") for key, option in _apt.ARGUMENTS.items()}
    params |= {"name": name, "state": state, "packages": packages, "hold": hold, **more}
    run(AptConcern(_apt.package_set(params), machine, "amd64", fetch=lambda url: ARMOURED.encode()), False)


def toolkit(machine, state, keep=()):
    repository = {
        "name": "nvidia-container-toolkit",
        "url": URL,
        "suites": ["/"],
        "components": [],
        "architectures": [],
    }
    apt(
        machine,
        "toolkit",
        state,
        [f"{name}={NEW}" for name in TOOLKIT if name not in keep],
        True,
        repositories=[{**repository, "key_url": "https://nvidia.github.io/libnvidia-container/gpgkey"}],
        never_upgrade=["nvidia-container-"],
    )


def files_of(machine, **params):
    run(
        ToolkitFiles(
            {"state": "present", "old_cdi": False, "accept_unprivileged": True, "keep": [], **params}, machine
        ),
        False,
    )


def install(machine):
    """The tasks of role first_look and of role toolkit."""
    first_look.work("present", [], False, machine)
    legacy_work(legacy.Wanted(False, True, ("nvidia-docker2",)), False, machine)
    toolkit(machine, "present")
    forerunners = ("nvidia-container-runtime", "nvidia-container-runtime-hook")
    legacy_work(legacy.Wanted(False, False, forerunners), False, machine)
    files_of(machine, old_cdi=True)


def uninstall(machine):
    """The tasks of uninstall.yml for the toolkit."""
    seen = (observe(machine, True) or {}).get("seen")
    if seen is None:
        return
    before = {name: one["version"] for name, one in seen["packages"].items()}
    kept = [name for name in TOOLKIT if name in before]
    toolkit(machine, "absent", kept)
    files_of(machine, state="absent", keep=[*seen["files"], *([files.SPECIFICATION] if kept else [])])
    returned = legacy_work(legacy.Wanted(True, True, ()), False, machine)["packages"]
    back = {
        **returned,
        **{name: before[name] for name in (*TOOLKIT, "nvidia-docker2", "nvidia-container-runtime") if name in before},
    }
    for hold in (False, True):
        names = [name for name in back if seen["packages"].get(name, {}).get("held", False) is hold]
        if names:
            apt(machine, "toolkit-before", "present", [f"{name}={back[name]}" for name in names], hold)
    first_look.work("compared", [], False, machine)


def state(machine):
    ignored = ("/var/lib/dpkg/",)
    return (
        {path: text for path, text in machine.files.items() if not path.startswith(ignored)},
        dict(machine.installed),
        set(machine.held) & set(machine.installed),
    )


def start(paths, names, held):
    machine = Machine()
    machine.files |= {path: FILES[path] for path in paths}
    machine.installed |= {name: PACKAGES[name] for name in names}
    # The toolkit's packages depend on each other.
    if set(names) & set(TOOLKIT):
        machine.installed |= {name: OLD for name in TOOLKIT}
        machine.files.setdefault(files.CONFIG, "of old\n")
    machine.held = set(held) & set(machine.installed)
    return machine


subsets = st.tuples(
    st.sets(st.sampled_from(sorted(FILES))),
    st.sets(st.sampled_from(sorted(PACKAGES))),
    st.sets(st.sampled_from(sorted(PACKAGES))),
)


@pytest.fixture(autouse=True)
def observed(monkeypatch):
    monkeypatch.setattr(first_look._node_info, "observe", lambda machine, images, packages: machine.node())


@given(subsets)
@settings(max_examples=120)
def test_installed_and_taken_away(subset):
    machine = start(*subset)
    before = copy.deepcopy(state(machine))
    install(machine)
    assert machine.installed["nvidia-container-toolkit"] == NEW and "nvidia-docker2" not in machine.installed
    uninstall(machine)
    assert state(machine) == before
    assert look.PATH not in machine.files
    uninstall(machine)
    assert state(machine) == before


@pytest.mark.parametrize("paths", [[], sorted(FILES)])
def test_an_uninstall_that_is_killed_anywhere_is_finished_by_the_next(paths):
    def installed():
        machine = start(paths, ["nvidia-docker2"] if paths else [], [])
        before = copy.deepcopy(state(machine))
        install(machine)
        return machine, before

    whole, before = installed()
    begin = whole.events
    uninstall(whole)
    assert state(whole) == before
    for at in range(begin + 1, whole.events + 1):
        machine, before = installed()
        machine.kill_at = at
        with pytest.raises(Killed):
            uninstall(machine)
        machine.kill_at = 0
        uninstall(machine)
        assert state(machine) == before, at
