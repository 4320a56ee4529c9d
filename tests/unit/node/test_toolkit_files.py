# SPDX-License-Identifier: GPL-3.0-or-later
"""The flag of nvidia-cdi-refresh beside what the user set, and what the toolkit's packages leave."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.action import toolkit_files as action
from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_files as toolkit
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._runner import run
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_files_apply import ToolkitFiles
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import FakeSystem, Killed
from test_node_actions import act

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
def test_the_flag_stands_beside_the_user_s(text, want):
    assert toolkit.with_flag(text) == want
    assert toolkit.with_flag(want) == want, "a second time changes nothing"


LINES = st.sampled_from(["# words", "", "A=b", f"{toolkit.VARIABLE}=a,b", f"{toolkit.VARIABLE}=", "  C = d ", SET])


@given(st.lists(LINES), st.booleans())
def test_what_the_user_wrote_comes_back(lines, ended):
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    ours = toolkit.with_flag(text)
    assert toolkit.with_flag(ours) == ours
    back = toolkit.without_flag(ours)
    assert back in (text, text + "\n")
    assert toolkit.MARKER not in back


def node(files=None, rc=0):
    machine = FakeSystem(files, {"systemctl restart": Done(rc, "", "Job failed\nmore"), "rmdir": Done(0, "", "")})
    machine.folders.add("/run/systemd/system")
    return machine


def work(machine, check=False, **params):
    return run(ToolkitFiles({"state": "present", "old_cdi": False, "keep": [], **params}, machine), check)


def test_set_proven_and_taken_out():
    machine = node({toolkit.ENVIRONMENT: PACKAGED})
    assert work(machine, check=True, old_cdi=True)["changed"] and not machine.ran
    assert work(machine, old_cdi=True)["changed"]
    assert machine.files[toolkit.ENVIRONMENT] == PACKAGED + OURS
    assert machine.ran == ["systemctl restart nvidia-cdi-refresh.service"]
    assert not work(machine, old_cdi=True)["changed"]
    assert work(machine)["changed"] and machine.files[toolkit.ENVIRONMENT] == PACKAGED
    assert not work(machine)["changed"]


@pytest.mark.parametrize("at", [2, 3])
def test_killed_before_the_specification_was_made_anew(at):
    machine = node({toolkit.ENVIRONMENT: PACKAGED})
    machine.kill_at = at
    with pytest.raises(Killed):
        work(machine, old_cdi=True)
    machine.kill_at = 0
    assert work(machine, old_cdi=True)["changed"]
    assert machine.files[toolkit.ENVIRONMENT] == PACKAGED + OURS
    assert machine.ran[-1].startswith("systemctl restart")


def test_a_service_that_fails_is_said_and_tried_again():
    machine = node({toolkit.ENVIRONMENT: PACKAGED}, rc=1)
    for _time in range(2):
        with pytest.raises(NotInEffect, match="couldn't make the CDI specification anew: Job failed"):
            work(machine, old_cdi=True)
    assert work(node({}, rc=5), old_cdi=True)["changed"], "a toolkit without the service"
    machine = node({})
    machine.folders.clear()
    assert work(machine, old_cdi=True)["changed"] and not machine.ran, "no systemd runs"


def test_what_the_packages_leave_goes_except_what_was_there():
    files = {
        toolkit.CONFIG: "x = 1\n",
        toolkit.ENVIRONMENT: PACKAGED,
        toolkit.SPECIFICATION: "kind: x\n",
        "/etc/cdi/a": "",
    }
    machine = node(files)
    assert work(machine, state="absent")["changed"] and set(machine.files) == {"/etc/cdi/a"}
    assert not work(machine, state="absent")["changed"]
    machine = node(files)
    work(machine, state="absent", keep=[toolkit.CONFIG, toolkit.SPECIFICATION])
    assert set(machine.files) == set(files) - {toolkit.ENVIRONMENT}


def test_an_environment_that_stays_loses_our_flag():
    machine = node({toolkit.ENVIRONMENT: PACKAGED + OURS})
    assert work(machine, state="absent", keep=[toolkit.ENVIRONMENT])["changed"]
    assert machine.files == {toolkit.ENVIRONMENT: PACKAGED}


def seen(env, config=None, specs=(), known=True):
    return {
        "toolkit": {"config": config and {"path": toolkit.CONFIG, "mode": "auto", "text": config}},
        "cdi": {"specs": [{"path": path} for path in specs], **({"refresh_env": env} if known else {})},
    }


@pytest.mark.parametrize(
    ("args", "observed", "runs"),
    [
        ({}, seen(None), False),
        ({}, seen(PACKAGED), False),
        ({}, seen(PACKAGED + OURS), True),
        ({}, seen(None, known=False), False),
        ({"old_cdi": True}, seen(None, known=False), True),
        ({"old_cdi": True}, seen(PACKAGED + OURS), False),
        ({"old_cdi": True}, seen(PACKAGED), True),
        ({"state": "absent"}, seen(None), False),
        ({"state": "absent"}, seen(None, config="a = 1\n"), True),
        ({"state": "absent", "keep": [toolkit.CONFIG]}, seen(None, config="a = 1\n"), False),
        ({"state": "absent"}, seen(None, specs=[toolkit.SPECIFICATION]), True),
        ({"state": "absent"}, seen(None, specs=["/etc/cdi/mine.yaml"]), False),
    ],
)
def test_the_controller_executes_only_on_drift(args, observed, runs, monkeypatch):
    assert bool(act(action, {**args, "observed": observed}, monkeypatch)[1]) == runs
