# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: kubeconfig
short_description: Absolute path of the kubeconfig on the controller
version_added: 1.0.0
description:
  - Relative paths are relative to the working directory of C(ansible-playbook), also those of the environment variables
    C(K8S_AUTH_KUBECONFIG) and C(KUBECONFIG). Modules on localhost run in the playbook's folder.
options:
  _input:
    description:
      - The variable's value. It stays empty if it is empty and the environment has only absolute paths, which the
        client finds.
      - Anything that is no text, such as the content of a kubeconfig, is returned as it is.
    type: raw
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show which kubeconfig is used
  ansible.builtin.debug:
    msg: "{{ gpu_kubeconfig | default('') | kubegpu.share.kubeconfig }}"
"""

RETURN = r"""
_value:
  description: The absolute path, or several that are separated by colons.
  type: raw
"""

import typing as t


def kubeconfig(value: t.Any) -> t.Any:
    from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import local_path, node_results

    # Of the tasks that reach the cluster, those of another collection's modules have no action of this one.
    node_results.require()
    return local_path.kubeconfig(value)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"kubeconfig": kubeconfig}
