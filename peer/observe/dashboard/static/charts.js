// The curves, by uPlot.

import { $, clock, nats, rate } from "./text.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(extra = {}) {
  return { stroke: () => color("--quiet"), grid: { stroke: () => color("--line"), width: 1 },
    ticks: { stroke: () => color("--line"), width: 1 }, font: "11px system-ui, sans-serif", ...extra };
}

function curve(label, name, value, extra = {}) {
  return { label, stroke: () => color(name), width: 1.7, value: (_, v) => value(v), spanGaps: true, points: { show: false }, ...extra };
}

function chart(id, x, series, options = {}) {
  const box = $(id);
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 120), height: 168, legend: { live: true },
    cursor: { y: false, sync: options.sync ? { key: options.sync } : undefined },
    scales: { x: { time: false }, ...(options.scales ?? {}) },
    axes: [axis({ size: 26, ...(options.xAxis ?? {}) }), axis({ size: 52 })],
    series: [x, ...series],
  }, [[], ...series.map(() => [])], box);
  return plot;
}

// From 0; one round that took very long must not flatten all others.
const floored = { y: { range: (plot, min, max) => {
  const known = plot.data[1].filter((v) => v != null).sort((a, b) => a - b);
  const usual = known.length > 8 ? known[Math.floor(known.length * 0.95)] * 1.6 : Infinity;
  return [0, Math.max(Math.min(max ?? 0, usual), 1e-9) * 1.06];
} } };

// As the hub does it: the newest eighth stays, and of the older points the first of every so many rounds.
export function thin(points, most) {
  if (points.length <= most) return;
  const rounds = points.map((p) => p[0]);
  const spread = Math.max(...rounds) - Math.min(...rounds);
  let span = 1;
  while (Math.floor(spread / span) >= most / 2) span *= 2;
  const old = points.slice(0, points.length - most / 8);
  const firsts = new Map(old.reverse().map((p) => [Math.floor(p[0] / span), p]));
  points.splice(0, old.length, ...[...firsts.values()].reverse());
}

export class Charts {
  constructor() {
    const round = { label: "round", value: (_, v) => (v == null ? "–" : String(v)) };
    this.loss = chart("chart-loss", round, [
      curve("train", "--accent", nats), curve("held out", "--second", nats, { points: { show: true, size: 4 } }),
    ], { sync: "rounds" });
    this.speed = chart("chart-speed", round, [curve("tokens/s", "--good", rate)], { sync: "rounds", scales: floored });
    this.split = chart("chart-split", round, [
      curve("whole", "--text", rate, { dash: [4, 3] }), curve("compute", "--good", rate),
      curve("exchange", "--second", rate), curve("waiting", "--warn", rate),
    ], { sync: "rounds", scales: floored });
    this.all = [this.loss, this.speed, this.split];
    this.peerSpeed = this.peerBytes = null;
  }

  show(rounds, heldOut) {
    const byRound = new Map(rounds.map((p) => [p[0], p]));
    const held = new Map(heldOut.map((h) => [h[0], h[2]]));
    const xs = [...new Set([...byRound.keys(), ...held.keys()])].sort((a, b) => a - b);
    const column = (i) => xs.map((x) => byRound.get(x)?.[i] ?? null);
    this.loss.setData([xs, column(2), xs.map((x) => held.get(x) ?? null)]);
    this.speed.setData([xs, column(3)]);
    this.split.setData([xs, column(4), column(6), column(7), column(8)]);
  }

  showPeer(points) {
    if (!this.peerSpeed) {
      const time = { label: "time", value: (_, v) => clock(v) };
      const xAxis = { values: (_, ticks) => ticks.map((t) => clock(t).slice(0, 5)), space: 60 };
      this.peerSpeed = chart("peer-speed", time, [curve("samples/s", "--accent", rate)], { xAxis, scales: floored });
      this.peerBytes = chart("peer-bytes", time, [curve("sent", "--good", rate), curve("received", "--second", rate)], { xAxis, scales: floored });
      this.all.push(this.peerSpeed, this.peerBytes);
      this.resize();
    }
    const xs = points.map((p) => p[0]);
    const perSecond = (i) => points.map((p, k) => {
      if (!k || p[0] <= points[k - 1][0]) return null;
      return Math.max(0, p[i] - points[k - 1][i]) / (p[0] - points[k - 1][0]) / 1e6;
    });
    this.peerSpeed.setData([xs, points.map((p) => p[1])]);
    this.peerBytes.setData([xs, perSecond(3), perSecond(4)]);
  }

  resize() {
    for (const plot of this.all) {
      const width = Math.max(plot.root.parentElement.clientWidth, 120);
      if (width !== plot.width) plot.setSize({ width, height: 168 });
    }
  }

  restyle() {
    for (const plot of this.all) plot.redraw(false, true);
  }
}
