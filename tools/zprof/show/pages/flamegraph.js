// The flamegraph: the bytes of a moment as an icicle or a treemap of modules, or of the lines that made them; a click makes one the whole picture.
"use strict";

const state = { tier: 0, kind: "icicle", query: "", root: 0 };
const MOST_DRAWN = 700, MOST_DEEP = 9, MOST_LARGEST = 100;

for (const tier of DATA.tiers) {
  tier.children = tier.name.map(() => []);
  tier.parent.forEach((parent, node) => { if (parent >= 0) tier.children[parent].push(node); });
  for (const list of tier.children) list.sort((a, b) => tier.nbytes[b] - tier.nbytes[a]);
}

function now() {
  return DATA.tiers[state.tier];
}

// Neighbours that are many and small, put together so that they can be read; it is in no path but its own.
function isGroup(node) {
  return now().merged[node] > 0 && now().children[node].length > 0;
}

function pathOf(node) {
  const names = [];
  for (let each = node; each > 0; each = now().parent[each]) if (each === node || !isGroup(each)) names.unshift(now().name[each]);
  return names;
}

// What stands below a node, without groups.
function members(node) {
  return now().children[node].flatMap((child) => (isGroup(child) ? members(child) : [child]));
}

function isLeaf(node) {
  return now().category[node] >= 0;
}

function fullName(node) {
  const names = pathOf(node), at = names.length - 1;
  if (!names.length) return now().tier;
  if (DATA.by === "line") return names.join(" > ");
  return isLeaf(node) || now().merged[node] ? `${names.slice(0, at).join(".")}${at ? ", " : ""}${names[at]}` : names.join(".");
}

function share(count, of) {
  return `${((100 * count) / of).toFixed(count / of < 0.0995 ? 1 : 0)} %`;
}

// By name, 2 before 10, so that two pages of one model look alike.
const byName = new Intl.Collator("en", { numeric: true });

// The nodes to draw below the root: all but those too small to see, which become one of their parent's.
function drawn() {
  const tier = now(), least = tier.nbytes[state.root] / MOST_DRAWN;
  const found = [], waiting = [[state.root, -1, 0]];
  while (waiting.length) {
    const [node, parent, depth] = waiting.pop();
    const place = found.length;
    found.push({ node, parent, nbytes: tier.nbytes[node], small: 0 });
    if (depth >= MOST_DEEP) continue;
    const small = tier.children[node].filter((child) => tier.nbytes[child] < least);
    // A group says what is in it.
    if (small.length && !(isGroup(node) && small.length === tier.children[node].length)) found.push({ node: small.length === 1 ? small[0] : node, parent: place, nbytes: small.reduce((total, child) => total + tier.nbytes[child], 0), small: small.length === 1 ? 0 : small.length });
    const large = tier.children[node].filter((child) => tier.nbytes[child] >= least);
    // The last one waiting comes next.
    if (state.kind === "icicle") large.sort((a, b) => byName.compare(tier.name[b], tier.name[a])); else large.reverse();
    for (const child of large) waiting.push([child, place, depth + 1]);
  }
  return found;
}

function rowsDrawn() {
  const depth = [];
  shown.forEach((each, i) => { depth[i] = each.parent < 0 ? 1 : depth[each.parent] + 1; });
  return Math.max(4, ...depth);
}

function hits() {
  const tier = now();
  if (!state.query) return null;
  const lit = tier.name.map(() => 0);
  let total = 0, count = 0;
  // Parents come first: what lies below a module that was found is found with it, and counted once.
  for (let node = 1; node < lit.length; node++) {
    if (tier.parent[node] >= 0 && lit[tier.parent[node]] === 2) { lit[node] = 2; continue; }
    if (isGroup(node) || !fullName(node).toLowerCase().includes(state.query)) continue;
    lit[node] = 2;
    total += tier.nbytes[node];
    count++;
  }
  for (let node = lit.length - 1; node > 0; node--) if (lit[node] && !lit[tier.parent[node]]) lit[tier.parent[node]] = 1;
  return { lit, total, count };
}

