# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the tests, or some stages of them: lint, unit, kernel, lab, molecule, upgrade, oldest.

Without ``--all`` the tests marked ``long``, ansible-test's sanity, molecule, the upgrade of a cluster and the unit
tests with the oldest versions are left out.

A failure doesn't stop the run. The lab is taken down in every case. The last lines name each failure, and the last one
is ``N passed, N failed, N skipped``. A check of the lint stage counts as one test, and so does a molecule scenario.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from oldest import PYTHON, cache_root, interpreter

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
STAGES = ("lint", "unit", "kernel", "lab", "molecule", "upgrade", "oldest")
# What a run without --all consists of.
ORDINARY = STAGES[:4]
PRINTING = threading.Lock()
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# System packages and the base system, which many unit tests unpack; the lab takes the same ones from the cache.
PREPARE = """
from lab import aptsources, host, rootfs
host.prepare(rpm=True)
rootfs.rootfs("base", rootfs.BASE_PACKAGES, aptsources.read_machine())
"""
# Many unit tests start the lab's programs. While the lab's start builds them, this step waits, so that no test has to.
BUILD = """
from lab import build
for tools in build.TOOL_SETS:
    build.binaries(tools.name)
"""
LAST_LINES = 60
# Characters of each failure's reason in the summary, which is often all that is kept of a run.
REASON = 600


