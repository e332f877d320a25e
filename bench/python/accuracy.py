"""Errors against float64, of Tilewise and of standard attention in the same type, by sequence length:
bench/results/accuracy.json, from which docs/numerics.md has its picture.

    TILEWISE_LIBRARY=build/src/libtilewise.so PYTHONPATH=python python bench/python/accuracy.py

Standard attention here is what a framework composes: scores rounded to the type, softmax in float32, probabilities rounded to
the type, product, result rounded. NumPy has no bfloat16, so rounding is done by hand on float32; the kernel gets the same
rounded inputs through ml_dtypes."""

import argparse
import datetime
import json
import pathlib

import ml_dtypes
import numpy as np
import tilewise

OUT = pathlib.Path(__file__).resolve().parent.parent / "results" / "accuracy.json"
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HEADS, D = 2, 64


def rounded(x, dtype):
  return x.astype(dtype).astype(np.float32)


def standard(q, k, v, dtype):
  out = np.empty(q.shape, np.float32)
  for h in range(q.shape[2]):
    s = rounded(rounded(q[0, :, h] @ k[0, :, h].T, dtype) * np.float32(D**-0.5), dtype)
    p = np.exp(s - s.max(1, keepdims=True))
    p = rounded(p / p.sum(1, keepdims=True), dtype)
    out[0, :, h] = rounded(p @ v[0, :, h], dtype)
  return out


def error(o, exact):
  """Relative to the result, in the Frobenius norm."""
  return float(np.linalg.norm(o.astype(np.float64) - exact) / np.linalg.norm(exact))


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  arguments = parser.parse_args()
  points = []
  for length in (64, 128, 256, 512, 1024, 2048, 4096):
    for inputs in ("gaussian", "peaked"):
      q, k, v = np.random.default_rng(length).standard_normal((3, 1, length, HEADS, D)).astype(np.float32)
      if inputs == "peaked":
        q *= 4  # logits of standard deviation 4: few keys carry a row
      for name, dtype in TYPES.items():
        a, b, c = (x.astype(dtype) for x in (q, k, v))
        exact = tilewise.attention(*(x.astype(np.float64) for x in (a, b, c)), backend="reference")
        o = tilewise.attention(a, b, c)
        problem = f"fwd {({'float32': 'f32', 'float16': 'f16', 'bfloat16': 'bf16'})[name]} hq={HEADS} sq={length} d={D}"
        points.append({"problem": problem, "inputs": inputs, "dtype": name, "sq": length, "kernel": tilewise.plan(problem).kernel,
                       "tilewise": error(o.astype(np.float32), exact),
                       "standard": error(standard(*(x.astype(np.float32) for x in (a, b, c)), dtype), exact)})
        print(points[-1])
  splits = []  # of the last Gaussian problem in float32: shorter sums
  q, k, v = np.random.default_rng(4096).standard_normal((3, 1, 4096, HEADS, D)).astype(np.float32)
  exact = tilewise.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="reference")
  for count in (1, 4, 16):
    splits.append({"problem": f"fwd f32 hq={HEADS} sq=4096 d={D} splits={count}",
                   "tilewise": error(tilewise.attention(q, k, v, num_splits=count), exact)})
    print(splits[-1])
  record = {"tool": "bench/python/accuracy.py", "version": tilewise.__version__, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "machine": tilewise.machine(), "points": points, "splits": splits}
  arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
  main()
