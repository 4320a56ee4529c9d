# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the image's bill of materials (CycloneDX 1.6, JSON): the servers, their Python packages, and those of the base.

The same content gives the same bytes: nothing in it is random or taken from the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.exception import CycloneDxException
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")
OURS = "gpushare-servers"


def normal(name: str) -> str:
    """Normalize a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_components(site: Path) -> Iterator[Component]:
    """List the Python packages in a folder."""
    for found in importlib.metadata.distributions(path=[str(site)]):
        about = found.metadata
        name = normal(about["Name"])
        purl = PackageURL("pypi", name=name, version=found.version)
        component = Component(
            name=name,
            version=found.version,
            purl=purl,
            bom_ref=str(purl),
            type=ComponentType.APPLICATION if name == OURS else ComponentType.LIBRARY,
            description=about.get("Summary") or None,
        )
        declared = about.get("License-Expression") or about.get("License") or ""
        if declared and len(declared) < 100:
            # Text that is no expression is left out; tools for licences read the package itself.
            with contextlib.suppress(CycloneDxException, ValueError):
                component.licenses.add(LicenseFactory().make_from_string(declared))
        yield component


def debian_components(status: str, distribution: str) -> Iterator[Component]:
    """List the packages that are installed according to dpkg's status."""
    for text in re.split(r"\n\n+", status):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", text, re.MULTILINE))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        qualifiers = {"arch": fields["Architecture"], "distro": distribution}
        purl = PackageURL("deb", "debian", fields["Package"], fields["Version"], qualifiers)
        yield Component(
            name=fields["Package"],
            version=fields["Version"],
            purl=purl,
            bom_ref=str(purl),
            type=ComponentType.LIBRARY,
        )


def bill(site: Path, status: str, os_release: str, base: str, epoch: int) -> str:
    """Make the document.

    :param site: the folder with the Python packages.
    :param status: dpkg's status of the base.
    :param os_release: the base's /usr/lib/os-release.
    :param base: the base image's name.
    :param epoch: the document's timestamp, in seconds since 1970.
    :returns: the document as JSON.
    """
    release = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    distribution = f"{release.get('ID', 'unknown')}-{release.get('VERSION_ID', 'unknown')}"
    components = {one.bom_ref.value: one for one in python_components(site)}
    [ours] = [one for one in components.values() if one.name == OURS]
    del components[ours.bom_ref.value]
    components |= {one.bom_ref.value: one for one in debian_components(status, distribution)}
    bom = Bom()
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(epoch, datetime.UTC)
    bom.metadata.component = ours
    bom.metadata.properties.add(Property(name="kubegpu.share:base", value=base))
    for one in components.values():
        bom.components.add(one)
    bom.register_dependency(ours, components.values())
    names = "\n".join(sorted([ours.bom_ref.value or "", base, *map(str, components)]))
    bom.serial_number = uuid.uuid5(NAMESPACE, hashlib.sha256(names.encode()).hexdigest())
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--dpkg-status", type=Path, required=True)
    parser.add_argument("--os-release", type=Path, required=True)
    parser.add_argument("--base", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    given = parser.parse_args()
    status, release = given.dpkg_status.read_text(), given.os_release.read_text()
    sys.stdout.write(bill(given.site, status, release, given.base, given.epoch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
