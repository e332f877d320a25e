"""A Llama-shaped model of transformers, forward and backward at s = 4096: peak memory and time with eager, sdpa, tilewise.

The implementations take turns over several rounds, in alternating order. Every turn is a process of its own: its peak
(VmHWM) is its own, and what one leaves in the allocator is not the next one's. The peak is taken above the process as it is
with the weights, their gradients and one small step done. `seconds` is the fastest step of all turns, `median_seconds` the
median of the turns' fastest steps, `peak_bytes_above_model` the largest of the turns.
"""

import json
import os
import statistics
import subprocess
import sys
import time

from common import machine, parser, write

SHAPE = dict(vocab_size=1024, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=2, max_position_embeddings=8192)  # fmt: skip
IMPLEMENTATIONS = ("eager", "sdpa", "tilewise")


def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def turn(implementation, s, steps):
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
    print(json.dumps({"seconds": times, "loss": loss, "peak_bytes_above_model": memory("VmHWM") - before,
                      "peak_bytes": memory("VmHWM"), "load_average": os.getloadavg()[0]}))  # fmt: skip


def row(implementation, turns):
    fastest = [min(t["seconds"]) for t in turns]
    return {
        "implementation": implementation, "seconds": min(fastest), "median_seconds": statistics.median(fastest),
        "peak_bytes_above_model": max(t["peak_bytes_above_model"] for t in turns),
        "peak_bytes": max(t["peak_bytes"] for t in turns), "loss": turns[0]["loss"], "turns": turns,
    }  # fmt: skip


def main():
    p = parser(__doc__.split("\n")[0], "python_llama_memory.json")
    p.add_argument("--only", choices=IMPLEMENTATIONS, help="one turn of this implementation, in this process")
    p.add_argument("--s", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    arguments = p.parse_args()
    if arguments.quick:
        arguments.s, arguments.rounds, arguments.steps = 256, 1, 1
    if arguments.only:
        return turn(arguments.only, arguments.s, arguments.steps)
    report = {"machine": machine(), "method": __doc__, "model": SHAPE, "dtype": "float32", "s": arguments.s,
              "rounds": arguments.rounds, "steps": arguments.steps}  # fmt: skip
    turns = {name: [] for name in IMPLEMENTATIONS}
    for n in range(arguments.rounds):
        for name in IMPLEMENTATIONS if n % 2 == 0 else reversed(IMPLEMENTATIONS):
            command = [sys.executable, __file__, "--only", name, "--s", str(arguments.s), "--steps", str(arguments.steps)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            got = json.loads(done.stdout.strip().split("\n")[-1])
            turns[name].append(got)
            print("round %d %-9s %s s, peak %.2f GiB above the model, load %.1f" % (
                n + 1, name, ", ".join("%.2f" % x for x in got["seconds"]), got["peak_bytes_above_model"] / 2**30,
                got["load_average"]), flush=True)  # fmt: skip
    report["rows"] = [row(name, turns[name]) for name in IMPLEMENTATIONS]
    report["load_average_after"] = machine()["load_average"]
    for r in report["rows"]:
        print("%-9s %.2f s (median %.2f), peak %.2f GiB above the model, loss %.6f" % (
            r["implementation"], r["seconds"], r["median_seconds"], r["peak_bytes_above_model"] / 2**30, r["loss"]))  # fmt: skip
    if not arguments.quick:
        write(arguments.output, report)


if __name__ == "__main__":
    main()
