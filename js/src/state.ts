import type { InferenceSession, Tensor } from "onnxruntime-common";
import type { Checkpoint, Description, ParameterSpec, Spec } from "./checkpoint.js";
import * as contract from "./contract.js";
import { ArtifactError, InputError, listing, StateError } from "./errors.js";
import type { Model, Values } from "./model.js";
import type { Properties } from "./properties.js";
import type { Runtime } from "./runtime.js";
import type { RawTensor } from "./safetensors.js";
import {
  bytesOf,
  elementsOf,
  firstOf,
  makeSingle,
  makeTensor,
  rawTensor,
  typeOf,
} from "./tensors.js";

// What onnxruntime's training sessions start with.
const DEFAULT_LEARNING_RATE = 1e-3;
const MOST_NAMED = 3;

/** What training changes: tensors that go from the outputs of one run to the inputs of the next. */
export class State {
  readonly description: Description;
  readonly properties: Properties;
  /** Whether gradients have been accumulated since they were last reset. */
  hasGradients = false;
  step: bigint;
  seed: bigint;
  learningRate: number;
  readonly #runtime: Runtime;
  /** Parameters and buffers. */
  readonly #weights: Map<string, Spec>;
  /** States of the optimizer. */
  readonly #states: Map<string, Spec>;
  readonly #tensors = new Map<string, Tensor>();
  /** By the names of the parameters. */
  readonly #gradients = new Map<string, Tensor>();

  constructor(runtime: Runtime, checkpoint: Checkpoint) {
    const { description, tensors } = checkpoint;
    const { parameters, buffers, states } = description;
    this.#runtime = runtime;
    this.description = description;
    this.properties = checkpoint.properties;
    this.#weights = byName([...parameters, ...buffers]);
    this.#states = byName(states);
    for (const spec of [...parameters, ...buffers, ...states]) {
      const found = tensors.get(spec.name);
      if (found) this.#tensors.set(spec.name, makeTensor(runtime, spec, found.bytes));
    }
    this.step = checkpoint.step ?? 0n;
    this.seed = checkpoint.seed ?? 0n;
    this.learningRate = checkpoint.learningRate ?? DEFAULT_LEARNING_RATE;
  }

  // -- models ------------------------------------------------------------------------------------

  /** Whether an input of a model is fed from here, by its name. */
  isInput(name: string): boolean {
    const parameter = contract.bufferParameter(name);
    return this.#weights.has(name) || this.#states.has(name) || parameter !== undefined;
  }

  /**
   * Outputs that stay where a device computed them.
   *
   * Known before there is a session, as it is made with them. Integers stay on the CPU.
   */
  outputs(): string[] {
    const { parameters, buffers, states } = this.description;
    const floating = [...parameters, ...buffers, ...states].filter((s) => s.dtype.startsWith("F"));
    return [
      ...floating.map(({ name }) => contract.updated(name)),
      ...parameters.map(({ name }) => contract.accumulationOut(name)),
    ];
  }

  /**
   * Checks that a model and this state belong together.
   *
   * @throws ArtifactError: they do not.
   */
  checkModel(model: Model): void {
    const refuse = (because: string): never => {
      throw new ArtifactError(`${model.name} and the checkpoint are not of one model`, {
        because,
        help: "take all files of one run of generate_artifacts",
      });
    };
    for (const input of model.inputs) {
      const parameter = contract.bufferParameter(input.name);
      const spec = this.#specOf(parameter ?? input.name);
      if (spec) this.#compare(spec, input, refuse);
      else if (parameter !== undefined) refuse(`the checkpoint has no ${parameter}`);
    }
    for (const output of model.outputs) {
      const name = contract.updatedName(output) ?? contract.accumulatedParameter(output);
      if (name !== undefined && name !== contract.STEP && !this.#specOf(name)) {
        refuse(`the checkpoint has no ${name}`);
      }
    }
    if (model.hash !== undefined && model.hash !== this.description.texts.model) {
      refuse("the model was made with another checkpoint");
    }
  }