class Count:
    """Count results, and keep the reasons of failures for the summary."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0
        self.reasons: list[str] = []
        self._lock = threading.Lock()

    def add(self, passed: int, failed: int, skipped: int, reasons: list[str]) -> None:
        with self._lock:
            self.passed += passed
            self.failed += failed
            self.skipped += skipped
            self.reasons += reasons

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run(*command: str, cwd: Path = ROOT, sink: IO[bytes] | None = None, **environment: str) -> tuple[int, list[str]]:
    """Run one command of the virtual environment.

    :param sink: where its output goes; this process's standard output by default.
    :returns: its exit code and the last lines of its output.
    """
    # PYTHON* of the caller would leak another interpreter's packages into the tools.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    variables |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"} | environment
    last: deque[str] = deque(maxlen=LAST_LINES)
    process = subprocess.Popen(
        command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    reader = threading.Thread(target=_forward, args=(process.stdout, sink or sys.stdout.buffer, last), daemon=True)
    reader.start()
    process.wait()
    # A process that the command left running (a persistent SSH connection) may hold the pipe open for longer.
    reader.join(timeout=5)
    return process.returncode, [line for line in last if line]


def _forward(lines: IO[bytes] | None, sink: IO[bytes], last: deque[str]) -> None:
    for line in lines or ():
        sink.write(line)
        sink.flush()
        last.append(COLOUR.sub("", line.decode(errors="replace")).strip())


def shorten(text: str) -> str:
    """Fold a reason into one line of at most REASON characters."""
    return " ".join(text.split())[:REASON]


def check(count: Count, name: str, *command: str, cwd: Path = ROOT, **environment: str) -> None:
    """Run one command and count it as one test."""
    started = time.monotonic()
    print(f"==> {name}", flush=True)
    code, last = run(*command, cwd=cwd, **environment)
    print(f"    {name}: {'FAILED' if code else 'ok'} after {time.monotonic() - started:.0f} s", flush=True)
    count_command(count, name, code, last)


def check_in_background(count: Count, name: str, *command: str) -> bool:
    """Run one command beside others, print its output when it has ended, and count it as one test.

    :returns: whether it succeeded.
    """
    started = time.monotonic()
    print(f"==> {name}: started", flush=True)
    with tempfile.TemporaryFile() as log:
        code, last = run(*command, sink=log)
        log.seek(0)
        ended = f"{name}: {'FAILED' if code else 'ok'} after {time.monotonic() - started:.0f} s"
        with PRINTING:
            print(f"==> {name}\n{log.read().decode(errors='replace')}    {ended}", flush=True)
        count_command(count, name, code, last)
    return code == 0


def count_command(count: Count, name: str, code: int, last: list[str]) -> None:
    """Count a command as one test; its reason is the lines that mention an error, else the last line."""
    lines = [line for line in last if re.search("error|fatal|failed", line, re.IGNORECASE)] or last[-1:]
    reasons = [shorten(f"{name}: {line}") for line in lines[:3]] if code else []
    count.add(int(not code), int(code != 0), 0, reasons)


def pytest(
    count: Count,
    name: str,
    *arguments: str,
    background: bool = False,
    yielding: bool = False,
    program: tuple[str, ...] = ("python", "-m", "pytest", "-p", "no:cacheprovider"),
) -> None:
    """Run pytest and count its tests one by one.

    :param program: what runs pytest.
    :param yielding: leave most of the processor time to the lab, and keep enough that the tests' time limits hold.
    :param background: print its output when it has ended, since other stages print theirs meanwhile.
    """
    started = time.monotonic()
    print(f"==> {name}{': started' if background else ''}", flush=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        report = Path(folder) / "junit.xml"
        command = (*program, "-ra", f"--junitxml={report}", *arguments)
        nice = ("nice", "-n", "5") if yielding else ()
        code, last = run(*nice, *command, sink=log if background else None)
        log.seek(0)
        with PRINTING:
            if background:
                print(f"==> {name}\n{log.read().decode(errors='replace')}")
            print(f"    {name}: ended after {time.monotonic() - started:.0f} s", flush=True)
        if not report.exists():
            count_command(count, name, code or 1, last)
            return
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
        total, errors, failures, skipped = (
            sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "errors", "failures", "skipped")
        )
        failed = errors + failures
        reasons = [
            shorten(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}: {reason.get('message')}")
            for suite in suites
            for case in suite.iter("testcase")
            for reason in (*case.findall("error"), *case.findall("failure"))
        ]
        # An exit code that no test explains (nothing collected, interrupted) is a failure too.
        if code and not failed:
            failed, reasons = 1, [shorten(f"{name}: pytest exited with {code}")]
        count.add(total - errors - failures - skipped, failed, skipped, reasons)


def lint(count: Count, everything: bool) -> None:
    """Run every static check but ansible-test's sanity; the documentation's pages are written with everything only."""
    collections = ROOT / ".collections"
    check(count, "ruff check", "ruff", "check", ".")
    check(count, "ruff format", "ruff", "format", "--check", ".")
    plugins = "ansible_collections/kubegpu/share/plugins"
    mypy = ("python", "-m", "mypy", "--config-file", str(ROOT / "mypy.ini"))
    for name, paths, cwd, imports in (
        ("plugins", plugins, collections, "."),
        ("servers", "src/gpushare", ROOT / "images" / "gpushare", "src"),
        ("lab", "lab", ROOT, "."),
        ("operator", "src/kubegpu_operator", ROOT / "operator", "src:../.collections"),
    ):
        # It compares what a file contains, so a fresh checkout can use what another one checked.
        kept = str(cache_root() / "mypy" / name)
        check(count, f"mypy --strict {name}", *mypy, paths, cwd=cwd, MYPYPATH=imports, MYPY_CACHE_DIR=kept)
    files = [f"operator/{name}.py" for name in ("schema", "bundle", "publish", "files_image")]
    kept = str(cache_root() / "mypy" / "bundle")
    check(count, "mypy --strict bundle", *mypy, *files, MYPYPATH="operator:.collections", MYPY_CACHE_DIR=kept)
    # The lab's inventory is the default and may not exist yet; imported playbooks would not be checked then.
    check(count, "ansible-lint", "ansible-lint", "--strict", ANSIBLE_INVENTORY=str(ROOT / "inventories" / "example"))
    check(count, "meta/airgap.yml is current", "python", ".ci/airgap.py", "--check")
    check(count, "docs/reference is current", "python", "docs/code_tables.py", "--check")
    check(count, "docs/layers.svg is current", "python", "docs/layers.py", "--check")
    check(count, "the other pictures are current", "python", "docs/pictures.py", "--check")
    site = ("python", "docs/site_builder.py", *(() if everything else ("--check",)))
    check(count, "the documentation's site", *site)
    check(count, "changelog fragments", "antsibull-changelog", "lint")
    check(count, "built collection", "python", "tests/built_collection.py")


def unit(count: Count, everything: bool, beside: bool) -> None:
    # Most tests wait for programs that they start; tests of one file share what they built. xdist would begin with the
    # files of the most tests, while the slowest files have few: conftest.py puts those first.
    chosen = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=25")
    arguments = ("tests/unit", "-q", *chosen, *(() if everything else ("-m", "not long")))
    pytest(count, "unit tests", *arguments, yielding=beside)


def kernel(count: Count, everything: bool) -> None:
    """Run tests/kernel in the lab's guest, which has a real kernel; with everything, also what it boots from a disk."""
    if platform.machine() != "x86_64":
        print("==> kernel tests: skipped, since the lab's guest is made for amd64", flush=True)
        count.add(0, 0, 1, [])
        return
    chosen = () if everything else ("-m", "not long")
    pytest(count, "kernel tests", "tests/kernel", "-v", *chosen, program=("python", "-m", "lab.guest"))
    if everything:
        pytest(count, "boot tests", "tests/boot", "-v")


