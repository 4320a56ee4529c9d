# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler's and kubeadm's files with a value of another type at each place: edited or refused by a sentence."""

from __future__ import annotations

import typing as t

import manifests
import test_scheduler_config as sc
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import kubeadm_edit
from test_kubeadm_config import stored
from test_odd_types import tried
from test_static_pod_document import CORPUS, edited, undone

# Each takes a whole edit, so these are few: a text, a number, lists, and a mapping.
ODD: tuple[t.Any, ...] = ("x", 1, [1], [{}], {"x": {}})


def both(present: t.Callable[[str], t.Any], absent: t.Callable[[str], t.Any]) -> t.Callable[[t.Any], t.Any]:
    return lambda given: (present if given[0].present else absent)(yaml.safe_dump(given[1]))


def test_schedulers_configuration() -> None:
    make = both(
        lambda text: sc.sc.FORM.merged("/c", text, 36, sc.EXTENDER), lambda text: sc.sc.FORM.without("/c", text)
    )
    assert tried(make, yaml.safe_load(manifests.USERS_CONFIG), "configuration", ODD) == []


def test_kubeadms_configuration() -> None:
    for version in ("v1beta3", "v1beta4"):
        own = "scheduler:\n  extraArgs:\n" + ("  - {name: v, value: '2'}\n" if version == "v1beta4" else "    v: '2'\n")
        text = stored(version, "v1.30.0", own)
        make = both(
            lambda one: kubeadm_edit.cluster_configuration(one, present=True),
            lambda one: kubeadm_edit.cluster_configuration(one, present=False),
        )
        assert tried(make, yaml.safe_load(text), version, ODD) == []


def test_a_static_pod() -> None:
    text = CORPUS[sorted(CORPUS)[0]]
    assert tried(both(edited, undone), yaml.safe_load(text), "manifest", ODD) == []
