# SPDX-License-Identifier: GPL-3.0-or-later
"""Write meta/airgap.yml, the list of all that the collection fetches: ``make airgap``, or compare it with --check.

Versions, digests and addresses come from meta/pins.yml, meta/repositories.yml, the roles' defaults, role driver's
catalogues, the lock files of the servers' image, and what the collection requires of its controller. Here stands what
no other file says: when a thing is needed, which variable takes its place elsewhere, and its licence.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import typing as t
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".collections"), str(ROOT), str(ROOT / ".ci")]

from ansible_collections.kubegpu.share.plugins.module_utils._driver.catalog import SECTIONS  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._packages.names import HEADERS_OF_KERNELS  # noqa: E402
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import dedicated  # noqa: E402
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.table import load  # noqa: E402
from ansible_collections.kubegpu.share.plugins.plugin_utils._pins import table  # noqa: E402
from pins import Plain  # noqa: E402

LIST = "meta/airgap.yml"
HEAD = """\
---
# All that the collection fetches, or has a node or a cluster fetch. `make airgap` writes this file from meta/pins.yml,
# meta/repositories.yml, the roles' defaults, role driver's catalogues, the lock files of the servers' image and the
# collection's requirements: edit those, or .ci/airgap.py.
# when: the conditions, of which all have to hold, each with its values. backend and scheduler are the cluster's,
# kubernetes its minor version, openshift whether it is one, software who installs the driver of some nodes, built
# whether the servers' image is built, helm whether a chart is deployed, module whether the node compiles the kernel
# module; the others are variables of roles. Empty: always.
# variables: those that take another place, the first before the others. What has none comes from a mirror of the
# distribution, or is installed on the controller. path: where the last variable, values of a chart, has the image.
# {name} in a text is a variable of a role, and {kubernetes}, {upstream} and {openshift} are the cluster's versions; in
# names of packages the words are those of the filter driver_choice.
# What a package needs besides, the node's own package manager finds in its lists.
"""
APACHE, BSD, GPL = "Apache-2.0", "BSD-3-Clause", "GPL-3.0-or-later"
DISTRIBUTION = "those of the distribution"
NVIDIA = "NVIDIA's driver licence, which limits passing it on; open kernel modules: MIT or GPL-2.0"
NVIDIA_IMAGE = "NVIDIA's licences, as the image has them"
BUILT = {"backend": ["gpushare"], "built": [True]}
GFD, EXPORTER = "nvidia_device_plugin_gfd", "nvidia_device_plugin_dcgm_exporter"
NFD_IMAGE, EXPORTER_IMAGE = "nvidia_device_plugin_nfd_image", "nvidia_device_plugin_dcgm_exporter_image"
VALUES, EXPORTER_VALUES = "nvidia_device_plugin_values", "nvidia_device_plugin_dcgm_exporter_values"
Row = dict[str, t.Any]
# Characters of the longest list or mapping that stands in one line.
LINE = 110


class Short(Plain):
    """Writes what fits in a line in one, and all else in lines of their own."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def represent_node(self, tag: str, value: t.Any) -> yaml.Node:
        parts = [*value, *(value.values() if isinstance(value, dict) else ())]
        scalars = not any(isinstance(each, (list, dict)) for each in parts)
        short = scalars and sum(len(str(each)) + 4 for each in parts) <= LINE
        kind = self.represent_mapping if isinstance(value, dict) else self.represent_sequence
        return kind(tag, value.items() if isinstance(value, dict) else value, flow_style=short)


Short.add_representer(list, lambda dumper, value: dumper.represent_node("tag:yaml.org,2002:seq", value))
Short.add_representer(dict, lambda dumper, value: dumper.represent_node("tag:yaml.org,2002:map", value))


def image(reference: str, when: Row, variables: t.Sequence[str], licence: str, **more: t.Any) -> Row:
    """Return an image without a pin: one whose tag is a version of the cluster, or that a variable names."""
    known = {"reference": reference, "digest": "", "platforms": {}, "made_by": "", "path": ""}
    return {**known, **more, "when": when, "variables": list(variables), "licence": licence}


