# SPDX-License-Identifier: GPL-3.0-or-later
"""An archive inside: into a real registry, to a web server, into variables that site.yml's preflight finds all of."""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import http.client
import http.server
import io
import json
import lzma
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace

import archives
import jinja2
import local_registry
import pytest
import real_skopeo
import served as fake
import yaml
from action_plugins import load
from ansible_collections.kubegpu.share.plugins.action import airgap_files
from ansible_collections.kubegpu.share.plugins.module_utils._core import plan, tar_headers
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import ARGUMENTS, package_set
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import (
    archive,
    mirrored,
    mirrors,
    named,
    pack,
    programs,
    push,
    repositories,
    served,
    unpack,
    web,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import inventory as of_inventory
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.inventory import variables
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.layout import Layout
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.needed import Inventory, needed
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.pusher import Access, Pusher
from ansible_runs import ROOT, ansible, write_inventory
from lab_repository import skip_without
from ports import free_port, serving
from test_airgap_needed import LIST, machine

KEY_SHA256 = fake.sha256(archives.KEY)
# Of an inventory: keys are the tests' own, and nothing else says where anything is.
OWN = {
    "driver_repo_key_sha256": KEY_SHA256,
    "toolkit_repo_key_sha256": KEY_SHA256,
    "nvidia_device_plugin_gfd": True,
    "nvidia_device_plugin_dcgm_exporter": True,
}
HOSTS = {"gpu1": "debian-12", "gpu2": "rocky-9"}


def inventory(by_host=None):
    """Two machines of different distributions, all back ends and a dedicated scheduler.

    :param by_host: variables of each host and of localhost.
    """
    by_host = by_host or {}
    machines = tuple(machine(release, host, **OWN, **by_host.get(host, {})) for host, release in HOSTS.items())
    local = variables("localhost", {**OWN, **by_host.get("localhost", {})})
    backends = frozenset({"gpushare", "hami", "nvidia"})
    return Inventory("v1.36.3", "", backends, "dedicated", "build", local, machines, frozenset({"gpu_operator"}))


@pytest.fixture(scope="module")
def skopeo():
    try:
        return real_skopeo.program()
    except LookupError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    skip_without("openssl")
    try:
        with real_skopeo.registry(tmp_path_factory.mktemp("registry") / "r") as running:
            yield running
    except LookupError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def made(tmp_path):
    """An archive of all that the inventory needs."""
    maker = archives.Maker(tmp_path / "archive")
    maker.take(needed(LIST, inventory()))
    described(maker, "packages/apt/d_debian12-amd64", "distribution", "http://deb.debian.org/debian", "debian", "12")
    described(maker, "packages/rpm/r_rocky9.5-amd64", "distribution", "http://dl.rockylinux.org/BaseOS", "rocky", "9.5")
    return maker.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


def playbook(place, *words, **given):
    """Run airgap_push.yml; what is given are its variables."""
    arguments = [word for name, value in given.items() for word in ("-e", json.dumps({f"airgap_{name}": value}))]
    inventory_file = place / "inventory" / "hosts.yml"
    if not inventory_file.exists():
        inventory_file.parent.mkdir()
        facts = {"distribution": {"id": "debian", "version": "12", "arch": "amd64"}, "apt": None, "rpm": None}
        # Of the other one nobody has the facts yet.
        write_inventory(inventory_file.parent, {"gpu_nodes": {"gpu1": {"gpu_node": facts}, "gpu2": None}})
    return ansible(
        place, "ansible-playbook", "-i", inventory_file, ROOT / "playbooks/airgap_push.yml", *arguments, *words
    )


def evaluated(folder, names):
    """What the inventory's variables are on each host, by Ansible itself."""
    names = sorted(names)
    shown = ", ".join(f"'{name}': {name} | default(none)" for name in names)
    play = [
        {
            "hosts": "gpu_nodes:localhost",
            "gather_facts": False,
            "tasks": [
                {
                    "ansible.builtin.copy": {
                        "content": "{{ {" + shown + "} | to_json }}",
                        "dest": f"{folder}/of-{{{{ inventory_hostname }}}}.json",
                    },
                    "delegate_to": "localhost",
                }
            ],
        }
    ]
    (folder / "evaluate.yml").write_text(yaml.safe_dump(play))
    done = ansible(folder, "ansible-playbook", "-i", "inventory/hosts.yml", "evaluate.yml")
    assert done.rc == 0, done.text
    return {
        host: {
            name: value
            for name, value in json.loads((folder / f"of-{host}.json").read_text()).items()
            if value is not None
        }
        for host in (*HOSTS, "localhost")
    }


def test_the_whole_way_inside(tmp_path, made, registry, skopeo):
    """Pushed and served, preflight's questions find everything by the variables that were written, and nothing else."""
    folder = tmp_path / "served"
    handler = functools.partial(Quiet, directory=str(folder))
    files = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    given = {
        **{"folder": made, "unsigned": True, "skopeo": skopeo, "registry": f"{registry.host}/gpu"},
        **{"registry_ca": registry.authority, "registry_auth_file": registry.auth_file},
        **{"files_folder": str(folder), "files_url": f"http://127.0.0.1:{files.server_port}"},
        "pull_secrets": ["registry"],
    }
    seen = playbook(tmp_path, "--check", "--diff", **given)
    assert seen.rc == 0, seen.text
    assert "+sha256:" in seen.text and f"{registry.host}/gpu/nvidia/k8s-device-plugin" in seen.text
    assert not folder.exists() and not (tmp_path / "inventory/group_vars").exists()
    assert registry.manifest("gpu/nvidia/k8s-device-plugin", "v0.20.0") == b""
    first = playbook(tmp_path, **given)
    assert first.rc == 0, first.text
    with serving(files):
        written = yaml.safe_load((tmp_path / "inventory/group_vars/all/airgap.yml").read_text())
        found = evaluated(tmp_path, written)
        items = needed(LIST, inventory(found))
        asked = mirrors.at_mirrors(items)
        fetch = web.fetcher(registry.authority, "")
        answers = mirrors.ask(asked, 60, fetch, {}, registry.auth_file)
    assert [each for each in answers if each.state != mirrors.PRESENT] == []
    elsewhere = [(item["id"], item["source"]) for item in mirrors.elsewhere(items)]
    assert elsewhere == []
    # Nothing that is carried is left out of the questions.
    carried = {entry["id"] for entry in archive.read(made, "", whole=False).contents.items}
    assert carried <= {each.item["id"] for each in answers}
    assert len(answers) >= 40, len(answers)
    # The digests are those of the archive's indexes.
    for entry in archive.read(made, "", whole=False).contents.items:
        if entry["kind"] == "image":
            source, tag, _digest = push.source_of(entry)
            content = registry.manifest(f"gpu/{source.partition('/')[2]}", tag)
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == entry["digest"]
    assert found["gpu1"]["driver_repo_url"] != found["gpu2"]["driver_repo_url"]
    [source] = found["gpu1"]["airgap_distribution_sources"]
    assert source["url"].endswith("/packages/apt/d_debian12-amd64/") and source["key_url"].endswith("/repository.asc")
    assert (
        found["gpu2"]["airgap_distribution_sources"] == [] and found["gpu1"]["driver_manage_prerequisites"] == "report"
    )
    assert written["hami_image_pull_secrets"] == ["registry"]
    assert written["airgap_registry_ca"] == registry.authority
    assert named.created_of((tmp_path / "inventory/group_vars/all/airgap.yml").read_text()) == archives.CREATED
    again = playbook(tmp_path, **given)
    assert again.rc == 0 and again.changed == 0, again.text
    # It knows from the file which folder it has filled.
    gone = playbook(tmp_path, state="absent")
    assert gone.rc == 0, gone.text
    assert not folder.exists() and not (tmp_path / "inventory/group_vars/all/airgap.yml").exists()


# What only a user names: an image, and two files of the machine with access.
CUDA = "registry.outside.example/cuda"


def carried(folder, items):
    """An archive of a list's items, with the files of the machine with access."""
    maker = archives.Maker(folder)
    for item in items:
        if item["id"] in ("images/gpushare", "files/runfile"):
            path = f"files/{item['place'].rpartition('/')[2]}"
            maker.entries.append({**item, **maker.file(path, b"x")})
        elif item["id"] == "images/acceptance_image":
            maker.take([item])
    return archive.read(maker.close(), "", whole=False).contents.items


def test_a_list_that_is_made_inside_has_the_names_outside(tmp_path):
    """As the playbook lists it: where the variables of the first archive count more than the user's own."""
    place = tmp_path / "inventory"
    his = {"gpushare_image_archive": f"{tmp_path}/gpushare-image.tar", "driver_runfile": f"{tmp_path}/580.95.05.run"}
    for path in his.values():
        Path(path).write_bytes(b"x")
    his |= {"acceptance_image": f"{CUDA}:12", "driver_source": "runfile", "driver_runfile_sha256": fake.sha256(b"x")}
    (place / "group_vars/all").mkdir(parents=True)
    write_inventory(place, {"gpu_nodes": {"gpu1": {"gpu_backend": "gpushare"}}})
    (place / "group_vars/all/a.yml").write_text(yaml.safe_dump(his))

    def listed(output):
        given = ("-e", "airgap_kubernetes=v1.36.3", "-e", f"airgap_output={output}")
        done = ansible(tmp_path, "ansible-playbook", "-i", place, ROOT / "playbooks/airgap_list.yml", *given)
        assert done.rc == 0, done.text
        return yaml.safe_load((tmp_path / output).read_text())["items"]

    outside = listed("outside.yml")
    sources = {item["id"]: item["place"] or item["source"] for item in outside}
    assert sources["images/acceptance_image"] == his["acceptance_image"]
    assert sources["images/gpushare"] == his["gpushare_image_archive"]
    assert sources["files/runfile"] == his["driver_runfile"]
    entries = carried(tmp_path / "archive", outside)
    assert {entry["id"] for entry in entries} == {"images/acceptance_image", "images/gpushare", "files/runfile"}
    where = push.registry("r.example.org/gpu")
    places = named.Places(where, "http://f.example.org", str(tmp_path / "archive"))
    values = named.variables(LIST, entries, push.targets(entries, where), places)
    assert values["acceptance_image"].startswith("r.example.org/gpu/cuda:12@sha256:")
    assert values["driver_runfile"] == f"{tmp_path}/archive/files/580.95.05.run"
    text = named.text(values, archives.CREATED)
    (place / "group_vars/all/airgap.yml").write_text(text)
    assert listed("inside.yml") == outside
    # Without the map the list would have the names inside.
    del values[named.OUTSIDE]
    (place / "group_vars/all/airgap.yml").write_text(named.text(values, archives.CREATED))
    assert listed("without.yml") != outside
    # What the user has named since then is outside, too.
    (place / "group_vars/all/airgap.yml").write_text(text)
    (place / "group_vars/all/later.yml").write_text(f"acceptance_image: {CUDA}:13\n")
    newer = {item["id"]: item["source"] for item in listed("newer.yml")}
    assert newer["images/acceptance_image"] == f"{CUDA}:13"


def test_what_was_outside_is_no_template_and_has_both_names():
    with pytest.raises(BadInput, match="would be a template"):
        row = {"kind": "file", "id": "files/runfile", "variables": [], "path": "files/x", "place": "{{ x }}"}
        named.variables(LIST, [row], [], named.Places(None, "http://f.example.org", "/inside"))
    own = {"acceptance_image": "r.example.org/cuda:12"}
    moved = {"acceptance_image": {"inside": "r.example.org/cuda:12", "outside": "o.example.org/cuda:12"}}
    assert variables("localhost", own, moved)("acceptance_image") == "o.example.org/cuda:12"
    assert variables("localhost", {"acceptance_image": "other:1"}, moved)("acceptance_image") == "other:1"
    for damaged in ({"x": "y"}, {"x": {"inside": "a"}}, {"x": {"inside": 1, "outside": "b"}}):
        with pytest.raises(BadInput, match="airgap_outside: x hasn't the two names"):
            of_inventory.moved(damaged)
    assert of_inventory.moved({}) == {} == of_inventory.moved(None)


# --------------------------------------------------------------------------- what isn't taken


@pytest.fixture
def small(tmp_path):
    """An archive with one image and one chart."""
    maker = archives.Maker(tmp_path / "small")
    items = [
        item for item in needed(LIST, inventory()) if item["name"] in ("hami", "docker.io/projecthami/hami:v2.10.0")
    ]
    maker.take(items)
    return maker


def test_nothing_is_pushed_of_what_isnt_whole(tmp_path, small, registry, skopeo):
    folder = Path(small.close())
    [chart] = (folder / "charts").glob("*.tgz")
    given = {
        **{"folder": str(folder), "unsigned": True, "skopeo": skopeo, "registry": f"{registry.host}/refused"},
        **{"registry_ca": registry.authority, "registry_auth_file": registry.auth_file},
        **{"files_folder": str(tmp_path / "served"), "files_url": "http://127.0.0.1:9"},
    }
    content = chart.read_bytes()
    chart.write_bytes(content[:-1])
    refused = playbook(tmp_path, **given)
    assert refused.rc != 0 and refused.changed == 0
    assert "has another content, or isn't complete" in refused.text
    assert registry.manifest("refused/projecthami/hami", "v2.10.0") == b"" and not (tmp_path / "served").exists()
    assert not (tmp_path / "inventory/group_vars").exists()
    # And the next run goes on, with what is whole again.
    chart.write_bytes(content)
    done = playbook(tmp_path, **given)
    assert done.rc == 0, done.text
    assert registry.manifest("refused/projecthami/hami", "v2.10.0")


def test_an_image_without_one_of_its_parts_is_refused_before_anything_is_asked(small):
    folder = Path(small.folder)
    small.close()
    [target] = push.targets(archive.read(str(folder), "").contents.items, push.registry("r.example.org"))
    layer = next(path for path in (folder / "images/blobs/sha256").iterdir() if path.read_bytes()[:2] == b"\x1f\x8b")
    layer.unlink()
    sums = archive.parse_sums((folder / archive.SUMS).read_bytes(), "")
    del sums[f"images/blobs/sha256/{layer.name}"]
    (folder / archive.SUMS).write_text(archive.render_sums(sums))
    found = archive.read(str(folder), "")
    with pytest.raises(archive.Broken, match=f"isn't complete: sha256:{layer.name} isn't there"):
        Layout(found.folder, found.sums.get).require(target.image, target.digest)
    with pytest.raises(archive.Broken, match="under this name"):
        Layout(found.folder, found.sums.get).require(target.image, "sha256:" + "0" * 64)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"unsigned": False}, "airgap_verification_key: set it to a file with the public key"),
        ({"verification_key": "k.asc"}, "airgap_unsigned: true and airgap_verification_key exclude each other"),
        ({"folder": ""}, "airgap_archive: set it to the archive"),
        ({"folder": "nowhere"}, "airgap_folder: there is no folder"),
        ({"registry": ""}, "airgap_registry: the archive has 1 images"),
        ({"registry": "images"}, "airgap_registry: 'images' isn't a registry's host"),
        ({"registry": "r.example.org/Upper"}, "airgap_registry: 'r.example.org/Upper' isn't a registry's host"),
        ({"files_url": ""}, "airgap_files_url: the archive has 1 files for machines"),
        ({"files_url": "ftp://x"}, "airgap_files_url: 'ftp://x' isn't an address"),
        ({"server": "nobody"}, "airgap_files_host: the inventory has no host nobody"),
        ({"address": "0.0.0.0:8090"}, "airgap_files_address: '0.0.0.0:8090' isn't one address of the host"),
        ({"address": "0:8090"}, "airgap_files_address: '0:8090' isn't one address of the host"),
        ({"address": "[0::0]:8090"}, "airgap_files_address: '[0::0]:8090' isn't one address of the host"),
        ({"address": "192.0.2.1:80"}, "airgap_files_address: '192.0.2.1:80' isn't one address of the host"),
        ({"address": "192.0.2.1"}, "airgap_files_address: '192.0.2.1' isn't one address of the host"),
        ({"pull_secrets": ["A b"]}, "airgap_pull_secrets: 'A b' isn't the name of a Secret"),
        ({"registry_auth_file": "empty.json"}, "airgap_registry_auth_file: "),
        ({"registry_ca": "empty.json"}, "airgap_registry_ca: "),
        ({"skopeo": "no-such-program"}, "airgap_skopeo: there is no no-such-program on the controller"),
    ],
)
def test_wrong_variables_get_a_sentence_before_anything_changes(tmp_path, small, given, text):
    (tmp_path / "empty.json").write_text("{}")
    known = {"folder": small.close(), "unsigned": True, "registry": "127.0.0.1:9", "skopeo": "true"}
    words = refusals(tmp_path, {**known, "url": "http://127.0.0.1:9", **given})
    assert words.startswith(text), words


