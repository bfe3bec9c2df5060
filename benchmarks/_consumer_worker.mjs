// Run a model in transformers.js: node _consumer_worker.mjs run transformers.js FOLDER MODEL OUTPUT
//
// The script stands in the folder where npm has installed the package. transformers.js chooses the
// file by dtype: onnx/model.onnx for "fp32", onnx/model_quantized.onnx for "q8". The outputs are
// written as JSON; the last line is JSON, as in _consumer_worker.py.
import { readFileSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { env, pipeline } from "@huggingface/transformers";

const [, , , , folder, model, output] = process.argv;
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
const dtype = basename(model) === "model_quantized.onnx" ? "q8" : "fp32";
const embed = await pipeline("feature-extraction", basename(folder), { dtype, device: "cpu" });
const sentences = readFileSync(join(folder, "sentences.txt"), "utf8").trim().split("\n");
const found = await embed(sentences, { pooling: "mean", normalize: true });
writeFileSync(output, JSON.stringify(found.tolist()));
console.log("\n" + JSON.stringify({ version: env.version, note: `dtype "${dtype}"` }));
