# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole test run, or some stages of it: lint, unit, lab, molecule.

Goes on after a failure, takes the lab down whatever happens, and ends with what failed, a line each, and with one line:
``N passed, N failed, N skipped``. A check of the lint stage counts as one test, and so does a scenario of molecule.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
STAGES = ("lint", "unit", "lab", "molecule")
PRINTING = threading.Lock()
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The lab would install and make it later; many unit tests are left out without it.
OF_THE_LAB = """
from lab import aptsources, host, rootfs
host.prepare(rpm=True)
rootfs.rootfs("base", rootfs.BASE_PACKAGES, aptsources.read_machine())
"""
LAST_LINES = 60
# Characters of each failure's reason at the end, which is often all that is kept of a run.
REASON = 600


class Count:
    """What passed, failed (with the reasons, told again at the end) and was skipped so far."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0
        self.broken: list[str] = []
        self._lock = threading.Lock()

    def add(self, passed: int, failed: int, skipped: int, broken: list[str]) -> None:
        with self._lock:
            self.passed += passed
            self.failed += failed
            self.skipped += skipped
            self.broken += broken

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run(*command: str, cwd: Path = ROOT, sink: IO[bytes] | None = None, **environment: str) -> tuple[int, list[str]]:
    """Run one command of the virtual environment, its output going on to ours or into a file.

    Returns its exit code and the last lines that it printed.
    """
    # PYTHON* of the caller would leak another interpreter's packages into the tools.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    variables |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"} | environment
    last: deque[str] = deque(maxlen=LAST_LINES)
    process = subprocess.Popen(
        command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    reader = threading.Thread(target=passed_on, args=(process.stdout, sink or sys.stdout.buffer, last), daemon=True)
    reader.start()
    process.wait()
    # Not longer: what a command left running (a lasting SSH connection) may hold the pipe open.
    reader.join(timeout=5)
    return process.returncode, [line for line in last if line]


def passed_on(lines: IO[bytes] | None, sink: IO[bytes], last: deque[str]) -> None:
    """Write every line on as it comes, and keep the last ones."""
    for line in lines or ():
        sink.write(line)
        sink.flush()
        last.append(COLOUR.sub("", line.decode(errors="replace")).strip())


def shortened(text: str) -> str:
    """The text in one line that leaves room for the others."""
    return " ".join(text.split())[:REASON]


def check(count: Count, name: str, *command: str, cwd: Path = ROOT, **environment: str) -> None:
    """One command that has to end well, counted as one test."""
    started = time.monotonic()
    print(f"==> {name}", flush=True)
    code, last = run(*command, cwd=cwd, **environment)
    print(f"    {name}: {'FAILED' if code else 'ok'} after {time.monotonic() - started:.0f} s", flush=True)
    verdict(count, name, code, last)


def check_aside(count: Count, name: str, *command: str) -> None:
    """The same beside something else: its output is shown when it has ended."""
    started = time.monotonic()
    print(f"==> {name}: started", flush=True)
    with tempfile.TemporaryFile() as log:
        code, last = run(*command, sink=log)
        log.seek(0)
        ended = f"{name}: {'FAILED' if code else 'ok'} after {time.monotonic() - started:.0f} s"
        with PRINTING:
            print(f"==> {name}\n{log.read().decode(errors='replace')}    {ended}", flush=True)
            verdict(count, name, code, last)


def verdict(count: Count, name: str, code: int, last: list[str]) -> None:
    """Count a command as one test, told again by the lines in which it speaks of an error, else by its last one."""
    telling = [line for line in last if re.search("error|fatal|failed", line, re.IGNORECASE)] or last[-1:]
    broken = [shortened(f"{name}: {line}") for line in telling[:3]] if code else []
    count.add(int(not code), int(code != 0), 0, broken)


def pytest(count: Count, name: str, *arguments: str) -> None:
    """A pytest run, its tests counted one by one."""
    print(f"==> {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        code, last = run("python", "-m", "pytest", "-ra", f"--junitxml={report}", *arguments)
        if not report.exists():
            verdict(count, name, code or 1, last)
            return
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
        total, errors, failures, skipped = (
            sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "errors", "failures", "skipped")
        )
        failed = errors + failures
        broken = [
            shortened(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}: {reason.get('message')}")
            for suite in suites
            for case in suite.iter("testcase")
            for reason in (*case.findall("error"), *case.findall("failure"))
        ]
        # An exit code that no test explains (nothing collected, interrupted) is a failure too.
        if code and not failed:
            failed, broken = 1, [shortened(f"{name}: pytest exited with {code}")]
        count.add(total - errors - failures - skipped, failed, skipped, broken)


def lint(count: Count) -> None:
    """All but ansible-test's sanity, which takes longer than the rest and goes on beside the unit tests."""
    collections = ROOT / ".collections"
    check(count, "ruff check", "ruff", "check", ".")
    check(count, "ruff format", "ruff", "format", "--check", ".")
    plugins = "ansible_collections/kubegpu/share/plugins"
    mypy = ("python", "-m", "mypy", "--config-file", str(ROOT / "mypy.ini"))
    check(count, "mypy --strict plugins", *mypy, plugins, cwd=collections, MYPYPATH=".")
    check(count, "mypy --strict servers", *mypy, "src/gpushare", cwd=ROOT / "images/gpushare", MYPYPATH="src")
    check(count, "mypy --strict lab", *mypy, "lab", MYPYPATH=".")
    # The lab, whose inventory is the default, isn't up: imported playbooks would not be looked at.
    check(count, "ansible-lint", "ansible-lint", "--strict", ANSIBLE_INVENTORY=str(ROOT / "inventories" / "example"))
    check(count, "docs are current", "python", "docs/generate.py", "--check")
    check(count, "built collection", "python", "tests/built_collection.py")


