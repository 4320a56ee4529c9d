# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The style of the page: light and dark, from a phone to paper. No font, image or address from anywhere."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light;--page:#f3f5f8;--box:#fff;--text:#18212d;--soft:#556070;--line:#dbe1e8;--track:#e6eaf0;
--FAIL:#b3261e;--FAIL-bg:#fdeceb;--WARN:#8a4b00;--WARN-bg:#fff3dd;--UNKNOWN:#5a4796;--UNKNOWN-bg:#f0edfa;
--PASS:#17693a;--PASS-bg:#e6f5eb;--rest:#8d99a8;--link:#1a56b0}
@media screen and (prefers-color-scheme:dark){:root{color-scheme:dark;--page:#0e1319;--box:#171e27;--text:#e7ecf2;
--soft:#a3b0bf;--line:#2b3643;--track:#2a3440;--FAIL:#ff9a92;--FAIL-bg:#3d1b1a;--WARN:#ffc56b;--WARN-bg:#38290f;
--UNKNOWN:#cabdf7;--UNKNOWN-bg:#2a2344;--PASS:#86dba6;--PASS-bg:#14331f;--rest:#77869a;--link:#8ebbff}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--text);overflow-wrap:anywhere;
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",Arial,sans-serif}
main,header,footer{max-width:76rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.75rem}
h1,h2,h3,h4,p,dl,dd,ul{margin:0;padding:0}
h1{font-size:1.1rem;font-weight:600;color:var(--soft);letter-spacing:.01em}
h2{font-size:1.3rem;line-height:1.3;margin:2.5rem 0 .25rem}
h3{font-size:1.05rem;line-height:1.35}
h4{font-size:1rem;line-height:1.35}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px;border-radius:4px}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.8125rem}
.soft{color:var(--soft)}
.small{font-size:.875rem}
.box{background:var(--box);border:1px solid var(--line);border-radius:12px}
.verdict{margin-top:.75rem;padding:1.25rem;border-left:8px solid var(--now)}
.verdict p:first-child{font-size:clamp(1.35rem,4.5vw,2rem);line-height:1.2;font-weight:700;margin-bottom:.5rem}
.verdict .badge{font-size:.8em}
.FAIL{--now:var(--FAIL);--now-bg:var(--FAIL-bg)}
.WARN{--now:var(--WARN);--now-bg:var(--WARN-bg)}
.UNKNOWN{--now:var(--UNKNOWN);--now-bg:var(--UNKNOWN-bg)}
.PASS{--now:var(--PASS);--now-bg:var(--PASS-bg)}
.none{--now:var(--soft);--now-bg:var(--track)}
.badge{display:inline-block;font-size:.75rem;line-height:1.5;font-weight:700;padding:0 .55em;border-radius:6px;
color:var(--now);background:var(--now-bg);border:1px solid var(--now);white-space:nowrap;letter-spacing:.02em}
.facts{display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;font-size:.875rem;color:var(--soft)}
.facts dt{display:inline}
.facts dd{display:inline;color:var(--text);margin-left:.35em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,9.25rem),1fr));gap:.75rem;margin-top:.75rem;
list-style:none}
.tile{padding:.8rem 1rem;border-top:4px solid var(--now,var(--line))}
.tile b{display:block;font-size:1.65rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tile.hot b{color:var(--now)}
.tile .bar{margin:.45rem 0 0}
.finding{margin-top:.75rem;padding:1rem 1.25rem;border-left:6px solid var(--now)}
.finding h3{margin:.4rem 0 .1rem}
.where{display:flex;flex-wrap:wrap;gap:.35rem .6rem;align-items:center;font-size:.875rem}
.where span.chip,.chip{background:var(--track);border-radius:6px;padding:0 .5em}
.planes{display:grid;grid-template-columns:fit-content(13rem) minmax(0,1fr);gap:.2rem .9rem;margin:.6rem 0 0;
font-size:.9rem}
.planes dt{color:var(--soft);font-weight:600}
.do{margin-top:.7rem;padding:.55rem .8rem;background:var(--now-bg);border-radius:8px}
.do b{color:var(--now)}
.calm{margin-top:.75rem;padding:1rem 1.25rem}
details{margin-top:.75rem}
summary{cursor:pointer;padding:.8rem 1.25rem;border-radius:12px}
details[open]>summary{border-bottom:1px solid var(--line);border-radius:12px 12px 0 0}
summary h3{display:inline}
.line{display:inline-flex;flex-wrap:wrap;gap:.25rem .75rem;align-items:center;width:calc(100% - 1.5rem);
vertical-align:top}
.line .bar{flex:1 1 8rem;margin:0;min-width:6rem;max-width:18rem;height:.7rem}
.inside{padding:.25rem 1.25rem 1.25rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:1rem;margin-top:1rem}
.card{border:1px solid var(--line);border-radius:10px;padding:.9rem 1rem;min-width:0}
.card.FAIL{border:2px solid var(--FAIL)}
.card header{display:flex;flex-wrap:wrap;gap:.1rem .6rem;align-items:baseline;padding:0;max-width:none}
.sum{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 .75rem;margin-top:.65rem;font-size:.875rem}
.sum b{font-weight:600}
.bar{position:relative;display:flex;height:1.5rem;margin-top:.2rem;background:var(--track);border-radius:5px;
overflow:hidden}
.bar i{flex:none;min-width:1px;overflow:hidden;font-style:normal;font-size:.75rem;line-height:1.5rem;text-align:center;
font-weight:600;color:#fff;box-shadow:inset -1px 0 var(--box)}
.bar u{position:absolute;top:0;bottom:0;width:3px;margin-left:-3px;background:var(--text);
box-shadow:0 0 0 1px var(--box)}
.bar.unknown{background:none;border:2px dashed var(--line)}
.p0{background:#2461b5}.p1{background:#0f706a}.p2{background:#6b3fc0}.p3{background:#a3490a}
.p4{background:#b01c5c}.p5{background:#4a6b12}.p6{background:#0b6a88}.p7{background:#6d4c36}
.foreign{background:repeating-linear-gradient(45deg,#c62d23 0 4px,#fff 4px 7px)}
.rest{background:repeating-linear-gradient(135deg,var(--rest) 0 2px,var(--track) 2px 6px)}
table{width:100%;border-collapse:collapse;font-size:.875rem;margin-top:.7rem}
th,td{text-align:left;vertical-align:top;padding:.3rem .5rem .3rem 0;border-top:1px solid var(--line)}
th{font-weight:600}
thead th{border-top:0;color:var(--soft);font-size:.8125rem}
tbody th{font-weight:400}
td.n,th.n{text-align:right;padding-right:0;padding-left:.5rem;white-space:nowrap;font-variant-numeric:tabular-nums}
.pods{table-layout:fixed}.pods th.n,.pods td.n{width:5.6em;white-space:normal}
.checks .badge{white-space:normal}
.key{display:inline-block;min-width:1.4em;height:1.4em;line-height:1.4em;text-align:center;border-radius:4px;
color:#fff;font-size:.75rem;font-weight:600;margin-right:.45em;vertical-align:.05em;padding:0 .25em}
.key:empty{vertical-align:-.3em}
.pods tbody th{position:relative;padding-left:1.75em}
.pods tbody th .key{position:absolute;left:0}
.over{color:var(--WARN);font-weight:600;display:block;white-space:normal}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.875rem;color:var(--soft)}
.checks{padding:.25rem 1.25rem .75rem;margin-top:.75rem}
.checks thead th{overflow-wrap:normal}
footer{padding-top:2rem;padding-bottom:2.5rem;color:var(--soft);font-size:.8125rem}
@media (max-width:40rem){main,header,footer{padding-left:.75rem;padding-right:.75rem}
.finding,.calm,summary,.checks{padding-left:.9rem;padding-right:.9rem}.inside{padding:.1rem .9rem .9rem}
.card{padding:.75rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
.planes{grid-template-columns:minmax(0,1fr);gap:0}.planes dd{margin-bottom:.35rem}
.checks table{table-layout:fixed}
.checks thead th:nth-child(2){width:31%}.checks thead th.n{width:21%;white-space:normal}}
@media print{@page{margin:14mm}
html{font-size:82%}
body{background:#fff}
main,header,footer{max-width:none;padding-left:0;padding-right:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
h2,h3,h4,summary,.legend{break-after:avoid}
.finding,.card,.tile,.verdict,.bar,tr,.sum{break-inside:avoid}
.cards{grid-template-columns:repeat(2,minmax(0,1fr))}
.tiles{grid-template-columns:repeat(3,minmax(0,1fr))}
.more::details-content{content-visibility:visible;display:block;block-size:auto}
a{color:inherit;text-decoration:none}
thead{display:table-header-group}}
"""
