# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for ``helm pull`` from a repository on a web server, for tests on machines without helm."""

import os
import sys
import urllib.request

import yaml

assert sys.argv[1] == "pull", sys.argv
chart = sys.argv[2]
flags = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
repository = flags["--repo"].rstrip("/")
with urllib.request.urlopen(f"{repository}/index.yaml") as answer:
    entries = yaml.safe_load(answer)["entries"].get(chart, [])
found = [entry for entry in entries if entry["version"] == flags["--version"]]
if not found:
    sys.exit(f"Error: chart {chart!r} version {flags['--version']!r} not found in {repository} repository")
name = f"{chart}-{flags['--version']}.tgz"
with (
    urllib.request.urlopen(f"{repository}/{name}") as answer,
    open(os.path.join(flags["--destination"], name), "wb") as to,
):
    to.write(answer.read())
