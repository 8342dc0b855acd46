import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { it } from "node:test";
import { pathToFileURL } from "node:url";
import { readSafetensors } from "@ortrain/web/core";
import { serve } from "#serve";
import { ARTIFACTS, artifacts, ENTRIES, ROOT } from "./files.js";
import { batches, distance, type Entry, open, train } from "./scenario.js";

const node = ENTRIES["onnxruntime-node"] as Entry;
const wasm = ENTRIES.wasm as Entry;

it("Node reads files by path, by file URL and from a server, the web from a server", async () => {
  const { url, close } = await serve();
  const served = `${url}/build/artifacts/cnn`;
  const places: [Entry, (file: string) => string | URL][] = [
    [node, (file) => `${ARTIFACTS}/cnn/${file}`],
    [node, (file) => pathToFileURL(`${ARTIFACTS}/cnn/${file}`)],
    [node, (file) => `${served}/${file}`],
    [wasm, (file) => `${served}/${file}`],
    [wasm, (file) => new URL(`${served}/${file}`)],
  ];
  try {
    for (const [entry, place] of places) {
      const session = await entry.TrainingSession.create({
        checkpointState: place("checkpoint"),
        evalModel: place("eval_model.onnx"),
      });
      assert.equal(await session.getParametersSize(), 1030);
      await session.release();
      const missing = { checkpointState: place("nothing"), evalModel: place("eval_model.onnx") };
      await assert.rejects(entry.TrainingSession.create(missing), /nothing.*(ENOENT|404)/s);
    }
  } finally {
    close();
  }
});

for (const [runtime, entry] of Object.entries(ENTRIES)) {
  it(`models in ORT format train on ${runtime} as those in ONNX`, async () => {
    const read = artifacts("cnn");
    const readOrt = (file: string): Promise<Uint8Array> => read(file.replace(/onnx$/, "ort"));
    const feeds = (await batches(entry, read)).slice(0, 10);
    const [onnx, ort] = [await open(entry, read), await open(entry, readOrt)];
    assert.deepEqual(await train(ort, feeds), await train(onnx, feeds));
    await Promise.all([onnx.release(), ort.release()]);
  });

  it(`Python goes on from a checkpoint of ${runtime}`, async () => {
    const read = artifacts("cnn");
    const session = await open(entry, read);
    await train(session, (await batches(entry, read)).slice(0, 50));
    const folder = await mkdtemp(join(tmpdir(), "ortrain-"));
    const [checkpoint, result] = [join(folder, "checkpoint"), join(folder, "result")];
    try {
      await writeFile(checkpoint, await session.saveCheckpoint(true));
      const python = process.env.PYTHON ?? "python3";
      execFileSync(python, [`${ROOT}test/resume.py`, `${ARTIFACTS}/cnn`, checkpoint, result]);
      const { tensors } = readSafetensors(await readFile(result));
      const expected = readSafetensors(await read("expected")).tensors;
      const difference = distance(tensors, expected);
      assert.ok(difference <= 1e-5, `weights differ by ${difference}`);
    } finally {
      await rm(folder, { recursive: true });
    }
    await session.release();
  });
}
