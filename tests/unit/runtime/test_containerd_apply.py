# SPDX-License-Identifier: GPL-3.0-or-later
"""A node's containerd gets its files, proves itself, or gets the old ones back; over a made-up node."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _containerd, _observe_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._containerd_apply import Containerd
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import Replacement, digest
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import work
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Apply
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from fake_node import Clock, FakeNode

MAIN = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-kubegpu-nvidia.toml"
BINARY = "/usr/bin/nvidia-container-runtime"
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
WANTED = _containerd.Wanted(present=True, binary=BINARY)
CHANGES = (
    Replacement(DROP_IN, "", "# drop-in\n"),
    Replacement(MAIN, digest(_containerd.mask(OLD)), "imports = ['x']\n" + _containerd.mask(OLD)),
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
            line = f"path=/usr/local/bin/containerd ; argv[]=/usr/local/bin/containerd --config {MAIN} ; "
            return Done(0, f"ExecStart={{ {line}}}\nActiveState=active\nMainPID=12\n", "")
        return Done(restart(made) if argv[1] == "restart" else 0, "", "")

    made.answers = {
        "systemctl": systemctl,
        "containerd": lambda argv: Done(0, dump(made), ""),
        "ctr": lambda argv: Done(0, plugins(made), ""),
        "journalctl": lambda argv: Done(0, "level=info x\nlevel=fatal no such plugin\n", ""),
    }
    return made


def apply(
    made: FakeNode, changes: Sequence[Replacement] = CHANGES, wanted: _containerd.Wanted = WANTED
) -> dict[str, object]:
    clock = Clock()
    return Apply(made, Containerd(made, wanted), 10, clock.sleep, clock.now).run(changes)


def restarts(made: FakeNode) -> int:
    return made.log.count("systemctl restart containerd.service")


def assert_as_before(made: FakeNode) -> None:
    assert made.files == {MAIN: OLD, BINARY: "", "/usr/local/bin/containerd": ""}
    assert made.modes[MAIN] == 0o600 and made.owners[MAIN] == "7:8"


def test_written_proven_and_restarted_once() -> None:
    made = node()
    done = apply(made)
    assert made.files[MAIN] == "imports = ['x']\n" + OLD, "the credential is the real one again"
    assert made.files[DROP_IN] == "# drop-in\n"
    assert made.modes[MAIN] == 0o600 and made.owners[MAIN] == "7:8", "permissions stay"
    assert restarts(made) == 1 and not any("daemon-reload" in one for one in made.log)
    assert _containerd.PENDING_PATH not in made.files
    assert made.log.index(f"write {_containerd.PENDING_PATH}") < made.log.index(f"write {DROP_IN}")
    assert made.log.index(f"write {DROP_IN}") < made.log.index(f"write {MAIN}"), "a file before its import"
    assert done == {"effective": WITH, "restarted": True}


def test_the_record_is_for_root_alone() -> None:
    made = node()
    seen: list[int] = []
    made.answers["ctr"] = lambda argv: seen.append(made.modes[_containerd.PENDING_PATH]) or Done(0, OK, "")
    apply(made)
    assert seen == [0o600]
    assert "mkdir -p -m 0700 /var/lib/kubegpu-share" in made.log


def test_without_the_binary_nothing_is_written() -> None:
    made = node()
    del made.files[BINARY]
    with pytest.raises(BadInput, match=f"runtime_nvidia_binary: {BINARY} isn't on this node"):
        apply(made)
    assert not [one for one in made.log if one.startswith("write")]


def test_a_file_that_changed_meanwhile_isnt_overwritten() -> None:
    made = node()
    made.files[MAIN] += "# new\n"
    with pytest.raises(ShareError, match="was changed while"):
        apply(made)
    assert not [one for one in made.log if one.startswith("write")]


@pytest.mark.parametrize(
    ("dump", "words"),
    [
        (lambda n: PLAIN, "default_runtime_name is 'runc'"),
        (
            lambda n: (WITH + "[grpc]\ngid = 0\n") if DROP_IN in n.files else (PLAIN + "[grpc]\ngid = 5\n"),
            "grpc.gid would change",
        ),
    ],
)
def test_what_containerd_wouldnt_do_is_put_back_without_a_restart(dump: Callable[[FakeNode], str], words: str) -> None:
    made = node(dump)
    with pytest.raises(NotInEffect, match=words):
        apply(made)
    assert_as_before(made)
    assert restarts(made) == 0


def test_a_dump_that_fails_is_put_back_with_containerds_words() -> None:
    made = node()
    made.answers["containerd"] = lambda argv: (
        Done(1, "", "a\ncontainerd: bad\n") if DROP_IN in made.files else Done(0, PLAIN, "")
    )
    with pytest.raises(NotInEffect, match="containerd: bad"):
        apply(made)
    assert_as_before(made)


def test_a_daemon_that_doesnt_start_gets_its_old_files_back() -> None:
    made = node(restart=lambda n: 1 if DROP_IN in n.files else 0)
    with pytest.raises(
        NotInEffect, match=r"runs with the old one again \(systemctl restart ended with 1\): level=fatal no such"
    ):
        apply(made)
    assert_as_before(made)
    assert restarts(made) == 2 and "systemctl reset-failed containerd.service" in made.log


def test_a_cri_plugin_that_fails_is_noticed_at_once() -> None:
    made = node(plugins=lambda n: OK.replace("ok", "error") if DROP_IN in n.files else OK)
    with pytest.raises(NotInEffect, match="its CRI plugin failed to load"):
        apply(made)
    assert_as_before(made)


def test_a_daemon_that_never_answers_is_waited_for_only_so_long() -> None:
    made = node(plugins=lambda n: "" if DROP_IN in n.files else OK)
    clock = Clock()
    with pytest.raises(NotInEffect, match="didn't answer"):
        Apply(made, Containerd(made, WANTED), 10, clock.sleep, clock.now).run(CHANGES)
    assert 10 <= clock.time < 12
    assert_as_before(made)


def test_both_failing_is_said() -> None:
    made = node(restart=lambda n: 1)
    with pytest.raises(NotInEffect, match=r"with the old one, which is back in place, it doesn't come up either"):
        apply(made)
    assert made.files[MAIN] == OLD
    assert _containerd.PENDING_PATH in made.files, "the next run goes on from here"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(1, 12))
def test_a_run_killed_anywhere_is_finished_by_the_next(at: int) -> None:
    made = node()
    count = 0
    write, run = made.write, made.run

    def step() -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Killed

    made.write = lambda *args, **kw: (step(), write(*args, **kw))[1]  # type: ignore[method-assign]
    made.run = lambda *args, **kw: (step(), run(*args, **kw))[1]  # type: ignore[method-assign]
    try:
        apply(made)
        killed = False
    except Killed:
        killed = True
    made.write, made.run = write, run  # type: ignore[method-assign]
    if killed and made.files.get(DROP_IN) is not None and MAIN in made.files and made.files[MAIN] != OLD:
        assert made.exists(_containerd.PENDING_PATH)
    # The next run plans from what is there.
    left = [
        Replacement(one.path, digest(_mask(made.files.get(one.path))), one.after)
        for one in CHANGES
        if _mask(made.files.get(one.path)) != one.after
    ]
    # And it fails: what comes back is what was there before the first run.
    made.answers["ctr"] = lambda argv: Done(0, "" if DROP_IN in made.files else OK, "")
    if killed:
        with pytest.raises(NotInEffect):
            apply(made, left)
        assert_as_before(made)


def _mask(text: str | None) -> str | None:
    return None if text is None else _containerd.mask(text)


def test_what_another_run_has_written_meanwhile_stays() -> None:
    """As when the controller was killed and the next run overtakes the module that still waits here."""

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
    with pytest.raises(NotInEffect, match=r"^containerd doesn't come up \(systemctl restart ended with 1\)"):
        apply(made, [])


def test_taking_out_removes_an_empty_folder_too() -> None:
    made = node(dump=lambda n: WITH if DROP_IN in n.files else PLAIN)
    made.files[DROP_IN] = "# ours\n"
    apply(made, [Replacement(DROP_IN, digest("# ours\n"), None)], _containerd.Wanted(present=False))
    assert DROP_IN not in made.files and "rmdir /etc/containerd/conf.d" in made.log


@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system", "Operation not permitted"])
def test_a_file_that_cant_be_written_leaves_all_as_it_was(reason: str) -> None:
    made = node()
    write = made.write

    def refuse(path: str, text: str, mode: int = 0o644) -> None:
        if path == MAIN:
            raise ShareError(f"{path} can't be written: {reason}")
        write(path, text, mode)

    made.write = refuse  # type: ignore[method-assign]
    with pytest.raises(ShareError, match=f"{reason}.*; containerd's configuration is as it was") as refused:
        apply(made)
    assert ("lsattr" in str(refused.value)) is (reason == "Operation not permitted")
    assert_as_before(made)
    assert restarts(made) == 0 and _containerd.PENDING_PATH not in made.files


def test_a_disk_too_full_to_put_back_leaves_the_way_back() -> None:
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
    with pytest.raises(ShareError, match=r"failed too .* run again when there is room"):
        apply(made, changes)
    assert _containerd.PENDING_PATH in made.files and restarts(made) == 0


def test_files_that_mean_the_same_need_no_restart() -> None:
    made = node(dump=lambda n: WITH)
    done = apply(made, [Replacement(MAIN, digest(_containerd.mask(OLD)), _containerd.mask(OLD) + "# a comment\n")])
    assert done["restarted"] is False and restarts(made) == 0 and made.files[MAIN] == OLD + "# a comment\n"


def test_a_crictl_that_says_otherwise_is_believed() -> None:
    made = node()
    made.files["/usr/bin/crictl"] = ""
    said = {"containerd": {"defaultRuntimeName": "runc", "runtimes": {"runc": {"options": {}}}}}
    made.answers["crictl"] = lambda argv: Done(0, json.dumps({"status": {}, "config": said}), "")
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
    params = {"state": "present", "binary": BINARY, "set_default": True, "cdi": True, "enable_cri": False, "timeout": 5}
    with pytest.raises(BadInput, match="action plugin"):
        work({**params, "plan": None}, node())
    rows = [{"path": one.path, "before": one.before, "after": one.after} for one in CHANGES]
    done = work({**params, "plan": {"runtime": "containerd", "files": rows}}, node())
    assert done["changed"] is True and done["runtime"] == "containerd"


# --------------------------------------------------------------------------- the look


def look(made: FakeNode) -> dict[str, object]:
    made.answers["containerd"] = lambda argv: Done(0, "containerd x v2.2.9 y" if argv[-1] == "--version" else PLAIN, "")
    seen = _observe_containerd.observe(made)
    assert seen is not None
    return seen


def test_what_is_seen() -> None:
    seen = look(node())
    assert seen["version"] == "2.2.9" and seen["config_path"] == MAIN and seen["service_active"]
    assert list(seen["files"]) == [MAIN] and "hunter2" not in json.dumps(seen)  # type: ignore[call-overload]
    assert (seen["stale"], seen["pending"], seen["embedded"], seen["operator"]) == (False, False, "", False)


def test_no_containerd() -> None:
    made = FakeNode({}, {"systemctl": lambda argv: Done(127, "", ""), "containerd": lambda argv: Done(127, "", "")})
    assert _observe_containerd.observe(made) is None
    made.files["/etc/rancher/k3s/k3s.yaml"] = ""
    seen = _observe_containerd.observe(made)
    assert seen is not None and seen["embedded"] == "k3s" and seen["version"] == ""


@pytest.mark.parametrize(("mtime", "stale"), [(1000.0, False), (1090.5, False), (1092.0, True)])
def test_stale_is_a_file_newer_than_the_process(mtime: float, stale: bool) -> None:
    # Booted at 1000, started 90 s later: at 1090.
    made = node()
    made.files["/proc/12/stat"] = f"12 (con tain) erd) S {' '.join(['0'] * 18)} 9000 0"
    made.files["/proc/uptime"] = "100.00 50.00\n"
    made.answers["stat"] = lambda argv: Done(0, f"{mtime:.6f}\n", "")
    made.answers["date"] = lambda argv: Done(0, "1100.000000000\n", "")
    assert look(made)["stale"] is stale
