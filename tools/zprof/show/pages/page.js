// What every page shares: reading its columns, making elements, writing bytes and times, theme, side panel, tooltip.
// Names from a trace only ever become text: textContent here, `plain` where plotly takes a string.
"use strict";

const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };

function column(packed) {
  const raw = atob(packed.b);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new KINDS[packed.t](bytes.buffer);
}

// plotly reads a subset of HTML in its texts, and entities.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
}

function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function bytes(count) {
  const [unit, name] = SIZES.find(([size]) => Math.abs(count) >= size) || [1, "B"];
  return unit === 1 ? `${Math.round(count)} B` : `${count < 0 ? "−" : ""}${Number(digits(Math.abs(count) / unit))} ${name}`;
}

const COUNTS = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [0, ""]];

// Floating-point operations: "2.62 GFLOP".
function operations(count) {
  const [unit, prefix] = COUNTS.find(([size]) => count >= size);
  return `${Number((count / (unit || 1)).toPrecision(3))} ${prefix}FLOP`;
}

const TIMES = [[1000, "s"], [1, "ms"], [1e-3, "us"], [1e-6, "ns"]];

// The one way a duration is written: "30 s", "1.25 ms", "2 min 5 s"; three digits, none that say nothing.
function duration(ms) {
  if (ms >= 59950) {
    const minutes = Math.floor(Math.round(ms / 1000) / 60), hours = Math.floor(minutes / 60);
    return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(ms / 1000) % 60} s`;
  }
  const rounded = Number(ms.toPrecision(3));
  const [unit, name] = TIMES.find(([size]) => rounded >= size) || (rounded ? TIMES[3] : TIMES[1]);
  return `${Number((ms / unit).toPrecision(3))} ${name}`;
}

// A time since the recording began, to ``step`` ms: "25.406 s".
function moment(ms, step) {
  const [unit, name] = TIMES.find(([size]) => ms >= size) || (ms ? TIMES[3] : TIMES[0]);
  return `${(ms / unit).toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.min(12, Math.ceil(-Math.log10(step / unit) - 1e-9))) })} ${name}`;
}

// Ticks of a time axis: round numbers, all in the unit of the last.
function timeTicks(begin, end) {
  const [unit, name] = TIMES.find(([size]) => end >= size) || TIMES[2];
  const rough = (end - begin) / unit / 10;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || 1;
  const digits = Math.max(0, Math.min(12, Math.ceil(-Math.log10(step) - 1e-9)));
  const values = [];
  for (let i = Math.ceil(begin / unit / step); i * step * unit <= end && values.length < 40; i++) values.push(i * step * unit);
  return { tickvals: values, ticktext: values.map((value) => `${(value / unit).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${name}`) };
}

function plural(count, name) {
  return `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;
}

// Ticks of an axis in bytes: round numbers of a unit, not of 10.
function sizeTicks(most, per = "") {
  const [unit, name] = SIZES.find(([size]) => most >= size) || [1, "B"];
  const rough = most / unit / 4;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || 1;
  const values = [];
  for (let i = 0; i * step * unit <= most * 1.02; i++) values.push(i * step * unit);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return { tickvals: values, ticktext: values.map((value) => `${(value / unit).toFixed(decimals)} ${name}${per}`) };
}

// --- theme ---------------------------------------------------------------------------------------------------------

const themed = [];
const wished = window.matchMedia("(prefers-color-scheme: dark)");
let chosen = null;

function theme() {
  return chosen || (wished.matches ? "dark" : "light");
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  const button = document.getElementById("theme");
  if (button) button.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
  for (const redraw of themed) redraw();
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function themeButton() {
  return el("button", { id: "theme", type: "button", onclick: () => { chosen = theme() === "dark" ? "light" : "dark"; applyTheme(); } }, "Theme");
}

wished.addEventListener("change", applyTheme);
document.documentElement.dataset.theme = theme();

// What plotly's layouts have in common.
function baseLayout(height, margin) {
  return {
    height, margin, autosize: true, showlegend: false, dragmode: "zoom", hovermode: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("ink"), size: 12, family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif" },
  };
}

const PLOT_CONFIG = { displayModeBar: false, displaylogo: false, responsive: false, doubleClick: false, scrollZoom: false, showTips: false };

// --- side panel and tooltip ----------------------------------------------------------------------------------------

const panelBody = el("div", { id: "panel-body", "aria-live": "polite" });
const panelTitle = el("h2", { id: "panel-title" });
const panel = el("aside", { id: "panel", "aria-labelledby": "panel-title", hidden: true },
  el("div", { class: "top" }, panelTitle, el("button", { id: "panel-close", type: "button", "aria-label": "Close details", onclick: () => closePanel() }, "Close")),
  panelBody);
const resized = [];

function openPanel(title, ...content) {
  panelTitle.textContent = title;
  panelBody.replaceChildren(...content.flat().filter(Boolean));
  if (!panel.hidden) return;
  panel.hidden = false;
  panel.parentElement.classList.add("open");
  for (const redraw of resized) redraw();
}

function closePanel() {
  if (panel.hidden) return;
  panel.hidden = true;
  panel.parentElement.classList.remove("open");
  for (const redraw of resized) redraw();
}

document.addEventListener("keydown", (event) => { if (event.key === "Escape") closePanel(); });

function facts(rows) {
  return el("dl", {}, rows.filter(Boolean).flatMap(([name, value, kind]) => [el("dt", {}, name), el("dd", { class: kind || "" }, value)]));
}

function dot(name) {
  return el("i", { class: "dot", style: { background: `var(--${name})` } });
}

const tip = el("div", { class: "tip", id: "tip", role: "tooltip" });

function showTip(x, y, ...content) {
  tip.replaceChildren(...content);
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - box.width - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - box.height - 6))}px`;
}

function hideTip() {
  tip.style.display = "none";
}

function card(label, value, hint, loud) {
  return el("div", { class: loud ? "card loud" : "card" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "hint" }, hint || ""));
}

function holderTable(peak) {
  const rows = peak.holders.map(([count, category, tier, unit]) => el("tr", {},
    el("td", {}, dot(category)), el("td", {}, el("div", { class: "mono" }, unit || "(no unit)"), el("div", { class: "soft" }, `${category}, ${tier}`)), el("td", { class: "num" }, bytes(count))));
  if (peak.others[0]) rows.push(el("tr", {}, el("td"), el("td", { class: "soft" }, `${peak.others[0].toLocaleString("en")} more`), el("td", { class: "num" }, bytes(peak.others[1]))));
  return el("table", { class: "holders" }, el("tbody", {}, rows));
}

function start(draw) {
  try {
    draw();
  } catch (error) {
    failed(error);
    throw error;
  }
}
