# SPDX-License-Identifier: GPL-3.0-or-later
"""What helm has recorded in the cluster, and what its module would do by that, without helm."""

from __future__ import annotations

import base64
import gzip
import json
import tarfile

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import deployed
from ansible_collections.kubegpu.share.plugins.module_utils._kube.helm import release
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.cluster import _helm
from fake_kube import FakeKube

VALUES = {"image": {"tag": "v1"}}
CONFIG = {"nvidia": {"defaultMemory": 0, "defaultCores": 0, "deviceSplitCount": 10}}


def secret(revision=1, status="deployed", values=None, config=None, data=None):
    """A revision as helm 3 writes it: base64 in the field, which the API has in base64, too."""
    manifest = yaml.safe_dump({"kind": "ConfigMap", "data": {"device-config.yaml": yaml.safe_dump(config or CONFIG)}})
    chart = {"metadata": {"name": "hami", "version": "2.10.0"}, "values": {"replicas": 1}}
    body = {"info": {"status": status}, "chart": chart, "config": values or VALUES, "manifest": manifest}
    text = base64.b64encode(base64.b64encode(gzip.compress(json.dumps(body).encode()))).decode()
    labels = {"owner": "helm", "name": "hami", "version": str(revision), "status": status}
    metadata = {"name": f"sh.helm.release.v1.hami.v{revision}", "namespace": "hami-system", "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "data": {"release": text} if data is None else data,
    }


def test_the_newest_revision_is_the_release():
    found = release([secret(10, "pending-upgrade", {"a": 1}), secret(9)])
    assert (found["revision"], found["status"], found["values"]) == (10, "pending-upgrade", {"a": 1})
    assert (found["chart"], found["chart_version"], found["chart_values"]) == ("hami", "2.10.0", {"replicas": 1})
    assert (
        release([]) is None
        and release([secret(data={"release": "eA=="})]) is None
        and release([secret(data={})]) is None
    )


@pytest.mark.parametrize(
    ("secrets", "options", "changed"),
    [
        ([], {}, True),
        ([secret()], {}, False),
        ([secret()], {"force": True}, True),
        ([secret()], {"release_values": {"image": {"tag": "v2"}}}, True),
        ([secret()], {"chart_version": "2.9.0"}, True),
        # helm takes both for the same.
        ([secret()], {"chart_version": "v2.10.0"}, False),
        ([secret(2, "failed"), secret()], {}, True),
        ([secret()], {"release_state": "absent"}, True),
        ([], {"release_state": "absent"}, False),
    ],
)
def test_helm_is_predicted_from_its_secrets(secrets, options, changed):
    usual = {"name": "hami", "release_namespace": "hami-system", "chart_ref": "hami", "chart_version": "2.10.0"}
    result = _helm(FakeKube(*secrets), {**usual, "release_values": VALUES, **options})
    assert result["changed"] is changed and bool(result["diff"]) is changed


@pytest.mark.parametrize("version", ["2.10", "~2.10.0", ">=2.9 <3", "2.x"])
def test_of_a_range_of_versions_only_helm_knows_the_newest(version):
    usual = {"name": "hami", "release_namespace": "hami-system", "chart_ref": "hami", "release_values": VALUES}
    assert _helm(FakeKube(secret()), {**usual, "chart_version": version}) is None


def test_the_version_of_a_local_chart_is_the_charts(tmp_path):
    folder = tmp_path / "hami"
    folder.mkdir()
    given = {"release_name": "hami", "release_namespace": "hami-system", "release_values": VALUES}
    kube = FakeKube(secret())
    assert _helm(kube, {**given, "chart_ref": str(folder)})["changed"], "it has none"
    for version, changed in (("2.10.0", False), ("2.11.0", True)):
        (folder / "Chart.yaml").write_text(f"name: hami\nversion: {version}\n")
        archive = tmp_path / f"hami-{version}.tgz"
        with tarfile.open(archive, "w:gz") as made:
            made.add(folder, "hami")
        for path in (folder, archive):
            assert _helm(kube, {**given, "chart_ref": str(path)})["changed"] is changed


@pytest.mark.parametrize(
    ("recorded", "given", "same"),
    [
        (secret(), {}, True),
        (secret(status="failed"), {}, False),
        (secret(), {"version": "2.11.0"}, False),
        (secret(), {"values": {"image": {"tag": "v2"}}}, False),
        # Its device configuration completes the values where a default differs from the chart's.
        (secret(values={**VALUES, "device-config": {"content": "x"}}), {}, True),
        (secret(), {"defaults": {"defaultMemory": 5000}}, False),
        (secret(), {"values": {**VALUES, "device-config": {"content": "x"}}}, False),
    ],
)
def test_hamis_plan_needs_neither_helm_nor_the_chart_where_it_is_deployed(recorded, given, same):
    usual = {"values": VALUES, "defaults": {"defaultMemory": 0, "defaultCores": 0}, "version": "2.10.0"}
    asked = {**usual, **given}
    assert deployed(release([recorded]), asked["values"], asked["defaults"], asked["version"]) is same
    assert not deployed({}, VALUES, {}, "2.10.0")


def test_a_record_that_grows_without_end_is_none():
    """A Secret of 200 KB that would take 200 MB of memory."""
    bomb = gzip.compress(b" " * (200 << 20), 9)
    assert release([secret(data={"release": base64.b64encode(base64.b64encode(bomb)).decode()})]) is None
