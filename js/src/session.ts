import type { InferenceSession, Tensor } from "onnxruntime-common";
import { readCheckpoint, writeCheckpoint } from "./checkpoint.js";
import * as contract from "./contract.js";
import { InputError, listing, StateError } from "./errors.js";
import type { Feeds, Fetches } from "./feeds.js";
import { label, Model, readSource, type Values } from "./model.js";
import type { Properties } from "./properties.js";
import type { Platform, Source } from "./runtime.js";
import { State } from "./state.js";
import { firstOf } from "./tensors.js";

/** The files of `generate_artifacts`. Train on `trainModel` and `optimizerModel`, or fused. */
export interface TrainingSessionFiles {
  /** `checkpoint` or `nominal_checkpoint`. */
  checkpointState: Source;
  /** `training_model.onnx`. */
  trainModel?: Source | undefined;
  /** `eval_model.onnx`. */
  evalModel?: Source | undefined;
  /** `optimizer_model.onnx`. */
  optimizerModel?: Source | undefined;
  /** `train_step_model.onnx`. */
  trainStepModel?: Source | undefined;
}

/** Options of a run, as onnxruntime takes them. */
export type RunOptions = InferenceSession.RunOptions;

type Kind = (typeof KINDS)[number];

const KINDS = ["trainModel", "evalModel", "optimizerModel", "trainStepModel"] as const;

/**
 * Trains a model.
 *
 * Calls run one after another, in the order in which they were made. A call that fails changes
 * nothing.
 */
export class TrainingSession {
  readonly #platform: Platform;
  readonly #state: State;
  readonly #models: Partial<Record<Kind, Model>>;
  #last: Promise<unknown> = Promise.resolve();
  #released = false;
  #gradNorm: number | undefined;

  private constructor(platform: Platform, state: State, models: Partial<Record<Kind, Model>>) {
    this.#platform = platform;
    this.#state = state;
    this.#models = models;
  }

  /**
   * Loads artifacts.
   *
   * @param platform - the runtime; the package's entries give theirs.
   * @param files - paths, URLs or contents.
   * @param sessionOptions - of each onnxruntime session.
   * @throws ArtifactError: a file is missing or damaged, or they are not of one model.
   */
  static async create(
    platform: Platform,
    files: TrainingSessionFiles,
    sessionOptions: InferenceSession.SessionOptions = {},
  ): Promise<TrainingSession> {
    checkFiles(files);
    const source = files.checkpointState;
    const content = await readSource(platform, source, "the checkpoint");
    const state = new State(
      platform.runtime,
      readCheckpoint(content, label(source, "the checkpoint")),
    );
    const options = { ...sessionOptions };
    if (platform.stateLocation && options.preferredOutputLocation === undefined) {
      const rows = state.outputs().map((output) => [output, platform.stateLocation]);
      options.preferredOutputLocation = Object.fromEntries(rows);
    }
    const models: Partial<Record<Kind, Model>> = {};
    try {
      // One after another: onnxruntime-web makes one session at a time.
      for (const kind of KINDS) {
        const file = files[kind];
        if (file === undefined) continue;
        const isState = (input: string): boolean => state.isInput(input);
        const model = await Model.load(platform, file, kind, options, isState);
        models[kind] = model;
        state.checkModel(model);
      }
    } catch (error) {
      await Promise.all(Object.values(models).map((model) => model.release()));
      throw error;
    }
    return new TrainingSession(platform, state, models);
  }

  // -- training ----------------------------------------------------------------------------------

