# SPDX-License-Identifier: GPL-3.0-or-later
"""What becomes of CRI-O's files, and how a node's CRI-O gets them, proves itself, or gets the old ones back."""

from __future__ import annotations

import functools
import tomllib
import typing as t
from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _crio, _observe_crio
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._crio_apply import Crio
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Apply
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from ansible_collections.kubegpu.share.plugins.plugin_utils._crio_plan import Planned, make_plan, merged
from fake_node import Clock, FakeNode, killed

FOLDER = _crio.FOLDER
DROP_IN = f"{FOLDER}/{_crio.DROP_IN_NAME}"
BINARY = "/usr/bin/nvidia-container-runtime"
PRESENT = Wanted(True, True, BINARY, True, False)
AVAILABLE = Wanted(True, False, BINARY, True, False)
ABSENT = Wanted(False, True, BINARY, True, False)
# As the packages of CRI-O have it.
PACKAGED = """[crio.image]
signature_policy = "/etc/crio/policy.json"

[crio.runtime]
default_runtime = "crun"

[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun"
runtime_root = "/run/crun"
monitor_path = "/usr/libexec/crio/conmon"
allowed_annotations = [
    "io.containers.trace-syscall",
]

[crio.runtime.runtimes.runc]
runtime_path = "/usr/libexec/crio/runc"
runtime_root = "/run/runc"
monitor_path = "/usr/libexec/crio/conmon"
"""
TOOLKIT = """#accept-nvidia-visible-devices-as-volume-mounts = false
[nvidia-container-runtime]
# mine
runtimes = ["runc", "crun"] # both
mode = "auto"
"""


OPERATORS = '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/local/nvidia/toolkit/nvidia-container-runtime"\n'


# --------------------------------------------------------------------------- a node


