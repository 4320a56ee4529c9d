# SPDX-License-Identifier: GPL-3.0-or-later
"""A real Prometheus on loopback: the machine's, or that of Debian's package, unpacked into the cache.

It isn't installed, so a package's scripts start nothing and create no user.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import typing as t
import urllib.error
import urllib.parse
import urllib.request
from functools import cache
from pathlib import Path

from ports import free_port

from lab.paths import cache_root, made_once

START = 60.0
PACKAGE = "prometheus"


class Missing(Exception):
    """Prometheus is unavailable on this machine; the message has the reason."""


@cache
def programs() -> dict[str, str]:
    """The paths of ``prometheus`` and ``promtool``.

    :raises Missing: neither the machine nor its packages have them.
    """
    names = ("prometheus", "promtool")
    found = {name: shutil.which(name) for name in names}
    if all(found.values()):
        return t.cast(dict[str, str], found)
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Missing("no Prometheus on the PATH, and no apt-get and dpkg-deb to download it")
    architecture = _run("dpkg", "--print-architecture").strip()
    candidate = _candidate()
    target = cache_root() / "prometheus" / f"{candidate.replace('/', '-')}-{architecture}"
    with made_once(target) as fresh:
        if fresh is not None:
            package = fresh / "package"
            package.mkdir()
            _run("apt-get", "download", PACKAGE, cwd=package)
            _run("dpkg-deb", "--extract", str(next(package.glob("*.deb"))), str(fresh))
            shutil.rmtree(package)
    return {name: str(target / "usr" / "bin" / name) for name in names}


def _candidate() -> str:
    """The version in the package lists, which are refreshed if they are missing."""
    for refresh in (False, True):
        if refresh and os.geteuid() == 0:
            _run("apt-get", "update")
        rows = [row.split() for row in _run("apt-cache", "policy", PACKAGE).splitlines()]
        version = next((row[1] for row in rows if row[:1] == ["Candidate:"] and row[1] != "(none)"), "")
        if version:
            return version
    raise Missing("the package lists of this machine have no Prometheus")


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Missing(f"no Prometheus: {command[0]} reports {done.stderr.strip()[-300:]}")
    return done.stdout


class Prometheus:
    """One server that scrapes these addresses twice a second, with a bearer token; job by job."""

    def __init__(self, folder: Path, targets: t.Mapping[str, str], token: str) -> None:
        self._folder, self._targets, self._token = folder, targets, token
        self._process: subprocess.Popen[bytes] | None = None
        self._address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Prometheus:
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [
                {
                    "job_name": job,
                    "authorization": {"credentials": self._token},
                    "static_configs": [{"targets": [address]}],
                }
                for job, address in self._targets.items()
            ],
        }
        # JSON is YAML.
        (self._folder / "prometheus.yml").write_text(json.dumps(config))
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *tied,
                    programs()["prometheus"],
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={self._address}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )
        end = time.monotonic() + START
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                return self
            if self._process.poll() is not None or time.monotonic() > end:
                log_end = (self._folder / "prometheus.log").read_text()[-2000:]
                self.__exit__()
                raise RuntimeError(f"Prometheus doesn't get ready: {log_end}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)

    def query(self, expression: str) -> list[dict[str, t.Any]]:
        """An instant vector: ``metric`` (labels) and ``value`` (time and text) of each series.

        :raises ValueError: Prometheus refuses the expression; with its message.
        """
        return t.cast(list[dict[str, t.Any]], self._ask("query", query=expression)["result"])

    def label_values(self, metric: str, label: str) -> list[str]:
        """Return the values of a label, as Grafana requests them for a dashboard's variable."""
        return t.cast(list[str], self._ask(f"label/{label}/values", **{"match[]": metric}))

    def _ask(self, what: str, **parameters: str) -> t.Any:
        address = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None