def unit(count: Count) -> None:
    # Most of them wait for programs that they start; a file's tests share what they made. xdist would begin with the
    # files of the most tests; what takes longest are few tests, and conftest.py has them come first.
    chosen = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=25")
    pytest(count, "unit tests", "tests/unit", "-q", "-p", "no:cacheprovider", *chosen)


@contextmanager
def own_connections() -> Iterator[None]:
    """Ansible's lasting SSH connections in a folder of this run, closed at its end: nothing is left running."""
    with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder:
        os.environ["ANSIBLE_SSH_CONTROL_PATH_DIR"] = folder
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


@contextmanager
def fresh_lab(count: Count) -> Iterator[bool]:
    """A lab that nothing has touched, taken down at the end."""
    try:
        run("python", "-m", "lab", "down")
        before = count.failed
        check(count, "lab up", "python", "-m", "lab", "up")
        yield count.failed == before
    finally:
        check(count, "lab down", "python", "-m", "lab", "down")


def molecule(count: Count, cluster: bool) -> None:
    """Every scenario; all but `default` bring up machines of their own, need no cluster and run two at a time."""
    names = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    if cluster:
        check(count, "molecule default", "molecule", "test", "--scenario-name", "default")
    else:
        print("==> molecule default: left out, its lab isn't up", flush=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        scenarios = [
            pool.submit(check_aside, count, f"molecule {name}", "molecule", "test", "--scenario-name", name)
            for name in names
            if name != "default"
        ]
    for one in scenarios:
        one.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"any of {', '.join(STAGES)}; all by default")
    stages = parser.parse_args().stages or STAGES
    if not set(stages) <= set(STAGES):
        parser.error(f"stages are {', '.join(STAGES)}")
    count = Count()
    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as pool:
        asides = []
        if "lint" in stages:
            lint(count)
            asides = [pool.submit(check_aside, count, "ansible-test sanity", "python", "tests/sanity.py")]
        if "unit" in stages:
            if "lab" in stages:
                check(count, "what unit tests take of the lab", "python", "-c", OF_THE_LAB)
            unit(count)
    for one in asides:
        one.result()
    if "lab" in stages or "molecule" in stages:
        with own_connections(), fresh_lab(count) as up:
            if up and "lab" in stages:
                chosen = ("-m", "not long", "--durations=40")
                pytest(count, "lab tests", "tests/lab", "-v", "-p", "no:cacheprovider", *chosen)
            if "molecule" in stages:
                molecule(count, up)
    print(f"{time.monotonic() - started:.0f} s; broken: {len(count.broken) or 'nothing'}", flush=True)
    print(*(f"  {line}" for line in count.broken), sep="\n", end="\n" if count.broken else "")
    print(count, flush=True)
    return int(count.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
