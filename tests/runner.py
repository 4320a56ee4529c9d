# SPDX-License-Identifier: GPL-3.0-or-later
"""Run playbooks as AWX does: by ansible-runner, with the packages of the execution environment and no others.

AWX runs ansible-runner in a container of the execution environment's image. Here there is no container: a new virtual
environment has the image's Python packages, and a collections path has what the image has, the built collection and
kubernetes.core.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import typing as t
from dataclasses import dataclass
from pathlib import Path

from ansible.release import __version__ as ansible_core

ROOT = Path(__file__).resolve().parents[1]
RUNNER = "ansible-runner==2.4.3"
# What ansible-builder installs for the collection.
REQUIREMENTS = ROOT / "meta" / "ee-requirements.txt"
# What AWX sets for each job beside the paths (awx/main/tasks/jobs.py of 24.6.1), as far as it changes how a job runs.
ENVIRONMENT = {
    "ANSIBLE_FORCE_COLOR": "True",
    "ANSIBLE_HOST_KEY_CHECKING": "False",
    "ANSIBLE_RETRY_FILES_ENABLED": "False",
}


@dataclass(frozen=True)
class Done:
    """A job that ended.

    :param events: what ansible-runner reports to AWX, in their order.
    """

    rc: int
    status: str
    output: str
    events: list[dict[str, t.Any]]

    @property
    def artifacts(self) -> dict[str, t.Any]:
        """The stats that the job set, which AWX keeps."""
        found = [event["event_data"] for event in self.events if event["event"] == "playbook_on_stats"]
        assert len(found) == 1, self.output
        return dict(found[0].get("artifact_data", {}))

    def results(self, event: str) -> list[tuple[str, str]]:
        """The host and the task of each event of a kind, such as ``runner_on_failed``."""
        data = [one["event_data"] for one in self.events if one["event"] == event]
        return [(one["host"], one["task"]) for one in data]


class Environment:
    """A virtual environment and a collections path, in a folder."""

    def __init__(self, folder: Path, collections: Path) -> None:
        """
        :param collections: where the built collection is installed.
        """
        self.folder, self.collections = folder, collections
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.bin = folder / "venv" / "bin"
        packages = [f"ansible-core=={ansible_core}", RUNNER, f"--requirement={REQUIREMENTS}"]
        subprocess.run([self.bin / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
        core = Path(sysconfig.get_paths()["purelib"]) / "ansible_collections" / "kubernetes"
        (collections / "ansible_collections" / "kubernetes").symlink_to(core)
        self._jobs = 0

    def job(
        self, playbook: str, inventory: t.Any, credential: t.Mapping[str, t.Any], *words: str, **answers: t.Any
    ) -> Done:
        """Run a playbook of the project: this checkout's playbooks, and its ansible.cfg without what facts become.

        :param inventory: as ``ansible-inventory --list --export`` prints it, which is how AWX fills one from Git.
        :param credential: what a credential injects: ``file``, ``env`` and ``extra_vars``, where ``PATH`` stands for
            the file.
        :param words: arguments of ansible-playbook, as AWX makes them of a job template.
        :param answers: of the survey.
        """
        self._jobs += 1
        job = self.folder / f"job{self._jobs}"
        for name in ("env", "inventory", "project"):
            (job / name).mkdir(parents=True)
        shutil.copytree(ROOT / "playbooks", job / "project" / "playbooks")
        # A user's project has no such line.
        settings = (ROOT / "ansible.cfg").read_text().replace("inject_facts_as_vars = False\n", "")
        (job / "project" / "ansible.cfg").write_text(settings)
        # As AWX passes an inventory.
        hosts = job / "inventory" / "hosts"
        hosts.write_text(f"#!/usr/bin/env python3\nprint({json.dumps(inventory)!r})\n")
        hosts.chmod(0o700)
        secret = job / "env" / "tmp_credential"
        secret.touch(mode=0o600)
        secret.write_text(credential["file"]["template"])
        given = {
            kind: {key: value.replace("PATH", str(secret)) for key, value in credential[kind].items()}
            for kind in ("env", "extra_vars")
        }
        variables = job / "env" / "tmp_variables"
        variables.write_text(json.dumps(given["extra_vars"]))
        paths = {"ANSIBLE_COLLECTIONS_PATH": str(self.collections), "ANSIBLE_HOME": str(job / "home")}
        (job / "env" / "envvars").write_text(json.dumps({**ENVIRONMENT, **paths, **given["env"]}))
        (job / "env" / "extravars").write_text(json.dumps(answers))
        (job / "env" / "cmdline").write_text(" ".join([*words, "-e", f"@{variables}"]))
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "PYTHON", "VIRTUAL_"))
        }
        done = subprocess.run(
            [self.bin / "ansible-runner", "run", job, "--playbook", playbook, "--ident", "1"],
            env={**kept, "PATH": f"{self.bin}:{kept['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        left = job / "artifacts" / "1"
        files = sorted((left / "job_events").glob("*-*.json"), key=lambda path: int(path.name.partition("-")[0]))
        return Done(
            int((left / "rc").read_text()),
            (left / "status").read_text(),
            done.stdout + done.stderr,
            [json.loads(path.read_text()) for path in files],
        )
