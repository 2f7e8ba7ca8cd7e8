"""Compiled steps whose linear layers multiply 8-bit codes, beside plain torch.compile: step time and peak memory.

    python benchmarks/bench_products.py                                 # one GPU with FP8: all networks and ways
    python benchmarks/bench_products.py --only llama-1b:compiled,llama-1b:fp8
    python benchmarks/bench_products.py --sizes                         # single layers: from which sizes on products gain
    python benchmarks/bench_products.py --losses                        # trainings of a small language model, in pairs
    python benchmarks/bench_products.py --quick                         # a toy on the CPU: whether it runs, no figures

Weights and optimizer state are bfloat16, the optimizer is fused AdamW. Ways: compiled (plain torch.compile, the baseline), int8
(`activations8`, products unmodified), products (FP8 products, nothing packed), fp8, int8_products, joins with a tier of the optimizer
(fp8+half), and torchao's float8 training with scales by row or by tensor (torchao, torchao-tensor), if it is installed. Every row is a
process of its own. All compile at the same time; when the last one has, they take their times one after the other, and their median is
over --steps steps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing as mp
import os
import queue as queues
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine
from torch import Tensor, nn
from torch.nn import functional

import paredown as pare
from paredown.plan.plan import combine_presets
from paredown.tables import Table

GIB = 2**30
FILE = "products.json"


# --- networks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A transformer: `kind` is text (causal, gated, a head of `outputs` tokens), vision (bidirectional, GELU) or diffusion (adaLN too)."""

    name: str
    kind: str
    width: int
    hidden: int
    num_layers: int
    num_heads: int
    batch: int
    length: int
    outputs: int
    ways: tuple[str, ...]


ALL = ("compiled", "int8", "fp8", "int8_products")
TORCHAO = {"torchao": "rowwise", "torchao-tensor": "tensorwise"}  # way -> recipe
CASES = {
    case.name: case
    for case in (
        Case("llama-1b", "text", 2048, 5632, 16, 16, 4, 2048, 32000, (*ALL, "products", "fp8+half", *TORCHAO)),
        Case("llama-8b-4-layers", "text", 4096, 14336, 4, 32, 4, 2048, 32000, (*ALL, "products", *TORCHAO)),
        Case("vit-l", "vision", 1024, 4096, 24, 16, 64, 197, 1000, ALL),
        Case("dit-xl", "diffusion", 1152, 4608, 28, 16, 32, 256, 32, ALL),
        Case("toy", "text", 64, 128, 2, 4, 2, 64, 512, ("compiled", "fp8")),
    )
}