class Daemon:
    """As CRI-O behaves: it reads all files at its start, and prints what it has read."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.pid = 5
        self.read: dict[str, t.Any] = {}
        self.hates: t.Callable[[dict[str, t.Any]], bool] = lambda tree: False

    def files(self) -> dict[str, t.Any]:
        paths = [_crio.MAIN, *sorted(one for one in self.node.files if one.startswith(f"{FOLDER}/"))]
        return merged(tomllib.loads(self.node.files[one]) for one in paths if one in self.node.files)

    def restart(self) -> int:
        tree = self.files()
        if self.hates(tree):
            self.pid = 0
            return 1
        self.pid, self.read = 6, tree
        return 0

    @staticmethod
    def printed(tree: dict[str, t.Any]) -> str:
        runtime = tree.get("crio", {}).get("runtime", {})
        lines = ["[crio]", "[crio.runtime]", f'default_runtime = "{runtime.get("default_runtime", "crun")}"']
        lines += ['cgroup_manager = "systemd"', "[crio.runtime.runtimes]"]
        for name, table in runtime.get("runtimes", {}).items():
            lines.append(f"[crio.runtime.runtimes.{name}]")
            for key, value in table.items():
                lines.append(f"{key} = " + str(value if isinstance(value, list) else f'"{value}"').replace("'", '"'))
        return "\n".join(lines) + "\n"


def node(files: dict[str, str] | None = None) -> tuple[FakeNode, Daemon]:
    made = FakeNode({BINARY: "", "/usr/bin/crun": "", f"{FOLDER}/10-crio.conf": PACKAGED, **(files or {})})
    daemon = Daemon(made)
    daemon.read = daemon.files()

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            state = "active" if daemon.pid else "failed"
            start = "{ path=/usr/bin/crio ; argv[]=/usr/bin/crio ; }"
            return Done(0, f"LoadState=loaded\nActiveState={state}\nMainPID={daemon.pid}\nExecStart={start}\n", "")
        return Done(daemon.restart() if argv[1] == "restart" else 0, "", "")

    def crio(argv: Sequence[str]) -> Done:
        if argv[-1] == "--version":
            return Done(0, "crio version 1.31.2\nVersion:        1.31.2\n", "")
        if argv[1] == "status":
            return Done(0, daemon.printed(daemon.read), "") if daemon.pid else Done(1, "", "no socket")
        try:
            return Done(0, daemon.printed(daemon.files()), "")
        except tomllib.TOMLDecodeError as error:
            return Done(1, "", f'time="x" level=fatal msg="{error}"\n')

    made.answers = {
        "systemctl": systemctl,
        "crio": crio,
        "crictl": lambda argv: Done(127, "", ""),
        "journalctl": lambda argv: Done(0, 'time="x" level=fatal msg="validating runtime config: no"\n', ""),
    }
    return made, daemon


def look(made: FakeNode) -> dict[str, t.Any]:
    seen = _observe_crio.observe(made)
    assert seen is not None
    return seen


def run(made: FakeNode, wanted: Wanted) -> dict[str, t.Any]:
    planned = make_plan(wanted, look(made))
    if planned.plan.empty:
        return {"changed": False}
    clock = Clock()
    return Apply(made, Crio(made, wanted), 10, clock.sleep, clock.now).run(replacements(planned.files))


def text_of(planned: Planned, path: str = DROP_IN) -> str:
    return t.cast("str", next(row["after"] for row in planned.files if row["path"] == path))


def restarts(made: FakeNode) -> int:
    return made.log.count("systemctl restart crio.service")


# --------------------------------------------------------------------------- the plan


def test_ours_has_all_that_the_default_runtime_has() -> None:
    made, _daemon = node()
    assert tomllib.loads(text_of(make_plan(PRESENT, look(made))))["crio"]["runtime"] == {
        "default_runtime": "nvidia",
        "runtimes": {
            "nvidia": {
                "runtime_path": BINARY,
                "runtime_type": "oci",
                "runtime_root": "/run/crun",
                "monitor_path": "/usr/libexec/crio/conmon",
                "allowed_annotations": ["io.containers.trace-syscall"],
            }
        },
    }


def test_only_available_names_no_default() -> None:
    made, _daemon = node()
    assert "default_runtime" not in tomllib.loads(text_of(make_plan(AVAILABLE, look(made))))["crio"]["runtime"]


def test_nvidia_ctks_table_without_a_monitor_is_no_model() -> None:
    """nvidia-ctk has made nvidia the default and lost the monitor; ours, read later, has it."""
    ctk = f'[crio.runtime]\ndefault_runtime = "nvidia"\n[crio.runtime.runtimes.nvidia]\nruntime_path = "{BINARY}"\n'
    made, _daemon = node({f"{FOLDER}/99-nvidia.toml": ctk})
    table = tomllib.loads(text_of(make_plan(PRESENT, look(made))))["crio"]["runtime"]["runtimes"]["nvidia"]
    assert table["monitor_path"] == "/usr/libexec/crio/conmon"
    run(made, PRESENT)
    assert run(made, PRESENT) == {"changed": False}


def test_without_a_table_the_running_daemon_is_the_model() -> None:
    made, daemon = node({f"{FOLDER}/10-crio.conf": "# nothing\n"})
    daemon.read = tomllib.loads(PACKAGED)
    table = tomllib.loads(text_of(make_plan(PRESENT, look(made))))["crio"]["runtime"]["runtimes"]["nvidia"]
    assert table["monitor_path"] == "/usr/libexec/crio/conmon" and table["runtime_root"] == "/run/crun"


def test_a_virtual_machine_is_no_model() -> None:
    kata = (
        '[crio.runtime]\ndefault_runtime = "kata"\n'
        '[crio.runtime.runtimes.kata]\nruntime_type = "vm"\nruntime_root = "/run/vc"\n'
    )
    made, _daemon = node({f"{FOLDER}/50-kata.conf": kata})
    table = tomllib.loads(text_of(make_plan(PRESENT, look(made))))["crio"]["runtime"]["runtimes"]["nvidia"]
    assert table["runtime_root"] == "/run/crun" and table["runtime_type"] == "oci"


def test_tables_in_the_model_and_its_own_program_paths() -> None:
    text = PACKAGED.replace(
        "[crio.runtime.runtimes.runc]",
        '[crio.runtime.runtimes.crun.default_annotations]\n"a/b" = "c"\n'
        '[crio.runtime.runtimes.crun.platform_runtime_paths]\n"linux/arm64" = "/c"\n[crio.runtime.runtimes.runc]',
    )
    made, _daemon = node({f"{FOLDER}/10-crio.conf": text})
    table = tomllib.loads(text_of(make_plan(PRESENT, look(made))))["crio"]["runtime"]["runtimes"]["nvidia"]
    assert table["default_annotations"] == {"a/b": "c"} and "platform_runtime_paths" not in table


def test_the_toolkit_is_told_of_a_crun_that_it_wouldnt_find() -> None:
    made, _daemon = node({_crio.TOOLKIT_CONFIG: TOOLKIT})
    assert [row["path"] for row in make_plan(PRESENT, look(made)).files] == [DROP_IN], "crun is on the path"
    del made.files["/usr/bin/crun"]
    planned = make_plan(PRESENT, look(made))
    assert [row["path"] for row in planned.files] == [_crio.TOOLKIT_CONFIG, DROP_IN]
    assert text_of(planned, _crio.TOOLKIT_CONFIG) == TOOLKIT.replace(
        '["runc", "crun"] # both', '["/usr/libexec/crio/crun"] # both # kubegpu.share, was ["runc", "crun"]'
    )
    run(made, PRESENT)
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files[_crio.TOOLKIT_CONFIG] == TOOLKIT


@pytest.mark.parametrize("toolkit", [None, '[nvidia-container-cli]\nldconfig = "@/sbin/ldconfig"\n'])
def test_a_toolkits_file_without_the_table(toolkit: str | None) -> None:
    made, _daemon = node({_crio.TOOLKIT_CONFIG: toolkit} if toolkit else None)
    del made.files["/usr/bin/crun"]
    run(made, PRESENT)
    found = tomllib.loads(made.files[_crio.TOOLKIT_CONFIG])
    assert found["nvidia-container-runtime"] == {"runtimes": ["/usr/libexec/crio/crun"]}
    assert run(made, PRESENT) == {"changed": False}
    made.files["/usr/bin/crun"] = ""
    run(made, PRESENT)
    assert made.files.get(_crio.TOOLKIT_CONFIG) == toolkit, "not needed any more"
    del made.files["/usr/bin/crun"]
    run(made, PRESENT)
    run(made, ABSENT)
    assert made.files.get(_crio.TOOLKIT_CONFIG) == toolkit


@pytest.mark.parametrize(
    ("files", "changes", "words"),
    [
        ({f"{FOLDER}/zz.conf": '[crio.runtime]\ndefault_runtime = "runc"\n'}, {}, "zz.conf is read after"),
        ({f"{FOLDER}/zz.conf": "[crio.runtime.runtimes.nvidia]\n"}, {}, "sets runtimes.nvidia otherwise"),
        ({f"{FOLDER}/20.conf": "[crio\n"}, {}, "20.conf, line 1, can't be parsed"),
        ({}, {"operator": True}, "NVIDIA's GPU Operator configures CRI-O"),
        (
            {f"{FOLDER}/99-nvidia.conf": OPERATORS},
            {},
            "NVIDIA's GPU Operator",
        ),
        ({}, {"error": "x is bad"}, "CRI-O can't read its own configuration: x is bad"),
        (
            {},
            {"flags": {"default-runtime": {"values": ["runc"], "file": "/f"}}},
            "/f starts CRI-O with --default-runtime",
        ),
        (
            {},
            {"flags": {"runtimes": {"values": ["nvidia:/x"], "file": "/f"}}},
            "/f starts CRI-O with --runtimes=nvidia",
        ),
    ],
)
def test_refused_in_a_sentence(files: dict[str, str], changes: dict[str, t.Any], words: str) -> None:
    made, _daemon = node()
    made.files.update(files)
    seen = {**look(made), **changes} if "can't be parsed" not in words else look(made)
    with pytest.raises(BadInput) as refused:
        make_plan(PRESENT, seen)
    assert words in str(refused.value)


def test_no_crio() -> None:
    with pytest.raises(BadInput, match="CRI-O isn't installed"):
        make_plan(PRESENT, None)
    assert make_plan(ABSENT, None).plan.empty


# --------------------------------------------------------------------------- the node


def test_written_restarted_once_and_proven() -> None:
    made, daemon = node()
    before = dict(made.files)
    done = run(made, PRESENT)
    assert done["restarted"] and done["effective"]["default_runtime"] == "nvidia" and restarts(made) == 1
    assert daemon.read["crio"]["runtime"]["default_runtime"] == "nvidia"
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files == before and "default_runtime" in daemon.read["crio"]["runtime"] and restarts(made) == 2
    assert run(made, ABSENT) == {"changed": False}
    assert not any("daemon-reload" in one for one in made.log)


def test_nothing_unfinished_lies_in_crios_folder() -> None:
    made, _daemon = node()
    run(made, PRESENT)
    assert not any(one.startswith(f"write {FOLDER}/") for one in made.log)
    assert f"mv -fT /etc/crio/.{_crio.DROP_IN_NAME}.new {DROP_IN}" in made.log


def test_a_daemon_with_older_files_is_restarted() -> None:
    made, daemon = node()
    run(made, PRESENT)
    daemon.read = tomllib.loads(PACKAGED)
    assert [one.header for one in make_plan(PRESENT, look(made)).plan.changes] == [_crio.UNIT]
    run(made, PRESENT)
    assert daemon.read["crio"]["runtime"]["default_runtime"] == "nvidia"


def test_files_that_mean_the_same_need_no_restart() -> None:
    made, _daemon = node()
    run(made, PRESENT)
    made.files[DROP_IN] += "# a comment\n"
    assert run(made, PRESENT)["restarted"] is False and restarts(made) == 1


def test_a_daemon_that_refuses_gets_its_old_files_back() -> None:
    made, daemon = node()
    before = dict(made.files)
    daemon.hates = lambda tree: "nvidia" in tree["crio"]["runtime"]["runtimes"]
    with pytest.raises(
        NotInEffect, match=r"runs with the old one again \(systemctl restart ended with 1\): level=fatal"
    ):
        run(made, PRESENT)
    assert made.files == before and daemon.pid and daemon.read == daemon.files() and restarts(made) == 2


def test_what_crio_wouldnt_take_is_put_back_without_a_restart() -> None:
    made, _daemon = node()
    before = dict(made.files)
    crio = made.answers["crio"]
    made.answers["crio"] = lambda argv: (
        Done(1, "", "level=fatal msg=no\n")
        if argv[-1] == "config" and argv[1] != "status" and DROP_IN in made.files
        else crio(argv)
    )
    with pytest.raises(NotInEffect, match="would not do: level=fatal msg=no"):
        run(made, PRESENT)
    assert made.files == before and restarts(made) == 0


def test_an_old_crio_that_cant_print_what_it_runs_with() -> None:
    made, daemon = node()
    crio = made.answers["crio"]
    made.answers["crio"] = lambda argv: Done(1, "", "no command") if argv[1] == "status" else crio(argv)
    made.answers["crio-status"] = lambda argv: Done(127, "", "")
    made.answers["crictl"] = lambda argv: Done(
        0, '{"status": {"conditions": [{"type": "RuntimeReady", "status": true}]}}', ""
    )
    run(made, PRESENT)
    assert daemon.read["crio"]["runtime"]["default_runtime"] == "nvidia"
    assert run(made, PRESENT) == {"changed": False}


@pytest.mark.parametrize("full", [1, 2])
def test_a_full_disk_leaves_all_as_it_was(full: int) -> None:
    made, _daemon = node()
    before, write, count = dict(made.files), made.write, 0

    def full_disk(path: str, text: str, mode: int = 0o644) -> None:
        nonlocal count
        count += 1
        if count == full:
            raise ShareError(f"{path} can't be written: No space left on device")
        write(path, text, mode)

    made.write = full_disk  # type: ignore[method-assign]
    with pytest.raises(ShareError, match="No space left"):
        run(made, PRESENT)
    assert made.files == before and restarts(made) == 0


@pytest.mark.parametrize("wanted", [PRESENT, ABSENT], ids=["present", "absent"])
def test_a_run_killed_anywhere_is_finished_by_the_next(wanted: Wanted) -> None:
    at = 1
    while True:
        made, daemon = node({_crio.TOOLKIT_CONFIG: TOOLKIT})
        del made.files["/usr/bin/crun"]
        before = dict(made.files)
        if not wanted.present:
            run(made, PRESENT)
        ended = not killed(made, at, functools.partial(run, made, wanted))
        run(made, wanted)
        found = daemon.read["crio"]["runtime"].get("default_runtime")
        assert found == ("nvidia" if wanted.present else "crun"), at
        assert run(made, wanted) == {"changed": False} and _crio.PENDING_PATH not in made.files, at
        run(made, ABSENT)
        assert made.files == before, at
        if ended:
            break
        at += 1
    assert at > 10


@pytest.mark.parametrize("secret", ["http://me:hunter2@p:1", "http://me:hunter2/hunter3@p:1", "me:hunter2@p:1"])
def test_credentials_never_leave_the_node(secret: str) -> None:
    text = PACKAGED.replace(
        "[crio.runtime]\n", f'[crio.runtime]\ndefault_env = ["HTTPS_PROXY=http://a:hunter9@q", "HTTP_PROXY={secret}"]\n'
    ).replace("[crio.runtime.runtimes.runc]", f'monitor_env = ["HTTP_PROXY={secret}"]\n\n[crio.runtime.runtimes.runc]')
    made, daemon = node({f"{FOLDER}/10-crio.conf": text, _crio.TOOLKIT_CONFIG: f"# http_proxy={secret}\n{TOOLKIT}"})
    del made.files["/usr/bin/crun"]
    before = dict(made.files)
    planned = make_plan(PRESENT, look(made))
    assert "hunter" not in repr(look(made)) and "hunter" not in repr(planned)
    done = run(made, PRESENT)
    assert "hunter" not in repr(done) and "hunter" not in repr(look(made)) and restarts(made) == 1
    # Ours repeats the default runtime's table as it is on the node.
    ours = tomllib.loads(made.files[DROP_IN])["crio"]["runtime"]["runtimes"]["nvidia"]
    assert (
        ours["monitor_env"]
        == [f"HTTP_PROXY={secret}"]
        == daemon.read["crio"]["runtime"]["runtimes"]["nvidia"]["monitor_env"]
    )
    assert f"# http_proxy={secret}\n" in made.files[_crio.TOOLKIT_CONFIG]
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files == before


def test_no_crio_on_the_node() -> None:
    made = FakeNode({}, {name: lambda argv: Done(127, "", "") for name in ("systemctl", "crio")})
    assert _observe_crio.observe(made) is None


def test_what_is_seen() -> None:
    made, _daemon = node()
    seen = look(made)
    assert seen["version"] == "1.31.2" and seen["cgroup_driver"] == "systemd" and seen["default_runtime"] == "crun"
    assert list(seen["files"]) == [f"{FOLDER}/10-crio.conf"] and seen["on_path"] == ["crun"] and seen["answers"]
    assert (seen["ours"], seen["pending"], seen["stale"], seen["operator"]) == (False, False, False, False)
