# SPDX-License-Identifier: GPL-3.0-or-later
"""Installation and removal of the toolkit restore any earlier state of a node."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._node import baseline_apply
from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import observe_baseline
from ansible_collections.kubegpu.share.plugins.module_utils._node.types import PATH
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import config as files
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.facts import PACKAGES as TOOLKIT
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.module import ARGUMENTS, reconcile
from hypothesis import given, settings
from hypothesis import strategies as st
from node_fakes import AptMachine, killed_at_every_step
from package_sets import apply, package_set
from test_toolkit_legacy import DAEMON, DEB822_TWO, DOCKER_LIST, KEY, LISTS, MIXED, TOOLKIT_LIST
from toolkit_kit import add_coreutils

URL = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64/"
OLD, NEW = "1.13.5-1", "1.20.1-1"
# Files and packages that a node may have before, each alone or together.
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
    """A node with apt, dpkg and coreutils, and packages of the toolkit that generate their files."""

    def __init__(self) -> None:
        both = {name: [OLD, NEW] for name in TOOLKIT}
        wrappers = {"nvidia-docker2": ["2.13.0-1"], "nvidia-container-runtime": ["3.13.0-1"]}
        super().__init__({URL: {**both, **wrappers}})
        self.repositories["https://nvidia.github.io/nvidia-docker"] = wrappers
        self.fetched.add(URL)
        add_coreutils(self)
        self.commands |= dict.fromkeys(("chmod", "rmdir", "systemctl restart"), Done(0, "", ""))
        self.commands["date"] = Done(0, "2026-01-02T03:04:05Z\n", "")
        self.commands["dpkg-query -W -f ${db:Status-Abbrev}\\t${Package}\\t${Version}\\n"] = self._named

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
            # The postinst script generates one file; newer packages contain the other.
            if any(word.startswith("nvidia-container-toolkit-base=") for word in argv):
                self.files.setdefault(files.CONFIG, "generated\n")
            if any(word.endswith(f"={NEW}") for word in argv):
                self.files.setdefault(files.ENVIRONMENT, "# packaged\n")
        return done

    def node(self):
        """Return the facts of gpu_node that the baseline reads."""
        packages = {n: {"version": v, "held": n in self.held} for n, v in self.installed.items()}
        nouveau = {"blacklisted": False, "images": []}
        return {"packages": packages, "services": {}, "runtimes": {}, "nouveau": nouveau}


def apt(machine, **params):
    apply(package_set(**params), machine, "debian")


def toolkit(machine, state, keep=()):
    packages = [f"{name}={NEW}" for name in TOOLKIT if name not in keep]
    repository = {"name": "nvidia-container-toolkit", "url": URL, "key_url": f"{URL}gpgkey"}
    apt(
        machine,
        name="toolkit",
        state=state,
        packages=packages,
        repositories=[repository],
        never_upgrade=["nvidia-container-"],
    )


def configure(machine, **params):
    usual = {name: spec.get("default") for name, spec in ARGUMENTS.items()}
    return reconcile({**usual, **params}, False, machine)


def install(machine):
    """Run the tasks of the roles node_baseline and toolkit."""
    baseline_apply.ensure("present", [], False, machine)
    configure(machine, files=False, remove_sources=True, remove_packages=["nvidia-docker2"])
    toolkit(machine, "present")
    replaced = ["nvidia-container-runtime", "nvidia-container-runtime-hook"]
    configure(machine, remove_packages=replaced, old_cdi=True)


def uninstall(machine):
    """Run the tasks of uninstall.yml for the toolkit."""
    seen = (observe_baseline(machine, True) or {}).get("snapshot")
    if seen is None:
        return
    before = {name: package["version"] for name, package in seen["packages"].items()}
    kept = [name for name in TOOLKIT if name in before]
    toolkit(machine, "absent", kept)
    keep = [*seen["files"], *([files.SPECIFICATION] if kept else [])]
    removed = configure(machine, state="absent", keep=keep)["packages"]
    ours = (*TOOLKIT, "nvidia-docker2", "nvidia-container-runtime")
    back = {**removed, **{name: before[name] for name in ours if name in before}}
    for hold in (False, True):
        names = [name for name in back if seen["packages"].get(name, {}).get("held", False) is hold]
        if names:
            apt(machine, name="toolkit-before", packages=[f"{name}={back[name]}" for name in names], hold=hold)
    baseline_apply.ensure("compared", [], False, machine)


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
    monkeypatch.setattr(baseline_apply.facts, "observe", lambda machine, images, packages: machine.node())


@given(subsets)
@settings(max_examples=120)
def test_installation_and_removal(subset):
    machine = start(*subset)
    before = copy.deepcopy(state(machine))
    install(machine)
    assert machine.installed["nvidia-container-toolkit"] == NEW and "nvidia-docker2" not in machine.installed
    uninstall(machine)
    assert state(machine) == before
    assert PATH not in machine.files
    uninstall(machine)
    assert state(machine) == before


@pytest.mark.long
@pytest.mark.parametrize("paths", [[], sorted(FILES)])
def test_the_run_after_a_killed_uninstall_finishes(paths):
    def begin():
        return start(paths, ["nvidia-docker2"] if paths else [], [])

    def installed():
        machine = begin()
        install(machine)
        return machine

    before = state(begin())
    for at, machine in enumerate(killed_at_every_step(installed, uninstall), 1):
        uninstall(machine)
        assert state(machine) == before, at
