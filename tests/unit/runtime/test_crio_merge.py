# SPDX-License-Identifier: GPL-3.0-or-later
"""How CRI-O merges its files, according to crio.conf.d(5) and its loader."""

from __future__ import annotations

import tomllib
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import crio
from ansible_collections.kubegpu.share.plugins.plugin_utils._runtime.crio import merged

# rule: files in CRI-O's order, and the table crio of the result
RULES: dict[str, tuple[list[str], dict[str, t.Any]]] = {
    "the file sorted last wins, and a key that it lacks stays": (
        ['[crio.runtime]\nlog_level = "info"\ndefault_runtime = "runc"', '[crio.runtime]\ndefault_runtime = "crun"'],
        {"runtime": {"log_level": "info", "default_runtime": "crun"}},
    ),
    "a later list replaces a list, and a later empty value counts": (
        ['[crio.runtime]\na = ["a"]\nb = ["/b"]\nc = "c"', '[crio.runtime]\na = ["d"]\nb = []\nc = ""'],
        {"runtime": {"a": ["d"], "b": [], "c": ""}},
    ),
    "storage options add up, the last appearance counts": (
        ['[crio]\nstorage_option = ["a", "b"]', '[crio]\nstorage_option = ["c", "a"]'],
        {"storage_option": ["b", "c", "a"]},
    ),
    "an empty root keeps the earlier one": (['[crio]\nroot = "/r"', '[crio]\nroot = ""'], {"root": "/r"}),
    "another runtime is added": (
        ['[crio.runtime.runtimes.crun]\nruntime_path = "/c"', '[crio.runtime.runtimes.runc]\nruntime_path = "/r"'],
        {"runtime": {"runtimes": {"crun": {"runtime_path": "/c"}, "runc": {"runtime_path": "/r"}}}},
    ),
    "a later table of a runtime replaces the whole table: its monitor is lost": (
        [
            '[crio.runtime.runtimes.crun]\nruntime_path = "/c"\nmonitor_path = "/usr/libexec/crio/conmon"',
            '[crio.runtime.runtimes.crun]\nruntime_path = "/d"',
        ],
        {"runtime": {"runtimes": {"crun": {"runtime_path": "/d"}}}},
    ),
    "workloads as runtimes": (
        [
            '[crio.runtime.workloads.w]\nactivation_annotation = "a"\n'
            "[crio.runtime.workloads.w.resources]\ncpushares = 1",
            '[crio.runtime.workloads.w]\nactivation_annotation = "b"',
        ],
        {"runtime": {"workloads": {"w": {"activation_annotation": "b"}}}},
    ),
    "other tables are merged deeply": (
        ["[crio.metrics]\nenable_metrics = true\nmetrics_port = 1", "[crio.metrics]\nmetrics_port = 2"],
        {"metrics": {"enable_metrics": True, "metrics_port": 2}},
    ),
}


@pytest.mark.parametrize(("files", "expected"), RULES.values(), ids=list(RULES))
def test_merging_of_files(files: list[str], expected: dict[str, t.Any]) -> None:
    assert merged(tomllib.loads(text) for text in files).get("crio") == expected


def test_every_file_of_the_directory_is_read_in_the_order_of_names() -> None:
    """CRI-O uses filepath.Walk: hidden files, backups, subdirectories and any suffix are included."""
    tree = {
        "/d": ["99-nvidia.toml", "10-crio.conf", ".hidden", "20-more", "10-crio.conf.bak", "99-nvidia.conf"],
        "/d/20-more": ["b", "a"],
    }
    found = crio.in_order(lambda path: tree.get(path, []), lambda path: path in tree, "/d")
    names = ".hidden 10-crio.conf 10-crio.conf.bak 20-more/a 20-more/b 99-nvidia.conf 99-nvidia.toml"
    assert found == [f"/d/{name}" for name in names.split()]


def test_our_drop_in_is_read_after_those_of_nvidia_and_openshift() -> None:
    assert max("99-nvidia.conf", "99-nvidia.toml", "99-runtimes.conf", "01-ctrcfg") < crio.DROP_IN_NAME


PRINTED = """# The CRI-O configuration file
[crio]

# root = "/var/lib/containers/storage"
[crio.runtime]
# default_runtime = "crun"
default_runtime = "nvidia"
hooks_dir = [
\t"/a",
\t"/b",
]
[crio.runtime.runtimes]
[crio.runtime.runtimes.nvidia]
runtime_path = "/usr/bin/nvidia-container-runtime"
allowed_annotations = [ "x" ]
runtime_root = ""
[crio.runtime.runtimes."my.one"]
"""


def test_parse_crio_config() -> None:
    found = crio.parse_config(PRINTED)
    assert found.default_runtime == "nvidia" and found.runtimes() == ["my.one", "nvidia"]
    path = '"/usr/bin/nvidia-container-runtime"'
    assert found.runtime("nvidia") == {"runtime_path": path, "allowed_annotations": '["x"]'}
    assert found.flat[("crio", "runtime", "hooks_dir")] == '["/a", "/b"]'
    assert ("crio", "root") not in found.flat
    other = crio.parse_config(PRINTED.replace('"/b"', '"/c"').replace('= "nvidia"', '= "crun"'))
    assert crio.losses(found, other) == ["crio.runtime.hooks_dir"]