def refusals(folder, given):
    """The error of step push, by the action plugin itself."""
    from ansible_collections.kubegpu.share.plugins.action import airgap_push

    names = {"registry_auth_file": "auth_file", "registry_ca": "authority", "files_url": "url"}
    defaults = {name: row.get("default") for name, row in airgap_push.ARGUMENTS.items()}
    params = {**defaults, "step": "push", "variables_file": str(folder / "v/airgap.yml")}
    params |= {names.get(name, name): value for name, value in given.items()}
    for name in ("auth_file", "authority"):
        params[name] = str(folder / params[name]) if params[name] else ""
    module = object.__new__(airgap_push.ActionModule)
    module._display, module._task = SimpleNamespace(), SimpleNamespace(check_mode=False)
    with pytest.raises(BadInput) as raised:
        module.ensure(params, {"hostvars": {}})
    return str(raised.value)


@pytest.mark.parametrize("way", ["folder", "archive"])
def test_an_older_archive_is_refused_though_its_signature_is_valid(tmp_path, small, way):
    (tmp_path / "v").mkdir()
    given = {way: small.close(), "unsigned": True, "registry": "127.0.0.1:9", "skopeo": "none"}
    if way == "archive":
        given[way] = str(packed(small.folder, tmp_path / "a.tar"))
    older = f"it was made {archives.CREATED}, and the last one that was pushed 2026-11-30T00:00:00Z"
    for created, more, said in (
        ("2026-11-30T00:00:00Z", {}, older),
        ("2026-11-30T00:00:00Z", {"older": True}, "airgap_files_url"),
        (archives.CREATED, {}, "airgap_files_url"),
        ("", {}, "airgap_files_url"),
    ):
        (tmp_path / "v/airgap.yml").write_text(named.text({"airgap_registry": "x"}, created))
        assert said in refusals(tmp_path, {**given, **more})
        # Nothing of an archive that is refused is unpacked.
        assert said != older or not (tmp_path / "a.tar.unpacked").exists()


