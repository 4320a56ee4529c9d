# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects by which OpenShift's nodes ask the user's registry first: on the real definitions, applied and undone."""

from __future__ import annotations

import json

import archives
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from ansible_runs import ansible, write_inventory
from real_apiserver import MERGE
from test_airgap_needed import LIST, of

API = "/apis/config.openshift.io/v1"
PLURALS = {"imagedigestmirrorsets": "imageDigestMirrors", "imagetagmirrorsets": "imageTagMirrors"}
OURS = "kubegpu-share-airgap"


def test_both_objects_are_applied_where_that_is_asked_for_and_only_they_are_removed(openshift, tmp_path):
    maker = archives.Maker(tmp_path / "archive")
    maker.take([item for item in needed(LIST, of(backends=["hami"])) if item["id"] == "images/hami"])
    folder = maker.close()
    theirs = {
        **{"apiVersion": "config.openshift.io/v1", "kind": "ImageDigestMirrorSet", "metadata": {"name": "theirs"}},
        "spec": {"imageDigestMirrors": [{"source": "docker.io/projecthami/hami", "mirrors": ["r.example.org/hami"]}]},
    }
    openshift.request("POST", f"{API}/imagedigestmirrorsets", theirs)
    write_inventory(tmp_path, {"gpu_nodes": []}, gpu_kubeconfig=str(openshift.kubeconfig))
    role = {"name": "kubegpu.share.airgap", "tasks_from": "variables"}
    play = {"hosts": "localhost", "gather_facts": False, "tasks": [{"ansible.builtin.import_role": role}]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))

    def run(**given):
        known = {"folder": folder, "unsigned": True, "registry": "registry.example.org:5000/gpu", **given}
        known["openshift_mirrors_file"] = str(tmp_path / "mirrors.yml")
        words = [word for name, value in known.items() for word in ("-e", json.dumps({f"airgap_{name}": value}))]
        done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "play.yml", *words)
        assert done.rc == 0, done.text
        return done

    (tmp_path / "keep.yml").write_text(
        yaml.safe_dump(
            [{**play, "tasks": [{"ansible.builtin.import_role": {**role, "tasks_from": "keep_mirror_sets"}}]}]
        )
    )

    def kept():
        done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "keep.yml")
        assert done.rc == 0, done.text
        return " ".join(done.text.split())

    def there():
        names = {}
        for plural, field in PLURALS.items():
            for item in openshift.request("GET", f"{API}/{plural}")["items"]:
                if item["metadata"].get("deletionTimestamp"):
                    # As kube-controller-manager completes it, which this server has not.
                    path = f"{API}/{plural}/{item['metadata']['name']}"
                    openshift.ask("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
                    continue
                names[plural, item["metadata"]["name"]] = item["spec"][field]
        return names

    others = {("imagedigestmirrorsets", "theirs"): theirs["spec"]["imageDigestMirrors"]}
    run()
    # Written, and nothing asked of the nodes.
    written = list(yaml.safe_load_all((tmp_path / "mirrors.yml").read_text()))
    assert [document["kind"] for document in written] == ["ImageDigestMirrorSet", "ImageTagMirrorSet"]
    assert there() == others
    run(openshift_mirrors_state="present")
    mirrors = ["registry.example.org:5000/gpu/projecthami/hami"]
    rows = [{"source": "docker.io/projecthami/hami", "mirrors": mirrors}]
    assert there() == {**others, **{(plural, OURS): rows for plural in PLURALS}}
    assert run(openshift_mirrors_state="present").changed == 0
    run(openshift_mirrors_state="absent")
    assert there() == others
    run(openshift_mirrors_state="present")
    # uninstall.yml leaves them, and says so.
    told = kept()
    assert there().keys() == {*others, *((plural, OURS) for plural in PLURALS)}
    assert "ImageDigestMirrorSet and ImageTagMirrorSet kubegpu-share-airgap of playbook airgap_push.yml stay" in told
    assert "drains all nodes when they go, and restarts them" in told
    assert "oc delete imagedigestmirrorset,imagetagmirrorset kubegpu-share-airgap removes them" in told
    run(openshift_mirrors_state="present", state="absent")
    assert there() == others and not (tmp_path / "group_vars/all/airgap.yml").exists()
    assert "kubegpu-share-airgap" not in kept()
    # One of this name without our label is somebody else's.
    namesake = {**theirs, "metadata": {"name": OURS}}
    openshift.request("POST", f"{API}/imagedigestmirrorsets", namesake)
    assert run(openshift_mirrors_state="absent").changed == 1, "the variables are written again, and nothing else"
    assert there() == {**others, ("imagedigestmirrorsets", OURS): theirs["spec"]["imageDigestMirrors"]}
    assert "kubegpu-share-airgap of playbook" not in kept()
