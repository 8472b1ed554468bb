// Begins the page: the address chooses the view; theme, head, banner and keys belong to all views.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, api, router, parts } = agentgym;
  const THEMES = { system: ["◐", "of the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
  const EVERY = 2500;
  let view = null;
  let hash = null;
  let waiting = 0;

  function kept(value) {
    try {
      if (value) window.localStorage.setItem("agentgym-theme", value);
      return window.localStorage.getItem("agentgym-theme");
    } catch {
      return value || null;
    }
  }

  function show(theme) {
    const [sign, words] = THEMES[theme];
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = sign;
    button.title = `Theme: ${words} (d)`;
    button.setAttribute("aria-label", `Theme: ${words}. Change it.`);
  }

  function theme() {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    kept(next);
    show(next);
  }

  // Title and crumbs of a view; it calls this again when it knows more.
  function named(of) {
    if (view && of !== view) return;
    document.title = of.title && of.title !== "Runs" ? `${of.title} · agentgym` : "agentgym";
    const crumbs = of.crumbs || [];
    fill(document.getElementById("crumbs"), crumbs.length > 0 && h("a", { href: "#/runs" }, "runs"),
      crumbs.map((crumb) => [h("span", { class: "muted", "aria-hidden": "true" }, "/"), crumb.href ? h("a", { href: crumb.href }, h("bdi", {}, parts.name(crumb.name))) : h("span", { "aria-current": "page" }, h("bdi", {}, parts.name(crumb.name)))]));
  }

  function nameOf({ path }) {
    if (path[0] === "run" && path.length === 2) return "run";
    if (path[0] === "run" && path[2] === "episodes" && path.length === 3) return "episodes";
    if (path[0] === "run" && path[2] === "episode" && path.length === 4) return "episode";
    return path.length === 1 && ["runs", "compare", "side"].includes(path[0]) ? path[0] : null;
  }

  function route() {
    const now = router.now();
    if (hash === window.location.hash && view) return;
    if (view && view.leave) view.leave(hash);
    hash = window.location.hash;
    if (view && view.changed && view.changed(now)) return;
    open(now);
  }

  function open(now) {
    if (view && view.close) view.close();
    const main = document.getElementById("main");
    const name = nameOf(now);
    view = null;
    main.className = `view-${name || "none"}`;
    fill(main);
    if (!name) view = { title: "Not found", crumbs: [{ name: "not found" }] };
    const opened = name ? agentgym.views[name](main, now) : (fill(main, parts.empty("There is nothing at this address.", "Go back to the list of runs.")), view);
    view = opened;
    named(view);
    window.scrollTo(0, 0);
    if (!main.contains(document.activeElement)) main.focus({ preventScroll: true });
  }

  // A server that is gone is said at once, and asked again until it is back.
  function gone(lost) {
    const banner = document.getElementById("banner");
    banner.hidden = !lost;
    fill(banner, lost && [h("b", {}, "The server does not answer. "), parts.code("Start `agentgym view` again; this page goes on by itself.")]);
    window.clearTimeout(waiting);
    if (lost) waiting = window.setTimeout(ask, EVERY);
    else if (view && document.querySelector("#main .problem")) open(router.now());
  }

  function ask() {
    api.runs().catch(() => { waiting = window.setTimeout(ask, EVERY); });
  }

  function start() {
    show(THEMES[kept()] ? kept() : "system");
    document.getElementById("theme").addEventListener("click", theme);
    document.getElementById("help").addEventListener("click", agentgym.keys.help);
    document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); });
    document.addEventListener("keydown", (event) => view && agentgym.keys.pressed(event, view));
    window.addEventListener("hashchange", route);
    api.onGone(gone);
    route();
  }

  agentgym.main = { named, theme };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
