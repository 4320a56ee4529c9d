# SPDX-License-Identifier: GPL-3.0-or-later
"""The update of a simulated containerd: files, validation, restart, rollback; and its observation."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.digest import digest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.file_transaction import Replacement
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import TOOLKIT_CONFIG
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd_apply import ContainerdEngine
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.engine import ConfigUpdate
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.module import ARGUMENTS, run_plan
from fake_clock import FakeClock
from fake_node import FakeNode, killed
from runtime_kit import BINARY, kill_steps, show_unit
from runtime_kit import PRESENT as WANTED

MAIN = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-kubegpu-nvidia.toml"
OLD = 'version = 3\n[r.auth]\npassword = "hunter2"\n'
BASE = "plugins.'io.containerd.cri.v1.runtime'.containerd"
RUNC = (
    f"[{BASE}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n"
    f"[{BASE}.runtimes.runc.options]\nSystemdCgroup = true\n"
)
PLAIN = f"[{BASE}]\ndefault_runtime_name = 'runc'\n{RUNC}"
WITH = (
    f"[{BASE}]\ndefault_runtime_name = 'nvidia'\n{RUNC}"
    f"[{BASE}.runtimes.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n"
    f"[{BASE}.runtimes.nvidia.options]\nBinaryName = '{BINARY}'\nSystemdCgroup = true\n"
)
CHANGES = (
    Replacement(DROP_IN, "", "# drop-in\n"),
    Replacement(MAIN, digest(containerd.mask(OLD)), "imports = ['x']\n" + containerd.mask(OLD)),
)
OK = "io.containerd.grpc.v1 cri linux/amd64 ok\n"


def node(
    dump: Callable[[FakeNode], str] = lambda n: WITH if DROP_IN in n.files else PLAIN,
    restart: Callable[[FakeNode], int] = lambda n: 0,
    plugins: Callable[[FakeNode], str] = lambda n: OK,
) -> FakeNode:
    made = FakeNode({MAIN: OLD, BINARY: "", "/usr/local/bin/containerd": ""})
    made.modes[MAIN] = 0o600
    made.owners[MAIN] = "7:8"

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            return show_unit(12, f"/usr/local/bin/containerd --config {MAIN}")
        return Done(restart(made) if argv[1] == "restart" else 0, "", "")

    made.answers = {
        "systemctl": systemctl,
        "containerd": lambda argv: Done(0, dump(made), ""),
        "ctr": lambda argv: Done(0, plugins(made), ""),
        "journalctl": lambda argv: Done(0, "level=info x\nlevel=fatal no such plugin\n", ""),
    }
    return made


def apply(
    made: FakeNode,
    changes: Sequence[Replacement] = CHANGES,
    wanted: containerd.Options = WANTED,
    clock: FakeClock | None = None,
) -> dict[str, object]:
    clock = clock or FakeClock()
    return ConfigUpdate(made, ContainerdEngine(made, wanted), 10, clock.sleep, clock.now).run(changes)


def restarts(made: FakeNode) -> int:
    return made.log.count("systemctl restart containerd.service")


def assert_as_before(made: FakeNode) -> None:
    assert made.files == {MAIN: OLD, BINARY: "", "/usr/local/bin/containerd": ""}
    assert made.modes[MAIN] == 0o600 and made.owners[MAIN] == "7:8"


def test_files_are_written_and_the_daemon_restarted_once() -> None:
    made, seen = node(), []
    made.answers["ctr"] = lambda argv: seen.append(made.modes[containerd.PENDING_PATH]) or Done(0, OK, "")
    done = apply(made)
    assert seen == [0o600] and "mkdir -p -m 0700 /var/lib/kubegpu-share" in made.log, "only root may read the record"
    assert made.files[MAIN] == "imports = ['x']\n" + OLD, "the credential is the real one again"
    assert made.files[DROP_IN] == "# drop-in\n"
    assert made.modes[MAIN] == 0o600 and made.owners[MAIN] == "7:8", "permissions stay"
    assert restarts(made) == 1 and not any("daemon-reload" in one for one in made.log)
    assert containerd.PENDING_PATH not in made.files
    assert made.log.index(f"write {containerd.PENDING_PATH}") < made.log.index(f"write {DROP_IN}")
    assert made.log.index(f"write {DROP_IN}") < made.log.index(f"write {MAIN}"), "a file before its import"
    assert done == {"effective": WITH, "restarted": True}


def test_nothing_is_written_without_the_binary_or_over_a_later_change() -> None:
    made = node()
    del made.files[BINARY]
    with pytest.raises(BadInput, match=f"runtime_nvidia_binary: {BINARY} isn't on this node"):
        apply(made)
    made.files[BINARY] = ""
    made.files[MAIN] += "# new\n"
    with pytest.raises(ShareError, match="was changed by another process"):
        apply(made)
    assert not [one for one in made.log if one.startswith("write")]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (PLAIN, Done(0, PLAIN, ""), "default_runtime_name is 'runc'"),
        (
            PLAIN + "[grpc]\ngid = 5\n",
            Done(0, WITH + "[grpc]\ngid = 0\n", ""),
            "your `gid` in \\[grpc\\] would be nothing instead of 5; this",
        ),
        (PLAIN, Done(1, "", 'level=info msg="starting"\ncontainerd: bad\n'), "containerd: bad"),
    ],
)
def test_a_rejected_configuration_is_rolled_back_without_a_restart(before: str, after: Done, message: str) -> None:
    made = node()
    made.answers["containerd"] = lambda argv: after if DROP_IN in made.files else Done(0, before, "")
    with pytest.raises(NotInEffect, match=message):
        apply(made)
    assert_as_before(made)
    assert restarts(made) == 0


def test_a_daemon_that_fails_to_start_is_rolled_back() -> None:
    made = node(restart=lambda n: 1 if DROP_IN in n.files else 0)
    with pytest.raises(NotInEffect, match=r"rolled back, it runs with the old one: level=fatal no such"):
        apply(made)
    assert_as_before(made)
    assert restarts(made) == 2 and "systemctl reset-failed containerd.service" in made.log


def test_a_failed_cri_plugin_ends_the_wait() -> None:
    made = node(plugins=lambda n: OK.replace("ok", "error") if DROP_IN in n.files else OK)
    with pytest.raises(NotInEffect, match="its CRI plugin failed to load"):
        apply(made)
    assert_as_before(made)


def test_the_wait_for_a_daemon_ends_at_the_timeout() -> None:
    made = node(plugins=lambda n: "" if DROP_IN in n.files else OK)
    clock = FakeClock()
    with pytest.raises(NotInEffect, match="didn't answer"):
        apply(made, clock=clock)
    assert 10 <= clock.time < 12
    assert_as_before(made)


def test_a_failed_rollback_is_reported() -> None:
    made = node(restart=lambda n: 1)
    with pytest.raises(NotInEffect, match=r"The old configuration was restored, and .* isn't healthy with it either"):
        apply(made)
    assert made.files[MAIN] == OLD
    assert containerd.PENDING_PATH in made.files, "the next run goes on from here"


@pytest.mark.parametrize("at", range(1, 12))
def test_the_run_after_a_killed_one_finishes(at: int) -> None:
    made = node()
    was_killed = killed(made, at, lambda: apply(made))
    if was_killed and made.files.get(DROP_IN) is not None and MAIN in made.files and made.files[MAIN] != OLD:
        assert made.exists(containerd.PENDING_PATH)
    # The next run plans from the present files.
    left = [
        Replacement(change.path, digest(_mask(made.files.get(change.path))), change.after)
        for change in CHANGES
        if _mask(made.files.get(change.path)) != change.after
    ]
    # It fails too: the files from before the first run are restored.
    made.answers["ctr"] = lambda argv: Done(0, "" if DROP_IN in made.files else OK, "")
    if was_killed:
        with pytest.raises(NotInEffect):
            apply(made, left)
        assert_as_before(made)


GID = "[grpc]\ngid = 5\n"


def converted() -> FakeNode:
    """Return a node whose user has converted his file to version 2 under our drop-in of version 3, which hides it."""

    def dump(made: FakeNode) -> str:
        ours = made.files.get(DROP_IN, "")
        return WITH if "version = 3" in ours else (WITH if ours else PLAIN) + GID

    made = node(dump)
    made.files[DROP_IN] = "version = 3\n"
    return made


def test_what_our_earlier_file_hid_is_no_loss() -> None:
    new = "version = 2\n"
    for made, _daemon in kill_steps(
        lambda: (converted(), None), lambda made: apply(made, planned(made, new)), least=15
    ):
        assert made.files[MAIN] == OLD and made.files.get(DROP_IN) in ("version = 3\n", "", new)
        apply(made, planned(made, new))
        assert made.files[DROP_IN] == new and containerd.PENDING_PATH not in made.files
    made = converted()
    made.answers["ctr"] = lambda argv: Done(0, "" if made.files[DROP_IN] == new else OK, "")
    with pytest.raises(NotInEffect, match="rolled back"):
        apply(made, planned(made, new))
    assert made.files[DROP_IN] == "version = 3\n" and made.files[MAIN] == OLD


def planned(made: FakeNode, text: str) -> list[Replacement]:
    now = made.files.get(DROP_IN)
    return [Replacement(DROP_IN, digest(now), text)] if now != text else []


def _mask(text: str | None) -> str | None:
    return None if text is None else containerd.mask(text)


def test_a_rollback_keeps_the_files_of_another_run() -> None:
    """As when the controller was killed and the next run overtakes the module that still waits."""

    def overtaken(made: FakeNode) -> str:
        if made.files.get(DROP_IN) == "# drop-in\n":
            made.files[DROP_IN] = "# newer\n"
            return OK.replace("ok", "error")
        return OK

    made = node(plugins=overtaken)
    with pytest.raises(NotInEffect):
        apply(made)
    assert made.files[DROP_IN] == "# newer\n" and made.files[MAIN] == OLD


def test_only_a_restart() -> None:
    made = node(dump=lambda n: WITH)
    apply(made, [])
    assert restarts(made) == 1 and made.files[MAIN] == OLD
    made = node(dump=lambda n: WITH, restart=lambda n: 1)
    with pytest.raises(NotInEffect, match=r"^containerd doesn't become healthy \(systemctl restart ended with 1\)"):
        apply(made, [])
    # A masked unit has no journal; only systemctl says why.
    masked = made.answers["systemctl"]
    said = "Failed to restart containerd.service: Unit containerd.service is masked.\n"
    made.answers["systemctl"] = lambda argv: Done(1, "", said) if argv[1] == "restart" else masked(argv)
    with pytest.raises(NotInEffect, match=r"ended with 1: Failed to restart .* Unit containerd\.service is masked\."):
        apply(made, [])


def test_removal_deletes_an_empty_drop_in_directory() -> None:
    made = node()
    made.files[DROP_IN] = "# ours\n"
    apply(made, [Replacement(DROP_IN, digest("# ours\n"), None)], containerd.Options(present=False))
    assert DROP_IN not in made.files and "rmdir /etc/containerd/conf.d" in made.log


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPERM])
def test_a_failed_write_is_rolled_back(number: int) -> None:
    made, reason = node(), os.strerror(number)
    write = made.write

    def refuse(path: str, text: str, mode: int = 0o644) -> None:
        if path == MAIN:
            raise ShareError(f"{path} can't be written: {reason}") from OSError(number, reason)
        write(path, text, mode)

    made.write = refuse  # type: ignore[method-assign]
    with pytest.raises(ShareError, match=f"{reason}.*; containerd's configuration was rolled back") as refused:
        apply(made)
    assert ("lsattr" in str(refused.value)) is (number == errno.EPERM)
    assert_as_before(made)
    assert restarts(made) == 0 and containerd.PENDING_PATH not in made.files


def test_a_failed_rollback_of_a_write_keeps_the_record() -> None:
    made = node()
    made.files[DROP_IN] = "# older\n"
    write, full = made.write, False

    def fill(path: str, text: str, mode: int = 0o644) -> None:
        nonlocal full
        if full:
            raise ShareError(f"{path} can't be written: No space left on device")
        write(path, text, mode)
        full = path == DROP_IN

    made.write = fill  # type: ignore[method-assign]
    changes = [Replacement(DROP_IN, digest("# older\n"), "# drop-in\n"), CHANGES[1]]
    with pytest.raises(ShareError, match=r"failed too .* free some disk space and run again"):
        apply(made, changes)
    assert containerd.PENDING_PATH in made.files and restarts(made) == 0


def test_an_unchanged_effective_configuration_needs_no_restart() -> None:
    made = node(dump=lambda n: WITH)
    done = apply(made, [Replacement(MAIN, digest(containerd.mask(OLD)), containerd.mask(OLD) + "# a comment\n")])
    assert done["restarted"] is False and restarts(made) == 0 and made.files[MAIN] == OLD + "# a comment\n"


def test_crictl_overrides_the_dump() -> None:
    made = node()
    made.files["/usr/bin/crictl"] = ""
    config = {"containerd": {"defaultRuntimeName": "runc", "runtimes": {"runc": {"options": {}}}}}
    made.answers["crictl"] = lambda argv: Done(0, json.dumps({"status": {}, "config": config}), "")
    with pytest.raises(NotInEffect, match="its default runtime is 'runc'; it has no runtime 'nvidia'"):
        apply(made)
    del made.files["/usr/bin/crictl"]
    assert_as_before(made)


def test_a_linked_file_stays_a_link() -> None:
    made = node()
    made.links[MAIN] = "real.toml"
    made.files["/etc/containerd/real.toml"] = OLD
    apply(made)
    assert "write /etc/containerd/real.toml" in made.log and f"write {MAIN}" not in made.log


def test_the_module_needs_a_plan() -> None:
    params = {**{name: spec["default"] for name, spec in ARGUMENTS.items() if "default" in spec}}
    with pytest.raises(BadInput, match="action plugin"):
        run_plan({**params, "plan": None}, node())
    rows = [{"path": change.path, "before": change.before, "after": change.after} for change in CHANGES]
    done = run_plan({**params, "plan": {"runtime": "containerd", "files": rows}}, node())
    assert done["changed"] is True and done["runtime"] == "containerd"


def test_the_module_accepts_what_the_plan_expects() -> None:
    params = {**{name: spec["default"] for name, spec in ARGUMENTS.items() if "default" in spec}}
    rows = [{"path": change.path, "before": change.before, "after": change.after} for change in CHANGES]
    plan = {"runtime": "containerd", "files": rows}

    def made() -> FakeNode:
        grown = "[images]\nsnapshotter = 'stargz'\n"
        return node(dump=lambda n: WITH + grown if DROP_IN in n.files else PLAIN + grown.replace("stargz", "overlayfs"))

    with pytest.raises(NotInEffect, match=r'your `snapshotter` .* would be "stargz" instead of "overlayfs"') as refused:
        run_plan({**params, "plan": plan}, made())
    assert refused.value.details == {"losses": ["images.snapshotter"]}
    plan["expected"] = [{"path": ["images", "snapshotter"], "value": "stargz"}]
    assert run_plan({**params, "plan": plan}, made())["changed"]
    plan["users_default"] = "runc"
    with pytest.raises(NotInEffect, match="default_runtime_name is 'nvidia' and not 'runc'"):
        run_plan({**params, "set_default": False, "plan": plan}, made())


# --------------------------------------------------------------------------- observation


def observe(made: FakeNode) -> dict[str, object]:
    made.answers["containerd"] = lambda argv: Done(0, "containerd x v2.2.9 y" if argv[-1] == "--version" else PLAIN, "")
    seen = containerd.observe(made)
    assert seen is not None
    return seen


def test_a_running_containerd_is_observed() -> None:
    seen = observe(node())
    assert seen["version"] == "2.2.9" and seen["config_path"] == MAIN and seen["service_active"]
    assert list(seen["files"]) == [MAIN] and "hunter2" not in json.dumps(seen)  # type: ignore[call-overload]
    assert (seen["stale"], seen["pending"], seen["embedded"], seen["operator"]) == (False, False, "", False)


def test_credentials_are_masked_in_whatever_is_observed_and_reported() -> None:
    text = 'version = 3\n[r]\nendpoint = ["https://u:s3cr3t@mirror"]\npassword = """\ns3cr3t\n"""\n'
    made = node()
    made.files |= {MAIN: text, DROP_IN: text}
    failed = Done(1, "", 'containerd: parse "https://u:s3cr3t@mirror": bad\n')
    made.answers["containerd"] = lambda argv: Done(0, "containerd x v2.2.9 y", "") if "--version" in argv else failed
    seen = containerd.observe(made)
    assert seen is not None and "mirror" in seen["error"] and seen["drop_in"]
    assert "s3cr3t" not in json.dumps(seen)
    made = node(restart=lambda n: 1 if DROP_IN in n.files else 0)
    made.answers["journalctl"] = lambda argv: Done(0, 'level=fatal msg="https://u:s3cr3t@mirror: no"\n', "")
    with pytest.raises(NotInEffect) as refused:
        apply(made)
    assert "mirror: no" in str(refused.value) and "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "low_level"),
    [
        ({"/usr/bin/crun": "", "/usr/sbin/runc": ""}, "runc"),
        ({"/usr/local/bin/crun": ""}, "crun"),
        ({"/usr/bin/crun": "", "/usr/bin/runc": "", TOOLKIT_CONFIG: '[x]\nruntimes = ["crun", "runc"]\n'}, "crun"),
        ({"/usr/bin/runc": "", TOOLKIT_CONFIG: "  runtimes = [\n    '/opt/crun',\n]\n"}, "/opt/crun"),
        ({"/usr/bin/runc": "", TOOLKIT_CONFIG: '# runtimes = ["/opt/crun"]\n'}, "runc"),
        ({}, ""),
    ],
)
def test_the_program_by_which_nvidias_runtime_runs_containers(files: dict[str, str], low_level: str) -> None:
    made = node()
    made.files |= files
    assert observe(made)["low_level"] == low_level


def test_a_node_without_containerd_or_with_an_embedded_one() -> None:
    made = FakeNode({}, {"systemctl": lambda argv: Done(127, "", ""), "containerd": lambda argv: Done(127, "", "")})
    assert containerd.observe(made) is None
    made.files["/etc/rancher/k3s/k3s.yaml"] = ""
    seen = containerd.observe(made)
    assert seen is not None and seen["embedded"] == "k3s" and seen["version"] == ""


@pytest.mark.parametrize(("changed", "stale"), [(1000.0, False), (1090.5, False), (1092.0, True)])
def test_stale_is_a_file_newer_than_the_process(changed: float, stale: bool) -> None:
    # Booted at 1000, started 90 s later: at 1090.
    made = node()
    made.files["/proc/12/stat"] = f"12 (con tain) erd) S {' '.join(['0'] * 18)} 9000 0"
    made.files["/proc/uptime"] = "100.00 50.00\n"
    made.answers["stat"] = lambda argv: Done(0, f"{changed:.6f}\n" * len(argv[4:]), "")
    made.answers["date"] = lambda argv: Done(0, "1100.000000000\n", "")
    assert observe(made)["stale"] is stale