const NEUTRAL = { light: ["#cfd8e6", "#dde4ee"], dark: ["#3a475c", "#2f3a4c"] };

function depthOf(node) {
  let depth = 0;
  for (let each = node; each > 0; each = now().parent[each]) depth++;
  return depth;
}

let shown = [];

// What fits into a node: name and bytes, the name, its beginning, or nothing. A treemap finds out for itself.
function written(each, root) {
  const tier = now();
  const name = each.small ? `${each.small} smaller` : root ? fullName(each.node) : tier.name[each.node];
  const size = `${bytes(each.nbytes)}, ${share(each.nbytes, tier.total)}`;
  if (state.kind === "treemap") return `${plain(name)}<br>${size}`;
  const width = document.querySelector("main").clientWidth - 30;
  const fits = Math.floor(((width * each.nbytes) / tier.nbytes[state.root] - 6) / 7.6);
  if (fits < 3) return "";
  const first = name.length > fits ? `${name.slice(0, fits - 1)}…` : name;
  return size.length <= fits ? `${plain(first)}<br>${size}` : bytes(each.nbytes).length <= fits ? `${plain(first)}<br>${bytes(each.nbytes)}` : plain(first);
}

function draw() {
  const tier = now();
  const found = hits();
  shown = drawn();
  const fade = theme() === "dark" ? "#1c222b" : "#f1f3f6";
  const colors = shown.map((each) => {
    if (found && !found.lit[each.node]) return fade;
    if (each.small) return color("unexplained");
    return isLeaf(each.node) ? color(tier.categories[tier.category[each.node]]) : NEUTRAL[theme()][depthOf(each.node) % 2];
  });
  const inks = shown.map((each, i) => (colors[i] === fade ? color("soft") : isLeaf(each.node) && !each.small ? (tier.categories[tier.category[each.node]] === "parameter" && theme() === "light" ? "#ffffff" : "#0b0e13") : color("ink")));
  const trace = {
    type: state.kind, branchvalues: "total", sort: false,
    ids: shown.map((_, i) => String(i)), parents: shown.map((each) => (each.parent < 0 ? "" : String(each.parent))),
    labels: shown.map((each, i) => plain(each.small ? `${each.small} smaller` : i === 0 ? fullName(each.node) : tier.name[each.node])),
    text: shown.map((each, i) => written(each, i === 0)),
    values: shown.map((each) => each.nbytes),
    texttemplate: "%{text}", leaf: { opacity: 1 }, hoverinfo: "none", pathbar: { visible: false },
    marker: { colors, line: { color: color("card"), width: 1 }, pad: { t: 20, l: 3, r: 3, b: 3 } },
    insidetextfont: { color: inks, size: 12 }, outsidetextfont: { color: color("ink") }, textfont: { color: inks },
    tiling: state.kind === "icicle" ? { orientation: "v", pad: 1 } : { pad: 2 },
  };
  const layout = { ...baseLayout(state.kind === "treemap" ? Math.max(380, innerHeight - 330) : 46 * rowsDrawn() + 20, { l: 14, r: 14, t: 4, b: 12 }), hovermode: "closest", uniformtext: { minsize: 10, mode: "hide" } };
  layout.width = document.querySelector("main").clientWidth - 2;
  const node = document.getElementById("flame");
  Plotly.react(node, [trace], layout, PLOT_CONFIG);
  if (!node.dataset.listening) {
    node.dataset.listening = "yes";
    for (const kind of ["icicle", "treemap"]) {
      node.on(`plotly_${kind}click`, (event) => {
        const each = shown[event.points[0].pointNumber];
        hideTip();
        // Not within plotly's own handling of the click, which would draw over what is drawn here.
        if (each) setTimeout(() => choose(each.node), 0);
        return false;
      });
    }
    node.on("plotly_hover", (event) => {
      const each = shown[event.points[0].pointNumber];
      if (each && event.event) showTip(event.event.clientX, event.event.clientY, ...described(each));
    });
    node.on("plotly_unhover", hideTip);
    node.addEventListener("pointerleave", hideTip);
  }
  document.getElementById("found").textContent = found ? `${found.count.toLocaleString("en")} found, ${bytes(found.total)} (${share(found.total, tier.total)})` : "";
  fillCrumbs();
  fillLargest();
}

