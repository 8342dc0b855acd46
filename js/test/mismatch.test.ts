import assert from "node:assert/strict";
import { it } from "node:test";
import { ArtifactError, InputError, OrtrainError, readSafetensors } from "@ortrain/web/core";
import { sha256 } from "#inside/sha256.js";
import { artifacts, ENTRIES, sealed } from "./files.js";
import type { Entry } from "./scenario.js";

const read = artifacts("cnn");

/** The checkpoint with a frozen parameter trained. */
async function retrained(): Promise<Uint8Array> {
  const { metadata, tensors } = readSafetensors(await read("checkpoint"));
  const parameters = (metadata.parameters ?? "").replace(/"requires_grad": ?false/, (text) =>
    text.replace("false", "true"),
  );
  const model = sha256(`${parameters}\n${metadata.buffers}`);
  return sealed({ metadata: { ...metadata, parameters, model }, tensors });
}
const other = artifacts("mlp");
const entry = ENTRIES["onnxruntime-node"] as Entry;

const faults: [string, Parameters<Entry["TrainingSession"]["create"]>[0], RegExp][] = [
  ["no checkpoint", { trainModel: "x" } as never, /no checkpointState/],
  ["no model", { checkpointState: "x" }, /no model/],
  ["an unknown file", { checkpointState: "x", model: "x" } as never, /no file called model/],
  [
    "an optimizer alone",
    {
      checkpointState: await read("checkpoint"),
      optimizerModel: await read("optimizer_model.onnx"),
    },
    /of no use without trainModel/,
  ],
  [
    "the checkpoint of another model",
    {
      checkpointState: await other("checkpoint"),
      trainModel: await read("training_model.onnx"),
    },
    /trainModel and the checkpoint are not of one model.*1.bias is float32 \[6\]/s,
  ],
  [
    "the optimizer of another model",
    {
      checkpointState: await read("checkpoint"),
      trainModel: await read("training_model.onnx"),
      optimizerModel: await other("optimizer_model.onnx"),
    },
    /optimizerModel and the checkpoint are not of one model/,
  ],
  [
    "a model of the same tensors that was made with another checkpoint",
    { checkpointState: await retrained(), evalModel: await read("eval_model.onnx") },
    /evalModel and the checkpoint are not of one model.*made with another checkpoint/s,
  ],
  [
    "a model that is none",
    { checkpointState: await read("checkpoint"), trainModel: new Uint8Array(10) },
    /cannot load trainModel \(10 bytes\)/,
  ],
  [
    "a model for a checkpoint",
    { checkpointState: await read("eval_model.onnx"), evalModel: await read("eval_model.onnx") },
    /cannot read the checkpoint \(\d+ bytes\)/,
  ],
  [
    "a file that is missing",
    { checkpointState: "/nowhere/checkpoint", evalModel: "/nowhere/eval_model.onnx" },
    /cannot read the checkpoint \/nowhere\/checkpoint.*ENOENT/s,
  ],
];
for (const [what, files, message] of faults) {
  it(`refuses ${what}`, async () => {
    await assert.rejects(entry.TrainingSession.create(files), (error: Error) => {
      assert.ok(error instanceof ArtifactError || error instanceof InputError);
      assert.ok(error instanceof OrtrainError);
      assert.match(error.message, message);
      return true;
    });
  });
}