  /**
   * Runs forward and backward, and adds to the gradients accumulated so far.
   *
   * @param feeds - tensors by the names of inputs.
   * @param fetches - names of results; all by default.
   * @returns the results, by name; the first of `trainingOutputNames` is the loss.
   * @throws InputError: feeds or fetches are not the model's.
   */
  async runTrainStep(feeds: Feeds, fetches?: Fetches, options?: RunOptions): Promise<Values> {
    return this.#exclusive(async () => {
      const results = await this.#run("trainModel", feeds, fetches, options);
      this.#state.hasGradients = true;
      this.#state.seed += 1n;
      return results;
    });
  }

  /** Makes the next `runTrainStep` start with new gradients. */
  async lazyResetGrad(): Promise<void> {
    return this.#exclusive(async () => {
      this.#state.hasGradients = false;
    });
  }

  /**
   * Updates the parameters by the accumulated gradients, at `learningRate`.
   *
   * @throws StateError: there are no gradients.
   */
  async runOptimizerStep(options?: RunOptions): Promise<void> {
    return this.#exclusive(async () => {
      const model = this.#model("optimizerModel");
      if (!this.#state.hasGradients) {
        throw new StateError("there are no gradients to update by", {
          help: "call runTrainStep before runOptimizerStep, and lazyResetGrad after it",
        });
      }
      const values = { ...this.#state.inputsOf(model), ...this.#state.gradients() };
      const wanted = model.inputs.map(({ name }) => [name, values[name] as Tensor]);
      await this.#update(await model.run(Object.fromEntries(wanted), model.outputs, options));
    });
  }

  /**
   * Runs forward, backward and update at once, at `learningRate`. Gradients are not accumulated.
   *
   * @param feeds - tensors by the names of inputs.
   * @param fetches - names of results; all by default.
   * @returns the results, by name; the first of `trainingOutputNames` is the loss.
   * @throws InputError: feeds or fetches are not the model's.
   */
  async runFusedStep(feeds: Feeds, fetches?: Fetches, options?: RunOptions): Promise<Values> {
    return this.#exclusive(async () => {
      const results = await this.#run("trainStepModel", feeds, fetches, options);
      this.#state.seed += 1n;
      return results;
    });
  }

  /**
   * Runs the forward in evaluation mode.
   *
   * @param feeds - tensors by the names of inputs.
   * @param fetches - names of results; all by default.
   * @returns the results, by name; the first of `evalOutputNames` is the loss.
   * @throws InputError: feeds or fetches are not the model's.
   */
  async runEvalStep(feeds: Feeds, fetches?: Fetches, options?: RunOptions): Promise<Values> {
    return this.#exclusive(() => this.#run("evalModel", feeds, fetches, options));
  }

  /** Of the next update; 0.001 where the checkpoint does not say. */
  get learningRate(): number {
    return this.#state.learningRate;
  }

  set learningRate(rate: number) {
    if (!Number.isFinite(rate)) {
      throw new InputError(`a learning rate is a finite number, not ${rate}`);
    }
    this.#state.learningRate = rate;
  }

  /** Updates done. */
  get step(): number {
    return Number(this.#state.step);
  }

  /**
   * The norm of all gradients at the last update, before they were clipped; undefined before the
   * first, and where the optimizer does not clip.
   */
  get gradNorm(): number | undefined {
    return this.#gradNorm;
  }

  // -- parameters --------------------------------------------------------------------------------

  /** How many elements the parameters have together, all or the trained ones. */
  async getParametersSize(trainableOnly = true): Promise<number> {
    return this.#exclusive(async () => this.#state.size(trainableOnly));
  }

  /** The elements of the parameters one after another, in the models' order: float32 [n]. */
  async getContiguousParameters(trainableOnly = true): Promise<Tensor> {
    return this.#exclusive(async () => {
      const flat = await this.#state.flattened(trainableOnly);
      return new this.#platform.runtime.Tensor("float32", flat, [flat.length]);
    });
  }

  /**
   * Sets the parameters from what `getContiguousParameters` gave.
   *
   * @throws InputError: it has another size.
   */
  async loadParametersBuffer(
    buffer: Uint8Array | Float32Array,
    trainableOnly = true,
  ): Promise<void> {
    return this.#exclusive(async () => {
      const { buffer: memory, byteOffset, byteLength } = buffer;
      this.#state.load(new Uint8Array(memory, byteOffset, byteLength), trainableOnly);
    });
  }

  /** A copy of a parameter or a buffer such as running statistics. */
  async getParameter(name: string): Promise<Tensor> {
    return this.#exclusive(() => this.#state.weight(name));
  }

  /** Sets a parameter or a buffer to a copy of a tensor of its dtype and shape. */
  async setParameter(name: string, tensor: Tensor): Promise<void> {
    return this.#exclusive(() => this.#state.setWeight(name, tensor));
  }

  /** A copy of the gradient accumulated for a parameter; undefined where there is none. */
  async getGradient(name: string): Promise<Tensor | undefined> {
    return this.#exclusive(() => this.#state.gradient(name));
  }

  /** The user's own numbers and strings, saved with the checkpoint. */
  get properties(): Properties {
    return this.#state.properties;
  }

  /**
   * The content of a checkpoint file.
   *
   * @param includeOptimizerState - also what continues training as if it had not been interrupted:
   *   the optimizer's states, the number of updates, the learning rate, the seed.
   */
  async saveCheckpoint(includeOptimizerState = false): Promise<Uint8Array> {
    return this.#exclusive(async () =>
      writeCheckpoint(await this.#state.checkpoint(includeOptimizerState)),
    );
  }

  // -- names -------------------------------------------------------------------------------------

  /** What `runTrainStep`, or else `runFusedStep`, is fed. */
  get trainingInputNames(): string[] {
    return this.#trainer.userInputNames;
  }

  /** What `runTrainStep`, or else `runFusedStep`, returns; the first is the loss. */
  get trainingOutputNames(): string[] {
    return this.#trainer.resultNames;
  }

  /** What `runEvalStep` is fed. */
  get evalInputNames(): string[] {
    return this.#model("evalModel").userInputNames;
  }

  /** What `runEvalStep` returns; the first is the loss. */
  get evalOutputNames(): string[] {
    return this.#model("evalModel").resultNames;
  }

  /** Frees the onnxruntime sessions and all tensors, after the calls made so far. */
  async release(): Promise<void> {
    return this.#exclusive(async () => {
      this.#released = true;
      this.#state.dispose();
      await Promise.all(Object.values(this.#models).map((model) => model.release()));
    });
  }

  // -- inside ------------------------------------------------------------------------------------

  get #trainer(): Model {
    return this.#models.trainModel ?? this.#model("trainStepModel");
  }

  #model(kind: Kind): Model {
    const model = this.#models[kind];
    if (model) return model;
    throw new StateError(`the session has no ${kind}`, {
      help: `give TrainingSession.create a file as ${kind}`,
    });
  }

  /** Runs a call once all earlier ones are done. */
  #exclusive<T>(call: () => Promise<T>): Promise<T> {
    const result = this.#last.then(() => {
      if (this.#released) throw new StateError("the session has been released");
      return call();
    });
    this.#last = result.catch(() => undefined);
    return result;
  }

  /** Runs a model on what the user feeds and on the state; takes what belongs to the state. */
  async #run(
    kind: Kind,
    feeds: Feeds,
    fetches: Fetches | undefined,
    options: RunOptions | undefined,
  ): Promise<Values> {
    const model = this.#model(kind);
    const results = model.check(feeds, fetches);
    const kept = model.outputs.filter((output) => !contract.isResult(output));
    const values = { ...this.#state.inputsOf(model), ...feeds };
    return this.#update(await model.run(values, [...results, ...kept], options));
  }

  /** Takes what belongs to the state; the rest. */
  async #update(outputs: Values): Promise<Values> {
    const { [contract.GRAD_NORM]: norm, ...rest } = outputs;
    await this.#state.take(rest);
    if (norm) this.#gradNorm = Number(await firstOf(norm));
    return rest;
  }
}

function checkFiles(files: TrainingSessionFiles): void {
  const known: readonly string[] = ["checkpointState", ...KINDS];
  const unknown = Object.keys(files).find((key) => !known.includes(key));
  if (unknown !== undefined) {
    throw new InputError(`there is no file called ${unknown}`, { help: `give ${listing(known)}` });
  }
  if (files.checkpointState === undefined) {
    throw new InputError("there is no checkpointState", {
      help: "give the file `checkpoint` of generate_artifacts: models hold no weights",
    });
  }
  if (files.optimizerModel !== undefined && files.trainModel === undefined) {
    throw new InputError("optimizerModel is of no use without trainModel", {
      because: "it updates by the gradients that trainModel accumulates",
      help: "give trainModel as well, or trainStepModel alone",
    });
  }
  if (KINDS.every((kind) => files[kind] === undefined)) {
    throw new InputError("there is no model", { help: `give one or more of ${listing(KINDS)}` });
  }
}
