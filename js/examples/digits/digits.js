// Trains a network on digits as they are drawn.
import { ort, readSafetensors, TrainingSession } from "@ortrain/web";

const SIZE = 64; // pixels of an image, 8 x 8
const BATCH = 32;
const TEST = 297; // images at the end of the data set that are not trained on
const STEPS_OF_A_DRAWING = 8;
const PASSES = 4; // over the data set

// The network is too small for threads to pay.
ort.env.wasm.numThreads = 1;

/** @typedef {{image: Float32Array, label: number}} Sample */

/** @template {HTMLElement} T @param {string} id @param {new () => T} kind @returns {T} */
function find(id, kind) {
  const element = document.getElementById(id);
  if (element instanceof kind) return element;
  throw new Error(`the page has no ${id}`);
}

/** @param {string} id @param {boolean} [read] whether its pixels are read often */
function context(id, read = false) {
  const found = find(id, HTMLCanvasElement).getContext("2d", { willReadFrequently: read });
  if (found) return found;
  throw new Error("the browser has no 2-d canvas");
}

/** @param {string} id @param {string} text */
function show(id, text) {
  find(id, HTMLElement).textContent = text;
}

const paper = context("paper", true);
const seen = context("seen");
const curve = context("curve");
const small = new OffscreenCanvas(32, 32).getContext("2d", { willReadFrequently: true });

// -- the network ---------------------------------------------------------------------------------

/** @type {TrainingSession} */
let session;
/** @type {Sample[]} */
let known = []; // of the data set, once it is asked for
/** @type {Sample[]} */
const drawn = [];
/** @type {number[]} */
const losses = [];

/** @param {Sample[]} samples */
function feedsOf(samples) {
  const images = new Float32Array(samples.length * SIZE);
  for (const [i, { image }] of samples.entries()) images.set(image, i * SIZE);
  const labels = BigInt64Array.from(samples, ({ label }) => BigInt(label));
  return {
    input: new ort.Tensor("float32", images, [samples.length, 1, 8, 8]),
    labels: new ort.Tensor("int64", labels, [samples.length]),
  };
}

/** One step on samples. @param {Sample[]} samples */
async function train(samples) {
  const { loss } = await session.runFusedStep(feedsOf(samples), ["loss"]);
  losses.push(Number(loss?.data[0]));
  show("loss", losses.at(-1)?.toFixed(3) ?? "");
  show("steps", String(session.step));
  drawCurve();
}

/** Scores of the ten digits for each sample. @param {Sample[]} samples */
async function scores(samples) {
  const { output } = await session.runEvalStep(feedsOf(samples), ["output"]);
  const data = /** @type {Float32Array} */ (output?.data);
  return samples.map((_, i) => Array.from(data.subarray(10 * i, 10 * i + 10)));
}

/** Some of a list, drawn at random. @template T @param {T[]} list @param {number} count */
function some(list, count) {
  return Array.from({ length: list.length && count }, () => {
    return /** @type {T} */ (list[Math.floor(Math.random() * list.length)]);
  });
}

/** Steps on a new drawing, on older ones, and on what else is known, so that it stays known. */
async function learnDrawing(/** @type {number} */ label) {
  const image = look();
  if (!image) return;
  const sample = { image, label };
  drawn.push(sample);
  for (let step = 0; step < STEPS_OF_A_DRAWING; step++) {
    const others = [...some(drawn, BATCH / 4), ...some(known.slice(0, -TEST), BATCH / 2)];
    await train([...Array(BATCH / 4).fill(sample), ...others]);
    await painted();
  }
  await predict();
}

/** Some passes over the data set. */
async function learnDataset() {
  const file = await fetch("artifacts/digits.safetensors");
  const { tensors } = readSafetensors(new Uint8Array(await file.arrayBuffer()));
  const images = new Float32Array(tensors.get("images")?.bytes.slice().buffer ?? []);
  const labels = new BigInt64Array(tensors.get("labels")?.bytes.slice().buffer ?? []);
  known = Array.from(labels, (label, i) => ({
    image: images.subarray(i * SIZE, (i + 1) * SIZE),
    label: Number(label),
  }));
  for (let pass = 0; pass < PASSES; pass++) {
    for (let at = 0; at + BATCH <= known.length - TEST; at += BATCH) {
      await train(known.slice(at, at + BATCH));
      if (at % (4 * BATCH) === 0) await painted();
    }
    const unseen = known.slice(-TEST);
    const right = (await scores(unseen)).filter((row, i) => best(row) === unseen[i]?.label);
    show("accuracy", `${((100 * right.length) / TEST).toFixed(1)} %`);
  }
  await predict();
}

/** @param {number[]} row */
function best(row) {
  return row.indexOf(Math.max(...row));
}

/** Lets the browser show what has changed. */
function painted() {
  return new Promise((resolve) => requestAnimationFrame(resolve));
}

// -- the paper -----------------------------------------------------------------------------------

