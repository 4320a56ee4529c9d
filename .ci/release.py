# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a release: changelog, tag, tarball, image archives, bills of materials and checksums.

Everything happens in a clone of the committed state, so a failure leaves the checkout as it was. At the end the
clone's commit and tag are fetched into the checkout, unless ``--dry-run`` is given. Nothing is published; the last
lines say how.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ENGINES = ("podman", "buildah", "docker")
SUMS = "SHA256SUMS"
# The Python packages that the controller needs.
REQUIREMENTS = "meta/ee-requirements.txt"
# Roles see no defaults of each other, so three name the image for the case that gpushare_image isn't set.
FALLBACK = r"gpushare_image \| default\('\S+:([^'\s]+)"
# Every other place that has the version of galaxy.yml.
VERSIONS = {
    "images/gpushare/src/gpushare/__init__.py": r'__version__ = "(.*)"',
    "images/gpushare/pyproject.toml": r'^version = "(.*)"',
    "roles/gpushare/defaults/main.yml": r"^gpushare_image: \S+:(.*)$",
    **{f"roles/{role}/defaults/main.yml": FALLBACK for role in ("image_build", "preflight", "scheduler")},
}


class Refused(Exception):
    """A release can't be made; the message says why and what to do."""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a program and return what it prints.

    :raises Refused: it fails; with its last words.
    """
    path = f"{BIN}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-3000:]
        raise Refused(f"`{' '.join(command)}` failed with exit code {done.returncode}:\n{said}")
    return done.stdout


def version_of(tree: Path) -> str:
    """Return the version in ``galaxy.yml``, the one place that has it."""
    return str(yaml.safe_load((tree / "galaxy.yml").read_text())["version"])


def refuse(version: str, dry: bool) -> None:
    """Refuse a release that would lose or hide something.

    :raises Refused: uncommitted changes, another version somewhere, or a tag of this version.
    """
    changed = run("git", "status", "--porcelain", cwd=ROOT).strip()
    if changed and not dry:
        raise Refused(f"a release is made of what is committed, and these files aren't:\n{changed}")
    for name, pattern in VERSIONS.items():
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        if found is None or found[1] != version:
            raise Refused(f"galaxy.yml has version {version}, and {name} has {found[1] if found else 'none'}")
    if run("git", "tag", "--list", version, cwd=ROOT).strip():
        raise Refused(f"there is a tag {version} already: raise the version in galaxy.yml")


def clone(folder: Path) -> Path:
    """Clone the committed state, where Ansible finds it as the collection."""
    tree = folder / "ansible_collections" / "kubegpu" / "share"
    tree.parent.mkdir(parents=True)
    run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tree), cwd=folder)
    for key in ("user.name", "user.email"):
        # A clone doesn't have the settings of the checkout's own .git/config.
        value = subprocess.run(
            ["git", "config", key], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        if value:
            run("git", "config", key, value, cwd=tree)
    return tree


def changelog(tree: Path, version: str) -> str:
    """Move the fragments into the changelog, commit that, and tag it.

    :returns: this version's section of the changelog, in Markdown.
    :raises Refused: a fragment is invalid, or there is none.
    """
    paths = {"ANSIBLE_COLLECTIONS_PATH": str(tree.parents[2])}
    run("antsibull-changelog", "lint", cwd=tree)
    if not any((tree / "changelogs" / "fragments").glob("*.yml")):
        raise Refused("changelogs/fragments is empty: nothing has changed that a user would notice")
    run("antsibull-changelog", "release", "--version", version, cwd=tree, **paths)
    notes = section((tree / "CHANGELOG.md").read_text(), version)
    run("git", "add", "--all", cwd=tree)
    run("git", "commit", "--quiet", "--message", f"Release {version}", cwd=tree)
    run("git", "tag", "--annotate", version, "--message", f"kubegpu.share {version}", cwd=tree)
    # What is packed is what the tag has.
    run("git", "clean", "-ffdxq", cwd=tree)
    return notes


def section(text: str, version: str) -> str:
    """Return one release's section of a changelog.

    :raises Refused: it has none.
    """
    rows = text.splitlines()
    starts = [at for at, row in enumerate(rows) if row.startswith("## ")]
    for at, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        # It escapes every punctuation mark.
        if rows[at].replace("\\", "") in (f"## {version}", f"## v{version}"):
            body = "\n".join(row for row in rows[at + 1 : end] if not row.startswith("<a id="))
            return body.strip() + "\n"
    raise Refused(f"antsibull-changelog wrote no section for {version} into CHANGELOG.md")


def tarball(tree: Path, out: Path) -> Path:
    """Build the collection."""
    run("ansible-galaxy", "collection", "build", "--force", "--output-path", str(out), cwd=tree)
    return next(out.glob("kubegpu-share-*.tar.gz"))


def images(tree: Path, out: Path) -> None:
    """Build the servers' image, an archive and a bill of materials per platform."""
    with tempfile.TemporaryDirectory() as work:
        run(
            str(BIN / "ansible-playbook"),
            "-i",
            "localhost,",
            "playbooks/build_images.yml",
            "-e",
            json.dumps({"ansible_connection": "local", "image_build_folder": work, "image_build_fetch": str(out)}),
            cwd=tree,
            ANSIBLE_COLLECTIONS_PATH=f"{tree.parents[2]}:{Path(yaml.__file__).parents[1]}",
        )
    if not any(out.glob("*.tar")):
        raise Refused("build_images.yml ended without an error, and left no archive")


