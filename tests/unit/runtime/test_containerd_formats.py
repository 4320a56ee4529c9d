# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of different formats that a containerd merges: which settings count, and what our settings change in that."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

import corpus_containerd
import pytest
import real_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import CRI_PLUGIN
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_files import cri_sections
from corpus_containerd import ETC, MAIN, Node, Row, drive
from runtime_kit import ABSENT, PRESENT

# A file's version (0 for none) and the version whose name of the CRI plugin it has.
MAINS = ((0, 1), (1, 1), (0, 2), (2, 2), (2, 1), (2, 3), (3, 3), (3, 2))
DROP_INS = (None, (0, 1), (0, 3), (2, 2), (3, 3))
DROP_IN = f"{ETC}/conf.d/50-site.toml"
# Without any setting.
BUILT_IN = 16384


@dataclasses.dataclass(frozen=True)
class Written(Row):
    """A configuration of these texts."""

    files: tuple[tuple[str, str], ...] = ()

    def texts(self, release: str) -> dict[str, bytes]:
        return {path: text.encode() for path, text in self.files}


def written(files: dict[str, str]) -> Written:
    return Written("formats", "", real_containerd.RELEASES, {}, {}, tuple(files.items()))


def text(version: int, names: int, size: int) -> str:
    table = f'plugins."{CRI_PLUGIN[names]}"'
    return (
        ("# the site's\n" if size > 100 else "")
        + (f"version = {version}\n" if version else "")
        + f"[{table}]\n  max_container_log_line_size = {size} # {size}\n"
        + f'[{table}.containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
        + f"  [{table}.containerd.runtimes.runc.options]\n    SystemdCgroup = {str(size == 111).lower()}\n"
    )


def merged(main: tuple[int, int], drop_in: tuple[int, int] | None) -> dict[str, str]:
    imports = f'imports = ["{ETC}/conf.d/*.toml"]\n'
    return {MAIN: imports + text(*main, 111), **({DROP_IN: text(*drop_in, 99)} if drop_in else {})}


# Each pair with each release; one of the usual releases, in turn, without the long tests.
CELLS = [
    pytest.param(*cell, release, marks=() if release == real_containerd.USUAL[number % 2] else pytest.mark.long)
    for number, cell in enumerate(itertools.product(MAINS, DROP_INS))
    for release in real_containerd.RELEASES
]


@pytest.mark.parametrize(("main", "drop_in", "release"), CELLS)
def test_our_settings_change_nothing_of_what_counts(
    release: str, main: tuple[int, int], drop_in: tuple[int, int] | None, tmp_path: Path
) -> None:
    real_containerd.of(release)
    row = written(merged(main, drop_in))
    node = Node(row, release, tmp_path / "node")
    before, (dumped, error) = node.texts(), node.dump()
    if not error and max(main[0], drop_in[0] if drop_in else 0) <= (2 if release < "2" else 4):
        trees = {path: tomllib.loads(file) for path, file in row.files}
        sections = cri_sections(tuple(map(int, release.split("."))), trees)  # type: ignore[arg-type]
        counts = [trees[path]["plugins"][name]["max_container_log_line_size"] for path, name in sections] or [BUILT_IN]
        assert corpus_containerd.cri_of(tomllib.loads(dumped))["max_container_log_line_size"] == counts[-1]
    cell = corpus_containerd.configured(row, release, tmp_path)
    # 1.x reads no file of version 3, and no short name in one of version 2.
    assert bool(cell.ours.refused) is (release < "2" and (bool(error) or 3 in (main[0], drop_in and drop_in[0])))
    assert cell.ours.wrong == [], corpus_containerd.explain(cell)
    assert corpus_containerd.lost_comments(before, cell.ours.files or before) == []


