// An exported file holds its data. The answers are those of the server, so that the page need not know the difference.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const holder = document.getElementById("agentgym-data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const texts = new Map();
  const UNSEEN = new Set(["role", "tool_call_id", "type", "id"]);

  // What a reader sees of an episode, in small letters: no names of fields, roles or ids.
  function textsOf(run, key) {
    const id = `${run} ${key}`;
    if (!texts.has(id)) {
      const { episode } = (data.episodes[run] || {})[key] || { episode: { turns: [] } };
      const calls = [...episode.turns, ...(episode.summaries || [])];
      const said = calls.map((call) => call && [call.observation, call.reply]);
      texts.set(id, leaves([said, episode.final_observation, episode.error]).map((text) => text.toLowerCase()));
    }
    return texts.get(id);
  }

  function leaves(value) {
    if (typeof value === "string") return [value];
    if (value === null || typeof value !== "object") return [];
    const inner = Array.isArray(value) ? value : Object.keys(value).filter((name) => !UNSEEN.has(name)).map((name) => value[name]);
    return inner.flatMap(leaves);
  }

  const within = (value, low, high) =>
    (low === undefined || (value !== null && value >= Number(low))) && (high === undefined || (value !== null && value <= Number(high)));

  function matches(run, row, q) {
    if (q.superseded !== "1" && row.superseded) return false;
    for (const name of ["cell", "end", "cause", "task"]) if (q[name] !== undefined && row[name] !== q[name]) return false;
    if (q.task_has !== undefined && !row.task.toLowerCase().includes(q.task_has.toLowerCase())) return false;
    if (q.sample !== undefined && row.sample !== Number(q.sample)) return false;
    if (q.outcome !== undefined && agentgym.parts.outcomeOf(row) !== q.outcome) return false;
    if (q.tag !== undefined && !(row.tags || []).includes(q.tag)) return false;
    if (q.finish !== undefined && !(row.finishes || []).includes(q.finish)) return false;
    for (const name of ["reward", "turns", "tokens"]) {
      if (!within(row[name], q[`${name}_min`], q[`${name}_max`])) return false;
    }
    return q.text === undefined || textsOf(run, row.key).some((text) => text.includes(q.text.toLowerCase()));
  }

  function sorted(rows, by, down) {
    if (by && by !== "stored") return agentgym.parts.ordered(rows, (row) => row[by], down);
    return down ? rows.slice().reverse() : rows;
  }

  function episodes(run, given) {
    const q = Object.fromEntries(agentgym.router.given(given));
    const all = data.rows[run] || [];
    const found = sorted(all.filter((row) => matches(run, row, q)), q.sort, q.order === "desc");
    const from = Number(q.offset || 0);
    const to = from + Number(q.limit || 200);
    const total = all.filter((row) => !row.superseded).length;
    return { total, matching: found.length, rows: found.slice(from, to), next: to < found.length ? to : null };
  }

  function answer(parts, q) {
    const [, what, run, part, key] = parts;
    if (what === "compare") return data.compare[`${q.a} ${q.b}`];
    if (what !== "runs") return undefined;
    if (run === undefined) return { runs: data.runs };
    if (part === undefined) return data.details[run];
    if (part === "metrics") {
      const records = data.metrics[run] || [];
      return { records: records.slice(Number(q.after || 0)), next: records.length };
    }
    return key === undefined ? episodes(run, q) : (data.episodes[run] || {})[key];
  }

  async function get(address, q) {
    const found = answer(address.split("/").map(decodeURIComponent), q);
    if (found === undefined) throw new agentgym.api.ApiError("This was left out of the exported file.", 404);
    return found;
  }

  agentgym.embedded = { get, exported: data.exported, version: data.version, note: data.note, home: data.home };
})();
