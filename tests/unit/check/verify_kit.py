# SPDX-License-Identifier: GPL-3.0-or-later
"""Run verify.yml by the real ansible-playbook, with stand-ins for modules that record their arguments."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import typing as t
from pathlib import Path

import yaml
from ansible_runs import ansible, write_inventory
from kube_api import Api

ROOT = Path(__file__).resolve().parents[3]
PLAYBOOK = ROOT / "playbooks" / "verify.yml"
MODULES = "ansible_collections.kubegpu.share.plugins.modules"
UUID = "GPU-5a4d7f2e-0000-4000-8000-00000000000{}"

STAND_IN = """
import fcntl, json, os, sys
from pathlib import Path
from ansible.module_utils.basic import AnsibleModule

FOLDER, NAME, TAKES = Path({folder!r}), {name!r}, {takes!r}
module = AnsibleModule(argument_spec={{key: {{"type": kind}} for key, kind in TAKES.items()}}, supports_check_mode=True)
with (FOLDER / (NAME + ".calls")).open("a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    number = len(file.readlines())
    file.write(json.dumps(module.params) + "\\n")
answers = json.loads((FOLDER / (NAME + ".json")).read_text())
answer = answers[min(number, len(answers) - 1)]
if module.params.get("timeout") == 99:
    sys.exit("the node's own Python is broken")
if "fail" in answer:
    module.fail_json(msg=answer["fail"])
module.exit_json(**answer)
"""

STAND_INS = (
    *("cluster_info", "nvml_info", "kubelet_devices_info", "virtual_machines_info", "control_plane_info"),
    *("gpu_allocation_check", "gpu_acceptance"),
)


def takes(name: str) -> dict[str, str]:
    """Return the types of a module's options, by its documentation."""
    documented = yaml.safe_load(importlib.import_module(f"{MODULES}.{name}").DOCUMENTATION)
    return {"kubeconfig": "raw", **{option: about["type"] for option, about in documented.get("options", {}).items()}}


def finding(level: str, check: str = "G6", node: str = "gpu1", cause: str = "any") -> dict[str, t.Any]:
    what = f"{check} of {node} is {level}"
    place = {"card": 0, "uuid": "", "pod": "", "container": "", "evidence": {"api": "a"}, "seen": 1}
    return {"check": check, "cause": cause, "level": level, "node": node, "what": what, "do": "Look.", **place}


def report(*findings: dict[str, t.Any], samples: int = 1) -> dict[str, t.Any]:
    counts = {level: sum(finding["level"] == level for finding in findings) for level in ("FAIL", "WARN", "UNKNOWN")}
    result = next((level for level in ("FAIL", "WARN", "UNKNOWN") if counts[level]), "PASS")
    levels = {finding["check"]: finding for finding in reversed(findings)}
    checks = [
        {"id": name, "backend": "common", "title": f"Title {name}", "result": one["level"], "n": 1}
        | {level.lower(): int(one["level"] == level) for level in counts}
        for name, one in levels.items()
    ]
    checks.append({"id": "C6", "backend": "common", "title": "Fine", "result": "PASS", "n": 2, "fail": 0, "warn": 0})
    head = {"result": result, "time": "2026-11-22T12:00:00Z", "cluster": "https://cluster.example:6443"}
    numbers = {"samples": samples, "grace_seconds": 1, "transient": 0, "counts": {**counts, "PASS": 1}}
    return {**head, **numbers, "checks": checks, "findings": list(findings), "nodes": []}


def chosen(mode: str = "static_pod", ours: bool = True, **more: t.Any) -> dict[str, t.Any]:
    found = {"mode": mode, "reason": "of a test", "on_machines": mode == "static_pod", "hosts": [], "openshift": ""}
    found |= {"takes_policy": False, "leftovers": [], "versions": [], "version": "v1.36.3"}
    found["namespace"] = {"name": "gpushare-system", "metadata": {"name": "gpushare-system"} if ours else {}}
    return {"scheduler": {**found, **more}, "backends": {"parts": {"extender": True, "dra": False}}}


def evidence(call: dict[str, t.Any]) -> dict[str, t.Any]:
    """The evidence of each node in a call of gpu_allocation_check, which may be text."""
    return {name: json.loads(node) if isinstance(node, str) else node for name, node in call["nodes"].items()}


def run_playbook(
    folder: Path, playbook: Path | str, *words: str, collections: Path | str = ROOT / ".collections"
) -> tuple[int, str]:
    """Run ansible-playbook in a folder; see ``ansible``."""
    shown = {"ANSIBLE_SHOW_CUSTOM_STATS": "1", "COLUMNS": "10000"}
    path = str(folder / collections)
    return ansible(folder, "ansible-playbook", playbook, *words, ANSIBLE_COLLECTIONS_PATH=path, **shown)


# What these modules promise, of a node without cards.
NVML = {"available": True, "problem": "", "driver": "", "nvml": "", "cuda": "", "cards": [], "pods_limited": None}
NVML |= {"seconds": 0.1, "excluded": []}
MISSING = {"state": "missing", "problem": ""}
VIRTUAL = {"problem": "", "functions": [], "missing": [], "images": [], "others": 1, "cards": [], "devices": []}
KUBELET = {
    "root": "/var/lib/kubelet",
    "checkpoint": {**MISSING, "entries": [], "registered": {}},
    "pod_resources": {**MISSING, "pods": []},
    "sockets": [],
    "device_nodes": None,
    "prepared": {**MISSING, "records": [], "specifications": []},
}


class Stage:
    """A folder with an inventory, and a collection of which some modules are stand-ins.

    :param real: of those that may be stand-ins, the ones that are the collection's own here.
    """

    def __init__(self, folder: Path, real: t.Collection[str] = ()) -> None:
        self.folder = folder
        stand_ins = {name: takes(name) for name in STAND_INS if name not in real}
        self._collection = folder / "collections" / "ansible_collections" / "kubegpu" / "share"
        (self._collection / "plugins").mkdir(parents=True)
        for path in ROOT.iterdir():
            if path.name in ("galaxy.yml", "meta", "roles", "playbooks"):
                (self._collection / path.name).symlink_to(path)
        for path in (ROOT / "plugins").iterdir():
            target = self._collection / "plugins" / path.name
            if path.name not in ("modules", "action"):
                target.symlink_to(path)
                continue
            target.mkdir()
            for file in path.glob("*.py"):
                if file.stem not in stand_ins:
                    (target / file.name).symlink_to(file)
        for name, options in stand_ins.items():
            text = STAND_IN.format(folder=str(folder), name=name, takes=options)
            (self._collection / "plugins" / "modules" / f"{name}.py").write_text(text)
        self.reset()

    def reset(self) -> None:
        """Let the modules answer as those of a healthy cluster without cards."""
        self.returns("cluster_info", chosen())
        self.returns("nvml_info", {"nvml": NVML, "virtual_machines": True})
        self.returns("virtual_machines_info", {"virtual_machines": VIRTUAL})
        self.returns("kubelet_devices_info", {"kubelet": KUBELET})
        self.returns("control_plane_info", {"fail": "it can't be read"})
        self.returns("gpu_allocation_check", {"report": report()})
        (self.folder / "gpu_acceptance.json").unlink(missing_ok=True)

    def returns(self, module: str, *answers: dict[str, t.Any]) -> None:
        """Set a module's result for its first call, its second one and so on; the last one is repeated."""
        (self.folder / f"{module}.json").write_text(json.dumps(answers))

    def calls(self, module: str) -> list[dict[str, t.Any]]:
        """A module's arguments, call by call."""
        path = self.folder / f"{module}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def play(self, *words: str, hosts: t.Any = None, playbook: Path = PLAYBOOK, **variables: t.Any) -> tuple[int, str]:
        """The exit status of ansible-playbook, and its output."""
        write_inventory(self.folder, hosts or {}, **variables)
        for path in self.folder.glob("*.calls"):
            path.unlink()
        rc, text = run_playbook(self.folder, playbook, "-i", "hosts.yml", *words, collections="collections")
        assert "Traceback" not in text, text
        return rc, text


def stats(text: str) -> dict[str, t.Any]:
    """Return what set_stats reported."""
    match = re.search(r"RUN: (\{.*\})", text)
    assert match, text
    stat: dict[str, t.Any] = json.loads(match.group(1))["gpu_verify"]
    return stat


@contextlib.contextmanager
def extender(body: str) -> t.Iterator[str]:
    """Serve an answer without a content type, and yield its URL."""
    api = Api()
    api.answers["/gpushare-scheduler/inspect"] = (200, body)
    try:
        yield f"{api.url}/gpushare-scheduler/inspect"
    finally:
        api.close()
