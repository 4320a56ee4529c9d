# SPDX-License-Identifier: GPL-3.0-or-later
"""How nodes get the servers' image: the choice, and role gpushare's component image by real ansible-playbook.

The build tool and containerd's client are stand-ins: ``podman`` saves an image, ``ctr`` keeps labels.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
from ansible_collections.kubegpu.share.plugins.action import preflight
from ansible_collections.kubegpu.share.plugins.module_utils._images import build, delivery
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import table
from own_cluster import run_playbook
from role_templates import defaults, evaluated, value, variables_of
from test_image_build import saved

IMAGE = "localhost/kubegpu/gpushare:1.1.0"
PUSHED = "registry.example.org/kubegpu/gpushare:1.1.0"
PODMAN = """\
#!/bin/sh
echo "$*" >>"{folder}/podman.log"
[ "$1" != push ] || cp "{folder}/saved.tar" "$(echo "$3" | cut -d: -f2)"
"""
CTR = """\
#!/usr/bin/env python3
import os, pathlib, sys
words, store = sys.argv[sys.argv.index("images") + 1:], pathlib.Path("{folder}") / os.environ["NODE"]
if words[0] == "import":
    store.write_text("-")
    (store.parent / (store.name + ".archive")).write_bytes(pathlib.Path(words[1]).read_bytes())
elif words[0] == "label":
    store.write_text(",".join(words[2:]))
else:
    print("REF TYPE DIGEST SIZE PLATFORMS LABELS")
    if store.exists():
        print("{image} type sha256:12 1 MiB linux/amd64", store.read_text())