class Block(nn.Module):
    """Attention and an MLP with residual sums; `kind`: see Case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, self.case = case.width, case
        is_text = case.kind == "text"
        make_norm: Callable[..., nn.Module] = nn.RMSNorm if is_text else nn.LayerNorm
        self.norm1, self.norm2 = (make_norm(width, elementwise_affine=case.kind != "diffusion") for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=not is_text) for _ in range(4))
        self.up, self.down = nn.Linear(width, case.hidden, bias=not is_text), nn.Linear(case.hidden, width, bias=not is_text)
        self.gate = nn.Linear(width, case.hidden, bias=False) if is_text else None
        self.modulation = nn.Linear(width, 6 * width) if case.kind == "diffusion" else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """The hidden states after this block."""
        batch, length, width = x.shape
        parts = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, -1) if self.modulation is not None else None
        y = _modulated(self.norm1(x), parts, 0)
        heads = (batch, length, self.case.num_heads, width // self.case.num_heads)
        q, k, v = (layer(y).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.case.kind == "text")
        x = x + _gated(self.out(found.transpose(1, 2).reshape(batch, length, width)), parts, 2)
        y = _modulated(self.norm2(x), parts, 3)
        hidden = functional.silu(self.gate(y)) * self.up(y) if self.gate is not None else functional.gelu(self.up(y))
        return x + _gated(self.down(hidden), parts, 5)


def _modulated(x: Tensor, parts: tuple[Tensor, ...] | None, first: int) -> Tensor:
    return x if parts is None else x * (1 + parts[first]) + parts[first + 1]


def _gated(x: Tensor, parts: tuple[Tensor, ...] | None, index: int) -> Tensor:
    return x if parts is None else x * parts[index]


class Network(nn.Module):
    """Blocks between an embedding (of tokens, or of patches by a linear layer) and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, width = case, case.width
        self.embedding = nn.Embedding(case.outputs, width) if case.kind == "text" else nn.Linear(768, width)
        self.place = nn.Parameter(torch.zeros(1, case.length, width))
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.num_layers))
        self.norm = nn.RMSNorm(width) if case.kind == "text" else nn.LayerNorm(width)
        self.head = nn.Linear(width, case.outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of all tokens, or those of the picture (vision), or a value for each patch (diffusion)."""
        x = self.embedding(x) + self.place
        condition = x.mean(1)
        for block in self.blocks:
            x = block(x, condition)
        x = self.norm(x)
        return self.head(x.mean(1) if self.case.kind == "vision" else x).flatten(0, -2)


def build(case: Case, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """The network with normal weights of standard deviation 0.02."""
    torch.manual_seed(seed)
    with torch.device(device):
        net = Network(case).to(dtype)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.02)
    return net


def batch_of(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets: random tokens that are their own targets, patches and classes, or patches and noise."""
    if case.kind == "text":
        x = torch.randint(case.outputs, (case.batch, case.length), device=device)
        return x, x.flatten()
    x = torch.randn(case.batch, case.length, 768, device=device, dtype=dtype)
    rows = case.batch if case.kind == "vision" else case.batch * case.length
    is_vision = case.kind == "vision"
    return x, torch.randint(case.outputs, (rows,), device=device) if is_vision else torch.randn(rows, case.outputs, device=device)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with classes, mean squared error with values."""
    is_classes = target.dtype == torch.long
    return functional.cross_entropy(output.float(), target) if is_classes else functional.mse_loss(output.float(), target)


def plan_of(way: str) -> pare.Plan | None:
    """The plan of a way; None for plain torch.compile."""
    names = {"int8": "activations8"}
    if way == "products":
        return pare.Plan.uniform(product="e4m3fn")
    if way == "compiled" or way in TORCHAO:
        return None
    return combine_presets([names.get(part, part) for part in way.split("+")])


# --- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One way of one network; None: not measured."""

    case: str
    way: str
    median_seconds: float | None = None
    p20_seconds: float | None = None
    p80_seconds: float | None = None
    peak_bytes: int | None = None
    compile_seconds: float | None = None
    losses: tuple[float, ...] = ()
    num_multiplied: int | None = None
    error: str | None = None


def make_step(case: Case, way: str, device: str) -> tuple[Callable[[], Tensor], Any]:
    """A step, and the session or None."""
    dtype = torch.bfloat16
    net, (x, target) = build(case, device, dtype), batch_of(case, device, dtype)
    plan = plan_of(way)
    if way in TORCHAO:
        convert(net, TORCHAO[way])
    session = pare.apply(plan, net) if plan is not None else None
    model = session.compile() if session is not None else torch.compile(net)
    if "+" in way:
        optimizer: torch.optim.Optimizer = pare.optim.AdamW(net.parameters(), lr=3e-4)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)

    def step() -> Tensor:
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, session


def convert(net: nn.Module, recipe: str) -> None:
    """Let the linear layers of the blocks multiply in torchao's float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda _, path: path.startswith("blocks."))


def seconds_of(step: Callable[[], Tensor], device: str, num_steps: int) -> list[float]:
    """Seconds of each step."""
    found: list[float] = []
    for _ in range(num_steps):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            step()
            found.append(time.perf_counter() - begun)
    return found


def measure(case: Case, way: str, device: str, options: argparse.Namespace, tools: tuple[Any, Any, list[bool]]) -> Row:
    """The row of one process; `tools`: barrier, lock, and a list that is empty until all have compiled."""
    barrier, lock, passed = tools
    step, session = make_step(case, way, device)
    begun = time.perf_counter()
    losses = [float(step()) for _ in range(4)]
    compile_seconds = time.perf_counter() - begun
    if device == "cuda":
        torch.cuda.empty_cache()
    barrier.wait(options.limit)
    passed.append(True)
    with lock:
        losses += [float(step()) for _ in range(3)]
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(step, device, options.steps)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        losses.append(float(step()))
        if options.profile and device == "cuda" and f"{case.name}:{way}" in options.profile.split(","):
            profile(step, f"{case.name}:{way}")
    p20, _, _, p80 = statistics.quantiles(seconds, n=5)
    multiplied = (
        None if session is None else sum(row.slot.startswith("product=") for row in session.explain() if row.now == row.asked)
    )
    return Row(case.name, way, statistics.median(seconds), p20, p80, peak, compile_seconds, tuple(losses), multiplied)


def profile(step: Callable[[], Tensor], name: str) -> None:
    """Print the kernels of a step by their time."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = [row for row in found.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    path = os.environ.get("OUT")
    text = "\n".join(f"{row.self_device_time_total / 1e3:9.3f} ms {row.count:5d} x {row.key[:150]}" for row in rows)
    if path is not None:
        with (Path(path) / "profiles.txt").open("a") as file:
            file.write(f"== {name}\n{text}\n")


