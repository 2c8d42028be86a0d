"""A memory plan as text for people."""

from __future__ import annotations

from jaxinfer.planning import MemoryPlan


def plan_table(plan: MemoryPlan) -> str:
    """Return a few lines: what lies where, what it takes of one device, whether it fits."""
    chip, count = plan.topology.chip, plan.topology.count
    size = plan.tensor_parallel_size
    shared = f"{size} devices share each layer" if size > 1 else "each layer on one device"
    if plan.expert_parallel > 1:
        shared += f", {plan.expert_parallel} parts of the experts"
    if plan.replicas > 1:
        shared += f"; {plan.replicas} replicas"
    lines = [
        f"{plan.model} on {count} x {chip} ({_gib(plan.memory_bytes)} each), {plan.dtype}, "
        f"KV pages in {plan.kv_cache_dtype}",
        f"{plan.num_parameters / 1e9:,.1f} billion parameters; {shared}",
        "",
        "of each device:",
    ]
    rows = [(f"weights: {kind}", size) for kind, size in sorted(plan.weight_bytes.items())]
    rows.append(("weights in all", plan.total_weight_bytes))
    tokens = plan.num_pages * plan.page_size
    full = tokens // plan.max_model_len
    windows = plan.num_window_pages * plan.window_page_bytes
    rows.append(
        (
            f"KV pages: {tokens:,} tokens, {full:,} x {plan.max_model_len:,}",
            plan.cache_bytes - windows,
        )
    )
    if plan.windows:
        seen = ", ".join(map(str, plan.windows))
        held = plan.num_window_pages * plan.page_size
        rows.append((f"KV pages of windows ({seen}): {held:,} tokens", windows))
    kind = "compiled" if plan.temporaries.compiled else "ESTIMATE"
    rows += [
        (f"temporaries: {program} ({kind})", size)
        for program, size in plan.temporaries.by_program.items()
    ]
    rows.append(("left over" if plan.free_bytes >= 0 else "MISSING", abs(plan.free_bytes)))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {_gib(size):>10}" for name, size in rows]
    lines += ["", f"temporaries: {plan.temporaries.note}"]
    lines += [f"cost: {cost}" for cost in plan.costs]
    lines.append("it fits" if plan.fits else "it does NOT fit; what would:")
    lines += [f"  {remedy}" for remedy in plan.remedies]
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:,.2f} MiB"
