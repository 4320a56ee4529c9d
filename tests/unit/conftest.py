# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the checkout importable as the collection ``kubegpu.share`` and the servers as the package ``gpushare``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
from hypothesis import HealthCheck, settings

# The same examples in every run, so that CI is deterministic; KUBEGPU_EXPLORE=1 generates new ones.
# Neither examples nor their generation have a time limit, since the machine may be busy.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None)
settings.load_profile("explore" if os.environ.get("KUBEGPU_EXPLORE") else "steady")

ROOT = Path(__file__).resolve().parents[2]

finder = _AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])
finder._install()
# As ansible-core does it before a playbook's first task.
importlib.import_module("ansible_collections.kubegpu.share.plugins.action")
sys.path.insert(0, str(ROOT / "images" / "gpushare" / "src"))
sys.path.insert(0, str(ROOT))
# Doubles and builders of one folder are used by the tests of others.
sys.path += sorted({str(path.parent) for path in (ROOT / "tests" / "unit").rglob("*.py")})
sys.path += [str(ROOT / "tests" / "lab"), str(ROOT / "tests" / "gpu")]

# Each keeps one worker busy for a minute or more; if it began last, the other worker would be idle.
SLOW = (
    "test_operator",
    "test_dedicated_role",
    "test_corpus",
    "test_claims_playbooks",
    "test_cluster_playbooks",
    "test_openshift_scheduler",
    "test_plan_playbook",
    "test_gpu_operator",
    "test_openshift_action",
    "test_double_booking",
    "test_preemption_real",
    "test_driver_role",
    "test_kubeadm_action",
    "test_nouveau_real",
    "test_boot_grub",
    "test_boot_real",
    "test_verify_playbook",
    "test_static_pod_document",
    "test_validate_step",
    "test_init",
    "test_image_delivery",
    "test_maintenance",
    "test_readonly_access",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow files first; within a file, and among the others, the order stays."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.fixture(scope="session")
def helm() -> str:
    """Return the path of the real helm; skip the test where it can't be had."""
    # Most test runs need no part of the lab.
    from lab import build
    from lab.shell import LabError

    try:
        return str(build.built(build.HELM) / "helm")
    except (LabError, OSError) as error:
        pytest.skip(f"no helm: {error}")
