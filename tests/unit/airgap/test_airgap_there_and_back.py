# SPDX-License-Identifier: GPL-3.0-or-later
"""An archive's whole way: images of one real registry, signed, packed, and pushed into another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import real_skopeo
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import mirrors, web
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import needed
from test_airgap_archive import keys  # noqa: F401
from test_airgap_download import Made, chart, image, key, registry  # noqa: F401
from test_airgap_needed import LIST, of
from test_airgap_push import playbook


def test_from_a_registry_to_another_by_the_users_key(tmp_path, registry, keys):  # noqa: F811
    """The first registry's lists of manifests are of OCI's type and of Docker's; the second one asks for a password."""
    digests = {kind: registry.push(f"projecthami/{kind}", kind, tag="v2", kind=kind) for kind in ("oci", "docker")}
    names = {"oci": "hami_image", "docker": "nvidia_device_plugin_image"}
    ids = {"oci": "images/hami", "docker": "images/nvidia-device-plugin"}
    items = [
        image(registry, f"projecthami/{kind}", tag="v2", id=ids[kind], variables=[names[kind]]) for kind in digests
    ]
    only = registry.push("projecthami/only", "only", tag="unnamed")
    by_digest = f"{registry.host}/projecthami/only@{only}"
    items.append(image(registry, "x", id="images/acceptance_image", variables=["acceptance_image"]))
    items[-1] |= {"name": by_digest, "source": by_digest}
    items += [chart(variables=["hami_chart_repo_url"]), key(id="files/key/debian12/3bf863cc.pub", hosts=["gpu1"])]
    items[-1]["variables"] = ["driver_repo_key_url"]
    tar = tmp_path / "carried" / "archive.tar"
    tar.parent.mkdir()
    make = Made(tmp_path / "outside", registry.run, tar=str(tar), signing_key="own@example.org", gpg_home=keys["home"])
    make(*items)
    with real_skopeo.registry(tmp_path / "second") as second:
        given = {
            **{"archive": str(tar), "skopeo": registry.skopeo, "registry": f"{second.host}/gpu"},
            **{"registry_ca": second.authority, "registry_auth_file": second.auth_file},
            **{"files_folder": str(tmp_path / "served"), "files_url": "http://127.0.0.1:9"},
        }
        other = playbook(tmp_path, verification_key=keys["other"], **given)
        assert other.rc != 0 and other.changed == 0 and "signature of SHA256SUMS is by key" in other.text, other.text
        assert not (tmp_path / "served").exists() and not Path(f"{tar}.unpacked").exists()
        done = playbook(tmp_path, verification_key=keys["own"], **given)
        assert done.rc == 0, done.text
        for kind, digest in digests.items():
            content = second.manifest(f"gpu/projecthami/{kind}", "v2")
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == digest
            # And each platform's manifest is there by its own digest.
            for row in json.loads(content)["manifests"]:
                assert second.manifest(f"gpu/projecthami/{kind}", row["digest"])
        written = yaml.safe_load((tmp_path / "inventory/group_vars/all/airgap.yml").read_text())
        for kind, digest in digests.items():
            assert written[names[kind]] == f"{second.host}/gpu/projecthami/{kind}:v2@{digest}"
        # What only a digest names gets no tag.
        assert second.manifest("gpu/projecthami/only", only)
        assert written["acceptance_image"] == f"{second.host}/gpu/projecthami/only@{only}"
        # Preflight's questions about these images, by these variables.
        known = of(backends=("hami", "nvidia"), delivery="registry", **{name: written[name] for name in names.values()})
        known = dataclasses.replace(known, software=frozenset())
        asked = [item for item in mirrors.at_mirrors(needed(LIST, known)) if item["variables"][0] in names.values()]
        fetch = web.fetcher(second.authority, "")
        found = mirrors.ask(asked, 30, fetch, {}, second.auth_file)
        assert [each.state for each in found] == ["present", "present"]
        again = playbook(tmp_path, verification_key=keys["own"], **given)
        assert again.rc == 0 and again.changed == 0, again.text