def test_a_file_of_variables_that_isnt_ours_stays(tmp_path, small):
    (tmp_path / "v").mkdir()
    (tmp_path / "v/airgap.yml").write_text("gpu_backend: hami\n")
    given = {"folder": small.close(), "unsigned": True, "registry": "127.0.0.1:9"}
    assert "isn't one that this playbook has written" in refusals(tmp_path, given)
    # Ansible reads a folder all, and then no file all.yml.
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("gpu_backend: hami\n")
    given["variables_file"] = str(tmp_path / "group_vars/all/airgap.yml")
    assert "Ansible doesn't read" in refusals(tmp_path, given)
    assert not (tmp_path / "group_vars/all").exists()


def test_ansible_reads_no_all_yml_beside_a_folder_all(tmp_path):
    """The reason for the refusal above."""
    (tmp_path / "group_vars/all").mkdir(parents=True)
    (tmp_path / "group_vars/all.yml").write_text("one: 1\n")
    (tmp_path / "group_vars/all/airgap.yml").write_text("two: 2\n")
    write_inventory(tmp_path, {"gpu_nodes": ["gpu1"]})
    done = ansible(tmp_path, "ansible-inventory", "-i", "hosts.yml", "--host", "gpu1")
    assert "two" in done.text and "one" not in done.text