# What the table of pins doesn't say of an image: when, variables, licence, and for values of a chart the path in them.
PINNED: dict[str, tuple[Row, tuple[str, ...], str, str]] = {
    "base": (BUILT, ("image_build_base",), "Python: PSF-2.0; Debian's packages: their own", ""),
    "hami": ({"backend": ["hami"]}, ("hami_image",), APACHE, ""),
    "nvidia-device-plugin": ({"backend": ["nvidia"]}, ("nvidia_device_plugin_image",), APACHE, ""),
    "node-feature-discovery": ({"backend": ["nvidia"], GFD: [True]}, (NFD_IMAGE, VALUES), APACHE, "nfd.image"),
    "dcgm-exporter": (
        {"backend": ["nvidia"], EXPORTER: [True]},
        (EXPORTER_IMAGE, EXPORTER_VALUES),
        APACHE,
        "image",
    ),
    "sandbox-device-plugin": ({"backend": ["kata"]}, ("sandbox_device_plugin_kata_image",), NVIDIA_IMAGE, ""),
    "kubevirt-gpu-device-plugin": (
        {"sandbox_device_plugin_kind": ["kubevirt"]},
        ("sandbox_device_plugin_kubevirt_image",),
        NVIDIA_IMAGE,
        "",
    ),
}
OPERATED = {"software": ["gpu_operator"], "openshift": [False]}
# Of the GPU Operator, by its chart; on OpenShift its catalogue names them.
PINNED |= {
    name: (OPERATED, ("gpu_operator_registry",), NVIDIA_IMAGE, "")
    for name, pin in table.section("images").items()
    if pin["chart"] == "gpu-operator"
}
# Images that only a variable names; without it there is none, or one that is here already.
NAMED = {
    "gpushare_extender_image": {"backend": ["gpushare"]},
    "gpushare_device_plugin_image": {"backend": ["gpushare"]},
    "acceptance_image": {},
    "acceptance_program_image": {},
    "verify_canary_image": {},
    "switch_canary_image": {},
}
CHARTS = {
    "hami": ({"backend": ["hami"]}, ("hami_chart_repo_url", "hami_chart_ref")),
    "nvidia-device-plugin": (
        {"backend": ["nvidia"]},
        ("nvidia_device_plugin_chart_repository", "nvidia_device_plugin_chart"),
    ),
    "dcgm-exporter": (
        {"backend": ["nvidia"], EXPORTER: [True]},
        ("nvidia_device_plugin_dcgm_exporter_chart_repository", "nvidia_device_plugin_dcgm_exporter_chart"),
    ),
}
CHARTS["gpu-operator"] = (OPERATED, ("gpu_operator_chart_repository", "gpu_operator_chart"))
DRIVER_KEY = ("driver_repo_key_url", "driver_repo_key_sha256")
TOOLKIT_KEY = ("toolkit_repo_key_url", "toolkit_repo_key_sha256")
LICENCES = {"nvidia-ml-py": BSD, "kubernetes": APACHE, "orjson": "MPL-2.0, Apache-2.0 or MIT", "ansible-core": GPL}
REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*(>=[\w.]+)\s*$", re.MULTILINE)
LOCKED = re.compile(r"^([a-z0-9][\w.-]*)==([\w.]+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", re.MULTILINE)


def read(root: Path, path: str) -> t.Any:
    return yaml.safe_load((root / path).read_text(encoding="utf-8"))


