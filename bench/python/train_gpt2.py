"""Training end to end: a model of GPT-2's size whose attention is eager, torch's SDPA (cuDNN, FlashAttention 2) or Tilewise.

124 million parameters (12 layers, 12 heads of 64, 1,024 tokens of context), bfloat16 by autocast over float32 weights, AdamW; the
tokens are the bytes of this repository's own files, 256 of the vocabulary's rows. Every run starts from the same weights and sees
the same batches. Parts, each with a share of --seconds, the report written after each:

  steps     milliseconds of a step, runs in turns, plain and with activation checkpointing; peak memory above weights and optimizer.
            The batch is four times that of the curves, or a slow host's launches would be all that is measured
  curves    the loss of every step, eager, Tilewise, and two yardsticks that differ from eager by rounding alone: FlashAttention 2,
            and eager with its keys in reverse order. Equal: Tilewise's mean difference from eager is at most twice the larger
            yardstick's, or less than the loss itself is rounded by
  repeat    two runs with deterministic=True: the hash of all weights must be the same
  compiled  the steps again, every block through torch.compile

--tiny runs all but the last on a CPU in seconds, in float32, on a chapter of prose. --add keeps the other parts of the report that is there.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import statistics
import sys
import time
import traceback

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats bit for bit only with a workspace of fixed size

import torch
import torch.nn.functional as F
from common import machine, parser, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tilewise
import tilewise.torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SEED, WARM_UP_STEPS = 0, 30


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    context: int
    vocabulary: int
    batch: int
    timed_batch: int  # where steps are timed
    steps: int  # of a loss curve
    repeated: int  # steps of the deterministic runs
    learning_rate: float

    @property
    def width(self):
        return self.heads * self.head_dim


GPT2 = Size(layers=12, heads=12, head_dim=64, context=1024, vocabulary=50304, batch=8, timed_batch=32, steps=300, repeated=50, learning_rate=6e-4)
TINY = Size(layers=2, heads=2, head_dim=16, context=64, vocabulary=256, batch=4, timed_batch=4, steps=60, repeated=20, learning_rate=1e-3)


# ---- the text -----------------------------------------------------------------------------------------------


def text():
    """This repository's own words: sources, tests and documentation, in the order of their names."""
    kinds = {".md", ".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".def", ".py", ".in"}
    folders = ("bench", "docs", "examples", "include", "python", "src", "tests", "tools")
    files = sorted(p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in kinds)
    return b"".join(p.read_bytes() for p in files)


def prose():
    """For --tiny: the same whatever else changes, and tame. On sources, or at three times the learning rate, some runs of the
    float32 model multiply a difference in the last bit a thousandfold within 60 steps, those of the yardsticks too."""
    return (ROOT / "examples" / "data" / "moby_dick_chapter_1.txt").read_bytes()


def batches(data, size, steps, device, batch=None):
    """[steps, batch, context + 1] bytes; the same for every run."""
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    starts = torch.randint(len(tokens) - size.context, (steps, batch or size.batch, 1), generator=torch.Generator().manual_seed(SEED))
    return tokens[starts + torch.arange(size.context + 1)].to(device)


# ---- attention: q, k, v [batch, tokens, heads, head_dim], views of one product ---------------------------------


def eager(q, k, v):
    """softmax(q k^T / sqrt(d)) v with a matrix of tokens x tokens for every head; the softmax in float32."""
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu_(1)
    return standard(q, k, v, hidden)


def reversed_eager(q, k, v):
    """The same with the keys from last to first: other sums, the same function."""
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu_(1).flip(1)
    return standard(q, k.flip(1), v.flip(1), hidden)


def standard(q, k, v, hidden):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2)


def sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def tiled(q, k, v):
    return tilewise.torch.attention(q, k, v, causal=True)


def deterministic(q, k, v):
    return tilewise.torch.attention(q, k, v, causal=True, deterministic=True)


