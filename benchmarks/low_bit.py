"""Compare FP8 products in hardware (`torch._scaled_mm`) with the emulated products of O6.

For each format that `torch._scaled_mm` supports on this device, random layers of several sizes are multiplied. The
table has the share of the BF16 results that differ, and the largest difference relative to the largest result. A few
results differ in their last bit, because the hardware adds in another order, and on Hopper in fewer bits. The exit
status is non-zero if a difference exceeds `BOUND`.

    python benchmarks/low_bit.py [--device cuda] [--json PATH]
"""

from __future__ import annotations

import sys
from typing import Any

import timing
import torch
from torch import Tensor

from amp_patch.casts.formats import FORMATS, ROWS, quantized

SIZES = ((64, 128, 96), (512, 1024, 768), (1024, 8192, 512))  # M, K, N
BOUND = 2.0**-7  # largest accepted difference, as a part of the largest result: two roundings to BF16
WIDTHS = {"format": -16, "M x K x N": -16, "differ": 9, "at most": 9}


def operand(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return E4M3 numbers and their scale for `torch._scaled_mm`: one scale for all, or one for each row."""
    values, outer = quantized(x, ROWS, "activation", FORMATS[format])
    if outer is None:
        largest = x.abs().amax(1, keepdim=True).float() / FORMATS[format].element.largest
        outer = torch.exp2(torch.ceil(torch.log2(largest)))
        values = values / outer
    return values.to(torch.float8_e4m3fn), outer


def blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 numbers and E8M0 scales, one for each 32 numbers of a row, in the tiled order of `torch._scaled_mm`.

    A tile has 128 x 4 scales.
    """
    rows, columns = x.shape[0], x.shape[1] // 32
    largest = x.float().unflatten(1, (columns, 32)).abs().amax(2) / FORMATS["mxfp8"].element.largest
    exponent = torch.ceil(torch.log2(largest)).clamp(-126, 127)
    values = (x.float().unflatten(1, (columns, 32)) / torch.exp2(exponent)[:, :, None]).flatten(1)
    padded = torch.full((-(-rows // 128) * 128, -(-columns // 4) * 4), 127, dtype=torch.uint8, device=x.device)
    padded[:rows, :columns] = (exponent + 127).to(torch.uint8)
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # 4 x 32 rows, columns in fours
    return values.to(torch.float8_e4m3fn), tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def in_hardware(x: Tensor, weight: Tensor, format: str) -> Tensor:
    take = blocks if format == "mxfp8" else lambda x: operand(x, format)
    (a, a_scale), (b, b_scale) = take(x), take(weight)
    if format == "fp8":
        b_scale = b_scale.t().contiguous()
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


def main() -> None:
    parser = timing.parser(__doc__, repeats=1)
    options = parser.parse_args()
    print(timing.heading(options))
    print(timing.line(list(WIDTHS), WIDTHS))
    rows: list[dict[str, Any]] = []
    bad = []
    for format in ("fp8", "fp8_tensorwise", "mxfp8"):
        for m, k, n in SIZES:
            torch.manual_seed(0)
            x, weight = (torch.randn(rows, k, device=options.device).bfloat16() for rows in (m, n))
            emulated = torch.ops.amp_patch.low_bit_product(x, weight, None, format, "activation", "weight", False)
            row: dict[str, Any] = {"format": format, "M x K x N": f"{m} x {k} x {n}", "differ": None, "at most": None}
            try:
                found = in_hardware(x, weight, format)
            except (RuntimeError, ValueError, AttributeError) as error:
                print(f"{format}: torch._scaled_mm does not take it here: {str(error).splitlines()[0]}")
                row["refused"] = str(error).splitlines()[0]
                rows.append(row)
                break
            distance = ((found.double() - emulated.double()).abs().max() / emulated.double().abs().max()).item()
            row |= {"differ": (found != emulated).float().mean().item(), "at most": distance}
            print(
                timing.line([format, row["M x K x N"], f"{row['differ']:.4f}", f"{distance:.1e}"], WIDTHS), flush=True
            )
            bad += [f"{format} {row['M x K x N']}"] * (not distance <= BOUND)
            rows.append(row)
    timing.write_json(options, rows)
    if bad:
        sys.exit(f"low_bit.py: further than {BOUND} of the largest result from the emulation: {', '.join(bad)}")


if __name__ == "__main__":
    main()
