/** Training runs that are compared with those of Python; for Node and the browser. */

import type * as web from "@ortrain/web";
import type { RawTensor, TrainingSession, TrainingSessionFiles } from "@ortrain/web/core";
import type { Tensor } from "onnxruntime-common";

/** One of the package's entries. */
export type Entry = Pick<typeof web, "TrainingSession" | "readSafetensors" | "ort">;

/** Reads one of a model's files. */
export type Read = (file: string) => Promise<Uint8Array>;

/** Largest differences. */
export interface Differences {
  weights: number;
  losses: number;
  evalLoss: number;
}

/** Batches whose gradients are accumulated for an update, as in loop.py. */
const EVERY = 2;

/** A session with all models. */
export async function open(
  entry: Entry,
  read: Read,
  changed: Partial<TrainingSessionFiles> = {},
): Promise<TrainingSession> {
  const files = {
    checkpointState: await read("checkpoint"),
    trainModel: await read("training_model.onnx"),
    evalModel: await read("eval_model.onnx"),
    optimizerModel: await read("optimizer_model.onnx"),
    trainStepModel: await read("train_step_model.onnx"),
    ...changed,
  };
  // For models this small, more threads are slower.
  return entry.TrainingSession.create(files, { intraOpNumThreads: 1 });
}

/** All batches as feeds. */
export async function batches(entry: Entry, read: Read): Promise<Record<string, Tensor>[]> {
  const { tensors } = entry.readSafetensors(await read("batches"));
  const images = tensors.get("input") as RawTensor;
  const labels = tensors.get("labels") as RawTensor;
  const [count, ...shape] = images.shape as [number, ...number[]];
  const size = images.bytes.length / count;
  const batch = labels.bytes.length / count;
  return Array.from({ length: count }, (_, i) => ({
    input: new entry.ort.Tensor(
      "float32",
      new Float32Array(images.bytes.slice(i * size, (i + 1) * size).buffer),
      shape,
    ),
    labels: new entry.ort.Tensor(
      "int64",
      new BigInt64Array(labels.bytes.slice(i * batch, (i + 1) * batch).buffer),
      shape.slice(0, 1),
    ),
  }));
}

/** Trains on batches, each `EVERY` of them an update; the losses. */
export async function train(
  session: TrainingSession,
  feeds: Record<string, Tensor>[],
): Promise<number[]> {
  const losses = [];
  for (const [index, batch] of feeds.entries()) {
    const { loss } = await session.runTrainStep(batch, ["loss"]);
    losses.push(loss?.data[0] as number);
    if (index % EVERY === EVERY - 1) {
      await session.runOptimizerStep();
      await session.lazyResetGrad();
    }
  }
  return losses;
}

/** How far the run of all batches is from that of Python. */
export async function compare(entry: Entry, read: Read): Promise<Differences> {
  const session = await open(entry, read);
  const feeds = await batches(entry, read);
  const losses = await train(session, feeds);
  const { loss } = await session.runEvalStep(feeds[0] as Record<string, Tensor>);
  const expected = entry.readSafetensors(await read("expected")).tensors;
  const found = entry.readSafetensors(await session.saveCheckpoint(true)).tensors;
  await session.release();
  return {
    weights: distance(found, expected),
    losses: largest(losses, floats(expected.get("losses"))),
    evalLoss: largest([loss?.data[0] as number], floats(expected.get("eval_loss"))),
  };
}

/** How far the gradients of the first batch are from those of Python, and the loss. */
export async function compareGradients(entry: Entry, read: Read): Promise<number[]> {
  const session = await open(entry, read);
  const [feeds] = await batches(entry, read);
  const { loss } = await session.runTrainStep(feeds as Record<string, Tensor>, ["loss"]);
  const expected = entry.readSafetensors(await read("expected")).tensors;
  const first = floats(expected.get("losses")).subarray(0, 1);
  const differences = [largest(loss?.data as Float32Array, first)];
  for (const [name, tensor] of expected) {
    if (!name.startsWith(PREFIX)) continue;
    const gradient = await session.getGradient(name.slice(PREFIX.length));
    differences.push(largest(gradient?.data as Float32Array, floats(tensor)));
  }
  await session.release();
  return differences;
}

const PREFIX = "gradient:";

/** The largest difference of the parameters and buffers that Python trained, in float32. */
export function distance(
  found: ReadonlyMap<string, RawTensor>,
  expected: ReadonlyMap<string, RawTensor>,
): number {
  const names = [...expected.keys()].filter(
    (name) => expected.get(name)?.dtype === "F32" && !name.startsWith(PREFIX) && !/loss/.test(name),
  );
  return Math.max(
    ...names.map((name) => largest(floats(found.get(name)), floats(expected.get(name)))),
  );
}

/** NaN where there is one, and where there is nothing to compare. */
function largest(a: ArrayLike<number>, b: ArrayLike<number>): number {
  if (a.length === 0 || a.length !== b.length) return Number.NaN;
  return Array.from(a).reduce((most, x, i) => Math.max(most, Math.abs(x - Number(b[i]))), 0);
}

function floats(tensor: RawTensor | undefined): Float32Array {
  return new Float32Array(tensor?.bytes.slice().buffer ?? new ArrayBuffer(0));
}
