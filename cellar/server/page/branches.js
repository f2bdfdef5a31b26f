// Versions of a turn. `turns` are the way that is shown. Where there are others, the turn has
//   fork: { at, tails }: the number of the way taken, and of each other way all its turns from there on
// (null stands for the one taken, which is in `turns`). Tails can have forks in turn.

/** Go another way at turn `k`, with the turns `fresh`; the way taken so far stays as a version. */
export function branch(turns, k, fresh) {
  const fork = parked(turns, k);
  fork.at = fork.tails.push(null) - 1;
  fresh[0].fork = fork;
  turns.push(...fresh);
}

/** Take version `at` of turn `k`. */
export function leaf(turns, k, at) {
  const fork = parked(turns, k);
  const tail = fork.tails[at];
  fork.tails[at] = null;
  fork.at = at;
  tail[0].fork = fork;
  turns.push(...tail);
}

/** `fresh`, which the server has, with what only `old` has: versions, costs, thoughts. Where the two part, what was
    there becomes a version. */
export function merged(old, fresh) {
  const same = fresh.findIndex((turn, k) => turn.role !== old[k]?.role || turn.kept !== old[k].kept);
  const parted = same < 0 ? fresh.length : same;
  const turns = fresh.slice(0, parted).map(({ item, kept }, k) => ({ ...old[k], item, kept }));
  const rest = fresh.slice(parted);
  if (!rest.length || parted >= old.length || rest[0].role !== old[parted].role) return [...turns, ...rest];
  turns.push(...old.slice(parted));
  branch(turns, parted, rest);
  return turns;
}

/** Take the turns from `k` on out of the shown way; gives the fork there, which has them now. */
function parked(turns, k) {
  const tail = turns.splice(k);
  const { fork = { at: 0, tails: [null] } } = tail[0];
  delete tail[0].fork;
  // The server keeps the shown way alone.
  for (const turn of tail) {
    delete turn.item;
    delete turn.kept;
  }
  fork.tails[fork.at] = tail;
  return fork;
}
