# SPDX-License-Identifier: GPL-3.0-or-later
"""The toolkit's configuration files: our settings beside the user's, and the files that packages leave."""

from __future__ import annotations

import subprocess

import pytest
from action_plugins import act
from ansible_collections.kubegpu.share.plugins.action import toolkit_config as action
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Change, Plan, run
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import config as toolkit
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.config import CTK, ConfigReconciler
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit.module import ARGUMENTS
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem, Killed

from lab.paths import cache_root

PACKAGED = "# For example:\n# NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml\n"
SET = f"{toolkit.VARIABLE}={toolkit.FLAG}"
OURS = f"{toolkit.MARKER}\n{SET}\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", OURS),
        (PACKAGED, PACKAGED + OURS),
        (PACKAGED + "A=b", PACKAGED + "A=b\n" + OURS),
        (PACKAGED + OURS, PACKAGED + OURS),
        (f"{SET}\n", f"{SET}\n"),
        (f'{toolkit.VARIABLE}="a, {toolkit.FLAG}"\n', f'{toolkit.VARIABLE}="a, {toolkit.FLAG}"\n'),
        (f"{toolkit.VARIABLE}=a\nB=c\n", f"{toolkit.MARKER}\n{toolkit.VARIABLE}=a,{toolkit.FLAG}\nB=c\n"),
        (f"{toolkit.VARIABLE}=a\nB=c", f"{toolkit.MARKER}\n{toolkit.VARIABLE}=a,{toolkit.FLAG}\nB=c"),
        (f"{toolkit.VARIABLE}=\n", f"{toolkit.VARIABLE}=\n{OURS}"),
        (f"#{SET}\n", f"#{SET}\n{OURS}"),
        (f"{toolkit.PENDING}\n{SET}\n", OURS),
    ],
)  # fmt: skip
def test_the_flag_is_added_to_the_users_flags(text, want):
    assert toolkit.with_flag(text) == want
    assert toolkit.with_flag(want) == want, "a second time changes nothing"


LINES = st.sampled_from(["# words", "", "A=b", f"{toolkit.VARIABLE}=a,b", f"{toolkit.VARIABLE}=", "  C = d ", SET])


@given(st.lists(LINES), st.booleans())
def test_removing_the_flag_restores_the_environment(lines, ended):
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    ours = toolkit.with_flag(text)
    assert toolkit.with_flag(ours) == ours
    back = toolkit.without_flag(ours)
    assert back in (text, text + "\n")
    assert toolkit.MARKER not in back


ACCEPTS = f"{toolkit.ACCEPT} = true"
REFUSES = f"{toolkit.ACCEPT} = false"
TABLE = '[nvidia-container-runtime]\nmode = "auto"\n'
# As nvidia-ctk 1.20 writes it.
PACKAGED_CONFIG = f"#accept-x = false\n#{ACCEPTS}\ndisable-require = false\n\n{TABLE}"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", f"{toolkit.ACCEPT_MARKER}\n{REFUSES}\n"),
        (PACKAGED_CONFIG, f"{toolkit.ACCEPT_MARKER}\n{REFUSES}\n{PACKAGED_CONFIG}"),
        (f"a = 1\n{ACCEPTS}\n{TABLE}", f"a = 1\n{toolkit.ACCEPT_MARKER} {ACCEPTS}\n{REFUSES}\n{TABLE}"),
        (f"  '{toolkit.ACCEPT}'=true # x", f"{toolkit.ACCEPT_MARKER}   '{toolkit.ACCEPT}'=true # x\n{REFUSES}"),
        (f"{REFUSES}\n{TABLE}", f"{REFUSES}\n{TABLE}"),
        (f"{TABLE}{ACCEPTS}\n", f"{toolkit.ACCEPT_MARKER}\n{REFUSES}\n{TABLE}{ACCEPTS}\n"),
    ],
)
def test_unprivileged_containers_are_refused_by_one_line(text, want):
    assert toolkit.refusing(text) == want
    assert toolkit.refusing(want) == want, "a second time changes nothing"
    assert toolkit.accepting(want) == text


CONFIG_LINES = st.sampled_from(["# words", "", "disable-require = false", ACCEPTS, f" {ACCEPTS} # mine", f"#{REFUSES}"])


