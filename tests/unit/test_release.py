# SPDX-License-Identifier: GPL-3.0-or-later
"""``make release``: what it makes of a clone of this checkout, what it refuses, and that a dry run changes nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ".ci/release.py"
VERSION = yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
sys.path.append(str(ROOT / ".ci"))
import release  # noqa: E402


def git(folder, *arguments):
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A clone with the files of this checkout, those that aren't committed yet too, before its first release."""
    folder = tmp_path / "checkout"
    git(tmp_path, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder))
    git(folder, "config", "user.name", "t")
    git(folder, "config", "user.email", "t@example.org")
    for name in (SCRIPT, "galaxy.yml", "changelogs/config.yaml", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    for tag in git(folder, "tag").split():
        git(folder, "tag", "--delete", tag)
    changes = folder / "changelogs"
    (changes / "changelog.yaml").write_text("---\nancestor:\nreleases: {}\n")
    (changes / "fragments").mkdir(exist_ok=True)
    (changes / "fragments/of-the-test.yml").write_text("---\nsecurity_fixes:\n  - role gpushare - a change.\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "as it is here, before its first release")
    return folder


def run(folder, *arguments):
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.long
def test_a_release_of_a_clone(checkout, tmp_path):
    before = git(checkout, "rev-parse", "HEAD")
    fragments = {path.name for path in (checkout / "changelogs/fragments").iterdir()}
    tried = run(checkout, "--dry-run", "--without-images", "--out", str(tmp_path / "tried"))
    assert tried.returncode == 0, tried.stderr
    assert (git(checkout, "rev-parse", "HEAD"), git(checkout, "tag"), git(checkout, "status", "--porcelain")) == (
        before,
        "",
        "",
    )

    done = run(checkout, "--without-images")
    assert done.returncode == 0, done.stderr
    assert git(checkout, "rev-parse", "HEAD~1") == before and git(checkout, "tag") == VERSION
    assert git(checkout, "rev-parse", f"{VERSION}^{{commit}}") == git(checkout, "rev-parse", "HEAD")
    assert git(checkout, "status", "--porcelain") == ""
    out = checkout / "dist"
    name = f"kubegpu-share-{VERSION}"
    assert {path.name for path in out.iterdir()} == {f"{name}.tar.gz", f"{name}.md", f"{name}.cdx.json", "SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True, capture_output=True)
    with tarfile.open(out / f"{name}.tar.gz") as packed:
        names = set(packed.getnames())
        log = packed.extractfile("CHANGELOG.md").read().decode()
    assert not {one for one in names if "plugin-cache" in one or one.startswith("dist")}
    assert not {f"changelogs/fragments/{fragment}" for fragment in fragments} & names
    notes = (out / f"{name}.md").read_text()
    assert "### Security Fixes" in notes and "### New Modules" in notes and "<a id=" not in notes
    assert set(notes.splitlines()) <= set(log.splitlines())

    again = run(checkout, "--without-images", "--out", str(tmp_path / "again"))
    assert again.returncode == 1 and f"there is a tag {VERSION}" in again.stderr


def test_what_a_release_refuses(checkout, tmp_path):
    target = ("--without-images", "--out", str(tmp_path / "out"))
    (checkout / "README.md").write_text("changed\n")
    refused = run(checkout, *target)
    assert refused.returncode == 1 and "README.md" in refused.stderr

    git(checkout, "checkout", "--quiet", "README.md")
    file = checkout / "images/gpushare/pyproject.toml"
    file.write_text(file.read_text().replace(f'version = "{VERSION}"', 'version = "0.0.1"'))
    git(checkout, "commit", "--quiet", "--all", "--message", "another version")
    refused = run(checkout, *target)
    assert refused.returncode == 1 and "pyproject.toml has 0.0.1" in refused.stderr

    git(checkout, "reset", "--quiet", "--hard", "HEAD~1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "older").touch()
    refused = run(checkout, *target)
    assert refused.returncode == 1 and "isn't empty" in refused.stderr
    assert not (tmp_path / "out" / "SHA256SUMS").exists()


def test_every_default_with_the_version_is_compared():
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("roles/*/defaults/main.yml")}
    assert {name for name, text in files.items() if VERSION in text} <= set(release.VERSIONS)
    for name, pattern in release.VERSIONS.items():
        assert re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE) == [VERSION], name


CHANGELOG = r"""# kubegpu\.share Release Notes

<a id="v1-1-0"></a>
## v1\.1\.0

<a id="minor-changes"></a>
### Minor Changes

* second

<a id="v1-0-0"></a>
## v1\.0\.0

* first
"""


def test_the_notes_are_the_section_of_one_version():
    assert release.section(CHANGELOG, "1.1.0") == "### Minor Changes\n\n* second\n"
    assert release.section(CHANGELOG, "1.0.0") == "* first\n"
    with pytest.raises(release.Refused, match=r"1\.0"):
        release.section(CHANGELOG, "1.0")


def test_the_bill_has_the_tarball_and_what_the_controller_needs(tmp_path):
    (tmp_path / "package").write_bytes(b"tarball")
    document = json.loads(release.bill(tmp_path / "package", ROOT, VERSION))
    [own] = document["metadata"]["component"]["hashes"]
    assert own["content"] == release.digest(tmp_path / "package")
    names = {component["name"] for component in document["components"]}
    assert {"kubernetes", "kubernetes.core"} <= names and "pytest" not in names
    assert document["dependencies"][0]["dependsOn"] == [component["bom-ref"] for component in document["components"]]