def run(case: Case, way: str, device: str, options: argparse.Namespace, tools: tuple[Any, Any, Any]) -> None:
    """The process of one row."""
    (queue, barrier, lock), passed = tools, list[bool]()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    try:
        row = measure(case, way, device, options, (barrier, lock, passed))
    except Exception as error:
        traceback.print_exc()
        row = Row(case.name, way, error=f"{type(error).__name__}: {error}"[:400])
    queue.put(asdict(row))
    if row.error and not passed:
        barrier.wait(options.limit)  # the others wait for all


def run_all(jobs: list[tuple[Case, str]], device: str, options: argparse.Namespace) -> list[Row]:
    """The rows of all jobs, each in a process."""
    context = mp.get_context("spawn")
    barrier, lock, queue = context.Barrier(len(jobs)), context.Lock(), context.Queue()
    processes = [context.Process(target=run, args=(*job, device, options, (queue, barrier, lock))) for job in jobs]
    for process in processes:
        process.start()
    rows: list[Row] = []
    end = time.monotonic() + options.limit
    while len(rows) < len(jobs) and time.monotonic() < end:
        try:
            rows.append(Row(**queue.get(timeout=5)))
            print(json.dumps(asdict(rows[-1])), flush=True)
        except queues.Empty:
            if not any(process.is_alive() for process in processes):
                break
    for process in processes:
        process.kill()
    return rows


def table(rows: list[Row]) -> Table:
    """Times and peaks beside those of plain torch.compile."""
    plain = {row.case: row for row in rows if row.way == "compiled" and row.median_seconds}
    cells: list[tuple[str, ...]] = []
    for row in sorted(rows, key=lambda row: (list(CASES).index(row.case), row.way != "compiled")):
        base = plain.get(row.case)
        if row.median_seconds is None or base is None or base.median_seconds is None:
            cells.append((row.case, row.way, row.error or "", "", "", "", ""))
            continue
        peak = f"{row.peak_bytes / GIB:.2f}" if row.peak_bytes else "-"
        share = f"{row.peak_bytes / base.peak_bytes:.2f}x" if row.peak_bytes and base.peak_bytes else "-"
        time_share = f"{row.median_seconds / base.median_seconds:.3f}x"
        loss = f"{row.losses[-1]:.4f}" if row.losses else ""
        cells.append((row.case, row.way, f"{1e3 * row.median_seconds:.2f}", time_share, peak, share, loss))
    return Table(("network", "way", "ms", "of compiled", "peak GiB", "of compiled", "loss"), cells)


def write(rows: list[dict[str, Any]], device: str, kind: str) -> None:
    """Append a run to benchmarks/results."""
    path = Path(os.environ.get("OUT", RESULTS)) / FILE
    runs = json.loads(path.read_text()) if path.exists() else []
    runs.append({**machine(device, ("torch", "triton")), "kind": kind, "rows": rows})
    path.write_text(json.dumps(runs, indent=1) + "\n")


# --- sizes -----------------------------------------------------------------------------------------------------------


def layer_seconds(device: str, rows: int, width: int, outputs: int, element: str | None, lock: Any) -> float:
    """Median seconds of forward and backward of a compiled norm, linear layer and GELU."""
    net = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, outputs, bias=False), nn.GELU()).to(device, torch.bfloat16)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)
    session = pare.apply(pare.Plan().set("product=1", element), net) if element else None
    model = session.compile(dynamic=False) if session is not None else torch.compile(net, dynamic=False)

    def step() -> Tensor:
        model(x).backward(grad)
        x.grad = None
        net.zero_grad(set_to_none=True)
        return grad

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()  # without the time of the host
    with torch.cuda.graph(graph):
        for _ in range(10):
            model(x).backward(grad)
            x.grad = None
            net.zero_grad(set_to_none=True)
    with lock:
        seconds = seconds_of(lambda: (graph.replay(), grad)[1], device, 15)
    return statistics.median(seconds) / 10


SIZES = (  # rows, inputs, outputs
    *((8192, width, width) for width in (512, 768, 1024, 1536, 2048, 4096)),
    *((8192, 1024, 4096), (8192, 4096, 1024), (8192, 512, 2048), (8192, 2048, 512)),
    *((rows, width, width) for rows in (512, 1024, 2048) for width in (2048, 4096)),
)


def sizes_worker(sizes: list[tuple[int, int, int]], device: str, queue: Any, lock: Any) -> None:
    """Rows of single layers."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for size in sizes:
        row: dict[str, Any] = {"rows": size[0], "inputs": size[1], "outputs": size[2]}
        for element in (None, "e4m3fn", "int8"):
            try:
                torch.compiler.reset()
                row[element or "bf16"] = layer_seconds(device, *size, element, lock)
            except Exception as error:
                row[f"{element} error"] = f"{type(error).__name__}: {error}"[:200]
        queue.put(row)


def run_sizes(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all sizes, by a few processes that compile at the same time and are timed one after the other."""
    context = mp.get_context("spawn")
    queue, lock = context.Queue(), context.Lock()
    parts = [SIZES[i :: options.jobs] for i in range(options.jobs)]
    processes = [context.Process(target=sizes_worker, args=(part, device, queue, lock)) for part in parts]
    for process in processes:
        process.start()
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + options.limit
    while len(rows) < len(SIZES) and time.monotonic() < end:
        try:
            rows.append(queue.get(timeout=5))
            print(json.dumps(rows[-1]), flush=True)
        except queues.Empty:
            continue
    for process in processes:
        process.kill()
    return rows


