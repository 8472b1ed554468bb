// A turn's tokens, one by one: what was sampled is shaded by its log-probability, what was given is grey.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, written } = agentgym;
  const f = agentgym.format;
  const SHADES = 9;
  const PIECE = 3000;

  // 0 for a probability of 1, up to SHADES for one below about 1 in 1,000.
  const shade = (logprob) => (f.known(logprob) ? Math.min(SHADES, Math.round((-logprob / 7) * SHADES + (logprob < -0.01 ? 0.5 : 0))) : 0);

  const textOf = (texts, id) => (texts && texts[id] !== undefined ? texts[id] : null);

  // As it is shown: a line break also breaks the line, and what is empty or only space can still be seen.
  function face(text, id) {
    if (text === null) return `${id} `;
    if (text === "") return "∅";
    return written(text.replaceAll("\r", "␍").replaceAll("\n", "⏎\n"));
  }

  // The tokens of a turn: {"all": [token], "prompt": count of ids not seen before, "shared": count, "sampled": [token]}.
  // `unusable` says why a sampled token is not trained on.
  function tokensOf(turn) {
    const stored = turn.tokens;
    if (!stored) return null;
    const ids = stored.completion_ids || [];
    const sampled = ids.map((id, i) => ({ id, logprob: (stored.logprobs || [])[i], version: (stored.versions || [])[i], sampled: true, unusable: turn.unusable }));
    const prompt = (stored.new_prompt_ids || stored.prompt_ids || []).map((id) => ({ id, sampled: false }));
    return { all: [...prompt, ...sampled], prompt: prompt.length, shared: stored.shared || 0, sampled, finish: stored.finish_reason };
  }

  function span(token, index, texts) {
    const text = textOf(texts, token.id);
    const name = token.sampled ? `tok s${shade(token.logprob)}` : "tok given";
    return h("span", { class: text === null ? `${name} bare` : name, "data-i": index }, face(text, token.id));
  }

  function readout(token, texts, index) {
    if (!token) return h("span", { class: "muted" }, "Point at a token, or walk with the arrow keys.");
    const text = textOf(texts, token.id);
    const field = (name, value) => h("span", { class: "pair-value" }, h("i", {}, name), " ", value);
    return [
      field("text", text === null ? h("span", { class: "muted" }, "unknown") : h("code", {}, written(JSON.stringify(text)))), field("id", token.id), field("place", f.count(index + 1)),
      token.sampled ? [field("log-probability", f.known(token.logprob) ? token.logprob.toFixed(4) : "–"), field("probability", f.percent(Math.exp(token.logprob))), field("weights", token.version ?? "–"), field("loss", token.unusable ? `masked: ${token.unusable}` : "trained on")]
        : field("loss", "masked: it was given, not sampled"),
    ];
  }

  // The element for one turn; `told(children)` shows what is known of the token at hand.
  function view(turn, texts, told) {
    const found = tokensOf(turn);
    if (!found) return h("p", { class: "muted small" }, "This turn has no stored tokens.");
    let at = -1;
    let drawn = 0;
    const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `${found.all.length} tokens; arrow keys walk through them`, dir: "auto" });
    const more = h("button", { class: "more", type: "button", on: { click: draw } });

    function draw() {
      const until = Math.min(found.all.length, drawn + PIECE);
      for (; drawn < until; drawn++) box.append(span(found.all[drawn], drawn, texts));
      more.hidden = drawn >= found.all.length;
      more.textContent = `Show ${f.count(Math.min(PIECE, found.all.length - drawn))} more of ${f.count(found.all.length)} tokens`;
    }

    function tell(index) {
      const before = box.querySelector(".now");
      if (before) before.classList.remove("now");
      at = index;
      if (at >= 0 && box.children[at]) box.children[at].classList.add("now");
      told(readout(found.all[at], texts, found.shared + at));
    }

    box.addEventListener("pointerover", (event) => { const token = event.target.closest("[data-i]"); if (token) tell(Number(token.dataset.i)); });
    box.addEventListener("focus", () => tell(at < 0 ? found.prompt : at));
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      tell(Math.max(0, Math.min(drawn - 1, at + by)));
      box.children[at].scrollIntoView({ block: "nearest" });
    });
    draw();
    return h("div", { class: "token-view" }, head(found), box, more);
  }

  function head(found) {
    const total = found.sampled.reduce((sum, token) => sum + (token.logprob || 0), 0);
    const n = found.sampled.length;
    return h("p", { class: "small muted" }, found.shared ? `${f.count(found.shared)} tokens of the turns before, then ` : "",
      `${f.count(found.prompt)} given and ${f.count(n)} sampled`, n ? ` · mean log-probability ${(total / n).toFixed(3)}` : "", ` · ended by ${found.finish}`);
  }

  const legend = () => h("span", { class: "token-legend" }, h("span", { class: "tok given" }, "given"), " sampled: ",
    h("span", { class: "tok s0" }, "likely"), [2, 4, 6].map((s) => h("span", { class: `tok s${s}` }, " ")), h("span", { class: `tok s${SHADES}` }, "unlikely"));

  agentgym.tokens = { view, legend, readout, has: (episode) => [...(episode.turns || []), ...(episode.summaries || [])].some((turn) => turn && turn.tokens) };
})();
