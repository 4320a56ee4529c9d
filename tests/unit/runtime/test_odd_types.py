# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Foreign configuration files with a value of another type at each place: a sentence or a plan, never a traceback."""

from __future__ import annotations

import copy
import json
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd_plan, crio_plan, docker_plan
from corpus_others import _crio_state
from runtime_kit import ABSENT, PRESENT, containerd_state, docker_state

Tree = dict[str, t.Any]
ODD: tuple[t.Any, ...] = ("x", "", 1, 1.5, True, [], ["x"], [1], [{}], [[]], {}, {"": {}}, {"x": 1}, {"x": {"y": []}})
MAIN = "/etc/crio/crio.conf"
TOOLKIT = "/etc/nvidia-container-runtime/config.toml"

CRIO: Tree = {
    "crio": {
        "root": "/r",
        "storage_option": ["a=b"],
        "runtime": {
            "default_runtime": "crun",
            "conmon": "/usr/bin/conmon",
            "runtimes": {"crun": {"runtime_path": "/usr/bin/crun", "runtime_type": "oci", "monitor_env": ["A=b"]}},
            "workloads": {"w": {"resources": {"cpushares": 1}}},
        },
    }
}
LOW_LEVEL: Tree = {"nvidia-container-runtime": {"runtimes": ["runc", "crun"], "modes": {"cdi": {"x": "y"}}}}
DOCKER: Tree = {
    "default-runtime": "mine",
    "runtimes": {"mine": {"path": "/m", "runtimeType": "", "runtimeArgs": ["-x"], "options": {"a": 1}}, "nvidia": {}},
    "features": {"cdi": False},
    "hosts": ["unix:///run/docker.sock"],
}
OPTIONS = {"SystemdCgroup": True, "BinaryName": "/usr/bin/runc"}
RUNTIMES = {"runc": {"runtime_type": "io.containerd.runc.v2", "options": OPTIONS}}
CONTAINERD: dict[int, Tree] = {
    version: {
        "version": version,
        "imports": ["/etc/containerd/conf.d/*.toml"],
        "disabled_plugins": ["x"],
        "plugins": {
            name: {"enable_cdi": False, "containerd": {"default_runtime_name": "runc", "runtimes": RUNTIMES}},
        },
    }
    for version, name in ((2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime"))
}


def places(tree: t.Any, above: tuple[str, ...] = ()) -> t.Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def variants(tree: Tree, values: tuple[t.Any, ...]) -> t.Iterator[tuple[str, Tree]]:
    """Yield the tree with each value replaced by each odd one."""
    for path in places(tree):
        for odd in values:
            changed = copy.deepcopy(tree)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = odd
            yield f"{'.'.join(path)} = {odd!r}", changed


def toml(tree: Tree, above: tuple[str, ...] = ()) -> str:
    """Write a tree with a header for each table."""
    lines = [f"{json.dumps(key)} = {value(one)}" for key, one in tree.items() if not isinstance(one, dict)]
    for key, one in tree.items():
        if isinstance(one, dict):
            path = (*above, key)
            lines += [f"[{'.'.join(map(json.dumps, path))}]", toml(one, path)]
    return "\n".join(lines) + "\n"


def value(one: t.Any) -> str:
    if isinstance(one, list):
        return f"[{', '.join(map(value, one))}]"
    return "{}" if isinstance(one, dict) else json.dumps(one)


def tried(make: t.Callable[[t.Any], t.Any], tree: Tree, name: str, values: tuple[t.Any, ...] = ODD) -> list[str]:
    """Return what isn't a plan or an error with a sentence."""
    wrong = []
    for what, changed in variants(tree, values):
        for wanted in (PRESENT, ABSENT):
            try:
                make((wanted, changed))
            except ShareError as error:
                if not str(error).strip() or "  " in str(error):
                    wrong.append(f"{name}: {what}: {error}")
            except Exception as error:
                wrong.append(f"{name}: {what}: {type(error).__name__}: {error}")
    return wrong


def test_crio() -> None:
    def make(given: t.Any) -> t.Any:
        return crio_plan.make_plan(given[0], t.cast("t.Any", _crio_state({MAIN: toml(given[1]).encode()})))

    assert tried(make, CRIO, "crio") == []


def test_the_toolkits_file() -> None:
    def make(given: t.Any) -> t.Any:
        texts = {MAIN: toml(CRIO).encode(), TOOLKIT: toml(given[1]).encode()}
        return crio_plan.make_plan(given[0], t.cast("t.Any", _crio_state(texts)))

    assert tried(make, LOW_LEVEL, "toolkit") == []


@pytest.mark.parametrize("version", ["20.10.7", "28.5.0"])
def test_docker(version: str) -> None:
    def make(given: t.Any) -> t.Any:
        return docker_plan.make_plan(given[0], t.cast("t.Any", docker_state(json.dumps(given[1]), version=version)))

    assert tried(make, DOCKER, version) == []


@pytest.mark.parametrize(("version", "release"), [(2, "1.7.28"), (2, "2.1.4"), (3, "2.2.0")])
def test_containerd(version: int, release: str) -> None:
    def make(given: t.Any) -> t.Any:
        state = containerd_state({"/etc/containerd/config.toml": toml(given[1])}, version=release)
        return containerd_plan.make_plan(given[0], t.cast("t.Any", {**state, "dump": toml(CONTAINERD[version])}))

    assert tried(make, CONTAINERD[version], release) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('crio = "x"\n', f"{MAIN}: crio isn't a table"),
        ("[crio]\nruntime = []\n", f"{MAIN}: crio.runtime isn't a table"),
        ("[crio.runtime]\nruntimes = 1\n", f"{MAIN}: crio.runtime.runtimes isn't a table"),
        ("[crio.runtime]\ndefault_runtime = 1\n", f"{MAIN}: crio.runtime.default_runtime isn't a text"),
        ('[crio.runtime.runtimes.""]\nruntime_path = "/x"\n', f"{MAIN}: a table of crio.runtime.runtimes has an empty"),
        ("[crio.runtime.runtimes.a]\nruntime_path = 1\n", f"{MAIN}: runtime_path of runtime a isn't a text"),
    ],
)
def test_crios_file_and_setting_are_named(text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence.replace(".", r"\.")):
        crio_plan.make_plan(PRESENT, t.cast("t.Any", _crio_state({MAIN: text.encode()})))


@pytest.mark.parametrize("key", ["imports", "disabled_plugins"])
def test_containerds_file_and_setting_are_named(key: str) -> None:
    state = containerd_state({"/etc/containerd/config.toml": f"version = 3\n{key} = 1\n"})
    with pytest.raises(BadInput, match=f"/etc/containerd/config.toml: {key} isn't a list of texts"):
        containerd_plan.make_plan(PRESENT, t.cast("t.Any", state))


def test_a_byte_order_mark_names_its_file() -> None:
    files = {"/etc/containerd/config.toml": "version = 3\n", "/etc/containerd/conf.d/a.toml": "\ufeffversion = 3\n"}
    state = containerd_state(files, error="containerd: toml: invalid character at start of key")
    with pytest.raises(BadInput, match=r"start of key \(/etc/containerd/conf.d/a.toml begins with a byte order mark\)"):
        containerd_plan.make_plan(PRESENT, t.cast("t.Any", state))
