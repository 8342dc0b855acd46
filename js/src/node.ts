/** Training in Node, by onnxruntime-node. */
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import { type TrainingSessionFactory, trainingOn } from "./core.js";
import { fetchBytes } from "./fetching.js";
import type { TrainingSession as Session } from "./session.js";

export * from "./core.js";
/** The runtime: its `Tensor` for feeds. */
export { ort };

export type TrainingSession = Session;

export const TrainingSession: TrainingSessionFactory = trainingOn({
  runtime: ort,
  read: (location) =>
    /^https?:/.test(String(location)) ? fetchBytes(location) : readFile(location),
});