function described(each) {
  const tier = now(), above = tier.parent[each.node];
  const name = each.small ? `${each.small} smaller parts of ${fullName(each.node)}` : fullName(each.node);
  const of = each.small ? tier.nbytes[each.node] : above >= 0 ? tier.nbytes[above] : tier.total;
  return [el("b", {}, isLeaf(each.node) ? dot(tier.categories[tier.category[each.node]]) : "", name), el("table", {},
    [["bytes", bytes(each.nbytes)], [`of ${tier.tier}`, share(each.nbytes, tier.total)], ["of its parent", share(each.nbytes, of)]]
      .map(([label, value]) => el("tr", {}, el("td", {}, label), el("td", { class: "num" }, value))))];
}

// A module becomes the whole picture; a leaf, or what is already that, only describes itself.
function choose(node) {
  const tier = now();
  if (tier.children[node].length && node !== state.root) state.root = node;
  else if (node === state.root && node > 0) state.root = tier.parent[node];
  const sums = new Map();
  const waiting = [node];
  while (waiting.length) {
    const each = waiting.pop();
    if (tier.category[each] >= 0 && !(tier.parent[each] >= 0 && tier.category[tier.parent[each]] >= 0 && each !== node)) {
      const name = tier.categories[tier.category[each]];
      sums.set(name, (sums.get(name) || 0) + tier.nbytes[each]);
    }
    waiting.push(...tier.children[each]);
  }
  openPanel("Details", facts([
    [DATA.by, el("span", { class: "mono" }, fullName(node))], ["tier", tier.tier],
    ["bytes", `${bytes(tier.nbytes[node])} (${tier.nbytes[node].toLocaleString("en")})`], [`of ${tier.tier}`, share(tier.nbytes[node], tier.total)],
  ]), el("table", {}, el("tbody", {}, [...sums].sort((a, b) => b[1] - a[1]).map(([name, count]) => el("tr", {}, el("td", {}, dot(name), name), el("td", { class: "num" }, bytes(count)))))));
  draw();
}

function fillCrumbs() {
  const nodes = [];
  for (let each = state.root; each >= 0; each = now().parent[each]) nodes.unshift(each);
  document.getElementById("crumbs").replaceChildren(...nodes.flatMap((node, i) => [i ? el("span", { "aria-hidden": "true" }, "›") : "",
    el("button", { type: "button", "aria-current": node === state.root ? "true" : null, onclick: () => { state.root = node; draw(); } }, now().name[node])]));
}

function fillLargest() {
  const tier = now(), all = members(state.root).sort((a, b) => tier.nbytes[b] - tier.nbytes[a]);
  document.getElementById("largest-count").textContent = all.length > MOST_LARGEST ? `${MOST_LARGEST} of ${all.length.toLocaleString("en")}` : "";
  document.getElementById("largest-body").replaceChildren(...all.slice(0, MOST_LARGEST).map((node) => el("tr", {},
    el("td", { class: "name" }, isLeaf(node) ? dot(tier.categories[tier.category[node]]) : "", tier.name[node]), el("td", { class: "num" }, bytes(tier.nbytes[node])),
    el("td", { class: "num" }, share(tier.nbytes[node], tier.total)),
    el("td", {}, el("button", { type: "button", "aria-label": `Show ${tier.name[node]}`, onclick: () => choose(node) }, "Show")))));
}

function fillLegend() {
  const tier = now(), sums = tier.categories.map(() => 0);
  tier.name.forEach((_, node) => {
    const parent = tier.parent[node];
    if (tier.category[node] >= 0 && !(parent >= 0 && tier.category[parent] >= 0)) sums[tier.category[node]] += tier.nbytes[node];
  });
  document.getElementById("legend").replaceChildren(...tier.categories.map((name, i) => sums[i] > 0 && el("span", { class: "entry" }, dot(name), `${name} ${bytes(sums[i])}`)).filter(Boolean));
}

