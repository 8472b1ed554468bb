// Elements, made from values. No markup is ever parsed: all that a model wrote goes in as text.
(function () {
  "use strict";
  const agentgym = (window.agentgym = window.agentgym || {});
  const SVG = "http://www.w3.org/2000/svg";
  // What hides or turns text around: controls, zero width, bidirectional. They are shown by their number.
  const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]/g;
  const MOST_MARKS = 2000;

  const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}$/;
  const LONGEST_IMAGE = 20_000_000;

  // Whether an address is a picture of its own, of a kind that holds no script and asks nobody.
  const isImage = (address) => typeof address === "string" && address.length < LONGEST_IMAGE && IMAGE.test(address);

  function set(element, name, value) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "css") {
      for (const [property, setting] of Object.entries(value)) element.style.setProperty(property, setting);
    } else if (name === "href" && !String(value).startsWith("#")) {
      throw new Error(`links stay on this page: ${value}`);
    } else if (name === "src" && !isImage(value)) {
      throw new Error("only images that are data are shown");
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }

  function add(element, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  // An element: h("a", {href: "#/runs", class: "x", on: {click: f}, css: {width: "3px"}}, "text", element, [more]).
  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) set(element, name, value);
    return add(element, children);
  }

  function svg(tag, attributes, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes || {})) set(element, name, value);
    return add(element, children);
  }

  function fill(element, ...children) {
    element.replaceChildren();
    return add(element, children);
  }

  // Text of a model or an environment: as it is, but for characters that cannot be seen.
  function written(text) {
    const value = String(text);
    const marks = value.match(HIDDEN);
    if (!marks || marks.length > MOST_MARKS) return [value];
    const out = [];
    let from = 0;
    for (const found of value.matchAll(HIDDEN)) {
      const code = found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
      out.push(value.slice(from, found.index), h("span", { class: "unseen", title: "a character that cannot be seen" }, `U+${code}`));
      from = found.index + 1;
    }
    out.push(value.slice(from));
    return out;
  }

  Object.assign(agentgym, { h, svg, fill, written, isImage });
})();
