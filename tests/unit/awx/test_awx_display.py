# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task's process prints reaches a job's output by ansible-runner's callback, without a warning."""

from __future__ import annotations

import base64
import json
import re

import pytest
from allocation_snapshots import asks, booked, ours, pod
from ansible_runs import ansible, write_inventory
from awx_kit import ROOT, display_callback
from kube_api import Api, kubeconfig

# AWX's marks in the output: an event's data, in pieces.
PIECE = re.compile("([A-Za-z0-9+/=]+)\x1b\\[\\d+D")


@pytest.fixture
def api():
    made = Api()
    share = pod("a", [asks(mem=10)], annotations=booked(1, 10))
    made.lists = {"/api/v1/nodes": [ours("n1")], "/api/v1/pods": [share]}
    yield made
    made.close()


def run(folder, api, version, playbook="inspect", **variables):
    """Run a playbook as ansible-runner does it.

    :returns: the exit status, the output, and the text of each event that AWX shows.
    """
    (folder / "config").write_text(json.dumps(kubeconfig(api.url)))
    events = folder / "events"
    (events / "job_events").mkdir(parents=True)
    write_inventory(folder, {}, gpu_kubeconfig=str(folder / "config"), **variables)
    words = ("-i", "hosts.yml", ROOT / "playbooks" / f"{playbook}.yml")
    given = {"ANSIBLE_STDOUT_CALLBACK": "awx_display", "ANSIBLE_CALLBACK_PLUGINS": str(display_callback(version))}
    rc, text = ansible(folder, "ansible-playbook", *words, **given, AWX_ISOLATED_DATA_DIR=str(events))
    # A text stands between the mark with its event's id and the mark that ends it.
    shown = {}
    for block in re.split("\x1b\\[K(?=[A-Za-z0-9+/=]+\x1b)", text):
        marks = "".join(PIECE.findall(block.partition("\x1b[K")[0]))
        data = json.loads(base64.b64decode(marks)) if marks else {}
        if data.get("uuid"):
            shown[data["uuid"]] = block.partition("\x1b[K")[2]
    return rc, text, shown


@pytest.mark.parametrize("version", ["2.4.0", pytest.param("2.4.3", marks=pytest.mark.long)])
def test_a_report_is_one_event_and_no_warning(tmp_path, api, version):
    rc, text, shown = run(tmp_path, api, version)
    assert rc == 0, text
    assert "errantly sent data" not in text
    [report] = [said for said in shown.values() if "n1" in said]
    assert "10/32" in report, report


def test_a_wait_for_the_second_sample_is_no_warning(tmp_path, api):
    """ansible.builtin.pause prints from the task's process; nothing of the collection uses it."""
    files = [*ROOT.glob("roles/**/*.yml"), *ROOT.glob("playbooks/*.yml")]
    assert not [path for path in files if re.search(r"^\s*(ansible\.builtin\.)?pause:", path.read_text(), re.MULTILINE)]
    _rc, text, _shown = run(tmp_path, api, "2.4.0", "verify", verify_grace=1)
    assert "Wait until transient states have passed" in text, text
    assert "errantly sent data" not in text, text
