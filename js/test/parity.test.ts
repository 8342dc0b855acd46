import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { artifacts, ENTRIES } from "./files.js";
import { batches, compare, compareGradients, open } from "./scenario.js";

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

    it("a label that is no class is an error, and -100 is ignored", async () => {
      const session = await open(entry, artifacts("mlp"));
      const [batch] = await batches(entry, artifacts("mlp"));
      const labelled = (label: bigint) => ({
        ...batch,
        labels: new entry.ort.Tensor("int64", new BigInt64Array(8).fill(label, 4), [8]),
      });
      const { loss } = await session.runTrainStep(labelled(-100n), ["loss"]);
      assert.ok((loss?.data[0] as number) > 0);
      for (const label of [-1n, 10n]) {
        await assert.rejects(session.runTrainStep(labelled(label), ["loss"]));
      }
    });
  });
}
