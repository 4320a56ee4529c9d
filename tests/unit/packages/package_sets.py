# SPDX-License-Identifier: GPL-3.0-or-later
"""Package sets of the tests, from the module's own options, and the reconciler that applies them."""

from __future__ import annotations

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run
from ansible_collections.kubegpu.share.plugins.module_utils._packages import options, reconcile, rpm_locks
from ansible_collections.kubegpu.share.plugins.module_utils._packages.paths import MANAGERS
from ansible_collections.kubegpu.share.plugins.module_utils._packages.planner import planner

KEY = f"{options.ARMOUR[0]}\n\nabc=\n{options.ARMOUR[1]}\n"


def package_set(**params):
    """A package set from options of ``pinned_packages``; keys of a repository that are None are left out."""
    if "repositories" in params:
        params["repositories"] = [
            {key: value for key, value in repository.items() if value is not None}
            for repository in params["repositories"]
        ]
    result = ArgumentSpecValidator(options.ARGUMENTS).validate(params)
    assert not result.error_messages, result.error_messages
    return options.package_set(result.validated_parameters)


def rpm_facts(manager="dnf", packages=None, **changes):
    """Return the facts of a node with rpm: versions by package name, and changed fields of the section ``rpm``."""
    rpm = {"manager": manager, "lock_path": MANAGERS[manager].lock_path, "lock_plugin": "enabled"}
    rpm |= {name: {} for name in ("files", "keys", "streams")}
    rpm |= {name: [] for name in ("imported", "repositories", "locks", "duplicates")}
    rows = {name: {"version": version, "held": False, "origin": ""} for name, version in (packages or {}).items()}
    return {"apt": None, "rpm": {**rpm, **changes}, "packages": rows}


def lock(name, version, ours=True):
    return rpm_locks.Lock(name, version, ours).json()


def plan(spec, facts):
    return planner(spec, facts).plan()


def reconciler(spec, node, family, fetch=lambda _url: KEY.encode(), sleep=lambda _seconds: None):
    return reconcile.PackagesReconciler(spec, node, family, "amd64", fetch, sleep)


def apply(spec, node, family, check=False, **hooks):
    """Run the module's reconciler; its result."""
    work = reconciler(spec, node, family, **hooks)
    return run(work, check, work.details)


def headers(result):
    """The headers of a plan, or of a result's diff."""
    if isinstance(result, dict):
        return [one["before_header"] for one in result["diff"]]
    return [change.header for change in result.changes]