@pytest.mark.parametrize(
    ("main", "drop_in", "words"),
    [
        ((0, 1), None, "[plugins.cri] of {}, which has no version, as"),
        ((1, 1), None, "[plugins.cri] of {}, which has version 1, as"),
        (
            (0, 1),
            None,
            """version 2 by hand (`version = 2`, and [plugins."io.containerd.grpc.v1.cri"] as the table's""",
        ),
        ((2, 2), (3, 3), '[plugins."io.containerd.grpc.v1.cri"] of {}, which has version 2, as'),
        ((2, 2), (3, 3), "version 3 by hand (`version = 3`, and its tables as in `containerd config default`;"),
    ],
)
def test_ignored_settings_are_named(
    main: tuple[int, int], drop_in: tuple[int, int] | None, words: str, tmp_path: Path
) -> None:
    real_containerd.of("2.2")
    node = Node(written(merged(main, drop_in)), "2.2", tmp_path / "node")
    (warning,) = drive(node, PRESENT).warnings
    assert warning.startswith("containerd 2.2 ignores ") and words.format(f"{node.root}{MAIN}") in warning
    assert drive(node, PRESENT).plan.empty


@pytest.mark.parametrize("release", ["2.2", pytest.param("2.0", marks=pytest.mark.long)])
@pytest.mark.parametrize(("old", "new"), [((0, 1), (2, 2)), ((3, 3), (2, 2)), ((2, 2), (3, 3)), ((2, 2), (0, 1))])
def test_files_that_the_user_converts_under_our_drop_in(
    release: str, old: tuple[int, int], new: tuple[int, int], tmp_path: Path
) -> None:
    """Until the next run containerd reads them in the former format."""
    real_containerd.of(release)
    node = Node(written({MAIN: text(*old, 99)}), release, tmp_path / "node")
    drive(node, PRESENT)
    imports = next(line for line in node.texts()[MAIN].decode().splitlines() if line.startswith("imports"))
    alone = {MAIN: text(*new, 111).encode()}
    converted = {**node.texts(), MAIN: f"{imports}\n{text(*new, 111)}".encode()}
    node.put(alone)
    cri = corpus_containerd.cri_of(tomllib.loads(node.dump()[0]))
    node.put(converted)
    drive(node, PRESENT)
    after = corpus_containerd.cri_of(tomllib.loads(node.dump()[0]))
    nvidia = after["containerd"]["runtimes"].pop("nvidia")
    assert after.pop("enable_cdi") is True and after["containerd"].pop("default_runtime_name") == "nvidia"
    del cri["enable_cdi"], cri["containerd"]["default_runtime_name"]
    assert after == cri and nvidia["options"]["SystemdCgroup"] is (new != (0, 1))
    assert drive(node, PRESENT).plan.empty
    node.put(converted)
    drive(node, ABSENT)
    assert node.texts() == alone


# The daemon's own report of its configuration, as 1.x and 2.x write it.
STARTING = re.compile(r"(?i)start(?:ing)? cri plugin.*?defaultRuntimeName\W+(\w+)")
TABLE = (
    'runtime_type = "io.containerd.runc.v2"\n[plugins.cri.containerd.default_runtime.options]\nSystemdCgroup = true\n'
)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="containerd only starts as root")
@pytest.mark.parametrize("release", real_containerd.RELEASES)
@pytest.mark.parametrize("main", [text(0, 1, 111), f"[plugins.cri.containerd.default_runtime]\n{TABLE}"])
def test_a_daemon_starts_with_a_file_of_version_1(main: str, release: str) -> None:
    """The dump validates nothing of the CRI plugin; a daemon does."""
    binary = real_containerd.of(release)
    with tempfile.TemporaryDirectory() as folder:
        # NRI has a socket of the machine.
        node = Node(
            written({MAIN: f'{main}[plugins."io.containerd.nri.v1.nri"]\ndisable = true\n'}),
            release,
            Path(folder) / "n",
        )
        drive(node, PRESENT)
        command = [binary, "--config", f"{node.root}{MAIN}", "--address", f"{folder}/s"]
        command += ["--root", f"{folder}/root", "--state", f"{folder}/state"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
            log = "".join(
                itertools.takewhile(lambda line: "containerd successfully booted" not in line, daemon.stderr or ())
            )
            daemon.terminate()
    assert not re.search("invalid plugin config|failed to load plugin.*cri", log), log
    assert [match[1] for match in STARTING.finditer(log)] == ["nvidia"], log
