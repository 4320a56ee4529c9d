# SPDX-License-Identifier: GPL-3.0-or-later
"""Kata's runtime in containerd, beside NVIDIA's and without it, as real containerd programs read the files."""

from __future__ import annotations

import itertools
from pathlib import Path

import corpus_containerd
import pytest
import real_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import (
    containerd,
    containerd_plan,
    handler,
    handler_plan,
)
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.handler import Handler, HandlerEngine, work
from fake_node import FakeNode
from runtime_kit import containerd_state, show_unit

KATA = Handler("kata-qemu-nvidia-gpu", "/opt/kata/bin/containerd-shim-kata-v2", "/opt/kata/share/kata.toml")
NVIDIA = containerd.Options(present=True, binary="/usr/bin/nvidia-container-runtime")
WITHOUT = containerd.Options(present=False)
# By their tables: a file with a default runtime of the user's, an empty one, none, and one of kata-deploy's neighbours.
MAINS = {
    "none": None,
    "empty": "",
    "imports": 'version = 3\nimports = ["/nowhere/*.toml"]  # mine\n[plugins."io.containerd.cri.v1.runtime"]\n'
    "enable_selinux = true\n",
    "older": 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_selinux = true\n',
}
TWO = tuple(parameter for parameter in real_containerd.PARAMETERS if str(parameter.values[0]).startswith("2"))


class Node:
    """A folder with a containerd's configuration, and what the plans make of it."""

    def __init__(self, binary, folder, text):
        self.binary, self.config = binary, folder / "config.toml"
        if text is not None:
            self.config.write_text(text)
        self.before = self.files()

    def files(self):
        return {path: path.read_text() for path in sorted(self.config.parent.rglob("*.toml"))}

    def seen(self):
        return real_containerd.observe(self.binary, self.config)

    def runtimes(self):
        return set(containerd.effective(self.seen()["dump"]).names)

    def kata(self, present, wanted=KATA):
        return self._done(lambda: handler_plan.make_plan(wanted, present, self.seen()))

    def nvidia(self, present):
        return self._done(lambda: containerd_plan.make_plan(NVIDIA if present else WITHOUT, self.seen()))

    def _done(self, planned):
        """Apply a plan, after which there is nothing left to do; return how many files it changed."""
        files = planned().files
        for row in files:
            path = Path(str(row["path"]))
            if row["after"] is not None and path.exists():
                # As the module restores the credentials, which the controller never has.
                row["after"] = containerd.unmask(row["after"], path.read_bytes().decode())
        real_containerd.apply(files)
        assert not planned().files
        return len(files)


@pytest.fixture(params=TWO)
def binary(request):
    return real_containerd.of(request.param)


@pytest.mark.parametrize("text", MAINS.values(), ids=MAINS)
@pytest.mark.parametrize("order", list(itertools.permutations(("kata", "nvidia"))), ids=str)
def test_either_runtime_is_added_and_removed_without_the_other(binary, tmp_path, text, order):
    node = Node(binary, tmp_path, text)
    names = {"kata": KATA.name, "nvidia": "nvidia"}
    for number, name in enumerate(order, 1):
        getattr(node, name)(True)
        assert {names[each] for each in order[:number]} <= node.runtimes()
    assert not handler.differences(node.seen()["dump"], KATA)
    assert containerd.effective(node.seen()["dump"]).default_runtime == "nvidia"
    for number, name in enumerate(order, 1):
        getattr(node, name)(False)
        left = {names[each] for each in order[number:]}
        assert node.runtimes() & set(names.values()) == left
    assert node.files() == node.before


LAB = "2.4"
# As far as this release reads them, and without those that the plan for NVIDIA's runtime refuses, too.
ROWS = [row for row in corpus_containerd.rows() if LAB in row.releases and LAB not in row.refused]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_configurations_from_practice_keep_every_setting_and_byte(tmp_path, row):
    for path, text in row.texts(LAB).items():
        if path.startswith(corpus_containerd.ETC):
            target = tmp_path / path.removeprefix(f"{corpus_containerd.ETC}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.replace(corpus_containerd.ETC.encode(), str(tmp_path).encode()))
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    node = Node(real_containerd.of(LAB), tmp_path, None)
    engine = HandlerEngine(real_containerd.Machine(node.binary, str(node.config)), KATA.name, KATA)
    old = engine.config_on_disk()
    node.kata(True)
    unmet, lost = engine.compare(old, engine.config_on_disk())
    moved = {loss.path[-1] for loss in lost}
    # The run would be rolled back with these named: containerd reads them differently beside a table of runtimes.
    assert not unmet and moved <= set(containerd_plan.MOVED), lost
    node.kata(False)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "1.7.24"}, "upgrade to containerd 2"),
        ({"embedded": "k3s"}, "kata_state: external"),
        ({"version": ""}, "isn't installed"),
    ],
)
def test_where_no_drop_in_can_add_it_it_is_refused(changes, message):
    seen = containerd_state({"/etc/containerd/config.toml": "version = 2\n"}, **{"version": "2.2.0", **changes})
    with pytest.raises(BadInput, match=message):
        handler_plan.make_plan(KATA, True, seen)
    assert handler_plan.make_plan(KATA, False, seen).plan.empty