def requirements(text: str) -> list[tuple[str, str]]:
    """Return name and installed version of the Python packages that the controller needs."""
    names = sorted({match[1].lower() for match in re.finditer(r"^([A-Za-z0-9][\w.-]*)\s*[=<>~!]", text, re.MULTILINE)})
    return [(name, metadata.version(name)) for name in names]


def bill(package: Path, tree: Path, version: str) -> str:
    """Return the collection's bill of materials (CycloneDX 1.6, JSON): the tarball and what it needs beside it."""
    galaxy = yaml.safe_load((tree / "galaxy.yml").read_text())
    own = f"pkg:generic/kubegpu.share@{version}"
    python = [
        {"type": "library", "name": name, "version": installed, "purl": f"pkg:pypi/{name}@{installed}"}
        for name, installed in requirements((tree / REQUIREMENTS).read_text())
    ]
    collections = [
        {"type": "library", "name": name, "version": wanted, "purl": f"pkg:generic/{name}"}
        for name, wanted in sorted(galaxy["dependencies"].items())
    ]
    components = [{**one, "bom-ref": one["purl"]} for one in (*python, *collections)]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "kubegpu.share",
                "version": version,
                "licenses": [{"license": {"id": one}} for one in galaxy["license"]],
                "hashes": [{"alg": "SHA-256", "content": digest(package)}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [one["bom-ref"] for one in components]}],
    }
    return json.dumps(document, indent=2) + "\n"


def digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checksums(out: Path) -> None:
    """Write the SHA-256 of every file beside it, as ``sha256sum --check`` reads them."""
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != SUMS)
    (out / SUMS).write_text("".join(f"{digest(file)}  {file.name}\n" for file in files))


def bring_back(tree: Path, version: str) -> None:
    """Fetch the clone's commit and tag into the checkout."""
    run("git", "fetch", "--quiet", str(tree), f"refs/tags/{version}:refs/tags/{version}", cwd=ROOT)
    run("git", "merge", "--quiet", "--ff-only", f"{version}^{{commit}}", cwd=ROOT)


def release(out: Path, dry: bool, with_images: bool) -> None:
    """Make the release in ``out``.

    :param dry: leave the checkout as it is.
    :param with_images: whether the servers' image is built too.
    :raises Refused: it can't be made; the checkout is as it was.
    """
    version = version_of(ROOT)
    refuse(version, dry)
    if with_images and not any(shutil.which(engine) for engine in ENGINES):
        raise Refused(f"nothing here builds images ({', '.join(ENGINES)}): install one, or pass --without-images")
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} isn't empty: remove it first")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kubegpu-release-") as name:
        tree = clone(Path(name))
        print(f"changelog of {version}", flush=True)
        notes = changelog(tree, version)
        (out / f"kubegpu-share-{version}.md").write_text(notes)
        print("tarball", flush=True)
        package = tarball(tree, out)
        if with_images:
            print("image archives, with their bills of materials", flush=True)
            images(tree, out)
        (out / f"kubegpu-share-{version}.cdx.json").write_text(bill(package, tree, version))
        checksums(out)
        if not dry:
            bring_back(tree, version)
    print(f"\n{out}:", *(f"  {path.name}" for path in sorted(out.iterdir())), sep="\n")
    if dry:
        print("\nA dry run: the checkout has no new commit and no tag.")
    else:
        print(
            f"\nThe checkout has the commit and the tag {version}. To publish:",
            f"  git push origin HEAD {version}",
            f"  ansible-galaxy collection publish {package}",
            sep="\n",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="leave the checkout without a commit and a tag")
    parser.add_argument("--without-images", action="store_true", help="build no image; nothing here may be able to")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty or new folder (default: dist)")
    given = parser.parse_args()
    if not given.dry_run:
        # Newer releases are no reason to refuse, but whoever releases has seen them.
        subprocess.run([sys.executable, str(ROOT / ".ci/outdated.py")], check=False)
    try:
        release(given.out.resolve(), given.dry_run, not given.without_images)
    except Refused as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
