// The live panel in a page. Python decides what there is to see (messages.py says how it is told), this file draws it: SVG made by
// hand, redrawn from the last texts of a few names, so that a lost message or a reloaded page costs nothing. No library, no
// request. What is clicked goes back as {ask, n} and is answered {n, error}; where no answer comes, the panel says how to stop instead.
// PROTOCOL stands in a line above this one: protocol.py, the same for both sides.

const { HELLO, ASKS, ANSWER_S, HELLO_S, TELL_HELLO, LISTEN_S, STALE_S } = PROTOCOL;
const LAST_PICTURE_S = 60; // how long after the end the last picture may be drawn again
const PANES = 3, FIGURES = 6; // seen at once; the others on demand
const WINDOWS = [["all", 1], ["last half", 0.5], ["last fifth", 0.2], ["last twentieth", 0.05]];
const AXES = { steps: "Steps", tokens: "Tokens", time: "Time", usd: "USD" };
const LETTERS = { stop: "■ Stop", pause: "❚❚ Pause", resume: "▶ Resume", save: "⤓ Save now" };

// -- numbers

function short(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  const a = Math.abs(v);
  if (a >= 1e15) return v.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (a >= size) return `${Number((v / (unit === "k" ? 1e3 : size)).toPrecision(3))}${unit}`;
  if (a >= 1000) return Math.round(v).toLocaleString("en-US");
  return a !== 0 && a < 1e-2 ? v.toExponential(2).replace(/\.?0+e/, "e") : String(Number(v.toPrecision(4)));
}

