import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";
import { Served, skipReason } from "../browser.js";
import type * as inPage from "../in_page.js";

// An adapter in software: what it computes is tested, and nothing of its speed.
const SOFTWARE = [
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--enable-features=Vulkan",
];

describe("on WebGPU", { skip: skipReason() }, () => {
  let served: Served;
  before(async () => {
    served = await Served.start(SOFTWARE);
  });
  after(() => served.stop());

  it("the gradients of one batch are those of Python", async () => {
    const page = await served.open("/test/page.html");
    const differences = await page.evaluate(async () => {
      const here: typeof inPage = await import("/build/test/in_page.js" as string);
      return here.compareGradientsHere("webgpu", "mlp");
    });
    console.log("webgpu", differences);
    assert.ok(differences.length > 1);
    for (const difference of differences) {
      assert.ok(difference <= 1e-5, `they differ by ${difference}`);
    }
  });

  it("a hundred batches train along the losses of Python", async () => {
    const page = await served.open("/test/page.html");
    const differences = await page.evaluate(async () => {
      const here: typeof inPage = await import("/build/test/in_page.js" as string);
      return here.compareHere("webgpu", "mlp");
    });
    console.log("webgpu", differences);
    assert.ok(differences.losses <= 5e-3, `losses differ by ${differences.losses}`);
    assert.ok(differences.evalLoss <= 5e-3, `the loss differs by ${differences.evalLoss}`);
  });

  it("what training changes stays on the device, in no more memory", async () => {
    const page = await served.open("/test/page.html");
    const { buffers, read } = await page.evaluate(async () => {
      const here: typeof inPage = await import("/build/test/in_page.js" as string);
      return here.watchDevice("mlp");
    });
    console.log("webgpu", { buffers, read });
    const [before, after] = buffers;
    assert.ok(before > 0 && after <= before, `${before} buffers became ${after}`);
    // The weight of the first layer has 4096 bytes.
    assert.ok(read > 0 && read < 4096, `${read} bytes were read`);
  });
});
