// The patch that an episode ended in, as a coloured diff, and what became of each test: `model_patch` and `tests` of the last info.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, written, parts } = agentgym;
  const f = agentgym.format;
  const MOST_LINES = 5000; // that are coloured; more stay text
  const MOST_TESTS = 500;
  const GOOD = new Set(["PASSED", "XFAIL", "SKIPPED"]);
  const HEAD = /^(diff --git |index |--- |\+\+\+ |new file |deleted file |old mode |new mode |similarity |rename |copy |GIT binary )/;

  // Lines of a hunk may look like those of a head ("--- x" removes "-- x"), so the hunk's own counts say where it ends.
  function diff(text) {
    const lines = text.split("\n");
    let [old, now] = [0, 0];
    const shown = lines.slice(0, MOST_LINES).map((text, at) => {
      const line = at + 1 < lines.length ? `${text}\n` : text;
      const hunk = /^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@/.exec(line);
      if (hunk && old <= 0 && now <= 0) {
        [old, now] = [Number(hunk[1] ?? 1), Number(hunk[2] ?? 1)];
        return h("span", { class: "diff-hunk" }, written(line));
      }
      if (old <= 0 && now <= 0) return h("span", { class: HEAD.test(line) && "diff-file" }, written(line));
      const sign = line[0];
      if (sign !== "+" && sign !== "\\") old -= 1;
      if (sign !== "-" && sign !== "\\") now -= 1;
      return h("span", { class: sign === "+" ? "diff-new" : sign === "-" ? "diff-old" : null }, written(line));
    });
    return h("div", { class: "text code diff", dir: "ltr" }, shown, written(lines.slice(MOST_LINES).join("\n")));
  }

  // Tests of any groups: {group: {name: status}}, or {group: [name]} of tests that did not pass.
  function testsOf(tests) {
    if (!tests || typeof tests !== "object") return [];
    return Object.entries(tests).flatMap(([group, found]) => {
      const named = Array.isArray(found) ? found.map((name) => [name, null]) : found && typeof found === "object" ? Object.entries(found) : [];
      return named.map(([name, status]) => ({ group: group.replaceAll("_", " "), name: String(name), status: typeof status === "string" ? status : null, listed: Array.isArray(found) }));
    });
  }

  function statusOf(test) {
    const good = GOOD.has(test.status);
    return h("span", { class: good ? "better" : "worse" }, parts.mark(good ? "success" : "failure"), " ", test.listed ? "not passed" : parts.name(test.status || "not in the log"));
  }

  function results(tests) {
    const columns = [
      { name: "status", title: "Status", of: (t) => t.status || "", show: statusOf },
      { name: "name", title: "Test", of: (t) => t.name, show: (t) => h("bdi", { class: "mono" }, parts.name(t.name)) },
      { name: "group", title: "Group", of: (t) => t.group, show: (t) => parts.name(t.group) },
    ];
    const { element } = parts.table("Tests by name", columns, tests.slice(0, MOST_TESTS));
    return [element, tests.length > MOST_TESTS && h("p", { class: "muted small" }, `and ${f.count(tests.length - MOST_TESTS)} more`)];
  }

  // The sections of an episode; null where its environment told neither.
  function view(episode) {
    const info = ((episode.turns || []).at(-1) || {}).info || {};
    const patch = typeof info.model_patch === "string" ? info.model_patch : null;
    const tests = testsOf(info.tests);
    if (patch === null && !tests.length) return null;
    return h("section", { class: "turn patch", "aria-label": "Patch" },
      patch !== null && [h("header", { class: "turn-head" }, h("h2", {}, "Patch")),
        patch ? parts.longText(patch, "text", diff) : h("p", { class: "muted" }, "It is empty.")],
      tests.length > 0 && [h("header", { class: "turn-head" }, h("h2", {}, "Tests")), results(tests)]);
  }

  agentgym.patch = { view };
})();