function clock(seconds) {
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor((s % 3600) / 60))}:${two(s % 60)}`;
}

// At most about `target` round numbers in [low, high]: `steps` times a power of ten apart.
function ticks(low, high, target, steps = [1, 2, 2.5, 5, 10]) {
  if (!(high > low)) return [low];
  const raw = (high - low) / target, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * steps.find((s) => s * size >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(k * step);
  return out;
}

function timeTicks(low, high, target) {
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800].find((s) => s >= (high - low) / target);
  return step ? ticks(low / step, high / step, target, [1, 10]).map((t) => t * step) : ticks(low / 3600, high / 3600, target).map((t) => t * 3600);
}

function logTicks(low, high) {
  const out = [];
  for (let e = Math.floor(low); e <= high; e++)
    for (const m of high - low > 3 ? [1] : high - low > 1 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 7]) {
      const t = e + Math.log10(m);
      if (t >= low && t <= high) out.push(t);
    }
  return out.length > 1 ? out : [low, (low + high) / 2, high];
}

// Index of the last x <= value in an ascending list, or -1.
function at(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const text = (s) => String(s).replace(/[&<>"]/g, (c) => escapes[c]);
const number = (y) => (y === null ? NaN : y === "inf" ? Infinity : y === "-inf" ? -Infinity : y);

function element(tag, name, parent, content = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (content) made.textContent = content;
  parent?.append(made);
  return made;
}

// Replace what an element says, only where it changed: a selection, a focus and a screen reader's place stay.
function say(where, html) {
  if (where.said !== html) where.innerHTML = where.said = html;
}

class Panel {
  constructor(model) {
    this.model = model;
    this.head = null;
    this.curves = new Map(); // "0/loss" -> {gen, x, y, z}
    this.keys = []; // slot -> {said, entry}
    this.hidden = new Set(); // legend entries switched off
    this.axis = "steps";
    this.log = false;
    this.more = false; // every pane and figure
    this.smooth = 0; // share of what is seen, over which lines are averaged once more
    this.share = 1; // of the run that is seen
    this.zoom = null; // [x, x] chosen with the mouse
    this.hover = null; // x under the pointer
    this.heard = false; // Python answers
    this.news = Date.now();
    this.asked = 0;
    this.waiting = new Map(); // number of what was asked -> {word, timer}
    this.spoken = 0;
    this.build();
  }

  // -- what is known

  read() {
    let head, delta;
    try {
      head = JSON.parse(this.model.get("head"));
      delta = JSON.parse(this.model.get("delta"));
    } catch {
      return false; // nothing was sent yet
    }
    const named = new Set();
    for (const entry of delta.series) {
      const name = entry.of.join("/"), key = entry.gen ? this.key(entry.slot) : null;
      named.add(name);
      if (entry.gen && key?.gen !== entry.gen) continue; // a message was lost; the next keyframe is on its way
      const curve = { x: [], y: [], z: [] };
      for (const part of [key, entry]) {
        let x = 0;
        for (const dx of part?.dx ?? []) curve.x.push((x += dx));
        for (const y of part?.y ?? []) curve.y.push(number(y));
        for (const z of part?.z ?? []) curve.z.push(z);
      }
      this.curves.set(name, curve);
    }
    for (const name of this.curves.keys()) if (!named.has(name)) this.curves.delete(name);
    this.head = head;
    return true;
  }

  key(slot) {
    const said = this.model.get(`key_${slot}`);
    if (this.keys[slot]?.said !== said) this.keys[slot] = { said, entry: said ? JSON.parse(said) : null };
    return this.keys[slot].entry;
  }

  // Steps of a run on the chosen axis: straight lines between the ruler's marks.
  along(run) {
    if (this.axis === "steps") return (x) => x;
    const ruler = this.curves.get(`${run}/ruler`), column = this.axis === "tokens" ? ruler?.y : ruler?.z;
    const price = this.axis === "usd" ? this.head.runs[run].usd_per_s ?? NaN : 1;
    if (!column?.length) return () => NaN;
    return (x) => {
      const i = Math.min(Math.max(at(ruler.x, x), 0), Math.max(ruler.x.length - 2, 0));
      const [a, b] = [ruler.x[i], ruler.x[i + 1]];
      const share = b > a ? (x - a) / (b - a) : 0;
      return price * (column[i] + share * ((column[i + 1] ?? column[i]) - column[i]));
    };
  }

  // The lines of a pane, in the order in which they are drawn, on the chosen axis.
  lines(pane) {
    const many = this.head.runs.length > 1, race = many && this.head.headline, out = [];
    this.head.runs.forEach((run, r) => {
      const along = this.along(r);
      pane.series.forEach((series, s) => {
        const curve = this.curves.get(`${r}/${series.name}`), name = many ? `run ${run.key}` : series.name;
        if (!curve || this.hidden.has(name) || (many && this.hidden.has(`style ${series.style}`))) return;
        const color = many ? run.color : series.style === "dots" ? 1 : pane.color;
        out.push({
          run, series, color: color % 6, broad: race && r === 0 && series.style === "line", rank: race && r ? -r : 0, dash: many ? color >= 6 : series.style === "line" && pane.series.find((s) => s.style === "line") !== series,
          label: (many ? `${run.key} ${series.label}` : series.label) + (this.smooth && series.style === "line" ? ", averaged further" : ""),
          x: curve.x.map(along), y: curve.y, steps: curve.x, drawn: series.style === "line" ? this.smoothed(curve) : curve.y,
        });
      });
    });
    // Of a race the baseline lies broad beneath the others, and on it first its twin, the last run: where they coincide both are seen.
    const order = { faint: 0, line: 1, dots: 2 };
    return out.sort((a, b) => order[a.series.style] - order[b.series.style] || b.broad - a.broad || a.rank - b.rank);
  }

  // Averaged once more over a share of the run: an exponential mean over steps, whatever their distance; it starts at the first value.
  smoothed({ x, y }) {
    if (!this.smooth || x.length < 3) return y;
    const over = this.smooth * this.share * (x[x.length - 1] - x[0]);
    let mean = NaN, last = x[0];
    return y.map((value, i) => {
      const kept = Math.exp((last - x[i]) / over);
      last = x[i];
      if (!Number.isFinite(value)) return value;
      return (mean = Number.isFinite(mean) ? kept * mean + (1 - kept) * value : value);
    });
  }

  // What is seen of the axis, the same in all panes.
  span(panes) {
    if (this.zoom) return this.zoom;
    let low = Infinity, high = -Infinity;
    for (const lines of panes)
      for (const { x } of lines)
        if (x.length) {
          low = Math.min(low, x.find((v) => v === v) ?? Infinity);
          high = Math.max(high, x[x.length - 1]);
        }
    if (!(low <= high)) return [0, 1];
    if (this.axis !== "steps" || low === 1) low = 0;
    if (this.share < 1) return [high - this.share * (high - low), high];
    const total = Math.max(...this.head.runs.map((run) => (run.ending || !run.total ? 0 : run.total)));
    // the frame opens at the planned length once a tenth of it has run; before, the curve would be a dot in a corner
    if (this.axis === "steps" && total > high) high = high - low < 0.1 * (total - low) ? Math.min(total, low + Math.max(10, 10 * (high - low))) : total;
    return [low, high > low ? high : low + 1];
  }

  // -- the page

  build() {
    this.root = element("section", "surokit-panel");
    this.root.setAttribute("aria-label", "Training run");
    const top = element("header", "sk-top", this.root);
    this.names = element("div", "sk-names", top);
    this.buttons = element("div", "sk-buttons", top);
    this.bar = element("div", "sk-bar", this.root);
    this.message = element("div", "sk-message", this.root);
    this.figures = element("dl", "sk-figures", this.root);
    this.legend = element("div", "sk-legend", this.root);
    this.charts = element("div", "sk-charts", this.root);
    this.tip = element("div", "sk-tip", this.charts);
    this.tools = element("div", "sk-tools", this.root);
    this.table = element("div", "sk-table", this.root);
    this.foot = element("div", "sk-foot", this.root);
    this.voice = element("div", "sk-voice", this.root);
    this.voice.setAttribute("aria-live", "polite");
    this.panes = new Map();
    this.buildTools();
    for (const word of ASKS) {
      const button = element("button", `sk-${word}`, this.buttons, LETTERS[word]);
      button.type = "button";
      button.hidden = true;
      button.onclick = () => this.ask(word);
    }
    this.sizes = new ResizeObserver(() => this.later());
    this.sizes.observe(this.root);
  }

  buildTools() {
    const group = element("div", "sk-group", this.tools);
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", "horizontal axis");
    this.axes = {};
    for (const [axis, word] of Object.entries(AXES)) {
      const button = (this.axes[axis] = element("button", "", group, word));
      button.type = "button";
      button.onclick = () => { this.axis = axis; this.zoom = null; this.draw(); };
    }
    this.logButton = element("button", "sk-log", this.tools, "log y");
    this.logButton.type = "button";
    this.logButton.onclick = () => { this.log = !this.log; this.draw(); };
    const smooth = element("label", "", this.tools, "smoothing ");
    this.slider = element("input", "", smooth);
    Object.assign(this.slider, { type: "range", min: 0, max: 20, value: 0, title: "the smoothed lines, averaged further" });
    this.slider.oninput = () => { this.smooth = this.slider.value / 200; this.draw(); };
    const window = element("label", "", this.tools, "show ");
    this.window = element("select", "", window);
    WINDOWS.forEach(([word, share]) => { element("option", "", this.window, word).value = share; });
    this.window.onchange = () => { this.share = Number(this.window.value); this.zoom = null; this.draw(); };
    this.moreButton = element("button", "sk-more", this.tools, "more curves");
    this.moreButton.type = "button";
    this.moreButton.onclick = () => { this.more = !this.more; this.draw(); };
    this.reset = element("button", "sk-reset", this.tools, "whole run");
    this.reset.type = "button";
    this.reset.onclick = () => { this.zoom = null; this.draw(); };
  }

  later() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; this.draw(); });
  }

  update() {
    if (!this.read()) return;
    this.news = Date.now();
    this.later();
    this.speak();
  }

  draw() {
    if (!this.head || !this.root.isConnected) return;
    const { head, root } = this, width = root.clientWidth;
    let theme = "";
    try { theme = JSON.parse(this.model.get("control") || "{}").theme; } catch { /* none was sent */ }
    root.dataset.theme = theme || "auto";
    root.classList.toggle("sk-narrow", width < 560);
    if (!head.axes.includes(this.axis)) this.axis = "steps";
    for (const [axis, button] of Object.entries(this.axes)) {
      button.hidden = !head.axes.includes(axis) || head.axes.length < 2;
      button.setAttribute("aria-pressed", axis === this.axis);
    }
    this.logButton.setAttribute("aria-pressed", this.log);
    this.moreButton.setAttribute("aria-pressed", this.more);
    this.moreButton.hidden = head.panes.length <= PANES;
    this.reset.hidden = !this.zoom;
    this.tools.hidden = !head.panes.length;
    this.drawHead();
    this.drawLegend();
    this.drawButtons();
    this.shown = head.panes.slice(0, this.more ? undefined : PANES);
    const lines = this.shown.map((pane) => this.lines(pane));
    this.seen = this.span(lines);
    for (const [name, pane] of this.panes)
      if (!this.shown.some((p) => p.name === name)) { pane.box.remove(); this.panes.delete(name); }
    this.shown.forEach((pane, i) => this.drawPane(pane, i, lines[i]));
    this.drawFoot();
    this.drawHover();
  }

  drawHead() {
    const { runs } = this.head;
    const together = this.head.headline ? `<div class="sk-together">${text(this.head.headline)}</div>` : "";
    say(this.names, together + runs.map((run) => {
      const dot = runs.length > 1 ? `<i class="sk-chip sk-c${run.color % 6}"></i>` : "";
      const word = run.state === "running" && run.phase ? run.phase : run.state;
      return `<div class="sk-run"><div>${dot}<b>${text(run.title || run.key || "Training")}</b>` +
        `<span class="sk-state sk-${text(run.state)} sk-phase-${text(run.phase.split(" ")[0])}">${text(word)}</span></div>` +
        `<div class="sk-recipe">${text(run.recipe)}</div><div class="sk-now">${text(run.line)}</div></div>`;
    }).join(""));
    const [run] = runs;
    this.bar.hidden = runs.length > 1 || run?.progress == null;
    if (!this.bar.hidden) say(this.bar, `<i style="width:${(100 * run.progress).toFixed(1)}%"></i>`);
    // several runs tell their figures in the table
    const figures = runs.length > 1 ? [] : (run?.figures ?? []).slice(0, this.more ? undefined : FIGURES);
    this.figures.hidden = !figures.length;
    say(this.figures, figures.map((f) =>
      `<div><dt>${text(f.name)}</dt><dd>${text(f.value)}<small>${text(f.note || "")}</small></dd></div>`).join(""));
    const { table } = this.head;
    this.table.hidden = !table;
    if (table) {
      const cells = (row, tag) => row.map((cell) => `<${tag}>${text(cell)}</${tag}>`).join("");
      say(this.table, `<table><thead><tr>${cells(table.columns, "th")}</tr></thead><tbody>` +
        `${table.rows.map((row) => `<tr>${cells(row, "td")}</tr>`).join("")}</tbody></table>`);
    }
  }

  drawLegend() {
    const { runs, panes } = this.head, many = runs.length > 1, entries = [];
    if (many) {
      for (const run of runs) entries.push([`run ${run.key}`, run.title || run.key, `sk-c${run.color % 6}`]);
      for (const [style, word] of [["faint", "each step"], ["dots", "held out"]])
        if (panes.some((pane) => pane.series.some((s) => s.style === style && runs.some((_, r) => this.curves.has(`${r}/${s.name}`)))))
          entries.push([`style ${style}`, word, `sk-ink sk-${style}`]);
    } else
      panes.slice(0, 1).forEach((pane) => pane.series.forEach((s) => {
        if (this.curves.has(`0/${s.name}`)) entries.push([s.name, s.label, `sk-c${s.style === "dots" ? 1 : 0} sk-${s.style}`]);
      }));
    const said = JSON.stringify([entries, [...this.hidden]]);
    if (this.legend.said === said) return;
    this.legend.said = said;
    this.legend.replaceChildren(...entries.map(([name, word, look]) => {
      const button = element("button", "");
      button.type = "button";
      button.innerHTML = `<i class="sk-chip ${look}"></i>${text(word)}`;
      button.setAttribute("aria-pressed", !this.hidden.has(name));
      button.onclick = () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        this.draw();
        [...this.legend.children][entries.findIndex((e) => e[0] === name)]?.focus();
      };
      return button;
    }));
  }

  drawPane(pane, i, lines) {
    let held = this.panes.get(pane.name);
    if (!held) {
      const box = element("figure", "sk-pane");
      const caption = element("figcaption", "", box);
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("role", "img");
      svg.setAttribute("tabindex", "0");
      box.append(svg);
      held = { box, caption, svg };
      this.panes.set(pane.name, held);
      this.follow(held);
    }
    if (this.charts.children[i] !== held.box) this.charts.insertBefore(held.box, this.charts.children[i] ?? null);
    held.box.classList.toggle("sk-wide", i === 0 || (i === this.shown.length - 1 && i % 2 === 1));
    const figure = this.head.runs.length === 1 && this.head.runs[0].figures.find((f) => f.pane === pane.name);
    const dashed = this.head.runs.length === 1 && lines.find((line) => line.dash);
    say(held.caption, text(pane.title + (dashed ? `, dashed: ${dashed.label}` : "")));
    const width = Math.max(held.svg.clientWidth, 120), height = i === 0 ? 230 : 130;
    const box = { left: 44, right: width - 10, top: 8, bottom: height - 20 };
    const [x0, x1] = this.seen, [y0, y1] = this.range(pane, lines);
    const log = this.log && y1 > y0 && lines.some((line) => line.drawn.some((y) => y > 0));
    const value = log ? (y) => (y > 0 ? Math.log10(y) : NaN) : (y) => y;
    const [v0, v1] = log ? [Math.log10(y0), Math.log10(y1)] : [y0, y1];
    const X = (x) => box.left + ((x - x0) / (x1 - x0)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((value(y) - v0) / (v1 - v0 || 1)) * (box.bottom - box.top);
    Object.assign(held, { pane, lines, X, Y, frame: box, width, height });
    const told = (y) => (pane.percent ? `${short(100 * y)} %` : short(y));
    const parts = [];
    for (const t of log ? logTicks(v0, v1) : ticks(v0, v1, i === 0 ? 5 : 3)) {
      const y = log ? 10 ** t : t, py = Y(y).toFixed(1);
      parts.push(`<path class="sk-grid" d="M${box.left} ${py}H${box.right}"/><text x="${box.left - 6}" y="${py}" dy=".32em" text-anchor="end">${told(Number(y.toPrecision(12)))}</text>`);
    }
    const count = Math.max(2, Math.floor((box.right - box.left) / 90));
    for (const t of this.axis === "time" ? timeTicks(x0, x1, count) : ticks(x0, x1, count))
      parts.push(`<text x="${Math.min(X(t), box.right - 6).toFixed(1)}" y="${height - 5}" text-anchor="middle">${this.place(t)}</text>`);
    const clip = `${this.id ?? (this.id = `sk${Math.random().toString(36).slice(2)}`)}-${i}`;
    parts.push(`<clipPath id="${clip}"><rect x="${box.left}" y="${box.top - 4}" width="${box.right - box.left}" height="${box.bottom - box.top + 8}"/></clipPath><g clip-path="url(#${clip})">`);
    for (const line of lines) parts.push(this.path(line, X, Y, box, x0, x1));
    if (i === 0) parts.push(this.marks(X, Y, box, x0, x1));
    parts.push("</g>", '<g class="sk-hover"></g>');
    held.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    held.svg.setAttribute("height", height);
    held.svg.setAttribute("aria-label", `${pane.title}: ${figure ? figure.value : ""} ${this.head.summary}`);
    held.svg.innerHTML = parts.join("");
    held.marks = held.svg.querySelector(".sk-hover");
  }

  // The lowest and highest y to show. The first tenth of a robust pane may leave the frame, so that the rest can be read.
  range(pane, lines) {
    const [x0, x1] = this.seen, settled = pane.robust && this.share === 1 && !this.zoom ? x0 + 0.1 * (lines.reduce((m, l) => Math.max(m, l.x[l.x.length - 1] ?? x0), x0) - x0) : x0;
    let low = Infinity, high = -Infinity, lowAll = Infinity, highAll = -Infinity;
    for (const { x, y, drawn } of lines)
      for (let i = 0; i < x.length; i++)
        for (const v of y === drawn ? [y[i]] : [y[i], drawn[i]]) {
          if (!Number.isFinite(v) || Math.abs(v) > 1e100 || x[i] < x0 || x[i] > x1 || (this.log && v <= 0)) continue;
          lowAll = Math.min(lowAll, v);
          highAll = Math.max(highAll, v);
          if (x[i] >= settled) { low = Math.min(low, v); high = Math.max(high, v); }
        }
    if (!(low <= high)) [low, high] = [lowAll, highAll];
    if (!(low <= high)) return this.log ? [1, 10] : [0, 1];
    if (highAll < high + 0.6 * (high - low)) high = highAll;
    low = Math.min(low, lowAll);
    if (this.log) return low < high ? [low * 0.95, high * 1.05] : [low / 2, high * 2];
    if (pane.zero) low = Math.min(low, 0);
    const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [pane.zero && low === 0 ? 0 : low - room, high + room];
  }

  path(line, X, Y, box, x0, x1) {
    const look = `sk-${line.series.style} sk-c${line.color}${line.dash ? " sk-dash" : ""}${line.broad ? " sk-broad" : ""}`;
    const { x, drawn } = line;
    const first = Math.max(at(x, x0) - 1, 0), last = Math.min(at(x, x1) + 2, x.length);
    let d = "", open = false, extra = "";
    for (let i = first; i < last; i++) {
      const y = drawn[i], px = X(x[i]);
      if (!(px === px)) continue;
      const py = Math.min(Math.max(Y(y), box.top - 2e3), box.bottom + 2e3);
      if (!(py === py) || !Number.isFinite(y)) {
        open = false;
        if (line.series.style !== "line") extra += `<path class="sk-bad" d="M${px - 3} ${box.top}l6 6m0 -6l-6 6"><title>not finite</title></path>`;
      } else if (line.series.style === "dots") extra += `<circle class="${look}" cx="${px.toFixed(1)}" cy="${py.toFixed(1)}" r="3.2"/>`;
      else {
        d += `${open ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
        open = true;
      }
    }
    if (line.series.style === "dots" && last - first > 1) extra = `<path class="sk-thread sk-c${line.color}" d="${this.thread(line, X, Y, first, last)}"/>${extra}`;
    return (d ? `<path class="${look}" d="${d}"/>` : "") + extra;
  }

  thread(line, X, Y, first, last) {
    let d = "";
    for (let i = first; i < last; i++) if (Number.isFinite(line.drawn[i])) d += `${d ? "L" : "M"}${X(line.x[i]).toFixed(1)} ${Y(line.drawn[i]).toFixed(1)}`;
    return d;
  }

  // What happened: a flag at the top of the first pane for each event.
  marks(X, Y, box, x0, x1) {
    return this.head.runs.map((run, r) => {
      if (this.hidden.has(`run ${run.key}`)) return "";
      const along = this.along(r);
      return run.events.map((event) => {
        const x = along(event.step);
        if (!(x >= x0 && x <= x1)) return "";
        const px = X(x).toFixed(1), said = `step ${event.step.toLocaleString("en-US")}: ${event.text}${event.suggestion ? ` ${event.suggestion}` : ""}`;
        return `<g class="sk-event sk-event-${text(event.kind)}"><path class="sk-stem" d="M${px} ${box.top + 7}V${box.bottom}"/>` +
          `<path class="sk-flag" d="M${px} ${box.top + 8}l-5 -9h10z"><title>${text(said)}</title></path></g>`;
      }).join("");
    }).join("");
  }

  place(x) {
    return this.axis === "time" ? clock(x) : this.axis === "usd" ? `$${short(x)}` : short(x);
  }

  drawFoot() {
    const many = this.head.runs.length > 1, out = [];
    for (const run of this.head.runs) {
      const who = many ? `${run.title || run.key}: ` : "";
      for (const warning of run.warnings) out.push(`<p class="sk-warning">${text(who + warning)}</p>`);
      if (run.suggestion) out.push(`<p class="sk-advice">${text(run.suggestion)}</p>`);
      if (!many || this.more) for (const note of run.notes) out.push(`<p>${text(who + note)}</p>`); // the table says it in short
      if (run.ending) out.push(`<p class="sk-ending">${text(who + run.ending)}</p>`);
    }
    this.foot.hidden = !out.length;
    say(this.foot, out.join(""));
  }

  // -- the pointer, and the arrow keys

  follow(held) {
    const { svg } = held;
    let from = null;
    const x = (event) => {
      const place = svg.getBoundingClientRect(), [x0, x1] = this.seen;
      const px = ((event.clientX - place.left) / place.width) * held.width;
      return Math.min(Math.max(x0 + ((px - held.frame.left) / (held.frame.right - held.frame.left)) * (x1 - x0), x0), x1);
    };
    svg.onpointermove = (event) => { this.hover = { x: x(event), held, from }; this.drawHover(); };
    svg.onpointerleave = () => { if (from === null) { this.hover = null; this.drawHover(); } };
    svg.onpointerdown = (event) => { if (event.button === 0) { from = x(event); svg.setPointerCapture(event.pointerId); } };
    svg.onpointerup = (event) => {
      const to = x(event), [x0, x1] = this.seen;
      if (from !== null && Math.abs(to - from) > 0.02 * (x1 - x0)) this.zoom = [Math.min(from, to), Math.max(from, to)];
      from = null;
      this.hover = null;
      this.draw();
    };
    svg.ondblclick = () => { this.zoom = null; this.draw(); };
    svg.onkeydown = (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.hover = this.zoom = null;
      else if (way) {
        const [x0, x1] = this.seen;
        this.hover = { x: Math.min(Math.max((this.hover?.x ?? x1) + (way * (x1 - x0)) / 50, x0), x1), held, from: null };
      } else return;
      event.preventDefault();
      event.stopPropagation();
      this.draw();
    };
    svg.onblur = () => { this.hover = null; this.drawHover(); };
  }

  drawHover() {
    const { hover, tip } = this;
    for (const { marks, X, Y, frame: box, lines } of this.panes.values()) {
      if (!marks) continue;
      if (!hover) { marks.innerHTML = ""; continue; }
      let dots = "";
      for (const line of lines) {
        const i = this.nearest(line, hover.x);
        if (i >= 0 && line.series.style !== "faint" && Number.isFinite(line.drawn[i]) && Y(line.drawn[i]) >= box.top - 4)
          dots += `<circle class="sk-dots sk-c${line.color}" cx="${X(line.x[i]).toFixed(1)}" cy="${Y(line.drawn[i]).toFixed(1)}" r="3.5"/>`;
      }
      const px = X(hover.x), drag = hover.from === null ? "" :
        `<rect class="sk-drag" x="${Math.min(px, X(hover.from))}" y="${box.top}" width="${Math.abs(px - X(hover.from))}" height="${box.bottom - box.top}"/>`;
      marks.innerHTML = `${drag}<path class="sk-cross" d="M${px.toFixed(1)} ${box.top}V${box.bottom}"/>${dots}`;
    }
    tip.hidden = !hover;
    if (!hover) return;
    const { held } = hover, rows = [];
    let step = null;
    for (const line of [...held.lines].reverse()) {
      const i = this.nearest(line, hover.x);
      if (i < 0) continue;
      if (line.series.style !== "dots") step ??= line.steps[i];
      const y = held.pane.percent ? `${short(100 * line.drawn[i])} %` : short(line.drawn[i]);
      rows.push(`<tr><td><i class="sk-chip sk-${line.series.style} sk-c${line.color}"></i></td><td>${text(line.label)}</td><td>${y}</td></tr>`);
    }
    const where = this.axis === "steps" ? `step ${Math.round(step ?? hover.x).toLocaleString("en-US")}` : `${AXES[this.axis].toLowerCase()} ${this.place(hover.x)}`;
    tip.innerHTML = `<b>${where}</b><table>${rows.join("")}</table>`;
    const place = held.svg.getBoundingClientRect(), whole = this.charts.getBoundingClientRect();
    const px = place.left - whole.left + (held.X(hover.x) / held.width) * place.width;
    tip.style.left = `${px + 14 + tip.offsetWidth > whole.width ? Math.max(px - 14 - tip.offsetWidth, 0) : px + 14}px`;
    tip.style.top = `${place.top - whole.top + 12}px`;
  }

  // The point of a line that is drawn nearest to x; -1 where there is none near.
  nearest({ x }, value) {
    const i = at(x, value);
    const best = i < 0 ? 0 : i + 1 < x.length && x[i + 1] - value < value - x[i] ? i + 1 : i;
    return best < x.length && Math.abs(x[best] - value) <= 0.08 * (this.seen[1] - this.seen[0]) ? best : -1;
  }

  // -- what is asked of Python

  drawButtons() {
    let can = [];
    try { can = JSON.parse(this.model.get("control")).can; } catch { /* none was sent */ }
    const states = this.head.runs.map((run) => run.state), paused = states.includes("paused");
    const going = paused || states.some((state) => state === "running" || state === "waiting");
    const offered = { stop: "stop", pause: paused ? "" : "pause", resume: paused ? "pause" : "", save: "save" };
    const usable = going && !this.left && can.length > 0;
    for (const button of this.buttons.children) {
      const word = button.className.slice(3);
      button.hidden = !(usable && this.heard && can.includes(offered[word]));
      button.disabled = [...this.waiting.values()].some((asked) => asked.word === word);
    }
    const stale = going && !paused && !this.left && !this.heard && this.late() > STALE_S;
    const how = "To stop: interrupt the kernel (■ in the toolbar, or I I). The run ends after its step and nothing is lost. A button would be heard when the cell ends.";
    const gone = `No news since ${new Date(this.news).toLocaleTimeString()}: the kernel is busy, or gone.`;
    const words = this.error || (stale ? gone : usable && !this.heard && this.tries >= TELL_HELLO ? how : "");
    this.message.hidden = !words;
    this.message.classList.toggle("sk-warning", Boolean(this.error) || stale);
    say(this.message, text(words));
  }

  ask(word) {
    const n = ++this.asked;
    const unheard = () => { if (this.settle(n)) { this.heard = false; this.later(); } };
    if (word !== HELLO) this.error = "";
    this.waiting.set(n, { word, timer: setTimeout(unheard, 1e3 * ANSWER_S) });
    this.buttons.ariaBusy = true;
    try {
      this.model.send({ ask: word, n });
    } catch { // the kernel is gone
      unheard();
    }
    this.later();
  }

  answered({ n, error }) {
    this.heard = true;
    this.settle(n);
    if (error) this.error = error;
    this.later();
  }

  // A question waits no longer. Whether it did.
  settle(n) {
    clearTimeout(this.waiting.get(n)?.timer);
    const waited = this.waiting.delete(n);
    this.buttons.ariaBusy = this.waiting.size > 0;
    return waited;
  }

  // Ask whether Python hears, until it does, and again when there was no news for a while. (JupyterLab needs a moment until it has
  // a subshell: what is sent before waits for the cell.)
  hello(k = 0) {
    this.tries = k;
    if (!this.heard || this.late() > STALE_S) this.ask(HELLO);
    const next = HELLO_S[k + 1] === undefined ? LISTEN_S : HELLO_S[k + 1] - HELLO_S[k];
    this.listening = setTimeout(() => this.hello(k + 1), 1e3 * next);
    this.later();
  }

  // Seconds without news.
  late() {
    return (Date.now() - this.news) / 1e3;
  }

  // To screen readers: when a run's state changes, else twice a minute at most.
  speak() {
    const states = this.head.runs.map((run) => run.state + run.phase + run.ending).join();
    if (states === this.states && Date.now() - this.spoken < 3e4) return;
    this.states = states;
    this.spoken = Date.now();
    this.voice.textContent = this.head.summary;
  }

  leave() {
    this.left = true;
    clearTimeout(this.listening);
    for (const n of [...this.waiting.keys()]) this.settle(n);
    this.drawButtons();
  }
}

