# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects of role gpushare, rendered with its defaults."""

from __future__ import annotations

import role_templates

DEFAULTS = {**role_templates.defaults("gpushare"), **role_templates.variables_of("gpushare", "vars")}


def rendered(*names, **variables):
    """Return the objects of templates of the role; variables override its defaults."""
    given = {
        **DEFAULTS,
        "gpushare_image_pull_policy": "Never",
        "gpushare_nodes": [],
        "gpushare_openshift": False,
        "__gpushare_image_sha256": "",
        **variables,
    }
    return role_templates.objects("gpushare", *names, **given)