def test_what_kata_deploy_wrote_stays_its_own(tmp_path):
    node = Node(real_containerd.of(LAB), tmp_path, "version = 3\n")
    node.kata(True)
    [own] = (path for path in node.files() if path.name == handler.DROP_IN_NAME)
    other = own.with_name("kata-deploy.toml")
    other.write_text(own.read_text())
    node.config.write_text(f'version = 3\nimports = ["{other}"]\n')
    own.unlink()
    assert node.kata(True) == 0
    with pytest.raises(BadInput, match=r"ConfigPath is .* kata_state: external"):
        node.kata(True, Handler(KATA.name, KATA.shim, "/elsewhere.toml"))
    assert node.kata(False) == 0 and other.exists()


MAIN, DROP_IN = "/etc/containerd/config.toml", f"/etc/containerd/conf.d/{handler.DROP_IN_NAME}"
CRI = "plugins.'io.containerd.cri.v1.runtime'.containerd"
PLAIN = f"[{CRI}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
WITH = PLAIN + (
    f"[{CRI}.runtimes.{KATA.name}]\nruntime_type = 'io.containerd.{KATA.name}.v2'\nruntime_path = '{KATA.shim}'\n"
    "privileged_without_host_devices = true\npod_annotations = ['io.katacontainers.*']\n"
    "container_annotations = ['io.kubernetes.container.terminationMessage*']\n"
    f"[{CRI}.runtimes.{KATA.name}.options]\nConfigPath = '{KATA.config}'\n"
)


def simulated(dump=lambda node: WITH if DROP_IN in node.files else PLAIN, crictl=None, **files):
    """A machine with a containerd whose daemon says what it runs with."""
    node = FakeNode({MAIN: "version = 3\n", KATA.shim: "", KATA.config: "", "/usr/local/bin/containerd": "", **files})
    shown = show_unit(12, f"/usr/local/bin/containerd --config {MAIN}")
    node.answers |= {
        "systemctl": lambda argv: shown if argv[1] == "show" else Done(0, "", ""),
        "containerd": lambda argv: Done(0, dump(node), ""),
        "ctr": lambda argv: Done(0, "io.containerd.grpc.v1 cri linux/amd64 ok\n", ""),
        "crictl": lambda argv: Done(0, crictl, ""),
    }
    if crictl:
        node.files["/usr/bin/crictl"] = ""
    return node


def add(node):
    seen = containerd_state({MAIN: node.files[MAIN]}, version="2.4.2", dump=PLAIN)
    plan = {"files": list(handler_plan.make_plan(KATA, True, seen).files)}
    params = {
        "name": KATA.name,
        "state": "present",
        "shim": KATA.shim,
        "config": KATA.config,
        "timeout": 1,
        "plan": plan,
    }
    return work(params, node)


def test_the_running_daemon_has_it_or_the_files_are_as_before():
    node = simulated()
    assert add(node)["restarted"] and DROP_IN in node.files
    ran = [line for line in node.log if line.startswith("systemctl restart")]
    assert ran == ["systemctl restart containerd.service"]
    for broken in (
        simulated(crictl='{"config": {"containerd": {"defaultRuntimeName": "runc", "runtimes": {"runc": {}}}}}'),
        simulated(lambda node: PLAIN),
        simulated(lambda node: WITH + "[debug]\nlevel = 'trace'\n" if DROP_IN in node.files else PLAIN),
    ):
        with pytest.raises(NotInEffect):
            add(broken)
        assert broken.files[MAIN] == "version = 3\n" and DROP_IN not in broken.files


def test_without_kata_nothing_is_written():
    node = simulated()
    del node.files[KATA.config]
    with pytest.raises(BadInput, match="install Kata first"):
        add(node)
    assert DROP_IN not in node.files
