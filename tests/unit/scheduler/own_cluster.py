# SPDX-License-Identifier: GPL-3.0-or-later
"""Real controllers beside a real API server, and playbooks by the real ansible-playbook."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import typing as t
from pathlib import Path

import yaml
from ansible_runs import Ran, ansible, write_inventory
from real_apiserver import GO, ApiServer

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def controllers(api, *names):
    """Run kube-controller-manager with these controllers only."""
    chosen = f"--controllers={','.join(f'{name}-controller' for name in names)}"
    with _running(api, "kube-controller-manager", chosen, "--profiling=false"):
        yield


@contextlib.contextmanager
def scheduler(api):
    """Run kube-scheduler with its defaults."""
    with _running(api, "kube-scheduler"):
        yield


@contextlib.contextmanager
def _running(api, program, *flags):
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    flags = [f"--kubeconfig={api.kubeconfig}", "--leader-elect=false", "--secure-port=0", *flags]
    with (api.folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen(
            [*tied, api.programs[program], *flags], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **GO}
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def run_playbook(folder, playbook, *words, groups=None, **variables):
    """Run a playbook on this machine.

    :param playbook: a path, or the plays.
    :param groups: of the inventory; see ``write_inventory``, as for ``variables``.
    """
    write_inventory(folder, groups or {}, **variables)
    if not isinstance(playbook, Path):
        (folder / "play.yml").write_text(yaml.safe_dump(playbook, sort_keys=False))
        playbook = folder / "play.yml"
    return ansible(folder, "ansible-playbook", "-i", "hosts.yml", playbook, *words)


class Guarded(t.NamedTuple):
    """A namespace in which admission policies hold."""

    server: ApiServer
    namespace: str

    @property
    def pods(self):
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def ask(self, pod):
        """Return the API server's status and text for a new pod, in a dry run."""
        return self.server.ask("POST", f"{self.pods}?dryRun=All", pod)

    def expect(self, pod, message=""):
        """Require that a new pod is refused with this message, or admitted where there is none."""
        status, text = self.ask(pod)
        assert (status, message in text) == (403 if message else 201, True), text

    def until(self, status, pod):
        """Wait until a changed policy is in effect."""
        until(lambda: self.ask(pod)[0] == status)

    def warnings(self, pod):
        """Return kubectl's warnings for a new pod, which is admitted."""
        text = yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", **pod})
        flags = (f"--namespace={self.namespace}", "--dry-run=server", "--filename=-")
        done = self.server.kubectl("create", *flags, text=text)
        assert done.returncode == 0, done.stderr
        return done.stderr


def until(check, seconds=20.0, pause=0.1):
    """Return the first true value of a check."""
    end = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < end, f"still {value!r} after {seconds} s"
        time.sleep(pause)
    return value


class RoleSteps:
    """The steps of a role that has its step in a variable: ``<role>_step``.

    :param folder: where the runs' files are.
    :param variables: of every run.
    """

    def __init__(self, role: str, folder: Path, **variables: t.Any) -> None:
        self.role, self.folder, self.variables = role, folder, variables

    def run(self, step: str, *words: str, **variables: t.Any) -> Ran:
        role = {"role": f"kubegpu.share.{self.role}", f"{self.role}_step": step}
        play = [{"hosts": "localhost", "gather_facts": False, "roles": [role]}]
        return run_playbook(self.folder, play, *words, **{**self.variables, **variables})

    def step(self, step: str, *words: str, **variables: t.Any) -> int:
        """Run a step that must succeed, and return how many tasks changed something."""
        done = self.run(step, *words, **variables)
        assert done.rc == 0, done.text
        return done.changed
