// Copyright 2026 The hf_dflash Authors. All rights reserved.
// Licensed under the Apache License, Version 2.0; see the LICENSE file.
//
// The page asks /data for what has changed and draws it. Whatever comes from a run is text: nothing of it is ever parsed as HTML.
"use strict";

const POLL_MS = 2000;
// A run that says nothing for so long, at least, is said to be silent.
const SILENT_SECONDS = 120;
const $ = (id) => document.getElementById(id);

// ---- What is known of the run ----

const known = { generation: -1, nextBucket: 0, eventsVersion: -1, series: new Map(), events: [], decoded: [] };

function merge(data) {
  if (data.generation !== known.generation) known.series.clear();
  for (const [name, part] of Object.entries(data.series)) {
    const old = known.series.get(name);
    if (!old) { known.series.set(name, part); continue; }
    // The last bucket that was there may have grown.
    const first = data.first_bucket * data.width;
    let keep = old.x.length;
    while (keep && old.x[keep - 1] >= first) keep--;
    for (const key of ["x", "y", "low", "high"]) if (part[key]) old[key] = old[key].slice(0, keep).concat(part[key]);
  }
  known.generation = data.generation;
  known.nextBucket = data.next_bucket;
  known.eventsVersion = data.events_version;
  if (data.events) { known.events = data.events; known.decoded = data.decoded; }
  known.data = data;
}

// ---- Elements ----

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function draw(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// ---- Figures as text ----

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "K"]]) {
    if (size >= unit) { const scaled = value / (suffix === "K" ? 1e3 : unit); return scaled.toPrecision(4).replace(/\.?0+$/, "") + suffix; }
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
const fixed = (value) => (Number.isFinite(value) ? value.toFixed(3) : "–");
const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)}%` : "–");
const seconds = (value) => (!Number.isFinite(value) ? "–" : value === 0 ? "0" : value < 1 ? `${(1000 * value).toPrecision(3)} ms` : `${short(value)} s`);
const gib = (value) => (Number.isFinite(value) ? `${value.toFixed(1)} GiB` : "–");
const bytes = (value) => (value >= 2 ** 30 ? gib(value / 2 ** 30) : `${(value / 2 ** 20).toFixed(1)} MiB`);

function duration(value) {
  value = Math.round(value);
  const two = (number) => String(number).padStart(2, "0");
  if (value >= 86400) return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${two(Math.floor((value % 3600) / 60))} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${two(value % 60)} s`;
  return `${value} s`;
}

// ---- Axes ----

const BOX = { width: 460, height: 210, left: 46, right: 8, top: 8, bottom: 22 };

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  return found;
}

