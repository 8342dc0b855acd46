import assert from "node:assert/strict";
import { it } from "node:test";
import { readSafetensors } from "@ortrain/web/core";
import { metadataOf } from "#inside/onnx.js";
import { artifacts } from "./files.js";

const read = artifacts("cnn");

it("a model's metadata is that of the checkpoint that it was made with", async () => {
  const { metadata } = readSafetensors(await read("checkpoint"));
  for (const model of ["training_model", "eval_model", "optimizer_model", "train_step_model"]) {
    const file = await read(`${model}.onnx`);
    assert.equal(metadataOf(file, "ortrain.model"), metadata.model);
    assert.equal(metadataOf(file, "ortrain"), undefined);
  }
});

it("what is no ONNX file has no metadata", async () => {
  const file = await read("eval_model.onnx");
  for (let length = 0; length < file.length; length += 7) {
    metadataOf(file.subarray(0, length), "ortrain.model");
    const noise = Uint8Array.from({ length }, (_, i) => (i * i * 31 + length) % 251);
    assert.equal(metadataOf(noise, "ortrain.model"), undefined);
  }
  assert.equal(metadataOf(await read("eval_model.ort"), "ortrain.model"), undefined);
});
