# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans for CRI-O's files, and the update of a simulated CRI-O: validation, restart, rollback."""

from __future__ import annotations

import re
import tomllib
import typing as t
from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import crio as runtime_crio
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import TOOLKIT_CONFIG, Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.crio_apply import CrioEngine
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.crio_plan import default_runtime, make_plan, merged
from fake_node import FakeNode
from runtime_kit import ABSENT, AVAILABLE, BINARY, PRESENT, REPLACED, REPLACING, kill_steps, show_unit, update

FOLDER = runtime_crio.FOLDER
DROP_IN = f"{FOLDER}/{runtime_crio.DROP_IN_NAME}"
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


OURS = {
    "runtime_path": BINARY,
    "runtime_type": "oci",
    "runtime_root": "/run/crun",
    "monitor_path": "/usr/libexec/crio/conmon",
    "allowed_annotations": ["io.containers.trace-syscall"],
}
# The runtime that CRI-O has without any file.
BUILT_IN = {
    "crun": {
        "runtime_path": "",
        "runtime_type": "oci",
        "runtime_root": "/run/crun",
        "monitor_path": "",
        "monitor_cgroup": "system.slice",
        "monitor_env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "allowed_annotations": ["io.containers.trace-syscall", "io.kubernetes.cri-o.Devices"],
    }
}
OPERATORS = '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/local/nvidia/toolkit/nvidia-container-runtime"\n'


