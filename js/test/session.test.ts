import assert from "node:assert/strict";
import { describe, it } from "node:test";
import {
  type Feeds,
  InputError,
  readSafetensors,
  StateError,
  type TrainingSession,
  type Values,
} from "@ortrain/web/core";
import type { Tensor } from "onnxruntime-common";
import { artifacts, ENTRIES } from "./files.js";
import { batches, distance, open, train } from "./scenario.js";

const read = artifacts("cnn");

/** The bytes of parameters, buffers and states, and all that a checkpoint says. */
async function contentOf(session: TrainingSession): Promise<unknown> {
  return readSafetensors(await session.saveCheckpoint(true));
}

async function distanceOf(a: TrainingSession, b: TrainingSession): Promise<number> {
  const [first, second] = [await a.saveCheckpoint(true), await b.saveCheckpoint(true)];
  return distance(readSafetensors(first).tensors, readSafetensors(second).tensors);
}

function lossOf({ loss }: Values): number {
  return loss?.data[0] as number;
}

for (const [runtime, entry] of Object.entries(ENTRIES)) {
  const feeds = (await batches(entry, read)) as [Feeds, Feeds, Feeds, ...Record<string, Tensor>[]];
  const { Tensor } = entry.ort;

  describe(`a session on ${runtime}`, () => {
    it("names what it takes and returns", async () => {
      const session = await open(entry, read);
      assert.deepEqual(session.trainingInputNames, ["input", "labels"]);
      assert.deepEqual(session.trainingOutputNames, ["loss", "output"]);
      assert.deepEqual(session.evalInputNames, ["input", "labels"]);
      assert.deepEqual(session.evalOutputNames, ["loss", "output"]);
      await session.release();
    });

    it("fetches what is asked for, and all results without", async () => {
      const session = await open(entry, read);
      const all = await session.runTrainStep(feeds[0]);
      assert.deepEqual(Object.keys(all).sort(), ["loss", "output"]);
      assert.deepEqual(all.output?.dims, [8, 10]);
      assert.deepEqual(Object.keys(await session.runEvalStep(feeds[0], ["output"])), ["output"]);
      assert.deepEqual(Object.keys(await session.runFusedStep(feeds[0], { loss: null })), ["loss"]);
      assert.deepEqual(await session.runTrainStep(feeds[0], []), {});
      await session.release();
    });

    it("refuses results that there are not, and memory for results", async () => {
      const session = await open(entry, read);
      await assert.rejects(session.runTrainStep(feeds[0], ["logits"]), (error: Error) => {
        assert.ok(error instanceof InputError);
        assert.match(error.message, /no result logits.*it has loss, output/s);
        return true;
      });
      const memory = { loss: new Tensor("float32", [0], []) } as unknown as { loss: null };
      await assert.rejects(session.runTrainStep(feeds[0], memory), /fetches cannot hold tensors/);
      await session.release();
    });

    it("refuses feeds that the model does not take, and nothing has changed", async () => {
      const session = await open(entry, read);
      await train(session, feeds.slice(0, 3));
      const before = await contentOf(session);
      const { input, labels } = feeds[0] as { input: Tensor; labels: Tensor };
      const images = (dims: number[]): Tensor =>
        new Tensor("float32", new Float32Array(dims.reduce((a, b) => a * b)), dims);
      const faults: [Record<string, unknown>, RegExp][] = [
        [{ input, labels, extra: input }, /has no input extra.*input float32 \[/s],
        [{ input, label: labels }, /has no input label/],
        [{ input, labels, "6.bias": input }, /has no input 6.bias/],
        [{ input, labels, seed: labels }, /has no input seed/],
        [{ input }, /labels is not fed/],
        [{}, /input, labels is not fed/],
        [{ input: input.data, labels }, /input is no tensor/],
        [{ input: undefined, labels }, /input is no tensor/],
        [{ input, labels: new Tensor("int32", new Int32Array(8), [8]) }, /int32.*takes int64/s],
        [{ input: images([8, 64]), labels }, /has the shape \[8, 64\]/],
        [{ input: images([8, 3, 8, 8]), labels }, /has the shape \[8, 3, 8, 8\]/],
        [{ input: images([4, 1, 8, 8]), labels }, /labels has the shape \[8\], and input has 4/],
      ];
      for (const [wrong, message] of faults) {
        for (const call of ["runTrainStep", "runEvalStep", "runFusedStep"] as const) {
          await assert.rejects(session[call](wrong as Feeds), (error: Error) => {
            assert.ok(error instanceof InputError, String(error));
            assert.match(error.message, message);
            return true;
          });
        }
      }
      assert.deepEqual(await contentOf(session), before);
      await session.release();
    });

    it("is as before where the runtime fails", async () => {
      const session = await open(entry, read);
      await train(session, feeds.slice(0, 3));
      const before = await contentOf(session);
      const beyond = new Tensor("int64", new BigInt64Array(8).fill(99n), [8]);
      const { input } = feeds[0] as { input: Tensor };
      await assert.rejects(session.runTrainStep({ input, labels: beyond }));
      await assert.rejects(session.runFusedStep({ input, labels: beyond }));
      assert.deepEqual(await contentOf(session), before);
      await session.runTrainStep(feeds[0]);
      await session.release();
    });

    it("accumulates gradients until they are reset", async () => {
      const session = await open(entry, artifacts("mlp"));
      const gradient = async (): Promise<number[]> =>
        Array.from((await session.getGradient("1.weight"))?.data as Float32Array);
      assert.equal(await session.getGradient("1.weight"), undefined);
      await session.runTrainStep(feeds[0]);
      const first = await gradient();
      assert.ok(first.some((x) => x !== 0));
      await session.runTrainStep(feeds[1]);
      const both = await gradient();
      await session.lazyResetGrad();
      assert.equal(await session.getGradient("1.weight"), undefined);
      await session.runTrainStep(feeds[1]);
      const second = await gradient();
      assert.deepEqual(
        both,
        first.map((x, i) => Math.fround(x + (second[i] as number))),
      );
      await session.release();
    });

    it("trains fused as it does in two runs", async () => {
      const [fused, separate] = [await open(entry, read), await open(entry, read)];
      for (const batch of feeds.slice(0, 10)) {
        const once = lossOf(await fused.runFusedStep(batch));
        const twice = lossOf(await separate.runTrainStep(batch));
        await separate.runOptimizerStep();
        await separate.lazyResetGrad();
        assert.ok(Math.abs(once - twice) <= 1e-6);
      }
      assert.equal(fused.step, 10);
      assert.ok((await distanceOf(fused, separate)) <= 1e-6);
      await Promise.all([fused.release(), separate.release()]);
    });

    it("updates at its learning rate, which the checkpoint says first", async () => {
      const session = await open(entry, read);
      assert.equal(session.learningRate, 0.002);
      session.learningRate = 0;
      const weight = async (): Promise<Tensor["data"]> =>
        (await session.getParameter("6.weight")).data;
      const before = await weight();
      await session.runFusedStep(feeds[0]);
      assert.deepEqual(await weight(), before);
      session.learningRate = 0.1;
      await session.runFusedStep(feeds[0]);
      assert.notDeepEqual(await weight(), before);
      for (const rate of [Number.NaN, Number.POSITIVE_INFINITY, "1" as unknown as number]) {
        assert.throws(() => {
          session.learningRate = rate;
        }, InputError);
      }
      assert.equal(session.learningRate, 0.1);
      await session.release();
    });

    it("tells the norm of the gradients of the last update", async () => {
      const session = await open(entry, artifacts("mlp"));
      assert.equal(session.gradNorm, undefined);
      await session.runTrainStep(feeds[0]);
      let squares = 0;
      for (const name of ["1.weight", "1.bias", "3.weight", "3.bias"]) {
        const { data } = (await session.getGradient(name)) as Tensor;
        for (const x of data as Float32Array) squares += x * x;
      }
      await session.runOptimizerStep();
      assert.ok(Math.abs(Number(session.gradNorm) - Math.sqrt(squares)) <= 1e-6);
      const fused = await entry.TrainingSession.create({
        checkpointState: await artifacts("mlp")("checkpoint"),
        trainStepModel: await artifacts("mlp")("train_step_model.onnx"),
      });
      assert.deepEqual(fused.trainingOutputNames, ["loss", "output"]);
      assert.deepEqual(Object.keys(await fused.runFusedStep(feeds[0])), ["loss", "output"]);
      assert.ok(Math.abs(Number(fused.gradNorm) - Math.sqrt(squares)) <= 1e-6);
      await Promise.all([session.release(), fused.release()]);
    });

    it("updates by no gradients that there are not", async () => {
      const session = await open(entry, read);
      await assert.rejects(session.runOptimizerStep(), StateError);
      await session.runTrainStep(feeds[0]);
      await session.lazyResetGrad();
      await assert.rejects(session.runOptimizerStep(), /no gradients to update by/);
      assert.equal(session.step, 0);
      await session.release();
    });

    it("resumes from its checkpoint as if it had not been interrupted", async () => {
      const [session, whole] = [await open(entry, read), await open(entry, read)];
      session.learningRate = whole.learningRate = 0.01;
      session.properties.set("epoch", 7);
      await train(session, feeds.slice(0, 6));
      const checkpoint = await session.saveCheckpoint(true);
      const resumed = await open(entry, read, { checkpointState: checkpoint });
      assert.equal(resumed.step, 3);
      assert.equal(resumed.learningRate, 0.01);
      assert.equal(resumed.properties.get("epoch"), 7);
      assert.equal(resumed.properties.get("name"), 'the "first"');
      const losses = await train(resumed, feeds.slice(6, 12));
      assert.deepEqual([...(await train(whole, feeds.slice(0, 12))).slice(6)], losses);
      whole.properties.set("epoch", 7);
      assert.deepEqual(await contentOf(resumed), await contentOf(whole));
      await Promise.all([session.release(), whole.release(), resumed.release()]);
    });

    it("starts the optimizer anew from a checkpoint without its state", async () => {
      const session = await open(entry, read);
      await train(session, feeds.slice(0, 4));
      const checkpoint = await session.saveCheckpoint();
      const { metadata, tensors } = readSafetensors(checkpoint);
      assert.equal(metadata.step, undefined);
      assert.deepEqual(
        [...tensors.keys()].filter((name) => /exp_avg/.test(name)),
        [],
      );
      const again = await open(entry, read, { checkpointState: checkpoint });
      assert.equal(again.step, 0);
      assert.equal(again.learningRate, 0.001);
      const evaluated = [await session.runEvalStep(feeds[2]), await again.runEvalStep(feeds[2])];
      assert.deepEqual(evaluated[1]?.loss?.data, evaluated[0]?.loss?.data);
      await again.runFusedStep(feeds[1]);
      assert.equal(again.step, 1);
      await Promise.all([session.release(), again.release()]);
    });

    it("gives its parameters as one tensor, and takes them again", async () => {
      const [session, other] = [await open(entry, read), await open(entry, read)];
      const [trained, all] = [54 + 6 + 960 + 10, 54 + 6 + 6 + 960 + 10];
      assert.equal(await session.getParametersSize(), trained);
      assert.equal(await session.getParametersSize(false), all);
      await train(session, feeds.slice(0, 4));
      for (const trainableOnly of [true, false]) {
        const flat = await session.getContiguousParameters(trainableOnly);
        assert.deepEqual(flat.dims, [trainableOnly ? trained : all]);
        const data = flat.data as Float32Array;
        const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
        await other.loadParametersBuffer(trainableOnly ? bytes : data, trainableOnly);
        const loaded = await other.getContiguousParameters(trainableOnly);
        assert.deepEqual(loaded.data, data);
      }
      const bias = (await session.getParameter("6.bias")).data;
      assert.deepEqual((await other.getParameter("6.bias")).data, bias);
      const short = new Float32Array(trained - 1);
      await assert.rejects(other.loadParametersBuffer(short), (error: Error) => {
        assert.ok(error instanceof InputError);
        assert.match(error.message, /has 4116 bytes, and the parameters 4120/);
        return true;
      });
      assert.deepEqual((await other.getParameter("6.bias")).data, bias);
      await Promise.all([session.release(), other.release()]);
    });

    it("gives copies of single parameters and buffers, and takes new values", async () => {
      const session = await open(entry, read);
      const bias = await session.getParameter("6.bias");
      (bias.data as Float32Array).fill(5);
      assert.ok(!((await session.getParameter("6.bias")).data as Float32Array).includes(5));
      await session.setParameter("6.bias", bias);
      (bias.data as Float32Array).fill(6);
      assert.ok(
        ((await session.getParameter("6.bias")).data as Float32Array).every((x) => x === 5),
      );
      const count = await session.getParameter("1.num_batches_tracked");
      assert.deepEqual(count.data, BigInt64Array.of(0n));
      const wrong = new Tensor("float32", new Float32Array(9), [9]);
      await assert.rejects(session.setParameter("6.bias", wrong), /it is float32 \[10\]/);
      await assert.rejects(session.setParameter("bias", wrong), /no parameter or buffer bias/);
      await assert.rejects(session.getParameter("6.bias.exp_avg"), InputError);
      await session.release();
    });

    it("trains a nominal checkpoint once it has all values", async () => {
      const whole = await open(entry, read);
      const session = await open(entry, read, {
        checkpointState: await read("nominal_checkpoint"),
      });
      const { metadata } = readSafetensors(await session.saveCheckpoint(true));
      assert.equal(metadata.nominal, "true");
      await assert.rejects(session.runTrainStep(feeds[0]), /no values of 0.weight.*nominal/s);
      await assert.rejects(session.getContiguousParameters(), StateError);
      await session.setParameter("6.bias", await whole.getParameter("6.bias"));
      await assert.rejects(session.runTrainStep(feeds[0]), /no values of 0.weight/);
      await assert.rejects(session.saveCheckpoint(), StateError);
      const flat = (await whole.getContiguousParameters(false)).data as Float32Array;
      await session.loadParametersBuffer(flat, false);
      assert.equal(
        lossOf(await session.runTrainStep(feeds[0])),
        lossOf(await whole.runTrainStep(feeds[0])),
      );
      await Promise.all([session.release(), whole.release()]);
    });

    it("runs calls in the order in which they were made", async () => {
      const [one, many] = [await open(entry, read), await open(entry, read)];
      const losses = await train(one, feeds.slice(0, 6));
      const pending: Promise<Values | undefined>[] = [];
      for (const [index, batch] of feeds.slice(0, 6).entries()) {
        pending.push(many.runTrainStep(batch));
        if (index % 2 === 0) {
          pending.push(many.runTrainStep({} as Feeds).catch(() => undefined));
          continue;
        }
        void many.runOptimizerStep();
        void many.lazyResetGrad();
      }
      const results = (await Promise.all(pending)).filter((values) => values !== undefined);
      assert.deepEqual(results.map(lossOf), losses);
      assert.deepEqual(await contentOf(many), await contentOf(one));
      await Promise.all([one.release(), many.release()]);
    });

    it("does nothing after its release", async () => {
      const session = await open(entry, read);
      await session.release();
      await assert.rejects(session.runTrainStep(feeds[0]), /has been released/);
      await assert.rejects(session.saveCheckpoint(), StateError);
    });

    it("says which model a call is without", async () => {
      const session = await entry.TrainingSession.create({
        checkpointState: await read("checkpoint"),
        trainStepModel: await read("train_step_model.onnx"),
      });
      assert.deepEqual(session.trainingInputNames, ["input", "labels"]);
      await session.runFusedStep(feeds[0]);
      await assert.rejects(session.runTrainStep(feeds[0]), /has no trainModel/);
      await assert.rejects(session.runEvalStep(feeds[0]), /has no evalModel/);
      await assert.rejects(session.runOptimizerStep(), /has no optimizerModel/);
      assert.throws(() => session.evalInputNames, StateError);
      await session.release();
    });
  });
}
