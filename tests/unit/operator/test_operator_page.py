# SPDX-License-Identifier: GPL-3.0-or-later
"""The commands of docs/howto/operator.md, as a reader would type them, on a real API server with OLM's definitions.

No controller of OLM runs, no kubelet and no operator: what they would write is played. The page says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
import typing as t
from pathlib import Path

import definitions as openshift
import pytest
import yaml
from real_apiserver import MERGE, Refused, own_api_server
from test_operator_bundle import CATALOGS, RELEASE, definitions

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "operator"))

import bundle
import publish

PAGE = bundle.ROOT / "docs" / "howto" / "operator.md"
# The commands for OLM's second generation, whose module isn't on the Go module proxy.
OLM_1 = re.compile(r"cluster(extension|catalog)\b|kubegpu-operator-installer")
OLM_1_KINDS = ("clustercatalogs", "clusterextensions")
NOW = "2026-11-29T20:00:00Z"


def blocks(language: str = "") -> list[str]:
    """The contents of the page's blocks of a language; commands have none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


def commands() -> list[list[str]]:
    return [block.splitlines() for block in blocks()]


def manifests() -> dict[str, str]:
    """The page's files by their names, which their first lines have."""
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks("yaml")}


class Played(threading.Thread):
    """OLM, the operator, Kubernetes' controllers and kubelet: what they would write, as soon as there is something."""

    def __init__(self, server: t.Any) -> None:
        super().__init__(daemon=True)
        self._server, self.ended = server, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            # What is deleted meanwhile, or isn't served any more.
            with contextlib.suppress(Refused):
                self._deployments()
                self._write("/apis/operators.coreos.com/v1alpha1", "subscriptions", self._subscription())
            with contextlib.suppress(Refused):
                self._write("/apis/kubegpu.share/v1alpha1", "gpushares", self._resource())
            with contextlib.suppress(Refused):
                installed = {"type": "Installed", "status": "True", "reason": "Succeeded", "message": "played"}
                installed |= {"lastTransitionTime": NOW, "observedGeneration": 1}
                self._write("/apis/olm.operatorframework.io/v1", "clusterextensions", {"conditions": [installed]})
            with contextlib.suppress(Refused):
                self._namespaces()

    def _write(self, group: str, plural: str, status: t.Any) -> None:
        for one in self._server.request("GET", f"{group}/{plural}")["items"]:
            if not one.get("status"):
                self._server.request("PATCH", f"{self._path(group, plural, one)}/status", {"status": status}, MERGE)

    @staticmethod
    def _path(group: str, plural: str, one: t.Any) -> str:
        space = one["metadata"].get("namespace")
        return f"{group}/{f'namespaces/{space}/' if space else ''}{plural}/{one['metadata']['name']}"

    def _deployments(self) -> None:
        for one in self._server.request("GET", "/apis/apps/v1/deployments")["items"]:
            count, generation = one["spec"]["replicas"], one["metadata"]["generation"]
            status = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
            condition = {"type": "Available", "status": "True", "reason": "Played", "message": "played"}
            status |= {"observedGeneration": generation, "conditions": [condition]}
            path = f"{self._path('/apis/apps/v1', 'deployments', one)}/status"
            self._server.request("PATCH", path, {"status": status}, MERGE)

    @staticmethod
    def _subscription() -> t.Any:
        return {"state": "AtLatestKnown", "lastUpdated": NOW, "installedCSV": RELEASE.name}

    @staticmethod
    def _resource() -> t.Any:
        rows = [("Available", "True", "unchanged"), ("Progressing", "False", "unchanged"), ("Degraded", "False", "x")]
        conditions = [
            {"type": kind, "status": value, "reason": reason, "message": f"{kind} was played"}
            | {"lastTransitionTime": NOW, "observedGeneration": 1}
            for kind, value, reason in rows
        ]
        return {"observedGeneration": 1, "conditions": conditions}

    def _namespaces(self) -> None:
        for one in self._server.request("GET", "/api/v1/namespaces")["items"]:
            if one["status"].get("phase") == "Terminating":
                one["spec"]["finalizers"] = []
                self._server.request("PUT", f"/api/v1/namespaces/{one['metadata']['name']}/finalize", one)