// Python keeps a static picture in an output below, for the file; the mark says whose it is. [what draws it, its whole output]
function picture(area, token) {
  const drawn = token
    ? [...area.querySelectorAll("img")].find((img) => img.src.includes(token)) ?? area.querySelector(`svg[data-panel="${token}"]`)
    : null;
  return drawn ? [drawn, drawn.closest(".jp-OutputArea-child") ?? drawn.parentElement] : [];
}

// After the end the panel takes the picture's place in this tab; anywhere else, and whenever this fails, the picture is what is seen.
// The page may draw the last picture later than it drops the widget, and then drops what stood in the place of the one before.
function stay(panel, area, token) {
  const place = () => {
    const [drawn] = picture(area, token);
    if (!drawn || drawn.parentElement.querySelector(".surokit-panel")) return;
    drawn.style.display = "none";
    drawn.parentElement.append(panel.root);
    panel.draw();
  };
  place();
  const watching = new MutationObserver(place);
  watching.observe(area, { childList: true, subtree: true });
  setTimeout(() => watching.disconnect(), 1e3 * LAST_PICTURE_S);
}

function render({ model, el }) {
  const panel = new Panel(model);
  let area = document.body;
  el.append(panel.root);
  const update = () => {
    if (panel.left) return; // an animation frame that was asked for before
    area = el.closest(".jp-OutputArea") ?? area;
    panel.update();
    const [, output] = panel.head ? picture(area, model.get("token")) : [];
    if (output) output.style.display = "none";
  };
  const answer = (message) => panel.answered(message);
  model.on("change:head", update);
  model.on("msg:custom", answer);
  panel.hello();
  requestAnimationFrame(update);
  return () => {
    panel.leave();
    model.off("change:head", update);
    model.off("msg:custom", answer);
    const [, output] = picture(area, model.get("token"));
    if (output) output.style.display = "";
    const end = () => {
      panel.update();
      if (!panel.head?.final) return;
      model.off("change:head", end);
      stay(panel, area, model.get("token"));
    };
    model.on("change:head", end); // the last news may come later than the page drops the widget
    end();
  };
}

export default { render };
