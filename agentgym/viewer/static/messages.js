// Messages of a conversation as elements.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const { h, fill, parts, markdown } = agentgym;
  const f = agentgym.format;
  const SHOWN = new Set(["role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"]);

  // `shown` makes an element of a text.
  function content(value, shown) {
    if (value === null || value === undefined || value === "") return [];
    if (typeof value === "string") return [shown(value)];
    if (!Array.isArray(value)) return [json(value)];
    return value.map((part) => {
      if (part && part.type === "text") return shown(String(part.text ?? ""));
      const address = part && part.type === "image_url" && (part.image_url && part.image_url.url ? part.image_url.url : part.image_url);
      if (agentgym.isImage(address)) return markdown.picture(address);
      return [h("span", { class: "chip" }, parts.name((part && part.type) || "part")), json(part)];
    });
  }

  const textsOf = (value) => (typeof value === "string" ? [value] : Array.isArray(value) ? value.filter((part) => part && part.type === "text").map((part) => String(part.text ?? "")) : []);

  // The content, and a button where it looks like Markdown: rendered or as it was written. What tools say is first as written.
  function rendering(value, role) {
    const body = h("div", { class: "content" });
    let rendered = textsOf(value).some(markdown.looks);
    const button = rendered && h("button", { class: "more small form", type: "button", on: { click: () => { rendered = !rendered; draw(); } } });
    rendered = rendered && role !== "tool";
    function draw() {
      fill(body, content(value, rendered ? (text) => parts.longText(text, "text", markdown.render) : parts.longText));
      if (!button) return;
      button.textContent = rendered ? "Text" : "Rendered";
      button.title = rendered ? "Show it as it was written" : "Show it as Markdown";
    }
    draw();
    return [body, button];
  }

  const json = (value) => parts.pretty(value === null || typeof value === "string" ? JSON.stringify(value) : value);

  // The arguments of a tool call: each by its name, texts with their own line breaks.
  function callArguments(given) {
    let value = given;
    if (typeof given === "string") {
      try {
        value = JSON.parse(given);
      } catch {
        return [h("span", { class: "bad small" }, "arguments are not valid JSON"), parts.longText(given, "code")];
      }
    }
    if (value === null || typeof value !== "object" || Array.isArray(value)) return [json(value)];
    const names = Object.entries(value);
    if (!names.length) return [h("span", { class: "muted small" }, "no arguments")];
    return [h("dl", { class: "arguments" }, names.map(([name, item]) => [
      h("dt", {}, parts.name(name)), h("dd", {}, typeof item === "string" ? parts.longText(item, "code") : json(item))]))];
  }

  function toolCall(call) {
    const made = (call && call.function) || {};
    return h("div", { class: "call" },
      h("div", { class: "call-head" }, h("span", { class: "chip" }, "calls"), h("b", { class: "mono" }, parts.name(made.name ?? "?")), call && call.id && h("span", { class: "muted small mono" }, parts.name(call.id))),
      callArguments(made.arguments));
  }

  function reasoning(message) {
    const text = message.reasoning_content || message.reasoning;
    if (!text) return null;
    return h("details", { class: "reasoning" }, h("summary", {}, `Reasoning · ${f.count(String(text).length)} characters`), parts.longText(typeof text === "string" ? text : JSON.stringify(text, null, 2)));
  }

  function message(given) {
    const value = given && typeof given === "object" ? given : { role: "?", content: String(given) };
    const role = String(value.role ?? "?");
    const rest = Object.fromEntries(Object.entries(value).filter(([key, v]) => !SHOWN.has(key) && v !== null));
    const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
    const [body, form] = rendering(value.content, role);
    return h("article", { class: `message ${known}`, "aria-label": `${role} message` },
      h("header", {}, h("span", { class: "role" }, parts.name(role)), value.name && h("span", { class: "mono small" }, parts.name(value.name)),
        value.tool_call_id && h("span", { class: "muted small mono" }, "answers ", parts.name(value.tool_call_id)), form && [h("span", { class: "spring" }), form]),
      reasoning(value), body, Array.isArray(value.tool_calls) && value.tool_calls.map(toolCall),
      Object.keys(rest).length > 0 && parts.fold("Other fields", parts.pretty(rest)),
      !value.content && !(value.tool_calls || []).length && h("p", { class: "muted small" }, "no text"));
  }

  agentgym.message = message;
})();