/** The drawing as the data set has its digits: as large as fits, 8 x 8 means of 4 x 4 pixels. */
function look() {
  const { width, height } = paper.canvas;
  const ink = paper.getImageData(0, 0, width, height).data;
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let i = 0; i < width * height; i++) {
    if (!ink[4 * i + 3]) continue;
    const [x, y] = [i % width, Math.floor(i / width)];
    [left, right] = [Math.min(left, x), Math.max(right, x)];
    [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
  }
  if (right < 0 || !small) return undefined;
  const [w, h] = [right - left + 1, bottom - top + 1];
  const scale = 32 / Math.max(w, h);
  small.clearRect(0, 0, 32, 32);
  const place = [16 - (w * scale) / 2, 16 - (h * scale) / 2];
  const [x = 0, y = 0] = place;
  small.drawImage(paper.canvas, left, top, w, h, x, y, w * scale, h * scale);
  const pixels = small.getImageData(0, 0, 32, 32).data;
  const image = new Float32Array(SIZE);
  for (let i = 0; i < 32 * 32; i++) {
    const at = 8 * Math.floor(i / 128) + Math.floor((i % 32) / 4);
    image[at] = Number(image[at]) + Number(pixels[4 * i + 3]) / 255 / 16;
  }
  return image;
}

let [busy, stale] = [false, false];

/** Shows what the network takes the drawing for; once more where it changes meanwhile. */
async function predict() {
  stale = true;
  if (busy) return;
  busy = true;
  try {
    while (stale) {
      stale = false;
      const image = look();
      if (image) showPrediction(image, (await scores([{ image, label: 0 }]))[0] ?? []);
    }
  } finally {
    busy = false;
  }
}

/** @param {Float32Array} image @param {number[]} row scores of the ten digits */
function showPrediction(image, row) {
  const exps = row.map((score) => Math.exp(score - Math.max(...row)));
  const sum = exps.reduce((a, b) => a + b, 0);
  for (const [digit, exp] of exps.entries()) {
    find(`digit${digit}`, HTMLElement).style.setProperty("--share", `${(100 * exp) / sum}%`);
  }
  show("prediction", String(best(row)));
  const dots = seen.createImageData(8, 8);
  for (const [i, value] of image.entries()) dots.data[4 * i + 3] = 255 * value;
  seen.putImageData(dots, 0, 0);
}

function drawCurve() {
  const { width, height } = curve.canvas;
  const shown = losses.slice(-width);
  const most = Math.max(2.5, ...shown);
  curve.clearRect(0, 0, width, height);
  curve.beginPath();
  for (const [x, loss] of shown.entries()) curve.lineTo(x, height - (height * loss) / most);
  curve.stroke();
}

function clear() {
  paper.clearRect(0, 0, paper.canvas.width, paper.canvas.height);
  seen.clearRect(0, 0, 8, 8);
  show("prediction", "?");
}

function listenToPen() {
  Object.assign(paper, { lineWidth: 30, lineCap: "round", lineJoin: "round" });
  let down = false;
  paper.canvas.addEventListener("pointerdown", (event) => {
    down = true;
    paper.canvas.setPointerCapture(event.pointerId);
    paper.beginPath();
    paper.moveTo(event.offsetX, event.offsetY);
  });
  paper.canvas.addEventListener("pointermove", (event) => {
    if (!down) return;
    paper.lineTo(event.offsetX, event.offsetY);
    paper.stroke();
    void predict();
  });
  paper.canvas.addEventListener("pointerup", () => {
    down = false;
    void predict();
  });
}

// -- the page ------------------------------------------------------------------------------------

/** Runs one action at a time, and shows when it fails. @param {() => Promise<void>} action */
async function run(action) {
  const buttons = [...document.querySelectorAll("button")];
  for (const button of buttons) button.disabled = true;
  show("status", "Training…");
  try {
    await action();
    show("status", "Ready.");
  } catch (error) {
    show("status", String(error));
  }
  for (const button of buttons) button.disabled = false;
}

async function save() {
  const checkpoint = new Blob([/** @type {BlobPart} */ (await session.saveCheckpoint(true))]);
  const link = document.createElement("a");
  link.download = "checkpoint";
  link.href = URL.createObjectURL(checkpoint);
  link.click();
  URL.revokeObjectURL(link.href);
}

async function start() {
  session = await TrainingSession.create({
    checkpointState: "artifacts/checkpoint",
    trainStepModel: "artifacts/train_step_model.onnx",
    evalModel: "artifacts/eval_model.onnx",
  });
  session.learningRate = 0.003;
}

for (let digit = 0; digit < 10; digit++) {
  const button = document.createElement("button");
  Object.assign(button, { id: `digit${digit}`, type: "button", textContent: digit });
  button.addEventListener("click", () => run(() => learnDrawing(digit)));
  find("digits", HTMLElement).append(button);
}
find("clear", HTMLElement).addEventListener("click", clear);
find("dataset", HTMLElement).addEventListener("click", () => run(learnDataset));
find("save", HTMLElement).addEventListener("click", () => run(save));
listenToPen();
await run(start);
