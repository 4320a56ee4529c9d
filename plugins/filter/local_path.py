# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: local_path
short_description: Absolute path of a file on the controller
version_added: 1.0.0
description:
  - A relative path is relative to the working directory of C(ansible-playbook), which is the project's folder in AWX.
    Modules on localhost run in the playbook's folder.
  - Expands C(~) and environment variables.
options:
  _input:
    description:
      - A path, or several that are separated by colons.
      - Anything that is no text, such as the content of a kubeconfig, is returned as it is.
    type: raw
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show where the kubeconfig is searched
  ansible.builtin.debug:
    msg: "{{ 'reader.kubeconfig' | kubegpu.share.local_path }}"
"""

RETURN = r"""
_value:
  description: The absolute path.
  type: raw
"""

import typing as t


def local_path(value: t.Any) -> t.Any:
    from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import local_path as paths

    return paths.local_path(value)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"local_path": local_path}
