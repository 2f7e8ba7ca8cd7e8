// Where the labels of a chart stand: close to their marks and never on a mark; a label further away has a line to its mark.
const LABEL = { height: 16, gap: 12, step: 8, lead: 14 }; // pixels; from `lead` on a line is drawn

function box(left, top, right, bottom) { return { left, top, right, bottom }; }

function around(x, y, reach) { return box(x - reach, y - reach, x + reach, y + reach); }

function doTouch(a, b) { return a.left <= b.right && b.left <= a.right && a.top <= b.bottom && b.top <= a.bottom; }

// The point of a box that is nearest to a place.
function nearestOf(area, at) { return [Math.max(area.left, Math.min(area.right, at.x)), Math.max(area.top, Math.min(area.bottom, at.y))]; }

function marksOf(place, isPicked) {
  return [around(place.x, place.y, (isPicked ? 11 : place.size) + 3)];
}

function linesOf(place) { return place.band ? [box(place.x - 4, place.band[0], place.x + 4, place.band[1])] : []; }

// Boxes where a label of this width can stand, inside of the frame.
function candidates(place, width, frame) {
  const lefts = [place.x + LABEL.gap, place.x - LABEL.gap - width], tops = [];
  for (let left = frame.left + 2; left + width <= frame.right - 2; left += LABEL.step) lefts.push(left);
  for (let top = place.y - LABEL.height / 2; top >= frame.top; top -= LABEL.step) tops.push(top);
  for (let top = place.y - LABEL.height / 2 + LABEL.step; top + LABEL.height <= frame.bottom; top += LABEL.step) tops.push(top);
  const isInside = (left) => left >= frame.left && left + width <= frame.right;
  return tops.flatMap((top) => lefts.filter(isInside).map((left) => box(left, top, left + width, top + LABEL.height)));
}

// The best of them: no mark and no other label below it, then few lines, then close to its mark.
function bestPlace(place, width, frame, marks, lines) {
  let best = null, least = Infinity;
  for (const area of candidates(place, width, frame)) {
    const [x, y] = nearestOf(area, place);
    let cost = Math.hypot(x - place.x, y - place.y);
    if (cost >= least) continue;
    const crossed = lines.filter((line) => doTouch(area, line)).length;
    cost += crossed + Math.min(24, 11 * crossed); // where all places cross many lines, the label stays close
    if (cost >= least) continue;
    for (const mark of marks) if (doTouch(area, mark)) cost += 1e4;
    if (cost < least) { best = area; least = cost; }
  }
  return best;
}

// wanted: {place, text, isStrong}; places: of all marks; lines: boxes of other lines. Returns the labels with their boxes.
function placeLabels(wanted, places, lines, frame) {
  const picked = wanted.filter(({ isStrong }) => isStrong).map(({ place }) => place);
  const marks = places.flatMap((place) => marksOf(place, picked.includes(place))), others = [...lines, ...places.flatMap(linesOf)];
  return wanted.map(({ place, text, isStrong }) => {
    const shown = cut(text, frame.right - frame.left - 8, isStrong), area = bestPlace(place, widthOf(shown, isStrong) + 4, frame, marks, others);
    if (area) marks.push(area);
    return { place, text: shown, isStrong, area };
  }).filter(({ area }) => area);
}

function drawLabel({ area, text, isStrong }) { return svg("text", { x: area.left + 2, y: area.bottom - 4, class: `label halo${isStrong ? " strong" : ""}` }, text); }

function drawLeader({ place, area }) {
  const [x, y] = nearestOf(area, place);
  return Math.hypot(x - place.x, y - place.y) < LABEL.lead ? null : svg("path", { d: `M${place.x},${place.y}L${x},${y}`, class: "leader" });
}