"""


@pytest.mark.parametrize(
    ("given", "reference", "archive", "found"),
    [
        ("auto", IMAGE, "", "build"),
        ("auto", IMAGE, "a.tar", "import"),
        ("auto", PUSHED, "", "registry"),
        ("auto", PUSHED, "a.tar", "import"),
        ("registry", IMAGE, "a.tar", "registry"),
        ("build", PUSHED, "a.tar", "build"),
        ("pigeon", IMAGE, "", "pigeon"),
    ],
)
def test_the_delivery_follows_from_what_is_named(given, reference, archive, found):
    assert delivery.resolve(given, reference, archive) == found
    own = {"gpushare_image_delivery": given, "gpushare_image": reference, "gpushare_image_archive": archive}
    assert value("preflight", "preflight_image_delivery", **defaults("preflight"), **own) == found
    assert value("gpushare", "__gpushare_delivery", **variables_of("gpushare", "vars"), **own) == found


ROLE = {
    "ansible.builtin.include_role": {"name": "kubegpu.share.gpushare"},
    "vars": {"gpushare_component": "image"},
}
VALIDATE = [
    {
        "ansible.builtin.include_role": {"name": "kubegpu.share.image_build", "tasks_from": "validate"},
        "vars": {"image_build_reference": IMAGE},
    },
    {"ansible.builtin.debug": {"msg": "PREDICTED {{ __image_build_done | default({}) | to_json }}"}},
]


class Nodes:
    """Two nodes, of different architectures, and the controller with a build tool."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        (folder / "bin").mkdir()
        self.tool("podman", PODMAN)
        self.tool("ctr", CTR)
        saved(folder / "saved.tar", 1)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def tool(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(text.replace("{folder}", str(self.folder)).replace("{image}", IMAGE))
        path.chmod(0o755)

    def label(self, node):
        """The image's identity on a node; empty without it."""
        path = self.folder / node
        found = re.search(r"kubegpu\.share/archive=([0-9a-f]{64})", path.read_text()) if path.exists() else None
        return found.group(1) if found else ""

    def builds(self):
        """The platforms for which the tool was called."""
        log = self.folder / "podman.log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [re.search(r"--platform=(\S+)", line).group(1) for line in lines if line.startswith("build ")]

    def play(self, *words, tasks=None, python=sys.executable, **variables):
        """Run the component image, or other tasks, on nodes as their facts have them."""
        observed = {
            node: {"distribution": {"arch": arch}, "images": {IMAGE: self.label(node)} if self.label(node) else {}}
            for node, arch in (("one", "amd64"), ("two", "arm64"))
        }
        play = {
            "hosts": "gpu_nodes",
            "gather_facts": False,
            "environment": {"NODE": "{{ inventory_hostname }}"},
            "tasks": tasks or [ROLE],
        }
        groups = {"gpu_nodes": ["one", "two"], "build_machines": ["builder"]}
        given = {
            "__observed": observed,
            "gpu_node": "{{ __observed[inventory_hostname] }}",
            "ansible_python_interpreter": python,
            **variables,
        }
        return run_playbook(self.folder, [play], *words, groups=groups, **given)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    return Nodes(tmp_path, monkeypatch)


def changes(played):
    assert played.rc == 0, played.text
    return dict(re.findall(r"(\w+) +: ok=\d+ +changed=(\d+)", played.text))


def test_the_image_is_built_once_and_imported_where_it_is_missing(nodes):
    predicted = changes(nodes.play("--check", "--diff"))
    assert nodes.builds() == [] and not nodes.label("one"), "check mode builds and imports nothing"
    # The build is a change of the first node's.
    assert predicted == changes(nodes.play()) == {"one": "2", "two": "1"}
    assert nodes.builds() == ["linux/amd64", "linux/arm64"]
    assert len(nodes.label("one")) == 64 and nodes.label("one") == nodes.label("two")
    cache = nodes.folder / "home/.cache/kubegpu-share/images"
    for node, arch in (("one", "amd64"), ("two", "arm64")):
        archive = cache / f"gpushare-1.1.0-{arch}.tar"
        assert (nodes.folder / f"{node}.archive").read_bytes() == archive.read_bytes(), "that of its architecture"
        archive.unlink()
    # Now no module can run on a node, nothing can build, and there is no archive.
    nodes.tool("podman", "#!/bin/sh\nexit 1\n")
    again = nodes.play(tasks=[ROLE, *VALIDATE], python="/nonexistent")
    assert changes(again) == {"one": "0", "two": "0"} and findings(predicted_by(again)) == []
    asked = re.findall(r"TASK \[[^]]* on [^]]* for the machines that lack it\].*\n((?:skipping: .*\n)*)", again.text)
    assert set(asked) == {"skipping: [one]\n"}, "which machines lack it is determined once, not by each"


@pytest.mark.long
def test_a_new_node_is_served_from_the_archives_of_the_first_build(nodes):
    assert nodes.play("--limit", "one").rc == 0
    assert nodes.builds() == ["linux/amd64"], "only for the nodes of this run"
    assert nodes.play().rc == 0
    assert nodes.builds() == ["linux/arm64"] and nodes.label("two") == nodes.label("one")
    (nodes.folder / "one").unlink()
    assert nodes.play().rc == 0
    assert nodes.builds() == [] and nodes.label("one")


def test_what_identifies_the_built_image():
    def identity(**given):
        words = "".join(f", {name}={value!r}" for name, value in given.items())
        return evaluated(f"{{{{ lookup('kubegpu.share.image_sha256', '{IMAGE}'{words}) }}}}")

    assert identity() == identity(base=table.image("base"), epoch=build.ARGUMENTS["epoch"]["default"])
    others = [identity(base="docker.io/library/debian:13"), identity(epoch=5), identity(delivery="registry")]
    assert len({identity(), *others}) == 4 and others[2] == "" == identity(delivery="import")


def test_a_machine_of_the_inventory_builds_and_the_controller_fetches(nodes):
    given = {"image_build_host": "builder", "image_build_folder": str(nodes.folder / "there")}
    done = nodes.play("--limit", "one,builder", **given)
    assert done.rc == 0, done.text
    fetched = nodes.folder / "home/.cache/kubegpu-share/images/gpushare-1.1.0-amd64.tar"
    assert fetched.read_bytes() == (nodes.folder / "there/gpushare-1.1.0-amd64.tar").read_bytes()
    assert "-> builder" in done.text and nodes.label("one")


@pytest.mark.long
def test_check_mode_where_a_machine_of_the_inventory_would_build(nodes):
    given = {"image_build_host": "builder", "image_build_folder": str(nodes.folder / "there")}
    assert nodes.play("--check", **given).rc == 0 and nodes.builds() == []


def predicted_by(done):
    assert done.rc == 0 and set(re.findall(r"changed=(\d+)", done.text)) == {"0"}, done.text
    [found] = set(re.findall(r"PREDICTED (\{.*\})\"", done.text))
    return json.loads(found.replace('\\"', '"').replace("\\\\", "\\"))


def findings(prediction):
    return list(preflight._build([None, prediction]))


def test_preflight_names_the_ways_out_where_nothing_can_build(nodes):
    # Building on the controller needs no other user's rights.
    nodes.tool("sudo", "#!/bin/sh\nexit 1\n")
    # Ansible calls no sudo for the user that it runs as. tests/unit/preflight shows that --become changes nothing, too.
    escalated = {"ansible_become": True, "ansible_become_user": "nobody"}
    done = nodes.play(tasks=VALIDATE, image_build_engine="podman", image_build_folder="out", **escalated)
    prediction = predicted_by(done)
    assert findings(prediction) == []
    assert prediction["archives"]["linux/amd64"] == str(nodes.folder / "out/gpushare-1.1.0-amd64.tar")
    assert nodes.builds() == []
    nodes.tool("podman", '#!/bin/sh\n[ "$1" = --version ] || { echo no rights >&2; exit 1; }\n')
    [finding] = findings(predicted_by(nodes.play(tasks=VALIDATE, image_build_engine="podman")))
    assert (finding.id, finding.severity) == ("image-build", "problem")
    assert finding.found == (
        "gpushare_image_delivery: the servers' image can't be built: image_build_engine: podman info failed: no rights"
    )
    assert "kubegpu.share.build_images" in finding.do and "gpushare_image_archive" in finding.do
    assert "registry" in finding.do and "image_build_host" in finding.do