# --------------------------------------------------------------------------- names


def entry(name, **more):
    return {
        **{"kind": "image", "id": "images/x", "name": name, "digest": f"sha256:{'a' * 64}", "image": name},
        "variables": [],
        **more,
    }


@pytest.mark.parametrize(
    ("name", "repository", "tag"),
    [
        ("docker.io/library/python:3.13", "gpu/library/python", "3.13"),
        ("python:3.13", "gpu/library/python", "3.13"),
        ("nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2", "gpu/nvidia/k8s/dcgm-exporter", "4.5.3-4.8.2"),
        (f"nvcr.io/nvidia/cuda:12@sha256:{'a' * 64}", "gpu/nvidia/cuda", "12"),
        (f"nvcr.io/nvidia/cuda@sha256:{'a' * 64}", "gpu/nvidia/cuda", ""),
        ("localhost/kubegpu/gpushare:1.1.0", "gpu/kubegpu/gpushare", "1.1.0"),
    ],
)
def test_an_image_keeps_its_path(name, repository, tag):
    [target] = push.targets([entry(name)], push.registry("r.example.org:5000/gpu/"))
    assert (target.repository, target.tag) == (repository, tag)


def test_two_images_of_one_name_are_refused():
    two = [entry("a.example.org/x/y:1"), entry("b.example.org/x/y:1", digest=f"sha256:{'b' * 64}")]
    with pytest.raises(BadInput, match=r"would both be r\.example\.org/x/y:1"):
        push.targets(two, push.registry("r.example.org"))
    assert len(push.targets([two[0], {**two[1], "digest": two[0]["digest"]}], push.registry("r.example.org"))) == 1


@pytest.mark.parametrize("name", ["a b", "r.example.org/{{ x }}:1", "r.example.org/x:1\n", ""])
def test_what_is_no_image_is_refused(name):
    with pytest.raises(BadInput, match="is no image's name"):
        push.targets([entry(name)], push.registry("r.example.org"))


def test_one_image_may_be_several_variables():
    """kube-scheduler's is the dedicated scheduler's and HAMi's, of which the list of needed things keeps one."""
    entries = [entry("registry.k8s.io/kube-scheduler:v1.36.3", id="images/hami-kube-scheduler")]
    where = push.registry("r.example.org/gpu")
    values = named.variables(LIST, entries, push.targets(entries, where), named.Places(where, ""))
    # Their roles name the tag, by the cluster's version.
    assert values == dict.fromkeys(
        ("hami_kube_scheduler_image", "scheduler_dedicated_image"), "r.example.org/gpu/kube-scheduler"
    )


def test_openshifts_objects_redirect_digests_and_tags_and_match_their_schema():
    where = push.registry("r.example.org:5000/gpu")
    found = push.targets([entry("nvcr.io/nvidia/cuda:12"), entry("localhost/kubegpu/gpushare:1")], where)
    by_digest, by_tag = push.mirror_sets(found, where)
    rows = [{"source": "nvcr.io/nvidia/cuda", "mirrors": ["r.example.org:5000/gpu/nvidia/cuda"]}]
    assert by_digest["spec"] == {"imageDigestMirrors": rows} and by_tag["spec"] == {"imageTagMirrors": rows}
    assert (by_digest["kind"], by_tag["kind"]) == ("ImageDigestMirrorSet", "ImageTagMirrorSet")


def test_hosts_and_values_that_would_be_templates_are_refused():
    repository = {"kind": "apt", "id": "packages/x", "variables": ["driver_repo_url"], "path": "packages/apt/x"}
    places = named.Places(None, "http://f.example.org")
    with pytest.raises(BadInput, match="a host that is none"):
        named.variables(LIST, [{**repository, "hosts": ["{{ x }}"]}], [], places)
    with pytest.raises(BadInput, match="characters that no such value has"):
        named.variables(LIST, [{**repository, "hosts": ["a"], "path": "packages/apt/{{ x }}"}], [], places)
    with pytest.raises(BadInput, match="packages/x sets variable ansible_shell_executable, which isn't one of this"):
        named.variables(LIST, [{**repository, "hosts": ["a"], "variables": ["ansible_shell_executable"]}], [], places)
    one = named.variables(LIST, [{**repository, "hosts": ["a", "b"]}], [], places)
    assert one == {"driver_repo_url": "http://f.example.org/packages/apt/x/"}


def wheel(name, version):
    """A wheel without any module."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archived:
        folder = f"{name}-{version}.dist-info"
        archived.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archived.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archived.writestr(f"{folder}/RECORD", "")
    return made.getvalue()


def test_pip_finds_wheels_by_the_index_that_is_served(tmp_path):
    """By pip itself; real helm 3.22 has pulled both charts by the other index, in November 2026."""
    maker = archives.Maker(tmp_path / "a")
    maker.file("wheels/typing_extensions-4.16.0-py3-none-any.whl", wheel("typing_extensions", "4.16.0"))
    maker.file("wheels/nvidia-ml-py-13.615.71.tar.gz", b"sdist")
    maker.take([item for item in needed(LIST, inventory()) if item["kind"] == "chart"])
    texts = served.indexes(archive.read(maker.close(), ""))
    assert set(texts) == {
        *("charts/index.yaml", "wheels/simple/index.html", "wheels/simple/typing-extensions/index.html"),
        "wheels/simple/nvidia-ml-py/index.html",
    }
    index = yaml.safe_load(texts["charts/index.yaml"])
    assert index["entries"]["hami"][0]["urls"] == ["hami-2.10.0.tgz"] and index["generated"] == archives.CREATED
    for path, text in texts.items():
        maker.file(path, text.encode())
    files = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(maker.folder)))
    with serving(files):
        url = f"http://127.0.0.1:{files.server_port}/wheels/simple/"
        words = ["--disable-pip-version-check", "--no-deps", "--trusted-host", "127.0.0.1", "--index-url", url]
        command = [sys.executable, "-m", "pip", "download", "-q", "-d", tmp_path, *words, "typing-extensions==4.16.0"]
        subprocess.run(command, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
    assert (tmp_path / "typing_extensions-4.16.0-py3-none-any.whl").exists()


# --------------------------------------------------------------------------- registries


def test_credentials_of_a_part_of_a_registry_count_more_than_those_of_all(tmp_path):
    """As podman login writes them for a robot account of one of Harbor's projects."""
    auths = {place: {"auth": base64.b64encode(f"{place}:x".encode()).decode()} for place in ("r.org", "r.org/gpu")}
    auths["https://index.docker.io/v1/"] = {"auth": base64.b64encode(b"hub:x").decode()}
    (tmp_path / "auth.json").write_text(json.dumps({"auths": auths}))
    known = web.credentials({"DOCKER_CONFIG": str(tmp_path)}, str(tmp_path / "auth.json"))
    assert set(known) == {"r.org", "r.org/gpu", "index.docker.io"}
    sent = []

    def fetch(_url, _until, _largest=0, headers=None):
        sent.append((headers or {}).get("Authorization"))
        return web.Answer(404)

    asking = web.Registries(fetch, known)
    for repository in ("gpu/nvidia/cuda", "other/cuda", "gpus"):
        asking.manifest("r.org", repository, "1", 0)
    asking.manifest("s.org", "gpu/cuda", "1", 0)
    assert sent == [known["r.org/gpu"], known["r.org"], known["r.org"], None]


