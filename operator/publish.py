# SPDX-License-Identifier: GPL-3.0-or-later
"""Put the operator into a registry: the images, the bundle that names them by digest, and the catalog that names it.

    make publish ARGS="--registry registry.example.org/kubegpu"

Afterwards dist/operator/install has the objects that install it from there. Nothing else than the registry is asked,
and the base image's. Log in to the registry with the engine beforehand. What is there already can be named by digest,
as on the far side of an air gap: --servers-image, --operator-image. Then nothing is built.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import typing as t
from pathlib import Path

import bundle
import yaml
from bundle import Refused

ROOT = bundle.ROOT
sys.path[:0] = [str(ROOT / ".collections")]

import files_image  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._images import archives  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._images.delivery import PLATFORMS  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._images.engine import (  # noqa: E402
    ENGINES,
    Engine,
    choose,
)

EPOCH = 1767225600
CONTAINERFILE = "operator/Containerfile"
# In the first entry of the image's history that isn't the base's.
MARK = "kubegpu operator"
# What the Containerfile takes of the checkout.
CONTEXT = ("operator", "lab/go/ansible-operator", "galaxy.yml", "meta", "playbooks", "plugins", "roles", "images")
BEFOREHAND = "operator/build"
# A registry's name with its port, and a folder in it. A tag or a digest there would be lost.
REGISTRY = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")


def run_command(argv: list[str], data: str | None = None, **_more: t.Any) -> tuple[int, str, str]:
    """Run a program as ``AnsibleModule.run_command`` does."""
    done = subprocess.run(argv, input=data, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class Publisher:
    """A registry, and the engine that pushes to it.

    :param registry: the beginning of every image's name.
    :param out: the folder for archives and everything that is written.
    """

    def __init__(self, registry: str, out: Path, engine: Engine, platforms: t.Sequence[str]) -> None:
        self._registry, self._out, self._engine, self._platforms = registry, out, engine, list(platforms)
        self._images = out / "images"
        self._images.mkdir(parents=True, exist_ok=True)

    def servers(self, version: str, base: str, pip_args: str) -> str:
        """Build the servers' image by the playbook that builds it, push it, and return its name by digest.

        :raises Refused: the playbook fails, or nobody says the digest.
        """
        reference = f"{self._registry}/{bundle.SERVERS}:{version}"
        given = {
            "ansible_connection": "local",
            "image_build_reference": reference,
            "image_build_base": base,
            "image_build_pip_args": pip_args,
            "image_build_engine": self._engine.name,
            "image_build_platforms": self._platforms,
            "image_build_tls_verify": self._engine.tls_verify,
            "image_build_folder": str(self._images),
            "image_build_push": True,
        }
        program = Path(sys.executable).parent / "ansible-playbook"
        command = [str(program), "-i", "localhost,", "playbooks/build_images.yml", "-e", json.dumps(given)]
        if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
            raise Refused(f"build_images.yml failed for {reference}; the reason is above")
        record = json.loads((self._images / f"{bundle.SERVERS}-{version}.json").read_text())
        return self._by_digest(reference, record.get("digests", {}).get(reference, ""))

    def operator(self, version: str, base: str, pip_args: str) -> str:
        """Build the operator's image of what Git knows of this checkout, push it, and return its name by digest.

        :param base: the base image; a tag beside a digest isn't taken by every builder.
        :raises NotInEffect: the engine fails.
        :raises Refused: nobody says the digest.
        """
        reference = f"{self._registry}/{bundle.PACKAGE}:{version}"
        built = {}
        with tempfile.TemporaryDirectory(prefix="kubegpu-") as context:
            sources(Path(context))
            for platform in self._platforms:
                archive = str(self._images / f"{bundle.PACKAGE}-{version}-{platform.partition('/')[2]}.tar")
                arguments = {"BASE": re.sub(r":[^:/@]+(?=@)", "", base), "PIP_ARGS": pip_args}
                recipe = f"{context}/{CONTAINERFILE}"
                fresh = f"{archive}.new"
                Path(fresh).unlink(missing_ok=True)
                self._engine.build(recipe, context, platform, arguments, EPOCH, reference, fresh)
                archives.normalize(fresh, archive, reference, EPOCH, MARK)
                Path(fresh).unlink()
                built[platform] = archive
        return self._by_digest(reference, self._engine.push(reference, built))

    def files(self, name: str, tag: str, files: t.Mapping[str, bytes], labels: t.Mapping[str, str]) -> str:
        """Push an image of files alone, and return its name by digest.

        :raises Refused: nobody says the digest.
        """
        reference = f"{self._registry}/{name}:{tag}"
        written = {}
        for platform in self._platforms:
            path = self._images / f"{name}-{tag}-{platform.partition('/')[2]}.tar"
            files_image.write(str(path), reference, platform, files, labels, EPOCH)
            written[platform] = str(path)
        return self._by_digest(reference, self._engine.push(reference, written))

    @staticmethod
    def _by_digest(reference: str, digest: str) -> str:
        if not digest:
            raise Refused(f"{reference} was pushed, and the engine says no digest: try another --engine")
        return f"{reference.rpartition(':')[0]}@{digest}"


def sources(target: Path) -> None:
    """Copy what the operator's image is built of: the files that Git knows, and a program that was built beforehand.

    :raises Refused: this is no checkout.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CONTEXT]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise Refused(f"the operator's image is built from a checkout of Git: {done.stderr.decode().strip()}")
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    # For places without the internet: wheels, and the engine. Git knows none of them.
    names |= {path.relative_to(ROOT).as_posix() for path in (ROOT / BEFOREHAND).rglob("*") if path.is_file()}
    for name in sorted(names):
        source = ROOT / name
        if source.exists() or source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def contents(folder: Path) -> dict[str, bytes]:
    """Return a folder's files by their paths in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def publish(publisher: Publisher, release: bundle.Release, older: t.Sequence[bundle.Json], out: Path) -> str:
    """Write bundle, catalog and what installs them, push the first two, and return the catalog's image by digest.

    :param release: with all of its images.
    :param older: bundles of earlier releases that the catalog keeps.
    """
    bundle.write_bundle(release, out)
    bundled = publisher.files(
        f"{bundle.PACKAGE}-bundle", f"v{release.version}", contents(out / "bundle"), bundle.labels()
    )
    csv = yaml.safe_load((out / "bundle" / "manifests" / bundle.VERSION_FILE).read_text())
    parts = bundle.catalog(csv, bundled, older)
    name, _colon, tag = release.catalog.rpartition("/")[2].partition(":")
    files = {f"configs/{bundle.CATALOG_FILE}": bundle.documents(parts).encode()}
    catalog = publisher.files(name, tag, files, bundle.CATALOG_LABELS)
    # Only now: the folder may hold the catalog of the release before, which a next try needs.
    bundle.write_catalog(parts, out)
    bundle.write_install(release, out)
    return catalog


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", required=True, help="the beginning of the images' names: HOST/FOLDER")
    parser.add_argument("--servers-image", default="", metavar="NAME@sha256:...", help="the servers' image, not built")
    parser.add_argument("--operator-image", default="", metavar="NAME@sha256:...", help="the operator's, not built")
    parser.add_argument(
        *("--image",), action="append", default=[], type=bundle.pair, metavar="NAME=IMAGE", help="another, by digest"
    )
    parser.add_argument(
        "--older", type=Path, help="the catalog.yaml of the release before: the new one keeps its bundles"
    )
    parser.add_argument("--catalogs", default="openshift-marketplace", help="the namespace of global catalogs")
    parser.add_argument("--engine", default="auto", choices=["auto", *ENGINES])
    parser.add_argument("--platform", action="append", choices=PLATFORMS, help="by default all")
    parser.add_argument("--no-tls-verify", action="store_true", help="take any certificate of the registry")
    parser.add_argument("--base", default="", help="image_build_base, such as a mirror's")
    parser.add_argument("--pip-args", default="", help="image_build_pip_args, such as --index-url of a mirror")
    parser.add_argument("--version", default=bundle.version_of())
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "operator")
    return parser


def main() -> int:
    try:
        print(work(arguments().parse_args()))
    except (Refused, ShareError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def base_of_pins() -> str:
    """Return the base image of meta/pins.yml, by digest."""
    pin = yaml.safe_load((ROOT / "meta" / "pins.yml").read_text())["images"]["base"]
    return f"{pin['url']}@{pin['digest']}"


def work(given: argparse.Namespace) -> str:
    """Do what the command line asks for, and return what to do next.

    :raises Refused: it can't be done; before anything was pushed where that can be told.
    """
    if not REGISTRY.fullmatch(given.registry):
        raise Refused(f"--registry is {given.registry!r}: give the beginning of images' names, as HOST/FOLDER")
    known = {**dict(given.image), bundle.SERVERS: given.servers_image, "operator": given.operator_image}
    bundle.check_images({name: image for name, image in known.items() if image})
    older = bundle.bundles_of(given.older) if given.older else []
    if given.version in {bundle.version_in(release) for release in older}:
        raise Refused(f"{given.older} has version {given.version} already: raise the version, or leave --older out")
    bundle.rules_of("rights.yml")
    platforms = given.platform or list(PLATFORMS)
    system = RealSystem(run_command=run_command)
    building = [] if given.servers_image and given.operator_image else platforms
    engine = Engine(system, choose(system, given.engine, building), not given.no_tls_verify)
    out = Path(os.path.abspath(given.out))
    publisher = Publisher(given.registry, out, engine, platforms)
    base = given.base or base_of_pins()
    servers = given.servers_image or publisher.servers(given.version, base, given.pip_args)
    operator = given.operator_image or publisher.operator(given.version, base, given.pip_args)
    release = bundle.Release(
        given.version,
        operator,
        servers,
        dict(given.image),
        # The tag that a cluster polls stays the same with each release.
        f"{given.registry}/{bundle.PACKAGE}-catalog:{bundle.CHANNEL}",
        given.catalogs,
    )
    release.check()
    catalog = publish(publisher, release, older, out)
    return f"{catalog}\nTo install it: kubectl apply -f {out / 'install'}/..., see docs/howto/operator.md"


if __name__ == "__main__":
    sys.exit(main())