class Reader:
    """Somebody who types the page's commands in a folder with what ``make publish`` has left."""

    def __init__(self, server: t.Any, folder: Path) -> None:
        self._folder = folder
        out = folder / "dist" / "operator"
        bundle.write_bundle(RELEASE, out)
        bundle.write_install(RELEASE, out)
        for name, text in manifests().items():
            (folder / name).write_text(text)
        programs = folder / "bin"
        programs.mkdir()
        for name in ("kubectl", "oc"):
            (programs / name).symlink_to(server.programs["kubectl"])
        path = f"{programs}:{os.environ['PATH']}"
        self._environment = {"PATH": path, "HOME": str(folder), "KUBECONFIG": str(server.kubeconfig)}
        self.typed: list[str] = []

    def types(self, block: list[str]) -> str:
        """Run a block's commands, and return what they print."""
        said = ""
        for command in block:
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=self._folder,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=120,
            )
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            self.typed.append(command)
            said += done.stdout
        return said


def test_every_command_of_the_page_is_run(tmp_path):
    found = [block for block in commands() if not block[0].startswith("make ")]
    here = [block for block in found if not any(OLM_1.search(command) for command in block)]
    install, without, share, reason, pods, first, second, remove_without, end = here
    with own_api_server() as server:
        server.install(*definitions(), bundle.schema.CRD)
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": CATALOGS}})
        reader = Reader(server, tmp_path)
        played = Played(server)
        played.start()
        try:
            # OLM makes what the file for clusters without OLM has.
            reader.types(install[:2])
            reader.types(without[:1])
            reader.types(install[2:])
            assert re.search(r"^cluster +True +False +False +x", reader.types(share), re.MULTILINE)
            assert reader.types(reason) == "Degraded was played"
            reader.types(pods)
            reader.types(first)
            reader.types(second)
            reader.types(end)
            assert server.ask("GET", f"/api/v1/namespaces/{bundle.NAMESPACE}")[0] == 404

            reader.types(without)
            reader.types(remove_without)
            assert server.ask("GET", "/apis/kubegpu.share/v1alpha1/gpushares")[0] == 404
        finally:
            played.ended.set()
            played.join()
    assert set(reader.typed) == {command for block in here for command in block}
    left = [command for block in found for command in block if command not in reader.typed]
    assert len(left) == 6 and all(OLM_1.search(command) for command in left)


def test_the_commands_for_the_second_generation_of_olm_are_run(tmp_path):
    """With the definitions of operator-controller 1.11.0, where the machine has them."""
    files = [openshift.definitions() / f"{kind}.olm.operatorframework.io.yaml" for kind in OLM_1_KINDS]
    if not all(file.exists() for file in files):
        pytest.skip(f"there is no {' or '.join(map(str, files))}")
    install, remove = [block for block in commands() if any(OLM_1.search(command) for command in block)]
    with own_api_server() as server:
        server.install(*files)
        reader, played = Reader(server, tmp_path), Played(server)
        played.start()
        try:
            reader.types(install)
            [catalog] = server.request("GET", "/apis/olm.operatorframework.io/v1/clustercatalogs")["items"]
            assert catalog["spec"]["source"]["image"]["ref"] == RELEASE.catalog
            reader.types(remove)
        finally:
            played.ended.set()
            played.join()
    assert len(reader.typed) == 6


@pytest.mark.parametrize("command", [line for block in commands() for line in block if line.startswith("make ")])
def test_the_options_of_make_publish_are_those_of_the_program(command):
    digest = f"sha256:{'a' * 64}"
    [program, target, words] = shlex.split(command.replace("$SERVERS", digest).replace("$OPERATOR", digest))
    assert (program, target) == ("make", "publish")
    given = publish.arguments().parse_args(shlex.split(words.removeprefix("ARGS=")))
    assert publish.REGISTRY.fullmatch(given.registry)
    images = {"gpushare": given.servers_image, "operator": given.operator_image}
    bundle.check_images({name: image for name, image in images.items() if image})
    recipe = re.search(r"^publish:.*\n((?:\t.*\n)+)", (bundle.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "operator/publish.py $(ARGS)" in recipe[1]


def test_the_pages_files_are_what_the_api_server_takes():
    kinds = {name: yaml.safe_load(text)["kind"] for name, text in manifests().items()}
    assert kinds == {"gpushare.yml": "GPUShare", "three-pods.yml": "Deployment"}
    assert yaml.safe_load(manifests()["three-pods.yml"])["spec"]["replicas"] == 3
