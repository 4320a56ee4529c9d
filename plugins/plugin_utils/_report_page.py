# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The page's template. Values are put in by jinja2 with autoescape; nothing is marked safe but our own style."""

from __future__ import annotations

# Nothing but inline style: no script, no request, no form, whatever a name in the cluster looks like.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

PAGE = """\
{% macro badge(level, words='') %}<span class="badge {{ level }}">{{ words or level }}</span>{% endmacro %}
{% macro drawn(bar) %}
<div class="bar{{ '' if bar.known else ' unknown' }}" role="img"
aria-label="{{ bar.label }}: {{ bar.words }}{{ ', ' ~ bar.share if bar.share }}">
{% for one in bar.segments %}
<i class="{{ one.kind }}" style="width:{{ one.width }}%"
{%- if not many %} title="{{ one.title }}"{% endif %}>{{ one.key }}</i>
{%- endfor %}
{% if bar.limit %}<u style="left:{{ bar.limit }}%" title="the card ends here"></u>{% endif %}
</div>
{% endmacro %}
{% macro found(one) %}
<article class="finding box {{ one.level }}">
<div class="where">{{ badge(one.level) }}<b>{{ one.check }}</b>
{% if one.node %}<span class="chip">node {% if one.node in places %}
<a href="#{{ places[one.node] }}">{{ one.node }}</a>{% else %}{{ one.node }}{% endif %}</span>{% endif %}
{% if one.card is not none %}<span class="chip">card {{ one.card }}</span>{% endif %}
{% if one.uuid %}<span class="chip mono">{{ one.uuid }}</span>{% endif %}
{% if one.pod %}<span class="chip">pod {{ one.pod }}</span>{% endif %}
{% if one.container %}<span class="chip">container {{ one.container }}</span>{% endif %}
</div>
<h3>{{ one.what }}</h3>
{% if titles.get(one.check) %}<p class="soft small">{{ titles[one.check] }}</p>{% endif %}
{% if one.evidence %}
<dl class="planes">
{% for plane, said in one.evidence %}<dt>{{ planes.get(plane, plane) }}</dt><dd>{{ said }}</dd>{% endfor %}
</dl>
{% endif %}
{% if one.do %}<p class="do"><b>What to do:</b> {{ one.do }}</p>{% endif %}
</article>
{% endmacro %}
{% macro pods(rows, unit, measured) %}
<table class="pods"><thead><tr><th scope="col">Pod</th>
<th scope="col" class="n">Claimed{{ ', MiB' if unit == 'MiB' }}</th>
{%- if measured %}<th scope="col" class="n">Used, MiB</th>{% endif %}</tr></thead><tbody>
{% for row in rows %}
<tr><th scope="row"><span class="key {{ row.kind }}">{{ row.key }}</span>{{ row.name }}
{%- if row.note %} <span class="soft">{{ row.note }}</span>{% endif %}
{%- if row.over %}<span class="over">{{ row.over }}</span>{% endif %}</th><td class="n">{{ row.claimed }}</td>
{%- if measured %}<td class="n">{{ row.used }}</td>{% endif %}</tr>
{% endfor %}
</tbody></table>
{% endmacro %}
{% macro drawn_card(card) %}
<section class="card{{ ' FAIL' if card.bad }}">
<header><h4>GPU {{ card.index }}</h4><span class="soft">{{ card.model }}</span>
{% if card.bad %}{{ badge('FAIL', 'unhealthy') }}{% endif %}
{% if card.over %}{{ badge('FAIL', 'overbooked') }}{% endif %}
{% if card.foreign %}{{ badge('WARN', 'foreign use') }}{% endif %}</header>
{% if card.uuid %}<p class="soft mono">{{ card.uuid }}</p>{% endif %}
{% if card.reason %}<p class="small"><b>Why:</b> {{ card.reason }}</p>{% endif %}
{% for bar in card.bars %}
<p class="sum"><b>{{ bar.label }}</b><span>{{ bar.words }}{% if bar.share %} · {{ bar.share }}{% endif %}</span></p>
{{ drawn(bar) }}
{% endfor %}
{% if card.rows %}{{ pods(card.rows, card.unit, card.measured) }}
{% else %}<p class="soft small" style="margin-top:.6rem">No pod holds anything of it.</p>{% endif %}
</section>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="robots" content="noindex">
<title>{{ 'GPU sharing: ' ~ view.result if view.checked else 'GPU sharing' }}{{ ' · ' ~ view.cluster if view.cluster }}
</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>GPU sharing report</h1>
<div class="verdict box {{ view.result if view.checked else 'none' }}">
<p>{% if view.checked %}{{ badge(view.result) }} {% endif %}{{ view.headline }}</p>
<dl class="facts">
{% for name, value in facts %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>{% endfor %}
</dl>
</div>
<ul class="tiles">
{% for tile in tiles %}
<li class="tile box {{ tile.level }}{{ ' hot' if tile.hot }}"><b>{{ tile.number }}</b>
<span class="small">{{ tile.words }}</span>{% if tile.bar %}{{ drawn(tile.bar) }}{% endif %}</li>
{% endfor %}
</ul>
</header>
<main>
{% if view.checked %}
<h2 id="findings">Findings</h2>
{% if not findings %}
<p class="calm box">{{ 'No finding.' if view.result == 'PASS' else 'No finding is listed.' }}</p>
{% endif %}
{% for group in findings %}
{% for one in group.shown %}{{ found(one) }}{% endfor %}
{% if group.more %}
<details class="box more"><summary><h3>{{ badge(group.level) }} {{ group.more | length }} more</h3></summary>
<div class="inside">{% for one in group.more %}{{ found(one) }}{% endfor %}</div></details>
{% endif %}
{% endfor %}
{% endif %}
<h2 id="nodes">Nodes and cards</h2>
{% if view.nodes %}
<p class="legend"><span><b>Claimed</b>: what pods were given</span><span><b>Used</b>: what the GPU says is in use</span>
<span><span class="key foreign" role="img" aria-label="striped red"></span>in use by none of them</span>
<span><span class="key rest" role="img" aria-label="striped grey"></span>not accounted for</span></p>
{% else %}
<p class="calm box">No node shares a GPU.</p>
{% endif %}
{% for node in nodes %}
<details class="box" id="{{ node.place }}"{{ ' open' if node.open }}>
<summary><span class="line"><h3>{{ node.name }}</h3>
{% if node.backend %}<span class="chip small">{{ node.backend }}</span>{% endif %}
{% for level, count in node.found %}{{ badge(level, count ~ ' ' ~ level) }}{% endfor %}
{% for level, words in node.marks %}{{ badge(level, words) }}{% endfor %}
<span class="soft small">{{ node.words }}</span>{{ drawn(node.bar) }}</span></summary>
<div class="inside">
{% if node.problem %}<p class="small" style="margin-top:.9rem"><b>Problem:</b> {{ node.problem }}</p>{% endif %}
{% for one in node.about %}<p class="soft small" style="margin-top:.9rem">{{ one }}</p>{% endfor %}
{% if node.pending %}
<p class="small" style="margin-top:.9rem"><b>On which card, nobody tells:</b></p>
{{ pods(node.pending, node.unit, false) }}
{% endif %}
{% if node.cards %}<div class="cards">{% for card in node.cards %}{{ drawn_card(card) }}{% endfor %}</div>
{% elif not node.about %}<p class="soft small" style="margin-top:.9rem">It tells of no card.</p>{% endif %}
</div>
</details>
{% endfor %}
{% if view.waiting %}
<h2 id="waiting">Waiting for a card</h2>
<div class="checks box"><table><thead><tr><th scope="col">Pod</th><th scope="col" class="n">Asks for</th></tr></thead>
<tbody>
{% for one in view.waiting %}
<tr><th scope="row">{{ one.pod }}<br><span class="soft">{{ one.reason or 'not scheduled yet' }}</span></th>
<td class="n">{{ one.asks or '?' }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% if view.checks %}
<h2 id="checks">Checks</h2>
<div class="checks box"><table>
<thead><tr><th scope="col">Check</th><th scope="col">Result</th><th scope="col" class="n">Looked at</th></tr></thead>
<tbody>
{% for check in view.checks %}
<tr><th scope="row"><b>{{ check.id }}</b> {{ check.title }} <span class="soft">{{ check.backend }}</span></th>
<td>{{ badge('none' if check.words != check.result else check.result, check.words) }}
{%- for level in levels if check.found(level) %}<br>
<span class="small">{{ check.found(level) }} {{ level }}</span>{% endfor %}</td>
<td class="n">{{ '{:,}'.format(check.looked_at) }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
</main>
<footer><p>Made by kubegpu.share. This page holds all that it shows: it loads nothing and sends nothing.</p></footer>
</body>
</html>
"""
