"""A Llama-shaped model of transformers, forward and backward at s = 4096: peak memory and time with eager, sdpa, tilewise.

Each implementation runs in a process of its own, so that the peak (VmHWM) is its own; the peak before the step (weights,
the first small step) is subtracted. Time is the median of the timed steps.
"""

import json
import statistics
import subprocess
import sys
import time

from common import machine, parser, write

SHAPE = dict(vocab_size=1024, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, max_position_embeddings=8192)  # fmt: skip


def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def one(implementation, s, steps):
    import torch
    import transformers

    import tilewise.integrations.transformers

    tilewise.integrations.transformers.enable()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, s))

    def step(ids):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    step(ids[:, :64])  # gradients exist now
    model.zero_grad(set_to_none=False)
    before = memory("VmRSS")
    times, loss = [], 0.0
    for _ in range(steps):
        start = time.perf_counter()
        loss = step(ids)
        times.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=False)
    print(json.dumps({"implementation": implementation, "seconds": statistics.median(times), "steps": steps, "loss": loss,
                      "peak_bytes_above_model": memory("VmHWM") - before, "peak_bytes": memory("VmHWM")}))  # fmt: skip


def main():
    p = parser(__doc__.split("\n")[0], "python_llama_memory.json")
    p.add_argument("--only", help="run one implementation in this process")
    p.add_argument("--s", type=int, default=4096)
    p.add_argument("--steps", type=int, default=3)
    arguments = p.parse_args()
    if arguments.quick:
        arguments.s, arguments.steps = 256, 1
    if arguments.only:
        return one(arguments.only, arguments.s, arguments.steps)
    report = {"machine": machine(), "method": __doc__, "model": SHAPE, "dtype": "float32", "s": arguments.s, "rows": []}
    for implementation in ("eager", "sdpa", "tilewise"):
        command = [sys.executable, __file__, "--only", implementation, "--s", str(arguments.s), "--steps", str(arguments.steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        row = json.loads(done.stdout.strip().split("\n")[-1])
        report["rows"].append(row)
        print("%-9s %.2f s, peak %.2f GiB above the model, loss %.6f" % (
            implementation, row["seconds"], row["peak_bytes_above_model"] / 2**30, row["loss"]), flush=True)  # fmt: skip
    report["load_average_after"] = machine()["load_average"]
    if not arguments.quick:
        write(arguments.output, report)


if __name__ == "__main__":
    main()