def images(root: Path) -> dict[str, Row]:
    """Return the rows of images."""
    scheduler = read(root, "roles/scheduler/defaults/main.yml")
    hami, share = read(root, "roles/hami/defaults/main.yml"), read(root, "roles/gpushare/defaults/main.yml")
    rows = {}
    for name, pin in table.section("images").items():
        if pin["chart"] and pin["chart"] not in table.section("charts"):
            # No role deploys it.
            continue
        when, variables, licence, path = PINNED[name]
        more = {"digest": pin["digest"], "platforms": pin["platforms"], "path": path}
        rows[name] = image(pin["url"], when, variables, licence, **more)
    names = ("gpushare_image", "scheduler_extender_image", "gpushare_image_archive")
    made = "playbook kubegpu.share.build_images, or a release's archive"
    rows["gpushare"] = image(share["gpushare_image"], {"backend": ["gpushare"]}, names, GPL, made_by=made)
    own, of_hami = scheduler["scheduler_dedicated_image"], hami["hami_kube_scheduler_image"]
    when, variable = {"scheduler": ["dedicated"]}, "scheduler_dedicated_image"
    # Kubernetes' own release where a distributor's has a number of its own; HAMi's role takes the cluster's.
    rows["kube-scheduler"] = image(f"{own}:v{{upstream}}", when, (variable,), APACHE)
    when, variable = {"backend": ["hami"]}, "hami_kube_scheduler_image"
    rows["hami-kube-scheduler"] = image(f"{of_hami}:v{{kubernetes}}", when, (variable,), APACHE)
    for minor, tag in sorted(dedicated.TAGS.items()):
        # The newest that isn't newer than the cluster, and at most one minor version older.
        later = [minor, *({minor + 1} - set(dedicated.TAGS))]
        when = {"scheduler": ["openshift"], "kubernetes": [f"1.{each}" for each in later]}
        rows[f"scheduler-plugins-1.{minor}"] = image(
            f"{dedicated.REPOSITORY}:{tag}", when, ("scheduler_openshift_image",), APACHE
        )
    named = dict(NAMED)
    if (root / "roles/gpu_operator").is_dir():
        named["gpu_operator_nfd_image"] = {**OPERATED, "openshift": [True]}
    for variable, when in named.items():
        rows[variable] = image("", when, (variable,), "that of who made it")
    return rows


def charts() -> dict[str, Row]:
    """Return the rows of charts."""
    rows = {}
    for name, pin in table.section("charts").items():
        when, variables = CHARTS[name]
        known = {field: pin[field] for field in ("url", "version", "sha256")}
        rows[name] = {**known, "when": when, "variables": list(variables), "licence": APACHE}
    return rows


def catalogs(root: Path) -> dict[str, Row]:
    """Return role driver's catalogues by the names of their files."""
    paths = sorted((root / "roles/driver/vars").glob("*_*.yml"))
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["__driver_catalog"] for path in paths}


def package_names(row: Row) -> list[str]:
    """Return all names of one row of a catalogue."""
    lists = [row.get(key) or () for key in ("driver", "open", "proprietary", "fabric", "nvlink5")]
    return [name for names in (*lists, *(row.get("per_kernel") or {}).values()) for name in names]


def folders_of(value: t.Any) -> dict[str, list[str]]:
    """Return a catalogue's folders of repositories by the ids of distributions; ``*`` is for the others."""
    by_id = value if isinstance(value, dict) else {"*": value}
    return {name: [each] if isinstance(each, str) else list(each) for name, each in by_id.items()}


def repositories(section: str, folders: t.Collection[str]) -> dict[str, Row]:
    """Return the repositories in these folders: address, architecture and key."""
    return {
        name: {"url": row["url"], "arch": row["arch"], "key": f"{name.partition('/')[0]}/{row['key']}"}
        for name, row in table.section(section).items()
        if name.partition("/")[0] in folders and row["url"]
    }


