/** Between the bytes of a checkpoint and the tensors of a runtime. */
import type { Tensor } from "onnxruntime-common";
import type { Spec } from "./checkpoint.js";
import { ArtifactError } from "./errors.js";
import type { Runtime } from "./runtime.js";
import { type Dtype, type RawTensor, WIDTHS } from "./safetensors.js";

type NumericArray = Exclude<Tensor.DataType, string[]>;
type ArrayType = new (buffer: ArrayBuffer) => NumericArray;

// Data of float16 are given as 16-bit patterns: not every engine has Float16Array.
const TYPES: Record<Exclude<Dtype, "BF16">, [Tensor.Type, ArrayType]> = {
  BOOL: ["bool", Uint8Array],
  U8: ["uint8", Uint8Array],
  I8: ["int8", Int8Array],
  U16: ["uint16", Uint16Array],
  I16: ["int16", Int16Array],
  F16: ["float16", Uint16Array],
  U32: ["uint32", Uint32Array],
  I32: ["int32", Int32Array],
  F32: ["float32", Float32Array],
  U64: ["uint64", BigUint64Array],
  I64: ["int64", BigInt64Array],
  F64: ["float64", Float64Array],
};

/**
 * The runtime's name of a dtype.
 *
 * @throws ArtifactError: it has none.
 */
export function typeOf({ name, dtype }: Spec): Tensor.Type {
  return entry(name, dtype)[0];
}

/** A tensor of the runtime with a copy of the bytes; zeros where there are none. */
export function makeTensor(runtime: Runtime, spec: Spec, bytes?: Uint8Array): Tensor {
  const [type, Data] = entry(spec.name, spec.dtype);
  const copy = new Uint8Array(elementsOf(spec) * WIDTHS[spec.dtype]);
  if (bytes) copy.set(bytes);
  return new runtime.Tensor(type, new Data(copy.buffer), spec.shape);
}

/** A tensor of the runtime with one element: [1]. */
export function makeSingle(runtime: Runtime, value: number | bigint | boolean): Tensor {
  if (typeof value === "boolean") return new runtime.Tensor("bool", Uint8Array.of(+value), [1]);
  if (typeof value === "number") return new runtime.Tensor("float32", Float32Array.of(value), [1]);
  return new runtime.Tensor("int64", BigInt64Array.of(value), [1]);
}

/** A tensor's bytes for a checkpoint. One that lies elsewhere is fetched, and stays here. */
export async function rawTensor(spec: Spec, tensor: Tensor): Promise<RawTensor> {
  return { dtype: spec.dtype, shape: spec.shape, bytes: await bytesOf(tensor) };
}

/** A tensor's bytes, in its own memory. One that lies elsewhere is fetched, and stays here. */
export async function bytesOf(tensor: Tensor): Promise<Uint8Array> {
  const data = (await tensor.getData(true)) as NumericArray;
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

/** The first element. */
export async function firstOf(tensor: Tensor): Promise<number | bigint> {
  return ((await tensor.getData(true)) as NumericArray)[0] as number | bigint;
}

/** How many elements a tensor has. */
export function elementsOf({ shape }: Spec): number {
  return shape.reduce((product, size) => product * size, 1);
}

function entry(name: string, dtype: Dtype): [Tensor.Type, ArrayType] {
  if (dtype === "BF16") {
    throw new ArtifactError(`${name} in the checkpoint is of dtype BF16`, {
      because: "JavaScript has no such tensors",
      help: "make the artifacts of a model in float32",
    });
  }
  return TYPES[dtype];
}
