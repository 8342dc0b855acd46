import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { describe, it } from "node:test";
import { Served, skipReason } from "./browser.js";
import { ARTIFACTS, ROOT } from "./files.js";

describe("the example of the README", { skip: skipReason() }, () => {
  it("trains in a browser as it stands", async () => {
    const readme = await readFile(`${ROOT}README.md`, "utf8");
    const [, body = ""] = /```html\n(.*?)```/s.exec(readme) ?? [];
    const served = await Served.start(["--disable-gpu"]);
    try {
      const page = await served.open("/test/page.html");
      await page.route("**/example.html", (route) =>
        route.fulfill({ body, contentType: "text/html" }),
      );
      await page.route("**/artifacts/*", (route) => {
        const file = new URL(route.request().url()).pathname.replace("/artifacts", "");
        return route.fulfill({ path: `${ARTIFACTS}/mlp${file}` });
      });
      await page.route("**/node_modules/@ortrain/web/**", (route) => {
        const { pathname } = new URL(route.request().url());
        const path = `${ROOT}${pathname.replace("/node_modules/@ortrain/web/", "")}`;
        return route.fulfill({ path, contentType: "text/javascript" });
      });
      await page.goto(`${served.url}/example.html`);
      await page.waitForFunction(() => document.body.innerText.split("\n").length > 49);
      const log = await page.locator("#log").textContent();
      const losses = (log ?? "").trim().split("\n").map(Number);
      assert.equal(losses.length, 50);
      assert.ok(Number(losses.at(-1)) < Number(losses[0]) / 1.5, log ?? "");
      assert.deepEqual(
        served.faults.filter((fault) => !/favicon|404/.test(fault)),
        [],
      );
    } finally {
      await served.stop();
    }
  });
});
