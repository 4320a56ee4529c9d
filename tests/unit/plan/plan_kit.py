# SPDX-License-Identifier: GPL-3.0-or-later
"""The roles' plan in one process: real templates, lookups and action plugins, on facts of simulated machines."""

from __future__ import annotations

import action_plugins
from ansible.plugins import loader as loaders
from ansible.template import trust_as_template
from ansible_collections.kubegpu.share.plugins.action import site_plan
from ansible_collections.kubegpu.share.plugins.module_utils._node.facts import observe
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import (
    ROLES,
    AnsibleEngine,
    Planner,
    TaskPredictions,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.walk import Walk
from node_trees import TreeSystem, load


def action():
    """Return the action site_plan, whose connection must not be used."""
    return action_plugins.load(site_plan, {}, plugins=loaders)


def facts(tree, tmp_path, images=()):
    """The facts of a simulated machine."""
    return observe(TreeSystem(tmp_path / tree, load(tree)), images)


def trusted(value):
    if isinstance(value, dict):
        return {name: trusted(one) for name, one in value.items()}
    return trust_as_template(value) if isinstance(value, str) else value


def host(name, groups=("gpu_nodes",), others=None, **variables):
    """A host's variables."""
    own = {"inventory_hostname": name, **trusted(variables)}
    hostvars = {"localhost": {}, **(others or {}), name: own}
    return {**own, "hostvars": hostvars, "groups": {group: [name] for group in groups}}


def walk(variables, cluster=None):
    one = action()
    engine = AnsibleEngine(one)
    return Walk(engine, TaskPredictions(one, engine, cluster), ROLES, variables)


class HostVars(dict):
    """The variables of all hosts, as ansible-core has them."""

    raw_get = dict.__getitem__


def planner(variables, known=None, **of_play):
    """A planner of one host.

    :param known: variables of localhost in the play.
    :param of_play: the play's own variables.
    """
    own = {**(known or {}), "hostvars": HostVars({**variables["hostvars"], variables["inventory_hostname"]: variables})}
    made = Planner(action(), own)
    made._of_play = of_play
    return made


def planned(variables):
    """The plan of a machine."""
    return planner(variables).machine(variables["inventory_hostname"])