@given(st.lists(CONFIG_LINES, max_size=4), st.lists(st.sampled_from([TABLE.rstrip(), "", ACCEPTS])), st.booleans())
def test_accepting_restores_the_configuration(top, tables, ended):
    if len([line for line in top if line.strip().startswith(toolkit.ACCEPT)]) > 1:
        top = []
    lines = [*top, "[features]", *tables]
    text = "\n".join(lines) + ("\n" if ended else "")
    ours = toolkit.refusing(text)
    assert toolkit.refusing(ours) == ours and REFUSES in ours.partition("[features]")[0]
    assert toolkit.accepting(ours) == text


def test_a_users_later_change_is_kept():
    mine = f"{toolkit.ACCEPT_MARKER} {ACCEPTS}\n{toolkit.ACCEPT} = true # again\n{TABLE}"
    assert toolkit.accepting(mine) == f"{toolkit.ACCEPT} = true # again\n{TABLE}"


def ctk(rc=0, text=f"x = 1\n{REFUSES}\n", err=""):
    return FakeSystem({toolkit.CONFIG: PACKAGED_CONFIG, CTK: ""}, {f"{CTK} config": Done(rc, text, err)})


def test_nvidia_ctk_confirms_the_refusal():
    machine = ctk()
    assert work(machine, check=True, accept_unprivileged=False)["changed"] and not machine.ran
    assert work(machine, accept_unprivileged=False)["changed"]
    assert machine.files[toolkit.CONFIG] == toolkit.refusing(PACKAGED_CONFIG)
    assert [line for line in machine.ran if line.startswith(CTK)] == [f"{CTK} config --config-file={toolkit.CONFIG}"]
    assert not work(machine, accept_unprivileged=False)["changed"]
    assert work(machine)["changed"] and machine.files[toolkit.CONFIG] == PACKAGED_CONFIG
    assert not work(machine)["changed"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rc": 1, "err": "warning\nfailed to load config: (3, 1)"}, r"failed to load config: \(3, 1\)"),
        ({"text": PACKAGED_CONFIG}, "its output lacks accept-nvidia"),
    ],
)
def test_a_configuration_that_nvidia_ctk_rejects_is_rolled_back(answer, message):
    machine = ctk(**answer)
    with pytest.raises(NotInEffect, match=f"which was rolled back: {message}"):
        work(machine, accept_unprivileged=False)
    assert machine.files[toolkit.CONFIG] == PACKAGED_CONFIG
    del machine.files[toolkit.CONFIG]
    with pytest.raises(NotInEffect):
        work(machine, accept_unprivileged=False)
    assert toolkit.CONFIG not in machine.files


def test_a_kept_configuration_loses_our_line():
    machine = FakeSystem({toolkit.CONFIG: toolkit.refusing(PACKAGED_CONFIG)})
    assert work(machine, state="absent", keep=[toolkit.CONFIG])["changed"]
    assert machine.files == {toolkit.CONFIG: PACKAGED_CONFIG}


ROOT = "/run/nvidia/driver"
CLI = f"[{toolkit.CLI}]\n"
ROOTED = f'{toolkit.ROOT_MARKER} {ROOT}. Before:\nroot = "{ROOT}"\n'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", ROOTED.replace("root =", f"{CLI}root =")),
        (TABLE, TABLE + ROOTED.replace("root =", f"{CLI}root =")),
        # As nvidia-ctk 1.20 writes it.
        (f'{CLI}#root = "{ROOT}"\n\n{TABLE}', f'{CLI}{ROOTED}#root = "{ROOT}"\n\n{TABLE}'),
        (f'{CLI}root = "/a" # mine\n', f"{CLI}{ROOTED}".replace("Before:", 'Before: root = "/a" # mine')),
        (f"{CLI}root = '{ROOT}'\n", f"{CLI}root = '{ROOT}'\n"),
        (f'{TABLE}root = "/a"\n{CLI}', f'{TABLE}root = "/a"\n{CLI}{ROOTED}'),
    ],
)
def test_the_driver_containers_root_is_one_line_and_goes_again(text, want):
    assert toolkit.rooted(text, ROOT) == want
    assert toolkit.rooted(want, ROOT) == want, "a second time changes nothing"
    assert toolkit.unrooted(want) == text


def test_a_root_that_the_user_has_set_since_is_kept():
    mine = f"{CLI}{ROOTED}".replace(f'"{ROOT}"', '"/mine"')
    assert toolkit.unrooted(mine) == f'{CLI}root = "/mine"\n'


