import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, describe, it } from "node:test";
import { readSafetensors } from "@ortrain/web/core";
import type { Page } from "playwright-core";
import { Served, skipReason } from "./browser.js";

const SEVEN: Point[] = [
  [70, 50],
  [180, 50],
  [110, 210],
];
const ZERO: Point[] = Array.from({ length: 25 }, (_, i) => {
  const angle = (2 * Math.PI * i) / 24;
  return [128 + 55 * Math.sin(angle), 128 - 80 * Math.cos(angle)];
});

type Point = [x: number, y: number];

/** Draws a line through points. */
async function draw(page: Page, points: Point[]): Promise<void> {
  await page.click("#clear");
  const box = await page.locator("#paper").boundingBox();
  assert.ok(box);
  for (const [i, [x, y]] of points.entries()) {
    await page.mouse.move(box.x + x, box.y + y, { steps: 3 });
    if (i === 0) await page.mouse.down();
  }
  await page.mouse.up();
}

describe("the page that learns digits", { skip: skipReason() }, () => {
  let served: Served;
  let page: Page;
  const text = async (id: string): Promise<string> => (await page.locator(id).textContent()) ?? "";
  const ready = (): Promise<unknown> => page.getByText("Ready.").waitFor();

  before(async () => {
    served = await Served.start(["--disable-gpu"]);
    page = await served.open("/examples/digits/");
    await ready();
  });
  after(() => served.stop());

  it("learns a drawing from its label", async () => {
    await draw(page, SEVEN);
    await page.click("#digit3");
    await ready();
    assert.equal(await text("#prediction"), "3");
    for (let click = 0; click < 3; click++) {
      await page.click("#digit7");
      await ready();
    }
    assert.equal(await text("#prediction"), "7");
    assert.equal(await text("#steps"), "32");
    assert.ok(Number(await text("#loss")) < 1);
  });

  it("learns the data set, and then knows a drawing that it has not seen", async () => {
    await page.reload();
    await ready();
    await page.click("#dataset");
    await ready();
    assert.ok(Number.parseFloat(await text("#accuracy")) > 90, await text("#accuracy"));
    await draw(page, ZERO);
    await page.locator("#prediction", { hasText: "0" }).waitFor({ timeout: 5000 });
  });

  it("saves a checkpoint", async () => {
    const downloading = page.waitForEvent("download");
    await page.click("#save");
    const content = await readFile(await (await downloading).path());
    assert.equal(readSafetensors(content).metadata.step, await text("#steps"));
  });

  it("asks no other server, and throws nothing", () => {
    assert.deepEqual(served.faults, []);
  });
});
