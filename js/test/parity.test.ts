import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { artifacts, ENTRIES } from "./files.js";
import { compare, compareGradients } from "./scenario.js";

for (const [runtime, entry] of Object.entries(ENTRIES)) {
  describe(`on ${runtime}`, () => {
    for (const model of ["cnn", "mlp"]) {
      it(`a hundred batches of ${model} train to the weights of Python`, async () => {
        const differences = await compare(entry, artifacts(model));
        console.log(runtime, model, differences);
        for (const [what, difference] of Object.entries(differences)) {
          assert.ok(difference <= 1e-5, `${what} differ by ${difference}`);
        }
      });
    }

    it("the gradients of one batch are those of Python", async () => {
      for (const difference of await compareGradients(entry, artifacts("cnn"))) {
        assert.ok(difference <= 1e-6, `they differ by ${difference}`);
      }
    });
  });
}