class Daemon:
    """A simulated CRI-O: it reads all files at its start, and prints them as one."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.pid = 5
        self.version, self.built_in = "1.31.2", BUILT_IN
        self.read: dict[str, t.Any] = {}
        self.rejects: t.Callable[[dict[str, t.Any]], bool] = lambda tree: False

    @property
    def deletes_runc(self) -> bool:
        return self.version <= "1.25.0"

    def files(self) -> dict[str, t.Any]:
        paths = [runtime_crio.MAIN, *sorted(file for file in self.node.files if file.startswith(f"{FOLDER}/"))]
        done: dict[str, t.Any] = {}
        for path in paths:
            if path not in self.node.files:
                continue
            tree = tomllib.loads(self.node.files[path])
            done = merged([done, tree])
            if self.deletes_runc and default_runtime(tree) not in ("", "runc"):
                done["crio"]["runtime"].get("runtimes", {}).pop("runc", None)
        return done

    def restart(self) -> int:
        tree = self.files()
        if self.rejects(tree):
            self.pid = 0
            return 1
        self.pid, self.read = 6, tree
        return 0

    def config(self) -> str:
        """Print the files as ``crio config`` does: what equals a built-in value is a comment."""
        return self._printed(self.files(), "# ")

    def status(self) -> str:
        """Print the configuration that was read, as ``crio status config`` does: without comments."""
        return self._printed(self.read, "")

    def _printed(self, tree: dict[str, t.Any], comment: str) -> str:
        [own] = self.built_in
        crio = tree.get("crio", {})
        runtime = crio.get("runtime", {})
        default = runtime.get("default_runtime", own)
        # Up to 1.25.0 a file with another default deletes runc, whose table an earlier file or this one may have.
        kept = {} if self.deletes_runc and default != own else self.built_in
        tables = {**kept, **runtime.get("runtimes", {})}
        lines = ["# The CRI-O configuration file", "[crio]", "[crio.runtime]"]
        lines += [f'{comment if default == own else ""}default_runtime = "{default}"']
        lines += [f'{comment}cgroup_manager = "systemd"', "# Each entry should follow the format:", "#"]
        lines += ["# [crio.runtime.runtimes.runtime-handler]", '# runtime_path = "/path/to/the/executable"', "# Where:"]
        sign = comment if tables == self.built_in else ""
        for name, table in sorted(tables.items()):
            lines.append(f"{sign}[crio.runtime.runtimes.{name}]")
            # Keys that a file doesn't set are printed too.
            for key, value in {"runtime_path": "", "monitor_path": "", **table}.items():
                if isinstance(value, list):
                    lines += [f"{sign}{key} = [", *(f'{sign}\t"{one}",' for one in value), f"{sign}]"]
                else:
                    lines.append(f'{sign}{key} = "{value}"')
        lines += ["# Example:", "# [crio.runtime.workloads.workload-type.resources]", '# cpuset = "0-1"']
        lines += [f'{"" if "timezone" in runtime else comment}timezone = "{runtime.get("timezone", "")}"']
        pause = crio.get("image", {}).get("pause_image")
        lines += ["[crio.image]", f'{"" if pause else comment}pause_image = "{pause or "registry.k8s.io/pause:3.10"}"']
        return "\n".join(lines) + "\n"


def node(files: dict[str, str] | None = None) -> tuple[FakeNode, Daemon]:
    made = FakeNode({BINARY: "", "/usr/bin/crun": "", f"{FOLDER}/10-crio.conf": PACKAGED, **(files or {})})
    daemon = Daemon(made)
    daemon.read = daemon.files()

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            return show_unit(daemon.pid, "/usr/bin/crio")
        return Done(daemon.restart() if argv[1] == "restart" else 0, "", "")

    def crio(argv: Sequence[str]) -> Done:
        if argv[-1] == "--version":
            return Done(0, f"crio version {daemon.version}\nVersion:        {daemon.version}\n", "")
        if argv[1] == "status":
            return Done(0, daemon.status(), "") if daemon.pid else Done(1, "", "no socket")
        try:
            return Done(0, daemon.config(), "")
        except tomllib.TOMLDecodeError as error:
            return Done(1, "", f'time="x" level=fatal msg="{error}"\n')

    made.answers = {
        "systemctl": systemctl,
        "crio": crio,
        "crictl": lambda argv: Done(127, "", ""),
        "journalctl": lambda argv: Done(0, 'time="x" level=fatal msg="validating runtime config: no"\n', ""),
    }
    return made, daemon


def observe(made: FakeNode) -> dict[str, t.Any]:
    seen = runtime_crio.observe(made)
    assert seen is not None
    return seen


def run(made: FakeNode, wanted: Options) -> dict[str, t.Any]:
    planned = make_plan(wanted, observe(made))
    return {"changed": False} if planned.plan.empty else update(made, CrioEngine(made, wanted), planned.files)


def planned_runtime(made: FakeNode, wanted: Options = PRESENT) -> dict[str, t.Any]:
    """Return the table crio.runtime of the planned drop-in."""
    text = next(row["after"] for row in make_plan(wanted, observe(made)).files if row["path"] == DROP_IN)
    return t.cast("dict[str, t.Any]", tomllib.loads(text)["crio"]["runtime"])


def restarts(made: FakeNode) -> int:
    return made.log.count("systemctl restart crio.service")


def test_our_runtime_has_all_settings_of_the_default_one() -> None:
    made, _daemon = node()
    assert planned_runtime(made) == {"default_runtime": "nvidia", "runtimes": {"nvidia": OURS}}
    assert planned_runtime(made, AVAILABLE) == {"runtimes": {"nvidia": OURS}}


# nvidia-ctk has made nvidia the default and lost the monitor; ours is read later.
CTK = f'[crio.runtime]\ndefault_runtime = "nvidia"\n[crio.runtime.runtimes.nvidia]\nruntime_path = "{BINARY}"\n'
KATA = """[crio.runtime]
default_runtime = "kata"
[crio.runtime.runtimes.kata]
runtime_type = "vm"
runtime_root = "/run/vc"
"""
TABLES = """[crio.runtime.runtimes.crun.default_annotations]
"a/b" = "c"
[crio.runtime.runtimes.crun.platform_runtime_paths]
"linux/arm64" = "/c"
"""


@pytest.mark.parametrize(
    ("files", "more"),
    [
        ({f"{FOLDER}/99-nvidia.toml": CTK}, {}),
        ({f"{FOLDER}/50-kata.conf": KATA}, {}),
        ({f"{FOLDER}/10-crio.conf": PACKAGED + TABLES}, {"default_annotations": {"a/b": "c"}}),
    ],
)
def test_no_tables_of_nvidia_ctk_and_of_virtual_machines_are_copied_and_no_program_paths(
    files: dict[str, str], more: dict[str, t.Any]
) -> None:
    made, _daemon = node(files)
    assert planned_runtime(made, REPLACING)["runtimes"]["nvidia"] == {**OURS, **more}
    run(made, REPLACING)
    assert run(made, REPLACING) == {"changed": False}


GVISOR = (
    '[crio.runtime]\ndefault_runtime = "safe"\n[crio.runtime.runtimes.safe]\nruntime_path = "/usr/local/bin/runsc"\n'
)
YOUKI = GVISOR.replace("/usr/local/bin/runsc", "/usr/bin/youki")


@pytest.mark.parametrize(
    ("text", "name"),
    [(KATA, "kata (Kata)"), (GVISOR, "safe (gVisor)"), (GVISOR.replace("runsc", "krun"), "safe (krun)")],
)
def test_a_sandbox_is_replaced_only_where_the_user_allows_it(text: str, name: str) -> None:
    made, _daemon = node({f"{FOLDER}/50-safe.conf": text})
    message = re.escape(f"runtime_replace_default: CRI-O's default runtime is {name}, and pods")
    with pytest.raises(BadInput, match=message):
        run(made, PRESENT)
    assert planned_runtime(made, AVAILABLE) == {"runtimes": {"nvidia": OURS}}
    run(made, REPLACING)
    assert TOOLKIT_CONFIG not in made.files and run(made, REPLACING) == {"changed": False}
    again = make_plan(PRESENT, observe(made))
    assert again.plan.empty and REPLACED.format("CRI-O", name) in again.warnings[0]
    assert make_plan(REPLACING, observe(made)).warnings == make_plan(AVAILABLE, observe(made)).warnings == ()


@pytest.mark.parametrize(
    ("version", "own", "other"), [("1.24.6", "runc", "crun"), ("1.30.8", "runc", "crun"), ("1.31.2", "crun", "runc")]
)
def test_our_own_default_doesnt_decide_what_ours_is_a_copy_of(version: str, own: str, other: str) -> None:
    handler = f'[crio.runtime.runtimes.{other}]\nruntime_path = "/usr/bin/{other}"\nmonitor_cgroup = "pod"\n'
    made, daemon = node({f"{FOLDER}/10-crio.conf": handler, "/usr/bin/runc": ""})
    daemon.version, daemon.built_in = version, {own: {**BUILT_IN["crun"], "runtime_root": f"/run/{own}"}}
    made.files.update({row["path"]: row["after"] for row in make_plan(PRESENT, observe(made)).files})
    daemon.restart()
    table = daemon.read["crio"]["runtime"]["runtimes"]["nvidia"]
    assert (table["runtime_root"], table["monitor_cgroup"]) == (f"/run/{own}", "system.slice")
    assert observe(made)["default_runtime"] == "nvidia" and make_plan(PRESENT, observe(made)).plan.empty
    daemon.pid = 0
    assert make_plan(PRESENT, observe(made)).files == ()


@pytest.mark.parametrize(
    ("text", "on_path", "program"),
    [
        # What the toolkit searches for first isn't what CRI-O runs.
        (PACKAGED, ("runc", "crun"), "/usr/libexec/crio/crun"),
        (PACKAGED, ("runc",), "/usr/libexec/crio/crun"),
        (PACKAGED, ("crun",), None),
        (PACKAGED.replace('default_runtime = "crun"', 'default_runtime = "runc"'), ("runc", "crun"), None),
        # CRI-O's own default, without any table.
        ("", ("runc", "crun"), "crun"),
        ("", ("crun",), None),
        # Another program with runc's command line.
        (YOUKI, ("runc",), "/usr/bin/youki"),
    ],
)
def test_the_toolkit_runs_the_program_of_the_default_runtime(text: str, on_path: tuple[str, ...], program: str) -> None:
    made, _daemon = node({f"{FOLDER}/10-crio.conf": text, **{f"/usr/bin/{one}": "" for one in on_path}})
    if "crun" not in on_path:
        del made.files["/usr/bin/crun"]
    before = dict(made.files)
    run(made, PRESENT)
    found = tomllib.loads(made.files.get(TOOLKIT_CONFIG, ""))
    assert found.get("nvidia-container-runtime", {}).get("runtimes") == ([program] if program else None)
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files == before


def test_a_users_own_program_of_the_toolkit_stays() -> None:
    toolkit = '[nvidia-container-runtime]\nruntimes = ["/opt/bin/runc"]\n'
    made, _daemon = node({TOOLKIT_CONFIG: toolkit})
    run(made, PRESENT)
    assert made.files[TOOLKIT_CONFIG] == toolkit


def test_without_a_table_the_running_daemons_settings_are_copied() -> None:
    made, daemon = node({f"{FOLDER}/10-crio.conf": "# nothing\n"})
    daemon.read = tomllib.loads(PACKAGED)
    table = planned_runtime(made)["runtimes"]["nvidia"]
    assert table["monitor_path"] == "/usr/libexec/crio/conmon" and table["runtime_root"] == "/run/crun"


@pytest.mark.parametrize(
    "text",
    ["# nothing\n", '[crio.image]\npause_image = "mirror.lan/pause:3.9"\n', '[crio.runtime]\ntimezone = "Local"\n'],
)
def test_built_in_runtimes_that_are_printed_as_comments_are_no_loss(text: str) -> None:
    made, daemon = node({f"{FOLDER}/10-crio.conf": text})
    before = dict(made.files)
    run(made, PRESENT)
    table = daemon.read["crio"]["runtime"]["runtimes"]["nvidia"]
    copied = ("runtime_root", "monitor_cgroup", "monitor_env", "allowed_annotations")
    assert {key: table[key] for key in copied} == {key: BUILT_IN["crun"][key] for key in copied}
    assert set(table) == {"runtime_path", "runtime_type", *copied}
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files == before and observe(made)["default_runtime"] == "crun"


@pytest.mark.parametrize(
    ("version", "text", "again"),
    [
        ("1.24.6", PACKAGED.replace('default_runtime = "crun"', ""), True),
        ("1.25.0", "# nothing\n", True),
        # The user's own default has deleted it already.
        ("1.24.6", PACKAGED, False),
        ("1.25.1", PACKAGED.replace('default_runtime = "crun"', ""), False),
    ],
)
def test_runc_that_an_old_release_deletes_is_there_again(version: str, text: str, again: bool) -> None:
    """A file that sets another default deletes runc's table in releases before 1.25.1, also the user's."""
    made, daemon = node({f"{FOLDER}/10-crio.conf": text})
    daemon.version, daemon.built_in = version, {"runc": {**BUILT_IN["crun"], "runtime_root": "/run/runc"}}
    daemon.restart()
    before, runc = dict(made.files), observe(made)["runtimes"].get("runc")
    run(made, PRESENT)
    assert observe(made)["runtimes"].get("runc") == runc and observe(made)["default_runtime"] == "nvidia"
    assert (f"{FOLDER}/{runtime_crio.KEPT_NAME}" in made.files) == again
    assert run(made, PRESENT) == {"changed": False}
    daemon.pid = 0
    assert make_plan(PRESENT, observe(made)).files == ()
    daemon.restart()
    run(made, AVAILABLE)
    assert f"{FOLDER}/{runtime_crio.KEPT_NAME}" not in made.files
    run(made, ABSENT)
    assert made.files == before


def test_settings_that_were_copied_from_a_built_in_runtime_stay_without_it() -> None:
    made, daemon = node({f"{FOLDER}/10-crio.conf": "# nothing\n"})
    run(made, PRESENT)
    daemon.pid = 0
    planned = make_plan(PRESENT, observe(made))
    assert planned.files == () and [change.header for change in planned.plan.changes] == [runtime_crio.UNIT]


def test_the_path_of_crun_is_added_to_the_toolkits_configuration() -> None:
    made, _daemon = node({TOOLKIT_CONFIG: TOOLKIT})
    assert [row["path"] for row in make_plan(PRESENT, observe(made)).files] == [DROP_IN], "crun is on the path"
    del made.files["/usr/bin/crun"]
    planned = make_plan(PRESENT, observe(made))
    assert [row["path"] for row in planned.files] == [TOOLKIT_CONFIG, DROP_IN]
    assert planned.files[0]["after"] == TOOLKIT.replace(
        '["runc", "crun"] # both', '["/usr/libexec/crio/crun"] # both # kubegpu.share, was ["runc", "crun"]'
    )
    run(made, PRESENT)
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files[TOOLKIT_CONFIG] == TOOLKIT


@pytest.mark.parametrize("toolkit", [None, '[nvidia-container-cli]\nldconfig = "@/sbin/ldconfig"\n'])
def test_a_toolkit_configuration_without_the_table(toolkit: str | None) -> None:
    made, _daemon = node({TOOLKIT_CONFIG: toolkit} if toolkit else None)
    del made.files["/usr/bin/crun"]
    run(made, PRESENT)
    found = tomllib.loads(made.files[TOOLKIT_CONFIG])
    assert found["nvidia-container-runtime"] == {"runtimes": ["/usr/libexec/crio/crun"]}
    assert run(made, PRESENT) == {"changed": False}
    made.files["/usr/bin/crun"] = ""
    run(made, PRESENT)
    assert made.files.get(TOOLKIT_CONFIG) == toolkit, "not needed any more"
    del made.files["/usr/bin/crun"]
    run(made, PRESENT)
    run(made, ABSENT)
    assert made.files.get(TOOLKIT_CONFIG) == toolkit


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        ({f"{FOLDER}/zz.conf": '[crio.runtime]\ndefault_runtime = "runc"\n'}, {}, "zz.conf is read after"),
        ({f"{FOLDER}/zz.conf": "[crio.runtime.runtimes.nvidia]\n"}, {}, "overrides runtimes.nvidia"),
        ({f"{FOLDER}/20.conf": "[crio\n"}, {}, "20.conf, line 1, can't be parsed"),
        ({}, {"operator": True}, "NVIDIA's GPU Operator configures CRI-O"),
        ({f"{FOLDER}/99-nvidia.conf": OPERATORS}, {}, "NVIDIA's GPU Operator"),
        ({}, {"error": "x is bad"}, "CRI-O can't read its own configuration: x is bad"),
        ({}, {"flags": {"default-runtime": {"values": ["runc"], "file": "/f"}}}, "/f starts CRI-O with --default"),
        ({}, {"flags": {"runtimes": {"values": ["nvidia:/x"], "file": "/f"}}}, "/f starts CRI-O with --runtimes"),
    ],
)
def test_refusals(files: dict[str, str], changes: dict[str, t.Any], message: str) -> None:
    made, _daemon = node()
    made.files.update(files)
    with pytest.raises(BadInput) as refused:
        make_plan(PRESENT, {**observe(made), **changes})
    assert message in str(refused.value)


def test_files_are_written_and_crio_restarted_once() -> None:
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


def test_temporary_files_stay_outside_of_crios_directory() -> None:
    made, _daemon = node()
    run(made, PRESENT)
    assert not any(one.startswith(f"write {FOLDER}/") for one in made.log)
    assert f"mv -fT /etc/crio/.{runtime_crio.DROP_IN_NAME}.new {DROP_IN}" in made.log


def test_an_outdated_daemon_is_restarted() -> None:
    made, daemon = node()
    run(made, PRESENT)
    daemon.read = tomllib.loads(PACKAGED)
    assert [change.header for change in make_plan(PRESENT, observe(made)).plan.changes] == [runtime_crio.UNIT]
    run(made, PRESENT)
    assert daemon.read["crio"]["runtime"]["default_runtime"] == "nvidia"


def test_an_unchanged_effective_configuration_needs_no_restart() -> None:
    made, _daemon = node()
    run(made, PRESENT)
    made.files[DROP_IN] += "# a comment\n"
    assert run(made, PRESENT)["restarted"] is False and restarts(made) == 1


def test_a_daemon_that_fails_to_start_is_rolled_back() -> None:
    made, daemon = node()
    before = dict(made.files)
    daemon.rejects = lambda tree: "nvidia" in tree["crio"]["runtime"]["runtimes"]
    with pytest.raises(NotInEffect, match=r"rolled back, it runs with the old one: level=fatal"):
        run(made, PRESENT)
    assert made.files == before and daemon.pid and daemon.read == daemon.files() and restarts(made) == 2


def test_a_rejected_configuration_is_rolled_back_without_a_restart() -> None:
    made, _daemon = node()
    before = dict(made.files)
    crio = made.answers["crio"]
    refused = Done(1, "", "level=fatal msg=no\n")
    made.answers["crio"] = lambda argv: refused if argv[1] == "--config-dir" and DROP_IN in made.files else crio(argv)
    with pytest.raises(NotInEffect, match="rejects the new configuration; it was rolled back: level=fatal msg=no"):
        run(made, PRESENT)
    assert made.files == before and restarts(made) == 0


def test_a_users_setting_that_would_change_is_named_with_both_values() -> None:
    made, daemon = node({f"{FOLDER}/50-tz.conf": '[crio.runtime]\ntimezone = "Local"\n'})
    before, crio = dict(made.files), made.answers["crio"]

    def other(argv: Sequence[str]) -> Done:
        done = crio(argv)
        return Done(done.rc, done.out.replace('"Local"', '""') if DROP_IN in made.files else done.out, done.err)

    made.answers["crio"] = other
    with pytest.raises(NotInEffect, match=r'your `timezone` in \[crio.runtime\] would be "" instead of "Local"'):
        run(made, PRESENT)
    assert made.files == before and daemon.pid == 5


def test_an_older_crio_without_status_config() -> None:
    made, daemon = node()
    crio = made.answers["crio"]
    made.answers["crio"] = lambda argv: Done(1, "", "no command") if argv[1] == "status" else crio(argv)
    made.answers["crio-status"] = lambda argv: Done(127, "", "")
    ready = '{"status": {"conditions": [{"type": "RuntimeReady", "status": true}]}}'
    made.answers["crictl"] = lambda argv: Done(0, ready, "")
    run(made, PRESENT)
    assert daemon.read["crio"]["runtime"]["default_runtime"] == "nvidia"
    assert run(made, PRESENT) == {"changed": False}


@pytest.mark.parametrize("full", [1, 2])
def test_a_full_disk_is_rolled_back(full: int) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize("wanted", [PRESENT, ABSENT], ids=["present", "absent"])
def test_the_run_after_a_killed_one_finishes(wanted: Options) -> None:
    def start() -> tuple[FakeNode, Daemon]:
        made, daemon = node({TOOLKIT_CONFIG: TOOLKIT})
        del made.files["/usr/bin/crun"]
        before.update(made.files)
        if not wanted.present:
            run(made, PRESENT)
        return made, daemon

    before: dict[str, str] = {}
    for made, daemon in kill_steps(start, lambda made: run(made, wanted)):
        run(made, wanted)
        assert daemon.read["crio"]["runtime"].get("default_runtime") == ("nvidia" if wanted.present else "crun")
        assert run(made, wanted) == {"changed": False} and runtime_crio.PENDING_PATH not in made.files
        run(made, ABSENT)
        assert made.files == before


@pytest.mark.parametrize("secret", ["http://me:hunter2@p:1", "http://me:hunter2/hunter3@p:1", "me:hunter2@p:1"])
def test_credentials_never_leave_the_node(secret: str) -> None:
    text = PACKAGED.replace(
        "[crio.runtime]\n", f'[crio.runtime]\ndefault_env = ["HTTPS_PROXY=http://a:hunter9@q", "HTTP_PROXY={secret}"]\n'
    ).replace("[crio.runtime.runtimes.runc]", f'monitor_env = ["HTTP_PROXY={secret}"]\n\n[crio.runtime.runtimes.runc]')
    toolkit = f"# http_proxy={secret}\n{TOOLKIT}"
    made, daemon = node({f"{FOLDER}/10-crio.conf": text, TOOLKIT_CONFIG: toolkit})
    del made.files["/usr/bin/crun"]
    before = dict(made.files)
    planned = make_plan(PRESENT, observe(made))
    assert "hunter" not in repr(observe(made)) and "hunter" not in repr(planned)
    done = run(made, PRESENT)
    assert "hunter" not in repr(done) and "hunter" not in repr(observe(made)) and restarts(made) == 1
    # Ours repeats the default runtime's table as it is on the node.
    for tree in (tomllib.loads(made.files[DROP_IN]), daemon.read):
        assert tree["crio"]["runtime"]["runtimes"]["nvidia"]["monitor_env"] == [f"HTTP_PROXY={secret}"]
    assert f"# http_proxy={secret}\n" in made.files[TOOLKIT_CONFIG]
    assert run(made, PRESENT) == {"changed": False}
    run(made, ABSENT)
    assert made.files == before


def test_observe() -> None:
    made, _daemon = node()
    seen = observe(made)
    assert seen["version"] == "1.31.2" and seen["cgroup_driver"] == "systemd" and seen["default_runtime"] == "crun"
    assert list(seen["files"]) == [f"{FOLDER}/10-crio.conf"] and seen["on_path"] == ["crun"] and seen["answers"]
    assert (seen["ours"], seen["pending"], seen["stale"], seen["operator"]) == (False, False, False, False)
