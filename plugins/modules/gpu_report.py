#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_report
short_description: Print a report of the GPUs, and write it as HTML, JSON, JUnit XML and for Prometheus
version_added: 1.0.0
description:
  - Prints the result of M(kubegpu.share.gpu_allocation_check) (findings first, then the checks, then the result), or, with an allocation
    only, which pod holds how much of which card.
  - Writes the same to files on the controller. A file is written completely or not at all and is readable by its owner only; a symbolic link is
    replaced.
  - With O(text) it prints that text with its lines and columns, independently of the callback plugin's format of results.
  - Runs on the controller only. It never fails because of a report's result; evaluate RV(result) for that.
extends_documentation_fragment:
  - kubegpu.share.attributes
requirements:
  - jinja2 on the controller, which ansible-core requires
options:
  text:
    description:
      - A text to print as it is. An empty text prints nothing.
      - Exactly one of O(text) and O(report) or O(allocation) is needed.
    type: str
  report:
    description: RV(kubegpu.share.gpu_allocation_check#module:report) of M(kubegpu.share.gpu_allocation_check).
    type: dict
  allocation:
    description:
      - The result of M(kubegpu.share.gpu_allocation_info).
      - With O(report) it adds what only it contains, such as the reasons of unhealthy cards and the Pending pods.
    type: dict
  html:
    description:
      - Path of the HTML page. It is one file that loads nothing, for a screen, a phone and paper. Its only script is a filter; without
        scripts the page is complete.
      - In large clusters the nodes are folded, except for the first ones with a problem.
    type: path
  json:
    description: Path of the data, an object with the keys of O(report), and with O(allocation) as key C(allocation).
    type: path
  junit:
    description:
      - Path of the JUnit XML file for CI, with a suite for each back end and a case for each check and node. It needs O(report).
      - FAIL is a failure. UNKNOWN is skipped with its reason, and so is a check that had nothing to check. WARN passes with its reason.
    type: path
  prometheus:
    description:
      - Path of the metrics for the textfile collector of Prometheus' node_exporter, which reads names that end in C(.prom).
      - Without O(report) there are only metrics of the cards.
    type: path
  prometheus_mode:
    description: Permissions of that file as octal digits; node_exporter reads it as another user. The other files are C(0600).
    type: raw
    default: "0644"
  quiet:
    description: Print nothing.
    type: bool
    default: false
notes:
  - Relative paths start in the directory in which C(ansible-playbook) was started, and C(~) is the home directory of its user.
  - Names and texts of the cluster are printed without control characters and terminal sequences. The file of O(json) has them escaped.
seealso:
  - module: kubegpu.share.gpu_allocation_check
  - module: kubegpu.share.gpu_allocation_info
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the findings, and write them as an HTML page
  kubegpu.share.gpu_report:
    report: "{{ check.report }}"
    allocation: "{{ allocation }}"
    html: reports/gpu.html
    junit: reports/gpu.xml
  delegate_to: localhost
  run_once: true

- name: Write the allocation for Prometheus, and print nothing
  kubegpu.share.gpu_report:
    allocation: "{{ allocation }}"
    prometheus: /var/lib/prometheus/node-exporter/kubegpu.prom
    quiet: true
  delegate_to: localhost
  run_once: true

- name: Print the table of an allocation
  kubegpu.share.gpu_report:
    text: "{{ allocation.table }}"
"""

RETURN = r"""
text:
  description: The text that was printed, or with O(quiet=true) would have been.
  type: str
  returned: success
result:
  description: V(FAIL), V(WARN), V(UNKNOWN) or V(PASS); empty if nothing was checked.
  type: str
  returned: success
  sample: PASS
files:
  description: The files, each with its argument, its path, and whether its content changed (in check mode, would change).
  type: list
  elements: dict
  returned: success
  sample:
    - argument: html
      path: reports/gpu.html
      changed: true
"""
