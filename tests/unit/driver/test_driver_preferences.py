# SPDX-License-Identifier: GPL-3.0-or-later
"""apt with the preferences of role driver: it holds back the other source's driver, and nothing else."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._packages.apt import preferences
from lab_repository import apt_root, output, skip_without
from package_sets import package_set
from test_driver_choice import VARS, chosen, node

VERSION = "580.95.05"
KERNEL = "6.8.0-1028.31"
FLAVOURS = ("nvidia", "nvidia-64k", "nvidia-hwe", "nvidia-64k-hwe", "nvidia-lowlatency", "generic")
KERNELS = [
    *(f"linux-{part}-6.8.0-1028-{flavour}" for part in ("image", "headers", "modules") for flavour in FLAVOURS),
    *("linux-headers-nvidia", "linux-image-nvidia", "linux-image-nvidia-hwe-24.04", "linux-nvidia", "linux-nvidia-64k"),
    *("linux-modules-extra-6.8.0-1028-nvidia", "linux-nvidia-headers-6.8.0-1028", "linux-tools-6.8.0-1028-nvidia"),
    "linux-firmware",
]
DRIVER = [
    *("libnvidia-compute-580", "libnvidia-compute-580-server", "libnvidia-egl-wayland1", "nvidia-compute-utils-580"),
    *("nvidia-dkms-580", "nvidia-driver-580", "nvidia-fabricmanager-580", "nvidia-firmware-580-580.95.05"),
    *("nvidia-headless-no-dkms-580-server-open", "nvidia-kernel-common-580", "nvidia-utils-580"),
    *("nvidia-settings", "nvidia-modprobe", "nvidia-persistenced", "xserver-xorg-video-nvidia-580"),
]
OTHERS = ["libcudart12", "ubuntu-drivers-common"]
TOOLKIT = ["libnvidia-container-tools", "libnvidia-container1", "nvidia-container-toolkit"]
# Name, Origin, Label, and the packages' versions of each repository.
REPOSITORIES = {
    "archive": (
        "Ubuntu",
        "Ubuntu",
        [
            *((kernel, KERNEL) for kernel in KERNELS),
            *((one, f"{version}-0ubuntu1") for one in DRIVER for version in (VERSION, "590.44.01")),
            *((other, "12.0") for other in OTHERS),
            *((one, "1.0-1") for one in TOOLKIT),
        ],
    ),
    "cuda": (
        "NVIDIA",
        "NVIDIA CUDA",
        [(one, f"{version}-1ubuntu1") for one in (*DRIVER, "cuda-drivers") for version in (VERSION, "590.48.01")],
    ),
    "container": ("https://nvidia.github.io/libnvidia-container", "toolkit", [(one, "1.20.1-1") for one in TOOLKIT]),
}


@pytest.fixture
def apt(tmp_path: Path) -> list[str]:
    """apt's options for a root of its own with the three repositories."""
    skip_without("apt-get", "apt-cache")
    words = apt_root(tmp_path)
    lines = []
    for name, (origin, label, packages) in REPOSITORIES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "Packages").write_text(
            "\n".join(
                f"Package: {package}\nVersion: {version}\nArchitecture: all\nFilename: ./{package}.deb\nSize: 1\n"
                f"SHA256: {'0' * 64}\nDescription: stand-in\n"
                for package, version in packages
            )
        )
        # No checksums: apt reads Packages because the source is trusted.
        (tmp_path / name / "Release").write_text(f"Origin: {origin}\nLabel: {label}\nSuite: stable\n")
        lines.append(f"deb [trusted=yes] file:{tmp_path / name} ./\n")
    (tmp_path / "etc" / "sources.list").write_text("".join(lines))
    output("apt-get", *words, "-qq", "update")
    return words


def candidates(apt: list[str], *packages: str) -> dict[str, str]:
    """The version that apt would install of each package, ``(none)`` for none."""
    out = output("apt-cache", *apt, "policy", *packages)
    found = dict(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (.*)$", out, re.MULTILINE))
    assert set(found) == set(packages)
    return found


@pytest.mark.parametrize("release", ["ubuntu-20.04", "ubuntu-22.04", "ubuntu-24.04"])
@pytest.mark.parametrize(("source", "kept"), [("repository", "1ubuntu1"), ("distribution", "0ubuntu1")])
def test_kernels_stay_candidates_and_the_other_sources_driver_does_not(
    apt: list[str], tmp_path: Path, release: str, source: str, kept: str
) -> None:
    before = candidates(apt, *KERNELS, *OTHERS, *TOOLKIT)
    pins = chosen(node(release, "turing"), source=source, version=VERSION)["pins"]
    (tmp_path / "etc" / "preferences.d" / "kubegpu-driver.pref").write_text(
        preferences(package_set(name="driver", pins=pins))
    )
    assert candidates(apt, *KERNELS, *OTHERS, *TOOLKIT) == before
    assert set(before.values()) == {KERNEL, "12.0", "1.20.1-1"}
    assert candidates(apt, *DRIVER) == dict.fromkeys(DRIVER, f"{VERSION}-{kept}")
    # Of the other source not even an older or newer version is a candidate.
    other = {"1ubuntu1": "0ubuntu1", "0ubuntu1": "1ubuntu1"}[kept]
    policy = output("apt-cache", *apt, "policy", *DRIVER)
    held = re.findall(rf"^ +[*]* *\S+-{other} (-?[0-9]+)$", policy, re.MULTILINE)
    assert held == ["-1"] * 2 * len(DRIVER)
    wanted = [
        "linux-image-nvidia",
        "linux-headers-6.8.0-1028-nvidia-64k",
        "nvidia-utils-580",
        "nvidia-container-toolkit",
    ]
    simulated = output("apt-get", *apt, "-s", "-y", "--no-install-recommends", "install", *wanted)
    assert {line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")} == set(wanted)


def test_no_pattern_of_a_pin_matches_a_kernel() -> None:
    patterns = [
        pattern
        for path in sorted(VARS.glob("*.yml"))
        for source in (yaml.safe_load(path.read_text()).get("__driver_catalog") or {}).get("sources", {}).values()
        for pin in source.get("pins") or ()
        for pattern in pin["package"].split()
    ]
    assert len(patterns) > 30
    assert [
        pattern for pattern in patterns if pattern[0] in "*?[/" or "linux-".startswith(pattern.partition("*")[0])
    ] == []
    assert not any(fnmatch.fnmatchcase(kernel, pattern) for kernel in KERNELS for pattern in patterns)
