# SPDX-License-Identifier: GPL-3.0-or-later
"""How CRI-O merges its files, according to crio.conf.d(5) and its loader."""

from __future__ import annotations

import tomllib
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import crio
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.crio_plan import merged
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.types import Loss

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
    assert found.builtin == {
        ("crio", "root"): '"/var/lib/containers/storage"',
        ("crio", "runtime", "default_runtime"): '"crun"',
    }
    other = crio.parse_config(PRINTED.replace('"/b"', '"/c"').replace('= "nvidia"', '= "crun"'))
    assert crio.losses(found, other) == [Loss(("crio", "runtime", "hooks_dir"), '["/a", "/b"]', '["/a", "/c"]')]


# As 1.28 and newer print it: prose, an example, and settings of crio.runtime behind the tables of the runtimes.
WITHOUT_A_TABLE = """[crio.runtime]
# default_runtime is the _name_ of the runtime.
# default_runtime = "crun"
# Each entry in the table should follow the format:
#
# [crio.runtime.runtimes.runtime-handler]
# runtime_path = "/path/to/the/executable"
# monitor_env = []
# - runtime_path (optional, string): Absolute path to the executable.

# [crio.runtime.runtimes.crun]
# runtime_path = ""
# monitor_env = [
# \t"PATH=/bin",
# ]
# allowed_annotations = [
# \t"io.containers.trace-syscall",
# \t"io.kubernetes.cri-o.Devices",
# ]

# hostnetwork_disable_selinux = true
disable_hostport_mapping = true
timezone = "Local"
[crio.image]
# pause_image = "p"
"""
WITH_OURS = WITHOUT_A_TABLE.replace('# default_runtime = "crun"', 'default_runtime = "nvidia"').replace(
    "\n# hostnetwork",
    '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/bin/nvidia-container-runtime"\n# hostnetwork',
)
CRUN = WITH_OURS[WITH_OURS.index("# [crio.runtime.runtimes.crun]") : WITH_OURS.index("[crio.runtime.runtimes.nvidia]")]
WITH_OURS = WITH_OURS.replace(CRUN, CRUN.replace("# ", ""))


def test_built_in_values_are_compared_with_those_that_are_printed_for_ours() -> None:
    before, after = crio.parse_config(WITHOUT_A_TABLE), crio.parse_config(WITH_OURS)
    assert (before.default_runtime, after.default_runtime) == ("crun", "nvidia")
    assert crio.losses(before, after) == crio.losses(before=after, after=before) == []
    other = crio.parse_config(WITH_OURS.replace('"PATH=/bin"', '"PATH=/sbin"'))
    path = ("crio", "runtime", "runtimes", "crun", "monitor_env")
    assert crio.losses(before, other) == [Loss(path, '["PATH=/bin"]', '["PATH=/sbin"]')]


def test_a_built_in_runtime_that_is_dropped_isnt_the_users() -> None:
    """Releases before 1.25.1 delete runc where another default is set."""
    before, after = (crio.parse_config(text.replace("crun", "runc")) for text in (WITHOUT_A_TABLE, WITH_OURS))
    dropped = crio.parse_config(WITH_OURS.replace(CRUN.replace("# ", ""), "").replace("crun", "runc"))
    assert crio.losses(before, dropped) == crio.losses(dropped, before) == []
    assert "monitor_env" in [loss.path[-1] for loss in crio.losses(after, dropped)]


def test_settings_behind_the_runtimes_are_no_runtimes() -> None:
    found = crio.parse_config(WITH_OURS)
    assert found.flat[("crio", "runtime", "timezone")] == '"Local"'
    assert found.flat[("crio", "runtime", "disable_hostport_mapping")] == "true"
    assert found.runtime("nvidia") == {"runtime_path": '"/usr/bin/nvidia-container-runtime"'}
    assert found.runtimes() == ["crun", "nvidia"]
    changed = crio.parse_config(WITH_OURS.replace('"Local"', '"UTC"'))
    lost = crio.losses(crio.parse_config(WITHOUT_A_TABLE), changed)
    assert lost == [Loss(("crio", "runtime", "timezone"), '"Local"', '"UTC"')]
