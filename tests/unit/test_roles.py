# SPDX-License-Identifier: GPL-3.0-or-later
"""Every role's defaults, argument_specs and metadata agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODULES, ACTIONS = (list((ROOT / "plugins" / folder).glob("*.py")) for folder in ("modules", "action"))
COLLECTION_WIDE = {"gpu_kubeconfig", "gpu_backend", "gpu_owner", "gpu_owner_take_over"}
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


def read(role, name):
    path = ROOT / "roles" / role / name
    return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def specifications(role):
    """Return the specification of each entry point."""
    return read(role, "meta/argument_specs.yml")["argument_specs"].values()


def options(role):
    return {name: option for entry in specifications(role) for name, option in (entry.get("options") or {}).items()}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_those_of_the_argument_specs(role):
    defaults, described = read(role, "defaults/main.yml"), options(role)
    assert set(defaults) <= set(described), "not described"
    with_default = {name: one["default"] for name, one in described.items() if "default" in one}
    # Computed defaults are only described.
    assert with_default == {name: value for name, value in defaults.items() if "{{" not in str(value)}


@pytest.mark.parametrize("role", ROLES)
def test_every_argument_is_described_typed_and_prefixed(role):
    assert all(entry.get("short_description") for entry in specifications(role))
    for name, option in options(role).items():
        assert name.startswith(f"{role}_") or name in COLLECTION_WIDE, name
        assert option.get("description"), name
        assert option.get("type"), name
        assert option["type"] != "list" or option.get("elements"), name
        assert not (option.get("required") and "default" in option), name


@pytest.mark.parametrize("role", ROLES)
def test_internal_variables_have_the_internal_prefix(role):
    for name in read(role, "vars/main.yml"):
        assert name.startswith(f"__{role}_"), name


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_metadata_and_a_readme(role):
    about = read(role, "meta/main.yml")["galaxy_info"]
    assert (about["author"], about["license"]) == ("The kubegpu.share authors", "GPL-3.0-or-later")
    assert (
        f">={about['min_ansible_version']}"
        == yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["requires_ansible"]
    )
    assert about["description"]
    assert (ROOT / "roles" / role / "README.md").is_file()


def test_the_action_group_holds_the_modules_that_connect_to_the_cluster():
    """Roles set the kubeconfig once, in ``module_defaults``; a module that is missing here would not get it.

    One that is an action alone names no options in its documentation: its action takes them.
    """
    group = yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["action_groups"]["cluster"]
    connecting = sorted(
        {
            *(path.stem for path in MODULES if "kubegpu.share.attributes.cluster" in path.read_text()),
            *(path.stem for path in ACTIONS if "auth_arguments" in path.read_text()),
        }
    )
    assert group[1:] == connecting
    assert group[0]["metadata"]["extend_group"] == ["kubernetes.core.k8s"]