def test_nvidia_ctk_confirms_the_root_and_the_specification_is_made_again():
    machine = ctk(text=f'x = 1\n[{toolkit.CLI}]\n  root = "{ROOT}"\n')
    machine.commands["systemctl restart"] = Done(0, "", "")
    machine.folders.add("/run/systemd/system")
    refresh = f"systemctl restart {toolkit.SERVICE}"
    assert work(machine, driver_root=ROOT)["changed"] and restarts(machine) == [refresh]
    assert machine.files[toolkit.CONFIG] == toolkit.rooted(PACKAGED_CONFIG, ROOT)
    assert not work(machine, driver_root=ROOT)["changed"]
    machine.ran.clear()
    # The machine has a driver of its own again.
    assert work(machine)["changed"] and machine.files[toolkit.CONFIG] == PACKAGED_CONFIG
    assert restarts(machine) == [refresh]
    silent = ctk()
    with pytest.raises(NotInEffect, match='its output lacks root = "/run/nvidia/driver"'):
        work(silent, driver_root=ROOT)
    assert silent.files[toolkit.CONFIG] == PACKAGED_CONFIG


REAL = sorted((cache_root() / "bin").glob("toolkit-*/nvidia-ctk"))


@pytest.mark.skipif(not REAL, reason="the lab's toolkit wasn't built on this machine yet")
@pytest.mark.parametrize("text", ["", PACKAGED_CONFIG, f"{ACCEPTS}\n{TABLE}", f"{TABLE}"])
def test_the_real_toolkit_reads_it(text, tmp_path):
    def has_lines(config):
        (tmp_path / "config.toml").write_text(config)
        command = [str(REAL[-1]), "config", f"--config-file={tmp_path}/config.toml"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return REFUSES in lines, f'root = "{ROOT}"' in map(str.strip, lines)

    assert has_lines(toolkit.rooted(toolkit.refusing(text), ROOT)) == (True, True)
    assert has_lines(toolkit.refusing(text)) == (True, False)
    assert has_lines(text) == has_lines(toolkit.accepting(toolkit.refusing(text))) == (False, False)


def node(files=None, rc=0):
    machine = FakeSystem(files, {"systemctl restart": Done(rc, "", "Job failed\nmore"), "rmdir": Done(0, "", "")})
    machine.folders.add("/run/systemd/system")
    return machine


def work(machine, check=False, **params):
    usual = {name: spec.get("default") for name, spec in ARGUMENTS.items()}
    return run(ConfigReconciler({**usual, **params}, machine), check)


def restarts(machine):
    return [line for line in machine.ran if line.startswith("systemctl restart")]


def test_the_flag_is_set_and_removed():
    machine = node({toolkit.ENVIRONMENT: PACKAGED})
    assert work(machine, check=True, old_cdi=True)["changed"] and not machine.ran
    assert work(machine, old_cdi=True)["changed"]
    assert machine.files[toolkit.ENVIRONMENT] == PACKAGED + OURS
    assert restarts(machine) == ["systemctl restart nvidia-cdi-refresh.service"]
    assert not work(machine, old_cdi=True)["changed"]
    assert work(machine)["changed"] and machine.files[toolkit.ENVIRONMENT] == PACKAGED
    assert not work(machine)["changed"]


@pytest.mark.parametrize("at", [2, 3])
def test_a_killed_run_regenerates_the_specification_the_next_time(at):
    machine = node({toolkit.ENVIRONMENT: PACKAGED})
    machine.kill_at = at
    with pytest.raises(Killed):
        work(machine, old_cdi=True)
    machine.kill_at = 0
    assert work(machine, old_cdi=True)["changed"]
    assert machine.files[toolkit.ENVIRONMENT] == PACKAGED + OURS
    assert restarts(machine)


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_was_killed_after_the_drivers_root_regenerates_the_specification_the_next_time(at):
    machine = ctk(text=f'[{toolkit.CLI}]\nroot = "{ROOT}"\n')
    machine.commands["systemctl restart"] = Done(0, "", "")
    machine.folders.add("/run/systemd/system")
    machine.kill_at = at
    with pytest.raises(Killed):
        work(machine, driver_root=ROOT)
    machine.kill_at = 0
    machine.ran.clear()
    assert work(machine, driver_root=ROOT)["changed"] and restarts(machine)
    assert machine.files[toolkit.CONFIG] == toolkit.rooted(PACKAGED_CONFIG, ROOT)
    assert not work(machine, driver_root=ROOT)["changed"]


def test_a_users_configuration_keeps_its_link_its_mode_and_its_owner():
    machine = node({"/srv/toolkit.toml": PACKAGED_CONFIG})
    machine.links[toolkit.CONFIG] = "/srv/toolkit.toml"
    machine.files[toolkit.CONFIG] = PACKAGED_CONFIG
    machine.commands["stat -c %a %u:%g /srv/toolkit.toml"] = Done(0, "640 7:8\n", "")
    change = toolkit.Configure(PACKAGED_CONFIG, "x = 1\n", ())
    ConfigReconciler({}, machine).apply({}, Plan((Change(toolkit.CONFIG, "", "", change),)))
    assert (machine.files["/srv/toolkit.toml"], machine.modes["/srv/toolkit.toml"]) == ("x = 1\n", 0o640)
    assert machine.files[toolkit.CONFIG] == PACKAGED_CONFIG, "the link"
    assert "chown 7:8 /srv/toolkit.toml" in machine.ran


def test_a_configuration_that_is_not_utf_8_is_left_as_it_is():
    machine = node({toolkit.CONFIG: "# caf\ufffd\n"})
    with pytest.raises(ShareError, match=r"config\.toml isn't UTF-8; it is left as it is"):
        work(machine, accept_unprivileged=False)
    assert machine.files[toolkit.CONFIG] == "# caf\ufffd\n"


def test_a_failing_service_is_reported_and_retried():
    machine = node({toolkit.ENVIRONMENT: PACKAGED}, rc=1)
    for _time in range(2):
        with pytest.raises(NotInEffect, match="couldn't regenerate the CDI specification: Job failed"):
            work(machine, old_cdi=True)
    assert work(node({}, rc=5), old_cdi=True)["changed"], "a toolkit without the service"
    machine = node({})
    machine.folders.clear()
    assert work(machine, old_cdi=True)["changed"] and not restarts(machine), "no systemd runs"
    machine = node({}, rc=1)
    machine.links[f"/etc/systemd/system/{toolkit.SERVICE}"] = "/dev/null"
    assert work(machine, old_cdi=True)["changed"] and not restarts(machine), "a masked service"


def test_remaining_files_are_removed_except_those_to_keep():
    ours = {toolkit.CONFIG: "x = 1\n", toolkit.ENVIRONMENT: PACKAGED, toolkit.SPECIFICATION: "kind: x\n"}
    files = {**ours, "/etc/cdi/a": ""}
    machine = node(files)
    assert work(machine, state="absent")["changed"] and set(machine.files) == {"/etc/cdi/a"}
    assert not work(machine, state="absent")["changed"]
    machine = node(files)
    work(machine, state="absent", keep=[toolkit.CONFIG, toolkit.SPECIFICATION])
    assert set(machine.files) == set(files) - {toolkit.ENVIRONMENT}


def test_a_kept_environment_loses_our_flag():
    machine = node({toolkit.ENVIRONMENT: PACKAGED + OURS})
    assert work(machine, state="absent", keep=[toolkit.ENVIRONMENT])["changed"]
    assert machine.files == {toolkit.ENVIRONMENT: PACKAGED}


def facts(env, config=None, specs=()):
    return {
        "sources_stale": [],
        "toolkit_legacy": {"record": "", "drop_ins": []},
        "packages": {},
        "toolkit": {"config": config and {"path": toolkit.CONFIG, "mode": "auto", "text": config}},
        "cdi": {"specs": [{"path": path} for path in specs], "refresh_env": env},
    }


@pytest.mark.parametrize(
    ("args", "observed", "runs"),
    [
        ({}, facts(PACKAGED), False),
        ({}, facts(PACKAGED + OURS), True),
        ({"old_cdi": True}, facts(None), True),
        ({"old_cdi": True}, facts(PACKAGED + OURS), False),
        ({"old_cdi": True}, facts(PACKAGED), True),
        ({"accept_unprivileged": False}, facts(None), True),
        ({"accept_unprivileged": False}, facts(None, config=toolkit.refusing("a = 1\n")), False),
        ({}, facts(None, config="a = 1\n"), False),
        ({}, facts(None, config=toolkit.refusing("a = 1\n")), True),
        ({"state": "absent"}, facts(None), False),
        ({"state": "absent"}, facts(None, config="a = 1\n"), True),
        ({"state": "absent", "keep": [toolkit.CONFIG]}, facts(None, config="a = 1\n"), False),
        ({"state": "absent"}, facts(None, specs=[toolkit.SPECIFICATION]), True),
        ({"state": "absent"}, facts(None, specs=["/etc/cdi/mine.yaml"]), False),
    ],
)
def test_the_module_is_executed_only_on_drift(args, observed, runs, monkeypatch):
    assert bool(act(action, {**args, "observed": observed}, monkeypatch)[1]) == runs