def oldest(count: Count) -> None:
    if not interpreter():
        print(f"==> the oldest versions: skipped, since this machine has no Python {PYTHON}", flush=True)
        count.add(0, 0, 1, [])
        return
    arguments = ("-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not long")
    pytest(count, "unit tests with the oldest versions", *arguments, program=("python", "tests/oldest.py"))


def lab_tests(count: Count, everything: bool, background: bool = False) -> None:
    chosen = () if everything else ("-m", "not long")
    pytest(count, "lab tests", "tests/lab", "-v", "--durations=40", *chosen, background=background)


@contextmanager
def own_folders() -> Iterator[None]:
    """Keep kubectl's cache and Ansible's persistent SSH connections in folders of this run; close these at its end."""
    with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["ANSIBLE_SSH_CONTROL_PATH_DIR"] = folder
        os.environ["KUBECACHEDIR"] = cache
        try:
            yield
        finally:
            for socket in Path(folder).iterdir():
                subprocess.run(
                    ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "lab"],
                    check=False,
                    capture_output=True,
                    stdin=subprocess.DEVNULL,
                )


class Lab:
    """A new lab, which is built and started beside other work."""

    def __init__(self, count: Count, pool: ThreadPoolExecutor) -> None:
        self._count = count
        self._is_down = False
        self._lock = threading.Lock()
        run("python", "-m", "lab", "down")
        self._starting: Future[bool] = pool.submit(check_in_background, count, "lab up", "python", "-m", "lab", "up")

    def is_up(self) -> bool:
        """Wait until it is up, and return whether that succeeded."""
        return self._starting.result()

    def down(self) -> None:
        """Take it down, unless that was done; another time where an interrupt ended the first."""
        try:
            self.is_up()
        finally:
            with self._lock:
                if not self._is_down:
                    self._is_down = check_in_background(self._count, "lab down", "python", "-m", "lab", "down")


def molecule(count: Count, cluster: bool) -> None:
    """Run every scenario; all but `default` start machines of their own, need no cluster and run two at a time."""
    names = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    if cluster:
        check(count, "molecule default", "molecule", "test", "--scenario-name", "default")
    else:
        print("==> molecule default: left out, since its lab isn't up", flush=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        scenarios = [
            pool.submit(check_in_background, count, f"molecule {name}", "molecule", "test", "--scenario-name", name)
            for name in names
            if name != "default"
        ]
    for scenario in scenarios:
        scenario.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every stage, with sanity and the tests marked long")
    ordinary = ", ".join(ORDINARY)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"any of {', '.join(STAGES)} (default {ordinary})")
    arguments = parser.parse_args()
    everything = arguments.all
    stages = set(arguments.stages or (STAGES if everything else ORDINARY))
    if not stages <= set(STAGES):
        parser.error(f"stages are {', '.join(STAGES)}")
    count = Count()
    started = time.monotonic()
    # Most tests wait, so two stages take little longer than the lab's; long ones need the machine for themselves.
    beside = not everything and "lab" in stages and bool(stages & {"lint", "unit", "kernel"})
    with ThreadPoolExecutor(max_workers=2) as pool, own_folders():
        sanity = None
        if "unit" in stages:
            check(count, "prepare the machine", "python", "-c", PREPARE)

        def without_lab() -> None:
            nonlocal sanity
            if "lint" in stages:
                lint(count, everything)
                if everything:
                    sanity = pool.submit(check_in_background, count, "ansible-test sanity", "python", "tests/sanity.py")
            if "unit" in stages:
                check(count, "build the lab's programs", "python", "-c", BUILD)
                unit(count, everything, beside)
            if "kernel" in stages:
                kernel(count, everything)
            if sanity:
                sanity.result()

        def with_lab(lab: Lab) -> None:
            if lab.is_up() and "lab" in stages:
                lab_tests(count, everything, beside)
            # An idle cluster takes a quarter of a processor from the unit tests.
            if "molecule" not in stages:
                lab.down()

        if stages & {"lab", "molecule"}:
            lab = Lab(count, pool)
            try:
                tested = pool.submit(with_lab, lab) if beside else None
                without_lab()
                if tested:
                    tested.result()
                else:
                    with_lab(lab)
                if "molecule" in stages:
                    molecule(count, lab.is_up())
            finally:
                lab.down()
        else:
            without_lab()
        if "upgrade" in stages:
            pytest(count, "upgrade by kubeadm", "tests/upgrade", "-v")
        if "oldest" in stages:
            oldest(count)
    print(f"{time.monotonic() - started:.0f} s; failures: {len(count.reasons) or 'none'}", flush=True)
    print(*(f"  {line}" for line in count.reasons), sep="\n", end="\n" if count.reasons else "")
    print(count, flush=True)
    return int(count.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
