// SPDX-License-Identifier: Apache-2.0
// The console's script. Pages can be read without it; it keeps them current, fills in the code of a
// login link, and writes the command that a form corresponds to.

// The code of a login link is in its fragment, which browsers do not send.
const login = document.getElementById("login");
if (login && location.pathname === "/login" && location.hash.length > 1) {
  login.elements.code.value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  login.submit();
}

// quoted writes a word as a shell takes it literally, as the server does.
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : "'" + word.replaceAll("'", "'\\''") + "'");

// command writes a command line from its pattern and the values of a form, as the server does.
function command(pattern, values) {
  const text = pattern.replace(/ \[(?:(\w+)\? )?([^\]]*)\]/g, (whole, when, words) => {
    if (when && !values[when]) return "";
    for (const [, name] of words.matchAll(/\{\*?(\w+)\}/g)) if (!values[name]) return "";
    return " " + words;
  });
  return text.replace(/\{(\*?)(\w+)\}/g, (whole, several, name) => {
    if (!values[name]) return name.toUpperCase();
    return several ? values[name].split(/\s+/).map(quoted).join(" ") : quoted(values[name]);
  });
}

function show(form) {
  const values = {};
  for (const [name, value] of new FormData(form)) values[name] = value.trim();
  form.querySelector(".command").textContent = command(form.dataset.command, values);
}

document.addEventListener("input", (event) => {
  const form = event.target.form;
  if (form && form.dataset.command) show(form);
});
for (const form of document.querySelectorAll("form[data-command]")) show(form);

// One stream keeps a tab current. A tab that is not seen has none: browsers open few connections.
const live = document.getElementById("live");
const trouble = document.getElementById("trouble");
const state = document.getElementById("live-state");
const word = document.getElementById("live-word");
let stream = null;

function say(text, ok) {
  state.hidden = false;
  state.classList.toggle("off", !ok);
  if (word.textContent !== text) word.textContent = text;
}

// busy reports whether a person is at work in a section: it stays as it is meanwhile.
const busy = (section) => section.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");

// patch makes a node like another one, and changes only what differs: what a person has selected,
// scrolled, opened or reached with the keyboard stays as it is.
function patch(old, next) {
  if (old.nodeName !== next.nodeName || (old.id ?? "") !== (next.id ?? "")) return old.replaceWith(next);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  if (old.isEqualNode(next) || (old.tagName === "SECTION" && busy(old))) return;
  const kept = (name) => name === "open" && old.tagName === "DETAILS";
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name) && !kept(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value && !kept(name)) old.setAttribute(name, value);
  patchAll(old, [...next.childNodes]);
}

// patchAll makes the children of an element like these. One with an id is found again by it.
function patchAll(parent, wanted) {
  wanted.forEach((next, i) => {
    const known = next.id && [...parent.children].find((c) => c.id === next.id);
    if (known && known !== parent.childNodes[i]) parent.insertBefore(known, parent.childNodes[i] ?? null);
    const old = parent.childNodes[i];
    if (!old) parent.append(next);
    else patch(old, next);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

// replace makes the live part of the page like the new one. A template keeps the white space with
// which the part begins, as the page itself has it; a whole document would drop it, and then every
// section would have to move.
function replace(html) {
  const next = document.createElement("template");
  next.innerHTML = html;
  const focused = live.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  patchAll(live, [...next.content.childNodes]);
  if (focused && document.activeElement?.getAttribute("href") !== focused) [...live.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
}

function open() {
  if (stream || !live || document.hidden) return;
  stream = new EventSource(location.pathname + location.search);
  stream.addEventListener("live", (event) => {
    replace(event.data);
    trouble.replaceChildren();
    say("live", true);
  });
  stream.addEventListener("trouble", (event) => {
    trouble.innerHTML = event.data;
    say("not current", false);
  });
  stream.onopen = () => say("live", true);
  stream.onerror = () => say("the console does not answer", false);
}

function close() {
  stream?.close();
  stream = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
addEventListener("pagehide", close);
open();
