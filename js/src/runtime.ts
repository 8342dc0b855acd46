import type { InferenceSession, Tensor } from "onnxruntime-common";

/** What is used of an onnxruntime package. */
export interface Runtime {
  InferenceSession: {
    create(model: Uint8Array, options?: InferenceSession.SessionOptions): Promise<InferenceSession>;
  };
  Tensor: new (type: Tensor.Type, data: Tensor.DataType, dims: readonly number[]) => Tensor;
}

/** A runtime, and how artifacts are read and run on it. */
export interface Platform {
  runtime: Runtime;
  /** Reads a file by its path or URL. */
  read(location: string | URL): Promise<Uint8Array>;
  /** Of every session; what a user gives replaces it. */
  sessionOptions?: InferenceSession.SessionOptions;
  /** Where parameters, states and gradients stay between runs; `cpu` by default. */
  stateLocation?: Tensor.DataLocation;
}

/** A file: its path or URL, or its content. */
export type Source = string | URL | Uint8Array | ArrayBuffer;