def test_a_registry_without_tls_is_refused_with_the_steps_or_taken_where_the_user_says_so(tmp_path, small, skopeo):
    try:
        running = local_registry.running(tmp_path / "plain")
        with running as plain:
            given = {"folder": small.close(), "unsigned": True, "skopeo": skopeo, "registry": f"{plain.host}/gpu"}
            given |= {"files_folder": str(tmp_path / "served"), "files_url": "http://127.0.0.1:9"}
            refused = playbook(tmp_path, **given)
            assert refused.rc != 0 and refused.changed == 0
            words = " ".join(refused.text.split())
            assert f"airgap_registry: {plain.host} doesn't speak TLS" in words
            for step in (f"/etc/containerd/certs.d/{plain.host}/hosts.toml", "insecure = true", "insecure-registries"):
                assert step in words
            done = playbook(tmp_path, **given, registry_insecure=True)
            assert done.rc == 0, done.text
            written = yaml.safe_load((tmp_path / "inventory/group_vars/all/airgap.yml").read_text())
            assert written["airgap_registry_insecure"] is True
            # What it has is there, and nothing is pushed again.
            assert playbook(tmp_path, **given, registry_insecure=True).changed == 0
    except LookupError as reason:
        pytest.skip(str(reason))


def test_a_registry_that_refuses_is_named_with_what_helps(tmp_path, small, registry, skopeo):
    bad = json.loads(Path(registry.auth_file).read_text())
    bad["auths"][registry.host]["auth"] = base64.b64encode(b"pusher:wrong").decode()
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    given = {"folder": small.close(), "unsigned": True, "registry": registry.host, "skopeo": skopeo}
    given |= {"files_url": "http://127.0.0.1:9", "registry_ca": registry.authority}
    refused = refusals(tmp_path, {**given, "registry_auth_file": "bad.json"})
    assert "doesn't accept these credentials (HTTP 401)" in refused and "U*U" not in refused
    without = refusals(tmp_path, {**given, "registry_ca": "", "registry_auth_file": ""})
    assert "its certificate isn't one that the controller trusts: set airgap_registry_ca" in without


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        # Harbor's words for a project that isn't there, and for an account that may not write.
        ("denied: requested access to the resource is denied", "Harbor needs the project r.example.org/gpu first"),
        ("unauthorized: project gpu not found", "Harbor needs the project r.example.org/gpu first"),
        ("writing blob: no space left on device", "make room on the disk of r.example.org, or raise its quota"),
        ("received unexpected HTTP status: 500 Internal Server Error", "make room on the disk of r.example.org"),
        # A port with the number of a refusal in it.
        ("127.0.0.1:38403: 500 Internal Server Error", "make room on the disk of r.example.org"),
        ("connection reset by peer", ""),
    ],
)
def test_an_image_that_isnt_taken_says_what_helps_and_how_many_are_left(small, said, hint):
    small.take([item for item in needed(LIST, inventory()) if item["id"] == "images/kube-scheduler"])
    found = archive.read(small.close(), "")
    where = push.registry("r.example.org/gpu")
    targets = push.targets(found.contents.items, where)
    words = []

    def program(argv, timeout=60, folder=None, also=None, watch=None):
        words.append(argv)
        watch(1_000_000_000)
        return Done(1, "", f'time="2026-11-30T00:00:00Z" level=fatal msg="{said}"\n')

    def fetch(_url, _until, _largest=0, headers=None):
        return web.Answer(404)

    told = []
    pusher = Pusher(
        where,
        targets,
        Layout(found.folder, found.sums.get),
        Access("auth.json"),
        "skopeo",
        told.append,
        program,
        fetch,
        {},
    )
    with pytest.raises(ShareError) as raised:
        plan.run(pusher, False)
    text = str(raised.value)
    assert said in text and hint in text and ("Harbor" in text) == ("Harbor" in hint)
    assert ("make room" in text) == ("make room" in hint)
    assert "1 more images were still to be copied, and the next run goes on there" in text
    assert len(words) == 1 and [row[:25] for row in told] == ["1 of 2: r.example.org/gpu/"[:25]] * 2
    # Never more than there is.
    assert told[1].endswith(": 0 of 0 MB so far")
    assert raised.value.details["code"] == "not_taken" and raised.value.details["changed"]
    assert {"--all", "--preserve-digests", "--dest-authfile", "auth.json"} <= set(words[0])


@contextlib.contextmanager
def small_disk(place, megabytes):
    """A file system of its own; yields what changes its size."""
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}M", "none", place]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}M", place], check=True)
    finally:
        subprocess.run(["umount", place], check=True)


def pushed_into(running, small, program, skopeo, prefix="gpu"):
    found = archive.read(small.close(), "")
    where = push.registry(f"{running.host}/{prefix}")
    targets = push.targets(found.contents.items, where)
    layout = Layout(found.folder, found.sums.get)
    access = Access(running.auth_file, running.authority)
    return plan.run(Pusher(where, targets, layout, access, skopeo, lambda _text: None, program), False)