def packages(root: Path) -> dict[str, Row]:
    """Return the rows of packages: the driver's by source, headers, compilers, the toolkit's, and repositories'."""
    rows: dict[str, Row] = {}

    def add(
        key: str, catalog: Row, names: t.Iterable[str], when: Row, licence: str = DISTRIBUTION, **more: t.Any
    ) -> None:
        known = {"distribution": catalog["name"], "manager": catalog["manager"], "folders": {}, "repositories": {}}
        names = list(dict.fromkeys(names))
        rows[key] = {**known, "names": names, "variables": [], **more, "when": when, "licence": licence}

    for stem, catalog in catalogs(root).items():
        for name, source in catalog["sources"].items():
            folders = folders_of(source.get("folder") or catalog["folder"])
            held = repositories(SECTIONS[name], {folder for each in folders.values() for folder in each})
            when = {"driver_source": ["repository", "packages"] if name == "repository" else [name]}
            add(
                f"driver/{stem}/{name}",
                catalog,
                (each for row in source["rows"] for each in package_names(row)),
                {**when, "driver_state": ["present"]},
                NVIDIA,
                folders=folders if held else {},
                repositories=held,
                # The distribution's own packages come from its mirror.
                variables=["driver_repo_url", "driver_packages_dir"] if held else [],
            )
            needed = [each for row in source.get("prerequisites") or () for each in enabling(row)]
            if needed:
                more = {**when, "driver_manage_prerequisites": ["install"]}
                add(f"repositories/{stem}/{name}", catalog, (each for each in needed if "://" not in each), more)
        names = [name for row in catalog["headers"] for key in ("each", "newest") for name in row.get(key) or ()]
        follow = (
            [f"{headers}{{flavour}}" for headers in HEADERS_OF_KERNELS.values()] if catalog["manager"] == "apt" else []
        )
        built = {"module": ["built"]}
        add(f"headers/{stem}", catalog, [*names, *follow], {**built, "driver_install_headers": ["auto"]})
        add(f"compilers/{stem}", catalog, catalog["build"], built)
    toolkit = read(root, "roles/toolkit/defaults/main.yml")
    for manager, form in (("apt", "deb/"), ("rpm", "rpm/")):
        held = {
            key: {"url": row["url"], "arch": row["arch"], "key": f"libnvidia-container/{row['key']}"}
            for key, row in table.section("toolkit").items()
            if key.startswith(form)
        }
        add(
            f"toolkit/{manager}",
            {"name": f"every one with {manager}", "manager": manager},
            (f"{name}={{toolkit_version}}" for name in toolkit["toolkit_packages"]),
            {"toolkit_source": ["repository", "packages"], "toolkit_state": ["present"]},
            APACHE,
            repositories=held,
            variables=["toolkit_repo_url", "toolkit_source_dir"],
        )
    return rows


def enabling(row: Row) -> list[str]:
    """Return the packages, by name or address, that the commands of a prerequisite install."""
    found = []
    for commands in row["commands"].values():
        for command in commands:
            found += command[command.index("install") + 1 :] if "install" in command else []
    return found


def files(root: Path) -> dict[str, Row]:
    """Return the rows of files: keys of repositories, packages by their addresses, programs of the controller."""
    rows: dict[str, Row] = {}
    for name, pin in table.section("keys").items():
        of_toolkit = name in {f"libnvidia-container/{row['key']}" for row in table.section("toolkit").values()}
        source = "toolkit_source" if of_toolkit else "driver_source"
        rows[f"key/{name}"] = {
            **{field: pin[field] for field in ("url", "sha256", "fingerprint")},
            "when": {source: ["repository"]},
            "variables": list(TOOLKIT_KEY if of_toolkit else DRIVER_KEY),
            "licence": "none: a public key",
        }
    for stem, catalog in catalogs(root).items():
        for source in catalog["sources"].values():
            for url in (url for row in source.get("prerequisites") or () for url in enabling(row) if "://" in url):
                when = {"driver_source": ["repository"], "driver_manage_prerequisites": ["install"]}
                more = {"when": when, "variables": ["driver_manage_prerequisites"], "licence": DISTRIBUTION}
                rows[f"package/{stem}/{url.rpartition('/')[2]}"] = {"url": url, "sha256": "", "fingerprint": "", **more}
    helm = table.section("programs")["helm"]
    rows["program/helm"] = {
        **{"url": helm["url"], "sha256": "", "fingerprint": ""},
        "digests": {name: helm[name] for name in table.ARCHITECTURES if helm[name]},
        "when": {"helm": [True]},
        "variables": [
            f"{role}_helm"
            for role in ("hami", "nvidia_device_plugin", "gpu_operator")
            if (root / f"roles/{role}").is_dir()
        ],
        "licence": APACHE,
    }
    rows["runfile"] = {
        **{"url": "", "sha256": "", "fingerprint": ""},
        "when": {"driver_source": ["runfile"]},
        "variables": ["driver_runfile", "driver_runfile_sha256"],
        "licence": NVIDIA,
    }
    return {name: {"digests": {}, **row} for name, row in rows.items()}


