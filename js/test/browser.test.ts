import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";
import { Served, skipReason } from "./browser.js";
import type * as inPage from "./in_page.js";

describe("in a browser", { skip: skipReason() }, () => {
  let served: Served;
  before(async () => {
    served = await Served.start(["--disable-gpu"]);
  });
  after(() => served.stop());

  it("a hundred batches train to the weights of Python", async () => {
    const page = await served.open("/test/page.html");
    const differences = await page.evaluate(async () => {
      const { compareHere }: typeof inPage = await import("/build/test/in_page.js" as string);
      return compareHere("web", "cnn");
    });
    console.log("browser", differences);
    for (const [what, difference] of Object.entries(differences)) {
      assert.ok(difference <= 1e-5, `${what} differ by ${difference}`);
    }
    assert.deepEqual(served.faults, []);
  });
});
