# SPDX-License-Identifier: GPL-3.0-or-later
"""What the built collection brings for ansible-builder, Galaxy's importer and pip.

The long tests run the real tools, in a virtual environment of their own.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from lab.paths import cache_root

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
import built_collection  # noqa: E402
import oldest  # noqa: E402

TOOLS = ("ansible-builder==3.2.0", "galaxy-importer==0.4.44")
# Module names of packages that have another name.
MODULES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml"}
# On GPU nodes only, and a client that can be used instead of kubernetes.
NOT_REQUIRED = {"grpc", "openshift"}
OURS = {"ansible", "ansible_collections"}


def requirements() -> dict[str, Requirement]:
    lines = (ROOT / "meta/ee-requirements.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {one.name: one for one in found}


def test_the_oldest_versions_can_be_tested():
    """Each is named where the collection promises it, and can be had by pip."""
    packages, community = oldest.requirements()
    versions = dict(package.split("==") for package in packages)
    for name in ("kubernetes", "orjson"):
        assert versions[name] in requirements()[name].specifier
    runtime = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())
    assert runtime["requires_ansible"] == f">={versions['ansible-core']}" and community.startswith("ansible==")


def brought_by(package: str) -> set[str]:
    return {Requirement(one).name.lower() for one in importlib.metadata.requires(package) or []}


@functools.cache
def imported() -> set[str]:
    """Names of the modules that the plugins import, or look up by a text, outside the standard library."""
    found = set()
    for path in (ROOT / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found - set(sys.stdlib_module_names) - OURS


def test_the_requirements_are_what_the_plugins_import():
    names = set(requirements())
    brought = brought_by("ansible-core") | brought_by("kubernetes")
    known = {MODULES.get(name, name) for name in names | brought}
    assert imported() - known == NOT_REQUIRED
    assert {MODULES.get(name, name) for name in names} <= imported(), "nothing that isn't imported"
    assert not names & brought, "nothing that comes with ansible-core anyway"


def test_the_requirements_are_met_by_what_the_tests_run_with():
    for name, requirement in requirements().items():
        assert requirement.specifier.contains(importlib.metadata.version(name)), name


@pytest.fixture(scope="module")
def tarball(tmp_path_factory):
    return built_collection.build(tmp_path_factory.mktemp("built"))


def test_the_tarball_has_nothing_of_development(tarball):
    with tarfile.open(tarball) as archive:
        names = set(archive.getnames())
    top = {name.split("/")[0] for name in names}
    assert not top & {"tests", "lab", "bench", "molecule", "requirements.txt", "Makefile", ".ci", ".github", "mypy.ini"}
    assert {"README.md", "meta", "plugins", "roles", "playbooks", "images", "inventories"} <= top
    assert {name for name in names if re.fullmatch(r"inventories/[^/]+", name)} == {
        "inventories/example",
        "inventories/openshift",
    }


@pytest.fixture(scope="module")
def tools():
    """The folder with the programs of TOOLS, kept in the cache."""
    key = hashlib.sha256(f"{sys.version}{TOOLS}".encode()).hexdigest()[:16]
    folder = cache_root() / "packaging" / key
    if not (folder / ".complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *TOOLS], check=True)
        (folder / ".complete").touch()
    return folder / "bin"


def run(tools: Path, folder: Path, *command: str, **environment: str) -> str:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "PYTHON"))}
    variables |= {"PATH": f"{tools}:/usr/bin:/bin", "ANSIBLE_HOME": str(folder / "home"), **environment}
    done = subprocess.run(
        [tools / command[0], *command[1:]], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_ansible_builder_finds_the_requirements(tools, tarball, tmp_path):
    built_collection.install(tarball, tmp_path)
    found = yaml.safe_load(run(tools, tmp_path, "ansible-builder", "introspect", str(tmp_path)))
    assert {Requirement(one.partition("#")[0]).name for one in found["python"]} == set(requirements())
    assert len(found["python"]) <= 6
    # helm where the distribution has it; elsewhere preflight says that it is missing.
    assert {one.split()[0] for one in found["system"]} == {"openssh-clients", "openssh-client", "helm"}


@pytest.mark.long
def test_the_execution_environment_for_users_is_one_that_ansible_builder_takes(tools, tarball, tmp_path):
    with tarfile.open(tarball) as archive:
        archive.extract("execution-environment.yml", tmp_path, filter="data")
    run(tools, tmp_path, "ansible-builder", "create", "--context", "made")
    assert "kubegpu.share" in (tmp_path / "made/_build/requirements.yml").read_text()
    # Dockerfile where there is no podman.
    assert len(list((tmp_path / "made").glob("*file"))) == 1


@pytest.mark.long
def test_galaxy_stores_the_documentation_of_every_plugin(tools, tarball, tmp_path):
    """As in Galaxy's import: without kubernetes.core, whose fragments aren't found then."""
    wanted = {"GALAXY_IMPORTER_RUN_ANSIBLE_LINT": "False", "GALAXY_IMPORTER_RUN_ANSIBLE_TEST": "False"}
    said = run(tools, tmp_path, "python", "-m", "galaxy_importer.main", str(tarball), **wanted)
    assert "Importer processing completed successfully" in said
    assert not re.findall(r"(?i)^.*\b(?:error|warning)\b.*$", said, re.MULTILINE), said
    contents = json.loads((tmp_path / "importer_result.json").read_text())["docs_blob"]["contents"]
    for kind in ("module", "filter", "lookup"):
        documented = {
            content["content_name"]
            for content in contents
            # The files with a subject's filters have none; that is in a file of each filter's name.
            if content["content_type"] == kind and (content["doc_strings"] or {}).get("doc")
        }
        files = {"module": "modules/*.py", "filter": "filter/*.yml", "lookup": "lookup/*.py"}[kind]
        assert documented == {path.stem for path in (ROOT / "plugins").glob(files)}
