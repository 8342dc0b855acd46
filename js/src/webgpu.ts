/** Training in the browser on the GPU, by WebGPU; parameters and states stay there. */
import * as ort from "onnxruntime-web/webgpu";
import { type TrainingSessionFactory, trainingOn } from "./core.js";
import { fetchBytes } from "./fetching.js";
import type { TrainingSession as Session } from "./session.js";

export * from "./core.js";
/** The runtime: its `Tensor` for feeds, its `env` for settings. */
export { ort };

export type TrainingSession = Session;

export const TrainingSession: TrainingSessionFactory = trainingOn({
  runtime: ort,
  read: fetchBytes,
  sessionOptions: { executionProviders: ["webgpu"] },
  stateLocation: "gpu-buffer",
});