def wheels(root: Path) -> dict[str, Row]:
    """Return the rows of Python packages: those that the servers' image is built from, and the controller's."""
    rows: dict[str, Row] = {}
    for file in ("requirements", "build-requirements"):
        text = (root / f"images/gpushare/{file}.lock").read_text(encoding="utf-8")
        for name, version, hashes in LOCKED.findall(text):
            key = f"image/{name}"
            if key in rows:
                key = f"image/{name}-{version}"
            rows[key] = {
                **{"name": name, "version": f"=={version}", "sha256": re.findall("[0-9a-f]{64}", hashes)},
                **{"when": BUILT, "variables": ["image_build_pip_args"], "licence": LICENCES.get(name, "its own")},
            }
    oldest = read(root, "meta/runtime.yml")["requires_ansible"]
    asked = [("ansible-core", oldest), *REQUIREMENT.findall((root / "meta/ee-requirements.txt").read_text())]
    for name, version in asked:
        more = {"when": {}, "variables": [], "licence": LICENCES.get(name, "its own")}
        rows[f"controller/{name}"] = {"name": name, "version": version, "sha256": [], **more}
    return rows


def collections(root: Path) -> dict[str, Row]:
    """Return the rows of Ansible collections: this one, and those that it depends on."""
    galaxy = read(root, "galaxy.yml")
    found = {f"{galaxy['namespace']}.{galaxy['name']}": f"=={galaxy['version']}", **galaxy["dependencies"]}
    return {name: {"version": version, "when": {}, "variables": [], "licence": GPL} for name, version in found.items()}


def operators(root: Path) -> dict[str, Row]:
    """Return the rows of operators in OpenShift's catalogues."""
    rows = {"openshift-secondary-scheduler-operator": ("redhat", "scheduler_openshift", "scheduler_openshift")}
    when = {"openshift-secondary-scheduler-operator": {"scheduler": ["openshift"]}}
    if (root / "roles/gpu_operator").is_dir():
        rows["gpu-operator-certified"] = ("certified", "gpu_operator", "gpu_operator")
        rows["nfd"] = ("redhat", "gpu_operator_nfd", "gpu_operator")
        when |= {name: {**OPERATED, "openshift": [True]} for name in ("gpu-operator-certified", "nfd")}
    return {
        name: {
            "catalog": f"registry.redhat.io/redhat/{catalog}-operator-index:v{{openshift}}",
            "channel": f"{{{prefix}_channel}}",
            "when": when[name],
            "variables": [f"{prefix}_source", f"{space}_source_namespace"],
            "licence": "Red Hat's subscription" if catalog == "redhat" else NVIDIA_IMAGE,
        }
        for name, (catalog, prefix, space) in rows.items()
    }


def made(root: Path = ROOT) -> str:
    """Return the text of the list."""
    found = {
        "images": images(root),
        "charts": charts(),
        "packages": packages(root),
        "files": files(root),
        "wheels": wheels(root),
        "collections": collections(root),
        "operators": operators(root),
    }
    text = HEAD + yaml.dump(found, Dumper=Short, sort_keys=False, width=1000)
    load(text, LIST)
    return text


def main(arguments: t.Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Write the list of all that the collection fetches.")
    parser.add_argument("--check", action="store_true", help="compare only, and fail where it differs")
    given = parser.parse_args(arguments)
    text, path = made(root), root / LIST
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if text == before:
        return 0
    if not given.check:
        path.write_text(text, encoding="utf-8")
        return 0
    lines = list(difflib.unified_diff(before.splitlines(), text.splitlines(), LIST, "made now", lineterm="", n=1))
    print("\n".join([*lines[:40], f"{LIST} isn't current: run make airgap."]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