  #specOf(name: string): Spec | undefined {
    return this.#weights.get(name) ?? this.#states.get(name);
  }

  #compare(
    spec: Spec,
    input: InferenceSession.ValueMetadata,
    refuse: (why: string) => never,
  ): void {
    if (!input.isTensor) return;
    const type = typeOf(spec);
    if (input.type !== type || String(input.shape) !== String(spec.shape)) {
      const there = `${input.type} [${input.shape}]`;
      refuse(`${input.name} is ${there} in one and ${type} [${spec.shape}] in the other`);
    }
  }

  /**
   * The inputs of a model that are not the user's.
   *
   * @throws StateError: the checkpoint is nominal, and has no value yet for one of them.
   */
  inputsOf(model: Model): Values {
    const values: Values = {};
    const missing: string[] = [];
    for (const { name } of model.inputs) {
      const value = this.#input(name);
      if (value) values[name] = value;
      else if (this.#weights.has(name)) missing.push(name);
    }
    if (missing.length > 0) throw withoutValue(missing);
    return values;
  }

  #input(name: string): Tensor | undefined {
    switch (name) {
      case contract.LAZY_RESET_GRAD:
        return makeSingle(this.#runtime, !this.hasGradients);
      case contract.LEARNING_RATE:
        return makeSingle(this.#runtime, this.learningRate);
      case contract.STEP:
        return makeSingle(this.#runtime, this.step);
      case contract.SEED:
        return makeSingle(this.#runtime, this.seed);
    }
    const accumulated = contract.bufferParameter(name);
    if (accumulated !== undefined) return this.#zeros(this.#gradients, accumulated, this.#weights);
    if (this.#states.has(name)) return this.#zeros(this.#tensors, name, this.#states);
    return this.#tensors.get(name);
  }

  /** The gradients as the optimizer's inputs. */
  gradients(): Values {
    const rows = [...this.#gradients].map(([name, tensor]) => [contract.gradient(name), tensor]);
    return Object.fromEntries(rows);
  }

  #zeros(tensors: Map<string, Tensor>, name: string, specs: Map<string, Spec>): Tensor | undefined {
    const spec = specs.get(name);
    if (spec && !tensors.has(name)) tensors.set(name, makeTensor(this.#runtime, spec));
    return tensors.get(name);
  }

  /** Takes the outputs of a run for the next one, out of what the run returned. */
  async take(outputs: Values): Promise<void> {
    const step = outputs[contract.updated(contract.STEP)];
    if (step) this.step = (await firstOf(step)) as bigint;
    for (const [output, tensor] of Object.entries(outputs)) {
      const updated = contract.updatedName(output);
      const accumulated = contract.accumulatedParameter(output);
      if (updated === undefined && accumulated === undefined) continue;
      if (accumulated !== undefined) replace(this.#gradients, accumulated, tensor);
      else if (updated !== undefined && updated !== contract.STEP) {
        replace(this.#tensors, updated, tensor);
      }
      delete outputs[output];
    }
  }

  // -- access ------------------------------------------------------------------------------------

  /** A copy of a parameter or a buffer. */
  async weight(name: string): Promise<Tensor> {
    const spec = this.#weightSpec(name);
    const tensor = this.#tensors.get(name);
    if (!tensor) throw withoutValue([name]);
    return makeTensor(this.#runtime, spec, await bytesOf(tensor));
  }

  /** Sets a parameter or a buffer to a copy of a tensor. */
  async setWeight(name: string, tensor: Tensor): Promise<void> {
    const spec = this.#weightSpec(name);
    if (tensor.type !== typeOf(spec) || String(tensor.dims) !== String(spec.shape)) {
      throw new InputError(`${name} cannot be a tensor ${tensor.type} [${tensor.dims}]`, {
        because: `it is ${typeOf(spec)} [${spec.shape}]`,
        help: "give a tensor of its dtype and shape",
      });
    }
    const bytes = await bytesOf(tensor);
    replace(this.#tensors, name, makeTensor(this.#runtime, spec, bytes));
  }

  /** A copy of an accumulated gradient; undefined where there is none. */
  async gradient(name: string): Promise<Tensor | undefined> {
    const spec = this.#weightSpec(name);
    const tensor = this.hasGradients ? this.#gradients.get(name) : undefined;
    return tensor && makeTensor(this.#runtime, spec, await bytesOf(tensor));
  }

  #weightSpec(name: string): Spec {
    const spec = this.#weights.get(name);
    if (!spec) {
      throw new InputError(`there is no parameter or buffer ${name}`, {
        help: `there are ${listing([...this.#weights.keys()])}`,
      });
    }
    return spec;
  }

  /** How many elements the parameters have together, all or the trained ones. */
  size(trainableOnly: boolean): number {
    return total(this.#parameters(trainableOnly));
  }

  #parameters(trainableOnly: boolean): readonly ParameterSpec[] {
    const { parameters } = this.description;
    return parameters.filter((spec) => spec.requires_grad || !trainableOnly);
  }

  /**
   * The parameters, all or the trained ones, in the models' order.
   *
   * @throws StateError: one is not of float32.
   */
  #contiguous(trainableOnly: boolean): readonly ParameterSpec[] {
    const chosen = this.#parameters(trainableOnly);
    const odd = chosen.find(({ dtype }) => dtype !== "F32");
    if (odd) {
      throw new StateError("the parameters cannot be one tensor", {
        because: `${odd.name} is ${odd.dtype}, and one tensor takes float32 alone`,
        help: "use getParameter and setParameter for each",
      });
    }
    return chosen;
  }

  /** The elements of the parameters one after another, float32. */
  async flattened(trainableOnly: boolean): Promise<Float32Array> {
    const specs = this.#contiguous(trainableOnly);
    const missing = specs.filter(({ name }) => !this.#tensors.has(name));
    if (missing.length > 0) throw withoutValue(missing.map(({ name }) => name));
    const flat = new Float32Array(total(specs));
    const bytes = new Uint8Array(flat.buffer);
    let at = 0;
    for (const spec of specs) {
      bytes.set(await bytesOf(this.#tensors.get(spec.name) as Tensor), at);
      at += 4 * elementsOf(spec);
    }
    return flat;
  }

  /** Sets the parameters from what `flattened` gave. */
  load(bytes: Uint8Array, trainableOnly: boolean): void {
    const specs = this.#contiguous(trainableOnly);
    const size = 4 * total(specs);
    if (bytes.length !== size) {
      throw new InputError(`the buffer has ${bytes.length} bytes, and the parameters ${size}`, {
        help: `give the float32 elements of ${trainableOnly ? "the trained" : "all"} parameters`,
      });
    }
    let at = 0;
    for (const spec of specs) {
      const next = at + 4 * elementsOf(spec);
      const tensor = makeTensor(this.#runtime, spec, bytes.subarray(at, next));
      replace(this.#tensors, spec.name, tensor);
      at = next;
    }
  }

  // -- the end -----------------------------------------------------------------------------------

  /**
   * What a checkpoint keeps.
   *
   * @throws StateError: parts of a nominal checkpoint have values, and others have none.
   */
  async checkpoint(includeOptimizerState: boolean): Promise<Checkpoint> {
    const { parameters, buffers, states } = this.description;
    const has = ({ name }: Spec): boolean => this.#tensors.has(name);
    const missing = [...parameters, ...buffers].filter((spec) => !has(spec));
    if (missing.length > 0 && parameters.some(has)) {
      throw withoutValue(missing.map(({ name }) => name));
    }
    const tensors = new Map<string, RawTensor>();
    for (const spec of [...parameters, ...buffers, ...(includeOptimizerState ? states : [])]) {
      const tensor = this.#tensors.get(spec.name);
      if (tensor) tensors.set(spec.name, await rawTensor(spec, tensor));
    }
    return {
      description: this.description,
      tensors,
      properties: this.properties,
      step: includeOptimizerState ? this.step : undefined,
      seed: includeOptimizerState ? this.seed : undefined,
      learningRate: includeOptimizerState ? this.learningRate : undefined,
    };
  }

  /** Frees what lies on a device. */
  dispose(): void {
    for (const tensors of [this.#tensors, this.#gradients]) {
      for (const tensor of tensors.values()) free(tensor);
      tensors.clear();
    }
  }
}

function total(specs: readonly Spec[]): number {
  return specs.reduce((sum, spec) => sum + elementsOf(spec), 0);
}

function byName(specs: readonly Spec[]): Map<string, Spec> {
  return new Map(specs.map((spec) => [spec.name, spec]));
}

function replace(tensors: Map<string, Tensor>, name: string, tensor: Tensor): void {
  const old = tensors.get(name);
  tensors.set(name, tensor);
  if (old) free(old);
}

// The garbage collector takes what lies on the CPU, and knows nothing of the rest.
function free(tensor: Tensor): void {
  if (tensor.location !== "cpu") tensor.dispose();
}

function withoutValue(names: string[]): StateError {
  return new StateError(`there are no values of ${listing(names, MOST_NAMED)}`, {
    because: "the checkpoint is nominal",
    help: "call loadParametersBuffer(buffer, false) first, or setParameter for each",
  });
}