def test_a_full_disk_of_the_registry_is_one_sentence_and_the_next_run_goes_on(tmp_path, small, skopeo):
    with small_disk(tmp_path / "disk", 8) as resize, real_skopeo.registry(tmp_path / "disk/r") as running:
        with (tmp_path / "disk/filler").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
                file.flush()
        with pytest.raises(ShareError) as raised:
            pushed_into(running, small, programs.run, skopeo)
        text = str(raised.value)
        assert "\n" not in text and f"{running.host}/gpu/projecthami/hami:v2.10.0 wasn't taken" in text, text
        assert f"make room on the disk of {running.host}" in text and "the next run goes on there" in text, text
        assert running.manifest("gpu/projecthami/hami", "v2.10.0") == b""
        resize(64)
        assert pushed_into(running, small, programs.run, skopeo)["changed"]
        assert not pushed_into(running, small, programs.run, skopeo)["changed"]
        assert running.manifest("gpu/projecthami/hami", "v2.10.0")


def test_a_killed_push_leaves_no_image_and_the_next_run_goes_on(tmp_path, small, registry, skopeo):
    """Killed between the blobs and the manifest that names them, where no other test has pushed them to."""
    small.take([item for item in needed(LIST, inventory()) if item["id"] == "images/kube-scheduler"])

    def deadly(argv, timeout=60, folder=None, also=None, watch=None):
        if "hami" in argv[-1]:
            place = argv[-1].replace("killed/projecthami", "killed/blobs/projecthami")
            programs.run([*argv[:-1], place], timeout, folder, also, watch)
            os.kill(os.getpid(), signal.SIGKILL)
        return programs.run(argv, timeout, folder, also, watch)

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            pushed_into(registry, small, deadly, skopeo, "killed")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    small_again = pushed_into(registry, small, programs.run, skopeo, "killed")
    assert small_again["changed"]
    assert not pushed_into(registry, small, programs.run, skopeo, "killed")["changed"]


def test_a_full_disk_of_the_server_of_files_is_one_sentence_and_its_last_files_stay(tmp_path):
    from ansible_collections.kubegpu.share.plugins.module_utils._host.file_tree import Tree

    def wanted(*texts):
        return {f"files/{number}": fake.sha256(text) for number, text in enumerate(texts)}

    def come(tree, *texts):
        source = tmp_path / "come"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        for text in texts:
            (source / fake.sha256(text)).write_bytes(text)
        tree.take(str(source))

    small_file, large = b"old", os.urandom(3 << 20)
    with small_disk(tmp_path / "disk", 2) as resize:
        folder = tmp_path / "disk/served"
        old = Tree(str(folder), wanted(small_file))
        come(old, small_file)
        old.place()
        new = Tree(str(folder), wanted(large))
        with pytest.raises(BadInput) as raised:
            come(new, large)
        assert str(raised.value) == (
            f"airgap_files_folder: the disk of {folder} is full: make room there, and run it again, which goes on; "
            "what is served hasn't changed"
        )
        assert (folder / "files/0").read_bytes() == small_file and old.observe()["missing"] == []
        resize(16)
        come(new, large)
        new.place()
        assert (folder / "files/0").read_bytes() == large and new.observe()["missing"] == []


def test_the_action_refuses_a_disk_that_is_too_small_before_a_file_is_copied(tmp_path, small, monkeypatch):
    seen = {"missing": ["charts/index.yaml"], "stale": [], "have": [], "free": 1 << 20}
    action = load(airgap_files, {"folder": small.close(), "path": "/var/lib/x"})
    asked = []
    monkeypatch.setattr(action, "_execute_module", lambda module_args, task_vars: asked.append(module_args) or seen)
    monkeypatch.setattr(action, "_remove_tmp_path", lambda *_arguments: None)
    done = action.run(task_vars={})
    words = "airgap_files_folder: /var/lib/x needs 64 MiB, and 1 MiB are free there: make room, or name another folder"
    assert done["failed"] and done["msg"] == f"{words}; nothing was changed there"
    assert [one["state"] for one in asked] == ["observed"]


def test_the_server_of_files_keeps_its_last_files_when_a_part_is_missing(tmp_path):
    from ansible_collections.kubegpu.share.plugins.module_utils._host.file_tree import RECORD, Tree

    def sums(**files):
        return {f"packages/{name}": hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}

    def come(tree, *texts):
        source = tmp_path / "come"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        for text in texts:
            (source / hashlib.sha256(text.encode()).hexdigest()).write_text(text)
        tree.take(str(source))

    folder = tmp_path / "served"
    first = Tree(str(folder), sums(a="1", b="1"))
    come(first, "1")
    first.place()
    assert (folder / "packages/b").read_text() == "1" and first.observe()["missing"] == []
    second = Tree(str(folder), sums(a="2", c="3"))
    come(second, "2")
    with pytest.raises(BadInput, match="1 files haven't come, such as packages/c"):
        second.place()
    assert (folder / "packages/a").read_text() == "1"
    # What has come stays for the next run.
    assert len(second.observe()["have"]) == 1
    come(second, "3")
    second.place()
    assert {path.name for path in (folder / "packages").iterdir()} == {"a", "c"}
    (folder / "mine").write_text("x")
    assert second.remove() and {path.name for path in folder.iterdir()} == {"mine"}
    with pytest.raises(BadInput, match="isn't a folder that this playbook has filled"):
        second.observe()
    assert not (folder / RECORD).exists()
    for name in ("../x", "/x", ".incoming/x", "a/../../x", ""):
        with pytest.raises(BadInput, match="isn't a path below the folder"):
            Tree(str(folder), {name: "0" * 64})


@pytest.mark.parametrize("name", ["../mine", "{folder}/mine", "a/../../mine"])
def test_the_record_of_the_served_folder_removes_nothing_elsewhere(tmp_path, name):
    from ansible_collections.kubegpu.share.plugins.module_utils._host.file_tree import RECORD, Tree

    (tmp_path / "served").mkdir()
    (tmp_path / "mine").write_text("x")
    record = {"files": {name.format(folder=tmp_path): "0" * 64}}
    (tmp_path / "served" / RECORD).write_text(json.dumps(record))
    with pytest.raises(BadInput, match="names what isn't in the folder"):
        Tree(str(tmp_path / "served"), {}).remove()
    assert (tmp_path / "mine").exists()


def test_a_file_that_comes_with_another_content_isnt_taken(tmp_path):
    from ansible_collections.kubegpu.share.plugins.module_utils._host.file_tree import Tree

    tree = Tree(str(tmp_path / "served"), {"a": "0" * 64})
    (tmp_path / "come").mkdir()
    (tmp_path / "come" / ("0" * 64)).write_text("evil")
    with pytest.raises(BadInput, match="came with another content"):
        tree.take(str(tmp_path / "come"))
    assert tree.observe()["have"] == []


