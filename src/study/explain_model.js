"use strict";

// The run as the page sees it, from a recording or a simulation. Knows nothing of the page.
const model = (() => {
  // All different, so that a wrong word never reads like the right one.
  const WORDS = ("a river finds its way by trying every slope at once and keeping the one that falls while others dry " +
    "up so drafts put forward likely words from which each target keeps what it would have said itself").split(" ");

  // Small seeded generator (mulberry32): the same sliders give the same run.
  const generator = (seed) => () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };

  // Expected committed tokens a round: (1 - alpha^(gamma+1)) / (1 - alpha) (arXiv:2211.17192, eq. 1).
  const expectedTokens = (alpha, gamma) =>
    alpha === 1 ? gamma + 1 : (1 - Math.pow(alpha, gamma + 1)) / (1 - alpha);

  const expectedSpeedup = (alpha, gamma, c) => expectedTokens(alpha, gamma) / (gamma * c + 1);

  // One clock tick is a pass of the target: a draft step takes c of it, a verification one, plain decoding one a token.
  const simulate = (alpha, gamma, c, tokens, seed) => {
    const random = generator(seed);
    const rounds = [];
    let at = 0, done = 0;
    while (done < tokens) {
      const length = Math.min(gamma, tokens - done - 1);
      let accepted = 0, alive = true;
      const right = [];
      for (let step = 0; step < length; step++) {
        right.push(random() < alpha);
        alive = alive && right[step];
        accepted += alive ? 1 : 0;
      }
      const drafted = at + length * c;
      rounds.push({ begin: at, drafted, end: drafted + 1, first: done, right, accepted, count: accepted + 1 });
      at = drafted + 1;
      done += accepted + 1;
    }
    return rounds;
  };

  const word = (position) => " " + WORDS[position % WORDS.length];

  const fromSimulation = (alpha, gamma, c, tokens, seed) => {
    const rounds = simulate(alpha, gamma, c, tokens, seed).map((one) => ({
      ...one,
      prompt: false,
      path: one.right.slice(0, one.accepted).map((_, step) => step),
      tree: {
        text: one.right.map((right, step) => word(one.first + step + (right ? 0 : 17))),
        parents: one.right.map((_, step) => step - 1),
        candidate: one.right.map(() => true),
        p: null,
        q: null,
      },
      decided: null,
    }));
    const plain = Array.from({ length: tokens }, (_, step) => ({ begin: step, end: step + 1, first: step, count: 1 }));
    const pieces = Array.from({ length: tokens }, (_, position) => word(position));
    return { prompt: "", pieces, plainPieces: pieces, rounds, plain, same: true, unit: "passes" };
  };

  const spelled = (pieces, tokens) => pieces.map((piece, index) => (piece === null ? " #" + tokens[index] : piece));

  const roundsOf = (rounds, key) => {
    const found = [];
    let first = 0;
    for (const one of rounds) {
      const entry = one.rows.find((row) => row.row === key);
      if (!entry) continue; // a round of other texts only
      const prompt = one.seconds.prefill > 0;
      found.push({
        begin: one.at, drafted: one.at + (prompt ? 0 : one.seconds.draft), end: one.end, prompt, first,
        path: entry.path, accepted: entry.path.length, count: entry.committed.length,
        tree: entry.tree ? { ...entry.tree, text: spelled(entry.tree.text, entry.tree.tokens) } : null,
        decided: entry.decided || null,
      });
      first += entry.committed.length;
    }
    return found;
  };

  const fromTrace = (trace, key) => {
    const row = trace.rows.find((one) => one.row === key);
    const bare = trace.plain ? trace.plain.rows.find((one) => one.row === key) : null;
    return {
      prompt: row.prompt_text === null ? row.prompt.map((token) => "#" + token).join(" ") : row.prompt_text,
      pieces: spelled(row.pieces, row.tokens),
      plainPieces: bare ? spelled(bare.pieces, bare.tokens) : [],
      rounds: roundsOf(trace.rounds, key),
      plain: bare ? roundsOf(trace.plain.rounds, key) : [],
      same: Boolean(bare) && JSON.stringify(bare.tokens) === JSON.stringify(row.tokens),
      unit: "seconds",
    };
  };

  // The places at which the cursor stops: after the draft of a round, after its verdict, and at the very end.
  const stepsOf = (run) => {
    const steps = [{ time: 0, round: -1, phase: "start" }];
    run.rounds.forEach((one, round) => {
      if (!one.prompt && one.tree && one.tree.parents.length) steps.push({ time: one.drafted, round, phase: "draft" });
      steps.push({ time: one.end, round, phase: "verdict" });
    });
    const end = endOf(run.plain);
    if (end > endOf(run.rounds)) steps.push({ time: end, round: run.rounds.length - 1, phase: "plain" });
    return steps;
  };

  const endOf = (rounds) => (rounds.length ? rounds[rounds.length - 1].end : 0);

  // Places of a tree's nodes: level from the root, and a line each leaf; a parent sits between its children.
  const layout = (parents) => {
    const children = Array.from({ length: parents.length + 1 }, () => []);
    parents.forEach((parent, node) => children[parent + 1].push(node));
    const level = parents.map(() => 0), line = parents.map(() => 0);
    parents.forEach((parent, node) => { level[node] = parent < 0 ? 1 : level[parent] + 1; });
    let lines = 0;
    const place = (node) => {
      const below = children[node + 1].map(place);
      const at = below.length ? (below[0] + below[below.length - 1]) / 2 : lines++;
      if (node >= 0) line[node] = at;
      return at;
    };
    const root = place(-1);
    return { level, line, root, lines, depth: Math.max(0, ...level) };
  };

  return { simulate, expectedTokens, expectedSpeedup, fromSimulation, fromTrace, stepsOf, endOf, layout };
})();
