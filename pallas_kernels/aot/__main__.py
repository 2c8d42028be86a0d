"""`python -m pallas_kernels.aot`: compile kernels for GPUs that are not there, print the table."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from pallas_kernels.aot.case import cases_of
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.aot.driver import TIMEOUT_S, Job, compile_cases
from pallas_kernels.aot.table import markdown, write_page
from pallas_kernels.aot.toolchain import Toolchain


def main() -> int:
    """Compile what the arguments select; the exit code is 1 if something spills or fails."""
    args = _arguments()
    toolchain = Toolchain.of_environment()
    if args.what == ["install"]:
        toolchain.install()
        return 0
    cases = cases_of(args.cases)
    chosen = [
        case
        for case in cases.values()
        if all(word in case.name for word in args.what) and (args.all or args.what or case.default)
    ]
    if not chosen:
        sys.exit(f"no case holds {' and '.join(args.what)!r}; there are: {', '.join(cases)}")
    jobs = [
        Job(args.cases, case.name, chip)
        for case in chosen
        for chip in case.chips
        if chip in (args.chip or CHIPS)
    ]
    start = time.monotonic()
    reports = compile_cases(jobs, toolchain, timeout_s=args.timeout, processes=args.processes)
    table = markdown(reports, cases)
    if args.write:
        write_page(args.write, table)
    else:
        sys.stdout.write(table + "\n")
    sys.stderr.write(f"{len(jobs)} programs in {time.monotonic() - start:.0f} s\n")
    for report in reports if args.verbose else ():
        sys.stderr.write(f"{report.to_json()}\n")
    good = (
        report.refused
        or (report.ok and not any(k.spill_bytes for k in report.named(cases[report.case].kernels)))
        for report in reports
    )
    return 0 if all(good) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument("what", nargs="*", help='"install", or words that the case\'s name holds')
    parser.add_argument("--cases", default="pallas_kernels.aot.matrix", help="module with cases()")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="only these; repeatable")
    parser.add_argument("--all", action="store_true", help="all cases, not only the default ones")
    parser.add_argument("--write", type=Path, help="put the table into this page of the docs")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for one program")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="everything known, to stderr")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