# --- losses ----------------------------------------------------------------------------------------------------------

LOSS_CASE = Case("small", "text", 512, 1536, 8, 8, 16, 512, 256, ("compiled", "fp8", "int8_products"))


def text_bytes(folder: Path) -> Tensor:
    """The bytes of a corpus, State of the Union addresses."""
    return torch.frombuffer(bytearray(gzip.decompress((folder / "text" / "sotu_en.txt.gz").read_bytes())), dtype=torch.uint8)


def forced(plan: pare.Plan, net: nn.Module) -> pare.Plan:
    """The plan with rules that name every layer of the blocks, which are narrower than those that gain."""
    elements = [element for _, element in plan.products]
    for path, part in net.named_modules():
        if elements and isinstance(part, nn.Linear) and path.startswith("blocks."):
            plan = plan.set(f"product={path}", elements[0])
    return plan


def losses_worker(way: str, device: str, options: argparse.Namespace, queue: Any) -> None:
    """Losses of trainings from several seeds: the mean of the last 50 training losses, and that of held-out text."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    case, corpus = LOSS_CASE, text_bytes(options.data)
    held_out = corpus[-len(corpus) // 20 :]
    net = build(case, device, torch.float32)
    plan = plan_of(way)
    session = pare.apply(forced(plan, net), net) if plan is not None else None
    model = session.compile() if session is not None else torch.compile(net)

    def batch(source: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - case.length - 1, (case.batch,), generator=generator)
        rows = torch.stack([source[i : i + case.length + 1] for i in starts]).long().to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].flatten()

    def loss(source: Tensor, generator: torch.Generator) -> Tensor:
        x, target = batch(source, generator)
        with torch.autocast(device, torch.bfloat16):
            return loss_of(model(x), target)

    loss(corpus, torch.Generator().manual_seed(0)).backward()
    net.zero_grad(set_to_none=True)
    while options.after and not Path(options.after).exists():
        time.sleep(0.2)
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        for parameter in net.parameters():
            nn.init.normal_(parameter.data, 0, 0.02) if parameter.dim() == 2 else parameter.data.fill_(parameter.dim() == 1)
        optimizer, generator = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True), torch.Generator().manual_seed(seed)
        found: list[Tensor] = []
        for step in range(options.train_steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min((step + 1) / 50, 1.0, 2 * (1 - step / options.train_steps))
            value = loss(corpus[: -len(held_out)], generator)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(value.detach())
        checks = [loss(held_out, torch.Generator().manual_seed(i)).detach() for i in range(8)]  # by the graphs of training
        last, held = float(torch.stack(found[-50:]).mean()), float(torch.stack(checks).mean())
        queue.put({"way": way, "seed": seed, "steps": options.train_steps, "training_loss": last, "held_out_loss": held})


def run_losses(device: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of trainings, a process for each way."""
    context = mp.get_context("spawn")
    queue, ways = context.Queue(), options.only.split(",") if options.only else LOSS_CASE.ways
    processes = [context.Process(target=losses_worker, args=(way, device, options, queue)) for way in ways]
    for process in processes:
        process.start()
    rows = [queue.get(timeout=options.limit) for _ in range(len(ways) * options.seeds)]
    for row in rows:
        print(json.dumps(row), flush=True)
    for process in processes:
        process.join(10)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="network:way by commas; a network alone is all of its ways")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=600, help="seconds for all rows")
    parser.add_argument("--jobs", type=int, default=6, help="processes of --sizes")
    parser.add_argument("--profile", help="network:way by commas, whose kernels are listed")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("PAREDOWN_DATA", "data")), help="folder of text/sotu_en.txt.gz"
    )
    parser.add_argument("--after", help="a file: trainings begin when it exists")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    if options.sizes:
        write(run_sizes(device, options), device, "sizes")
        return
    if options.losses:
        write(run_losses(device, options), device, "losses")
        return
    only = "toy" if options.quick else options.only or ",".join(name for name in CASES if name != "toy")
    jobs: list[tuple[Case, str]] = []
    for text in only.split(","):
        name, _, way = text.partition(":")
        jobs += [(CASES[name], each) for each in ([way] if way else CASES[name].ways)]
    rows = run_all(jobs, device, options)
    print(table(rows))
    if not options.quick:
        write([asdict(row) for row in rows], device, "steps")


if __name__ == "__main__":
    main()
