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
      const { compareGradientsHere }: typeof inPage = await import(
        "/build/test/in_page.js" as string
      );
      return compareGradientsHere("webgpu", "mlp");
    });
    console.log("webgpu", differences);
    assert.ok(differences.length > 1);
    for (const difference of differences) {
      assert.ok(difference <= 1e-5, `they differ by ${difference}`);
    }
  });
});
