"""Draw docs/region.svg from real plans: `python docs/draw_region.py` writes it, `--check` compares it."""

import sys
from collections.abc import Iterator
from pathlib import Path

from kvlease.geometry import exact_div
from kvlease.plan import BackendInputs, CachePlan, LayerPlacement, PlanInputs
from kvlease.spec import FullAttention, SlidingWindow
from kvleased.planning import plan

PICTURE = Path(__file__).with_name("region.svg")
NUM_BLOCKS = 4
COLOURS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#cab2d6")
"""A colour for each block."""
STYLE = """<style>
text { font: 13px sans-serif }
.title { font-weight: bold }
.small { font-size: 10.5px }
.middle { text-anchor: middle }
</style>"""
WIDTH, LEFT, RIGHT, ROW, GAP = 1000, 120, 35, 54, 10
"""Pixels of the picture's width, its margins, a group's row and the gap between rows."""


def planned(layout: str) -> CachePlan:
    """Return the plan, in four blocks, of two layers that keep all tokens and two that keep a window."""
    reader = BackendInputs(name="reader", exact_tokens=(16,), multiples_tokens=())
    whole = BackendInputs(name="reader", multiples_tokens=(16,))
    fields = {"head_size": 64, "dtype": "float16", "backend": "reader"}
    full = [FullAttention(name=f"full.{i}", num_kv_heads=2, **fields) for i in range(2)]
    windows = [
        SlidingWindow(name=f"window.{i}", num_kv_heads=1, window_tokens=128, **fields)
        for i in range(2)
    ]
    return plan(
        PlanInputs(
            layers=(*full, *windows),
            tokens_per_block=32,
            layout=layout,
            device_blocks=NUM_BLOCKS,
            null_blocks=1,
            longest_request_tokens=1,
            backends=(whole if layout.startswith("B") else reader,),
        )
    )


def panel(found: CachePlan, top: int, title: str) -> Iterator[str]:
    """Yield the drawing of one region: a row for every group, all of the same bytes."""
    (rank,) = found.ranks
    scale = (WIDTH - LEFT - RIGHT) / rank.device_bytes
    bottom = top + 44 + len(found.groups) * (ROW + GAP)
    yield f'<text x="10" y="{top + 14}" class="title">{title}</text>'
    yield (
        f'<text x="10" y="{top + 32}">{rank.device_bytes:,} bytes = {found.num_blocks} blocks of '
        f"{rank.bytes_per_block:,} bytes; block 0 is never granted</text>"
    )
    for index, group in enumerate(found.groups):
        y = top + 44 + index * (ROW + GAP)
        yield f'<text x="10" y="{y + 17}">group {index}</text>'
        yield f'<text x="10" y="{y + 33}" class="small">{group.tokens_per_block} tokens a block</text>'
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{rank.device_bytes * scale:.1f}" height="{ROW}" '
            'fill="#eeeeee" stroke="#999999"/>'
        )
        for layer in rank.layers:
            if layer.group == index:
                yield from pages(found, layer, y, scale)
    for number in range(found.num_blocks * 2 + 1):
        offset = exact_div(rank.bytes_per_block, 2) * number
        x = LEFT + offset * scale
        yield f'<text x="{x:.1f}" y="{bottom + 8}" class="small middle">{offset:,}</text>'


def pages(found: CachePlan, layer: LayerPlacement, y: int, scale: float) -> Iterator[str]:
    """Yield the pages of one layer, each cut into its kernel blocks."""
    parts = found.groups[layer.group].kernel_blocks_per_block
    width = layer.bytes_per_page * scale
    for block in range(found.num_blocks):
        x = LEFT + (layer.offset_bytes + block * layer.block_stride_bytes) * scale
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" '
            f'fill="{COLOURS[block]}" stroke="#333333"/>'
        )
        for part in range(1, parts):
            cut = x + width * part / parts
            yield (
                f'<line x1="{cut:.1f}" y1="{y + 40}" x2="{cut:.1f}" y2="{y + ROW}" stroke="#333333" '
                'stroke-dasharray="3 2"/>'
            )
        middle = x + width / 2
        yield f'<text x="{middle:.1f}" y="{y + 18}" class="small middle">{layer.name}</text>'
        yield f'<text x="{middle:.1f}" y="{y + 34}" class="small middle">block {block}</text>'


def picture() -> str:
    """Return the whole picture."""
    outer = planned("BLHNC")
    inner = planned("LBNHC")
    second = 44 + len(outer.groups) * (ROW + GAP) + 40
    height = second + 44 + len(inner.groups) * (ROW + GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        STYLE,
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *panel(
            outer, 10, "BLHNC: blocks outermost; pages may differ, and what a group leaves is grey"
        ),
        *panel(
            inner,
            second,
            "LBNHC: layers outermost; pages are equal, and short lines cut them into kernel blocks",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write the picture, or compare it with `--check`."""
    if "--check" in sys.argv[1:]:
        return int(PICTURE.read_text() != picture())
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