function redraw() {
  if (DATA.tiers.length) draw();
}

start(() => {
  const page = document.getElementById("page");
  page.append(el("header", {}, el("h1", {}, DATA.title), el("div", { class: "about" }, [...DATA.about, DATA.argv].filter(Boolean).join(" · "))));
  const tiers = el("select", { id: "tier", onchange: (event) => { state.tier = Number(event.target.value); state.root = 0; fillLegend(); draw(); } },
    DATA.tiers.map((tier, i) => el("option", { value: String(i) }, `${tier.tier}, ${tier.shown}`)));
  tiers.disabled = DATA.tiers.length < 2;
  const kind = el("button", { id: "kind", type: "button", onclick: () => { state.kind = state.kind === "icicle" ? "treemap" : "icicle"; kind.textContent = state.kind === "icicle" ? "As a treemap" : "As an icicle"; redraw(); } }, "As a treemap");
  page.append(el("div", { class: "bar", role: "toolbar", "aria-label": "View" }, el("label", {}, "Tier", tiers),
    el("label", {}, "Find", el("input", { id: "search", type: "search", placeholder: `${DATA.by} name`, oninput: (event) => { state.query = event.target.value.trim().toLowerCase(); redraw(); } })),
    el("span", { id: "found", role: "status" }), el("span", { class: "gap" }), kind,
    el("button", { id: "whole", class: "primary", type: "button", onclick: () => { state.root = 0; redraw(); } }, "Whole tier"), themeButton()));
  if (DATA.damage) page.append(el("p", { class: "warn" }, DATA.damage));
  const main = el("main", {});
  page.append(el("div", { class: "cards" }, DATA.tiers.map((tier) => card(`${tier.tier}, at ${DATA.at === "peak" ? "its peak" : `the peak of ${DATA.at}`}`, tier.shown, `${duration(tier.at_ms)} after the recording began`))),
    el("div", { class: "split" }, main, panel), tip);
  if (!DATA.tiers.length) {
    main.append(el("section", {}, el("p", { class: "note" }, "This run recorded no memory: nothing was placed by the runtime. Record with zprof run --level alloc to see every storage.")));
  } else {
    main.append(el("section", { "aria-labelledby": "flame-title" }, el("div", { class: "head" }, el("h2", { id: "flame-title" }, `Bytes by ${DATA.by}`), el("div", { class: "legend", id: "legend" }), el("span", { class: "say" }, `click a ${DATA.by} to zoom in, again to zoom out`)),
      el("nav", { class: "crumbs", id: "crumbs", "aria-label": `Shown ${DATA.by}` }), el("div", { class: "plot", id: "flame", role: "img", "aria-label": `Bytes by ${DATA.by}; the table below shows the same` })),
    el("section", { "aria-labelledby": "largest-title" }, el("div", { class: "head" }, el("h2", { id: "largest-title" }, "Largest shown"), el("span", { class: "say", id: "largest-count" })),
      el("div", { class: "scroll", tabindex: "0", role: "group", "aria-labelledby": "largest-title" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "part"), el("th", { scope: "col", class: "num" }, "bytes"), el("th", { scope: "col", class: "num" }, "of the tier"), el("th", { scope: "col" }, el("span", { class: "sr" }, "show")))), el("tbody", { id: "largest-body" })))));
    if (DATA.tiers.some((tier) => tier.least)) main.append(el("p", { class: "note" }, DATA.tiers.filter((tier) => tier.least).map((tier) => `On ${tier.tier}, parts below ${bytes(tier.least)} are merged.`).join(" ")));
    fillLegend();
  }
  themed.push(redraw);
  resized.push(redraw);
  window.addEventListener("resize", redraw);
  applyTheme();
  document.documentElement.dataset.ready = "yes";
});
