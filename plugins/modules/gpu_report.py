#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_report
short_description: Show a report of the GPUs, and write it as HTML, JSON, JUnit XML and for Prometheus
version_added: 1.0.0
description:
  - Prints what M(kubegpu.share.gpu_allocation_check) found (findings first, then the checks, then the result), or who holds how much of
    which card where there is only an allocation.
  - Writes the same to files of the controller. Each is written whole or not at all, readable by its owner alone, and a link of that name
    is replaced.
  - Runs on the controller alone. It never fails because of what a report says; whoever has to fail looks at RV(result).
extends_documentation_fragment:
  - kubegpu.share.attributes
requirements:
  - jinja2 on the controller, which Ansible brings
options:
  report:
    description: RV(kubegpu.share.gpu_allocation_check#module:report) of M(kubegpu.share.gpu_allocation_check).
    type: dict
  allocation:
    description:
      - What M(kubegpu.share.gpu_allocation_info) returned.
      - Beside O(report) it adds what only it knows, such as the reasons of unhealthy cards and the pods that wait for a card.
      - At least one of the two is needed.
    type: dict
  html:
    description:
      - Path of the page. It is one file that loads nothing and runs nothing, for a screen, a phone and paper.
      - In large clusters the nodes are folded, but for the first ones with something wrong.
    type: path
  json:
    description: Path of the data, an object with the keys of O(report), and with O(allocation) as key C(allocation) where that was given.
    type: path
  junit:
    description:
      - Path of the results for CI, a suite per backend and a case per check and node. It needs O(report).
      - FAIL is a failure. UNKNOWN is skipped with its reason, and so is a check that had nothing to look at. WARN passes and says why.
    type: path
  prometheus:
    description:
      - Path of the metrics for the textfile collector of Prometheus' node_exporter. Its name has to end in C(.prom) for that.
      - Without O(report) they are those of the cards alone.
    type: path
  prometheus_mode:
    description: Permissions of that file as octal digits; node_exporter reads it as another user. The other files are C(0600).
    type: raw
    default: "0644"
  quiet:
    description: Whether to print nothing.
    type: bool
    default: false
notes:
  - Relative paths start where C(ansible-playbook) was started, and C(~) is the home of whoever started it.
  - Names and sentences of the cluster are shown without control characters and terminal sequences. The file of O(json) has them escaped.
seealso:
  - module: kubegpu.share.gpu_allocation_check
  - module: kubegpu.share.gpu_allocation_info
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show what the checks found, and keep it as a page
  kubegpu.share.gpu_report:
    report: "{{ check.report }}"
    allocation: "{{ allocation }}"
    html: reports/gpu.html
    junit: reports/gpu.xml
  delegate_to: localhost
  run_once: true

- name: Give Prometheus who holds how much, and print nothing
  kubegpu.share.gpu_report:
    allocation: "{{ allocation }}"
    prometheus: /var/lib/prometheus/node-exporter/kubegpu.prom
    quiet: true
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
text:
  description: What was printed, or would have been.
  type: str
  returned: success
result:
  description: V(FAIL), V(WARN), V(UNKNOWN) or V(PASS); empty where nothing was checked.
  type: str
  returned: success
  sample: PASS
files:
  description: The files, each with the argument that named it, its path, and whether its content is (or in check mode would be) another.
  type: list
  elements: dict
  returned: success
  sample:
    - argument: html
      path: reports/gpu.html
      changed: true
"""
