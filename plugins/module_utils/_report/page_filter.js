// Copyright (c) the kubegpu.share authors
// GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
// SPDX-License-Identifier: GPL-3.0-or-later

// Shows only what contains every word. The page is complete without it.
"use strict";
(() => {
  const field = document.getElementById("words");
  const answer = document.querySelector("#filter output");
  const nodes = [...document.querySelectorAll("details.node")].map((box) => ({ box, open: box.open }));
  const items = [...document.querySelectorAll(".item")];
  const texts = new Map();

  function text(element) {
    if (!texts.has(element)) texts.set(element, element.textContent.toLowerCase());
    return texts.get(element);
  }

  function show(element, words) {
    element.hidden = !words.every((word) => text(element).includes(word));
    return element.hidden ? 0 : 1;
  }

  function filter() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const one of items) shown += show(one, words);
    for (const { box, open } of nodes) {
      shown += show(box, words);
      if (box.hidden) continue;
      // Cards of a node whose own line has the words stay; else only those that have them.
      const line = text(box.querySelector("summary"));
      const rest = words.filter((word) => !line.includes(word));
      const cards = [...box.querySelectorAll(".card")];
      const found = cards.filter((card) => rest.every((word) => text(card).includes(word)));
      for (const card of cards) card.hidden = found.length > 0 && !found.includes(card);
      box.open = words.length ? rest.length > 0 || open : open;
    }
    for (const folded of document.querySelectorAll("details.more")) folded.open = words.length > 0;
    answer.textContent = words.length ? `${shown.toLocaleString("en")} shown` : "";
  }

  document.getElementById("filter").hidden = false;
  field.addEventListener("input", filter);
})();