def test_skopeo_finds_an_image_by_the_name_in_the_layout_as_by_ours(tmp_path, small, skopeo):
    """An older one wrote no names with --preserve-digests; a view of one image needs none."""
    found = archive.read(small.close(), "")
    [target] = push.targets(found.contents.items, push.registry("r.example.org"))
    with Layout(found.folder, found.sums.get).view(target.image) as view:
        raw = subprocess.run([skopeo, "inspect", "--raw", f"oci:{view}"], capture_output=True, check=True).stdout
    assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == target.digest


# --------------------------------------------------------------------------- the archive as one file


def packed(folder, target):
    pack.pack(str(folder), str(target))
    return target


def test_a_file_is_unpacked_once_and_what_is_damaged_or_missing_again(tmp_path, small):
    file, folder = packed(small.close(), tmp_path / "a.tar"), tmp_path / "there"
    unpack.unpack(str(file), str(folder), "")
    found = archive.read(str(folder), "")
    assert {entry["name"] for entry in found.contents.items} == {"hami", "docker.io/projecthami/hami:v2.10.0"}
    [chart] = (folder / "charts").glob("*.tgz")
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "images/blobs/sha256").iterdir()}
    chart.write_bytes(b"damaged")
    (folder / "contents.json").unlink()
    unpack.unpack(str(file), str(folder), "")
    assert archive.read(str(folder), "") == found
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    # The next archive has another chart: the former's is removed.
    (tmp_path / "small/charts" / chart.name).rename(tmp_path / "small/charts/other.tgz")
    text = (tmp_path / "small/contents.json").read_text().replace(chart.name, "other.tgz")
    (tmp_path / "small/contents.json").write_text(text)
    found, _faults = archive.files_of(str(tmp_path / "small"))
    sums = {path: archive.sha256_of(str(tmp_path / "small" / path))[0] for path in found}
    (tmp_path / "small" / archive.SUMS).write_text(archive.render_sums(sums))
    unpack.unpack(str(packed(tmp_path / "small", tmp_path / "b.tar")), str(folder), "")
    assert not chart.exists() and archive.read(str(folder), "").sums == sums


