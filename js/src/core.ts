/** Training on a runtime that is given: what the package's entries are made of. */
import type { InferenceSession } from "onnxruntime-common";
import type { Platform } from "./runtime.js";
import { TrainingSession, type TrainingSessionFiles } from "./session.js";

export { ArtifactError, InputError, OrtrainError, StateError } from "./errors.js";
export type { Feeds, Fetches } from "./feeds.js";
export type { Values } from "./model.js";
export { Properties, type Property } from "./properties.js";
export type { Platform, Runtime, Source } from "./runtime.js";
export {
  type Dtype,
  type RawTensor,
  readSafetensors,
  type SafeTensors,
  writeSafetensors,
} from "./safetensors.js";
export { type RunOptions, TrainingSession, type TrainingSessionFiles } from "./session.js";

/** Makes training sessions on one platform. */
export interface TrainingSessionFactory {
  /**
   * Loads artifacts.
   *
   * @param files - paths, URLs or contents of the files of `generate_artifacts`.
   * @param sessionOptions - of each onnxruntime session.
   * @throws ArtifactError: a file is missing or damaged, or they are not of one model.
   */
  create(
    files: TrainingSessionFiles,
    sessionOptions?: InferenceSession.SessionOptions,
  ): Promise<TrainingSession>;
}

/** The factory of a platform. */
export function trainingOn(platform: Platform): TrainingSessionFactory {
  return {
    create: (files, sessionOptions) => TrainingSession.create(platform, files, sessionOptions),
  };
}
