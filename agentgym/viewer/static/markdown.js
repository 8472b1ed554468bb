// Markdown as elements, by lines and in linear time. It makes no links and no markup; what it does not know stays text.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, written } = agentgym;
  // What is longer is shown as text only, and of one text at most so many elements are made.
  const LONGEST = 1_000_000;
  const MOST_ELEMENTS = 20_000;
  const LOOKED_AT = 20_000;
  const DEEPEST = 6;
  const LONGEST_ADDRESS = 500;
  // Of these patterns no two neighbours match the same character: a failed match takes linear time.
  const FENCE = /^ {0,3}(`{3,}|~{3,})/;
  const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
  const WORD = /\p{L}{2}/u;
  const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(\S.*)$/;
  const RULED = /^\|?[ \t]*:?---[-:| \t]*$/;
  const LETTER = /[\p{L}\p{N}_]/u;

  // Whether a text is likely meant as Markdown. Boards of games are not: a heading, an item has a word.
  function looks(text) {
    if (text.length > LONGEST) return false;
    const lines = text.slice(0, LOOKED_AT).split("\n");
    let items = 0;
    return lines.some((line, i) => {
      const item = ITEM.exec(line);
      items += item && WORD.test(item[3]) ? 1 : 0;
      return items > 1 || isFence(line) || isHeading(line) || line.includes("](data:image/")
        || /\*\*[\p{L}\p{N}]/u.test(line) || (i > 0 && isRuled(lines, i - 1));
    });
  }

  // "```python": a line of code cannot have more of these ticks after it.
  const isFence = (line) => FENCE.test(line) && !line.slice(FENCE.exec(line)[0].length).includes("`");
  const isHeading = (line) => HEADING.test(line) && WORD.test(line);
  const isRuled = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && RULED.test(lines[at + 1].trim());

  // Where a text has a delimiter next: each is looked for once, however many openers ask for it.
  function finder(text) {
    const next = new Map();
    return (what, from) => {
      const known = next.get(what);
      if (known !== undefined && (known < 0 || known >= from)) return known;
      const at = text.indexOf(what, from);
      next.set(what, at);
      return at;
    };
  }

  // One paragraph: code, bold, italic, links as their text with the address, images that are data.
  function inline(text, state, depth = 0) {
    const out = [];
    const find = finder(text);
    let from = 0;
    let i = 0;
    const take = (upTo, element) => {
      out.push(written(text.slice(from, i)), element);
      state.left -= 1;
      from = i = upTo;
    };
    const wordAt = (at) => at >= 0 && at < text.length && LETTER.test(text[at]);
    while (i < text.length && state.left > 0) {
      const c = text[i];
      if (c === "`") {
        let ticks = 1;
        while (ticks < 3 && text[i + ticks] === "`") ticks += 1;
        const end = find("`".repeat(ticks), i + ticks);
        if (end > i + ticks) take(end + ticks, h("code", {}, written(text.slice(i + ticks, end))));
        else i += ticks;
      } else if ((c === "*" || c === "_") && depth < DEEPEST) {
        const mark = text[i + 1] === c ? c + c : c;
        const begin = i + mark.length;
        const end = find(mark, begin);
        const open = end > begin && !/\s/.test(text[begin]) && !/\s/.test(text[end - 1]) && !wordAt(i - 1) && !wordAt(end + mark.length);
        if (open) take(end + mark.length, h(mark.length === 2 ? "strong" : "em", {}, inline(text.slice(begin, end), state, depth + 1)));
        else while (text[i] === c) i += 1;
      } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
        const begin = c === "!" ? i + 2 : i + 1;
        const middle = find("](", begin);
        const end = middle < 0 ? -1 : find(")", middle + 2);
        const made = end < 0 ? null : linked(c === "!", text.slice(begin, middle), text.slice(middle + 2, end), state, depth);
        if (made) take(end + 1, made);
        else i = begin;
      } else i += 1;
    }
    out.push(written(text.slice(from)));
    return out;
  }

  // A link or an image; null where it is neither. An opener far before its address is only text.
  function linked(image, words, address, state, depth) {
    if (words.includes("[") || words.includes("\n") || depth >= DEEPEST) return null;
    if (image) return agentgym.isImage(address) ? picture(address, words) : null;
    if (address.length > LONGEST_ADDRESS || /\s/.test(address)) return null;
    return h("span", { class: "md-link" }, inline(words, state, depth + 1), h("span", { class: "md-address" }, " (", agentgym.parts.name(address), ")"));
  }

  const picture = (address, words) => h("img", { src: address, alt: words || "an image", class: "picture", loading: "lazy", decoding: "async" });

  const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");

  // Blocks: each takes some lines from `at` on and says where it ended.
  function blocks(lines, state) {
    const out = [];
    let at = 0;
    while (at < lines.length) {
      if (state.left <= 0) {
        out.push(h("div", { class: "text" }, written(lines.slice(at).join("\n"))));
        break;
      }
      const [element, next] = fenced(lines, at) || heading(lines, at, state) || ruled(lines, at, state) || list(lines, at, state) || quoted(lines, at, state) || paragraph(lines, at, state);
      if (element) out.push(element);
      state.left -= 1;
      at = next;
    }
    return out;
  }

  function fenced(lines, at) {
    if (!isFence(lines[at])) return null;
    const open = FENCE.exec(lines[at]);
    const [language] = /^\S{0,40}/.exec(lines[at].slice(open[0].length).trim());
    let end = at + 1;
    while (end < lines.length && !closes(lines[end], open[1])) end += 1;
    const code = h("pre", { class: "code", dir: "ltr" }, written(lines.slice(at + 1, end).join("\n")));
    return [h("div", { class: "md-code" }, language && h("span", { class: "chip" }, written(language)), code), end + 1];
  }

  function closes(line, fence) {
    const text = line.trim();
    return text.length >= fence.length && text.startsWith(fence) && text === fence[0].repeat(text.length);
  }

  function heading(lines, at, state) {
    if (!isHeading(lines[at])) return null;
    const found = HEADING.exec(lines[at]);
    return [h(`h${Math.min(6, found[1].length + 2)}`, { class: `md-h${found[1].length}` }, inline(found[2], state)), at + 1];
  }

  function ruled(lines, at, state) {
    if (!isRuled(lines, at)) return null;
    const heads = cellsOf(lines[at]);
    const rows = [];
    let end = at + 2;
    for (; end < lines.length && lines[end].includes("|") && state.left > 0; end++) {
      const cells = cellsOf(lines[end]);
      if (cells.length > heads.length) cells.splice(heads.length - 1, cells.length, cells.slice(heads.length - 1).join("|"));
      state.left -= cells.length;
      rows.push(h("tr", {}, cells.map((cell) => h("td", {}, inline(cell.trim(), state)))));
    }
    state.left -= heads.length;
    const table = h("table", {}, h("thead", {}, h("tr", {}, heads.map((cell) => h("th", {}, inline(cell.trim(), state))))), h("tbody", {}, rows));
    return [h("div", { class: "scroll" }, table), end];
  }

  // Items of one kind, the deeper ones set in: however deep a list is, its elements are not.
  function list(lines, at, state) {
    const first = ITEM.exec(lines[at]);
    if (!first) return null;
    const numbered = /\d/.test(first[2]);
    const items = [];
    let end = at;
    for (; end < lines.length && state.left > 0; end++) {
      const item = ITEM.exec(lines[end]);
      if (!item || /\d/.test(item[2]) !== numbered) break;
      const deep = Math.min(DEEPEST, Math.floor(item[1].length / 2));
      state.left -= 1;
      items.push(h("li", { value: numbered && parseInt(item[2], 10), css: { "margin-left": `${deep * 18}px` } }, inline(item[3], state)));
    }
    return [h(numbered ? "ol" : "ul", {}, items), Math.max(end, at + 1)];
  }

  const isQuote = (line) => line.startsWith(">");

  function quoted(lines, at, state) {
    if (!isQuote(lines[at])) return null;
    let end = at;
    while (end < lines.length && isQuote(lines[end])) end += 1;
    const text = lines.slice(at, end).map((line) => line.replace(/^[> ]+/, "")).join("\n");
    return [h("blockquote", { class: "md-text" }, inline(text, state)), end];
  }

  // Lines keep their ends and spaces: what is a board or a poem stays one.
  function paragraph(lines, at, state) {
    let end = at + 1;
    if (!lines[at].trim()) return [null, end];
    while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
    return [h("p", { class: "md-text", dir: "auto" }, inline(lines.slice(at, end).join("\n"), state)), end];
  }

  function begins(lines, at) {
    const line = lines[at];
    return isQuote(line) || isFence(line) || ITEM.test(line) || isHeading(line) || isRuled(lines, at);
  }

  const render = (text) => h("div", { class: "md", dir: "auto" }, blocks(text.split(/\r?\n/), { left: MOST_ELEMENTS }));

  agentgym.markdown = { looks, render, picture };
})();