function axes(svg, box, xRange, yRange, format) {
  const x = (value) => box.left + ((value - xRange[0]) / (xRange[1] - xRange[0] || 1)) * (box.width - box.left - box.right);
  const y = (value) => box.height - box.bottom - ((value - yRange[0]) / (yRange[1] - yRange[0] || 1)) * (box.height - box.top - box.bottom);
  for (const tick of ticks(yRange[0], yRange[1], 4)) {
    svg.append(draw("line", { class: "grid", x1: box.left, x2: box.width - box.right, y1: y(tick), y2: y(tick) }));
    svg.append(draw("text", { x: box.left - 7, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  for (const tick of ticks(xRange[0], xRange[1], 5)) {
    svg.append(draw("text", { x: x(tick), y: box.height - 5, "text-anchor": "middle" }, short(tick)));
  }
  svg.append(draw("text", { x: 0, y: box.height - 5 }, "step"));
  return { x, y };
}

function range(values, { zero = false, top } = {}) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (zero) low = Math.min(0, low);
  if (top !== undefined) high = Math.max(high, top);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [zero && low === 0 ? 0 : low - margin, top !== undefined && high === top ? top : high + margin];
}

// Of the edge of a band, what a few spikes leave of it: they must not flatten all the rest.
function usual(edge, share) {
  if (!edge || !edge.length) return [];
  return [edge.slice().sort((one, other) => one - other)[Math.round(share * (edge.length - 1))]];
}

// ---- Panels ----

// Each gives a title, the names of its series, and how they are drawn; one without data is left out.
const HELD_OUT = /^eval_(?:(.+)_)?acceptance_length$/;
const isHeldOut = (name) => HELD_OUT.test(name) && !name.endsWith("anchor_acceptance_length");
const label = (name) => name.replace(/^eval_/, "held-out ").replaceAll("_", " ").replace("/", ": ");

const PANELS = [
  { id: "acceptance", title: "Acceptance length (bonus token included)", format: short,
    lines: (names) => [
      ...names.filter(isHeldOut).map((name) => [name, `simulated, ${label(name).replace(" acceptance length", "")}`]),
      ["decoded_acceptance_length", "decoded"], ["anchor_acceptance_length", "training, mean over anchors"]] },
  { id: "loss", title: "Loss", format: short,
    lines: (names) => [["loss", "training"], ...names.filter((name) => /^eval_(.+_)?loss$/.test(name)).map((name) => [name, label(name).replace(" loss", "")])] },
  { id: "slots", title: "Held-out accuracy by slot", heat: /^eval_(?:.+_)?accuracy_slot_(\d+)$/ },
  { id: "decoded-slots", title: "Decoded: share of blocks accepted up to a slot", heat: /^decoded_slot_(\d+)$/ },
  { id: "step", title: "A step, by device", step: true },
  { id: "times", title: "Time of a step", format: seconds, stack: [["time/drafter", "drafter", 0], ["time/transfer", "transfer", 2], ["time/wait", "wait", 4]],
    lines: () => [["time/step", "whole step", 3], ["time/target", "target", 1]], zero: true },
  { id: "tokens", title: "Target tokens per second", format: short, zero: true, lines: () => [["tokens_per_second", "tokens/s"]] },
  { id: "anchors", title: "Anchor updates per second", format: short, zero: true, lines: () => [["anchor_updates_per_second", "anchors/s"]] },
  { id: "mfu", title: "Model FLOPs utilization", format: percent, zero: true, lines: (names) => names.filter((name) => name.startsWith("mfu/")).map((name) => [name, name.slice(4)]) },
  { id: "memory", title: "Peak memory", format: (value) => `${short(value)} GiB`, zero: true, lines: (names) => names.filter((name) => name.startsWith("memory/")).map((name) => [name, name.slice(7)]) },
  { id: "grad-norm", title: "Gradient norm", format: short, zero: true, lines: () => [["grad_norm", "before clipping"]] },
  { id: "learning-rate", title: "Learning rate", format: short, zero: true, lines: () => [["learning_rate", "learning rate"]] },
  { id: "accuracy", title: "Accuracy over slots", format: percent, zero: true, lines: () => [["accuracy", "training"], ["eval_accuracy", "held-out"]] },
  { id: "padding", title: "Padding", format: percent, zero: true, lines: () => [["padding_waste", "share of target tokens"]] },
  { id: "skipped", title: "Left out as not finite", format: short, zero: true, lines: () => [["skipped_nonfinite_blocks", "blocks"], ["skipped_nonfinite_steps", "steps"]] },
];

function drawPanels() {
  // One unit is one pixel, so that text keeps its shape.
  const shown = document.querySelector("#charts svg");
  if (shown && shown.clientWidth) BOX.width = shown.clientWidth;
  const names = [...known.series.keys()].sort();
  for (const panel of PANELS) {
    let card = $(`chart-${panel.id}`);
    const content = panel.heat ? heatContent(panel, names) : panel.step ? stepContent() : lineContent(panel, names);
    if (!content) { if (card) card.hidden = true; continue; }
    if (!card) {
      card = element("div", { class: "card chart", id: `chart-${panel.id}` });
      const after = PANELS.slice(PANELS.indexOf(panel) + 1).map((other) => $(`chart-${other.id}`)).find((other) => other);
      $("charts").insertBefore(card, after || null);
      card.addEventListener("mousemove", (event) => showTip(card, event));
      card.addEventListener("mouseleave", () => hideTip(card));
    }
    card.hidden = false;
    const legend = element("div", { class: "legend" });
    for (const [color, text] of content.legend) legend.append(element("span", {}, element("span", { class: `key k${color}` }), text));
    const head = element("div", { class: "chart-head" }, element("h2", {}, panel.title), legend);
    const tip = card.querySelector(".tip");
    card.replaceChildren(head, content.svg, ...(tip ? [tip] : []));
    card.tipOf = content.tipOf;
    if (tip && card.lastMouse) showTip(card, card.lastMouse);
  }
}

function lineContent(panel, names) {
  const lines = panel.lines(names).filter(([name]) => known.series.has(name)).map(([name, text, color], i) => ({ text, color: color ?? i % 6, ...known.series.get(name) }));
  const stack = (panel.stack || []).filter(([name]) => known.series.has(name)).map(([name, text, color]) => ({ text, color, ...known.series.get(name) }));
  if (!lines.length && !stack.length) return null;
  const svg = newSvg(panel.title);
  const all = [...stack, ...lines];
  const xs = range(all.flatMap((one) => [one.x[0], one.x[one.x.length - 1]]), {});
  const xRange = [Math.max(0, Math.min(...all.map((one) => one.x[0]))), Math.max(...all.map((one) => one.x[one.x.length - 1]))];
  if (xRange[0] === xRange[1]) xRange[1] = xs[1];
  // Stacked parts share their steps: one log holds them all.
  const sums = stack.length ? stack[0].x.map((_, i) => stack.reduce((sum, one) => sum + (one.y[i] ?? 0), 0)) : [];
  const yRange = range([...lines.flatMap((one) => [...one.y, ...usual(one.low, 0.02), ...usual(one.high, 0.98)]), ...sums], panel);
  const { x, y } = axes(svg, BOX, xRange, yRange, panel.format);
  const clamp = (value) => Math.max(BOX.top - 4, Math.min(BOX.height - BOX.bottom, y(value)));
  const point = (px, py) => `${px.toFixed(1)},${py.toFixed(1)}`;
  const legend = [];
  let below = stack.length ? stack[0].x.map(() => 0) : [];
  for (const one of stack) {
    const above = below.map((value, i) => value + (one.y[i] ?? 0));
    const edge = (values) => values.map((value, i) => point(x(one.x[i] ?? stack[0].x[i]), y(value)));
    svg.append(draw("polygon", { class: `area f${one.color}`, points: [...edge(above), ...edge(below).reverse()].join(" ") }));
    below = above;
    legend.push([one.color, one.text]);
  }
  for (const one of lines) {
    if (one.low && one.low.some((low, i) => low < one.high[i])) {
      const edge = (values) => values.map((value, i) => point(x(one.x[i]), clamp(value)));
      svg.append(draw("polygon", { class: `band f${one.color}`, points: [...edge(one.high), ...edge(one.low).reverse()].join(" ") }));
    }
    svg.append(draw("polyline", { class: `stroke s${one.color}`, points: one.x.map((step, i) => point(x(step), clamp(one.y[i]))).join(" ") }));
    if (one.x.length <= 60) {
      for (let i = 0; i < one.x.length; i++) svg.append(draw("circle", { class: `f${one.color}`, cx: x(one.x[i]).toFixed(1), cy: clamp(one.y[i]).toFixed(1), r: one.x.length === 1 ? 3 : 2 }));
    }
    legend.push([one.color, one.text]);
  }
  const tipOf = (px) => {
    const step = xRange[0] + ((px - BOX.left) / (BOX.width - BOX.left - BOX.right)) * (xRange[1] - xRange[0]);
    const rows = [];
    let at = null;
    for (const one of all) {
      const i = nearest(one.x, step);
      if (at === null || Math.abs(one.x[i] - step) < Math.abs(at - step)) at = one.x[i];
      // A pixel holds several points of a long run.
      const here = one.low ? one.x.map((_, j) => j).filter((j) => Math.abs(x(one.x[j]) - x(one.x[i])) <= 1.5) : [];
      const low = Math.min(...here.map((j) => one.low[j])), high = Math.max(...here.map((j) => one.high[j]));
      const spread = low < high ? `  (${panel.format(low)} to ${panel.format(high)})` : "";
      rows.push([one.color, `${one.text} ${panel.format(one.y[i])}${spread}`]);
    }
    return { title: `step ${at.toLocaleString("en")}`, rows, x: x(at) };
  };
  return { svg, legend, tipOf };
}

function heatContent(panel, names) {
  const slots = names.map((name) => [name, name.match(panel.heat)]).filter(([, match]) => match).map(([name, match]) => [Number(match[1]), known.series.get(name)]);
  if (!slots.length) return null;
  slots.sort((one, other) => one[0] - other[0]);
  // Of several evaluation sets, the first one.
  const bySlot = new Map();
  for (const [slot, series] of slots) if (!bySlot.has(slot)) bySlot.set(slot, series);
  // A slot that no block reached in some evaluation has a gap there.
  const steps = [...new Set([...bySlot.values()].flatMap((series) => series.x))].sort((one, other) => one - other);
  const columns = new Map(steps.map((step, i) => [step, i]));
  const svg = newSvg(panel.title);
  const box = { ...BOX, left: 46, right: 44 };
  const width = (box.width - box.left - box.right) / steps.length, height = (box.height - box.top - box.bottom) / bySlot.size;
  const order = [...bySlot.keys()];
  const highest = Math.max(0.01, ...order.flatMap((slot) => bySlot.get(slot).y));
  order.forEach((slot, row) => {
    const series = bySlot.get(slot);
    series.y.forEach((value, j) => {
      const i = columns.get(series.x[j]);
      svg.append(draw("rect", { class: "heat", x: (box.left + i * width).toFixed(2), y: (box.top + row * height).toFixed(2), width: (width + 0.3).toFixed(2), height: (height + 0.3).toFixed(2), opacity: (0.04 + 0.96 * Math.max(0, value) / highest).toFixed(3) }));
    });
    if (row % Math.ceil(bySlot.size / 16) === 0) {
      svg.append(draw("text", { x: box.left - 7, y: box.top + (row + 0.5) * height + 4, "text-anchor": "end" }, `slot ${slot}`));
      svg.append(draw("text", { x: box.width - box.right + 6, y: box.top + (row + 0.5) * height + 4 }, percent(series.y[series.x.indexOf(steps[steps.length - 1])])));
    }
  });
  const every = Math.max(1, Math.ceil(steps.length / 5));
  for (let i = 0; i < steps.length; i += every) svg.append(draw("text", { x: box.left + (i + 0.5) * width, y: box.height - 5, "text-anchor": "middle" }, short(steps[i])));
  svg.append(draw("text", { x: 0, y: box.height - 5 }, "step"));
  const tipOf = (px, py) => {
    const i = Math.floor((px - box.left) / width), row = Math.floor((py - box.top) / height);
    if (i < 0 || row < 0 || i >= steps.length || row >= order.length) return null;
    return { title: `step ${steps[i].toLocaleString("en")}`, rows: [[0, `slot ${order[row]}: ${percent(bySlot.get(order[row]).y[bySlot.get(order[row]).x.indexOf(steps[i])])}`]], x: null };
  };
  return { svg, legend: [[0, `0 to ${percent(highest)}`]], tipOf };
}

function stepContent() {
  const latest = known.data.latest, whole = latest["time/step"];
  if (!Number.isFinite(whole) || !Number.isFinite(latest["time/drafter"])) return null;
  const svg = newSvg("A step, by device");
  const devices = [["target", [["time/target", "target", 1]]], ["drafter", [["time/drafter", "drafter", 0], ["time/transfer", "transfer", 2], ["time/wait", "wait", 4]]]];
  const longest = Math.max(whole, ...devices.map(([, parts]) => parts.reduce((sum, [name]) => sum + (latest[name] || 0), 0)));
  const box = { ...BOX, left: 58 };
  const x = (value) => box.left + (value / longest) * (box.width - box.left - box.right);
  devices.forEach(([name, parts], row) => {
    const top = 22 + row * 72;
    svg.append(draw("text", { x: box.left - 9, y: top + 26, "text-anchor": "end" }, name));
    svg.append(draw("rect", { class: "idle", x: box.left, y: top, width: x(whole) - box.left, height: 42, rx: 4 }));
    let begin = 0;
    for (const [key, text, color] of parts) {
      const time = latest[key] || 0, width = x(begin + time) - x(begin);
      svg.append(draw("rect", { class: `area f${color}`, x: x(begin), y: top, width, height: 42, rx: 3 }));
      if (width > 70) svg.append(draw("text", { x: x(begin) + 7, y: top + 58 }, `${text} ${seconds(time)}, ${percent(time / whole)}`));
      begin += time;
    }
  });
  svg.append(draw("line", { class: "mark", x1: x(whole), x2: x(whole), y1: 12, y2: 168 }));
  svg.append(draw("text", { x: x(whole), y: 188, "text-anchor": "end" }, `whole step ${seconds(whole)}`));
  return { svg, legend: [[1, "target"], [0, "drafter"], [2, "transfer"], [4, "wait"]], tipOf: () => null };
}

function newSvg(title) {
  return draw("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": title });
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle; else high = middle; }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

function showTip(card, event) {
  const svg = card.querySelector("svg");
  if (!svg || !card.tipOf) return;
  const frame = svg.getBoundingClientRect();
  card.lastMouse = { clientX: event.clientX, clientY: event.clientY };
  const found = event.clientY < frame.top ? null : card.tipOf(((event.clientX - frame.left) / frame.width) * BOX.width, ((event.clientY - frame.top) / frame.height) * BOX.height);
  hideTip(card, false);
  if (!found) return;
  const tip = element("div", { class: "tip" }, element("b", {}, found.title));
  for (const [color, text] of found.rows) tip.append(element("div", {}, element("span", { class: `key k${color}` }), text));
  if (found.x !== null) svg.append(draw("line", { class: "cursor", x1: found.x, x2: found.x, y1: BOX.top, y2: BOX.height - BOX.bottom }));
  card.append(tip);
  const place = card.getBoundingClientRect();
  const left = event.clientX - place.left;
  tip.style.left = `${left > place.width / 2 ? left - tip.offsetWidth - 14 : left + 14}px`;
  tip.style.top = `${event.clientY - place.top + 12}px`;
}

function hideTip(card, forget = true) {
  if (forget) card.lastMouse = null;
  card.querySelectorAll(".tip, .cursor").forEach((old) => old.remove());
}

// ---- The rest of the page ----

function drawHeader() {
  const data = known.data, run = data.run;
  const silentFor = Date.now() / 1000 - data.time;
  const isLive = data.ended === null;
  const state = !isLive ? data.ended : silentFor > SILENT_SECONDS ? "silent" : "running";
  $("name").textContent = data.name;
  document.title = `${data.max_steps ? percent(data.step / data.max_steps) + " · " : ""}${data.name}`;
  $("state").className = `pill ${state}`;
  $("state").textContent = state === "silent" ? `silent for ${duration(silentFor)}` : state;
  const about = [run.target && `drafter for ${run.target}`, run.num_hidden_layers && `${run.num_hidden_layers} layers`, run.block_size && `block ${run.block_size}`, run.world_size > 1 && `${run.world_size} processes`, run.device];
  $("about").textContent = about.filter(Boolean).join(" · ");
  const share = data.max_steps ? Math.min(1, data.step / data.max_steps) : 0;
  $("progress-bar").style.width = `${100 * share}%`;
  const epoch = data.latest.epoch;
  const reading = data.read[0] < data.read[1] ? ` · reading the log, ${percent(data.read[0] / data.read[1])}` : "";
  $("progress-text").textContent = `step ${data.step.toLocaleString("en")}${data.max_steps ? ` of ${data.max_steps.toLocaleString("en")} (${percent(share)})` : ""}` + (Number.isFinite(epoch) ? ` · epoch ${epoch.toFixed(2)}` : "") + reading;
  const left = data.remaining;
  if (left && isLive) {
    const done = new Date(Date.now() + 1000 * left[0]);
    $("remaining").textContent = `${duration(left[0])} left${duration(left[1]) === duration(left[2]) ? "" : ` (${duration(left[1])} to ${duration(left[2])})`}, until ${done.toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit" })}`;
  } else $("remaining").textContent = "";
  $("footer").textContent = [run.versions, `log of ${bytes(data.read[1])}`, data.width > 1 && `each point is the mean of ${data.width} steps, its band the lowest and highest`].filter(Boolean).join(" · ");
}

function drawTiles() {
  const latest = known.data.latest, names = Object.keys(latest);
  const heldOut = names.filter(isHeldOut)[0];
  const best = heldOut && known.series.has(heldOut) ? Math.max(...(known.series.get(heldOut).high || known.series.get(heldOut).y)) : null;
  const wait = latest["time/wait"] / latest["time/step"];
  const tiles = [
    ["Acceptance length", fixed(latest[heldOut]), best === null ? "" : `held-out, best ${fixed(best)}`],
    ["Decoded acceptance", fixed(latest.decoded_acceptance_length), `simulated ${fixed(latest.simulated_acceptance_length)}`],
    ["Loss", short(latest.loss), Number.isFinite(latest.eval_loss) ? `held-out ${short(latest.eval_loss)}` : ""],
    ["Tokens per second", short(latest.tokens_per_second), Number.isFinite(latest.anchor_updates_per_second) ? `${short(latest.anchor_updates_per_second)} anchors/s` : ""],
    ["A step", seconds(latest["time/step"]), Number.isFinite(wait) ? `waits ${percent(wait)}` : ""],
    ["Utilization", percent(latest["mfu/drafter"]), Number.isFinite(latest["mfu/target"]) ? `target ${percent(latest["mfu/target"])}` : ""],
    ["Peak memory", gib(latest["memory/drafter"]), Number.isFinite(latest["memory/target"]) ? `target ${gib(latest["memory/target"])}` : ""],
    ["Gradient norm", short(latest.grad_norm), Number.isFinite(latest.learning_rate) ? `learning rate ${short(latest.learning_rate)}` : ""],
  ].filter(([, value]) => value !== "–");
  $("tiles").replaceChildren(...tiles.map(([name, value, note]) => element("div", { class: "card tile" }, element("div", { class: "label" }, name), element("div", { class: "value" }, value), element("div", { class: "note" }, note))));
}

function drawAlerts() {
  const alerts = known.data.alerts;
  $("alerts").hidden = !alerts.length;
  $("alerts").replaceChildren(...alerts.map((alert) => element("div", { class: "alert" }, element("b", {}, String(alert.message)), ` Since step ${alert.step}. Likely cause: ${alert.cause} What helps: ${alert.fix}`)));
}

const SAID = {
  begin: (event) => event.step ? `went on from step ${event.step}` : "began",
  end: (event) => String(event.how),
  checkpoint: (event) => `${event.name} saved, ${bytes(event.bytes)}`,
  upload: (event) => `${event.name} on its way to ${event.place}`,
  uploaded: (event) => `${event.name} is on ${event.place}, after ${duration(event.seconds)}`,
  upload_failed: (event) => `${event.name} did not reach ${event.place}: ${event.error}`,
  alert: (event) => String(event.message),
  alert_over: (event) => `over: ${event.message}`,
};
const CLASSES = { upload_failed: "bad", alert: "bad", alert_over: "good" };

function drawEvents() {
  const saves = ["checkpoint", "upload", "uploaded", "upload_failed"];
  const lists = [["Checkpoints and uploads", (event) => saves.includes(event.event)], ["What happened", (event) => Object.hasOwn(SAID, event.event) && !saves.includes(event.event)]];
  $("lists").replaceChildren(...lists.map(([title, wanted]) => {
    const rows = known.events.filter(wanted).reverse();
    if (!rows.length) return "";
    const table = element("table");
    for (const event of rows) {
      const when = new Date(1000 * event.time).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
      table.append(element("tr", {}, element("td", {}, `step ${event.step.toLocaleString("en")}`), element("td", { class: CLASSES[event.event] || "" }, SAID[event.event](event)), element("td", {}, element("span", { class: "muted" }, when))));
    }
    return element("div", { class: "card" }, element("h2", {}, title), element("div", { class: "scroll" }, table));
  }).filter(Boolean));
}

function drawDecoded() {
  const last = known.decoded[known.decoded.length - 1];
  const samples = last && Array.isArray(last.samples) ? last.samples : [];
  $("decoded").hidden = !samples.length;
  if (!samples.length) return;
  const legend = element("div", { class: "legend" }, element("span", { class: "accepted" }, "accepted draft"), element("span", { class: "rejected" }, "rejected draft"), element("span", {}, "the target's own token"));
  const card = element("div", { class: "card" }, element("div", { class: "chart-head" }, element("h2", {}, `Decoded at step ${last.step.toLocaleString("en")}`), legend));
  for (const sample of samples) {
    const text = element("p", { class: "text" });
    for (const [piece, mark] of sample.pieces) text.append(["accepted", "rejected"].includes(mark) ? element("span", { class: mark }, piece) : String(piece));
    card.append(element("div", { class: "sample" }, element("div", { class: "muted" }, `acceptance length ${fixed(sample.acceptance_length)}`), element("p", { class: "text muted" }, String(sample.prompt)), text));
  }
  $("decoded").replaceChildren(card);
}

// ---- Asking ----

async function ask() {
  let wait = POLL_MS;
  try {
    const answer = await fetch(`data?generation=${known.generation}&first_bucket=${known.nextBucket}&events_version=${known.eventsVersion}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`The server says ${answer.status}.`);
    const data = await answer.json();
    const hadEvents = known.eventsVersion;
    merge(data);
    drawHeader();
    drawTiles();
    drawAlerts();
    const before = BOX.width;
    drawPanels();
    // Only now the first chart has a width.
    if (document.querySelector("#charts svg")?.clientWidth !== before) drawPanels();
    if (hadEvents !== known.eventsVersion) { drawEvents(); drawDecoded(); }
    if (data.read[0] < data.read[1]) wait = 0;
    else document.body.dataset.ready = String(data.step);
  } catch (error) {
    $("state").className = "pill unreachable";
    $("state").textContent = "unreachable";
    $("footer").textContent = String(error);
  }
  setTimeout(document.hidden ? askWhenSeen : ask, wait);
}

function askWhenSeen() {
  document.addEventListener("visibilitychange", ask, { once: true });
}

window.addEventListener("resize", () => known.data && drawPanels());
ask();
