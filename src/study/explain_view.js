"use strict";

// The page. Text goes in as text nodes only, so that no token can be markup.
const show = (document) => {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const TOKENS = 48, LANE = 34, BAR = 24;
  let run, steps, step = 0, seed = 1, scale = 1, timer = null, rects = [];

  const html = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const drawn = (tag, attributes, text) => {
    const made = document.createElementNS(at("clock").namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const visible = (piece) => (piece || "\u2205").replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
  const short = (piece, most) => (piece.length > most ? piece.slice(0, most - 1) + "\u2026" : piece);
  const time = (value) =>
    run.unit === "seconds" ? (value < 1 ? (value * 1000).toFixed(1) + " ms" : value.toFixed(2) + " s") : value.toFixed(1) + " passes";
  const chance = (value) => (value === null || value === undefined ? "?" : value.toFixed(3));

  const brief = (value) => (value === null ? "?" : value >= 0.0995 ? value.toFixed(2).slice(value < 0.995 ? 1 : 0) : value.toFixed(3).slice(1));

  const build = () => {
    if (data.trace) {
      run = model.fromTrace(data.trace, Number(at("row").value));
    } else {
      const [alpha, gamma, c] = ["alpha", "gamma", "c"].map((name) => Number(at(name).value));
      run = model.fromSimulation(alpha, gamma, c, TOKENS, seed);
    }
    steps = model.stepsOf(run);
    at("cursor").max = steps.length - 1;
    step = Math.min(step, steps.length - 1);
    facts();
    clock();
    move(step);
  };

  const facts = () => {
    const mine = model.endOf(run.rounds), bare = model.endOf(run.plain);
    const rounds = run.rounds.filter((one) => !one.prompt);
    const tau = rounds.reduce((sum, one) => sum + one.count, 0) / Math.max(1, rounds.length);
    const says = [rounds.length + " rounds, " + tau.toFixed(2) + " tokens a round"];
    if (bare) says.push(time(mine) + " against " + time(bare) + " of plain decoding: " + (bare / mine).toFixed(2) + "x" +
      (mine > bare ? ", speculation finishes last" : ""));
    if (!data.trace) {
      const [alpha, gamma, c] = ["alpha", "gamma", "c"].map((name) => Number(at(name).value));
      for (const name of ["alpha", "gamma", "c"]) at(name + "-now").textContent = at(name).value;
      says.push("theory, on average: " + model.expectedTokens(alpha, gamma).toFixed(2) + " tokens a round, " +
        model.expectedSpeedup(alpha, gamma, c).toFixed(2) + "x");
    }
    if (data.trace) {
      const { name, lossless, greedy } = data.trace.rule;
      says.push("rule " + name + (lossless ? "" : ", lossy: the text is not the target's own") +
        (greedy ? "; at temperature 0 the likeliest token of p is taken" : ""));
    }
    at("facts").textContent = says.join("; ") + ".";
  };

  const clock = () => {
    const svg = at("clock"), total = Math.max(model.endOf(run.rounds), model.endOf(run.plain), 1e-9);
    const passes = Math.max(run.rounds.length, run.plain.length);
    const width = Math.min(30000, Math.max(at("track").clientWidth - 2, passes * 15));
    scale = (width - 12) / total;
    svg.setAttribute("width", width);
    svg.setAttribute("height", 4 * LANE + 28);
    svg.replaceChildren();
    rects = [];
    const ticks = Math.max(1, Math.floor(width / 140));
    for (let tick = 0; tick <= ticks; tick++) {
      const x = 4 + (tick / ticks) * total * scale;
      svg.append(drawn("line", { x1: x, x2: x, y1: 4, y2: 4 * LANE + 8, class: "axis" }));
      const anchor = tick === 0 ? "start" : tick === ticks ? "end" : "middle";
      svg.append(drawn("text", { x, y: 4 * LANE + 22, class: "faint", "text-anchor": anchor }, time((tick / ticks) * total)));
    }
    const bar = (lane, from, to, kind, label, known = to) => {
      const span = Math.max(1.2, (to - from) * scale - 1);
      const rect = drawn("rect", { x: from * scale + 4, y: 4 + lane * LANE + 5, width: span, height: BAR, rx: 2, class: kind });
      svg.append(rect);
      rects.push([rect, known]);
      if (label && span > 22) svg.append(drawn("text", { x: from * scale + 4 + span / 2, y: lane * LANE + 26, "text-anchor": "middle" }, label));
    };
    for (const one of run.rounds) {
      if (one.drafted > one.begin) bar(0, one.begin, one.drafted, "draft");
      bar(1, one.drafted, one.end, "verify");
      const cut = one.begin + (one.end - one.begin) * (one.accepted / Math.max(1, one.count));
      if (one.accepted) bar(2, one.begin, cut, "accepted", "+" + one.accepted, one.end);
      if (one.count > one.accepted) bar(2, cut, one.end, "verify", "+" + (one.count - one.accepted));
    }
    for (const one of run.plain) bar(3, one.begin, one.end, "plain", "+" + one.count);
    svg.append(drawn("line", { id: "hand", class: "cursor", y1: 2, y2: 4 * LANE + 10 }));
  };

  const move = (to) => {
    step = Math.max(0, Math.min(steps.length - 1, to));
    const now = steps[step], cursor = at("cursor");
    cursor.value = step;
    for (const [rect, end] of rects) rect.classList.toggle("later", end > now.time + 1e-9);
    const x = now.time * scale + 4, hand = at("hand"), track = at("track");
    hand.setAttribute("x1", x);
    hand.setAttribute("x2", x);
    if (x < track.scrollLeft + 20 || x > track.scrollLeft + track.clientWidth - 40) track.scrollLeft = x - track.clientWidth / 2;
    const says = describe(now);
    at("now").textContent = says;
    cursor.setAttribute("aria-valuetext", says);
    tree(now);
    decision(now);
    texts(now);
  };

  const describe = (now) => {
    if (now.phase === "start") return "Time 0. Press play, or step on.";
    const where = time(now.time) + ": ";
    if (now.phase === "plain") return where + "plain decoding has finished too; speculation had finished at " + time(model.endOf(run.rounds)) + ".";
    const one = run.rounds[now.round];
    if (one.prompt) return where + "the prompt has been read; that pass gives the first token, " + quoted(one) + ".";
    const round = "round " + (now.round + (run.rounds[0].prompt ? 0 : 1)) + ", ";
    const size = one.tree ? one.tree.parents.length : 0;
    if (now.phase === "draft") return where + round + "drafted " + size + (size === 1 ? " token." : " tokens.");
    const last = now.round === run.rounds.length - 1 ? " The text is complete." : "";
    return where + round + "accepted " + one.accepted + " of the draft, committed " + one.count + ": " + quoted(one) + "." + last;
  };
  const quoted = (one) => "\u201c" + run.pieces.slice(one.first, one.first + one.count).join("") + "\u201d";

  const tree = (now) => {
    const svg = at("tree"), one = now.round < 0 ? null : run.rounds[now.round];
    svg.replaceChildren();
    const empty = !one || one.prompt || !one.tree || !one.tree.parents.length;
    svg.setAttribute("width", 0);
    svg.setAttribute("height", 0);
    if (empty) {
      at("tree-says").textContent = !one ? "Nothing is drafted yet." : one.prompt ? "Reading the prompt needs no draft."
        : one.tree ? "Nothing was drafted in this round." : "The trees of a run this long were not recorded to its end.";
      return;
    }
    const { parents, text, candidate, p, q } = one.tree, spot = model.layout(parents);
    const judged = now.phase !== "draft", path = new Set(one.path), end = one.path.length ? one.path[one.path.length - 1] : -1;
    const COLUMN = 100, LINE = 46, WIDE = 84, probabilities = Boolean(p);
    const x = (node) => 4 + (node < 0 ? 0 : spot.level[node]) * COLUMN, y = (node) => 4 + (node < 0 ? spot.root : spot.line[node]) * LINE;
    const own = judged && one.count > one.accepted;
    const extra = own ? spot.lines : spot.lines - 1; // the target's own token has a line of its own, below all
    svg.setAttribute("width", Math.max(spot.depth, own && end >= 0 ? spot.level[end] + 1 : 1) * COLUMN + WIDE + 8);
    svg.setAttribute("height", (extra + 1) * LINE + 6);
    const edge = (from, tox, toy, kind) =>
      svg.append(drawn("line", { x1: x(from) + WIDE, y1: y(from) + 12, x2: tox, y2: toy + 12, class: "edge " + kind }));
    parents.forEach((parent, node) => edge(parent, x(node), y(node), judged && path.has(node) ? "accepted" : ""));
    const box = (left, top, label, kind, note) => {
      const group = drawn("g", { class: "node " + kind });
      group.append(drawn("title", {}, label + (note ? "  " + note : "")));
      group.append(drawn("rect", { x: left, y: top, width: WIDE, height: 24, rx: 5 }));
      group.append(drawn("text", { x: left + 7, y: top + 16, class: "token" }, short(visible(label), 10)));
      if (note) group.append(drawn("text", { x: left + 2, y: top + 36, class: "faint" }, note));
      svg.append(group);
    };
    box(x(-1), y(-1), one.first ? run.pieces[one.first - 1] : "start", "", "");
    parents.forEach((parent, node) => {
      const tried = parent < 0 || path.has(parent);
      const kind = !candidate[node] ? "window unreached" : !judged ? "open" : path.has(node) ? "accepted" : tried ? "refused" : "unreached";
      const note = probabilities ? "p " + brief(p[node]) + (q ? " q " + brief(q[node]) : "") : "";
      box(x(node), y(node), text[node], kind, note);
    });
    if (own) {
      const left = (end < 0 ? 1 : spot.level[end] + 1) * COLUMN + 4, top = 4 + extra * LINE;
      edge(end, left, top, "");
      box(left, top, run.pieces[one.first + one.count - 1], "own", "target's own");
    }
    const frame = at("tree-box");
    frame.scrollLeft = judged ? Math.max(0, x(end) + COLUMN + WIDE + 8 - frame.clientWidth) : 0;
    at("tree-says").textContent = judged
      ? "Accepted: " + one.accepted + " of " + parents.length + " drafted" + (own ? "; the last token of the round is the target's own." : "; the text ended within the draft.")
      : parents.length + " drafted, " + spot.depth + " deep; the target scores all of them in one pass.";
  };

  const decision = (now) => {
    const one = now.round < 0 ? null : run.rounds[now.round], says = at("decided-says");
    at("law-p").replaceChildren();
    at("law-q").replaceChildren();
    if (!one || now.phase === "draft") {
      says.textContent = "Shown when the target has judged the draft.";
    } else if (!data.trace) {
      says.textContent = one.prompt || one.accepted === one.right.length
        ? "Every drafted token was right: the pass gives one more, the bonus token."
        : "Drafted token " + (one.accepted + 1) + " was wrong; the pass gives the right one in its place. Here each token is right with probability alpha; there are no distributions.";
    } else if (!one.decided) {
      says.textContent = "Not recorded for this round.";
    } else {
      const { node, children, p, q } = one.decided;
      const behind = node < 0 ? "what was committed before" : "\u201c" + one.tree.text[node] + "\u201d";
      says.textContent = "Behind " + behind + (children.length
        ? " no drafted token was accepted, and the target gave its own: "
        : " nothing was drafted, and the target gave the bonus token: ") + "\u201c" + run.pieces[one.first + one.count - 1] + "\u201d.";
      law(at("law-p"), "p, the target's", p, "verify", run.pieces[one.first + one.count - 1]);
      if (q) law(at("law-q"), "q, the draft's", q, "draft", one.tree.text[children[0]]);
      else at("law-q").append(html("h3", "q, the draft's"), html("p", children.length
        ? "A point mass: the tokens were chosen, not drawn." : "None: nothing was drafted here.", "small"));
    }
  };

  const law = (box, title, top, kind, marked) => {
    box.append(html("h3", title));
    for (const [token, piece, share] of top) {
      const text = piece === null ? " #" + token : piece, bar = html("div", undefined, "bar"), fill = html("i", undefined, kind);
      fill.style.width = 100 * Math.max(0, Math.min(1, share || 0)) + "%";
      bar.append(fill, html("span", visible(text), text === marked ? "hit" : ""), html("span", chance(share)));
      box.append(bar);
    }
  };

  const texts = (now) => {
    const mine = at("text"), bare = at("plain");
    mine.replaceChildren(html("span", run.prompt, "prompt"));
    bare.replaceChildren(html("span", run.prompt, "prompt"));
    let count = 0, others = 0;
    const fresh = now.phase === "verdict" ? run.rounds[now.round] : null;
    for (const one of run.rounds) {
      if (one.end > now.time + 1e-9) break;
      for (let token = 0; token < one.count; token++) {
        const kind = (token < one.accepted ? "accepted" : "own") + (one === fresh ? " new" : "");
        mine.append(html("span", run.pieces[one.first + token], kind));
      }
      count += one.count;
    }
    for (const one of run.plain) {
      if (one.end > now.time + 1e-9) break;
      bare.append(html("span", run.plainPieces.slice(one.first, one.first + one.count).join("")));
      others += one.count;
    }
    at("count-drafted").textContent = count + " of " + run.pieces.length + " tokens";
    at("count-plain").textContent = run.plain.length ? others + " of " + run.plainPieces.length + " tokens; in the end " + (run.same ? "the same text" : "another text")
      : "not recorded";
    mine.scrollTop = mine.scrollHeight;
    bare.scrollTop = bare.scrollHeight;
  };

  const play = (on) => {
    clearInterval(timer);
    timer = on ? setInterval(() => (step + 1 < steps.length ? move(step + 1) : play(false)), 700) : null;
    at("play").textContent = on ? "pause" : "play";
    at("play").setAttribute("aria-pressed", String(on));
  };
  const toggle = () => {
    if (timer === null && step + 1 >= steps.length) move(0);
    play(timer === null);
  };

  const wire = () => {
    at("first").onclick = () => move(0);
    at("back").onclick = () => move(step - 1);
    at("next").onclick = () => move(step + 1);
    at("last").onclick = () => move(steps.length - 1);
    at("play").onclick = toggle;
    at("cursor").oninput = () => move(Number(at("cursor").value));
    at("row").onchange = build;
    at("again").onclick = () => { seed += 1; build(); };
    for (const name of ["alpha", "gamma", "c"]) at(name).oninput = build;
    at("knobs").onsubmit = (event) => event.preventDefault();
    at("track").onclick = (event) => {
      const wanted = (event.clientX - at("clock").getBoundingClientRect().left - 4) / scale;
      const nearest = steps.reduce((best, one, index) =>
        Math.abs(one.time - wanted) < Math.abs(steps[best].time - wanted) ? index : best, 0);
      move(nearest);
    };
    const keys = { ArrowLeft: () => move(step - 1), ArrowRight: () => move(step + 1), Home: () => move(0),
      End: () => move(steps.length - 1), " ": toggle };
    document.addEventListener("keydown", (event) => {
      const inside = event.target.closest ? event.target.closest("input, select, button, summary, #tree-box") : null;
      if (inside || event.ctrlKey || event.altKey || event.metaKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    let waiting = null;
    window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { clock(); move(step); }, 120); });
  };

  const start = () => {
    if (data.trace) {
      for (const row of data.trace.rows) {
        const option = html("option", row.row + 1 + ": " + short((row.prompt_text || "#" + row.prompt.join(" #")).trim(), 36));
        option.value = row.row;
        at("row").append(option);
      }
      at("choice").hidden = data.trace.rows.length < 2;
      const known = { ...data.trace.settings, ...data.trace.environment };
      for (const [name, value] of Object.entries(known)) {
        at("settings").append(html("dt", name), html("dd", typeof value === "string" ? value : JSON.stringify(value)));
      }
      at("about").hidden = false;
    } else {
      for (const name of ["alpha", "gamma", "c"]) at(name).value = data.parameters[name];
      at("knobs").hidden = false;
    }
    wire();
    build();
  };
  start();
};

if (typeof document !== "undefined") show(document);