def cut(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def changed(file):
    with tarfile.open(file) as tar:
        [member] = [member for member in tar if member.name.startswith("charts/")]
    content = bytearray(file.read_bytes())
    content[member.offset_data + 20] ^= 1
    file.write_bytes(content)


def compressed(file):
    with tarfile.open(file, "a") as tar:
        member = tarfile.TarInfo("charts/large")
        member.size = 1 << 20
        tar.addfile(member, io.BytesIO(random.Random(1).randbytes(member.size)))
    content = bytearray(lzma.compress(file.read_bytes()))
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def linked(file):
    with tarfile.open(file, "a") as tar:
        member = tarfile.TarInfo("charts/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(member)


def upwards(file):
    with tarfile.open(file, "a") as tar:
        member = tarfile.TarInfo("../evil")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut, "isn't a whole archive|isn't as it was made"),
        (changed, "has another content, or isn't complete"),
        (compressed, "isn't a whole archive"),
        (linked, "charts/link is no file, or is in it twice"),
        (upwards, "isn't listed in SHA256SUMS"),
        (lambda file: file.write_bytes(b""), "isn't a whole archive"),
        (lambda file: file.unlink(), "airgap_archive: .*: No such file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, small, damage, text):
    file, folder = packed(small.close(), tmp_path / "a.tar"), tmp_path / "there"
    damage(file)
    with pytest.raises(BadInput, match=text):
        unpack.unpack(str(file), str(folder), "")
    assert not (tmp_path / "evil").exists()
    with pytest.raises(BadInput, match=r"can't be read|isn't as it was made|isn't a complete archive"):
        archive.read(str(folder), "")


def tar_header(kind, size, **headers):
    member = tarfile.TarInfo("x")
    member.type, member.size, member.pax_headers = kind, size, headers
    return member.tobuf(tarfile.PAX_FORMAT if headers else tarfile.GNU_FORMAT)


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x", "GNU.sparse.realsize": "9"}


@pytest.mark.parametrize(
    "content",
    [
        # What extends a header is read with it: here 256 MiB.
        *(tar_header(kind, 256 << 20) for kind in (b"x", b"X", b"L", b"K")),
        # A global header goes with each that follows.
        tar_header(b"g", 512) + b"9 a=bcd\n".ljust(512, b"\0") + tar_header(b"0", 0),
        # The map of a sparse file stands in its content.
        tar_header(b"0", 256 << 20, **SPARSE) + b"9999999999\n" + b"1\n" * 4_000_000,
        # More members than an archive has, which take no place in it.
        tar_header(b"5", 0) * (tar_headers.MOST // 100 + 1),
    ],
    ids=["pax", "solaris", "long-name", "long-link", "global", "sparse-map", "folders"],
)
@pytest.mark.parametrize("packer", [bytes, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
def test_what_a_file_says_of_itself_takes_no_memory_before_its_signature(tmp_path, monkeypatch, content, packer):
    monkeypatch.setattr(tar_headers, "MOST", tar_headers.MOST // 100)
    file = tmp_path / "a.tar"
    file.write_bytes(packer(content))
    if packer is bytes:
        os.truncate(file, len(content) + (256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=r"isn't a whole archive \(.+\): decompress it if it is compressed"):
            unpack.unpack(str(file), str(tmp_path / "there"), "")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_no_link_in_the_folder_is_followed(tmp_path, small):
    """Who writes the stick may prepare the folder beside the archive, and files of other names in the archive."""
    file, folder, own = packed(small.close(), tmp_path / "a.tar"), tmp_path / "there", tmp_path / "own"
    folder.mkdir()
    own.write_text("mine")
    for name in (archive.CONTENTS, archive.SUMS):
        (folder / f"{name}.part").symlink_to(own)
    unpack.unpack(str(file), str(folder), "")
    assert own.read_text() == "mine" and archive.read(str(folder), "").contents.items
    (folder / ".unpacking.part").unlink()
    (folder / ".unpacking.part").symlink_to(tmp_path / "made")
    with pytest.raises(BadInput, match=r"unpacking\.part"):
        unpack.unpack(str(file), str(folder), "")
    assert not (tmp_path / "made").exists()


def test_a_killed_run_leaves_what_the_next_archive_replaces(tmp_path, small, monkeypatch):
    file, folder = packed(small.close(), tmp_path / "a.tar"), tmp_path / "there"
    with monkeypatch.context() as patch:
        patch.setattr(unpack, "_write", lambda *_given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            unpack.unpack(str(file), str(folder), "")
    with pytest.raises(archive.Broken, match="is missing"):
        archive.read(str(folder), "")
    [chart] = (small.folder / "charts").iterdir()
    (folder / "charts").mkdir()
    shutil.copy(chart, folder / "charts")
    other = archives.Maker(tmp_path / "other")
    other.file("charts/b.tgz", b"b")
    unpack.unpack(str(packed(other.close(), tmp_path / "b.tar")), str(folder), "")
    assert [path.name for path in (folder / "charts").iterdir()] == ["b.tgz"]
    assert archive.read(str(folder), "").contents.items == ()


def test_a_folder_of_somebody_else_stays_and_a_full_disk_is_a_sentence(tmp_path, small, monkeypatch):
    file, folder = packed(small.close(), tmp_path / "a.tar"), tmp_path / "there"
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(BadInput, match="has files that aren't an archive's, such as mine"):
        unpack.unpack(str(file), str(folder), "")
    # Many folders have a list of this name: it says what is an archive's only if it is one's.
    for listed in (f"{'0' * 64}  mine\n", f"{'0' * 64}  contents.json\n", "junk"):
        (folder / archive.SUMS).write_text(listed)
        with pytest.raises(BadInput, match="has files that aren't an archive's, such as mine"):
            unpack.unpack(str(file), str(folder), "")
    assert sorted(path.name for path in folder.iterdir()) == [archive.SUMS, "mine"]
    monkeypatch.setattr(unpack.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    with pytest.raises(BadInput, match="where 1 MiB are free: make room"):
        unpack.unpack(str(file), str(tmp_path / "other"), "")
    assert not (tmp_path / "other").exists()


def test_the_units_program_gives_the_folder_and_nothing_else(tmp_path):
    """The command of the unit, as the template has it; systemd-analyze says whether it understands the unit."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served/Packages").write_text("list")
    (tmp_path / "secret").write_text("x")
    port = free_port()
    words = {"airgap_files_folder": str(tmp_path / "served"), "__airgap_address": "127.0.0.1", "__airgap_port": port}
    text = (ROOT / "roles/airgap/templates/kubegpu-airgap.service.j2").read_text()
    unit = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text).render(words)
    options = dict(line.partition("=")[::2] for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    assert options["DynamicUser"] == "yes" and options["ProtectSystem"] == "strict"
    if shutil.which("systemd-analyze"):
        (tmp_path / "kubegpu-airgap.service").write_text(unit)
        done = subprocess.run(
            ["systemd-analyze", "verify", tmp_path / "kubegpu-airgap.service"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and "kubegpu-airgap" not in done.stderr, done.stderr
    command = [sys.executable, *options["ExecStart"].split()[1:]]
    running = subprocess.Popen(command, cwd=options["WorkingDirectory"], stderr=subprocess.DEVNULL)
    try:
        for _attempt in range(100):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)

        def ask(method, path):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request(method, path, body=b"x" if method == "PUT" else None)
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert ask("GET", "/Packages") == (200, b"list")
        for path in ("/../secret", "/%2e%2e/secret", "//../secret", "/served/../../secret"):
            assert ask("GET", path)[0] == 404
        assert ask("PUT", "/Packages")[0] == ask("DELETE", "/Packages")[0] == 501
    finally:
        running.terminate()
        running.wait(10)


# --------------------------------------------------------------------------- repositories


def described(maker, path, role, address, distribution, release):
    """Add a partial repository; returns its description."""
    file, package = (
        {**maker.file(f"{path}/{name}", b"x"), "path": name} for name in ("repository.asc", "pool/gcc.deb")
    )
    row = {
        **{"manager": path.split("/")[1], "name": f"m-{distribution}", "role": role, "path": path, "address": address},
        **{"distribution": distribution, "release": release, "architecture": "amd64"},
        **{"suites": ["bookworm"], "components": ["main"], "signed": ["metadata"], "key": file, "metadata": [file]},
        "packages": [{**package, "name": "gcc", "version": "1", "architecture": "amd64"}],
    }
    maker.file(f"{path}/repository.json", json.dumps(row).encode())
    return row


def test_each_machine_gets_the_part_of_a_repository_for_its_own_release(tmp_path):
    toolkit = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64/"
    maker = archives.Maker(tmp_path / "a")
    described(maker, "packages/apt/t_ubuntu24.04-amd64", "toolkit", toolkit, "ubuntu", "24.04")
    described(maker, "packages/apt/t_debian12-amd64", "toolkit", toolkit, "debian", "12")
    described(maker, "packages/rpm/r_rocky9.5-amd64", "driver", "https://cuda/", "rocky", "9.5")
    described(maker, "packages/apt/d_debian12-amd64", "distribution", "http://deb.debian.org/debian", "debian", "12")
    whole = archive.read(maker.close(), "")
    found = mirrored.repositories(whole.folder, whole.sums)
    assert len(found) == 4

    def package(kind, key, hosts, source, variables):
        more = {"source": source, "variables": variables, "path": f"packages/{kind}/any", "kind": kind}
        return {**more, "id": f"packages/{key}", "hosts": hosts}

    entries = [
        package("apt", "compilers/debian_12", ["gpu1"], "", []),
        package("apt", "compilers/ubuntu_24", ["gpu2"], "", []),
        package("apt", "toolkit/apt", ["gpu1", "gpu2"], toolkit, ["toolkit_repo_url"]),
        package("rpm", "driver/redhat_9/repository", ["gpu3"], "https://cuda", ["driver_repo_url"]),
    ]
    assert repositories.folders(entries, found) == {
        ("gpu1", "toolkit_repo_url"): "packages/apt/t_debian12-amd64/",
        ("gpu2", "toolkit_repo_url"): "packages/apt/t_ubuntu24.04-amd64/",
        ("gpu3", "driver_repo_url"): "packages/rpm/r_rocky9.5-amd64/",
    }
    [(machines, [source])] = repositories.sources(found, "http://f.example.org").items()
    assert machines == "debian-12-amd64"
    # As the module takes it that tells a package manager of it.
    [row] = package_set(
        {**{name: option.get("default") for name, option in ARGUMENTS.items()}, "name": "airgap"}
        | {"repositories": [{"signed": ["packages"], **source}]}
    ).repositories
    assert row.url == "http://f.example.org/packages/apt/d_debian12-amd64/" and row.targets == ("Packages",)
