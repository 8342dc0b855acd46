import type { InferenceSession, Tensor } from "onnxruntime-common";
import { InputError, listing } from "./errors.js";

/** Feeds by the names of inputs. */
export type Feeds = Readonly<Record<string, Tensor>>;

/** What to fetch: names, or an object with null for each. */
export type Fetches = readonly string[] | Readonly<Record<string, null>>;

/**
 * Checks feeds against what a model takes.
 *
 * @param feeds - by name.
 * @param inputs - those of the model that the user feeds.
 * @param model - what to call it in an error.
 * @throws InputError: a feed is missing, unknown, no tensor, or of another dtype or shape.
 */
export function checkFeeds(
  feeds: Feeds,
  inputs: readonly InferenceSession.ValueMetadata[],
  model: string,
): void {
  const names = inputs.map(({ name }) => name);
  const help = `${model} takes ${listing(inputs.map(describe))}`;
  const given = Object.keys(feeds ?? {});
  const unknown = given.find((name) => !names.includes(name));
  if (unknown !== undefined) throw new InputError(`${model} has no input ${unknown}`, { help });
  const missing = names.filter((name) => !given.includes(name));
  if (missing.length > 0) throw new InputError(`${listing(missing)} is not fed`, { help });
  const symbols = new Map<string, [size: number, input: string]>();
  for (const input of inputs) {
    if (input.isTensor) checkTensor(feeds[input.name] as Tensor, input, symbols, help);
  }
}

/**
 * The names of what a call fetches.
 *
 * @param fetches - all results where undefined.
 * @param results - the outputs of the model that are the user's.
 * @param model - what to call it in an error.
 * @throws InputError: there is no such result, or memory was given to write it into.
 */
export function fetchedNames(
  fetches: Fetches | undefined,
  results: readonly string[],
  model: string,
): string[] {
  if (fetches === undefined) return [...results];
  const names = Array.isArray(fetches) ? (fetches as string[]) : Object.keys(fetches);
  const unknown = names.find((name) => !results.includes(name));
  if (unknown !== undefined) {
    throw new InputError(`${model} has no result ${unknown}`, {
      help: `it has ${listing(results)}`,
    });
  }
  if (!Array.isArray(fetches) && Object.values(fetches).some((value) => value !== null)) {
    throw new InputError("fetches cannot hold tensors", {
      because: "onnxruntime-web does not write into memory that it is given",
      help: "give names alone, and take the tensors that the call returns",
    });
  }
  return names;
}

/** A tensor as errors show it: `labels int64 [batch]`. */
function describe(input: InferenceSession.ValueMetadata): string {
  return input.isTensor ? `${input.name} ${input.type} [${input.shape.join(", ")}]` : input.name;
}

function checkTensor(
  tensor: Tensor,
  input: InferenceSession.TensorValueMetadata,
  symbols: Map<string, [size: number, input: string]>,
  help: string,
): void {
  const { name, type, shape } = input;
  // Not instanceof: every bundle of onnxruntime-web has a class of its own.
  if (!Array.isArray(tensor?.dims) || typeof tensor.type !== "string") {
    throw new InputError(`${name} is no tensor`, { help: `make it with new ort.Tensor; ${help}` });
  }
  if (tensor.type !== type) {
    throw new InputError(`${name} is ${tensor.type}, and the model takes ${type}`, { help });
  }
  // An empty shape is that of a scalar or an unknown one: the metadata do not tell which.
  if (shape.length === 0) return;
  const is = `${name} has the shape [${tensor.dims.join(", ")}]`;
  const fits =
    tensor.dims.length === shape.length &&
    shape.every((size, axis) => typeof size === "string" || size === tensor.dims[axis]);
  if (!fits) throw new InputError(`${is}, and the model takes [${shape.join(", ")}]`, { help });
  for (const [axis, symbol] of shape.entries()) {
    if (typeof symbol !== "string" || symbol === "") continue;
    const size = tensor.dims[axis] as number;
    const [other, where] = symbols.get(symbol) ?? [size, name];
    if (other !== size) {
      throw new InputError(`${is}, and ${where} has ${other} where this has ${size}`, {
        because: `both are the model's size ${symbol}`,
        help,
      });
    }
    symbols.set(symbol, [size, name]);
  }
}
