// The keyboard. A view may have step(by), filter(), keys(key) and `back`; lists of links need nothing.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h } = agentgym;
  const HELP = [
    ["j, k, ↓, ↑", "next or previous row, or turn of an episode"], ["Enter", "open"], ["Esc, Backspace", "back to where this belongs"],
    ["/", "to the filter"], ["n, p", "next or previous episode"], ["t", "messages or tokens"], ["← →", "walk through tokens, or along a chart that has the focus"],
    ["g", "to the list of runs"], ["d", "theme: of the system, light, dark"], ["?", "these keys"],
  ];
  let dialog = null;

  function help() {
    if (!dialog) {
      const close = h("button", { type: "button", class: "button", on: { click: () => dialog.close() } }, "Close");
      dialog = h("dialog", { class: "help", "aria-label": "Keys" }, h("h2", {}, "Keys"),
        h("dl", {}, HELP.map(([key, what]) => [h("dt", {}, key.split(", ").map((k) => h("kbd", {}, k))), h("dd", {}, what)])), close);
      dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
      document.body.append(dialog);
    }
    if (dialog.open) dialog.close();
    else dialog.showModal();
  }

  const typing = (element) => element && (element.isContentEditable || element.tagName === "TEXTAREA" || element.tagName === "SELECT" || (element.tagName === "INPUT" && element.type !== "checkbox"));

  // To the next link that opens something.
  function step(view, by) {
    if (view.step) return view.step(by);
    const links = [...document.querySelectorAll("#main a.open")];
    const now = links.indexOf(document.activeElement);
    const next = links[now < 0 ? (by > 0 ? 0 : links.length - 1) : Math.max(0, Math.min(links.length - 1, now + by))];
    if (next) {
      next.focus();
      next.scrollIntoView({ block: "nearest" });
    }
    return undefined;
  }

  function filter(view) {
    const field = view.filter ? null : document.querySelector("#main input.filter");
    if (view.filter) view.filter();
    else if (field) field.focus();
  }

  function back(view) {
    if (view.back) window.location.hash = view.back;
    else {
      const up = [...document.querySelectorAll("#crumbs a")].pop();
      if (up) window.location.hash = up.getAttribute("href");
      else if (view.crumbs && view.crumbs.length) window.location.hash = "#/runs";
    }
  }

  const ACTIONS = {
    j: (view) => step(view, 1), ArrowDown: (view) => step(view, 1), k: (view) => step(view, -1), ArrowUp: (view) => step(view, -1),
    "/": filter, "?": help, Escape: back, Backspace: back, g: () => { window.location.hash = "#/runs"; }, d: () => agentgym.main.theme(),
  };

  function pressed(event, view) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || (dialog && dialog.open)) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (view.keys && view.keys(event.key)) return;
    const action = ACTIONS[event.key];
    if (!action) return;
    event.preventDefault();
    action(view);
  }

  agentgym.keys = { pressed, help };
})();
