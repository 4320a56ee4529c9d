# SPDX-License-Identifier: GPL-3.0-or-later
"""The image's bill of materials: complete, reproducible, valid CycloneDX."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
from cyclonedx.model.bom import Bom

SCRIPT = Path(__file__).resolve().parents[3] / "images" / "gpushare" / "sbom.py"
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: arm64
Version: 2.36-9+deb12u14
Description: GNU C Library
 more of it

Package: gone
Status: deinstall ok config-files
Architecture: arm64
Version: 1

Package: adduser
Status: install ok installed
Architecture: all
Version: 3.134
"""
RELEASE = 'PRETTY_NAME="Debian"\nVERSION_ID="12"\nID=debian\n'
EPOCH = 1767225600


@pytest.fixture(scope="module")
def sbom():
    specification = importlib.util.spec_from_file_location("gpushare_sbom", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path):
    packages = [
        ("gpushare_servers", "1.1.0", "License-Expression: GPL-3.0-or-later"),
        ("typing_extensions", "4.16.0", "License-Expression: PSF-2.0"),
        ("grpcio", "1.85.1", "License: Apache License 2.0"),
        ("odd.Name", "1", "License: " + "many words " * 50),
    ]
    for name, version, licence in random.sample(packages, len(packages)):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{licence}\n")
    return tmp_path


def test_the_bill_lists_all_packages_of_the_image(sbom, site):
    document = json.loads(sbom.bill(site, STATUS, RELEASE, "python:3.13@sha256:ab", EPOCH))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/gpushare-servers@1.1.0"
    assert document["metadata"]["timestamp"] == "2026-01-01T00:00:00+00:00"
    assert {"name": "kubegpu.share:base", "value": "python:3.13@sha256:ab"} in document["metadata"]["properties"]
    assert {component["purl"] for component in document["components"]} == {
        "pkg:pypi/typing-extensions@4.16.0",
        "pkg:pypi/grpcio@1.85.1",
        "pkg:pypi/odd-name@1",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=arm64&distro=debian-12",
        "pkg:deb/debian/adduser@3.134?arch=all&distro=debian-12",
    }
    [root] = [
        dependency for dependency in document["dependencies"] if dependency["ref"] == "pkg:pypi/gpushare-servers@1.1.0"
    ]
    assert len(root["dependsOn"]) == 5
    [typed] = [component for component in document["components"] if component["name"] == "typing-extensions"]
    assert typed["licenses"] == [{"license": {"id": "PSF-2.0"}}]
    assert len(Bom.from_json(document).components) == 5, "the library reads it back"


def test_the_bill_is_reproducible(sbom, site):
    first = sbom.bill(site, STATUS, RELEASE, "b", EPOCH)
    assert sbom.bill(site, STATUS, RELEASE, "b", EPOCH) == first
    assert sbom.bill(site, STATUS.replace("3.134", "3.135"), RELEASE, "b", EPOCH) != first
    numbers = {json.loads(sbom.bill(site, STATUS, RELEASE, base, EPOCH))["serialNumber"] for base in ("b", "c")}
    assert len(numbers) == 2