# name: function, and the backend that torch is held to
ATTENTION = {
    "eager": (eager, None),
    "eager, keys reversed": (reversed_eager, None),
    "SDPA cuDNN": (sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": (sdpa, SDPBackend.FLASH_ATTENTION),
    "Tilewise": (tiled, None),
    "Tilewise, deterministic": (deterministic, None),
}


# ---- the model ------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, size, attention):
        super().__init__()
        self.size, self.attention = size, attention
        self.norm1, self.norm2 = torch.nn.LayerNorm(size.width), torch.nn.LayerNorm(size.width)
        self.qkv, self.out = torch.nn.Linear(size.width, 3 * size.width), torch.nn.Linear(size.width, size.width)
        self.up, self.down = torch.nn.Linear(size.width, 4 * size.width), torch.nn.Linear(4 * size.width, size.width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.size.heads, self.size.head_dim)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(torch.nn.Module):
    def __init__(self, size, attention):
        super().__init__()
        self.tokens = torch.nn.Embedding(size.vocabulary, size.width)
        self.positions = torch.nn.Embedding(size.context, size.width)
        self.blocks = torch.nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = torch.nn.LayerNorm(size.width)
        for name, weight in self.named_parameters():  # GPT-2's start: sums of `2 layers` terms stay of one size
            if weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                torch.nn.init.normal_(weight, std=0.02 / (2 * size.layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(weight)

    def forward(self, ids, checkpointing):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Training:
    """A model, its optimizer, and how many steps it has done."""

    def __init__(self, name, size, device, compiled=False, checkpointing=False):
        self.name, self.size, self.device, self.compiled, self.checkpointing = name, size, device, compiled, checkpointing
        function, self.backend = ATTENTION[name]
        torch.manual_seed(SEED)
        with torch.device(device):
            self.model = Model(size, function)
        if compiled:  # a block at a time: one compilation serves all; each attention is a recompilation of the same code
            torch._dynamo.config.recompile_limit = 64
            for block in self.model.blocks:
                block.compile(fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.done = 0

    def step(self, batch):
        """-> the loss, on the device"""
        ids = batch.long()
        lower = torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()
        held = sdpa_kernel(self.backend) if self.backend is not None else contextlib.nullcontext()
        with held:  # the backward pass too: with checkpointing it runs the blocks again
            with lower:
                logits = self.model(ids[:, :-1], self.checkpointing)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.learning_rate * min(1.0, (self.done + 1) / WARM_UP_STEPS)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss.detach()

    def weights_hash(self):
        digest = hashlib.sha256()
        for weight in self.model.parameters():
            digest.update(weight.detach().cpu().numpy().tobytes())
        return digest.hexdigest()


# ---- the parts --------------------------------------------------------------------------------------------------


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def peak_of_step(run, batch):
    """Bytes above weights and optimizer state; None on a CPU."""
    if run.device != "cuda":
        run.step(batch)
        return None
    synchronize(run.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.step(batch)
    synchronize(run.device)
    return torch.cuda.max_memory_allocated() - before


def timed(runs, data, deadline, rounds):
    """Rows of {attention, .., median_ms}: the runs take turns, each round in the other direction."""
    peaks = {}
    for run in runs:
        run.step(data[0])  # libraries load, optimizer state appears
        peaks[run] = peak_of_step(run, data[1 % len(data)])
    times = {run: [] for run in runs}
    order = list(runs)
    for n in range(rounds):
        for run in order:
            synchronize(run.device)
            start = time.perf_counter()
            run.step(data[n % len(data)])
            synchronize(run.device)
            times[run].append(1e3 * (time.perf_counter() - start))
        order.reverse()
        if n >= 4 and time.perf_counter() > deadline:
            break
    return [
        {"attention": run.name, "compiled": run.compiled, "checkpointing": run.checkpointing, "median_ms": statistics.median(times[run]),
         "fastest_ms": min(times[run]), "batch": data.shape[1], "steps": len(times[run]), "peak_bytes": peaks[run]}
        for run in runs
    ]  # fmt: skip


def curve(name, size, device, data):
    run = Training(name, size, device)
    losses = [run.step(batch) for batch in data]
    return torch.stack(losses).double().tolist(), run


def difference(a, b):
    apart = [abs(x - y) for x, y in zip(a, b)]
    return {"largest": max(apart), "mean": statistics.mean(apart), "of_last_50": statistics.mean(x - y for x, y in list(zip(a, b))[-50:])}


class Report:
    def __init__(self, arguments, size, device, data):
        self.path, self.size, self.device = arguments.output, size, device
        self.text = data
        self.end = time.perf_counter() + arguments.seconds
        self.names = ["eager", "SDPA cuDNN", "SDPA flash", "Tilewise"]
        if device != "cuda":
            self.names.remove("SDPA cuDNN")
        self.record = {
            "machine": machine(), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "method": __doc__,
            "model": dataclasses.asdict(size), "dtype": "bfloat16 over float32 weights" if device == "cuda" else "float32",
            "text": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "seed": SEED, "steps": [], "curves": {}, "differences": {}, "repeat": {}, "seconds": {}, "errors": {},
        }  # fmt: skip
        if arguments.add and os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                before = json.load(file)
            self.record.update((key, before[key]) for key in before if key not in ("machine", "device", "method", "model", "errors"))

    def batches(self, steps, batch=None):
        return batches(self.text, self.size, steps, self.device, batch)

    def deadline(self, share):
        """`share` of what is left."""
        now = time.perf_counter()
        return now + share * max(self.end - now, 0)

    def part(self, name, function):
        start = time.perf_counter()
        try:
            function()
        except Exception:  # the other parts are worth having; the exit status tells
            self.record["errors"][name] = traceback.format_exc()
            print(traceback.format_exc(), file=sys.stderr)
        synchronize(self.device)
        self.record["seconds"][name] = time.perf_counter() - start
        write(self.path, self.record)
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def time_steps(self, compiled=False):
        rounds = 5 if self.device == "cpu" else 12
        data, deadline = self.batches(rounds, self.size.timed_batch), self.deadline(0.25)
        self.record["steps"] = [row for row in self.record["steps"] if row["compiled"] != compiled]
        for checkpointing in (False, True):
            runs = []
            for name in self.names if not compiled else [n for n in self.names if n != "eager"] + ["eager"]:
                if compiled and time.perf_counter() > self.end - 10 and runs:
                    continue  # no time for another compilation; what is missing is missing in the report
                run = Training(name, self.size, self.device, compiled, checkpointing)
                run.step(data[0])
                runs.append(run)
            for row in timed(runs, data, deadline, rounds):
                self.record["steps"].append(row)
                print("step %-12s %-8s %-13s median %8.2f ms, fastest %8.2f ms, peak %s" % (
                    row["attention"], "compiled" if compiled else "", "checkpointing" if checkpointing else "", row["median_ms"],
                    row["fastest_ms"], "-" if row["peak_bytes"] is None else "%.0f MiB" % (row["peak_bytes"] / 2**20)), flush=True)  # fmt: skip
            del runs
            if compiled and time.perf_counter() > self.end - 10:
                break

    def curves(self):
        self.record["curves"], self.record["differences"] = curves, _ = {}, {}
        data, slowest, deadline = self.batches(self.size.steps), 0, self.deadline(0.6)
        for name in ("Tilewise", "eager", "SDPA flash", "eager, keys reversed"):
            if len(curves) >= 3 and time.perf_counter() + slowest > deadline:
                continue  # one yardstick then, not two
            start = time.perf_counter()
            curves[name], _ = curve(name, self.size, self.device, data)
            slowest = max(slowest, time.perf_counter() - start)
            print("%-20s loss %.4f -> %.4f in %.1f s" % (name, curves[name][0], curves[name][-1], time.perf_counter() - start), flush=True)
        for name in curves:
            if name != "eager":
                self.record["differences"][name] = difference(curves[name], curves["eager"])
                print("%-20s from eager: largest %.2g, mean %.2g" % (
                    name, self.record["differences"][name]["largest"], self.record["differences"][name]["mean"]))  # fmt: skip
        yardstick = max(d["mean"] for name, d in self.record["differences"].items() if name != "Tilewise")
        rounding = 2**-24 * max(curves["eager"])
        self.record["equal"] = self.record["differences"]["Tilewise"]["mean"] <= max(2 * yardstick, rounding)
        self.record["falls"] = curves["Tilewise"][-1] < 0.75 * curves["Tilewise"][0]

    def repeat(self):
        """Torch's own kernels are held to fixed orders too."""
        was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            for name, steps in (("Tilewise, deterministic", self.size.repeated), ("Tilewise", min(self.size.repeated, 20))):
                data = self.batches(steps)
                hashes = [curve(name, self.size, self.device, data)[1].weights_hash() for _ in range(2)]
                self.record["repeat"][name] = {"steps": steps, "sha256": hashes, "identical": hashes[0] == hashes[1]}
                print("%s, twice %d steps: weights %s and %s" % (name, steps, hashes[0][:16], hashes[1][:16]), flush=True)
        finally:
            torch.use_deterministic_algorithms(was)

    def failures(self):
        found = ["%s: failed" % name for name in self.record["errors"]]
        if not self.record.get("equal", True):
            found.append("the loss of Tilewise is not that of eager attention")
        if not self.record.get("falls", True):
            found.append("the loss did not fall")
        if not self.record["repeat"].get("Tilewise, deterministic", {}).get("identical", True):
            found.append("two deterministic runs ended in different weights")
        return found


def main():
    p = parser(__doc__.split("\n")[0], "train_gpt2.json")
    p.add_argument("--tiny", action="store_true", help="a small model on the CPU, in seconds")
    p.add_argument("--seconds", type=float, default=300, help="for everything; parts that come late are shortened")
    p.add_argument("--add", action="store_true", help="to the report in --output, whose other parts stay")
    p.add_argument("--parts", default="", help="comma-separated: steps, curves, repeat, compiled (default: all; with --tiny, the first three)")
    arguments = p.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        p.error("no GPU that torch can use; --tiny runs on a CPU")
    if arguments.quick:
        p.error("--quick: --tiny is this program's smoke test")
    report = Report(arguments, TINY if arguments.tiny else GPT2, device, prose() if arguments.tiny else text())
    known = {"steps": report.time_steps, "curves": report.curves, "repeat": report.repeat, "compiled": lambda: report.time_steps(compiled=True)}
    names = arguments.parts.split(",") if arguments.parts else list(known)[: 3 if arguments.tiny else 4]
    if unknown := [name for name in names if name not in known]:
        p.error("--parts: %s: must be of %s" % (", ".join(unknown), ", ".join(known)))
    for name in names:
        report.part(name, known[name])
    failures = report.failures()
    print("\n".join(failures) if failures else "the loss of Tilewise is that of eager attention; deterministic runs repeat bit for bit"
          if "curves" in names and "repeat" in names else "done")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
