"use strict";
(() => {
  const FAR = 0.38, MOST = 4, LEAST_READABLE = 0.65, FEW = 12, UPPER = 0.3;
  const HEAT_OF_CHANGE = {rewritten: "#6d28d9", planned: "#0e7490"};

  class Viewer {
    constructor(figure) {
      this.figure = figure;
      this.stage = figure.querySelector(".stage");
      this.svg = figure.querySelector("svg.canvas");
      this.map = figure.querySelector("canvas.map");
      this.panel = figure.querySelector(".details");
      this.width = Number(this.svg.dataset.width);
      this.height = Number(this.svg.dataset.height);
      this.boxes = JSON.parse(document.getElementById(figure.id + "-data").textContent).boxes;
      this.groups = [...this.svg.querySelectorAll(".box")];
      this.places = this.groups.map((group) => {
        const at = group.transform.baseVal.getItem(0).matrix, rect = group.querySelector("rect");
        const margin = group.parentNode.transform.baseVal.getItem(0).matrix;
        return {x: at.e + margin.e, y: at.f + margin.f, w: rect.width.baseVal.value, h: rect.height.baseVal.value,
          colour: rect.getAttribute("fill")};
      });
      this.changed = this.groups.flatMap((g, i) => this.boxes[i].change ? [i] : []);
      this.changed.sort((a, b) => this.places[a].y - this.places[b].y || this.places[a].x - this.places[b].x);
      this.at = -1;
      this.listen();
      new ResizeObserver(() => this.resized()).observe(this.stage);
    }

    resized() {
      const fresh = !this.shown;
      this.shown = {w: this.stage.clientWidth, h: this.stage.clientHeight};
      if (!this.shown.w || !this.shown.h) { this.shown = null; return; }
      if (fresh) { this.top(); } else { this.draw(); }
      this.drawMap();
    }

    top() {
      this.scale = Math.min(1, Math.max(this.shown.w / this.width, LEAST_READABLE));
      this.scale = Math.max(this.scale, Math.min(1, this.shown.h / this.height));
      const inputs = this.places.filter((p, i) => this.boxes[i].kind === "input");
      const first = (inputs.length ? inputs : this.places).reduce((a, b) => b.y < a.y ? b : a, {y: Infinity, x: 0, w: 0});
      this.x = this.width * this.scale <= this.shown.w ? (this.width - this.shown.w / this.scale) / 2
        : first.x + first.w / 2 - this.shown.w / 2 / this.scale;
      this.y = this.height * this.scale <= this.shown.h ? (this.height - this.shown.h / this.scale) / 2 : 0;
      this.draw();
    }

    fit() {
      this.scale = Math.min(this.shown.w / this.width, this.shown.h / this.height, 1.5);
      this.x = (this.width - this.shown.w / this.scale) / 2;
      this.y = (this.height - this.shown.h / this.scale) / 2;
      this.draw();
    }

    draw() {
      if (this.waiting) { return; }
      this.waiting = true;
      requestAnimationFrame(() => {
        this.waiting = false;
        const w = this.shown.w / this.scale, h = this.shown.h / this.scale;
        this.svg.setAttribute("viewBox", `${this.x} ${this.y} ${w} ${h}`);
        this.svg.dataset.scale = this.scale.toFixed(4);
        this.svg.classList.toggle("far", this.scale < FAR);
        this.drawFrame();
      });
    }

    zoom(factor, px, py) {
      const least = Math.min(this.shown.w / this.width, this.shown.h / this.height, 1) / 2;
      const scale = Math.min(Math.max(this.scale * factor, least), MOST);
      this.x += px / this.scale - px / scale;
      this.y += py / this.scale - py / scale;
      this.scale = scale;
      this.draw();
    }

    show(number, scale) {
      const place = this.places[number];
      this.scale = Math.max(this.scale, scale ?? 0.7);
      this.x = place.x + place.w / 2 - this.shown.w / 2 / this.scale;
      // above the middle: details are shown below
      this.y = place.y + place.h / 2 - this.shown.h * UPPER / this.scale;
      this.draw();
      this.choose(number);
    }

    drawMap() {
      this.map.hidden = this.boxes.length < FEW;
      const tall = this.shown.h - 16, ratio = Math.min(tall / this.height, 120 / this.width, 0.2);
      const w = Math.max(this.width * ratio, 14), h = this.height * ratio, dense = window.devicePixelRatio || 1;
      this.ratio = ratio;
      this.map.style.width = `${w}px`;
      this.map.style.height = `${h}px`;
      this.picture = document.createElement("canvas");
      for (const canvas of [this.map, this.picture]) { canvas.width = w * dense; canvas.height = h * dense; }
      const pen = this.picture.getContext("2d");
      pen.scale(ratio * dense, ratio * dense);
      this.places.forEach((p, i) => {
        const change = HEAT_OF_CHANGE[this.boxes[i].change];
        pen.fillStyle = change ?? "#8888";
        const edge = change ? 2 / ratio : 0.5 / ratio;
        pen.fillRect(p.x - edge, p.y - edge, p.w + 2 * edge, p.h + 2 * edge);
        pen.fillStyle = p.colour;
        pen.fillRect(p.x, p.y, p.w, p.h);
      });
      this.drawFrame();
    }

    drawFrame() {
      if (!this.picture) { return; }
      const pen = this.map.getContext("2d"), k = this.ratio * (window.devicePixelRatio || 1);
      pen.clearRect(0, 0, this.map.width, this.map.height);
      if (this.picture.width && this.picture.height) { pen.drawImage(this.picture, 0, 0); }
      const seen = [this.x * k, this.y * k, this.shown.w / this.scale * k, this.shown.h / this.scale * k];
      pen.strokeStyle = "#18181b";
      pen.fillStyle = "#18181b1a";
      pen.lineWidth = 1.5;
      pen.fillRect(...seen);
      pen.strokeRect(...seen);
    }

    choose(number) {
      for (const old of this.svg.querySelectorAll(".chosen")) { old.classList.remove("chosen"); }
      this.panel.hidden = number === null;
      if (number === null) { return; }
      this.groups[number].classList.add("chosen");
      for (const edge of this.svg.querySelectorAll(`[data-from="${number}"],[data-to="${number}"]`)) {
        edge.classList.add("chosen");
      }
      this.panel.replaceChildren(...this.described(this.boxes[number]));
    }

    described(box) {
      const parts = [];
      for (const step of box.steps) {
        const head = document.createElement("h4");
        head.textContent = step.operator;
        parts.push(head, pairs({name: step.name, ...step.attributes, weights: step.weights.join(", "),
          "made by": step.rule}));
      }
      const cost = box.cost_ms === null ? "" : `${box.cost_ms.toPrecision(4)} ms`;
      parts.push(pairs({reads: box.inputs.map((i) => i[1]).join(", "), gives: box.outputs.join(", "), cost,
        algorithm: box.algorithm, layout: box.layout, differs: box.change}));
      return parts;
    }

    find(text) {
      const wanted = text.trim().toLowerCase();
      const hit = (box) => box.steps.some((s) => `${s.operator} ${s.name} ${s.rule}`.toLowerCase().includes(wanted));
      let first = null;
      this.groups.forEach((group, i) => {
        const found = wanted !== "" && hit(this.boxes[i]);
        group.classList.toggle("found", found);
        if (found && first === null) { first = i; }
      });
      if (first !== null) { this.show(first); }
    }

    mark(rule, names) {
      const hits = this.groups.flatMap((group, i) => {
        const here = this.boxes[i].steps.some((s) => (rule && s.rule === rule) ||
          names.includes(s.name) || names.includes(`${s.operator} '${s.name}'`));
        group.classList.toggle("found", here);
        return here ? [i] : [];
      });
      if (hits.length) { this.show(hits[0]); }
      return hits.length;
    }

    step(by) {
      if (!this.changed.length) { return; }
      this.at = (this.at + by + this.changed.length) % this.changed.length;
      this.show(this.changed[this.at]);
    }

    listen() {
      const local = (event) => {
        const frame = this.svg.getBoundingClientRect();
        return [event.clientX - frame.left, event.clientY - frame.top];
      };
      this.svg.addEventListener("wheel", (event) => {
        event.preventDefault();
        const lines = event.deltaMode === 1 ? 16 : 1;
        this.zoom(Math.exp(-event.deltaY * lines * 0.0016), ...local(event));
      }, {passive: false});
      let last = null, moved = 0;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button === 0) { last = local(event); moved = 0; }
      });
      this.svg.addEventListener("pointermove", (event) => {
        if (!last) { return; }
        const here = local(event);
        moved += Math.abs(here[0] - last[0]) + Math.abs(here[1] - last[1]);
        if (moved > 4 && !this.svg.hasPointerCapture(event.pointerId)) { this.svg.setPointerCapture(event.pointerId); }
        this.x -= (here[0] - last[0]) / this.scale;
        this.y -= (here[1] - last[1]) / this.scale;
        last = here;
        this.svg.classList.add("moving");
        this.draw();
      });
      const release = () => { last = null; this.svg.classList.remove("moving"); };
      this.svg.addEventListener("pointerup", release);
      this.svg.addEventListener("pointercancel", release);
      this.svg.addEventListener("click", (event) => {
        if (moved > 4) { return; }
        const group = event.target.closest(".box");
        this.choose(group ? Number(group.dataset.box) : null);
      });
      const jump = (event) => {
        const frame = this.map.getBoundingClientRect();
        this.x = (event.clientX - frame.left) / this.ratio - this.shown.w / 2 / this.scale;
        this.y = (event.clientY - frame.top) / this.ratio - this.shown.h / 2 / this.scale;
        this.draw();
      };
      this.map.addEventListener("pointerdown", (event) => { this.map.setPointerCapture(event.pointerId); jump(event); });
      this.map.addEventListener("pointermove", (event) => { if (event.buttons) { jump(event); } });
      const middle = () => [this.shown.w / 2, this.shown.h / 2];
      const actions = {in: () => this.zoom(1.35, ...middle()), out: () => this.zoom(1 / 1.35, ...middle()),
        fit: () => this.fit(), top: () => this.top(), next: () => this.step(1), previous: () => this.step(-1)};
      for (const button of this.figure.querySelectorAll("button[data-do]")) {
        button.addEventListener("click", actions[button.dataset.do]);
      }
      const search = this.figure.querySelector("input[type=search]");
      search.addEventListener("input", () => this.find(search.value));
      const keys = {"+": actions.in, "=": actions.in, "-": actions.out, "0": actions.fit, n: actions.next,
        p: actions.previous, Escape: () => this.choose(null)};
      const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
      this.stage.addEventListener("keydown", (event) => {
        const move = moves[event.key];
        if (event.ctrlKey || event.metaKey || !(keys[event.key] || move)) { return; }
        event.preventDefault();
        if (move) {
          this.x += move[0] * 80 / this.scale;
          this.y += move[1] * 80 / this.scale;
          this.draw();
        } else { keys[event.key](); }
      });
    }
  }

  function pairs(said) {
    const list = document.createElement("dl");
    for (const [name, text] of Object.entries(said)) {
      if (text) {
        const term = document.createElement("dt"), value = document.createElement("dd");
        term.textContent = name;
        value.textContent = text;
        list.append(term, value);
      }
    }
    return list;
  }

  const viewers = {};
  for (const figure of document.querySelectorAll("figure.viewer")) { viewers[figure.id] = new Viewer(figure); }

  for (const row of document.querySelectorAll("[data-rule]")) {
    row.addEventListener("click", () => {
      const names = JSON.parse(row.dataset.where);
      const found = [viewers.after?.mark(row.dataset.rule, []), viewers.before?.mark("", names)];
      for (const other of document.querySelectorAll("tr.chosen")) { other.classList.remove("chosen"); }
      row.classList.add("chosen");
      if (found.some(Boolean)) { document.getElementById("graphs").scrollIntoView({behavior: "smooth"}); }
    });
  }
})();
