/** Names in artifacts, by which a training loop goes: see docs/ondevice-contract.md. */

export const LAZY_RESET_GRAD = "lazy_reset_grad";
export const LEARNING_RATE = "learning_rate";
export const STEP = "step";
export const SEED = "seed";
export const GRAD_NORM = "grad_norm";

/** In the models' metadata: the checkpoint's `model`, of those made together. */
export const MODEL_HASH = "ortrain.model";

/** In the models' metadata: the checksum of the file. */
export const CHECKSUM = "ortrain.checksum";

const BUFFER = "_grad.accumulation.buffer";
const OUT = "_grad.accumulation.out";
const UPDATED = ".updated";

/** The optimizer's input for a parameter's gradient. */
export const gradient = (parameter: string): string => `${parameter}_grad`;

/** The training model's input for the gradient accumulated so far. */
export const accumulationBuffer = (parameter: string): string => `${parameter}${BUFFER}`;

/** The training model's output for the gradient accumulated so far and in this run. */
export const accumulationOut = (parameter: string): string => `${parameter}${OUT}`;

/** The output that holds the next value of a parameter, a buffer, a state or the step. */
export const updated = (name: string): string => `${name}${UPDATED}`;

/** The parameter whose gradient an input of the training model accumulates. */
export const bufferParameter = (input: string): string | undefined => before(input, BUFFER);

/** The parameter whose gradient an output of the training model holds. */
export const accumulatedParameter = (output: string): string | undefined => before(output, OUT);

/** What an output holds the next value of. */
export const updatedName = (output: string): string | undefined => before(output, UPDATED);

const before = (name: string, suffix: string): string | undefined =>
  name.endsWith(suffix) ? name.slice(0, -suffix.length) : undefined;

/** Whether an output is the user's: the loss, or one asked for. */
export const isResult = (output: string): boolean =>
  output !== GRAD_NORM && !output.endsWith(OUT) && !output.endsWith(UPDATED);
