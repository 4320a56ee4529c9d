# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    # A module that changes something: check mode and diff mode are complete.
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and return the changed status without modifying anything.
  diff_mode:
    support: full
    description: Returns what has changed, or would change in check mode, when in diff mode.
  platform:
    description: Target systems.
    platforms: posix
    support: full
"""

    # A module that only reads.
    INFO = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: Only reads; check mode makes no difference.
  diff_mode:
    support: N/A
    description: Changes nothing.
  platform:
    description: Target systems.
    platforms: posix
    support: full
"""

    # A module whose action plugin plans on the controller.
    OBSERVED = r"""
options:
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

    # A module with the connection options of kubernetes.core, which are described here too: whoever reads only this
    # collection's documentation, as Galaxy does, has no other collection's fragments.
    CLUSTER = r"""
options:
  host:
    description: URL of the API server. By default the environment variable C(K8S_AUTH_HOST).
    type: str
  api_key:
    description: Bearer token. By default the environment variable C(K8S_AUTH_API_KEY).
    type: str
  kubeconfig:
    description:
      - Path of the kubeconfig, or its content as a dictionary; several paths are separated by colons.
      - By default the environment variable C(K8S_AUTH_KUBECONFIG). Without it and without another connection option, C(~/.kube/config).
    type: raw
  context:
    description: A context of the kubeconfig. By default the environment variable C(K8S_AUTH_CONTEXT), or the current one.
    type: str
  username:
    description: User for HTTP's basic authentication. By default the environment variable C(K8S_AUTH_USERNAME).
    type: str
  password:
    description: Password for HTTP's basic authentication. By default the environment variable C(K8S_AUTH_PASSWORD).
    type: str
  client_cert:
    description: Path of a client certificate. By default the environment variable C(K8S_AUTH_CERT_FILE).
    type: path
    aliases: [cert_file]
  client_key:
    description: Path of the client certificate's key. By default the environment variable C(K8S_AUTH_KEY_FILE).
    type: path
    aliases: [key_file]
  ca_cert:
    description:
      - Path of the certificates that the API server's is verified with, the whole chain. By default the environment variable
        C(K8S_AUTH_SSL_CA_CERT).
    type: path
    aliases: [ssl_ca_cert]
  validate_certs:
    description: Whether the API server's certificate is verified. By default the environment variable C(K8S_AUTH_VERIFY_SSL).
    type: bool
    aliases: [verify_ssl]
  proxy:
    description: URL of an HTTP proxy. By default the environment variable C(K8S_AUTH_PROXY), not C(HTTP_PROXY).
    type: str
  no_proxy:
    description:
      - Hosts, domains and networks that are reached without the proxy, separated by commas. By default the environment variable
        C(K8S_AUTH_NO_PROXY), not C(NO_PROXY).
    type: str
  proxy_headers:
    description: Headers for the proxy.
    type: dict
    suboptions:
      proxy_basic_auth:
        description: User and password for the proxy, with a colon between them.
        type: str
      basic_auth:
        description: User and password for the API server, with a colon between them.
        type: str
      user_agent:
        description: Name of the client.
        type: str
  persist_config:
    description:
      - Whether a token that was refreshed during the connection is written to the kubeconfig. By default the environment variable
        C(K8S_AUTH_PERSIST_CONFIG).
    type: bool
  impersonate_user:
    description: The user as whom to act. By default the environment variable C(K8S_AUTH_IMPERSONATE_USER).
    type: str
  impersonate_groups:
    description: The groups as whose member to act. By default the environment variable C(K8S_AUTH_IMPERSONATE_GROUPS), separated by commas.
    type: list
    elements: str
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
attributes:
  action_group:
    description: Use C(group/kubegpu.share.cluster) in C(module_defaults) to set options for this module.
    support: full
    membership:
      - kubegpu.share.cluster
"""
