// Numbers and times as people read them.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const known = (x) => typeof x === "number" && Number.isFinite(x);

  const count = (x) => (known(x) ? Math.round(x).toLocaleString("en-US") : "–");

  // About four digits, whatever the size.
  function number(x) {
    if (!known(x)) return "–";
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 1e7 || size < 1e-4) return x.toExponential(2);
    if (Number.isInteger(x) || size >= 1000) return x.toLocaleString("en-US", { maximumFractionDigits: 1 });
    return String(Number(x.toPrecision(4)));
  }

  const percent = (x) => (known(x) ? `${(100 * x).toFixed(1)}%` : "–");
  const fixed = (x, digits) => (known(x) ? x.toFixed(digits) : "–");
  const money = (x) => (known(x) ? `$${x >= 100 ? x.toFixed(0) : x >= 0.01 || x === 0 ? x.toFixed(2) : x.toPrecision(2)}` : "–");

  function short(x) {
    if (!known(x)) return "–";
    if (x >= 1e9) return `${(x / 1e9).toFixed(1)}G`;
    if (x >= 1e6) return `${(x / 1e6).toFixed(1)}M`;
    return x >= 1e4 ? `${(x / 1e3).toFixed(1)}k` : number(Number(x.toFixed(1)));
  }

  function seconds(x) {
    if (!known(x)) return "–";
    if (x < 0.0995) return `${(1000 * x).toFixed(x < 0.01 ? 1 : 0)} ms`;
    if (x < 120) return `${x.toFixed(x < 10 ? 2 : 1)} s`;
    if (x < 7200) return `${Math.floor(x / 60)} min ${Math.round(x % 60)} s`;
    return `${Math.floor(x / 3600)} h ${Math.round((x % 3600) / 60)} min`;
  }

  function when(unix) {
    if (!known(unix)) return "–";
    const past = Date.now() / 1000 - unix;
    if (past >= 0 && past < 60) return "just now";
    if (past >= 0 && past < 3600) return `${Math.floor(past / 60)} min ago`;
    if (past >= 0 && past < 86400) return `${Math.floor(past / 3600)} h ago`;
    return moment(unix).slice(0, 16);
  }

  function moment(unix) {
    const date = new Date(unix * 1000);
    const two = (x) => String(x).padStart(2, "0");
    const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
    return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  }

  const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;

  agentgym.format = { known, count, number, percent, fixed, money, short, seconds, when, moment, plural };
})();
